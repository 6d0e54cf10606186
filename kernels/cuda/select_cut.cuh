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

#include "kernels/cuda/select_ties.cuh"

namespace sparsegdn::cuda::select {

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

// Bounds of the pair's keys with scores >= x, for x in the round's range. Where x is so close to a
// score that the rounding of x * inverse might matter, that score's keys count as possible.
__device__ __forceinline__ int2 CountBounds(const Part& c, int pair, double x, const PairState& s) {
  const Range r = s.range;
  const uint32_t* at_least = AtLeast(c, pair);
  double place = x * s.inverse;
  if (s.factor == 0.0) place = x > 0.0 ? kTopScore : 0.0;
  place = place < kTopScore ? place : kTopScore;
  const int near = __double2int_rn(place);
  const double off = place - near, rounding = place * 0x1p-49;
  const int most_from = off > rounding ? near + 1 : near;    // keys of this score may count,
  const int least_from = off < -rounding ? near : near + 1;  // of this one surely
  int most = r.above, least = r.above;
  if (most_from < r.high) {
    const int from = most_from > r.low ? most_from - r.low : 0;
    most += static_cast<int>(at_least[from >> r.shift]);
  }
  if (least_from < r.high) {
    const int from = least_from > r.low ? least_from - r.low : 0;
    const int bin = (from + (1 << r.shift) - 1) >> r.shift;
    least += bin < kBins ? static_cast<int>(at_least[bin]) : 0;
  }
  return {least, most};
}

// What a round left, packed so that the cluster adds it up at once.
inline constexpr unsigned kOverflow = 1u << 16, kSettled = 1u << 24, kFinalists = kOverflow - 1;

template <int kPairs>
class Cutter {
 public:
  __device__ Cutter(const Params& p, const Part& c, Shared& sm, int total)
      : p_(p), c_(c), sm_(sm), total_(total), slots_(kThreads / c.ranks) {}

  // Sets the quotas of the block's pairs so that the cluster's pairs take `total` keys; true where
  // the thresholds are set too. Here F(0) > total > F(high).
  __device__ bool Run(double high) {
    double low = 0.0;
#pragma unroll 1
    for (int round = 0;; ++round) {
      Narrow(round % 2, &low, &high);
      ListKeys(low, high);
      ClusterSync();
      unsigned own = 0, base = 0;
      const int lane = threadIdx.x % 32;
      if (lane < c_.ranks) {
        own = LoadRemote(&sm_.out.outcome, lane);
        base = LoadRemote(&sm_.out.base, lane);
      }
      const unsigned all = __reduce_add_sync(kAll, own);
      const int rest = total_ - static_cast<int>(__reduce_add_sync(kAll, base));
      if ((all & (kSettled - kOverflow)) == 0) {
        return RankFinalists(static_cast<int>(own & kFinalists), rest);
      }
      if (all / kSettled == static_cast<unsigned>(c_.ranks)) {
        CutTies(p_, c_, sm_, rest);
        return false;
      }
      Refine(c_, sm_);
    }
  }

 private:
  __device__ void Narrow(int turn, double* low, double* high) {
    const double from = *low, to = *high;
    const double x = Trial(from, to, static_cast<int>(threadIdx.x));
    uint2 own = make_uint2(0, 0);
#pragma unroll kUnrolled < kPairs>
    for (int pair = 0; pair < Loops<kPairs>(c_); ++pair) {
      const PairState& s = sm_.pair[pair];
      const int2 bounds = CountBounds(c_, pair, x, s);
      own.x += static_cast<unsigned>(Clamp(bounds.x, s));
      own.y += static_cast<unsigned>(Clamp(bounds.y, s));
    }
    sm_.out.counts[turn][threadIdx.x] = own;
    ClusterSync();
    uint64_t theirs[kMaxRanks];
    const uint64_t* at = reinterpret_cast<const uint64_t*>(&sm_.out.counts[turn][threadIdx.x]);
#pragma unroll
    for (int rank = 0; rank < kMaxRanks; ++rank) {
      theirs[rank] = rank < c_.ranks ? LoadRemote(at, rank) : 0;
    }
    uint64_t sum = 0;  // no carry between the halves
#pragma unroll
    for (int rank = 0; rank < kMaxRanks; ++rank) sum += theirs[rank];
    const unsigned wanted = static_cast<unsigned>(total_);
    const int maybe = __syncthreads_count(static_cast<unsigned>(sum >> 32) >= wanted);
    const int surely = __syncthreads_count(static_cast<unsigned>(sum) >= wanted);
    if (maybe < kThreads) *high = Trial(from, to, maybe);
    if (surely > 0) *low = Trial(from, to, surely - 1);
  }

  // Keys with scores in [low, high): the finalists, and how many are above. The ranges become [low,
  // high). What was found is published by the caller's barrier.
  __device__ void ListKeys(double low, double high) {
    if (threadIdx.x < 2 * kPairs) {
      PairState& s = sm_.pair[threadIdx.x / 2];
      const bool lower = threadIdx.x % 2 == 0;
      const int old_low = s.range.low, old_high = s.range.high;
      const int z = ::min(::max(FirstScore(lower ? low : high, s), old_low), old_high);
      __syncwarp((1u << 2 * kPairs) - 1u);
      (lower ? s.range.low : s.range.high) = z;
      if (lower) {
        s.range.above = s.taken = 0;
        s.threshold = ~0ull;
      }
    }
    if (threadIdx.x == 32) sm_.listed = sm_.finalists = sm_.all = 0;
    __syncthreads();
#pragma unroll kUnrolled < kPairs>
    for (int pair = 0; pair < Loops<kPairs>(c_); ++pair) {
      const Range r = sm_.pair[pair].range;
      int above = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int row = static_cast<int>(threadIdx.x) + i * kThreads;
        const int z = Scores(c_, pair)[row];
        above += z >= r.high;
        if (z < r.low || z >= r.high) continue;
        const int at = atomicAdd(&sm_.listed, 1);
        if (at >= kListed) continue;
        sm_.list_key[at] = KeyOf(c_, z, row);
        sm_.list_pair[at] = pair;
      }
      above = __reduce_add_sync(kAll, above);
      if (threadIdx.x % 32 == 0) atomicAdd(&sm_.pair[pair].range.above, above);
    }
    __syncthreads();
    const int n = sm_.listed;
    if (n <= kListed) FindFinalists(n);
    __syncthreads();
    if (threadIdx.x < 32) Publish(n > kListed);
  }

