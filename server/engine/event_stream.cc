#include "server/engine/event_stream.h"

#include <utility>

#include "server/engine/errors.h"

namespace sparsegdn::engine {
namespace {

int64_t FrameBytes(const Event& event) {
  const TensorChunk* chunk = std::get_if<TensorChunk>(&event);
  return chunk == nullptr ? 0 : static_cast<int64_t>(chunk->data->size());
}

absl::Status CancelledStatus(EventStream::CancelReason reason) {
  return reason == EventStream::CancelReason::kDeadline
             ? Refuse(absl::StatusCode::kDeadlineExceeded, "", "DEADLINE_EXCEEDED",
                      "the deadline passed before the snapshot was read")
             : Refuse(absl::StatusCode::kCancelled, "", "CANCELLED", "the caller cancelled");
}

}  // namespace

void Waker::Wake() {
  {
    std::lock_guard lock(mutex_);
    woken_ = true;
  }
  changed_.notify_one();
}

void Waker::WaitFor(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, timeout, [this] { return woken_; });
  woken_ = false;
}

EventStream::~EventStream() {
  std::lock_guard lock(mutex_);
  DropEventsLocked();
}

void EventStream::DropEventsLocked() {
  events_.clear();
  shared_->buffered_bytes.fetch_sub(buffered_bytes_.exchange(0, std::memory_order_relaxed),
                                    std::memory_order_relaxed);
}

void EventStream::Push(Event event) {
  const int64_t bytes = FrameBytes(event);
  {
    std::lock_guard lock(mutex_);
    if (status_ || cancel_reason() != CancelReason::kNone) return;
    events_.push_back(std::move(event));
    buffered_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    shared_->buffered_bytes.fetch_add(bytes, std::memory_order_relaxed);
  }
  Notify();
}

void EventStream::Close(absl::Status status) {
  {
    std::lock_guard lock(mutex_);
    // An error may still replace the success of a stream that was not read to its end.
    if (status_ && (!status_->ok() || status.ok() || events_.empty())) return;
    // A cancel that came between the writer's last look and here dropped the result.
    if (status.ok() && cancel_reason() != CancelReason::kNone) {
      status = CancelledStatus(cancel_reason());
    }
    if (!status.ok()) DropEventsLocked();
    status_ = std::move(status);
  }
  Notify();
}

std::optional<Event> EventStream::Pop() {
  std::optional<Event> event;
  {
    std::lock_guard lock(mutex_);
    if (events_.empty()) return std::nullopt;
    event = std::move(events_.front());
    events_.pop_front();
    const int64_t bytes = FrameBytes(*event);
    buffered_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
    shared_->buffered_bytes.fetch_sub(bytes, std::memory_order_relaxed);
    last_pop_ns_.store(shared_->clock->NowNs(), std::memory_order_relaxed);
  }
  if (paused_.load(std::memory_order_relaxed)) shared_->waker.Wake();
  return event;
}

std::optional<absl::Status> EventStream::status() const {
  std::lock_guard lock(mutex_);
  if (!events_.empty()) return std::nullopt;
  return status_;
}

bool EventStream::finished() const {
  std::lock_guard lock(mutex_);
  return status_.has_value() && events_.empty();
}

void EventStream::SetReadyCallback(std::function<void()> ready) {
  {
    std::lock_guard lock(callback_mutex_);
    ready_ = ready ? std::make_shared<std::function<void()>>(std::move(ready)) : nullptr;
  }
  bool news;
  {
    std::lock_guard lock(mutex_);
    news = !events_.empty() || status_.has_value();
  }
  if (news) Notify();
}

void EventStream::Cancel(CancelReason reason) {
  {
    std::lock_guard lock(mutex_);
    if (cancel_reason() != CancelReason::kNone) return;
    // After the end only a reader with events still to take is cut short.
    if (status_.has_value() && events_.empty()) return;
    cancel_.store(reason, std::memory_order_release);
    DropEventsLocked();
    if (status_ && status_->ok()) status_ = CancelledStatus(reason);
  }
  shared_->waker.Wake();  // the executor ends the call and notifies
}

void EventStream::Notify() {
  std::lock_guard lock(callback_mutex_);
  const std::shared_ptr<std::function<void()>> ready = ready_;
  if (ready) (*ready)();
}

CallHandle::~CallHandle() {
  stream_->SetReadyCallback(nullptr);
  stream_->Cancel(EventStream::CancelReason::kAbandoned);
}

}  // namespace sparsegdn::engine
