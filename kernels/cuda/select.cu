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

// State of own pair `pair` from its sums.
template <int kPairs>
__device__ __forceinline__ void SetPair(const Part& c, int pair, Shared& sm) {
  const PairSums sums = sm.sums[pair];
  PairState s{};
  const int64_t n = c.end - c.begin;
  const int64_t sum = int64_t{sums.low} + (int64_t{sums.high & 0xfffffu} << 16);
  s.valid = static_cast<int>(sums.high >> 20);
  if (sum > 0) {
    s.factor = static_cast<double>(n) / static_cast<double>(sum);
    s.inverse = static_cast<double>(sum) / static_cast<double>(n);
  }
  if (s.valid > 0) {
    s.range = {sums.lowest, sums.highest + 1, BinShift(sums.lowest, sums.highest + 1), 0};
  } else {
    s.range = {0, 1, 0, 0};
  }
  s.first = ::min(static_cast<int>(sm.limits.lo), s.valid);
  s.cap = ::min(static_cast<int>(sm.limits.hi), s.valid);
  s.bin = -1;
  sm.pair[pair] = s;
}

// Sets the states of the pairs, and what the cluster must know before the cut; one warp.
template <int kPairs>
__device__ __forceinline__ void SetPairs(const Part& c, Shared& sm) {
  int first = 0, cap = 0;
  float top = 0.0f;
  if (threadIdx.x < kPairs) {
    SetPair<kPairs>(c, static_cast<int>(threadIdx.x), sm);
    const PairState& s = sm.pair[threadIdx.x];
    first = s.first;
    cap = s.cap;
    top = static_cast<float>(static_cast<double>(s.range.high - 1) * s.factor * 1.000001);
  }
  first = __reduce_add_sync(kAll, first);
  cap = __reduce_add_sync(kAll, cap);
  const unsigned highest = __reduce_max_sync(kAll, __float_as_uint(top));
  if (threadIdx.x != 0) return;
  sm.out.first = first;
  sm.out.cap = cap;
  sm.out.top = __uint_as_float(highest);
}

// Quotas of the own pairs under a retention budget; true where their thresholds are set too.
template <int kPairs>
__device__ __forceinline__ bool Share(const Params& p, const Part& c, Shared& sm) {
  const int lane = threadIdx.x % 32;
  int first = 0, cap = 0;
  float top = 0.0f;
  if (lane < c.ranks) {
    first = LoadRemote(&sm.out.first, lane);
    cap = LoadRemote(&sm.out.cap, lane);
    top = LoadRemote(&sm.out.top, lane);
  }
  first = __reduce_add_sync(kAll, first);
  cap = __reduce_add_sync(kAll, cap);
  const double high = __uint_as_float(__reduce_max_sync(kAll, __float_as_uint(top)));
  const int total = static_cast<int>(sm.limits.total);
  if (total > first && total < cap) {
    return Cutter<kPairs>(p, c, sm, total).Run(high * 1.000001 + 1e-30);
  }
  if (static_cast<int>(threadIdx.x) < c.pairs) {
    PairState& s = sm.pair[threadIdx.x];
    s.quota = total <= first ? s.first : s.cap;
  }
  __syncthreads();
  return false;
}

