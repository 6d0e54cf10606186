#include "server/model/cuda_readback.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/model/status_macros.h"

namespace sparsegdn::model {
namespace {

constexpr size_t kAlign = 256;
constexpr int kMaxJobs = 64;

size_t Padded(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

absl::Status FromCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message = absl::StrCat("cuda: ", what, ": ", cudaGetErrorString(error));
  if (error == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

absl::StatusOr<std::unique_ptr<CudaReadback>> CudaReadback::Create(int device, size_t ring_bytes) {
  std::unique_ptr<CudaReadback> readback(new CudaReadback(device, Padded(ring_bytes)));
  SPARSEGDN_RETURN_IF_ERROR(readback->Init());
  return readback;
}

absl::Status CudaReadback::Init() {
  SPARSEGDN_RETURN_IF_ERROR(FromCuda(cudaSetDevice(device_), "set device"));
  SPARSEGDN_RETURN_IF_ERROR(
      FromCuda(cudaHostAlloc(reinterpret_cast<void**>(&ring_), ring_bytes_, cudaHostAllocDefault),
               "pinned memory for results"));
  SPARSEGDN_RETURN_IF_ERROR(
      FromCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "copy stream"));
  SPARSEGDN_RETURN_IF_ERROR(
      FromCuda(cudaEventCreateWithFlags(&computed_, cudaEventDisableTiming), "event"));
  for (int i = 0; i < kMaxJobs; ++i) {
    cudaEvent_t event = nullptr;
    SPARSEGDN_RETURN_IF_ERROR(FromCuda(
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync), "event"));
    all_events_.push_back(event);
  }
  free_events_ = all_events_;
  thread_ = std::thread([this] { Loop(); });
  return absl::OkStatus();
}

CudaReadback::~CudaReadback() {
  if (thread_.joinable()) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  cudaSetDevice(device_);
  for (cudaEvent_t event : all_events_) cudaEventDestroy(event);
  if (computed_ != nullptr) cudaEventDestroy(computed_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
  if (ring_ != nullptr) cudaFreeHost(ring_);
}

// Jobs lie in the ring in order, the last one possibly wrapped to its start.
bool CudaReadback::Fits(size_t bytes, size_t* begin) const {
  if (free_events_.empty()) return false;
  if (jobs_.empty()) {
    *begin = 0;
    return bytes <= ring_bytes_;
  }
  const size_t tail = jobs_.front().begin, head = jobs_.back().end;
  if (jobs_.back().begin < tail) {  // wrapped
    *begin = head;
    return bytes <= tail - head;
  }
  *begin = ring_bytes_ - head >= bytes ? head : 0;
  return *begin == head || bytes <= tail;
}

absl::Status CudaReadback::Enqueue(cudaStream_t compute, std::span<const MemoryRange> ranges,
                                   Done done) {
  size_t bytes = 0;
  for (const MemoryRange& range : ranges) bytes += Padded(range.bytes);
  if (bytes > ring_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("results of ", bytes, " bytes, wanted at most ", ring_bytes_));
  }
  Job job;
  job.done = std::move(done);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return Fits(bytes, &job.begin); });
  job.end = job.begin + bytes;
  job.copied = free_events_.back();
  // Enqueued under the lock: the order of copies is the order of jobs.
  SPARSEGDN_RETURN_IF_ERROR(Copy(compute, ranges, job));
  free_events_.pop_back();
  copied_ = job.copied;
  jobs_.push_back(std::move(job));
  lock.unlock();
  changed_.notify_all();
  return absl::OkStatus();
}

absl::Status CudaReadback::Copy(cudaStream_t compute, std::span<const MemoryRange> ranges,
                                Job& job) {
  SPARSEGDN_RETURN_IF_ERROR(FromCuda(cudaEventRecord(computed_, compute), "record event"));
  SPARSEGDN_RETURN_IF_ERROR(FromCuda(cudaStreamWaitEvent(stream_, computed_), "wait for event"));
  size_t at = job.begin;
  for (const MemoryRange& range : ranges) {
    job.views.push_back(ring_ + at);
    if (range.bytes > 0) {
      SPARSEGDN_RETURN_IF_ERROR(FromCuda(
          cudaMemcpyAsync(ring_ + at, range.data, range.bytes, cudaMemcpyDeviceToHost, stream_),
          "copy of results"));
    }
    at += Padded(range.bytes);
  }
  return FromCuda(cudaEventRecord(job.copied, stream_), "record event");
}

absl::Status CudaReadback::OrderBehind(cudaStream_t compute) {
  if (copied_ == nullptr) return absl::OkStatus();
  return FromCuda(cudaStreamWaitEvent(compute, copied_), "wait for event");
}

absl::Status CudaReadback::Finish() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return jobs_.empty(); });
  return std::exchange(status_, absl::OkStatus());
}

void CudaReadback::Loop() {
  cudaSetDevice(device_);
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    Job& job = jobs_.front();  // stays where it is: a deque's other elements may come and go
    lock.unlock();
    const absl::Status copied = FromCuda(cudaEventSynchronize(job.copied), "copy of results");
    if (copied.ok()) job.done(job.views);
    lock.lock();
    status_.Update(copied);
    free_events_.push_back(job.copied);
    jobs_.pop_front();
    changed_.notify_all();
  }
}

}  // namespace sparsegdn::model
