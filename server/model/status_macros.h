// Early return on an error status.
#ifndef SPARSEGDN_SERVER_MODEL_STATUS_MACROS_H_
#define SPARSEGDN_SERVER_MODEL_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define SPARSEGDN_RETURN_IF_ERROR(expr)                  \
  do {                                                   \
    absl::Status sparsegdn_status = (expr);              \
    if (!sparsegdn_status.ok()) return sparsegdn_status; \
  } while (false)

#define SPARSEGDN_CONCAT_INNER(a, b) a##b
#define SPARSEGDN_CONCAT(a, b) SPARSEGDN_CONCAT_INNER(a, b)
#define SPARSEGDN_ASSIGN_OR_RETURN(lhs, expr) \
  SPARSEGDN_ASSIGN_OR_RETURN_INNER(SPARSEGDN_CONCAT(sparsegdn_or_, __LINE__), lhs, expr)
#define SPARSEGDN_ASSIGN_OR_RETURN_INNER(tmp, lhs, expr) \
  auto tmp = (expr);                                     \
  if (!tmp.ok()) return tmp.status();                    \
  lhs = std::move(tmp).value()

#endif  // SPARSEGDN_SERVER_MODEL_STATUS_MACROS_H_
