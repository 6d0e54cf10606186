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

__device__ __forceinline__ unsigned Fault(const Params& p, int i, int64_t begin, int64_t end,
                                          const SequenceParams& s) {
  if ((i == 0 && begin != 0) || begin < 0 || end < begin || end > p.num_tokens) {
    return kStatusBadCuSeqlens;
  }
  return SequenceInRange(p, s, end - begin) ? 0 : kStatusBadSequence;
}
// Status bits of sequence `i`.
__device__ __forceinline__ unsigned SequenceFault(const Params& p, int i) {
  return Fault(p, i, p.cu_seqlens[i], p.cu_seqlens[i + 1], p.sequences[i]);
}

// All of it at once, before any of it is looked at.
__device__ __forceinline__ SequenceParams LoadSequence(const SequenceParams* from) {
  static_assert(sizeof(SequenceParams) % 8 == 0);
  constexpr int kWords = sizeof(SequenceParams) / 8;
  uint64_t words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = *(reinterpret_cast<const volatile uint64_t*>(from) + i);
  }
  SequenceParams s;
  memcpy(&s, words, sizeof(s));
  return s;
}

struct WindowPlace {
  int seq, index;         // seq < 0: there is no such window
  int64_t begin, length;  // of the sequence in the pack
};

// Where window `window` of the call stands; a whole warp. Small packs are looked through here, so
// that the plan, which runs at the same time, is not waited for. `sequence` receives the parameters
// of the window's sequence.
__device__ __forceinline__ void PlaceWindow(const Params& p, int window, WindowPlace* place,
                                            SequenceParams* sequence) {
  const int lane = threadIdx.x % 32;
  if (p.num_seqs > 32) {
    WaitForPrevious();
    int seq = -1;
    if (window < p.ws.window_offset[p.num_seqs]) {
      seq = FindOwner(p.ws.window_offset, p.num_seqs, window);
    }
    if (lane == 0) {
      *place = {seq, 0, 0, 0};
      if (seq < 0) return;
      const int64_t begin = p.cu_seqlens[seq];
      *place = {seq, window - p.ws.window_offset[seq], begin, p.cu_seqlens[seq + 1] - begin};
      *sequence = LoadSequence(&p.sequences[seq]);
    }
    return;
  }
  const int i = lane < p.num_seqs ? lane : p.num_seqs - 1;
  const int64_t begin = p.cu_seqlens[i], next = p.cu_seqlens[i + 1];
  const SequenceParams s = LoadSequence(&p.sequences[i]);
  const bool fault = Fault(p, i, begin, next, s) != 0;
  const int own =
      lane < p.num_seqs ? static_cast<int>(WindowCount(s.first_position, next - begin)) : 0;
  int end = own;
  for (int d = 1; d < p.num_seqs; d *= 2) {
    const int y = __shfl_up_sync(0xffffffffu, end, d);
    if (lane >= d) end += y;
  }
  const bool any = __ballot_sync(0xffffffffu, fault) != 0;
  const unsigned past = __ballot_sync(0xffffffffu, end > window);
  const int owner = any || past == 0 ? -1 : __ffs(static_cast<int>(past)) - 1;
  if (owner < 0 && lane == 0) *place = {-1, 0, 0, 0};
  if (lane == owner) {
    *place = {owner, window - (end - own), begin, next - begin};
    *sequence = s;
  }
}

// The same window as GetWindow gives.
__device__ __forceinline__ Window PlacedWindow(const WindowPlace& place, int64_t first) {
  const int64_t start = (first / kWindow + place.index) * kWindow;  // absolute
  const int64_t low = start > first ? start : first, last = first + place.length;
  const int64_t high = start + kWindow < last ? start + kWindow : last;
  return {place.seq, place.begin + (low - first), static_cast<int32_t>(high - low), low};
}

}  // namespace sparsegdn::cuda

#endif  // SPARSEGDN_KERNELS_CUDA_PLAN_CUH_
