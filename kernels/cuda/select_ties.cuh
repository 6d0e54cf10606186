// What most windows do not need, kept out of line: finer histograms and the cut through ties where
// many scores are close or equal (select_cut.cuh), a pair's least selected key bit by bit, and
// coverage budgets.
#ifndef SPARSEGDN_KERNELS_CUDA_SELECT_TIES_CUH_
#define SPARSEGDN_KERNELS_CUDA_SELECT_TIES_CUH_

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/select_keys.cuh"

namespace sparsegdn::cuda::select {

__device__ __forceinline__ int Clamp(int count, const PairState& s) {
  return ::min(::max(count, s.first), s.cap);
}

// Quotas from what is above the cut and what it takes.
__device__ __forceinline__ void SetQuotas(const Part& c, Shared& sm) {
  if (static_cast<int>(threadIdx.x) < c.pairs) {
    PairState& s = sm.pair[threadIdx.x];
    s.quota = Clamp(s.range.above, s) + s.taken;
  }
  __syncthreads();
}

// Histograms of what is left.
template <typename = void>
__device__ __noinline__ void Refine(Part c, Shared& sm) {
  if (threadIdx.x == 0) sm.intact = 0;
  if (static_cast<int>(threadIdx.x) < c.pairs) {
    Range& r = sm.pair[threadIdx.x].range;
    r.shift = BinShift(r.low, r.high);
  }
  ClearHistograms<kMaxPairs>(c.at_least, c.pairs);
  BuildHistograms<kMaxPairs>(c, sm);
}

// Each pair has one score left, range.low. A block publishes which of
// them the budget leaves open; the cut is found by score, then reversed offset, then pair.
class TieCutter {
 public:
  __device__ TieCutter(const Params& p, const Part& c, Shared& sm) : p_(p), c_(c), sm_(sm) {}

  __device__ void Run(int rest) {
    for (int pair = 0; pair < c_.pairs; ++pair) MapTies(pair);
    if (threadIdx.x == 0) sm_.cut_at = -1;
    ClusterSync();
    const int own = static_cast<int>(threadIdx.x);
    if (own < c_.pairs) sm_.pair[own].taken = CutByScore(own, rest);
    __syncthreads();
    if (sm_.cut_at >= 0) {  // the cut goes through own ties
      CutByOffset();
      if (own < c_.pairs && sm_.out.tie_bits[own] == sm_.cut_bits) {
        sm_.pair[own].taken = TiesBefore(own);
      }
    }
    __syncthreads();
    SetQuotas(c_, sm_);
  }

 private:
  __device__ void MapTies(int pair) {
    const PairState& s = sm_.pair[pair];
    uint32_t* map = sm_.out.ties[pair];
    if (threadIdx.x < kWords) map[threadIdx.x] = 0;
    if (threadIdx.x == 0) sm_.out.tie_count[pair] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = static_cast<int>(threadIdx.x) + i * kThreads;
      const int z = Scores(c_, pair)[row];
      if (z < 0 || z < s.range.low || z >= s.range.high) continue;
      const uint32_t at = selection::BitReverseOffset(c_.shift + static_cast<uint32_t>(row));
      atomicOr(&map[at / 32], 1u << (at % 32));
    }
    __syncthreads();
    uint32_t kept = 0;
    if (threadIdx.x < kWords) {
      int rank = s.range.above;
      for (int word = 0; word < static_cast<int>(threadIdx.x); ++word) rank += __popc(map[word]);
      for (uint32_t left = map[threadIdx.x]; left != 0; left &= left - 1, ++rank) {
        if (rank >= s.first && rank < s.cap) kept |= left & (0u - left);
      }
    }
    __syncthreads();
    if (threadIdx.x < kWords) {
      map[threadIdx.x] = kept;
      atomicAdd(&sm_.out.tie_count[pair], __popc(kept));
    }
    if (threadIdx.x == 0) {
      const double score = static_cast<double>(s.range.low) * s.factor;
      sm_.out.tie_bits[pair] = static_cast<uint64_t>(__double_as_longlong(score));
    }
  }

  // Calls body(block, index there, pair) for every pair of the cluster whose ties have score
  // `bits`.
  template <typename Body>
  __device__ void ForTied(uint64_t bits, const Body& body) {
    const int per_rank = (p_.shape.num_k_heads + c_.ranks - 1) / c_.ranks;
#pragma unroll 1
    for (int pair = 0; pair < p_.shape.num_k_heads; ++pair) {
      const int rank = pair / per_rank, at = pair % per_rank;
      if (LoadRemote(&sm_.out.tie_bits[at], rank) == bits) body(rank, at, pair);
    }
  }

  // How many of pair `own`'s open ties are among the best `rest` of the cluster, as far as scores
  // tell; one thread a pair. Leaves in sm_.cut_* what the offsets must tell.
  __device__ int CutByScore(int own, int rest) {
    const uint64_t bits = sm_.out.tie_bits[own];
    const int per_rank = (p_.shape.num_k_heads + c_.ranks - 1) / c_.ranks;
    int same = 0;
#pragma unroll 1
    for (int pair = 0; pair < p_.shape.num_k_heads; ++pair) {
      const int rank = pair / per_rank, at = pair % per_rank;
      const uint64_t theirs = LoadRemote(&sm_.out.tie_bits[at], rank);
      const int count = LoadRemote(&sm_.out.tie_count[at], rank);
      if (theirs > bits) rest -= count;
      if (theirs == bits) same += count;
    }
    if (rest <= 0) return 0;
    if (rest >= same) return sm_.out.tie_count[own];
    sm_.cut_bits = bits;  // equal in all pairs that come here
    sm_.cut_rest = rest;
    sm_.cut_at = 0;
    return 0;
  }

