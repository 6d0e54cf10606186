// From ConnectOptions to a channel and to what every call carries.
#ifndef SPARSEGDN_CLIENT_SRC_CHANNEL_H_
#define SPARSEGDN_CLIENT_SRC_CHANNEL_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sparsegdn/client/client.h"

namespace sparsegdn::client {

// INVALID_ARGUMENT for options that contradict each other, FILE_IO for a file that cannot be read.
absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const ConnectOptions& options);

// The bearer token of the file, without white space around it. Read for each call, so that a
// rotated token is taken at once. INVALID_ARGUMENT (TOKEN_FILE) when it holds no token.
absl::StatusOr<std::string> ReadToken(const std::string& path);

// `status`, or UNAUTHENTICATED (TLS_HANDSHAKE) where gRPC says UNAVAILABLE because the two sides
// refused each other's certificates: no retry mends that.
absl::Status ExplainTls(absl::Status status, bool uses_tls);

}  // namespace sparsegdn::client

#endif  // SPARSEGDN_CLIENT_SRC_CHANNEL_H_
