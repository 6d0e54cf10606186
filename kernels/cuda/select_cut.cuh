// The cut of a window's common order under a retention budget, over the blocks of a cluster.
//
// Each pair takes at least `first` and at most `cap` keys, so a cut at score x takes
//   F(x) = sum over pairs of clamp(keys with scores >= x, first, cap),
// and the budget K is met between two scores low and high with F(low) >= K > F(high). A round tries
// 512 scores between them, one a thread: the histograms bound each pair's count from both sides,
// and the cluster adds up the bounds. Keys left between low and high are ranked directly if they
// are few; else their histograms are refined. Where each pair has but one score left, ties are cut
// by reversed offset, then pair. All blocks of the cluster compute the same numbers.
#ifndef SPARSEGDN_KERNELS_CUDA_SELECT_CUT_CUH_
#define SPARSEGDN_KERNELS_CUDA_SELECT_CUT_CUH_

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/select_keys.cuh"

namespace sparsegdn::cuda::select {

__device__ __forceinline__ int Clamp(int count, const PairState& s) {
  return ::min(::max(count, s.first), s.cap);
}

// The least z with z * factor >= x; kTopScore if no score is.
__device__ __forceinline__ int FirstScore(double x, const PairState& s) {
  if (s.factor == 0.0) return x <= 0.0 ? 0 : kTopScore;
  const double guess = ceil(x * s.inverse);
  int z = guess < kTopScore ? static_cast<int>(guess) : kTopScore;
  while (z > 0 && static_cast<double>(z - 1) * s.factor >= x) --z;
  while (z < kTopScore && static_cast<double>(z) * s.factor < x) ++z;
  return z;
}

// The i-th score tried between low and high: the same bits wherever it is computed.
__device__ __forceinline__ double Trial(double low, double high, int i) {
  return fma(high - low, static_cast<double>(i + 1) * (1.0 / (kThreads + 1)), low);
}

// Bounds of the pair's keys with scores >= x, for x in the round's range.
__device__ __forceinline__ int2 CountBounds(const Part& c, int pair, double x, const PairState& s) {
  const Range& r = s.range;
  const int z = FirstScore(x, s);
  if (z >= r.high) return {r.above, r.above};
  const uint32_t* at_least = AtLeast(c, pair);
  const int from = z > r.low ? z - r.low : 0, bin = from >> r.shift;
  const int most = r.above + static_cast<int>(at_least[bin]);
  if (from == bin << r.shift) return {most, most};
  return {r.above + (bin + 1 < kBins ? static_cast<int>(at_least[bin + 1]) : 0), most};
}

class Cutter {
 public:
  __device__ Cutter(const Params& p, const Part& c, Shared& sm, int total)
      : p_(p), c_(c), sm_(sm), total_(total) {}

  // Sets the quotas of the block's pairs so that the cluster's pairs take `total` keys. Here F(0) >
  // total > F(high).
  __device__ void Run(double high) {
    double low = 0.0;
    for (int round = 0;; ++round) {
      Narrow(round % 2, &low, &high);
      ListKeys(low, high);
      if (threadIdx.x == 0) Publish();
      ClusterSync();
      const Outcome all = ReadOutcome();
      if (all.overflow == 0 && all.finalists <= kListed) {
        RankFinalists(all.base);
        return;
      }
      if (all.settled == c_.ranks) {
        CutTies(all.base);
        return;
      }
      Refine();
    }
  }

 private:
  struct Outcome {
    int finalists, base, settled, overflow;
  };

