#include "tests/unit/kernels/test_pack.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "kernels/common/float_convert.h"

namespace sparsegdn::test {

int64_t Scaled(int64_t tokens, int64_t least) {
#if defined(SPARSEGDN_TEST_REDUCED)
  return std::max(least, tokens / 4);
#else
  return std::max(least, tokens);
#endif
}

Budget DenseBudget() {
  Budget b;
  b.mode = BudgetMode::kDense;
  return b;
}

Budget RetentionBudget(double retention) {
  Budget b;
  b.mode = BudgetMode::kRetention;
  b.retention = retention;
  return b;
}

SequenceParams& Pack::Add(int64_t length, const Budget& budget) {
  SequenceParams p;
  p.prompt_tokens = length;
  p.budget = budget;
  p.final_slot = num_seqs();
  cu_seqlens.push_back(cu_seqlens.back() + static_cast<int32_t>(length));
  sequences.push_back(p);
  return sequences.back();
}

void Pack::AddInitialState(uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, 0.1f);
  sequences.back().initial_slot = static_cast<int32_t>(initial.size() / state_size());
  for (int64_t i = 0; i < state_size(); ++i) initial.push_back(normal(rng));
}

namespace {

std::vector<float> Normals(int64_t n, std::mt19937* rng) {
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& e : x) e = normal(*rng);
  return x;
}

void NormalizeRows(std::vector<float>* x, int dim) {
  for (size_t row = 0; row < x->size(); row += dim) {
    double sum = 0.0;
    for (int i = 0; i < dim; ++i) sum += double{(*x)[row + i]} * (*x)[row + i];
    for (int i = 0; i < dim; ++i) (*x)[row + i] /= static_cast<float>(std::sqrt(sum));
  }
}

void Round(std::vector<float>* x, DType dtype) {
  for (float& e : *x) {
    if (dtype == DType::kBF16) e = Bf16ToFloat(FloatToBf16(e));
    if (dtype == DType::kF16) e = F16ToFloat(FloatToF16(e));
  }
}

}  // namespace

void FillRandom(Pack* pack, uint32_t seed) {
  std::mt19937 rng(seed);
  const GdnShape& s = pack->shape;
  const int64_t t = pack->tokens();
  pack->q = Normals(t * s.num_k_heads * s.head_dim_k, &rng);
  pack->k = Normals(t * s.num_k_heads * s.head_dim_k, &rng);
  pack->v = Normals(t * s.num_v_heads * s.head_dim_v, &rng);
  if (!pack->normalize_qk) {
    NormalizeRows(&pack->q, s.head_dim_k);
    NormalizeRows(&pack->k, s.head_dim_k);
  }
  pack->log_gate = Normals(t * s.num_v_heads, &rng);
  pack->beta = Normals(t * s.num_v_heads, &rng);
  for (float& b : pack->beta) b = 1.0f / (1.0f + std::exp(-b));
  for (int64_t i = 0; i < t * s.num_v_heads; ++i) {
    float& g = pack->log_gate[i];
    const int kind = static_cast<int>(i % s.num_v_heads) % 3;
    if (kind == 0) g = -std::log1p(std::exp(-(g + 3.0f)));
    if (kind == 1) g = 0.0f;
    if (kind == 2) g = -10.0f * (1.0f + 0.1f * std::fabs(g));
  }
  RoundInputs(pack);
}

void RoundInputs(Pack* pack) {
  for (auto* x : {&pack->q, &pack->k, &pack->v}) Round(x, pack->dtype);
  Round(&pack->log_gate, pack->gate_dtype);
  Round(&pack->beta, pack->beta_dtype);
}

Pack Extract(const Pack& pack, int32_t index, int64_t begin, int64_t end) {
  Pack out = pack;
  const GdnShape& s = pack.shape;
  const int64_t first = pack.cu_seqlens[index] + begin;
  const int64_t last = pack.cu_seqlens[index] + end;
  const auto cut = [&](auto* x, int64_t width) {
    if (!x->empty()) *x = {x->begin() + first * width, x->begin() + last * width};
  };
  cut(&out.q, int64_t{s.num_k_heads} * s.head_dim_k);
  cut(&out.k, int64_t{s.num_k_heads} * s.head_dim_k);
  cut(&out.v, int64_t{s.num_v_heads} * s.head_dim_v);
  cut(&out.log_gate, s.num_v_heads);
  cut(&out.beta, s.num_v_heads);
  cut(&out.mask, s.num_k_heads);
  out.cu_seqlens = {0, static_cast<int32_t>(end - begin)};
  out.sequences = {pack.sequences[index]};
  out.sequences[0].first_position += begin;
  out.sequences[0].final_slot = 0;
  return out;
}

reference::Sequence ReferenceInput(const Pack& pack, int32_t index,
                                   const std::vector<uint8_t>& pack_mask) {
  const SequenceParams& p = pack.sequences[index];
  const int64_t length = pack.cu_seqlens[index + 1] - pack.cu_seqlens[index];
  const Pack part = Extract(pack, index, 0, length);
  const auto widen = [](const std::vector<float>& x) {
    return std::vector<double>(x.begin(), x.end());
  };
  reference::Sequence s;
  s.shape = pack.shape;
  s.num_tokens = length;
  s.first_position = p.first_position;
  s.q = widen(part.q);
  s.k = widen(part.k);
  s.v = widen(part.v);
  s.log_gate = widen(part.log_gate);
  s.beta = widen(part.beta);
  const int64_t pairs = pack.shape.num_k_heads;
  s.mask.assign(pack_mask.begin() + pack.cu_seqlens[index] * pairs,
                pack_mask.begin() + pack.cu_seqlens[index + 1] * pairs);
  if (p.initial_slot >= 0) {
    const auto at = pack.initial.begin() + p.initial_slot * pack.state_size();
    s.initial_state.assign(at, at + pack.state_size());
  }
  s.scale = pack.scale;
  s.normalize_qk = pack.normalize_qk;
  s.local = p.budget.local;
  s.snapshot_every = p.snapshot_every;
  return s;
}

}  // namespace sparsegdn::test
