// Machine-readable details on an absl::Status: which field, why, and when to retry. The service
// turns them into google.rpc details (service/status.cc); tests read them directly.
#ifndef SPARSEGDN_SERVER_ENGINE_STATUS_PAYLOAD_H_
#define SPARSEGDN_SERVER_ENGINE_STATUS_PAYLOAD_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace sparsegdn::engine {

struct StatusDetails {
  std::string field;   // e.g. "token_ids[17]", empty when none applies
  std::string reason;  // stable UPPER_SNAKE_CASE, e.g. "QUEUE_FULL"
  std::optional<int64_t> retry_after_ms;
};

absl::Status WithDetails(absl::Status status, const StatusDetails& details);
StatusDetails DetailsOf(const absl::Status& status);

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_STATUS_PAYLOAD_H_
