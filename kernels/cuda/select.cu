// Selection in one launch (Hopper): a cluster of up to eight blocks takes a window, a block some of
// its pairs; and blocks that sum the gates (gates.cuh) run beside.
//
// Nothing is sorted. A block turns its betas (4 bytes a token and value head, read once) into
// scores in shared memory and histograms of them, the cluster finds the quotas (select_cut.cuh),
// and each pair's least selected key is found in the one bin where its quota ends. Then events in
// token order, counts, mask out. The work is a few thousand cycles of barriers and shared memory,
// whatever T, so latency binds; what is written is 2 bytes an event.
#include "kernels/cuda/plan.cuh"
#include "kernels/cuda/select_cut.cuh"
#include "kernels/cuda/select_keys.cuh"

namespace sparsegdn::cuda {
namespace select {
namespace {

__device__ void ClearShared(Shared& sm) {
  if (threadIdx.x < kMaxPairs) {
    sm.sums[threadIdx.x] = {0, 0, 0, kTopScore, -1};
    sm.shorts[threadIdx.x] = 0;
  }
  if (threadIdx.x == 0) sm.intact = 1;
}

// State of own pair threadIdx.x from its sums.
__device__ void SetPair(const Part& c, const Budget& budget, const selection::WindowLimits& limits,
                        Shared& sm) {
  const PairSums sums = sm.sums[threadIdx.x];
  PairState s{};
  const int64_t n = c.end - c.begin;
  const int64_t sum = int64_t{sums.low} + (int64_t{sums.high} << 16);
  s.valid = sums.valid;
  if (sum > 0) {
    s.factor = static_cast<double>(n) / static_cast<double>(sum);
    s.inverse = static_cast<double>(sum) / static_cast<double>(n);
  }
  if (sums.valid > 0) {
    s.range = {sums.lowest, sums.highest + 1, BinShift(sums.lowest, sums.highest + 1), 0};
  } else {
    s.range = {0, 1, 0, 0};
  }
  s.first = ::min(static_cast<int>(limits.lo), s.valid);
  s.cap = ::min(static_cast<int>(limits.hi), s.valid);
  s.bin = -1;
  sm.pair[threadIdx.x] = s;
}

// What the cluster must know before the cut.
__device__ void PublishTotals(const Part& c, Shared& sm) {
  double top = 0.0;
  int first = 0, cap = 0;
  for (int pair = 0; pair < c.pairs; ++pair) {
    const PairState& s = sm.pair[pair];
    first += s.first;
    cap += s.cap;
    const double highest = static_cast<double>(s.range.high - 1) * s.factor;
    top = highest > top ? highest : top;
  }
  sm.out.top = top;
  sm.out.first = first;
  sm.out.cap = cap;
}

// Quotas of the own pairs under a retention budget; the totals are published.
__device__ void Share(const Params& p, const Part& c, const selection::WindowLimits& limits,
                      Shared& sm) {
  double top = 0.0;
  int first = 0, cap = 0;
  for (int rank = 0; rank < c.ranks; ++rank) {
    const double theirs = LoadRemote(&sm.out.top, rank);
    top = theirs > top ? theirs : top;
    first += LoadRemote(&sm.out.first, rank);
    cap += LoadRemote(&sm.out.cap, rank);
  }
  const int total = static_cast<int>(limits.total);
  if (total > first && total < cap) {
    Cutter(p, c, sm, total).Run(top * 1.0000001 + 1e-30);
    return;
  }
  if (static_cast<int>(threadIdx.x) < c.pairs) {
    PairState& s = sm.pair[threadIdx.x];
    s.quota = total <= first ? s.first : s.cap;
  }
  __syncthreads();
}

// The greatest key for which `weight`, summed over the pair's keys at or above it, reaches `target`
// (> 0, and at most the sum over all keys): bit by bit.
template <typename Weight>
__device__ uint64_t LeastKey(const Part& c, int pair, uint64_t target, Shared& sm,
                             const Weight& weight) {
  uint64_t key[kEach];
  int score[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = static_cast<int>(threadIdx.x) + i * kThreads;
    score[i] = Scores(c, pair)[row];
    key[i] = score[i] < 0 ? 0 : KeyOf(c, score[i], row);
  }
  uint64_t least = 0;
  for (int bit = 36; bit >= 0; --bit) {
    const uint64_t trial = least | uint64_t{1} << bit;
    uint64_t own = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (score[i] >= 0 && key[i] >= trial) own += weight(score[i]);
    }
    if (BlockSum(own, bit % 2, sm) >= target) least = trial;
  }
  __syncthreads();
  return least;
}

// Quotas of the own pairs under a coverage budget.
__device__ void Cover(const Part& c, const Budget& budget, const selection::WindowLimits& limits,
                      Shared& sm) {
  const auto square = [](int z) { return static_cast<uint64_t>(z) * static_cast<uint64_t>(z); };
  for (int pair = 0; pair < c.pairs; ++pair) {
    uint64_t own = 0;
    for (int i = 0; i < kEach; ++i) {
      const int z = Scores(c, pair)[threadIdx.x + i * kThreads];
      if (z >= 0) own += square(z);
    }
    const uint64_t target = selection::CoverageTarget(budget.coverage, BlockSum(own, 0, sm));
    __syncthreads();
    int64_t count = 0;
    if (target > 0) {
      const uint64_t least = LeastKey(c, pair, target, sm, square);
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

// The bin of each pair's histogram of all keys where its quota ends.
__device__ void FindBins(const Part& c, Shared& sm) {
  for (int pair = 0; pair < c.pairs; ++pair) {
    const int quota = sm.pair[pair].quota;
    const uint32_t* at_least = AtLeast(c, pair);
    const uint4 x = reinterpret_cast<const uint4*>(at_least)[threadIdx.x];
    const uint32_t next = threadIdx.x + 1 < kThreads ? at_least[4 * threadIdx.x + 4] : 0;
    const uint32_t ends[5] = {x.x, x.y, x.z, x.w, next};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (static_cast<int>(ends[i]) >= quota && static_cast<int>(ends[i + 1]) < quota) {
        sm.pair[pair].bin = static_cast<int>(4 * threadIdx.x) + i;
        sm.pair[pair].need = quota - static_cast<int>(ends[i + 1]);
      }
    }
  }
  __syncthreads();
}

// The least selected key of each pair, from its quota.
__device__ void FindThresholds(const Part& c, Shared& sm) {
  const auto one = [](int) { return uint64_t{1}; };
  if (sm.intact == 0) {
    for (int pair = 0; pair < c.pairs; ++pair) {
      const int quota = sm.pair[pair].quota;
      const uint64_t least = quota > 0 ? LeastKey(c, pair, quota, sm, one) : ~uint64_t{0};
      if (threadIdx.x == 0) sm.pair[pair].threshold = least;
    }
    __syncthreads();
    return;
  }
  FindBins(c, sm);
  for (int pair = 0; pair < c.pairs; ++pair) {
    // The ranges may be the cut's by now, but the shift is that of all keys.
    const int low = sm.sums[pair].lowest, shift = sm.pair[pair].range.shift;
    const int bin = sm.pair[pair].bin;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = static_cast<int>(threadIdx.x) + i * kThreads;
      const int z = Scores(c, pair)[row];
      if (z < 0 || (z - low) >> shift != bin) continue;
      const int at = atomicAdd(&sm.shorts[pair], 1);
      if (at < kShortList) sm.short_key[pair][at] = KeyOf(c, z, row);
    }
  }
  __syncthreads();
  for (int pair = 0; pair < c.pairs; ++pair) {
    const int n = sm.shorts[pair], i = static_cast<int>(threadIdx.x), quota = sm.pair[pair].quota;
    if (quota == 0) {
      if (i == 0) sm.pair[pair].threshold = ~0ull;
    } else if (n > kShortList) {
      const uint64_t least = LeastKey(c, pair, quota, sm, one);
      if (i == 0) sm.pair[pair].threshold = least;
    } else if (i < n) {
      const uint64_t key = sm.short_key[pair][i];
      int better = 0;
      for (int j = 0; j < n; ++j) better += sm.short_key[pair][j] > key;
      if (better == sm.pair[pair].need - 1) sm.pair[pair].threshold = key;
    }
  }
  __syncthreads();
}

// Scores of the block's pairs, quotas, thresholds.
__device__ void ChooseKeys(const Params& p, const SequenceParams& s, const Part& c, Shared& sm) {
  const Budget& budget = s.budget;
  const auto limits = selection::ComputeWindowLimits(budget, c.end - c.begin, p.shape.num_k_heads);
  ClearHistograms(c);
  if (budget.selector == Selector::kBeta) {
    LoadBetas(p, c);
  } else {
    LoadWriteNorms(p, c);
  }
  __syncthreads();
  SumScores(c, sm);
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < c.pairs) SetPair(c, budget, limits, sm);
  __syncthreads();
  if (threadIdx.x == 0) PublishTotals(c, sm);
  ClusterArrive();
  BuildHistograms(c, sm);
  ClusterWait();
  if (budget.mode == BudgetMode::kCoverage) {
    Cover(c, budget, limits, sm);
  } else {
    Share(p, c, limits, sm);
  }
  ClusterArrive();  // nothing of another block is read from here on
  FindThresholds(c, sm);
  ClusterWait();
}

// Events, counts and mask of the own pairs; selected(pair, row) tells which tokens are events.
template <typename Selected>
__device__ void Compact(const Params& p, const Part& c, bool dense, Shared& sm,
                        const Selected& selected) {
  const int lane = threadIdx.x % 32;
  for (int pair = 0; pair < c.pairs; ++pair) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = static_cast<int>(threadIdx.x) + i * kThreads;
      const uint32_t word = __ballot_sync(kAll, row < c.w.length && selected(pair, row));
      if (lane == 0) sm.words[pair][row / 32] = word;
    }
  }
  __syncthreads();
  for (int pair = 0; pair < c.pairs; ++pair) {
    const uint32_t* words = sm.words[pair];
    const int head = c.pair0 + pair;
    const int first = __popc(words[2 * lane]), both = first + __popc(words[2 * lane + 1]);
    int end = both;  // events through the lane's two words
    for (int d = 1; d < 32; d *= 2) {
      const int y = __shfl_up_sync(kAll, end, d);
      if (lane >= d) end += y;
    }
    uint16_t* out = p.ws.events + head * p.num_tokens + c.w.begin;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = static_cast<int>(threadIdx.x) + i * kThreads, at = row / 32;
      const int before = __shfl_sync(kAll, end - both, at / 2);
      const int inside = __shfl_sync(kAll, first, at / 2);
      const uint32_t word = words[at];
      const bool event = (word >> lane & 1u) != 0;
      if (event && !dense) {
        const int rank = before + (at % 2 != 0 ? inside : 0) + __popc(word & ((1u << lane) - 1u));
        out[rank] = static_cast<uint16_t>(row);
      }
      if (p.mask_out != nullptr && row < c.w.length) {
        p.mask_out[(c.w.begin + row) * p.shape.num_k_heads + head] = event ? 1 : 0;
      }
    }
    if (threadIdx.x == 31) {
      p.ws.event_count[head * p.ws.windows + c.window] = end;
      if (p.selected != nullptr) {
        WaitForPrevious();  // the plan clears the counts
        atomicAdd(&p.selected[int64_t{c.w.seq} * p.shape.num_k_heads + head], end);
      }
    }
  }
}

