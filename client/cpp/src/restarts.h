// Running a prefill again from its start when the server that ran it is gone.
#ifndef SPARSEGDN_CLIENT_SRC_RESTARTS_H_
#define SPARSEGDN_CLIENT_SRC_RESTARTS_H_

#include <functional>

#include "absl/status/statusor.h"
#include "sparsegdn/client/client.h"

namespace sparsegdn::client {

// `once` until it does not end with UNAVAILABLE (or with a CANCELLED that is not ours), at most
// options.restarts + 1 times and within options.timeout in all. Waits between for what the server
// asks, else 0.1 s, doubled up to 2 s.
absl::StatusOr<PrefillOutcome> WithRestarts(
    const CallOptions& options,
    const std::function<absl::StatusOr<PrefillOutcome>(const CallOptions&)>& once);

}  // namespace sparsegdn::client

#endif  // SPARSEGDN_CLIENT_SRC_RESTARTS_H_