// The bin of each pair's histogram of all keys where its quota ends.
template <typename = void>
__device__ void FindBins(const Part& c, Shared& sm) {
#pragma unroll 1
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
template <typename = void>
__device__ void FindThresholds(const Part& c, Shared& sm) {
  if (sm.intact == 0) {
#pragma unroll 1
    for (int pair = 0; pair < c.pairs; ++pair) {
      const int quota = sm.pair[pair].quota;
      const uint64_t least = quota > 0 ? LeastKey(c, pair, quota, false, sm) : ~uint64_t{0};
      if (threadIdx.x == 0) sm.pair[pair].threshold = least;
    }
    __syncthreads();
    return;
  }
  FindBins(c, sm);
#pragma unroll 1
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
#pragma unroll 1
  for (int pair = 0; pair < c.pairs; ++pair) {
    const int n = sm.shorts[pair], i = static_cast<int>(threadIdx.x), quota = sm.pair[pair].quota;
    if (quota == 0) {
      if (i == 0) sm.pair[pair].threshold = ~0ull;
    } else if (n > kShortList) {
      const uint64_t least = LeastKey(c, pair, quota, false, sm);
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
template <int kPairs>
__device__ __forceinline__ void ChooseKeys(const Params& p, const Part& c, Shared& sm) {
  const Budget& budget = sm.sequence.budget;
  const bool vectors = budget.selector == Selector::kBeta && BetasInVectors(p, c);
  float4 x[kEach];
  if (vectors) LoadBetaVectors(p, c, x);
  if (threadIdx.x == 0) {
    sm.limits = selection::ComputeWindowLimits(budget, c.end - c.begin, p.shape.num_k_heads);
  }
  if (vectors) {
    StoreScores(p, c, x);
  } else if (budget.selector == Selector::kBeta) {
    LoadBetasAnyhow(p, c);
  } else {
    LoadWriteNorms(p, c);
  }
  for (int pair = c.pairs; pair < kPairs && kPairs != kMaxPairs; ++pair) {
    for (int i = 0; i < kEach; ++i) Scores(c, pair)[threadIdx.x + i * kThreads] = kAbsent;
  }
  __syncthreads();
  SumScores<kPairs>(c, sm);
  __syncthreads();
  if (threadIdx.x < 32) SetPairs<kPairs>(c, sm);
  ClusterArrive();
  BuildHistograms<kPairs>(c, sm);
  ClusterWait();
  bool found = false;
  if (budget.mode == BudgetMode::kCoverage) {
    Cover(c, budget.coverage, sm);
  } else {
    found = Share<kPairs>(p, c, sm);
  }
  if (!found) FindThresholds(c, sm);
}

template <typename = void>
__device__ __forceinline__ bool IsEvent(const Params& p, const Part& c, bool dense, int pair,
                                        int row, const Shared& sm) {
  if (row >= c.w.length) return false;
  if (dense) return true;
  if (p.mask != nullptr) {
    return p.mask[(c.w.begin + row) * p.shape.num_k_heads + c.pair0 + pair] != 0;
  }
  const int z = Scores(c, pair)[row];
  const uint64_t threshold = sm.pair[pair].threshold;
  const uint64_t score = threshold >> selection::kOffsetBits;
  const int least = score < kTopScore ? static_cast<int>(score) : kTopScore;
  if (z != least) return z > least || z == kForced;
  return KeyOf(c, z, row) >= threshold;
}

// Events, counts and mask of the own pairs.
template <typename = void>
__device__ __forceinline__ void Compact(const Params& p, const Part& c, bool dense, Shared& sm) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int pair = 0; pair < c.pairs; ++pair) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = static_cast<int>(threadIdx.x) + i * kThreads;
      const uint32_t word = __ballot_sync(kAll, IsEvent(p, c, dense, pair, row, sm));
      if (lane == 0) sm.words[pair][row / 32] = word;
    }
  }
  __syncthreads();
  if (warp < c.pairs) {
    const int first = __popc(sm.words[warp][2 * lane]);
    const int both = first + __popc(sm.words[warp][2 * lane + 1]);
    int end = both;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int y = __shfl_up_sync(kAll, end, d);
      if (lane >= d) end += y;
    }
    sm.before[warp][2 * lane] = end - both;
    sm.before[warp][2 * lane + 1] = end - both + first;
    if (lane == 31) {
      const int64_t head = c.pair0 + warp;
      p.ws.event_count[head * p.ws.windows + c.window] = end;
      if (p.selected != nullptr) {
        WaitForPrevious();  // the plan clears the counts
        atomicAdd(&p.selected[int64_t{c.w.seq} * p.shape.num_k_heads + head], end);
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int pair = 0; pair < c.pairs; ++pair) {
    const int head = c.pair0 + pair;
    uint16_t* out = p.ws.events + head * p.num_tokens + c.w.begin;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = static_cast<int>(threadIdx.x) + i * kThreads;
      const uint32_t word = sm.words[pair][row / 32];
      const bool event = (word >> lane & 1u) != 0;
      if (event && !dense) {
        out[sm.before[pair][row / 32] + __popc(word & ((1u << lane) - 1u))] =
            static_cast<uint16_t>(row);
      }
      if (p.mask_out != nullptr && row < c.w.length) {
        p.mask_out[(c.w.begin + row) * p.shape.num_k_heads + head] = event ? 1 : 0;
      }
    }
  }
}