[[maybe_unused]] __device__ void SelectBlock(const Params& p, int window, const WindowPlace& place,
                                             int ranks, int per_rank, uint8_t* raw) {
  Shared& sm = *reinterpret_cast<Shared*>(raw);
  const bool dense = IsDense(p, place.seq);
  if (dense && p.mask_out == nullptr && p.selected == nullptr) return;
  const SequenceParams& s = p.sequences[place.seq];
  Part c;
  c.w = GetWindow(p, place.seq, place.index);
  c.window = window;
  c.rank = static_cast<int>(blockIdx.x) % ranks;
  c.ranks = ranks;
  c.pair0 = c.rank * per_rank;
  c.pairs = ::max(0, ::min(per_rank, p.shape.num_k_heads - c.pair0));
  c.shift = static_cast<uint32_t>(c.w.position % kWindow);
  const auto free =
      selection::NonForced(c.w.position, c.w.position + c.w.length, s.prompt_tokens, s.budget);
  c.begin = static_cast<int>(free.begin - c.w.position);
  c.end = static_cast<int>(free.end - c.w.position);
  c.scores = reinterpret_cast<int*>(raw + (sizeof(Shared) + 15) / 16 * 16);
  c.at_least = reinterpret_cast<uint32_t*>(c.scores + per_rank * kWindow);
  if (p.mask != nullptr || dense) {
    Compact(p, c, dense, sm, [&](int pair, int row) {
      if (dense) return true;
      return p.mask[(c.w.begin + row) * p.shape.num_k_heads + c.pair0 + pair] != 0;
    });
    return;
  }
  ClearShared(sm);
  ChooseKeys(p, s, c, sm);
  Compact(p, c, dense, sm, [&](int pair, int row) {
    const int z = Scores(c, pair)[row];
    return z == kForced || (z >= 0 && KeyOf(c, z, row) >= sm.pair[pair].threshold);
  });
}

