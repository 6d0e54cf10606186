// How many keys each pair of a window may take under a retention budget.
//
// Every pair first takes `first` keys (its lower bound); the rest of the window's budget goes down
// the common order (normalised score down, reversed offset up, pair up) over keys of rank [first,
// cap). The sorted keys of a pair make "keys with a score >= x" a prefix, so the cut is found by
// bisection on the bits of the normalised fp64 score, and on reversed offsets among equal scores.
// One block a window; a warp owns every 16th pair.
#include "kernels/common/selection_math.h"
#include "kernels/cuda/device_common.cuh"

namespace sparsegdn::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kAll = 0xffffffffu;

// One pair's keys; `low` and `high` bound the prefix lengths still possible.
struct PairView {
  const uint64_t* keys;
  double factor;  // n / sum z, the bits of selection::NormalisedScore
  __device__ uint64_t ScoreBits(int rank) const {
    const double z = selection::KeyScore(keys[rank] - 1);
    return __double_as_longlong(z * factor);
  }
};

// Number of ranks in [low, high) for which `in_prefix` holds, plus low; `in_prefix` is monotone.
template <typename Predicate>
__device__ int WarpPartition(int low, int high, const Predicate& in_prefix) {
  const int lane = threadIdx.x % 32;
  while (high > low) {
    const int step = (high - low + 31) / 32;
    const int rank = low + lane * step;
    const int inside = __popc(__ballot_sync(kAll, rank < high && in_prefix(rank)));
    if (inside == 0) return low;
    if (step == 1) return low + inside;
    const int last = low + (inside - 1) * step;  // known inside
    high = last + step < high ? last + step : high;
    low = last + 1;
  }
  return low;
}

constexpr int kNarrowPairs =
    256;  // pairs whose bounds fit; more are searched over their full range

constexpr int kFinalists = 32;  // so few keys are ranked directly

struct Shared {
  int total[3];
  unsigned long long low_bits, high_bits;
  int low[kNarrowPairs], high[kNarrowPairs], middle[kNarrowPairs];  // prefix lengths
  int candidates[kNarrowPairs];
  double factor[kNarrowPairs];
  int finalists;
  uint64_t final_bits[kFinalists];
  int final_order[kFinalists];  // reversed offset, then pair
};

class QuotaBlock {
 public:
  __device__ QuotaBlock(const Params& p, const Window& w, int window, Shared* shared)
      : p_(p), shared_(shared), window_(window) {
    const SequenceParams& s = p.sequences[w.seq];
    const auto free =
        selection::NonForced(w.position, w.position + w.length, s.prompt_tokens, s.budget);
    n_ = free.end - free.begin;
    row_ = w.begin + (free.begin - w.position);
    limits_ = selection::ComputeWindowLimits(s.budget, n_, p.shape.num_k_heads);
    narrow_ = p.shape.num_k_heads <= kNarrowPairs;
    if (threadIdx.x < 3) shared->total[threadIdx.x] = 0;
    for (int pair = threadIdx.x; narrow_ && pair < p.shape.num_k_heads; pair += kThreads) {
      shared->candidates[pair] = p.ws.candidates[Slot(pair)];
      shared->factor[pair] = Factor(pair);
    }
    __syncthreads();
  }

  __device__ void Run() {
    int first_sum = 0, room = 0;
    ForPairs([&](int pair) {
      first_sum += First(pair);
      room += Cap(pair) - First(pair);
    });
    first_sum = Total(first_sum);
    room = Total(room);
    const int64_t rest = limits_.total - first_sum;
    if (rest <= 0) {
      ForPairs([&](int pair) { Set(pair, First(pair)); });
    } else if (room <= rest) {
      ForPairs([&](int pair) { Set(pair, Cap(pair)); });
    } else {
      Cut(static_cast<int>(rest), room);
    }
  }

