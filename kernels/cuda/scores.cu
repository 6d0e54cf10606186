// Scores of one window of one head pair, sorted; and the gate sums of one window of 4 value heads.
//
// Both kinds of block share one launch. A score block reads beta (and v for WRITE_NORM) and writes
// the window's keys in descending order, 8 bytes a token and pair. A gate block turns log_gate into
// running fp64 sums, kept as a pair of floats in log2 units (48 bits), and transposes beta: 12
// bytes a token and value head.
#include <cub/block/block_radix_sort.cuh>

#include "kernels/common/selection_math.h"
#include "kernels/cuda/device_common.cuh"
#include "kernels/cuda/gates.cuh"
#include "kernels/cuda/launch.cuh"

namespace sparsegdn::cuda {
namespace {

constexpr int kThreads = 512;
static_assert(kThreads == kGateThreads);

// z + 1 takes 17 bits for BETA and 26 for WRITE_NORM; 0 stands for NaN and for no token.
constexpr int kEach = kWindow / kThreads;
constexpr int kShortScoreBits = 17, kLongScoreBits = 26;
template <typename Key>
using BlockSort = cub::BlockRadixSort<Key, kThreads, kEach>;
template <typename Key>
using Sorter = typename BlockSort<Key>::TempStorage;

struct SortScratch {
  uint64_t keys[kWindow];
  union {
    Sorter<uint32_t> narrow;
    Sorter<uint64_t> wide;
  };
};

union Scratch {
  SortScratch sort;
  GateShared gates;
};

// |v| by one warp, with the bits of selection::RowNorm.
__device__ float WarpRowNorm(const Params& p, int64_t token, int head) {
  const int lane = threadIdx.x % 32;
  float sum = 0.0f;
  for (int i = lane; i < p.shape.head_dim_v; i += 32) {
    const float x = LoadElement(p.v, token, head, i);
    sum = selection::AddRn(sum, selection::MulRn(x, x));
  }
  for (int half = 16; half > 0; half /= 2) {
    sum = selection::AddRn(sum, __shfl_xor_sync(0xffffffffu, sum, half));
  }
  return selection::SqrtRn(sum);
}

// `limit` bounds the score: with beta in [0, 1] a BETA score never exceeds 2^16.
__device__ uint64_t StoredKey(float score, uint32_t offset, int32_t limit) {
  int32_t z = selection::FixedScore(score);
  if (z > limit) z = limit;
  return z == selection::kNeverSelected ? 0 : selection::PairKey(z, offset) + 1;
}

// The place of a key before the sort: by reversed offset, so that the sort, which is stable, has
// only the scores to compare.
__device__ __forceinline__ int Place(uint32_t offset) {
  return static_cast<int>(__brev(offset) >> (32 - selection::kOffsetBits));
}

// Keys of the window's free tokens i in [0, n), each in its place.
__device__ void FillKeys(const Params& p, Selector selector, int64_t row, uint32_t offset, int n,
                         int pair, uint64_t* keys) {
  const int h0 = pair * p.ratio;
  if (selector == Selector::kBeta) {
    for (int i = threadIdx.x; i < n; i += kThreads) {
      float s = LoadElement(p.beta, row + i, h0, 0);
      for (int h = 1; h < p.ratio; ++h) {
        s = selection::CombineScores(s, LoadElement(p.beta, row + i, h0 + h, 0));
      }
      keys[Place(offset + i)] = StoredKey(s, offset + i, 1 << 16);
    }
    return;
  }
  for (int i = threadIdx.x / 32; i < n; i += kThreads / 32) {
    float s = 0.0f;
    for (int h = 0; h < p.ratio; ++h) {
      const float beta = LoadElement(p.beta, row + i, h0 + h, 0);
      const float x = selection::MulRn(beta, WarpRowNorm(p, row + i, h0 + h));
      s = h == 0 ? x : selection::CombineScores(s, x);
    }
    if (threadIdx.x % 32 == 0) {
      keys[Place(offset + i)] = StoredKey(s, offset + i, selection::kMaxFixedScore);
    }
  }
}

// Sorts keys[0, kWindow) in descending order; equal scores stand in order already.
template <typename Key, int kScoreBits>
__device__ void SortDescending(uint64_t* keys, Sorter<Key>* storage) {
  constexpr Key kOne = Key{1} << selection::kOffsetBits;
  Key own[kEach];  // score + 1 above the key's low bits
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const uint64_t key = keys[threadIdx.x * kEach + i];
    own[i] = key == 0 ? 0 : static_cast<Key>(key - 1) + kOne;
  }
  __syncthreads();
  BlockSort<Key>(*storage).SortDescendingBlockedToStriped(own, selection::kOffsetBits,
                                                          selection::kOffsetBits + kScoreBits);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    keys[threadIdx.x + i * kThreads] = own[i] == 0 ? 0 : uint64_t{own[i] - kOne} + 1;
  }
  __syncthreads();
}

