#include "kernels/cpu/selection.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <queue>
#include <vector>

#include "kernels/common/float_convert.h"
#include "kernels/common/selection_math.h"

namespace sparsegdn::cpu {
namespace {

using selection::KeyOffset;
using selection::KeyScore;
using selection::PairKey;

// The part of one window that lies in one sequence of the call.
struct Window {
  int32_t sequence;
  int64_t row_begin, row_end;    // rows of the call
  int64_t free_begin, free_end;  // rows that are not forced
  int64_t first_offset;          // window offset of row_begin
};

// One pair's candidates: keys sorted best first, and the sum of their scores.
struct Ranking {
  const uint64_t* keys = nullptr;
  int64_t count = 0;
  int64_t score_sum = 0;
};

std::vector<Window> ListWindows(const GdnForwardArgs& args) {
  std::vector<Window> windows;
  for (int32_t i = 0; i < args.num_seqs; ++i) {
    const SequenceParams& p = args.sequences[i];
    if (p.budget.mode == BudgetMode::kDense) continue;
    const int64_t shift = p.first_position - args.cu_seqlens[i];
    for (int64_t row = args.cu_seqlens[i]; row < args.cu_seqlens[i + 1];) {
      const int64_t next_window = ((row + shift) / kWindow + 1) * kWindow - shift;
      const int64_t end = std::min<int64_t>(args.cu_seqlens[i + 1], next_window);
      const auto free = selection::NonForced(row + shift, end + shift, p.prompt_tokens, p.budget);
      windows.push_back(
          {i, row, end, free.begin - shift, free.end - shift, (row + shift) % kWindow});
      row = end;
    }
  }
  return windows;
}

float HeadScore(const GdnForwardArgs& args, const VectorKernels& vector, Selector selector,
                int64_t row, int64_t head) {
  const ConstTensorRef& b = args.beta;
  const float beta = LoadElement(b.data, b.dtype, row * b.token_stride + head * b.head_stride);
  if (selector == Selector::kBeta) return beta;
  const int64_t at = row * args.v.token_stride + head * args.v.head_stride;
  const void* v = static_cast<const char*>(args.v.data) + at * DTypeBytes(args.v.dtype);
  return selection::MulRn(beta, vector.row_norm(v, args.v.dtype, args.shape.head_dim_v));
}

// Radix sort, largest first; keys have kOffsetBits + 26 bits. `other` holds `count` entries.
void SortDescending(uint64_t* keys, uint64_t* other, int64_t count) {
  constexpr int kDigitBits = 8;
  constexpr int kKeyBits = selection::kOffsetBits + 26;
  uint64_t* from = keys;
  uint64_t* to = other;
  for (int shift = 0; shift < kKeyBits; shift += kDigitBits) {
    std::array<int32_t, 1 << kDigitBits> start{};
    for (int64_t i = 0; i < count; ++i) ++start[(from[i] >> shift) & 0xff];
    if (start[(from[0] >> shift) & 0xff] == count) continue;  // one digit value: nothing to do
    int32_t sum = 0;
    for (int digit = (1 << kDigitBits) - 1; digit >= 0; --digit) {
      const int32_t here = start[digit];
      start[digit] = sum;
      sum += here;
    }
    for (int64_t i = 0; i < count; ++i) to[start[(from[i] >> shift) & 0xff]++] = from[i];
    std::swap(from, to);
  }
  if (from != keys) std::memcpy(keys, from, sizeof(uint64_t) * count);
}

Ranking RankPair(const GdnForwardArgs& args, const VectorKernels& vector, const Window& w, int pair,
                 uint64_t* keys) {
  const int ratio = args.shape.num_v_heads / args.shape.num_k_heads;
  const Selector selector = args.sequences[w.sequence].budget.selector;
  Ranking r{keys, 0, 0};
  for (int64_t row = w.free_begin; row < w.free_end; ++row) {
    const int64_t head = int64_t{pair} * ratio;
    float score = HeadScore(args, vector, selector, row, head);
    for (int h = 1; h < ratio; ++h) {
      score = selection::CombineScores(score, HeadScore(args, vector, selector, row, head + h));
    }
    const int32_t z = selection::FixedScore(score);
    if (z == selection::kNeverSelected) continue;
    const uint32_t offset = static_cast<uint32_t>(w.first_offset + row - w.row_begin);
    keys[r.count++] = PairKey(z, offset);
    r.score_sum += z;
  }
  uint64_t other[kWindow];
  if (r.count > 1) SortDescending(keys, other, r.count);
  return r;
}

int64_t CoverageCount(const Ranking& r, double tau, const selection::WindowLimits& limits) {
  const auto square = [&](int64_t i) {
    const uint64_t z = static_cast<uint64_t>(KeyScore(r.keys[i]));
    return z * z;
  };
  uint64_t total = 0;
  for (int64_t i = 0; i < r.count; ++i) total += square(i);
  const uint64_t target = selection::CoverageTarget(tau, total);
  int64_t count = 0;
  for (uint64_t covered = 0; covered < target; ++count) covered += square(count);
  return std::clamp(count, limits.lo, limits.hi);
}

// The head of one pair's list in the common order.
struct Front {
  double score;
  uint32_t reversed_offset;
  int pair;
};
struct ComesLater {
  bool operator()(const Front& a, const Front& b) const {
    if (a.score != b.score) return a.score < b.score;
    if (a.reversed_offset != b.reversed_offset) return a.reversed_offset > b.reversed_offset;
    return a.pair > b.pair;
  }
};

// Walks the common order from every pair's first lo on: a merge of the pairs' sorted lists, each
// leaving it at hi.
void SpendBudget(const std::vector<Ranking>& ranks, int64_t n,
                 const selection::WindowLimits& limits, std::vector<int64_t>* taken) {
  std::priority_queue<Front, std::vector<Front>, ComesLater> fronts;
  const auto push = [&](int pair) {
    const Ranking& r = ranks[pair];
    const int64_t at = (*taken)[pair];
    if (at >= r.count || at >= limits.hi) return;
    const uint64_t key = r.keys[at];
    fronts.push({selection::NormalisedScore(KeyScore(key), n, r.score_sum),
                 selection::BitReverseOffset(KeyOffset(key)), pair});
  };
  int64_t spent = 0;
  for (int p = 0; p < ranks.size(); ++p) {
    (*taken)[p] = std::min(limits.lo, ranks[p].count);
    spent += (*taken)[p];
    push(p);
  }
  for (; spent < limits.total && !fronts.empty(); ++spent) {
    const int pair = fronts.top().pair;
    fronts.pop();
    ++(*taken)[pair];
    push(pair);
  }
}

void WriteWindow(const GdnForwardArgs& args, const Window& w, const Ranking* ranks, uint8_t* mask) {
  const Budget& budget = args.sequences[w.sequence].budget;
  const int pairs = args.shape.num_k_heads;
  const int64_t n = w.free_end - w.free_begin;
  const auto limits = selection::ComputeWindowLimits(budget, n, pairs);
  const std::vector<Ranking> list(ranks, ranks + pairs);
  std::vector<int64_t> taken(pairs, 0);
  if (budget.mode == BudgetMode::kRetention) {
    SpendBudget(list, n, limits, &taken);
  } else {
    for (int p = 0; p < pairs; ++p) {
      taken[p] = std::min(CoverageCount(list[p], budget.coverage, limits), list[p].count);
    }
  }
  std::memset(mask + w.row_begin * pairs, 1, (w.row_end - w.row_begin) * pairs);
  std::memset(mask + w.free_begin * pairs, 0, n * pairs);
  for (int p = 0; p < pairs; ++p) {
    for (int64_t i = 0; i < taken[p]; ++i) {
      const int64_t row = w.row_begin + KeyOffset(list[p].keys[i]) - w.first_offset;
      mask[row * pairs + p] = 1;
    }
  }
}

}  // namespace

int64_t SelectionKeyCount(int64_t num_tokens, const GdnShape& shape) {
  return num_tokens * shape.num_k_heads;
}

void SelectEvents(const GdnForwardArgs& args, const VectorKernels& vector, bool fill_dense,
                  ThreadPool* pool, uint64_t* keys, uint8_t* mask) {
  const int64_t pairs = args.shape.num_k_heads;
  for (int32_t i = 0; fill_dense && i < args.num_seqs; ++i) {
    if (args.sequences[i].budget.mode != BudgetMode::kDense) continue;
    std::memset(mask + args.cu_seqlens[i] * pairs, 1,
                (args.cu_seqlens[i + 1] - args.cu_seqlens[i]) * pairs);
  }
  const std::vector<Window> windows = ListWindows(args);
  std::vector<Ranking> ranks(windows.size() * pairs);
  pool->Run(static_cast<int64_t>(ranks.size()), [&](int64_t index, int) {
    const Window& w = windows[index / pairs];
    const int64_t pair = index % pairs;
    uint64_t* at = keys + w.row_begin * pairs + pair * (w.row_end - w.row_begin);
    ranks[index] = RankPair(args, vector, w, static_cast<int>(pair), at);
  });
  pool->Run(static_cast<int64_t>(windows.size()), [&](int64_t index, int) {
    WriteWindow(args, windows[index], &ranks[index * pairs], mask);
  });
}

void CountSelected(const GdnForwardArgs& args, const uint8_t* mask, bool mask_covers_dense) {
  const int64_t pairs = args.shape.num_k_heads;
  for (int32_t i = 0; i < args.num_seqs; ++i) {
    const int64_t begin = args.cu_seqlens[i], end = args.cu_seqlens[i + 1];
    int32_t* out = args.selected + i * pairs;
    if (!mask_covers_dense && args.sequences[i].budget.mode == BudgetMode::kDense) {
      std::fill(out, out + pairs, static_cast<int32_t>(end - begin));
      continue;
    }
    std::fill(out, out + pairs, 0);
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t p = 0; p < pairs; ++p) out[p] += mask[row * pairs + p] != 0 ? 1 : 0;
    }
  }
}

}  // namespace sparsegdn::cpu
