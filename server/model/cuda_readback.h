// Device memory on its way to the host while later work runs: copies on a stream of their own into
// a pinned ring, handed out by a thread of the object's.
#ifndef SPARSEGDN_SERVER_MODEL_CUDA_READBACK_H_
#define SPARSEGDN_SERVER_MODEL_CUDA_READBACK_H_

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/op_table.h"

namespace sparsegdn::model {

class CudaReadback {
 public:
  using Done = std::function<void(OpTable::HostViews)>;

  // A ring of `ring_bytes` of pinned host memory. RESOURCE_EXHAUSTED when the host has not so much.
  static absl::StatusOr<std::unique_ptr<CudaReadback>> Create(int device, size_t ring_bytes);
  // Waits for what is on its way.
  ~CudaReadback();
  CudaReadback(const CudaReadback&) = delete;
  CudaReadback& operator=(const CudaReadback&) = delete;

  // Copies the ranges behind what `compute` holds so far, then calls `done`, in order of the calls.
  // Blocks while the ring is full. RESOURCE_EXHAUSTED when the ranges do not fit an empty ring.
  absl::Status Enqueue(cudaStream_t compute, std::span<const MemoryRange> ranges, Done done);
  // Holds later work of `compute` back until the copies enqueued so far have read their ranges.
  absl::Status OrderBehind(cudaStream_t compute);
  // Waits for every `done`; the first error of a copy since the last Finish.
  absl::Status Finish();

 private:
  struct Job {
    size_t begin = 0, end = 0;  // in the ring
    cudaEvent_t copied = nullptr;
    std::vector<const void*> views;
    Done done;
  };

  CudaReadback(int device, size_t ring_bytes) : device_(device), ring_bytes_(ring_bytes) {}
  absl::Status Init();
  bool Fits(size_t bytes, size_t* begin) const;
  absl::Status Copy(cudaStream_t compute, std::span<const MemoryRange> ranges, Job& job);
  void Loop();

  const int device_;
  const size_t ring_bytes_;
  char* ring_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t computed_ = nullptr;
  cudaEvent_t copied_ = nullptr;  // of the last job; null before the first

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;  // the front one is being handed out
  std::vector<cudaEvent_t> free_events_, all_events_;
  absl::Status status_;
  bool stopping_ = false;
  std::thread thread_;
};

// INTERNAL with CUDA's own words, or RESOURCE_EXHAUSTED for want of memory.
absl::Status FromCuda(cudaError_t error, const char* what);

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_CUDA_READBACK_H_
