#include "cli/call_pool.h"

#include <algorithm>
#include <utility>

namespace sparsegdn::cli {

CallPool::~CallPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool CallPool::Submit(std::function<void()> job) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (running_ == most_) return false;
  ++running_;
  handed_over_.push_back(std::move(job));
  if (handed_over_.size() > idle_) {
    threads_.emplace_back([this] { Work(); });
  } else {
    changed_.notify_one();
  }
  return true;
}

void CallPool::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    ++idle_;
    changed_.wait(lock, [this] { return closing_ || !handed_over_.empty(); });
    --idle_;
    if (handed_over_.empty()) return;
    std::function<void()> job = std::move(handed_over_.front());
    handed_over_.pop_front();
    lock.unlock();
    job();
    job = nullptr;
    lock.lock();
    --running_;
  }
}

CancelTimer::CancelTimer(const client::Cancellation* parent)
    : parent_(parent), thread_([this] { Work(); }) {}

CancelTimer::~CancelTimer() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void CancelTimer::Add(Clock::time_point at, std::weak_ptr<client::Cancellation> cancellation) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    pending_.emplace(at, std::move(cancellation));
  }
  changed_.notify_one();
}

void CancelTimer::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!closing_) {
    const bool all = parent_ != nullptr && parent_->cancelled();
    while (!pending_.empty() && (all || pending_.begin()->first <= Clock::now())) {
      const std::shared_ptr<client::Cancellation> due = pending_.begin()->second.lock();
      pending_.erase(pending_.begin());
      if (due != nullptr) due->Cancel();  // gone: its call has ended
    }
    const auto look_again = Clock::now() + std::chrono::milliseconds(50);  // at `parent`
    changed_.wait_until(
        lock, pending_.empty() ? look_again : std::min(look_again, pending_.begin()->first));
  }
}

}  // namespace sparsegdn::cli