 private:
  template <typename Body>
  __device__ void ForPairs(const Body& body) {
    for (int pair = threadIdx.x / 32; pair < p_.shape.num_k_heads; pair += kWarps) body(pair);
  }
  __device__ int64_t Slot(int pair) const { return pair * p_.ws.windows + window_; }
  __device__ int Candidates(int pair) const {
    return narrow_ ? shared_->candidates[pair] : p_.ws.candidates[Slot(pair)];
  }
  __device__ double Factor(int pair) const {
    const int64_t sum = p_.ws.score_sum[Slot(pair)];
    return sum == 0 ? 0.0 : static_cast<double>(n_) / static_cast<double>(sum);
  }
  __device__ int First(int pair) const {
    return ::min(static_cast<int>(limits_.lo), Candidates(pair));
  }
  __device__ int Cap(int pair) const {
    return ::min(static_cast<int>(limits_.hi), Candidates(pair));
  }
  __device__ PairView View(int pair) const {
    return {p_.ws.keys + pair * p_.num_tokens + row_,
            narrow_ ? shared_->factor[pair] : Factor(pair)};
  }
  __device__ void Set(int pair, int count) {
    if (threadIdx.x % 32 == 0) p_.ws.quota[Slot(pair)] = count;
  }
  // Sum over the block of one value per warp. Three counters in turn, so that one barrier is
  // enough: the one cleared here was read by everybody before the last barrier.
  __device__ int Total(int warp_value) {
    const int now = turn_;
    turn_ = turn_ == 2 ? 0 : turn_ + 1;
    if (threadIdx.x % 32 == 0 && warp_value != 0) atomicAdd(&shared_->total[now], warp_value);
    __syncthreads();
    if (threadIdx.x == 0) shared_->total[now == 0 ? 2 : now - 1] = 0;
    return shared_->total[now];
  }

