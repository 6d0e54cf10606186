#include "server/service/context.h"

#include <chrono>
#include <cstdio>
#include <random>
#include <string_view>

namespace sparsegdn::service {
namespace {

using std::chrono::duration_cast;
using std::chrono::nanoseconds;
using std::chrono::system_clock;

constexpr int64_t kDeadlineSlackNs = 10'000'000;
constexpr int64_t kDeadlineSlackShare = 64;

bool IsLowerHex(std::string_view text) {
  return text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace

bool IsTraceparent(const std::string& text) {
  // version "-" trace-id "-" parent-id "-" flags; later versions may append "-...".
  const std::string_view t = text;
  if (t.size() < 55 || t.size() > 256 || t[2] != '-' || t[35] != '-' || t[52] != '-') return false;
  if (!IsLowerHex(t.substr(0, 2)) || t.substr(0, 2) == "ff") return false;
  if (t.size() > 55 && (t.substr(0, 2) == "00" || t[55] != '-')) return false;
  for (const char c : t) {
    if (c < 0x21 || c > 0x7e) return false;
  }
  const std::string_view trace = t.substr(3, 32), parent = t.substr(36, 16);
  return IsLowerHex(trace) && IsLowerHex(parent) && IsLowerHex(t.substr(53, 2)) &&
         trace.find_first_not_of('0') != trace.npos && parent.find_first_not_of('0') != parent.npos;
}

std::string TraceparentOf(const grpc::CallbackServerContext& context) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find("traceparent");
  if (found == metadata.end()) return "";
  std::string text(found->second.data(), found->second.size());
  return IsTraceparent(text) ? text : "";
}

std::optional<int64_t> DeadlineOf(const grpc::CallbackServerContext& context,
                                  const engine::Clock& clock) {
  const system_clock::time_point deadline = context.deadline();
  if (deadline == system_clock::time_point::max()) return std::nullopt;
  const auto left = deadline - system_clock::now();
  // A deadline further away than this is none; it also keeps the sum below in range.
  if (left > std::chrono::hours(24 * 365)) return std::nullopt;
  return clock.NowNs() + duration_cast<nanoseconds>(left).count();
}

bool CallDeadline::Passed() const {
  if (!deadline_ns_) return false;
  const int64_t slack = kDeadlineSlackNs + (*deadline_ns_ - arrival_ns_) / kDeadlineSlackShare;
  return clock_->NowNs() + slack >= *deadline_ns_;
}

absl::Status CancelStatus(bool deadline_passed) {
  if (deadline_passed) return absl::DeadlineExceededError("the deadline passed during the call");
  return absl::CancelledError("the client went away");
}

std::string NewRequestId() {
  thread_local std::mt19937_64 generator{std::random_device{}()};
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(generator()));
  return text;
}

}  // namespace sparsegdn::service
