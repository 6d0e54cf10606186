// Scores of the pairs of one block of a selection cluster, and their histograms (select.cu).
#ifndef SPARSEGDN_KERNELS_CUDA_SELECT_KEYS_CUH_
#define SPARSEGDN_KERNELS_CUDA_SELECT_KEYS_CUH_

#include "kernels/common/selection_math.h"
#include "kernels/cuda/device_common.cuh"
#include "kernels/cuda/gates.cuh"
#include "kernels/cuda/plan.cuh"

namespace sparsegdn::cuda::select {

inline constexpr uint32_t kAll = 0xffffffffu;
inline constexpr int kThreads = 512;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kEach = kWindow / kThreads;  // tokens of a thread: t, t + kThreads, ...
inline constexpr int kMaxPairs = 8;               // of a block
inline constexpr int kMaxRanks = 8;               // blocks of a cluster, which share a window
inline constexpr int kBinBits = 11;
inline constexpr int kBins = 1 << kBinBits;
inline constexpr int kListed = 512;        // so many keys are ranked directly,
inline constexpr int kShortList = 128;     // or of one pair
inline constexpr int kTopScore = 1 << 26;  // above every score
inline constexpr int kWords = kWindow / 32;
static_assert(kTopScore > selection::kMaxFixedScore);
static_assert(kBins == 4 * kThreads);

// Stands for a score: below 0 there is no key.
inline constexpr int kForced = -2, kAbsent = -3;
static_assert(selection::kNeverSelected == -1);

// What a pair's histogram is about: its keys with scores in [low, high), in bins of 2^shift scores;
// `above` keys have higher ones.
struct Range {
  int low, high, shift, above;
};

struct PairState {
  Range range;
  double factor;   // n / sum z, the bits of selection::NormalisedScore
  double inverse;  // sum z / n
  int valid;       // keys
  int first, cap;  // bounds of the quota
  int taken;       // keys of the range that the cut takes
  int quota;
  int bin, need;                 // where the quota ends, and how many of that bin it takes
  unsigned long long threshold;  // the least PairKey that is selected
};

struct PairSums {
  unsigned low, high;  // of the scores' lower 16 bits, and of the others with 2^20 a key
  int lowest, highest;
};

// What the other blocks of the cluster read.
struct Published {
  int first, cap;             // sums over the pairs
  float top;                  // at least the highest normalised score
  unsigned outcome, base;     // of a round: kFinalist.. counts, and keys surely taken
  uint2 counts[2][kThreads];  // keys at or above a trial score: at least, at most
  uint64_t final_bits[kListed];
  uint32_t final_order[kListed];  // reversed offset, then pair
  uint64_t tie_bits[kMaxPairs];
  int tie_count[kMaxPairs];
  uint32_t ties[kMaxPairs][kWords];  // by reversed offset
};

struct Shared {
  Published out;
  SequenceParams sequence;
  WindowPlace place;
  selection::WindowLimits limits;
  PairState pair[kMaxPairs];
  PairSums sums[kMaxPairs];
  uint64_t list_key[kListed];
  int list_pair[kListed];
  int listed, finalists, all;
  uint64_t final_key[kListed];
  uint64_t all_bits[kListed];
  uint32_t all_order[kListed];
  uint64_t short_key[kMaxPairs][kShortList];
  int shorts[kMaxPairs];
  int warp_total[kMaxPairs][kWarps];
  uint64_t partial[2][kWarps];
  uint32_t words[kMaxPairs][kWords];
  int before[kMaxPairs][kWords];  // events before a word
  int cut_at, cut_rest;  // of ties: reversed offset (< 0: none), and how many there or in all
  uint64_t cut_bits;     // their score
  int intact;            // the histograms are still those of all keys
};

// The block's part of a window, equal in all threads.
struct Part {
  Window w;
  int window;          // of the call
  int pair0, pairs;    // own pairs
  int rank, ranks;     // in the cluster
  int begin, end;      // rows of the window that are not forced
  uint32_t shift;      // window offset of the first row
  int* scores;         // [pairs][kWindow] by row
  uint32_t* at_least;  // [pairs][kBins] keys of a bin, then of it and those after it
};

// Loops over pairs run to kPairs, and side by side, where that is small: then a block may have
// pairs without keys. kPairs = kMaxPairs stands for any number.
template <int kPairs>
inline constexpr int kUnrolled = kPairs == kMaxPairs ? 1 : kPairs;
template <int kPairs>
__device__ __forceinline__ int Loops(const Part& c) {
  return kPairs == kMaxPairs ? c.pairs : kPairs;
}

__device__ __forceinline__ int* Scores(const Part& c, int pair) {
  return c.scores + pair * kWindow;
}
__device__ __forceinline__ uint32_t* AtLeast(const Part& c, int pair) {
  return c.at_least + pair * kBins;
}
__device__ __forceinline__ uint64_t KeyOf(const Part& c, int score, int row) {
  return selection::PairKey(score, c.shift + static_cast<uint32_t>(row));
}

__device__ __forceinline__ uint64_t Square(int score) {
  return static_cast<uint64_t>(score) * static_cast<uint64_t>(score);
}

// Score of a row that is not free, else `free`.
__device__ __forceinline__ int RowScore(const Part& c, int row, int free) {
  if (row >= c.w.length) return kAbsent;
  return row < c.begin || row >= c.end ? kForced : free;
}

// Heads 4 r .. 4 r + 3 of rank r, in one access a token.
__device__ __forceinline__ void LoadBetaVectors(const Params& p, const Part& c,
                                                float4 (&x)[kEach]) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = static_cast<int>(threadIdx.x) + i * kThreads;
    x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row < c.begin || row >= c.end) continue;
    x[i] = LoadHeads<true>(p.beta, c.w.begin + row, c.pair0 * p.ratio, p.shape.num_v_heads);
  }
}
__device__ __forceinline__ void StoreScores(const Params& p, const Part& c,
                                            const float4 (&x)[kEach]) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = static_cast<int>(threadIdx.x) + i * kThreads;
    const float low = selection::CombineScores(x[i].x, x[i].y);
    const float high = selection::CombineScores(x[i].z, x[i].w);
    int* to = c.scores + row;
    if (p.ratio == 2) {
      to[0] = RowScore(c, row, selection::FixedScore(low));
      to[kWindow] = RowScore(c, row, selection::FixedScore(high));
    } else if (p.ratio == 4) {
      to[0] = RowScore(c, row, selection::FixedScore(selection::CombineScores(low, high)));
    } else {
      to[0] = RowScore(c, row, selection::FixedScore(x[i].x));
      to[kWindow] = RowScore(c, row, selection::FixedScore(x[i].y));
      to[2 * kWindow] = RowScore(c, row, selection::FixedScore(x[i].z));
      to[3 * kWindow] = RowScore(c, row, selection::FixedScore(x[i].w));
    }
  }
}

