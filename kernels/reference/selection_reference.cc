#include "kernels/reference/selection_reference.h"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace sparsegdn::reference {
namespace {

struct Candidate {
  int64_t token;  // row of the call
  int pair;
  int64_t z;          // -1: NaN, never selected
  double normalised;  // z * (n / sum of z over the pair)
  int reversed;       // bit-reversed window offset
  bool taken = false;
};

bool Before(const Candidate& a, const Candidate& b) {
  return std::make_tuple(-a.normalised, a.reversed, a.pair) <
         std::make_tuple(-b.normalised, b.reversed, b.pair);
}

int Reverse11(int64_t offset) {
  int r = 0;
  for (int bit = 0; bit < 11; ++bit) r = 2 * r + static_cast<int>((offset >> bit) % 2);
  return r;
}

// fp32 |v| with 32 interleaved partial sums, then a halving tree.
float Norm32(const float* v, int dim) {
  std::vector<float> lane(32, 0.0f);
  for (int i = 0; i < dim; ++i) {
    const float square = v[i] * v[i];
    lane[i % 32] = lane[i % 32] + square;
  }
  for (int half = 16; half >= 1; half /= 2) {
    for (int l = 0; l < half; ++l) lane[l] = lane[l] + lane[l + half];
  }
  return std::sqrt(lane[0]);
}

int64_t FixedPoint(const SelectionInput& in, int64_t token, int pair) {
  const int ratio = in.shape.num_v_heads / in.shape.num_k_heads;
  float score = -INFINITY;
  for (int h = pair * ratio; h < (pair + 1) * ratio; ++h) {
    const int64_t th = token * in.shape.num_v_heads + h;
    float s = in.beta[th];
    if (in.budget.selector == Selector::kWriteNorm) {
      s = s * Norm32(&in.v[th * in.shape.head_dim_v], in.shape.head_dim_v);
    }
    if (std::isnan(s)) return -1;
    score = std::max(score, s);
  }
  const double scaled = double{score} * 65536.0;
  return scaled >= 33554432.0 ? 33554432 : std::max<int64_t>(0, std::llrint(scaled));
}

// Candidates of one window of one pair, best first, normalised.
std::vector<Candidate> RankPair(const SelectionInput& in, int64_t begin, int64_t end, int pair) {
  std::vector<Candidate> list;
  int64_t sum = 0;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t z = FixedPoint(in, t, pair);
    if (z >= 0) sum += z;
    if (z >= 0) list.push_back({t, pair, z, 0.0, Reverse11((in.first_position + t) % 2048)});
  }
  const double factor = sum == 0 ? 0.0 : double(end - begin) / double(sum);
  for (Candidate& c : list) c.normalised = double(c.z) * factor;
  std::sort(list.begin(), list.end(), Before);
  return list;
}

int64_t CoverageCount(const std::vector<Candidate>& ranked, double tau, int64_t lo, int64_t hi) {
  uint64_t total = 0;
  for (const Candidate& c : ranked) total += static_cast<uint64_t>(c.z) * c.z;
  const double wanted = std::ceil(tau * static_cast<double>(total));
  uint64_t target = total;
  if (wanted < static_cast<double>(total)) target = static_cast<uint64_t>(wanted);
  int64_t count = 0;
  for (uint64_t covered = 0; covered < target; ++count) {
    covered += static_cast<uint64_t>(ranked[count].z) * ranked[count].z;
  }
  return std::min(std::max(count, lo), hi);
}

void SelectWindow(const SelectionInput& in, int64_t begin, int64_t end,
                  std::vector<uint8_t>* mask) {
  const Budget& b = in.budget;
  const int pairs = in.shape.num_k_heads;
  const double n = double(end - begin);
  double min_share = b.min_retention, max_share = b.max_retention;
  const bool retention = b.mode == BudgetMode::kRetention;
  if (min_share < 0) min_share = retention ? b.retention / 4 : 0.02;
  if (max_share < 0) max_share = retention ? std::min(1.0, 2 * b.retention) : 0.5;
  const int64_t lo = int64_t(std::ceil(min_share * n));
  const int64_t hi = std::max(lo, int64_t(std::floor(max_share * n)));
  std::vector<Candidate> all;
  std::vector<int64_t> count(pairs, 0);
  int64_t taken = 0;
  for (int p = 0; p < pairs; ++p) {
    std::vector<Candidate> ranked = RankPair(in, begin, end, p);
    const int64_t first = retention ? lo : CoverageCount(ranked, b.coverage, lo, hi);
    for (int64_t i = 0; i < std::min<int64_t>(first, ranked.size()); ++i) {
      ranked[i].taken = true;
      ++count[p];
      ++taken;
    }
    all.insert(all.end(), ranked.begin(), ranked.end());
  }
  if (retention) {
    const int64_t budget =
        std::clamp<int64_t>(std::llrint(b.retention * n * pairs), lo * pairs, hi * pairs);
    std::sort(all.begin(), all.end(), Before);
    for (Candidate& c : all) {
      if (taken >= budget) break;
      if (c.taken || count[c.pair] >= hi) continue;
      c.taken = true;
      ++count[c.pair];
      ++taken;
    }
  }
  for (const Candidate& c : all) {
    if (c.taken) (*mask)[c.token * pairs + c.pair] = 1;
  }
}

}  // namespace

std::vector<uint8_t> SelectEvents(const SelectionInput& in) {
  const int pairs = in.shape.num_k_heads;
  const bool dense = in.budget.mode == BudgetMode::kDense;
  std::vector<uint8_t> mask(in.num_tokens * pairs, dense ? 1 : 0);
  if (dense) return mask;
  int64_t begin = -1, end = -1;  // non-forced tokens of the current window
  for (int64_t t = 0; t <= in.num_tokens; ++t) {
    const int64_t position = in.first_position + t;
    if (t == in.num_tokens || position % 2048 == 0) {
      if (begin >= 0) SelectWindow(in, begin, end, &mask);
      begin = -1;
    }
    if (t == in.num_tokens) break;
    const bool forced =
        position < in.budget.keep_first || position >= in.prompt_tokens - in.budget.keep_last;
    if (forced) {
      for (int p = 0; p < pairs; ++p) mask[t * pairs + p] = 1;
    } else {
      if (begin < 0) begin = t;
      end = t + 1;
    }
  }
  return mask;
}

}  // namespace sparsegdn::reference
