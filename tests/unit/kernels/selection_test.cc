// Selection against the independent reference, mask by mask, and its stated bounds.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <tuple>

#include "kernels/common/selection_math.h"
#include "kernels/reference/selection_reference.h"
#include "tests/unit/kernels/test_pack.h"

namespace sparsegdn::test {
namespace {

struct SelectionRow {
  const char* name;
  Budget budget;
  int64_t length = 0;
  int64_t first_position = 0;
  int64_t rest = 0;  // tokens of the prompt after this call
  void (*modify)(Pack* pack) = nullptr;
};
void PrintTo(const SelectionRow& row, std::ostream* os) { *os << row.name; }

Budget Coverage(double tau, double min = -1.0, double max = -1.0) {
  Budget b;
  b.mode = BudgetMode::kCoverage;
  b.coverage = tau;
  b.min_retention = min;
  b.max_retention = max;
  return b;
}

Budget Bounded(double rho, double min, double max) {
  Budget b = RetentionBudget(rho);
  b.min_retention = min;
  b.max_retention = max;
  return b;
}

Budget With(Budget b, Selector selector, int64_t keep_first, int64_t keep_last) {
  b.selector = selector;
  b.keep_first = keep_first;
  b.keep_last = keep_last;
  return b;
}

void Saturate(Pack* p) {
  for (float& b : p->beta) b = b > 0.4f ? 1.0f : b;
}
void AllEqual(Pack* p) { std::fill(p->beta.begin(), p->beta.end(), 0.5f); }
void AllZero(Pack* p) { std::fill(p->beta.begin(), p->beta.end(), 0.0f); }
// One pair far ahead, so that it hits its maximum and the rest moves on.
void OnePairLoud(Pack* p) {
  for (size_t i = 0; i < p->beta.size(); ++i) {
    const bool loud = i % p->shape.num_v_heads < 2;
    p->beta[i] = loud ? (i % 37 == 0 ? 1.0f : 1e-4f) : 0.5f + 1e-3f * (i % 101);
  }
}
void SomeNan(Pack* p) {
  for (size_t i = 0; i < p->beta.size(); i += 3) p->beta[i] = std::nanf("");
  for (size_t i = 0; i < p->v.size(); i += 97) p->v[i] = std::nanf("");
}
void HugeValues(Pack* p) {
  for (size_t i = 0; i < p->v.size(); i += 5) p->v[i] = 1e30f;
  for (size_t i = 0; i < p->v.size(); i += 211) p->v[i] = std::numeric_limits<float>::infinity();
}
void Bf16Beta(Pack* p) {
  p->beta_dtype = DType::kBF16;
  RoundInputs(p);
}

std::vector<SelectionRow> Rows() {
  const Selector norm = Selector::kWriteNorm, beta = Selector::kBeta;
  const Budget r29 = RetentionBudget(0.29);
  return {
      {"default", r29, 5000},
      {"write_norm", With(r29, norm, 0, 64), 5000},
      {"retention_tiny", RetentionBudget(0.001), 3000},
      {"retention_full", RetentionBudget(1.0), 2500},
      {"retention_half", RetentionBudget(0.5), 2500},
      {"min_equals_max", Bounded(0.25, 0.25, 0.25), 3000},
      {"wide_bounds", Bounded(0.3, 0.0, 1.0), 3000},
      {"min_zero_small", Bounded(0.01, 0.0, 0.02), 3000},
      {"coverage_default", Coverage(0.9), 5000},
      {"coverage_low", Coverage(0.05), 3000},
      {"coverage_all", Coverage(1.0, 0.0, 1.0), 3000},
      {"coverage_write_norm", With(Coverage(0.7, 0.1, 0.8), norm, 3, 5), 3000},
      {"keep_first", With(r29, beta, 300, 0), 2600},
      {"keep_first_past_window", With(r29, beta, 2100, 0), 4500},
      {"keep_last_past_window", With(r29, beta, 0, 2500), 4500},
      {"keep_everything", With(r29, beta, 3000, 3000), 2600},
      {"keep_beyond_prompt", With(r29, beta, 0, 10000), 2600},
      {"one_token", With(r29, beta, 0, 0), 1},
      {"two_tokens", With(r29, norm, 0, 0), 2},
      {"exactly_one_window", With(r29, beta, 0, 0), 2048},
      {"one_past_window", With(r29, beta, 0, 0), 2049},
      {"middle_of_prompt", r29, 3000, 4096, 5000},
      {"unaligned_start", r29, 3000, 1500, 0},
      {"unaligned_short", r29, 100, 2000, 3},
      {"forced_by_rest", With(r29, beta, 0, 200), 1000, 2048, 100},
      {"tied_scores", r29, 5000, 0, 0, Saturate},
      {"all_equal", r29, 5000, 0, 0, AllEqual},
      {"all_zero", r29, 2500, 0, 0, AllZero},
      {"all_zero_coverage", Coverage(0.9), 2500, 0, 0, AllZero},
      {"one_pair_loud", r29, 4100, 0, 0, OnePairLoud},
      {"nan_scores", r29, 3000, 0, 0, SomeNan},
      {"nan_scores_full_budget", With(RetentionBudget(1.0), norm, 0, 0), 3000, 0, 0, SomeNan},
      {"nan_coverage", Coverage(1.0, 0.0, 1.0), 3000, 0, 0, SomeNan},
      {"saturated_write_norm", With(r29, norm, 0, 64), 3000, 0, 0, HugeValues},
      {"bf16_beta", r29, 3000, 0, 0, Bf16Beta},
      {"dense", DenseBudget(), 300, 0, 0, SomeNan},
  };
}

using Param = std::tuple<TestDevice*, SelectionRow, DType>;
class SelectionTable : public testing::TestWithParam<Param> {};

Pack Build(const SelectionRow& row, DType dtype) {
  Pack p;
  p.shape = {5, 10, 8, 71};
  p.dtype = dtype;
  SequenceParams& s = p.Add(row.length, row.budget);
  s.first_position = row.first_position;
  s.prompt_tokens = row.first_position + row.length + row.rest;
  FillRandom(&p, 50);
  if (row.modify != nullptr) row.modify(&p);
  return p;
}

TEST_P(SelectionTable, EqualsIndependentReference) {
  const auto& [device, row, dtype] = GetParam();
  const Pack p = Build(row, dtype);
  const SequenceParams& s = p.sequences[0];
  const PackResult r = RunPack(device, p);
  ASSERT_TRUE(r.status.ok()) << r.status.message();
  const auto want = reference::SelectEvents(
      {p.shape, row.length, s.first_position, s.prompt_tokens, s.budget, p.beta, p.v});
  ASSERT_EQ(want.size(), r.mask.size());
  int64_t differences = 0;
  std::vector<int32_t> selected(p.shape.num_k_heads, 0);
  for (size_t i = 0; i < want.size(); ++i) {
    differences += want[i] != r.mask[i] ? 1 : 0;
    selected[i % selected.size()] += want[i];
  }
  EXPECT_EQ(differences, 0);
  EXPECT_EQ(r.selected, selected);
}

INSTANTIATE_TEST_SUITE_P(All, SelectionTable,
                         testing::Combine(testing::ValuesIn(TestDevices()),
                                          testing::ValuesIn(Rows()),
                                          testing::Values(DType::kF32, DType::kBF16)),
                         [](const testing::TestParamInfo<Param>& info) {
                           return std::string(std::get<0>(info.param)->name()) + "_" +
                                  std::get<1>(info.param).name +
                                  (std::get<2>(info.param) == DType::kF32 ? "_f32" : "_bf16");
                         });

class Selection : public testing::TestWithParam<TestDevice*> {};
INSTANTIATE_TEST_SUITE_P(All, Selection, testing::ValuesIn(TestDevices()),
                         [](const auto& info) { return std::string(info.param->name()); });

// Equal scores must not all fall into the first half of the window.
TEST_P(Selection, TiedScoresSpreadOverTheWindow) {
  Pack p;
  p.shape = {2, 2, 8, 8};
  Budget b = RetentionBudget(0.25);
  b.keep_last = 0;
  p.Add(kWindow, b);
  FillRandom(&p, 51);
  AllEqual(&p);
  const PackResult r = RunPack(GetParam(), p);
  ASSERT_TRUE(r.status.ok()) << r.status.message();
  for (int eighth = 0; eighth < 8; ++eighth) {
    int count = 0;
    for (int64_t i = 0; i < kWindow / 8 * 2; ++i) count += r.mask[eighth * kWindow / 8 * 2 + i];
    EXPECT_EQ(count, kWindow / 8 * 2 / 4) << "eighth " << eighth;
  }
}

// Budgets move across pairs, within [lo, hi], and their total is K exactly.
TEST_P(Selection, BudgetsMoveAcrossPairs) {
  Pack p;
  p.shape = {4, 8, 8, 8};
  Budget b = RetentionBudget(0.2);
  b.keep_last = 0;
  p.Add(kWindow, b);
  FillRandom(&p, 52);
  OnePairLoud(&p);
  const PackResult r = RunPack(GetParam(), p);
  ASSERT_TRUE(r.status.ok()) << r.status.message();
  int64_t total = 0;
  for (int32_t n : r.selected) {
    total += n;
    EXPECT_GE(n, std::ceil(0.05 * kWindow));
    EXPECT_LE(n, std::floor(0.4 * kWindow));
  }
  EXPECT_EQ(total, std::llrint(0.2 * kWindow * 4));
  EXPECT_LT(r.selected[0], r.selected[1]);
}

// Select alone writes the mask of Forward.
TEST_P(Selection, SelectAloneEqualsForward) {
  const Pack p =
      Build({"", With(RetentionBudget(0.29), Selector::kWriteNorm, 2, 64), 3000}, DType::kF32);
  const PackResult forward = RunPack(GetParam(), p);
  ASSERT_TRUE(forward.status.ok());
  TestDevice* device = GetParam();
  DeviceBuffer beta(device, p.beta.size() * 4), v(device, p.v.size() * 4);
  DeviceBuffer cu(device, 8), sequences(device, sizeof(SequenceParams));
  DeviceBuffer mask(device, forward.mask.size()), selected(device, forward.selected.size() * 4);
  beta.Upload(p.beta.data());
  v.Upload(p.v.data());
  cu.Upload(p.cu_seqlens.data());
  sequences.Upload(p.sequences.data());
  GdnForwardArgs a;
  a.shape = p.shape;
  a.num_tokens = p.tokens();
  a.num_seqs = 1;
  a.cu_seqlens = static_cast<const int32_t*>(cu.data());
  a.sequences = static_cast<const SequenceParams*>(sequences.data());
  a.beta = {beta.data(), DType::kF32, p.shape.num_v_heads, 1};
  a.v = {v.data(), DType::kF32, int64_t{p.shape.num_v_heads} * p.shape.head_dim_v,
         p.shape.head_dim_v};
  a.mask_out = static_cast<uint8_t*>(mask.data());
  a.selected = static_cast<int32_t*>(selected.data());
  auto backend = device->CreateBackend();
  ASSERT_TRUE(backend.ok());
  const auto bytes = (*backend)->WorkspaceBytes({p.shape, p.tokens(), 1, 1.0, DType::kF32});
  ASSERT_TRUE(bytes.ok());
  DeviceBuffer workspace(device, *bytes);
  a.workspace = workspace.data();
  a.workspace_bytes = *bytes;
  ASSERT_TRUE((*backend)->Select(a, device->stream()).ok());
  ASSERT_TRUE(device->Synchronize().ok());
  std::vector<uint8_t> got(forward.mask.size());
  mask.Download(got.data());
  EXPECT_EQ(got, forward.mask);
  EXPECT_TRUE(mask.GuardsIntact() && selected.GuardsIntact() && workspace.GuardsIntact());
}

TEST(SelectionMath, FixedScore) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(selection::FixedScore(0.0f), 0);
  EXPECT_EQ(selection::FixedScore(1.0f), 65536);
  EXPECT_EQ(selection::FixedScore(-0.5f), 0);
  EXPECT_EQ(selection::FixedScore(1.5f / 65536), 2);  // ties to even
  EXPECT_EQ(selection::FixedScore(2.5f / 65536), 2);
  EXPECT_EQ(selection::FixedScore(511.9999f), 33554426);
  EXPECT_EQ(selection::FixedScore(512.0f), 1 << 25);
  EXPECT_EQ(selection::FixedScore(inf), 1 << 25);
  EXPECT_EQ(selection::FixedScore(-inf), 0);
  EXPECT_EQ(selection::FixedScore(std::nanf("")), selection::kNeverSelected);
}

TEST(SelectionMath, KeysOrderByScoreThenReversedOffset) {
  EXPECT_EQ(selection::BitReverseOffset(1), 1024u);
  EXPECT_EQ(selection::BitReverseOffset(3), 1536u);
  EXPECT_GT(selection::PairKey(5, 2047), selection::PairKey(4, 0));
  EXPECT_GT(selection::PairKey(5, 0), selection::PairKey(5, 1024));
  EXPECT_GT(selection::PairKey(5, 1024), selection::PairKey(5, 512));
  for (uint32_t offset : {0u, 1u, 1000u, 2047u}) {
    EXPECT_EQ(selection::KeyOffset(selection::PairKey(123, offset)), offset);
    EXPECT_EQ(selection::KeyScore(selection::PairKey(123, offset)), 123);
  }
}

TEST(SelectionMath, LimitsOfSmallWindows) {
  const auto one = selection::ComputeWindowLimits(RetentionBudget(0.29), 1, 16);
  EXPECT_EQ(one.lo, 1);
  EXPECT_EQ(one.hi, 1);  // floor(0.58) = 0, raised to lo
  EXPECT_EQ(one.total, 16);
  const auto none = selection::ComputeWindowLimits(RetentionBudget(0.29), 0, 16);
  EXPECT_EQ(none.lo + none.hi + none.total, 0);
  const auto full = selection::ComputeWindowLimits(RetentionBudget(0.29), 2048, 16);
  EXPECT_EQ(full.lo, 149);
  EXPECT_EQ(full.hi, 1187);
  EXPECT_EQ(full.total, 9503);
}

}  // namespace
}  // namespace sparsegdn::test
