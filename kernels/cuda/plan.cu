// Plan of a call: windows and time segments per sequence, checks of cu_seqlens and the parameters.
//
// One block; a fault in device data leaves all offsets 0, so that every later kernel finds no work.
#include "kernels/cuda/device_common.cuh"

namespace sparsegdn::cuda {
namespace {

constexpr int kThreads = 1024;

__device__ bool BudgetInRange(const Budget& b) {
  if (b.mode == BudgetMode::kDense) return true;
  const bool share_ok = b.mode == BudgetMode::kRetention ? b.retention > 0 && b.retention <= 1
                                                         : b.coverage > 0 && b.coverage <= 1;
  return share_ok && b.min_retention <= 1 && b.max_retention <= 1 && b.keep_first >= 0 &&
         b.keep_last >= 0;
}

__device__ bool SequenceInRange(const Params& p, const SequenceParams& s, int64_t length) {
  const int64_t last = s.first_position + length;
  if (s.first_position < 0 || s.first_position > (int64_t{1} << 40) || s.prompt_tokens < last) {
    return false;
  }
  if (!BudgetInRange(s.budget)) return false;
  if (s.budget.mode != BudgetMode::kDense && s.budget.selector == Selector::kWriteNorm &&
      p.mask == nullptr && p.v.data == nullptr) {
    return false;
  }
  if (p.select_only) return true;
  if (s.initial_slot >= p.initial_state.slots || s.final_slot >= p.final_state.slots) return false;
  if (s.snapshot_every == 0) return true;
  const bool dense = s.budget.mode == BudgetMode::kDense;
  if (s.snapshot_every < 0 || s.snapshot_every % (dense ? kGroup : kWindow) != 0) return false;
  const int64_t count = last / s.snapshot_every - s.first_position / s.snapshot_every;
  return count == 0 || (s.snapshot_index >= 0 && s.snapshot_index <= p.snapshot_slots - count);
}

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
  if (threadIdx.x == 0) {
    fault = 0;
    carry[0] = carry[1] = 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_seqs; i += kThreads) {
    const int64_t begin = p.cu_seqlens[i], end = p.cu_seqlens[i + 1];
    unsigned bits = 0;
    if ((i == 0 && begin != 0) || begin < 0 || end < begin || end > p.num_tokens) {
      bits = kStatusBadCuSeqlens;
    } else if (!SequenceInRange(p, p.sequences[i], end - begin)) {
      bits = kStatusBadSequence;
    }
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
  PlanKernel<<<1, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace sparsegdn::cuda
