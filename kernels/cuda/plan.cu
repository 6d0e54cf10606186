// Plan of a call: windows and time segments per sequence, checks of cu_seqlens and the parameters.
//
// One block; a fault in device data leaves all offsets 0, so that every later kernel finds no work.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/plan.cuh"

namespace sparsegdn::cuda {
namespace {

constexpr int kThreads = 1024;

// Inclusive scan over the block of one value per thread.
__device__ int BlockScan(int x, int* warp_sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int d = 1; d < 32; d *= 2) {
    const int y = __shfl_up_sync(0xffffffffu, x, d);
    if (lane >= d) x += y;
  }
  __syncthreads();
  if (lane == 31) warp_sums[warp] = x;
  __syncthreads();
  for (int w = 0; w < warp; ++w) x += warp_sums[w];
  return x;
}

__global__ void __launch_bounds__(kThreads) PlanKernel(Params p) {
  __shared__ int warp_sums[32];
  __shared__ int carry[2];
  __shared__ unsigned fault;
  WaitForPrevious();
  AllowNext();
  if (threadIdx.x == 0) {
    fault = 0;
    carry[0] = carry[1] = 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_seqs; i += kThreads) {
    const unsigned bits = SequenceFault(p, i);
    if (bits != 0) atomicOr(&fault, bits);
    if (p.nonfinite != nullptr) p.nonfinite[i] = 0;
  }
  if (p.selected != nullptr) {
    for (int64_t i = threadIdx.x; i < int64_t{p.num_seqs} * p.shape.num_k_heads; i += kThreads) {
      p.selected[i] = 0;
    }
  }
  __syncthreads();
  const bool ok = fault == 0;
  if (threadIdx.x == 0 && p.status != nullptr) *p.status = fault;
  for (int base = 0; base < p.num_seqs; base += kThreads) {
    const int i = base + threadIdx.x;
    int windows = 0, segments = 0;
    if (ok && i < p.num_seqs) {
      const int64_t length = p.cu_seqlens[i + 1] - p.cu_seqlens[i];
      windows = static_cast<int>(WindowCount(p.sequences[i].first_position, length));
      segments = static_cast<int>(SegmentCount(length, p.shape.num_v_heads));
    }
    const int window_end = carry[0] + BlockScan(windows, warp_sums);
    const int segment_end = carry[1] + BlockScan(segments, warp_sums);
    if (i < p.num_seqs) {
      p.ws.window_offset[i + 1] = window_end;
      p.ws.segment_offset[i + 1] = segment_end;
    }
    __syncthreads();
    if (threadIdx.x == kThreads - 1) {
      carry[0] = window_end;
      carry[1] = segment_end;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) p.ws.window_offset[0] = p.ws.segment_offset[0] = 0;
}

}  // namespace

cudaError_t LaunchPlan(const Params& p, cudaStream_t stream) {
  return LaunchKernel(PlanKernel, {1, kThreads}, false, stream, p);
}

}  // namespace sparsegdn::cuda
