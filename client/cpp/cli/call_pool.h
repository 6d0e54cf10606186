// Threads for blocking calls, and a clock that cancels some of them.
#ifndef SPARSEGDN_CLIENT_CLI_CALL_POOL_H_
#define SPARSEGDN_CLIENT_CLI_CALL_POOL_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "sparsegdn/client/client.h"

namespace sparsegdn::cli {

// Runs each job at once on a thread of its own, reusing idle ones; never queues.
class CallPool {
 public:
  explicit CallPool(size_t most) : most_(most) {}
  ~CallPool();  // waits for every job
  CallPool(const CallPool&) = delete;
  CallPool& operator=(const CallPool&) = delete;

  // False, and the job is not run, while `most` jobs are.
  bool Submit(std::function<void()> job);

 private:
  void Work();

  const size_t most_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> handed_over_;  // to threads that are about to wake
  size_t running_ = 0, idle_ = 0;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

// Cancels calls at given times, and all of them as soon as `parent` fires.
class CancelTimer {
 public:
  using Clock = std::chrono::steady_clock;
  // `parent` is borrowed; may be null.
  explicit CancelTimer(const client::Cancellation* parent);
  ~CancelTimer();
  CancelTimer(const CancelTimer&) = delete;
  CancelTimer& operator=(const CancelTimer&) = delete;

  void Add(Clock::time_point at, std::weak_ptr<client::Cancellation> cancellation);

 private:
  void Work();

  const client::Cancellation* const parent_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::multimap<Clock::time_point, std::weak_ptr<client::Cancellation>> pending_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_CALL_POOL_H_
