// Making and translating statuses, inside the client.
#ifndef SPARSEGDN_CLIENT_SRC_ERRORS_H_
#define SPARSEGDN_CLIENT_SRC_ERRORS_H_

#include <grpcpp/support/status.h>

#include <string>

#include "absl/status/status.h"

namespace sparsegdn::client {

// A status of this library's own, with the details that DetailsOf reads back.
absl::Status MakeError(absl::StatusCode code, const std::string& reason, const std::string& field,
                       const std::string& message);

inline absl::Status DataLoss(const std::string& reason, const std::string& field,
                             const std::string& message) {
  return MakeError(absl::StatusCode::kDataLoss, reason, field, message);
}

// FILE_IO with the code that suits `error_number` (ENOSPC is RESOURCE_EXHAUSTED).
absl::Status FileError(const std::string& action, const std::string& path, int error_number);

absl::Status FromGrpc(const grpc::Status& status);

}  // namespace sparsegdn::client

#endif  // SPARSEGDN_CLIENT_SRC_ERRORS_H_