// Grid: [windows, ranks] selection blocks, in clusters of `ranks`, then [windows, Hv / 4] blocks of
// gates.
__global__ void __launch_bounds__(kThreads, 2)
    SelectKernel(const __grid_constant__ Params p, int ranks, int per_rank) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t raw[];
  AllowNext();
  const int64_t selecting = p.ws.windows * ranks;
  if (blockIdx.x < selecting) {
    const int window = static_cast<int>(blockIdx.x) / ranks;
    const WindowPlace place = PlaceWindow(p, window);
    if (place.seq >= 0) SelectBlock(p, window, place, ranks, per_rank, raw);
  } else {
    const int64_t block = blockIdx.x - selecting;
    const int head_blocks = (p.shape.num_v_heads + kGateHeads - 1) / kGateHeads;
    const WindowPlace place = PlaceWindow(p, static_cast<int>(block / head_blocks));
    if (place.seq >= 0) {
      GateBlock(p, GetWindow(p, place.seq, place.index),
                static_cast<int>(block % head_blocks) * kGateHeads,
                reinterpret_cast<GateShared*>(raw));
    }
  }
  WaitForPrevious();
#endif
}

}  // namespace
}  // namespace select

bool SelectSupports(const Params& p) {
  return p.hopper && p.shape.num_k_heads <= select::kMaxPairs * select::kMaxRanks;
}

