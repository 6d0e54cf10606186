// A fixed set of worker threads that run one indexed loop at a time.
#ifndef SPARSEGDN_KERNELS_CPU_THREAD_POOL_H_
#define SPARSEGDN_KERNELS_CPU_THREAD_POOL_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace sparsegdn::cpu {

// Cores this process may run on (the affinity mask where the system has one), at least 1.
int UsableCores();

// Thread-compatible: one Run at a time. The calling thread works too, so a pool of one thread
// starts none.
class ThreadPool {
 public:
  // Throws std::system_error where the system gives no thread.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(index, thread) for every index in [0, count), in ascending order of start, on
  // threads numbered [0, num_threads). Returns when all calls have returned.
  void Run(int64_t count, const std::function<void(int64_t index, int thread)>& body);

 private:
  void Stop();
  void WorkerLoop(int thread);
  void Drain(int thread);

  std::mutex mutex_;
  std::condition_variable work_ready_;
  std::condition_variable work_done_;
  const std::function<void(int64_t, int)>* body_ = nullptr;  // guarded by mutex_
  int64_t next_ = 0;                                         // guarded by mutex_
  int64_t count_ = 0;                                        // guarded by mutex_
  int64_t running_ = 0;                                      // guarded by mutex_: calls in flight
  bool stopping_ = false;                                    // guarded by mutex_
  std::vector<std::thread> workers_;
};

}  // namespace sparsegdn::cpu

#endif  // SPARSEGDN_KERNELS_CPU_THREAD_POOL_H_