// Sum over the block, returned to every thread.
__device__ uint64_t BlockSum(uint64_t x, uint64_t* scratch) {
  x = WarpSum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  uint64_t sum = 0;
  for (int w = 0; w < kThreads / 32; ++w) sum += scratch[w];
  return sum;
}

__device__ uint64_t Square(uint64_t stored) {
  const uint64_t z = stored == 0 ? 0 : selection::KeyScore(stored - 1);
  return z * z;
}

// Length of the shortest prefix of the sorted keys whose sum of z^2 reaches tau of the total.
__device__ int CoveragePrefix(const uint64_t* keys, int size, double tau, uint64_t* scratch) {
  const int per_thread = size / kThreads > 0 ? size / kThreads : 1;
  const int first = threadIdx.x * per_thread;
  uint64_t own = 0;
  for (int i = first; i < first + per_thread && i < size; ++i) own += Square(keys[i]);
  const uint64_t target = selection::CoverageTarget(tau, BlockSum(own, scratch));
  uint64_t before = own;
  for (int d = 1; d < 32; d *= 2) {
    const uint64_t y = __shfl_up_sync(0xffffffffu, before, d);
    if (threadIdx.x % 32 >= d) before += y;
  }
  before -= own;
  for (int w = 0; w < threadIdx.x / 32; ++w) before += scratch[w];
  uint64_t taken = 0;
  for (int i = first; i < first + per_thread && i < size; ++i) {
    if (before < target && keys[i] != 0) ++taken;
    before += Square(keys[i]);
  }
  return static_cast<int>(BlockSum(taken, scratch));
}

__device__ void ScoreBlock(const Params& p, int window, int pair, SortScratch* sort) {
  uint64_t* keys = sort->keys;
  __shared__ uint64_t scratch[kThreads / 32];
  const int seq = FindOwner(p.ws.window_offset, p.num_seqs, window);
  if (IsDense(p, seq)) return;
  const SequenceParams& s = p.sequences[seq];
  const Window w = GetWindow(p, seq, window - p.ws.window_offset[seq]);
  const auto free =
      selection::NonForced(w.position, w.position + w.length, s.prompt_tokens, s.budget);
  const int n = static_cast<int>(free.end - free.begin);
  const int64_t row = w.begin + (free.begin - w.position);
  for (int i = threadIdx.x; i < kWindow; i += kThreads) keys[i] = 0;
  __syncthreads();
  FillKeys(p, s.budget.selector, row, static_cast<uint32_t>(free.begin % kWindow), n, pair, keys);
  __syncthreads();
  if (s.budget.selector == Selector::kBeta) {
    SortDescending<uint32_t, kShortScoreBits>(keys, &sort->narrow);
  } else {
    SortDescending<uint64_t, kLongScoreBits>(keys, &sort->wide);
  }
  uint64_t sum = 0, valid = 0;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    p.ws.keys[pair * p.num_tokens + row + i] = keys[i];
    if (keys[i] != 0) {
      sum += selection::KeyScore(keys[i] - 1);
      ++valid;
    }
  }
  sum = BlockSum(sum, scratch);
  valid = BlockSum(valid, scratch);
  int quota = 0;
  if (s.budget.mode == BudgetMode::kCoverage) {
    const auto limits = selection::ComputeWindowLimits(s.budget, n, p.shape.num_k_heads);
    int64_t count = CoveragePrefix(keys, kWindow, s.budget.coverage, scratch);
    count = count < limits.lo ? limits.lo : count;
    count = count > limits.hi ? limits.hi : count;
    quota = static_cast<int>(count < static_cast<int64_t>(valid) ? count : valid);
  }
  if (threadIdx.x == 0) {
    const int64_t slot = pair * p.ws.windows + window;
    p.ws.score_sum[slot] = static_cast<int64_t>(sum);
    p.ws.candidates[slot] = static_cast<int>(valid);
    p.ws.quota[slot] = quota;
  }
}

