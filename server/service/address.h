// host:port texts of the listeners.
#ifndef SPARSEGDN_SERVER_SERVICE_ADDRESS_H_
#define SPARSEGDN_SERVER_SERVICE_ADDRESS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sparsegdn::service {

struct HostPort {
  std::string host;  // without brackets; empty: every interface
  int port = 0;
};

// "127.0.0.1:50051", "[::1]:0", ":9464", "localhost:80". INVALID_ARGUMENT names `flag`.
absl::StatusOr<HostPort> ParseHostPort(const std::string& text, const std::string& flag);

std::string ToText(const HostPort& address);

// Binds and closes a TCP socket, to say why a listener could not: ALREADY_EXISTS when the port is
// in use, INVALID_ARGUMENT when the host does not resolve, UNAVAILABLE otherwise.
absl::Status ProbeBind(const HostPort& address, const std::string& flag);

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_ADDRESS_H_