cudaError_t LaunchSelect(const Params& p, cudaStream_t stream) {
  int ranks = 1;
  while (ranks < select::kMaxRanks && ranks < p.shape.num_k_heads) ranks *= 2;
  const int per_rank = (p.shape.num_k_heads + ranks - 1) / ranks;
  const int64_t head_blocks = (p.shape.num_v_heads + kGateHeads - 1) / kGateHeads;
  const int64_t gate_blocks = p.select_only ? 0 : p.ws.windows * head_blocks;
  const int64_t blocks = p.ws.windows * ranks + (gate_blocks + ranks - 1) / ranks * ranks;
  if (blocks == 0) return cudaSuccess;
  const int keys = static_cast<int>(sizeof(select::Shared)) + 16 +
                   per_rank * static_cast<int>((kWindow + select::kBins) * sizeof(int));
  const int gates = p.select_only ? 0 : static_cast<int>(sizeof(GateShared));
  const int bytes = keys > gates ? keys : gates;
  const cudaError_t error = cudaFuncSetAttribute(
      select::SelectKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  return LaunchKernel(select::SelectKernel,
                      {static_cast<unsigned>(blocks), select::kThreads, bytes, ranks}, true, stream,
                      p, ranks, per_rank);
}

}  // namespace sparsegdn::cuda
