#include "src/restarts.h"

#include <algorithm>

#include "absl/time/clock.h"
#include "sparsegdn/client/status.h"

namespace sparsegdn::client {
namespace {

constexpr absl::Duration kFirstWait = absl::Milliseconds(100), kLastWait = absl::Seconds(2);

// A server that shuts down resets the streams that reach it last: CANCELLED, though nobody here
// cancelled.
bool IsGone(const absl::Status& status, const Cancellation* cancellation) {
  if (absl::IsUnavailable(status)) return true;
  return absl::IsCancelled(status) && (cancellation == nullptr || !cancellation->cancelled());
}

// False when the call was cancelled meanwhile.
bool Wait(absl::Duration duration, const Cancellation* cancellation) {
  const absl::Time end = absl::Now() + duration;
  while (absl::Now() < end) {
    if (cancellation != nullptr && cancellation->cancelled()) return false;
    absl::SleepFor(std::min(end - absl::Now(), absl::Milliseconds(20)));
  }
  return cancellation == nullptr || !cancellation->cancelled();
}

}  // namespace

absl::StatusOr<PrefillOutcome> WithRestarts(
    const CallOptions& options,
    const std::function<absl::StatusOr<PrefillOutcome>(const CallOptions&)>& once) {
  const absl::Time end =
      options.timeout.has_value() ? absl::Now() + *options.timeout : absl::InfiniteFuture();
  absl::Duration wait = kFirstWait;
  for (int left = options.restarts;; --left) {
    CallOptions attempt = options;
    if (options.timeout.has_value()) attempt.timeout = end - absl::Now();
    absl::StatusOr<PrefillOutcome> outcome = once(attempt);
    if (left <= 0 || !IsGone(outcome.status(), options.cancellation)) return outcome;
    const absl::Duration asked = DetailsOf(outcome.status()).retry_after.value_or(wait);
    const absl::Duration pause = std::clamp(asked, kFirstWait, kLastWait);
    if (absl::Now() + pause >= end) return outcome;
    if (!Wait(pause, options.cancellation))
      return absl::CancelledError("cancelled by this process");
    wait = std::min(2 * wait, kLastWait);
  }
}

}  // namespace sparsegdn::client
