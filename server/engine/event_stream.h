// The events of one call between the executor, which pushes, and the reader, which pops. Counts
// the frame bytes that wait to be read, of this call and over all calls, so that the engine can
// pause a call whose reader is slow.
#ifndef SPARSEGDN_SERVER_ENGINE_EVENT_STREAM_H_
#define SPARSEGDN_SERVER_ENGINE_EVENT_STREAM_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "absl/status/status.h"
#include "server/engine/engine.h"
#include "server/engine/types.h"

namespace sparsegdn::engine {

// Wakes the executor. A leaf lock: nothing is called while it is held.
class Waker {
 public:
  void Wake();
  // Until Wake, or `timeout` of real time. A Wake before the wait is not lost.
  void WaitFor(std::chrono::milliseconds timeout);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool woken_ = false;
};

// Shared by every stream of an engine; outlives it while readers hold calls.
struct StreamShared {
  std::atomic<int64_t> buffered_bytes{0};
  Waker waker;
  Clock* clock = nullptr;
};

// Thread-safe. Lock order: callback lock, then state lock, then the waker's. The callback runs
// under the callback lock, so that after SetReadyCallback returned on another thread the old
// callback neither runs nor will run.
class EventStream {
 public:
  enum class CancelReason { kNone, kCancelled, kDeadline, kAbandoned };

  explicit EventStream(std::shared_ptr<StreamShared> shared) : shared_(std::move(shared)) {}
  ~EventStream();
  EventStream(const EventStream&) = delete;
  EventStream& operator=(const EventStream&) = delete;

  // Writer side. Events after Close or Cancel are dropped.
  void Push(Event event);
  // The end. With an error, events that wait are dropped, because nothing is valid before Result.
  void Close(absl::Status status);
  // Runs the callback.
  void Notify();

  // Reader side.
  std::optional<Event> Pop();
  std::optional<absl::Status> status() const;
  void SetReadyCallback(std::function<void()> ready);
  // Never runs the callback: the caller may hold locks that the callback takes.
  void Cancel(CancelReason reason);

  CancelReason cancel_reason() const { return cancel_.load(std::memory_order_acquire); }
  int64_t buffered_bytes() const { return buffered_bytes_.load(std::memory_order_relaxed); }
  // When the reader last took an event.
  int64_t last_pop_ns() const { return last_pop_ns_.load(std::memory_order_relaxed); }
  // Wake the executor at each pop; set while the call is paused.
  void set_paused(bool paused) { paused_.store(paused, std::memory_order_relaxed); }
  // Closed, and nothing waits to be read.
  bool finished() const;

 private:
  void DropEventsLocked();

  const std::shared_ptr<StreamShared> shared_;
  std::atomic<int64_t> buffered_bytes_{0};
  std::atomic<int64_t> last_pop_ns_{0};
  std::atomic<CancelReason> cancel_{CancelReason::kNone};
  std::atomic<bool> paused_{false};

  mutable std::mutex mutex_;
  std::deque<Event> events_;
  std::optional<absl::Status> status_;

  std::recursive_mutex callback_mutex_;  // recursive: the callback may replace itself
  std::shared_ptr<std::function<void()>> ready_;
};

// The reader's handle: dropping it before the end cancels the call.
class CallHandle final : public PrefillCall {
 public:
  explicit CallHandle(std::shared_ptr<EventStream> stream) : stream_(std::move(stream)) {}
  ~CallHandle() override;
  std::optional<Event> TryPop() override { return stream_->Pop(); }
  std::optional<absl::Status> status() const override { return stream_->status(); }
  void SetReadyCallback(std::function<void()> ready) override {
    stream_->SetReadyCallback(std::move(ready));
  }
  void Cancel(bool deadline) override {
    stream_->Cancel(deadline ? EventStream::CancelReason::kDeadline
                             : EventStream::CancelReason::kCancelled);
  }

 private:
  const std::shared_ptr<EventStream> stream_;
};

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_EVENT_STREAM_H_