  // Prefix of `pair` with score bits >= bits, within [First, Cap].
  __device__ int AtLeast(int pair, uint64_t bits) {
    const PairView view = View(pair);
    return WarpPartition(First(pair), Cap(pair),
                         [&](int rank) { return view.ScoreBits(rank) >= bits; });
  }
  __device__ int CountAtLeast(uint64_t bits) {
    int count = 0;
    ForPairs([&](int pair) { count += AtLeast(pair, bits) - First(pair); });
    return Total(count);
  }
  // The same for bits between the ends of the bisection, within the bounds that they left.
  __device__ int CountMiddle(uint64_t bits) {
    if (!narrow_) return CountAtLeast(bits);
    int count = 0;
    ForPairs([&](int pair) {
      const PairView view = View(pair);
      const int end = WarpPartition(shared_->low[pair], shared_->high[pair],
                                    [&](int rank) { return view.ScoreBits(rank) >= bits; });
      if (threadIdx.x % 32 == 0) shared_->middle[pair] = end;
      count += end - First(pair);
    });
    return Total(count);
  }
  __device__ void Narrow(bool too_many) {
    if (!narrow_) return;
    ForPairs([&](int pair) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        (too_many ? shared_->high : shared_->low)[pair] = shared_->middle[pair];
      }
      __syncwarp();
    });
  }

  // Takes exactly `rest` keys, 0 < rest < room.
  __device__ void Cut(int rest, int room) {
    Bracket();
    uint64_t low = shared_->low_bits, high = shared_->high_bits + 1;
    int at_low = room, at_high = 0;  // keys with scores >= low: at least rest; >= high: fewer
    while (high - low > 1) {
      if (narrow_ && at_low - at_high <= kFinalists) {
        RankFinalists(rest - at_high);
        return;
      }
      const uint64_t mid = low + (high - low) / 2;
      const int count = CountMiddle(mid);
      if (count >= rest) {
        low = mid;
        at_low = count;
      } else {
        high = mid;
        at_high = count;
      }
      Narrow(count >= rest);
    }
    CutTies(rest - CountAtLeast(high), low, high);
  }

  // The best `rest` keys of the ranks that the bisection left, by the common order.
  __device__ void RankFinalists(int rest) {
    if (threadIdx.x == 0) shared_->finalists = 0;
    __syncthreads();
    for (int pair = threadIdx.x; pair < p_.shape.num_k_heads; pair += kThreads) {
      const PairView view = View(pair);
      for (int rank = shared_->low[pair]; rank < shared_->high[pair]; ++rank) {
        const int at = atomicAdd(&shared_->finalists, 1);  // any order: ranks are of the set
        const uint32_t offset = selection::KeyOffset(view.keys[rank] - 1);
        shared_->final_bits[at] = view.ScoreBits(rank);
        shared_->final_order[at] =
            static_cast<int>(selection::BitReverseOffset(offset)) * kNarrowPairs + pair;
      }
    }
    __syncthreads();
    const int i = threadIdx.x, n = shared_->finalists;
    if (i < n) {
      int better = 0;
      for (int j = 0; j < n; ++j) {
        const bool same = shared_->final_bits[j] == shared_->final_bits[i];
        better += shared_->final_bits[j] > shared_->final_bits[i] ||
                  (same && shared_->final_order[j] < shared_->final_order[i]);
      }
      if (better < rest) atomicAdd(&shared_->low[shared_->final_order[i] % kNarrowPairs], 1);
    }
    __syncthreads();
    ForPairs([&](int pair) { Set(pair, shared_->low[pair]); });
  }

  // Smallest and largest score bits among the ranks in question.
  __device__ void Bracket() {
    __syncthreads();
    if (threadIdx.x == 0) {
      shared_->low_bits = ~0ull;
      shared_->high_bits = 0;
    }
    __syncthreads();
    ForPairs([&](int pair) {
      if (threadIdx.x % 32 != 0) return;
      if (narrow_) {
        shared_->low[pair] = First(pair);
        shared_->high[pair] = Cap(pair);
      }
      if (Cap(pair) <= First(pair)) return;
      const PairView view = View(pair);
      atomicMin(&shared_->low_bits, static_cast<unsigned long long>(view.ScoreBits(Cap(pair) - 1)));
      atomicMax(&shared_->high_bits, static_cast<unsigned long long>(view.ScoreBits(First(pair))));
    });
    __syncthreads();
  }

  // Prefix of `pair` that holds its scores >= high and, of those equal to low, the reversed offsets
  // below `reversed`.
  __device__ int TiesBelow(int pair, uint64_t low, uint64_t high, uint32_t reversed) {
    const PairView view = View(pair);
    return WarpPartition(AtLeast(pair, high), AtLeast(pair, low), [&](int rank) {
      return selection::BitReverseOffset(selection::KeyOffset(view.keys[rank] - 1)) < reversed;
    });
  }

  // Takes `rest` keys of score `low` on top of all those above it.
  __device__ void CutTies(int rest, uint64_t low, uint64_t high) {
    uint32_t from = 0, to = static_cast<uint32_t>(kWindow);  // ties below `from` <= rest
    while (to - from > 1) {
      const uint32_t mid = (from + to) / 2;
      int count = 0;
      ForPairs([&](int pair) { count += TiesBelow(pair, low, high, mid) - AtLeast(pair, high); });
      if (Total(count) <= rest) {
        from = mid;
      } else {
        to = mid;
      }
    }
    int below = 0;
    ForPairs([&](int pair) {
      const int end = TiesBelow(pair, low, high, from);
      below += end - AtLeast(pair, high);
      Set(pair, end);
    });
    rest -= Total(below);
    __syncthreads();
    if (threadIdx.x / 32 != 0) return;
    for (int pair = 0; pair < p_.shape.num_k_heads && rest > 0; ++pair) {  // same offset: by pair
      if (TiesBelow(pair, low, high, from + 1) > TiesBelow(pair, low, high, from)) {
        Set(pair, TiesBelow(pair, low, high, from + 1));
        --rest;
      }
    }
  }

  const Params& p_;
  Shared* shared_;
  int window_;
  int64_t n_, row_;
  selection::WindowLimits limits_;
  bool narrow_;
  int turn_ = 0;
};

__global__ void __launch_bounds__(kThreads) QuotaKernel(Params p) {
  __shared__ Shared shared;
  const int window = blockIdx.x;
  if (window >= p.ws.window_offset[p.num_seqs]) return;
  const int seq = FindOwner(p.ws.window_offset, p.num_seqs, window);
  if (p.sequences[seq].budget.mode != BudgetMode::kRetention) return;
  QuotaBlock block(p, GetWindow(p, seq, window - p.ws.window_offset[seq]), window, &shared);
  block.Run();
}

}  // namespace

cudaError_t LaunchQuota(const Params& p, cudaStream_t stream) {
  if (p.mask != nullptr || p.ws.windows == 0) return cudaSuccess;
  QuotaKernel<<<static_cast<unsigned>(p.ws.windows), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace sparsegdn::cuda
