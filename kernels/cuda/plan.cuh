// Checks of cu_seqlens and the parameters, and where a window stands.
#ifndef SPARSEGDN_KERNELS_CUDA_PLAN_CUH_
#define SPARSEGDN_KERNELS_CUDA_PLAN_CUH_

#include "kernels/cuda/device_common.cuh"
#include "kernels/cuda/launch.cuh"

namespace sparsegdn::cuda {

__device__ __forceinline__ bool BudgetInRange(const Budget& b) {
  if (b.mode == BudgetMode::kDense) return true;
  const bool share_ok = b.mode == BudgetMode::kRetention ? b.retention > 0 && b.retention <= 1
                                                         : b.coverage > 0 && b.coverage <= 1;
  return share_ok && b.min_retention <= 1 && b.max_retention <= 1 && b.keep_first >= 0 &&
         b.keep_last >= 0;
}

__device__ __forceinline__ bool SequenceInRange(const Params& p, const SequenceParams& s,
                                                int64_t length) {
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

// Status bits of sequence `i`.
__device__ __forceinline__ unsigned SequenceFault(const Params& p, int i) {
  const int64_t begin = p.cu_seqlens[i], end = p.cu_seqlens[i + 1];
  if ((i == 0 && begin != 0) || begin < 0 || end < begin || end > p.num_tokens) {
    return kStatusBadCuSeqlens;
  }
  return SequenceInRange(p, p.sequences[i], end - begin) ? 0 : kStatusBadSequence;
}

struct WindowPlace {
  int seq, index;  // seq < 0: there is no such window
};

// Where window `window` of the call stands; a whole warp. Small packs are looked through here, so
// that the plan, which runs at the same time, is not waited for.
__device__ __forceinline__ WindowPlace PlaceWindow(const Params& p, int window) {
  if (p.num_seqs > 32) {
    WaitForPrevious();
    if (window >= p.ws.window_offset[p.num_seqs]) return {-1, 0};
    const int seq = FindOwner(p.ws.window_offset, p.num_seqs, window);
    return {seq, window - p.ws.window_offset[seq]};
  }
  const int lane = threadIdx.x % 32;
  unsigned fault = 0;
  int own = 0;
  if (lane < p.num_seqs) {
    fault = SequenceFault(p, lane);
    const int64_t length = p.cu_seqlens[lane + 1] - p.cu_seqlens[lane];
    own = static_cast<int>(WindowCount(p.sequences[lane].first_position, length));
  }
  if (__ballot_sync(0xffffffffu, fault != 0) != 0) return {-1, 0};
  int end = own;
  for (int d = 1; d < 32; d *= 2) {
    const int y = __shfl_up_sync(0xffffffffu, end, d);
    if (lane >= d) end += y;
  }
  const unsigned past = __ballot_sync(0xffffffffu, end > window);
  if (past == 0) return {-1, 0};
  const int seq = __ffs(static_cast<int>(past)) - 1;
  return {seq, window - __shfl_sync(0xffffffffu, end - own, seq)};
}

}  // namespace sparsegdn::cuda

#endif  // SPARSEGDN_KERNELS_CUDA_PLAN_CUH_
