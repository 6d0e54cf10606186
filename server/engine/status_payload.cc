#include "server/engine/status_payload.h"

#include <charconv>
#include <string>
#include <vector>

#include "absl/strings/cord.h"

namespace sparsegdn::engine {
namespace {

constexpr char kTypeUrl[] = "sparsegdn/status-details";

}  // namespace

// The payload is three zero-terminated strings: field, reason, retry delay in ms (empty: none).
absl::Status WithDetails(absl::Status status, const StatusDetails& details) {
  if (status.ok()) return status;
  std::string payload = details.field;
  payload.push_back('\0');
  payload += details.reason;
  payload.push_back('\0');
  if (details.retry_after_ms) payload += std::to_string(*details.retry_after_ms);
  payload.push_back('\0');
  status.SetPayload(kTypeUrl, absl::Cord(payload));
  return status;
}

StatusDetails DetailsOf(const absl::Status& status) {
  StatusDetails details;
  const auto payload = status.GetPayload(kTypeUrl);
  if (!payload) return details;
  const std::string bytes(*payload);
  std::vector<std::string> parts;
  for (size_t begin = 0, end; (end = bytes.find('\0', begin)) != std::string::npos;
       begin = end + 1) {
    parts.push_back(bytes.substr(begin, end - begin));
  }
  if (parts.size() != 3) return details;
  details.field = parts[0];
  details.reason = parts[1];
  int64_t retry_ms = 0;
  const auto [end, error] =
      std::from_chars(parts[2].data(), parts[2].data() + parts[2].size(), retry_ms);
  if (error == std::errc() && !parts[2].empty()) details.retry_after_ms = retry_ms;
  return details;
}

}  // namespace sparsegdn::engine
