// Refusals with machine-readable details, in one line each. Internal to the engine.
#ifndef SPARSEGDN_SERVER_ENGINE_ERRORS_H_
#define SPARSEGDN_SERVER_ENGINE_ERRORS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "server/engine/status_payload.h"

namespace sparsegdn::engine {

// A status whose message is "field: message" (or the message alone without a field) and whose
// details carry field, reason and retry delay.
inline absl::Status Refuse(absl::StatusCode code, const std::string& field,
                           const std::string& reason, const std::string& message,
                           std::optional<int64_t> retry_after_ms = std::nullopt) {
  return WithDetails(absl::Status(code, field.empty() ? message : field + ": " + message),
                     StatusDetails{field, reason, retry_after_ms});
}

// For what another replica can do now, or this server after its restart.
inline constexpr int64_t kReplicaRetryMs = 1000;

inline absl::Status Invalid(const std::string& field, const std::string& message) {
  return Refuse(absl::StatusCode::kInvalidArgument, field, "INVALID_FIELD", message);
}

// Retrying cannot help: no retry delay.
inline absl::Status NeverFits(const std::string& field, const std::string& message) {
  return Refuse(absl::StatusCode::kResourceExhausted, field, "NEVER_FITS", message);
}

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_ERRORS_H_
