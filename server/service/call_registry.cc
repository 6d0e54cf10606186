#include "server/service/call_registry.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace sparsegdn::service {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

CallRegistry::CallRegistry(std::function<std::chrono::nanoseconds()> timeout)
    : timeout_(std::move(timeout)), thread_([this] { Watch(); }) {}

CallRegistry::~CallRegistry() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_changed_.notify_all();
  thread_.join();
}

void CallRegistry::Add(std::shared_ptr<OpenCall> call) {
  std::lock_guard lock(mutex_);
  const OpenCall* key = call.get();
  calls_.emplace(key, std::move(call));
}

void CallRegistry::Remove(const OpenCall* call) {
  std::shared_ptr<OpenCall> dropped;  // destroyed outside the lock
  std::lock_guard lock(mutex_);
  auto found = calls_.find(call);
  if (found == calls_.end()) return;
  dropped = std::move(found->second);
  calls_.erase(found);
  if (calls_.empty()) idle_.notify_all();
}

int64_t CallRegistry::size() const {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(calls_.size());
}

bool CallRegistry::WaitIdle(steady_clock::time_point deadline) const {
  std::unique_lock lock(mutex_);
  return idle_.wait_until(lock, deadline, [this] { return calls_.empty(); });
}

void CallRegistry::Watch() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    const std::chrono::nanoseconds timeout = timeout_();
    const auto pause =
        std::clamp<std::chrono::nanoseconds>(timeout / 2, milliseconds(20), milliseconds(1000));
    stop_changed_.wait_for(lock, pause, [this] { return stop_; });
    if (stop_) return;
    std::vector<std::shared_ptr<OpenCall>> calls;
    calls.reserve(calls_.size());
    for (const auto& entry : calls_) calls.push_back(entry.second);
    lock.unlock();
    for (const auto& call : calls) call->CutIfStalled(steady_clock::now(), timeout);
    calls.clear();
    lock.lock();
  }
}

}  // namespace sparsegdn::service
