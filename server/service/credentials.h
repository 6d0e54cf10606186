// The transport's credentials: none, TLS, or TLS with client certificates.
#ifndef SPARSEGDN_SERVER_SERVICE_CREDENTIALS_H_
#define SPARSEGDN_SERVER_SERVICE_CREDENTIALS_H_

#include <grpcpp/security/server_credentials.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/service/config.h"

namespace sparsegdn::service {

// INVALID_ARGUMENT names the flag whose file is no PEM file, or says that key and certificate do
// not belong together. New connections use what the files hold now: they are looked at every
// auth_refresh_seconds, and a rotated pair is taken without a restart.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeCredentials(
    const ServerConfig& config);

// Whether the files could be served at this moment. For a log line after a rotation.
absl::Status CheckTlsFiles(const ServerConfig& config);

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_CREDENTIALS_H_
