#include "src/targets.h"

#include <arpa/inet.h>

#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "src/errors.h"

namespace sparsegdn::client {
namespace {

absl::Status BadList(const std::string& item) {
  return MakeError(absl::StatusCode::kInvalidArgument, "TARGET_LIST", "target",
                   absl::StrCat("target has \"", item,
                                "\" in a list, wanted addresses of one family with a port, such as "
                                "10.0.0.1:8500; a name stands alone"));
}

// AF_INET or AF_INET6 of "address:port"; 0 when it is neither.
int FamilyOf(const std::string& item) {
  const size_t colon = item.rfind(':');
  if (colon == std::string::npos || colon + 1 == item.size()) return 0;
  const std::string host = item.substr(0, colon);
  in_addr v4;
  in6_addr v6;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return AF_INET;
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed && inet_pton(AF_INET6, host.substr(1, host.size() - 2).c_str(), &v6) == 1) {
    return AF_INET6;
  }
  return 0;
}

}  // namespace

absl::StatusOr<std::string> TargetUri(const std::string& target) {
  const bool has_scheme = target.find("://") != std::string::npos ||
                          absl::StartsWith(target, "unix:") || absl::StartsWith(target, "dns:") ||
                          absl::StartsWith(target, "ipv4:") || absl::StartsWith(target, "ipv6:");
  if (has_scheme) return target;
  // A bare host:port would be resolved the same way, but by gRPC's default, which has changed.
  if (target.find(',') == std::string::npos) return absl::StrCat("dns:///", target);
  std::vector<std::string> items = absl::StrSplit(target, ',');
  int family = 0;
  for (std::string& item : items) {
    if (absl::StartsWith(item, "localhost:")) item = absl::StrCat("127.0.0.1", item.substr(9));
    const int its = FamilyOf(item);
    if (its == 0 || (family != 0 && its != family)) return BadList(item);
    family = its;
  }
  return absl::StrCat(family == AF_INET ? "ipv4:" : "ipv6:", absl::StrJoin(items, ","));
}

std::string ServiceConfig(const std::string& uri, int max_attempts) {
  std::vector<std::string> parts;
  if (max_attempts > 1) {
    // GetModelInfo is left out: WaitUntilReady asks again by itself.
    parts.push_back(absl::StrFormat(
        R"("methodConfig": [{"name": [
            {"service": "sparsegdn.v1.PrefillService", "method": "Prefill"},
            {"service": "sparsegdn.v1.PrefillService", "method": "ImportSnapshot"},
            {"service": "sparsegdn.v1.PrefillService", "method": "ReleaseSnapshot"}],
          "retryPolicy": {"maxAttempts": %d, "initialBackoff": "0.1s", "maxBackoff": "1s",
            "backoffMultiplier": 3, "retryableStatusCodes": ["UNAVAILABLE"]}}])",
        max_attempts));
  }
  if (uri.find(',') != std::string::npos) {
    parts.push_back(R"("healthCheckConfig": {"serviceName": ""})");
  }
  return parts.empty() ? "" : absl::StrCat("{", absl::StrJoin(parts, ", "), "}");
}

}  // namespace sparsegdn::client
