// From quotas (or a given mask) to the event list of one window of one head pair, in token order.
//
// A group of a window is events [64 j, 64 j + 64) of its list, so the list is the group table too.
#include "kernels/common/selection_math.h"
#include "kernels/cuda/device_common.cuh"

namespace sparsegdn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWords = kWindow / 32;

__device__ void SetBit(uint32_t* words, int i) { atomicOr(&words[i / 32], 1u << (i % 32)); }

__device__ void BitsFromMask(const Params& p, const Window& w, int pair, uint32_t* words) {
  for (int i = threadIdx.x; i < w.length; i += kThreads) {
    if (p.mask[(w.begin + i) * p.shape.num_k_heads + pair] != 0) SetBit(words, i);
  }
}

__device__ void BitsFromQuota(const Params& p, const Window& w, int pair, int window,
                              uint32_t* words) {
  const SequenceParams& s = p.sequences[w.seq];
  if (s.budget.mode == BudgetMode::kDense) {
    for (int i = threadIdx.x; i < w.length; i += kThreads) SetBit(words, i);
    return;
  }
  const auto free =
      selection::NonForced(w.position, w.position + w.length, s.prompt_tokens, s.budget);
  const int shift = static_cast<int>(w.position % kWindow);
  const int quota = p.ws.quota[pair * p.ws.windows + window];
  const uint64_t* keys = p.ws.keys + pair * p.num_tokens + w.begin + (free.begin - w.position);
  for (int i = threadIdx.x; i < quota; i += kThreads) {
    SetBit(words, static_cast<int>(selection::KeyOffset(keys[i] - 1)) - shift);
  }
  for (int i = threadIdx.x; i < w.length; i += kThreads) {
    if (w.position + i < free.begin || w.position + i >= free.end) SetBit(words, i);
  }
}

// rank[i] = events before word i; returns the number of events.
__device__ int RankWords(const uint32_t* words, int* rank) {
  if (threadIdx.x < 32) {
    const int a = __popc(words[2 * threadIdx.x]), b = __popc(words[2 * threadIdx.x + 1]);
    int x = a + b;
    for (int d = 1; d < 32; d *= 2) {
      const int y = __shfl_up_sync(0xffffffffu, x, d);
      if (threadIdx.x >= d) x += y;
    }
    rank[2 * threadIdx.x] = x - a - b;
    rank[2 * threadIdx.x + 1] = x - b;
    if (threadIdx.x == 31) rank[kWords] = x;
  }
  __syncthreads();
  return rank[kWords];
}

__global__ void __launch_bounds__(kThreads) CompactKernel(Params p) {
  __shared__ uint32_t words[kWords];
  __shared__ int rank[kWords + 1];
  const int window = static_cast<int>(blockIdx.x / p.shape.num_k_heads);
  const int pair = static_cast<int>(blockIdx.x % p.shape.num_k_heads);
  if (window >= p.ws.window_offset[p.num_seqs]) return;
  const int seq = FindOwner(p.ws.window_offset, p.num_seqs, window);
  const bool dense = IsDense(p, seq);
  if (dense && p.mask_out == nullptr && p.selected == nullptr) return;
  const Window w = GetWindow(p, seq, window - p.ws.window_offset[seq]);
  for (int i = threadIdx.x; i < kWords; i += kThreads) words[i] = 0;
  __syncthreads();
  if (p.mask != nullptr) {
    BitsFromMask(p, w, pair, words);
  } else {
    BitsFromQuota(p, w, pair, window, words);
  }
  __syncthreads();
  const int events = RankWords(words, rank);
  uint16_t* out = p.ws.events + pair * p.num_tokens + w.begin;
  for (int i = threadIdx.x; i < w.length; i += kThreads) {
    const uint32_t word = words[i / 32];
    const bool event = (word >> (i % 32)) & 1u;
    if (event && !dense) {
      out[rank[i / 32] + __popc(word & ((1u << (i % 32)) - 1u))] = static_cast<uint16_t>(i);
    }
    if (p.mask_out != nullptr) {
      p.mask_out[(w.begin + i) * p.shape.num_k_heads + pair] = event ? 1 : 0;
    }
  }
  if (threadIdx.x == 0) {
    p.ws.event_count[pair * p.ws.windows + window] = events;
    if (p.selected != nullptr) {
      atomicAdd(&p.selected[int64_t{seq} * p.shape.num_k_heads + pair], events);
    }
  }
}

}  // namespace

cudaError_t LaunchCompact(const Params& p, cudaStream_t stream) {
  const int64_t blocks = p.ws.windows * p.shape.num_k_heads;
  if (blocks == 0) return cudaSuccess;
  CompactKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace sparsegdn::cuda
