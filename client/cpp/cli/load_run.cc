#include "cli/load_run.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/time/time.h"
#include "cli/bench_common.h"
#include "cli/call_pool.h"

namespace sparsegdn::cli {
namespace {

using Clock = std::chrono::steady_clock;

Clock::duration Seconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}
double Between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

// False once `cancellation` has fired.
bool SleepUntil(Clock::time_point end, const client::Cancellation* cancellation) {
  constexpr auto kSlice = std::chrono::milliseconds(20);
  while (cancellation == nullptr || !cancellation->cancelled()) {
    const Clock::time_point now = Clock::now();
    if (now >= end) return true;
    std::this_thread::sleep_until(std::min<Clock::time_point>(end, now + kSlice));
  }
  return false;
}

// Watches one call's progress: notes its first frame, and holds a slow reader back.
class Reader {
 public:
  Reader(std::optional<double> bytes_per_second, std::optional<Clock::time_point> deadline,
         const client::Cancellation* cancellation)
      : bytes_per_second_(bytes_per_second), deadline_(deadline), cancellation_(cancellation) {}

  void OnProgress(const client::PrefillProgress& progress) {
    if (progress.stage != client::PrefillProgress::Stage::kStreaming) {
      first_frame_.reset();  // a call that runs again starts anew
      return;
    }
    if (!first_frame_) first_frame_ = Clock::now();
    if (!bytes_per_second_) return;
    Clock::time_point until =
        *first_frame_ + Seconds(static_cast<double>(progress.bytes_done) / *bytes_per_second_);
    if (deadline_) until = std::min(until, *deadline_);
    SleepUntil(until, cancellation_);
  }
  std::optional<Clock::time_point> first_frame() const { return first_frame_; }

 private:
  const std::optional<double> bytes_per_second_;
  const std::optional<Clock::time_point> deadline_;
  const client::Cancellation* const cancellation_;
  std::optional<Clock::time_point> first_frame_;
};

// What every call of a run shares.
struct Run {
  client::Client* client;
  client::CallOptions call;
  Clock::time_point start;
};

void RunCall(const Run& run, const Arrival& arrival, const v1::PrefillRequest& request,
             const std::shared_ptr<client::Cancellation>& own, CallRecord* record) {
  const Clock::time_point intended = run.start + Seconds(arrival.at), begin = Clock::now();
  client::CallOptions call = run.call;
  if (own != nullptr) call.cancellation = own.get();
  std::optional<Clock::time_point> deadline;
  if (arrival.deadline) {
    deadline = intended + Seconds(*arrival.deadline);
    // The caller's patience began with the arrival; a call that is late already still goes out.
    const absl::Duration left = absl::Seconds(std::max(Between(begin, *deadline), 0.001));
    call.timeout = std::min(left, call.timeout.value_or(left));
  }
  Reader reader(arrival.bytes_per_second, deadline, call.cancellation);
  call.progress = [&reader](const client::PrefillProgress& p) { reader.OnProgress(p); };
  const absl::StatusOr<client::PrefillOutcome> outcome = run.client->Prefill(request, call);
  const Clock::time_point end = Clock::now();
  record->lag = Between(intended, begin);
  record->status = outcome.status();
  record->end = Between(run.start, end);
  if (!outcome.ok()) return;
  record->snapshot = Between(intended, end);
  record->first_frame = Between(intended, reader.first_frame().value_or(end));
  record->queue = outcome->result.timings().queue_seconds();
}

}  // namespace

LoadResult RunLoad(client::Client* client, const client::CallOptions& call,
                   const v1::PrefillRequest& base, uint32_t vocab_size, const LoadOptions& options,
                   const std::vector<Arrival>& plan) {
  LoadResult result;
  result.calls.resize(plan.size());  // never grows: calls hold pointers into it
  const Run run{client, call, Clock::now() + std::chrono::milliseconds(10)};
  size_t arrived = 0;
  {
    CancelTimer timer(call.cancellation);
    CallPool pool(static_cast<size_t>(options.max_outstanding));
    for (; arrived < plan.size(); ++arrived) {
      const Arrival& arrival = plan[arrived];
      // Made before its time, so that making it delays nothing.
      auto request = std::make_shared<v1::PrefillRequest>(BenchRequest(
          base, arrival.length, static_cast<int64_t>(arrived), vocab_size, options.seed));
      if (arrival.priority) request->set_priority(static_cast<int32_t>(*arrival.priority));
      CallRecord* const record = &result.calls[arrived];
      record->length = arrival.length;
      record->priority = request->priority();
      record->slow = arrival.bytes_per_second.has_value();
      const Clock::time_point intended = run.start + Seconds(arrival.at);
      if (!SleepUntil(intended, call.cancellation)) break;
      auto own = arrival.cancel_after ? std::make_shared<client::Cancellation>() : nullptr;
      if (own != nullptr) timer.Add(intended + Seconds(*arrival.cancel_after), own);
      record->dropped = !pool.Submit([&run, &arrival, request = std::move(request), own, record] {
        RunCall(run, arrival, *request, own, record);
      });
    }
  }
  result.interrupted = call.cancellation != nullptr && call.cancellation->cancelled();
  result.calls.resize(arrived);
  result.wall_seconds = result.interrupted ? 0 : options.seconds;
  for (const CallRecord& record : result.calls) {
    result.wall_seconds = std::max(result.wall_seconds, record.end);
  }
  return result;
}

}  // namespace sparsegdn::cli
