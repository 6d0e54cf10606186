#include "server/service/auth.h"

#include <memory>
#include <string_view>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/engine/status_payload.h"
#include "server/engine/types.h"
#include "server/service/status.h"
#include "server/service/tokens.h"

namespace sparsegdn::service {
namespace {

constexpr char kHeader[] = "authorization";
constexpr std::string_view kScheme = "bearer ";

absl::Status Unauthenticated(const char* reason, const char* message) {
  return engine::WithDetails(absl::UnauthenticatedError(message), {"", reason, std::nullopt});
}

absl::StatusOr<std::string> TenantOfToken(const grpc::CallbackServerContext& context,
                                          const TokenFile& tokens) {
  const auto [first, last] = context.client_metadata().equal_range(kHeader);
  if (first == last) {
    return Unauthenticated("TOKEN_MISSING",
                           "this server wants a bearer token (authorization: Bearer TOKEN), the "
                           "call has none");
  }
  const std::string_view value(first->second.data(), first->second.size());
  const bool bearer =
      value.size() > kScheme.size() &&
      absl::EqualsIgnoreCase(std::string(value.substr(0, kScheme.size())), std::string(kScheme));
  if (!bearer || std::next(first) != last) {
    return Unauthenticated("TOKEN_MALFORMED",
                           "authorization must be there once, as \"Bearer TOKEN\"");
  }
  std::optional<std::string> tenant = tokens.table()->TenantOf(value.substr(kScheme.size()));
  if (!tenant) return Unauthenticated("TOKEN_UNKNOWN", "the bearer token is not known here");
  return *std::move(tenant);
}

}  // namespace

absl::StatusOr<Caller> Authenticate(const grpc::CallbackServerContext& context,
                                    const TokenFile* tokens) {
  if (tokens != nullptr) {
    absl::StatusOr<std::string> tenant = TenantOfToken(context, *tokens);
    if (!tenant.ok()) return tenant.status();
    return Caller{*std::move(tenant)};
  }
  const std::shared_ptr<const grpc::AuthContext> peer = context.auth_context();
  if (peer == nullptr || !peer->IsPeerAuthenticated()) return Caller{};
  const std::vector<grpc::string_ref> names = peer->GetPeerIdentity();
  if (names.empty() || names.front().empty()) {
    return Unauthenticated(
        "NO_PEER_NAME",
        "the client certificate has neither a subject alternative name nor a common name");
  }
  std::string tenant(names.front().data(), names.front().size());
  if (tenant.size() > engine::kMaxTenantBytes) {
    return Unauthenticated("PEER_NAME_TOO_LONG",
                           "the client certificate's name has more than 256 bytes");
  }
  return Caller{std::move(tenant)};
}

absl::StatusOr<std::string> TenantOf(const Caller& caller, const std::string& field) {
  if (caller.tenant) return *caller.tenant;
  if (field.size() <= engine::kMaxTenantBytes) return field;
  return InvalidField("tenant", "TENANT_TOO_LONG",
                      absl::StrCat("tenant has ", field.size(), " bytes, wanted at most ",
                                   engine::kMaxTenantBytes));
}

bool IsLocalPeer(const grpc::CallbackServerContext& context) {
  return context.peer().rfind("unix:", 0) == 0;
}

}  // namespace sparsegdn::service