// The same one by one, for any layout.
template <typename = void>
__device__ __noinline__ void LoadBetasAnyhow(const Params& p, Part c) {
#pragma unroll 1
  for (int pair = 0; pair < c.pairs; ++pair) {
    const int h0 = (c.pair0 + pair) * p.ratio;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = static_cast<int>(threadIdx.x) + i * kThreads;
      float s = 0.0f;
      if (row >= c.begin && row < c.end) {
        s = LoadElement(p.beta, c.w.begin + row, h0, 0);
        for (int h = 1; h < p.ratio; ++h) {
          s = selection::CombineScores(s, LoadElement(p.beta, c.w.begin + row, h0 + h, 0));
        }
      }
      Scores(c, pair)[row] = RowScore(c, row, selection::FixedScore(s));
    }
  }
}

// |v| by one warp, with the bits of selection::RowNorm.
__device__ __forceinline__ float WarpNorm(const Params& p, int64_t token, int head) {
  float sum = 0.0f;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < p.shape.head_dim_v; i += 32) {
    const float x = LoadElement(p.v, token, head, i);
    sum = selection::AddRn(sum, selection::MulRn(x, x));
  }
  for (int half = 16; half > 0; half /= 2) {
    sum = selection::AddRn(sum, __shfl_xor_sync(kAll, sum, half));
  }
  return selection::SqrtRn(sum);
}

template <typename = void>
__device__ __noinline__ void LoadWriteNorms(const Params& p, Part c) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) / 32; row < kWindow; row += kWarps) {
#pragma unroll 1
    for (int pair = 0; pair < c.pairs; ++pair) {
      float s = 0.0f;
      for (int h = 0; row >= c.begin && row < c.end && h < p.ratio; ++h) {
        const int head = (c.pair0 + pair) * p.ratio + h;
        const float beta = LoadElement(p.beta, c.w.begin + row, head, 0);
        const float x = selection::MulRn(beta, WarpNorm(p, c.w.begin + row, head));
        s = h == 0 ? x : selection::CombineScores(s, x);
      }
      if (lane == 0) Scores(c, pair)[row] = RowScore(c, row, selection::FixedScore(s));
    }
  }
}

__device__ __forceinline__ bool BetasInVectors(const Params& p, const Part& c) {
  return c.pairs * p.ratio == 4 && p.ratio != 3 && IsVector(p.beta);
}