  __device__ void Narrow(int turn, double* low, double* high) {
    const double x = Trial(*low, *high, static_cast<int>(threadIdx.x));
    uint2 own = make_uint2(0, 0);
    for (int pair = 0; pair < c_.pairs; ++pair) {
      const PairState& s = sm_.pair[pair];
      const int2 bounds = CountBounds(c_, pair, x, s);
      own.x += static_cast<unsigned>(Clamp(bounds.x, s));
      own.y += static_cast<unsigned>(Clamp(bounds.y, s));
    }
    sm_.out.counts[turn][threadIdx.x] = own;
    ClusterSync();
    uint2 sum = make_uint2(0, 0);
    for (int rank = 0; rank < c_.ranks; ++rank) {
      const uint64_t both =
          LoadRemote(reinterpret_cast<const uint64_t*>(&sm_.out.counts[turn][threadIdx.x]), rank);
      sum.x += static_cast<unsigned>(both);
      sum.y += static_cast<unsigned>(both >> 32);
    }
    const unsigned wanted = static_cast<unsigned>(total_);
    const int maybe = __syncthreads_count(sum.y >= wanted);  // the first so many
    const int surely = __syncthreads_count(sum.x >= wanted);
    const double from = *low, to = *high;
    if (maybe < kThreads) *high = Trial(from, to, maybe);
    if (surely > 0) *low = Trial(from, to, surely - 1);
  }

  // Keys with scores in [low, high), and of each pair how many there are and are above. The ranges
  // become [low, high). Ends with a barrier, after which final_bits and final_order are complete.
  __device__ void ListKeys(double low, double high) {
    if (threadIdx.x == 0) {
      sm_.listed = 0;
      sm_.out.finalists = 0;
    }
    if (static_cast<int>(threadIdx.x) < c_.pairs) {
      PairState& s = sm_.pair[threadIdx.x];
      Range& r = s.range;
      const int old_low = r.low, old_high = r.high;
      r.low = ::min(::max(FirstScore(low, s), old_low), old_high);
      r.high = ::min(::max(FirstScore(high, s), old_low), old_high);
      r.above = s.among = s.taken = 0;
    }
    __syncthreads();
    for (int pair = 0; pair < c_.pairs; ++pair) {
      const Range r = sm_.pair[pair].range;
      int above = 0, among = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int row = static_cast<int>(threadIdx.x) + i * kThreads;
        const int z = Scores(c_, pair)[row];
        const bool inside = z >= 0 && z >= r.low && z < r.high;
        above += __popc(__ballot_sync(kAll, z >= 0 && z >= r.high));
        among += __popc(__ballot_sync(kAll, inside));
        if (!inside) continue;
        const int at = atomicAdd(&sm_.listed, 1);
        if (at >= kListed) continue;
        sm_.list_key[at] = KeyOf(c_, z, row);
        sm_.list_pair[at] = pair;
      }
      if (threadIdx.x % 32 == 0) {
        atomicAdd(&sm_.pair[pair].range.above, above);
        atomicAdd(&sm_.pair[pair].among, among);
      }
    }
    __syncthreads();
    if (sm_.listed <= kListed) FindFinalists();
    __syncthreads();
  }

  // Those of the listed keys whose rank in their pair the budget leaves open.
  __device__ void FindFinalists() {
    const int n = sm_.listed, i = static_cast<int>(threadIdx.x);
    if (i >= n) return;
    const uint64_t key = sm_.list_key[i];
    const int pair = sm_.list_pair[i];
    const PairState& s = sm_.pair[pair];
    int rank = s.range.above;
    for (int j = 0; j < n; ++j) rank += sm_.list_pair[j] == pair && sm_.list_key[j] > key;
    if (rank < s.first || rank >= s.cap) return;
    const int at = atomicAdd(&sm_.out.finalists, 1);  // any order: ranks are of the set
    const double score = static_cast<double>(selection::KeyScore(key)) * s.factor;
    sm_.out.final_bits[at] = static_cast<uint64_t>(__double_as_longlong(score));
    sm_.out.final_order[at] = selection::BitReverseOffset(selection::KeyOffset(key)) << 8 |
                              static_cast<uint32_t>(c_.pair0 + pair);
  }

  __device__ void Publish() {
    int base = 0, settled = 1;
    for (int pair = 0; pair < c_.pairs; ++pair) {
      const PairState& s = sm_.pair[pair];
      base += Clamp(s.range.above, s);
      if (s.range.high - s.range.low > 1) settled = 0;
    }
    sm_.out.base = base;
    sm_.out.settled = settled;
    sm_.out.overflow = sm_.listed > kListed;
  }

