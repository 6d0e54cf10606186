// A few threads for work that is too long for gRPC's: the check and the layout of a whole upload.
#ifndef SPARSEGDN_SERVER_SERVICE_WORKER_POOL_H_
#define SPARSEGDN_SERVER_SERVICE_WORKER_POOL_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace sparsegdn::service {

// Thread-safe. Jobs run in order of arrival, `threads` at a time. The queue has no bound of its
// own: an open upload holds at most one place.
class WorkerPool {
 public:
  explicit WorkerPool(int threads);
  ~WorkerPool();  // runs what is queued, then joins

  void Run(std::function<void()> job);

 private:
  void Work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_WORKER_POOL_H_