// Adds up the scores of each pair: sm.sums, complete after the caller's barrier.
template <int kPairs>
__device__ __forceinline__ void SumScores(const Part& c, Shared& sm) {
#pragma unroll kUnrolled < kPairs>
  for (int pair = 0; pair < Loops<kPairs>(c); ++pair) {
    unsigned low = 0, high = 0;
    int lowest = kTopScore, highest = -1;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int z = Scores(c, pair)[threadIdx.x + i * kThreads];
      low += z < 0 ? 0u : static_cast<unsigned>(z) & 0xffffu;
      high += z < 0 ? 0u : (static_cast<unsigned>(z) >> 16) + (1u << 20);
      lowest = z < 0 ? lowest : ::min(lowest, z);
      highest = ::max(highest, z);
    }
    low = __reduce_add_sync(kAll, low);
    high = __reduce_add_sync(kAll, high);
    lowest = __reduce_min_sync(kAll, lowest);
    highest = __reduce_max_sync(kAll, highest);
    if (threadIdx.x % 32 == 0) {
      atomicAdd(&sm.sums[pair].low, low);
      atomicAdd(&sm.sums[pair].high, high);
      atomicMin(&sm.sums[pair].lowest, lowest);
      atomicMax(&sm.sums[pair].highest, highest);
    }
  }
}

__device__ __forceinline__ int BinShift(int low, int high) {
  const int bits = 32 - __clz(high - low > 1 ? high - low - 1 : 0);
  return bits > kBinBits ? bits - kBinBits : 0;
}

// Histograms of the pairs' ranges over cleared bins, then summed from the top, in place. Begins and
// ends with a barrier.
template <int kPairs>
__device__ __forceinline__ void BuildHistograms(const Part& c, Shared& sm) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
#pragma unroll kUnrolled < kPairs>
  for (int pair = 0; pair < Loops<kPairs>(c); ++pair) {
    const Range range = sm.pair[pair].range;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int z = Scores(c, pair)[threadIdx.x + i * kThreads];
      if (z < 0 || z < range.low || z >= range.high) continue;
      atomicAdd(&AtLeast(c, pair)[(z - range.low) >> range.shift], 1u);
    }
  }
  __syncthreads();
#pragma unroll kUnrolled < kPairs>
  for (int pair = 0; pair < Loops<kPairs>(c); ++pair) {
    const uint4 x = reinterpret_cast<const uint4*>(AtLeast(c, pair))[threadIdx.x];
    uint32_t sum = x.x + x.y + x.z + x.w;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t y = __shfl_down_sync(kAll, sum, d);
      if (lane + d < 32) sum += y;
    }
    if (lane == 0) sm.warp_total[pair][warp] = static_cast<int>(sum);
    const uint32_t after = sum - x.x;
    reinterpret_cast<uint4*>(AtLeast(c, pair))[threadIdx.x] =
        make_uint4(sum, after, after - x.y, after - x.y - x.z);
  }
  __syncthreads();
#pragma unroll kUnrolled < kPairs>
  for (int pair = 0; pair < Loops<kPairs>(c); ++pair) {
    const int theirs = lane < kWarps && lane > warp ? sm.warp_total[pair][lane] : 0;
    const uint32_t later = static_cast<uint32_t>(__reduce_add_sync(kAll, theirs));
    uint4 x = reinterpret_cast<const uint4*>(AtLeast(c, pair))[threadIdx.x];
    x.x += later;
    x.y += later;
    x.z += later;
    x.w += later;
    reinterpret_cast<uint4*>(AtLeast(c, pair))[threadIdx.x] = x;
  }
  __syncthreads();
}

template <int kPairs>
__device__ __forceinline__ void ClearHistograms(uint32_t* at_least, int pairs) {
#pragma unroll kUnrolled < kPairs>
  for (int pair = 0; pair < (kPairs == kMaxPairs ? pairs : kPairs); ++pair) {
    reinterpret_cast<uint4*>(at_least + pair * kBins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  }
}

// Sum over the block; `turn` alternates between calls, so that one barrier is enough.
__device__ __forceinline__ uint64_t BlockSum(uint64_t x, int turn, Shared& sm) {
  x = WarpSum(x);
  if (threadIdx.x % 32 == 0) sm.partial[turn][threadIdx.x / 32] = x;
  __syncthreads();
  uint64_t sum = 0;
  for (int i = 0; i < kWarps; ++i) sum += sm.partial[turn][i];
  return sum;
}

}  // namespace sparsegdn::cuda::select

#endif  // SPARSEGDN_KERNELS_CUDA_SELECT_KEYS_CUH_
