// A thread that runs posted tasks in order, with a bound on what waits.
#ifndef SPARSEGDN_SERVER_ENGINE_TASK_THREAD_H_
#define SPARSEGDN_SERVER_ENGINE_TASK_THREAD_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace sparsegdn::engine {

// Thread-safe. Tasks that wait when it is destroyed are dropped; one that runs is waited for.
class TaskThread {
 public:
  // kInline: no thread, Post runs the task; for tests.
  enum class Mode { kThread, kInline };
  TaskThread(Mode mode, int64_t max_bytes) : max_bytes_(max_bytes) {
    if (mode == Mode::kThread) thread_ = std::thread([this] { Loop(); });
  }
  ~TaskThread() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  // `bytes` is what the task holds while it waits and runs. False when others hold too much
  // already.
  bool Post(int64_t bytes, std::function<void()> task) {
    if (!thread_.joinable()) {
      task();
      return true;
    }
    {
      std::lock_guard lock(mutex_);
      if (bytes > 0 && bytes_ > 0 && bytes_ + bytes > max_bytes_) return false;
      bytes_ += bytes;
      tasks_.emplace_back(bytes, std::move(task));
    }
    changed_.notify_one();
    return true;
  }

 private:
  void Loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (stopping_) return;
      auto [bytes, task] = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;  // what it holds goes before it stops counting
      lock.lock();
      bytes_ -= bytes;
    }
  }

  const int64_t max_bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<int64_t, std::function<void()>>> tasks_;
  int64_t bytes_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_TASK_THREAD_H_
