// Who calls: the client certificate that TLS verified, or the bearer token.
#ifndef SPARSEGDN_SERVER_SERVICE_AUTH_H_
#define SPARSEGDN_SERVER_SERVICE_AUTH_H_

#include <grpcpp/server_context.h>

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sparsegdn::service {

class TokenFile;

struct Caller {
  // Absent where authentication is off: then the request's own field is believed.
  std::optional<std::string> tenant;
};

// First in every method of PrefillService, before anything of the message is looked at. `tokens`
// may be null: no token is asked for. With tokens, a call needs `authorization: Bearer TOKEN`, and
// the token's tenant is the caller's, also beside a client certificate. Without, a verified
// certificate gives its first subject alternative name, or its common name. UNAUTHENTICATED, with
// reason TOKEN_MISSING, TOKEN_MALFORMED, TOKEN_UNKNOWN or NO_PEER_NAME.
absl::StatusOr<Caller> Authenticate(const grpc::CallbackServerContext& context,
                                    const TokenFile* tokens);

// Whose call it is. `field` counts only where authentication is off, so that no client can name
// itself after another.
absl::StatusOr<std::string> TenantOf(const Caller& caller, const std::string& field);

// True when the call came over a Unix-domain socket.
bool IsLocalPeer(const grpc::CallbackServerContext& context);

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_AUTH_H_
