// How requests end: reaped at a step boundary, failed, or finished with a result.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/engine_impl.h"
#include "server/engine/errors.h"

namespace sparsegdn::engine {
namespace {

constexpr double kSecondsPerNs = 1e-9;

absl::Status SlowReader(int64_t bytes, double timeout_seconds) {
  return Refuse(absl::StatusCode::kResourceExhausted, "", "SLOW_READER",
                absl::StrCat("the reader took nothing for ", timeout_seconds, " s while ", bytes,
                             " bytes waited for it"));
}

bool IsStalled(const EventStream& stream, int64_t since_ns, int64_t now, double timeout_seconds) {
  const int64_t last = std::max(since_ns, stream.last_pop_ns());
  return stream.buffered_bytes() > 0 &&
         static_cast<double>(now - last) * kSecondsPerNs > timeout_seconds;
}

}  // namespace

bool EngineImpl::Reap(const EngineLimits& limits) {
  const int64_t now = clock_->NowNs();
  bool progress = ReapQueue(now);
  progress |= ReapRunning(now, limits);
  progress |= ReapStreaming(now, limits);
  snapshots_.Sweep();
  imports_.Sweep(now, limits.slow_reader_timeout_seconds);
  return progress;
}

// Why the request must not go on, or OK.
absl::Status EngineImpl::StopReason(const Request& request, int64_t now) const {
  const auto expired = [] {
    return Refuse(absl::StatusCode::kDeadlineExceeded, "", "DEADLINE_EXCEEDED",
                  "the deadline passed before the snapshot was done");
  };
  switch (request.stream->cancel_reason()) {
    case EventStream::CancelReason::kDeadline:
      return expired();
    case EventStream::CancelReason::kCancelled:
    case EventStream::CancelReason::kAbandoned:
      return Refuse(absl::StatusCode::kCancelled, "", "CANCELLED", "the caller cancelled");
    case EventStream::CancelReason::kNone:
      break;
  }
  const std::optional<int64_t> deadline = request.plan.request.deadline_ns;
  if (deadline && *deadline <= now) return expired();
  if (cancel_all_) {
    return Refuse(absl::StatusCode::kUnavailable, "", "DRAINING",
                  "the server stopped before the request was done", kReplicaRetryMs);
  }
  return absl::OkStatus();
}

bool EngineImpl::ReapQueue(int64_t now) {
  std::vector<std::pair<RequestPtr, absl::Status>> out;
  {
    std::lock_guard lock(queue_mutex_);
    for (RequestPtr& request : waiting_) {
      absl::Status reason = StopReason(*request, now);
      if (reason.ok()) continue;
      CountQueued(*request, -1);
      out.emplace_back(std::move(request), std::move(reason));
    }
    std::erase(waiting_, nullptr);
  }
  for (auto& [request, reason] : out) {
    Stop(*request, std::move(reason), EngineObserver::Stage::kQueued);
  }
  return !out.empty();
}

bool EngineImpl::ReapRunning(int64_t now, const EngineLimits& limits) {
  const size_t before = running_.size();
  for (RequestPtr& request : running_) {
    absl::Status reason = StopReason(*request, now);
    if (reason.ok() && request->paused_ns >= 0 &&
        IsStalled(*request->stream, request->paused_ns, now, limits.slow_reader_timeout_seconds)) {
      reason = SlowReader(request->stream->buffered_bytes(), limits.slow_reader_timeout_seconds);
    }
    if (reason.ok()) continue;
    Stop(*request, std::move(reason), EngineObserver::Stage::kComputing);
    request.reset();
  }
  std::erase(running_, nullptr);
  return running_.size() != before;
}

bool EngineImpl::ReapStreaming(int64_t now, const EngineLimits& limits) {
  const auto gone = [&](Streaming& s) {
    if (s.stream->cancel_reason() != EventStream::CancelReason::kNone) {
      observer_->OnCancelled(EngineObserver::Stage::kStreaming, s.computed_tokens);
      s.stream->Notify();
      return true;
    }
    if (IsStalled(*s.stream, s.since_ns, now, limits.slow_reader_timeout_seconds)) {
      const int64_t bytes = s.stream->buffered_bytes();
      observer_->OnSlowReader(bytes);
      observer_->OnCancelled(EngineObserver::Stage::kStreaming, s.computed_tokens);
      s.stream->Close(SlowReader(bytes, limits.slow_reader_timeout_seconds));
      return true;
    }
    return s.stream->finished();
  };
  return std::erase_if(streaming_, gone) > 0;
}

void EngineImpl::Stop(Request& request, absl::Status status, EngineObserver::Stage stage) {
  if (stage == EngineObserver::Stage::kQueued &&
      status.code() == absl::StatusCode::kDeadlineExceeded) {
    observer_->OnExpiredInQueue();
  } else {
    observer_->OnCancelled(stage, request.computed_tokens);
  }
  Fail(request, std::move(status));
}

void EngineImpl::ReleaseSlot(Request& request) {
  if (request.slot < 0) return;  // also on a thread that submits, which may not ask the runner
  runner_->Release(std::exchange(request.slot, -1));
  PublishGauges();
}

// The gauges no longer count the request when its reader sees the end.
void EngineImpl::Close(Request& request, absl::Status status) {
  if (request.admitted) running_count_.fetch_sub(1, std::memory_order_relaxed);
  {
    std::lock_guard lock(queue_mutex_);
    tenants_.Leave(request.plan.request.tenant, std::ssize(request.plan.request.tokens),
                   request.admitted);
  }
  request.stream->Close(std::move(status));
  active_.fetch_sub(1, std::memory_order_acq_rel);
}

void EngineImpl::Fail(Request& request, absl::Status status) {
  ReleaseSlot(request);
  request.builder.reset();
  request.reservation.reset();
  Close(request, std::move(status));
}

void EngineImpl::FailDead() {
  std::vector<RequestPtr> waiting;
  {
    std::lock_guard lock(queue_mutex_);
    waiting.swap(waiting_);
    waiting_tokens_ = waiting_bytes_ = 0;
  }
  for (const RequestPtr& request : running_) {
    Fail(*request, Refuse(absl::StatusCode::kInternal, "", "DEVICE_LOST",
                          "the device failed while the request ran"));
  }
  running_.clear();
  for (const RequestPtr& request : waiting) {
    Fail(*request, Refuse(absl::StatusCode::kUnavailable, "", "DEVICE_LOST",
                          "the device failed before the request ran"));
  }
}

Result EngineImpl::MakeResult(const Request& request, uint64_t digest) const {
  const RequestPlan& plan = request.plan;
  const int64_t now = clock_->NowNs();
  Result result;
  result.effective_budget = plan.budget;
  result.digest = digest;
  result.next_token = request.builder->next_token();
  result.snapshot_position = plan.snapshot_position;
  result.usage.prompt_tokens = plan.prompt_tokens;
  result.usage.computed_tokens = request.computed_tokens;
  result.usage.cached_tokens = request.start_position;
  result.usage.events_total = request.computed_tokens * std::ssize(request.selected);
  result.retained_layers = layout_.linear_layers;
  const size_t pairs = static_cast<size_t>(layout_.pairs);
  const double tokens = static_cast<double>(std::max<int64_t>(1, request.computed_tokens));
  for (size_t layer = 0; layer < layout_.linear_layers.size(); ++layer) {
    std::vector<float>& row = result.retained.emplace_back();
    for (size_t p = 0; p < pairs; ++p) {
      const int64_t selected = request.selected[layer * pairs + p];
      result.usage.events_selected += selected;
      row.push_back(static_cast<float>(static_cast<double>(selected) / tokens));
    }
  }
  result.timings.queue_seconds =
      static_cast<double>(request.admitted_ns - request.arrival_ns) * kSecondsPerNs;
  result.timings.selection_seconds = request.selection_ns * kSecondsPerNs;
  result.timings.gdn_core_seconds = request.gdn_core_ns * kSecondsPerNs;
  result.timings.engine_seconds = static_cast<double>(now - request.admitted_ns) * kSecondsPerNs;
  result.timings.total_seconds = static_cast<double>(now - request.arrival_ns) * kSecondsPerNs;
  return result;
}

void EngineImpl::Finish(Request& request) {
  ReleaseSlot(request);
  if (absl::Status reason = StopReason(request, clock_->NowNs()); !reason.ok()) {
    return Stop(request, std::move(reason), EngineObserver::Stage::kComputing);
  }
  const absl::StatusOr<uint64_t> digest = request.builder->Finish();
  if (!digest.ok()) {
    if (digest.status().code() == absl::StatusCode::kDataLoss) observer_->OnNonFinite();
    return Fail(request, digest.status());
  }
  Result result = MakeResult(request, *digest);
  if (request.reservation) {
    absl::StatusOr<std::string> id = snapshots_.Commit(
        std::move(request.reservation), request.builder->TakeKept(), request.plan.ttl_seconds);
    if (!id.ok()) return Fail(request, id.status());
    checker_.Seal(*id);
    result.snapshot_id = *std::move(id);
    result.snapshot_ttl_seconds = request.plan.ttl_seconds;
  }
  std::vector<int64_t> bytes(4, 0);
  for (const TensorInfo& tensor : request.plan.manifest->tensors) {
    bytes[static_cast<size_t>(tensor.dtype)] += static_cast<int64_t>(tensor.bytes);
  }
  for (size_t dtype = 0; dtype < bytes.size(); ++dtype) {
    if (bytes[dtype] > 0) {
      observer_->OnSnapshotBytes(static_cast<ExportDType>(dtype), bytes[dtype]);
    }
  }
  observer_->OnComputed(result.timings.engine_seconds, result);
  observer_->OnSnapshotReady(result.timings.total_seconds);
  streaming_.push_back({request.stream, clock_->NowNs(), request.computed_tokens});
  request.stream->Push(std::move(result));
  Close(request, absl::OkStatus());
}

}  // namespace sparsegdn::engine