  // Those of the listed keys whose rank in their pair the budget leaves open.
  __device__ void FindFinalists(int n) {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= n) return;
    const uint64_t key = sm_.list_key[i];
    const int pair = sm_.list_pair[i];
    const PairState& s = sm_.pair[pair];
    int rank = s.range.above;
#pragma unroll 4
    for (int j = 0; j < n; ++j) rank += sm_.list_pair[j] == pair && sm_.list_key[j] > key;
    if (rank < s.first || rank >= s.cap) return;
    const int at = atomicAdd(&sm_.finalists, 1);  // any order: ranks are of the set
    const double score = static_cast<double>(selection::KeyScore(key)) * s.factor;
    sm_.final_key[at] = key;
    sm_.out.final_bits[at] = static_cast<uint64_t>(__double_as_longlong(score));
    sm_.out.final_order[at] = selection::BitReverseOffset(selection::KeyOffset(key)) << 8 |
                              static_cast<uint32_t>(c_.pair0 + pair);
  }

  __device__ void Publish(bool overflow) {
    unsigned base = 0;
    bool settled = true;
    if (threadIdx.x < kPairs && static_cast<int>(threadIdx.x) < c_.pairs) {
      const PairState& s = sm_.pair[threadIdx.x];
      base = static_cast<unsigned>(Clamp(s.range.above, s));
      settled = s.range.high - s.range.low <= 1;
    }
    base = __reduce_add_sync(kAll, base);
    const bool all_settled = __ballot_sync(kAll, !settled) == 0;
    if (threadIdx.x != 0) return;
    const unsigned n = static_cast<unsigned>(sm_.finalists);
    overflow = overflow || n > static_cast<unsigned>(slots_);
    sm_.out.base = base;
    sm_.out.outcome = (overflow ? kOverflow : n) + (all_settled ? kSettled : 0);
  }

  // Takes the best `rest` finalists of the cluster; lane r knows the number of block r's. Blocks
  // have equal shares of the threads to fetch them.
  __device__ bool RankFinalists(int of_lane, int rest) {
    const int rank = static_cast<int>(threadIdx.x) / slots_;
    const int slot = static_cast<int>(threadIdx.x) % slots_;
    const bool live = slot < __shfl_sync(kAll, of_lane, rank);
    uint64_t bits = 0;
    uint32_t order = 0;
    if (live) {
      bits = LoadRemote(&sm_.out.final_bits[slot], rank);
      order = LoadRemote(&sm_.out.final_order[slot], rank);
    }
    const unsigned lives = __ballot_sync(kAll, live);
    const int lane = threadIdx.x % 32;
    int at = 0;
    if (lane == 0 && lives != 0) at = atomicAdd(&sm_.all, __popc(lives));
    at = __shfl_sync(kAll, at, 0) + __popc(lives & ((1u << lane) - 1u));
    if (live) {
      sm_.all_bits[at] = bits;
      sm_.all_order[at] = order;
    }
    __syncthreads();
    RankOwn(rest);
    __syncthreads();
    bool found = true;
    if (threadIdx.x < kPairs) {
      PairState& s = sm_.pair[threadIdx.x];
      const int above = s.range.above;
      s.quota = Clamp(above, s) + s.taken;
      found = above >= s.first && above <= s.cap;  // else some keys of the range are taken or left
      if (s.taken == 0) {
        s.threshold = static_cast<unsigned long long>(s.range.high) << selection::kOffsetBits;
      }
    }
    return __syncthreads_count(!found) == 0;
  }

  __device__ void RankOwn(int rest) {
    constexpr int kTeam = 16;  // threads that share a finalist
    const int own = sm_.finalists, all = sm_.all, member = threadIdx.x % kTeam;
#pragma unroll 1
    for (int first = 0; first < own; first += kThreads / kTeam) {
      const int i = first + static_cast<int>(threadIdx.x) / kTeam;
      const uint64_t bits = i < own ? sm_.out.final_bits[i] : 0;
      const uint32_t order = i < own ? sm_.out.final_order[i] : 0;
      int better = 0;
#pragma unroll 4
      for (int j = member; j < all; j += kTeam) {
        const uint64_t other = sm_.all_bits[j];
        const uint32_t other_order = sm_.all_order[j];
        better += other > bits || (other == bits && other_order < order);
      }
      for (int d = kTeam / 2; d > 0; d /= 2) better += __shfl_xor_sync(kAll, better, d);
      if (i < own && member == 0 && better < rest) {
        PairState& s = sm_.pair[static_cast<int>(order & 255u) - c_.pair0];
        atomicAdd(&s.taken, 1);
        atomicMin(&s.threshold, static_cast<unsigned long long>(sm_.final_key[i]));
      }
    }
  }

  const Params& p_;
  const Part& c_;
  Shared& sm_;
  int total_, slots_;
};

}  // namespace sparsegdn::cuda::select

#endif  // SPARSEGDN_KERNELS_CUDA_SELECT_CUT_CUH_
