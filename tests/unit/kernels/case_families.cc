#include "tests/unit/kernels/case_families.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace sparsegdn::test {
namespace {

constexpr GdnShape kShape{2, 4, 64, 64};

Pack OneSequence(DType dtype, const Budget& budget, int64_t length) {
  Pack p;
  p.shape = kShape;
  p.dtype = dtype;
  p.Add(length, budget);
  FillRandom(&p, 7);
  return p;
}

void SetKeys(Pack* p, float (*value)(int64_t token, int dim, std::mt19937* rng), double norm) {
  std::mt19937 rng(11);
  const int dk = p->shape.head_dim_k;
  const int64_t pairs = p->shape.num_k_heads;
  for (int64_t t = 0; t < p->tokens(); ++t) {
    for (int64_t h = 0; h < pairs; ++h) {
      float* k = &p->k[(t * pairs + h) * dk];
      double sum = 0.0;
      for (int i = 0; i < dk; ++i) {
        k[i] = value(t, i, &rng);
        sum += double{k[i]} * k[i];
      }
      for (int i = 0; i < dk; ++i) k[i] *= static_cast<float>(norm / std::sqrt(sum));
    }
  }
}

float Hash01(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return static_cast<float>(x >> 40) * 0x1p-24f;
}

Pack ZeroGate(DType dtype, const Budget& budget) {
  Pack p = OneSequence(dtype, budget, Scaled(600));
  const int64_t heads = p.shape.num_v_heads;
  for (int64_t i = 0; i < p.tokens() * heads; ++i) {
    const bool everywhere = i % heads < heads / 2;
    if (everywhere || Hash01(i) < 0.3f) p.log_gate[i] = 0.0f;
  }
  return p;
}

Pack EmptySequences(DType dtype, const Budget& budget) {
  Pack p;
  p.shape = kShape;
  p.dtype = dtype;
  int seed = 100;
  for (int64_t length : {0, 0, 70, 0, 1, 129, 0}) {
    p.Add(length, budget);
    if (seed % 2 == 0) p.AddInitialState(seed);
    ++seed;
  }
  FillRandom(&p, 8);
  return p;
}

// Heads of 128, which the Hopper kernel takes: several groups and windows, and time segments.
Pack WidePack(DType dtype, const Budget& budget) {
  Pack p;
  p.shape = {1, 2, 128, 128};
  p.dtype = dtype;
  p.Add(Scaled(700), budget);
  p.Add(1, budget);
  p.Add(0, budget);
  p.Add(Scaled(2100), budget);
  p.AddInitialState(31);
  p.Add(130, budget);
  FillRandom(&p, 30);
  return p;
}

Pack TinyDecay(DType dtype, const Budget& budget) {
  Pack p = OneSequence(dtype, budget, 200);
  std::fill(p.log_gate.begin(), p.log_gate.end(), std::log(1e-12f));
  return p;
}

Pack GateCliff(DType dtype, const Budget& budget) {
  Pack p = OneSequence(dtype, budget, Scaled(1000, 300));
  const int64_t heads = p.shape.num_v_heads;
  for (int64_t t = 0; t < p.tokens(); ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      float& g = p.log_gate[t * heads + h];
      g = -0.02f * Hash01(t * heads + h);
      if (t % 64 == 0) g = -90.0f;
      if (t % 200 >= 70 && t % 200 < 70 + 20 * h) g = -316.0f + Hash01(t);  // sums reach 2e4
      if (t % 191 == 190) g = -INFINITY;
    }
  }
  for (float& v : p.v) v = std::clamp(5.0f * v, -0.28f, 24.8f);
  RoundInputs(&p);
  return p;
}

Pack IdenticalKeys(DType dtype, const Budget& budget) {
  Pack p = OneSequence(dtype, budget, Scaled(500, 300));
  SetKeys(
      &p, [](int64_t, int dim, std::mt19937*) { return dim % 3 - 0.7f; }, 1.0);
  std::fill(p.log_gate.begin(), p.log_gate.end(), -1e-3f);
  std::fill(p.beta.begin(), p.beta.end(), 0.835f);
  RoundInputs(&p);
  return p;
}

Pack NearCollinear(DType dtype, const Budget& budget) {
  Pack p = OneSequence(dtype, budget, Scaled(8192));
  SetKeys(
      &p,
      [](int64_t, int dim, std::mt19937* rng) {
        std::normal_distribution<float> noise(0.0f, 0.02f);
        return std::cos(static_cast<float>(dim)) + noise(*rng);
      },
      0.9);
  for (int64_t i = 0; i < static_cast<int64_t>(p.log_gate.size()); ++i) {
    p.log_gate[i] = -0.012f - 0.022f * Hash01(i);
  }
  std::fill(p.beta.begin(), p.beta.end(), 1.0f);
  RoundInputs(&p);
  return p;
}

