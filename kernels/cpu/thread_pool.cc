#include "kernels/cpu/thread_pool.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>

namespace sparsegdn::cpu {

int UsableCores() {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

ThreadPool::ThreadPool(int num_threads) {
  try {
    for (int t = 1; t < num_threads; ++t) workers_.emplace_back([this, t] { WorkerLoop(t); });
  } catch (...) {  // no thread to be had: those that run must end before they are destroyed
    Stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { Stop(); }

void ThreadPool::Stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_ready_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Run(int64_t count, const std::function<void(int64_t, int)>& body) {
  if (count <= 0) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    body_ = &body;
    next_ = 0;
    count_ = count;
  }
  if (count > 1) work_ready_.notify_all();
  Drain(0);
  std::unique_lock<std::mutex> lock(mutex_);
  work_done_.wait(lock, [this] { return running_ == 0; });
  body_ = nullptr;
  count_ = 0;
  next_ = 0;
}

// Takes indices one at a time: a task is many microseconds of work, so the lock does not show.
void ThreadPool::Drain(int thread) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (next_ < count_) {
    const int64_t index = next_++;
    const auto* body = body_;
    ++running_;
    lock.unlock();
    (*body)(index, thread);
    lock.lock();
    --running_;
  }
  if (running_ == 0) work_done_.notify_one();
}

void ThreadPool::WorkerLoop(int thread) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    work_ready_.wait(lock, [this] { return stopping_ || next_ < count_; });
    if (stopping_) return;
    lock.unlock();
    Drain(thread);
    lock.lock();
  }
}

}  // namespace sparsegdn::cpu