  // The reversed offset at which the best sm_.cut_rest ties of score sm_.cut_bits end, and how many
  // of them, in the order of the pairs, stand at that offset. A thread looks at four offsets.
  __device__ void CutByOffset() {
    const int word = static_cast<int>(threadIdx.x) / 8,
              bit0 = static_cast<int>(threadIdx.x) % 8 * 4;
    int own = 0;
    ForTied(sm_.cut_bits, [&](int rank, int at, int) {
      own += __popc(LoadRemote(&sm_.out.ties[at][word], rank) >> bit0 & 15u);
    });
    int end = own;
    const int lane = threadIdx.x % 32;
    for (int d = 1; d < 32; d *= 2) {
      const int y = __shfl_up_sync(kAll, end, d);
      if (lane >= d) end += y;
    }
    if (lane == 31) sm_.warp_total[0][threadIdx.x / 32] = end;
    __syncthreads();
    for (int i = 0; i < static_cast<int>(threadIdx.x) / 32; ++i) end += sm_.warp_total[0][i];
    int rest = sm_.cut_rest - (end - own);  // of the ties from here on
    if (rest <= 0 || rest > own) rest = 0;
    __syncthreads();
    for (int bit = bit0; rest > 0; ++bit) {
      int here = 0;
      ForTied(sm_.cut_bits, [&](int rank, int at, int) {
        here += static_cast<int>(LoadRemote(&sm_.out.ties[at][word], rank) >> bit & 1u);
      });
      if (rest <= here) {
        sm_.cut_at = word * 32 + bit;
        sm_.cut_rest = rest;
      }
      rest -= here;
    }
    __syncthreads();
  }

  __device__ int TiesBefore(int own) {
    const int word = sm_.cut_at / 32;
    const uint32_t bit = 1u << (sm_.cut_at % 32);
    const uint32_t* map = sm_.out.ties[own];
    int taken = __popc(map[word] & (bit - 1));
    for (int i = 0; i < word; ++i) taken += __popc(map[i]);
    if ((map[word] & bit) == 0) return taken;
    int before = 0;
    ForTied(sm_.cut_bits, [&](int rank, int at, int pair) {
      if (pair >= c_.pair0 + own) return;
      before += (LoadRemote(&sm_.out.ties[at][word], rank) & bit) != 0;
    });
    return taken + (before < sm_.cut_rest);
  }

  const Params& p_;
  const Part& c_;
  Shared& sm_;
};

template <typename = void>
__device__ __noinline__ void CutTies(const Params& p, Part c, Shared& sm, int rest) {
  TieCutter(p, c, sm).Run(rest);
}

// The greatest key for which the pair's keys at or above it, counted or (`squares`) their scores
// squared and summed, reach `target` (> 0, and at most the sum over all keys): bit by bit.
template <typename = void>
__device__ __noinline__ uint64_t LeastKey(Part c, int pair, uint64_t target, bool squares,
                                          Shared& sm) {
  uint64_t key[kEach], weight[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = static_cast<int>(threadIdx.x) + i * kThreads;
    const int z = Scores(c, pair)[row];
    key[i] = z < 0 ? 0 : KeyOf(c, z, row);
    weight[i] = z < 0 ? 0 : (squares ? Square(z) : 1);
  }
  uint64_t least = 0;
#pragma unroll 1
  for (int bit = 36; bit >= 0; --bit) {
    const uint64_t trial = least | uint64_t{1} << bit;
    uint64_t own = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) own += key[i] >= trial ? weight[i] : 0;
    if (BlockSum(own, bit % 2, sm) >= target) least = trial;
  }
  __syncthreads();
  return least;
}

// Quotas of the own pairs under a coverage budget.
template <typename = void>
__device__ __noinline__ void Cover(Part c, double coverage, Shared& sm) {
  const selection::WindowLimits limits = sm.limits;
#pragma unroll 1
  for (int pair = 0; pair < c.pairs; ++pair) {
    uint64_t own = 0;
    for (int i = 0; i < kEach; ++i) {
      const int z = Scores(c, pair)[threadIdx.x + i * kThreads];
      if (z >= 0) own += Square(z);
    }
    const uint64_t target = selection::CoverageTarget(coverage, BlockSum(own, 0, sm));
    __syncthreads();
    int64_t count = 0;
    if (target > 0) {
      const uint64_t least = LeastKey(c, pair, target, true, sm);
      for (int i = 0; i < kEach; ++i) {
        const int row = static_cast<int>(threadIdx.x) + i * kThreads;
        const int z = Scores(c, pair)[row];
        count += z >= 0 && KeyOf(c, z, row) >= least;
      }
      count = static_cast<int64_t>(BlockSum(static_cast<uint64_t>(count), 0, sm));
      __syncthreads();
    }
    count = count < limits.lo ? limits.lo : count;
    count = count > limits.hi ? limits.hi : count;
    const int valid = sm.pair[pair].valid;
    if (threadIdx.x == 0) sm.pair[pair].quota = count < valid ? static_cast<int>(count) : valid;
  }
  __syncthreads();
}

}  // namespace sparsegdn::cuda::select

#endif  // SPARSEGDN_KERNELS_CUDA_SELECT_TIES_CUH_