__global__ void __launch_bounds__(kThreads) ScoresKernel(Params p, int64_t score_blocks) {
  extern __shared__ __align__(16) uint8_t raw[];
  Scratch& scratch = *reinterpret_cast<Scratch*>(raw);
  const int windows = p.ws.window_offset[p.num_seqs];
  int64_t block = blockIdx.x;
  if (block < score_blocks) {
    const int window = static_cast<int>(block / p.shape.num_k_heads);
    if (window >= windows) return;
    ScoreBlock(p, window, static_cast<int>(block % p.shape.num_k_heads), &scratch.sort);
    return;
  }
  block -= score_blocks;
  const int head_blocks = (p.shape.num_v_heads + kGateHeads - 1) / kGateHeads;
  const int window = static_cast<int>(block / head_blocks);
  if (window >= windows) return;
  const int seq = FindOwner(p.ws.window_offset, p.num_seqs, window);
  const Window w = GetWindow(p, seq, window - p.ws.window_offset[seq]);
  GateBlock(p, w, static_cast<int>(block % head_blocks) * kGateHeads, &scratch.gates);
}

// 1 / sqrt(sum x^2 + 1e-6) of each row of q and k; one warp a row.
__global__ void __launch_bounds__(256) NormsKernel(Params p) {
  WaitForPrevious();
  AllowNext();
  const int64_t row = blockIdx.x * int64_t{8} + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t token = row / p.shape.num_k_heads;
  const int pair = static_cast<int>(row % p.shape.num_k_heads);
  if (token >= p.cu_seqlens[p.num_seqs] || token >= p.num_tokens) return;
  float q2 = 0.0f, k2 = 0.0f;
  for (int i = lane; i < p.shape.head_dim_k; i += 32) {
    const float q = LoadElement(p.q, token, pair, i), k = LoadElement(p.k, token, pair, i);
    q2 += q * q;
    k2 += k * k;
  }
  q2 = WarpSum(q2);
  k2 = WarpSum(k2);
  if (lane == 0) {
    p.ws.q_norm[pair * p.num_tokens + token] = 1.0f / sqrtf(q2 + 1e-6f);
    p.ws.k_norm[pair * p.num_tokens + token] = 1.0f / sqrtf(k2 + 1e-6f);
  }
}

}  // namespace

cudaError_t LaunchScores(const Params& p, cudaStream_t stream) {
  const int64_t score_blocks = p.mask != nullptr ? 0 : p.ws.windows * p.shape.num_k_heads;
  const int64_t head_blocks = (p.shape.num_v_heads + kGateHeads - 1) / kGateHeads;
  const int64_t gate_blocks = p.select_only ? 0 : p.ws.windows * head_blocks;
  const int64_t blocks = score_blocks + gate_blocks;
  if (blocks == 0) return cudaSuccess;
  constexpr int kBytes = static_cast<int>(sizeof(Scratch));
  const cudaError_t error =
      cudaFuncSetAttribute(ScoresKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  return LaunchKernel(ScoresKernel, {static_cast<unsigned>(blocks), kThreads, kBytes}, false,
                      stream, p, score_blocks);
}

cudaError_t LaunchNorms(const Params& p, cudaStream_t stream) {
  const int64_t rows = p.num_tokens * p.shape.num_k_heads;
  if (rows == 0) return cudaSuccess;
  return LaunchKernel(NormsKernel, {static_cast<unsigned>((rows + 7) / 8), 256}, p.hopper, stream,
                      p);
}

}  // namespace sparsegdn::cuda