  __device__ Outcome ReadOutcome() {
    const int lane = threadIdx.x % 32;
    Outcome o{};
    if (lane < c_.ranks) {
      o.finalists = LoadRemote(&sm_.out.finalists, lane);
      o.base = LoadRemote(&sm_.out.base, lane);
      o.settled = LoadRemote(&sm_.out.settled, lane);
      o.overflow = LoadRemote(&sm_.out.overflow, lane);
    }
    return {__reduce_add_sync(kAll, o.finalists), __reduce_add_sync(kAll, o.base),
            __reduce_add_sync(kAll, o.settled), __reduce_add_sync(kAll, o.overflow)};
  }

  // Takes the best finalists of the cluster.
  __device__ void RankFinalists(int base) {
    int all = 0;
    for (int rank = 0; rank < c_.ranks; ++rank) {
      const int n = LoadRemote(&sm_.out.finalists, rank);
      const int i = static_cast<int>(threadIdx.x) - all;
      if (i >= 0 && i < n) {
        sm_.all_bits[threadIdx.x] = LoadRemote(&sm_.out.final_bits[i], rank);
        sm_.all_order[threadIdx.x] = LoadRemote(&sm_.out.final_order[i], rank);
      }
      all += n;
    }
    __syncthreads();
    constexpr int kTeam = 16;  // threads that share a finalist
    const int own = sm_.out.finalists, member = threadIdx.x % kTeam;
    for (int first = 0; first < own; first += kThreads / kTeam) {
      const int i = first + static_cast<int>(threadIdx.x) / kTeam;
      const uint64_t bits = i < own ? sm_.out.final_bits[i] : 0;
      const uint32_t order = i < own ? sm_.out.final_order[i] : 0;
      int better = 0;
      for (int j = member; j < all; j += kTeam) {
        const uint64_t other = sm_.all_bits[j];
        better += other > bits || (other == bits && sm_.all_order[j] < order);
      }
      for (int d = kTeam / 2; d > 0; d /= 2) better += __shfl_xor_sync(kAll, better, d);
      if (i < own && member == 0 && better < total_ - base) {
        atomicAdd(&sm_.pair[static_cast<int>(order & 255u) - c_.pair0].taken, 1);
      }
    }
    __syncthreads();
    SetQuotas();
  }

  __device__ void SetQuotas() {
    if (static_cast<int>(threadIdx.x) < c_.pairs) {
      PairState& s = sm_.pair[threadIdx.x];
      s.quota = Clamp(s.range.above, s) + s.taken;
    }
    __syncthreads();
  }

  // Histograms of what is left.
  __device__ void Refine() {
    if (threadIdx.x == 0) sm_.intact = 0;
    if (static_cast<int>(threadIdx.x) < c_.pairs) {
      Range& r = sm_.pair[threadIdx.x].range;
      r.shift = BinShift(r.low, r.high);
    }
    ClearHistograms(c_);
    BuildHistograms(c_, sm_);
  }

  // Each pair has one score left, range.low, shared by `among` keys. A block publishes which of
  // them the budget leaves open; the cut is found by score, then reversed offset, then pair.
  __device__ void CutTies(int base) {
    for (int pair = 0; pair < c_.pairs; ++pair) MapTies(pair);
    if (threadIdx.x == 0) sm_.cut_at = -1;
    ClusterSync();
    const int own = static_cast<int>(threadIdx.x);
    if (own < c_.pairs) sm_.pair[own].taken = CutByScore(own, total_ - base);
    __syncthreads();
    if (sm_.cut_at >= 0) {  // the cut goes through own ties
      CutByOffset();
      if (own < c_.pairs && sm_.out.tie_bits[own] == sm_.cut_bits) {
        sm_.pair[own].taken = TiesBefore(own);
      }
    }
    __syncthreads();
    SetQuotas();
  }

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
  int total_;
};

}  // namespace sparsegdn::cuda::select

#endif  // SPARSEGDN_KERNELS_CUDA_SELECT_CUT_CUH_