Pack Unnormalised(DType dtype, const Budget& budget) {
  Pack p;
  p.shape = kShape;
  p.dtype = dtype;
  p.normalize_qk = true;
  p.Add(Scaled(600), budget);
  FillRandom(&p, 9);
  const int64_t row = int64_t{p.shape.num_k_heads} * p.shape.head_dim_k;
  for (int64_t i = 0; i < static_cast<int64_t>(p.k.size()); ++i) {
    p.k[i] *= 0.01f + 30.0f * Hash01(i / row);
    p.q[i] *= 0.01f + 30.0f * Hash01(i / row + 77);
  }
  std::fill(p.k.begin() + 5 * row, p.k.begin() + 6 * row, 0.0f);  // only eps keeps this row finite
  RoundInputs(&p);
  return p;
}

Pack Bf16Gate(DType dtype, const Budget& budget) {
  Pack p;
  p.shape = kShape;
  p.dtype = dtype;
  p.gate_dtype = DType::kBF16;
  p.beta_dtype = DType::kBF16;
  p.Add(Scaled(1500), budget);
  FillRandom(&p, 10);
  for (float& g : p.log_gate) g *= 0.05f;
  RoundInputs(&p);
  return p;
}

Pack RepeatedKeys(DType dtype, const Budget& budget) {
  Pack p = OneSequence(dtype, budget, Scaled(1024, 320));
  SetKeys(
      &p,
      [](int64_t token, int dim, std::mt19937*) {
        return Hash01((token % 32) * 64 + dim) + Hash01((token % 32) * 64 + dim + 9999) - 1.0f;
      },
      1.0);
  std::fill(p.log_gate.begin(), p.log_gate.end(), 0.0f);
  std::fill(p.beta.begin(), p.beta.end(), 1.0f);
  RoundInputs(&p);
  return p;
}

// A given mask: pair 0 has no event in the first window and one late event in the second, pair 1
// none at all.
Pack NoEvents(DType dtype, const Budget& budget) {
  Pack p = OneSequence(dtype, budget, 2048 + 300);
  p.AddInitialState(3);
  p.mask.assign(p.tokens() * p.shape.num_k_heads, 0);
  p.mask[(p.tokens() - 7) * p.shape.num_k_heads] = 1;
  return p;
}

Pack TiedScores(DType dtype, const Budget& budget) {
  Pack p = OneSequence(dtype, budget, Scaled(2048));
  for (float& b : p.beta) b = b > 0.3f ? 1.0f : b;
  return p;
}

Pack BetaEdges(DType dtype, const Budget& budget) {
  Pack p = OneSequence(dtype, budget, 300);
  const int64_t heads = p.shape.num_v_heads;
  for (int64_t i = 0; i < p.tokens() * heads; ++i) {
    p.beta[i] = Hash01(i) < 0.5f ? 0.0f : 1.0f;
    if (p.beta[i] == 0.0f && Hash01(i + 1) < 0.5f) p.log_gate[i] = 0.0f;
  }
  return p;
}

Pack Tail(DType dtype, const Budget& budget) {
  Pack p;
  p.shape = kShape;
  p.dtype = dtype;
  for (int64_t r : {1, 15, 16, 17, 39, 63, 64, 65}) p.Add(64 + r, budget);
  for (int64_t r : {1, 15, 16, 17, 39, 63}) p.Add(r, budget);
  FillRandom(&p, 12);
  return p;
}

// No decay at all: whatever rounds the running state accumulates over the whole sequence.
Pack StateDType(DType dtype, const Budget& budget) {
  Pack p;
  p.shape = {1, 1, 32, 32};
  p.dtype = dtype;
  p.Add(Scaled(8192), budget);
  FillRandom(&p, 13);
  std::fill(p.log_gate.begin(), p.log_gate.end(), 0.0f);
  for (float& b : p.beta) b *= 0.1f;
  RoundInputs(&p);
  return p;
}

}  // namespace

const std::vector<CaseFamily>& CaseFamilies() {
  static const std::vector<CaseFamily> families = {
      {"zero_gate", ZeroGate},           {"empty_sequences", EmptySequences},
      {"wide_pack", WidePack},           {"tiny_decay", TinyDecay},
      {"gate_cliff", GateCliff},         {"identical_keys", IdenticalKeys},
      {"near_collinear", NearCollinear}, {"unnormalised", Unnormalised},
      {"bf16_gate", Bf16Gate},           {"repeated_keys", RepeatedKeys},
      {"no_events", NoEvents},           {"tied_scores", TiedScores},
      {"beta_edges", BetaEdges},         {"tail", Tail},
      {"state_dtype", StateDType},
  };
  return families;
}

}  // namespace sparsegdn::test