template <int kPairs>
__device__ __forceinline__ void SelectBlock(const Params& p, int ranks, int per_rank,
                                            uint8_t* raw) {
  Shared& sm = *reinterpret_cast<Shared*>(raw);
  Part c;
  c.scores = reinterpret_cast<int*>(raw + (sizeof(Shared) + 15) / 16 * 16);
  c.at_least = reinterpret_cast<uint32_t*>(c.scores + per_rank * kWindow);
  c.window = static_cast<int>(blockIdx.x) / ranks;
  if (threadIdx.x < 32) PlaceWindow(p, c.window, &sm.place, &sm.sequence);
  ClearHistograms<kPairs>(c.at_least, per_rank);
  if (threadIdx.x < kMaxPairs) {
    sm.sums[threadIdx.x] = {0, 0, kTopScore, -1};
    sm.shorts[threadIdx.x] = 0;
  }
  if (threadIdx.x == 0) sm.intact = 1;
  __syncthreads();
  if (sm.place.seq < 0) return;
  const SequenceParams& s = sm.sequence;
  const bool dense = p.mask == nullptr && s.budget.mode == BudgetMode::kDense;
  if (dense && p.mask_out == nullptr && p.selected == nullptr) return;
  c.w = PlacedWindow(sm.place, s.first_position);
  c.rank = static_cast<int>(blockIdx.x) % ranks;
  c.ranks = ranks;
  c.pair0 = c.rank * per_rank;
  c.pairs = ::max(0, ::min(per_rank, p.shape.num_k_heads - c.pair0));
  c.shift = static_cast<uint32_t>(c.w.position % kWindow);
  const auto free =
      selection::NonForced(c.w.position, c.w.position + c.w.length, s.prompt_tokens, s.budget);
  c.begin = static_cast<int>(free.begin - c.w.position);
  c.end = static_cast<int>(free.end - c.w.position);
  if (p.mask != nullptr || dense) {
    Compact(p, c, dense, sm);
    return;
  }
  ChooseKeys<kPairs>(p, c, sm);
  ClusterArrive();  // nothing of another block is read from here on
  Compact(p, c, false, sm);
  ClusterWait();
}

// Grid: [windows, ranks] selection blocks, in clusters of `ranks`, then [windows, Hv / 4] blocks of
// gates.
template <int kPairs>
__global__ void __launch_bounds__(kThreads, 2)
    SelectKernel(const __grid_constant__ Params p, int ranks, int per_rank) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t raw[];
  AllowNext();
  const int64_t selecting = p.ws.windows * ranks;
  if (blockIdx.x < selecting) {
    SelectBlock<kPairs>(p, ranks, per_rank, raw);
  } else {
    GateShared& sm = *reinterpret_cast<GateShared*>(raw);
    const int block = static_cast<int>(blockIdx.x - selecting);
    const int head_blocks = (p.shape.num_v_heads + kGateHeads - 1) / kGateHeads;
    if (threadIdx.x < 32) PlaceWindow(p, block / head_blocks, &sm.place, &sm.sequence);
    __syncthreads();
    if (sm.place.seq >= 0) {
      GateBlock(p, PlacedWindow(sm.place, sm.sequence.first_position),
                block % head_blocks * kGateHeads, &sm);
    }
  }
  WaitForPrevious();
#endif
}

template <int kPairs>
cudaError_t Launch(const Params& p, unsigned grid, int ranks, int per_rank, cudaStream_t stream) {
  const int rows = kPairs == kMaxPairs ? per_rank : kPairs;
  const int keys = static_cast<int>(sizeof(Shared)) + 16 +
                   rows * static_cast<int>((kWindow + kBins) * sizeof(int));
  const int gates = p.select_only ? 0 : static_cast<int>(sizeof(GateShared));
  const int bytes = keys > gates ? keys : gates;
  const cudaError_t error = cudaFuncSetAttribute(
      SelectKernel<kPairs>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  return LaunchKernel(SelectKernel<kPairs>, {grid, kThreads, bytes, ranks}, true, stream, p, ranks,
                      rows);
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
  const unsigned grid = static_cast<unsigned>(blocks);
  if (per_rank == 1) return select::Launch<1>(p, grid, ranks, per_rank, stream);
  if (per_rank == 2) return select::Launch<2>(p, grid, ranks, per_rank, stream);
  return select::Launch<select::kMaxPairs>(p, grid, ranks, per_rank, stream);
}

}  // namespace sparsegdn::cuda
