// Where calls go: one address, a name, or a static list of servers, and what gRPC is told about it.
#ifndef SPARSEGDN_CLIENT_SRC_TARGETS_H_
#define SPARSEGDN_CLIENT_SRC_TARGETS_H_

#include <string>

#include "absl/status/statusor.h"

namespace sparsegdn::client {

// "host:port" becomes dns:///host:port, a gRPC URI stays, and "10.0.0.1:8500,10.0.0.2:8500" (also
// localhost and [::1]) becomes a static list. INVALID_ARGUMENT for a list with a name in it, which
// gRPC would not resolve, or of IPv4 and IPv6 together.
absl::StatusOr<std::string> TargetUri(const std::string& target);

// Retries of calls that no server began to answer; over a static list also health checking, so that
// a server that loads or drains gets no calls. Empty: nothing to say.
std::string ServiceConfig(const std::string& uri, int max_attempts);

}  // namespace sparsegdn::client

#endif  // SPARSEGDN_CLIENT_SRC_TARGETS_H_
