// What must hold bit for bit, whatever the values: repeats, packs, resumption, neighbours, layouts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>

#include "tests/unit/kernels/test_pack.h"

namespace sparsegdn::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <typename T>
std::vector<T> Part(const std::vector<T>& x, int64_t begin, int64_t end, int64_t width) {
  return {x.begin() + begin * width, x.begin() + end * width};
}

using Param = std::tuple<TestDevice*, DType>;

class Property : public testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    auto backend = device()->CreateBackend();
    ASSERT_TRUE(backend.ok()) << backend.status().message();
    backend_ = *std::move(backend);
  }
  TestDevice* device() const { return std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }
  PackResult Run(const Pack& pack) {
    PackResult r = RunPack(device(), backend_.get(), pack);
    EXPECT_TRUE(r.status.ok()) << r.status.message();
    EXPECT_TRUE(r.guards_intact);
    return r;
  }
  // One sequence, values from `seed`.
  Pack One(int64_t length, const Budget& budget, uint32_t seed, GdnShape shape = {2, 4, 48, 40}) {
    Pack p;
    p.shape = shape;
    p.dtype = dtype();
    p.Add(length, budget);
    FillRandom(&p, seed);
    return p;
  }
  // prefill(A) then resume with B, and prefill(A + B), under the same mask.
  struct Resumed {
    PackResult whole, first, second;
  };
  Resumed SplitAt(Pack p, int64_t at) {
    Resumed r;
    r.whole = Run(p);
    p.mask = r.whole.mask;
    r.first = Run(Extract(p, 0, 0, at));
    Pack tail = Extract(p, 0, at, p.tokens());
    tail.initial = r.first.states;
    tail.sequences[0].initial_slot = 0;
    r.second = Run(tail);
    return r;
  }
  std::unique_ptr<GdnBackend> backend_;
};

std::string Name(const testing::TestParamInfo<Param>& info) {
  const char* dtypes[] = {"_f32", "_bf16", "_f16"};
  return std::string(std::get<0>(info.param)->name()) +
         dtypes[static_cast<int>(std::get<1>(info.param))];
}

TEST_P(Property, TwoRunsAreBitwiseEqual) {
  const Pack p = One(Scaled(3000), RetentionBudget(0.29), 1);
  const PackResult a = Run(p), b = Run(p);
  EXPECT_TRUE(SameBits(a.o, b.o));
  EXPECT_TRUE(SameBits(a.states, b.states));
  EXPECT_TRUE(SameBits(a.mask, b.mask));
}

Pack MixedPack(DType dtype) {
  Pack p;
  p.shape = {2, 4, 48, 40};
  p.dtype = dtype;
  const Budget sparse = RetentionBudget(0.29);
  int seed = 40;
  for (int64_t length : {int64_t{65}, int64_t{0}, Scaled(2500), int64_t{1}, int64_t{640}}) {
    p.Add(length, length == 640 ? DenseBudget() : sparse);
    p.AddInitialState(seed++);
  }
  FillRandom(&p, 2);
  return p;
}

void ExpectSequenceEqualsAlone(const Pack& pack, const PackResult& packed, int32_t i,
                               const PackResult& alone) {
  const GdnShape& s = pack.shape;
  const int64_t begin = pack.cu_seqlens[i], end = pack.cu_seqlens[i + 1];
  EXPECT_TRUE(SameBits(Part(packed.o, begin, end, int64_t{s.num_v_heads} * s.head_dim_v), alone.o))
      << "o of sequence " << i;
  EXPECT_TRUE(SameBits(Part(packed.mask, begin, end, s.num_k_heads), alone.mask)) << i;
  EXPECT_TRUE(SameBits(Part(packed.states, i, i + 1, pack.state_size()), alone.states))
      << "state of sequence " << i;
}

TEST_P(Property, PackEqualsAloneBitwise) {
  const Pack p = MixedPack(dtype());
  const PackResult packed = Run(p);
  for (int32_t i = 0; i < p.num_seqs(); ++i) {
    const Pack alone = Extract(p, i, 0, p.cu_seqlens[i + 1] - p.cu_seqlens[i]);
    ExpectSequenceEqualsAlone(p, packed, i, Run(alone));
  }
}

// Heads of 128 in packs of several groups, windows and time segments: gates that decay, do not and
// vanish, by head.
TEST_P(Property, WidePackEqualsAloneBitwise) {
  for (const Budget& budget : {DenseBudget(), RetentionBudget(0.29)}) {
    Pack p;
    p.shape = {2, 6, 128, 128};
    p.dtype = dtype();
    for (int64_t length : {130, 0, 2500, 1, 700}) p.Add(Scaled(length), budget);
    FillRandom(&p, 41);
    const PackResult packed = Run(p);
    for (int32_t i = 0; i < p.num_seqs(); ++i) {
      const Pack alone = Extract(p, i, 0, p.cu_seqlens[i + 1] - p.cu_seqlens[i]);
      ExpectSequenceEqualsAlone(p, packed, i, Run(alone));
    }
  }
}

TEST_P(Property, NeighbourNanChangesNothing) {
  Pack p = MixedPack(dtype());
  const PackResult clean = Run(p);
  const GdnShape& s = p.shape;
  const auto poison = [&](std::vector<float>* x, int32_t i, int64_t width, float value) {
    for (int64_t at = p.cu_seqlens[i] * width; at < p.cu_seqlens[i + 1] * width; ++at) {
      (*x)[at] = at % 3 == 0 ? kInf : value;
    }
  };
  for (int32_t i : {0, 3}) {
    poison(&p.q, i, int64_t{s.num_k_heads} * s.head_dim_k, kNan);
    poison(&p.k, i, int64_t{s.num_k_heads} * s.head_dim_k, -kInf);
    poison(&p.v, i, int64_t{s.num_v_heads} * s.head_dim_v, kNan);
    poison(&p.beta, i, s.num_v_heads, kNan);
    poison(&p.log_gate, i, s.num_v_heads, kNan);
  }
  const PackResult dirty = Run(p);
  for (int32_t i : {1, 2, 4}) {
    const int64_t width = int64_t{s.num_v_heads} * s.head_dim_v;
    EXPECT_TRUE(SameBits(Part(clean.o, p.cu_seqlens[i], p.cu_seqlens[i + 1], width),
                         Part(dirty.o, p.cu_seqlens[i], p.cu_seqlens[i + 1], width)))
        << i;
    EXPECT_TRUE(SameBits(Part(clean.states, i, i + 1, p.state_size()),
                         Part(dirty.states, i, i + 1, p.state_size())))
        << i;
    EXPECT_EQ(dirty.nonfinite[i], 0) << i;
  }
  EXPECT_EQ(dirty.nonfinite[0], 1);
  EXPECT_EQ(dirty.nonfinite[3], 1);
}

TEST_P(Property, EmptySequenceKeepsItsStateBits) {
  Pack p = One(0, RetentionBudget(0.5), 3);
  p.AddInitialState(4);
  p.initial[0] = -0.0f;
  p.initial[1] = 1e-42f;
  p.Add(0, DenseBudget());  // without an initial state: zeros
  const PackResult r = Run(p);
  EXPECT_TRUE(SameBits(Part(r.states, 0, 1, p.state_size()), p.initial));
  EXPECT_TRUE(
      SameBits(Part(r.states, 1, 2, p.state_size()), std::vector<float>(p.state_size(), 0.0f)));
  EXPECT_EQ(r.selected, std::vector<int32_t>(4, 0));
}

TEST_P(Property, NoSequencesAtAll) {
  Pack p;
  p.dtype = dtype();
  FillRandom(&p, 1);
  EXPECT_TRUE(Run(p).o.empty());
}

TEST_P(Property, BetaZeroGateZeroKeepsStateBits) {
  Pack p = One(200, DenseBudget(), 5);
  p.AddInitialState(6);
  for (size_t i = 0; i < p.initial.size(); i += 7) p.initial[i] = -0.0f;
  std::fill(p.beta.begin(), p.beta.end(), 0.0f);
  std::fill(p.log_gate.begin(), p.log_gate.end(), 0.0f);
  EXPECT_TRUE(SameBits(Run(p).states, p.initial));
}

TEST_P(Property, ResumeAtWindowIsBitwise) {
  Pack p = One(2 * kWindow + 100, RetentionBudget(0.29), 7);
  for (const bool with_state : {false, true}) {
    if (with_state) p.AddInitialState(8);
    for (int64_t at : {kWindow, 2 * kWindow}) {
      const Resumed r = SplitAt(p, at);
      const int64_t width = int64_t{p.shape.num_v_heads} * p.shape.head_dim_v;
      EXPECT_TRUE(SameBits(Part(r.whole.o, 0, at, width), r.first.o)) << at;
      EXPECT_TRUE(SameBits(Part(r.whole.o, at, p.tokens(), width), r.second.o)) << at;
      EXPECT_TRUE(SameBits(r.whole.states, r.second.states)) << at;
    }
  }
}

TEST_P(Property, ResumeAtWindowSelectsTheSameMask) {
  const Pack p = One(2 * kWindow + 100, RetentionBudget(0.29), 9);
  const PackResult whole = Run(p);
  for (int64_t at : {kWindow, 2 * kWindow}) {
    std::vector<uint8_t> joined = Run(Extract(p, 0, 0, at)).mask;
    const auto rest = Run(Extract(p, 0, at, p.tokens())).mask;
    joined.insert(joined.end(), rest.begin(), rest.end());
    EXPECT_TRUE(SameBits(joined, whole.mask)) << at;
  }
}

// At any token, under the mask of the whole: a call's own selection would see another window there.
TEST_P(Property, ResumeAnywhereAgrees) {
  Budget sparse = RetentionBudget(0.29);
  sparse.keep_last = 8;
  for (const Budget& budget : {DenseBudget(), sparse}) {
    Pack p = One(200, budget, 10);
    for (const bool with_state : {false, true}) {
      if (with_state) p.AddInitialState(11);
      for (int64_t at : {1, 63, 64, 65, 130, 199}) {
        const Resumed r = SplitAt(p, at);
        Pack masked = p;
        masked.mask = r.whole.mask;
        PackResult joined = r.second;
        joined.o = r.first.o;
        joined.o.insert(joined.o.end(), r.second.o.begin(), r.second.o.end());
        joined.mask = r.whole.mask;
        // Twice the tolerance: an exported state adds no rounding, but groups fall differently.
        ExpectMatchesReference(device(), masked, joined, "split at " + std::to_string(at),
                               2 * device()->Tolerance(dtype()));
      }
    }
    const PackResult whole = Run(p);
    const int64_t events = std::count(whole.mask.begin(), whole.mask.end(), 1);
    const int64_t all = std::ssize(whole.mask);
    if (budget.mode == BudgetMode::kDense) {
      EXPECT_EQ(events, all);
    } else {
      EXPECT_LT(events, all / 2);
    }
  }
}

TEST_P(Property, SnapshotEqualsPrefixRun) {
  struct Row {
    int64_t length, every, first_position;
    bool dense;
  };
  for (const Row& row :
       {Row{500, 64, 0, true}, Row{500, 128, 37, true}, Row{130, 64, 64, true},
        Row{3 * kWindow + 5, kWindow, 0, false}, Row{kWindow + 70, kWindow, kWindow - 30, false}}) {
    Pack p = One(row.length, row.dense ? DenseBudget() : RetentionBudget(0.29), 12);
    SequenceParams& params = p.sequences[0];
    params.first_position = row.first_position;
    params.prompt_tokens = row.first_position + row.length;
    params.snapshot_every = row.every;
    params.snapshot_index = 1;
    const int64_t count =
        (row.first_position + row.length) / row.every - row.first_position / row.every;
    p.snapshot_slots = count + 2;
    const PackResult whole = Run(p);
    p.mask = whole.mask;
    ExpectMatchesReference(device(), p, whole, "snapshots");
    for (int64_t j = 0; j < count; ++j) {
      const int64_t at = (row.first_position / row.every + 1 + j) * row.every - row.first_position;
      const PackResult prefix = Run(Extract(p, 0, 0, at));
      EXPECT_TRUE(SameBits(Part(whole.snapshots, 1 + j, 2 + j, p.state_size()), prefix.states))
          << "every " << row.every << ", snapshot " << j;
    }
    EXPECT_TRUE(std::isnan(whole.snapshots[0]));  // slots outside the sequence's own
    EXPECT_TRUE(std::isnan(whole.snapshots.back()));
  }
}

TEST_P(Property, StateLayoutsHoldTheSameMatrices) {
  Pack p = One(150, DenseBudget(), 13);
  p.AddInitialState(14);
  const PackResult key_major = Run(p);
  p.initial_layout = StateLayout::kValueMajor;
  EXPECT_TRUE(SameBits(Run(p).states, key_major.states));
  p.final_layout = StateLayout::kValueMajor;
  const PackResult value_major = Run(p);
  EXPECT_TRUE(SameBits(value_major.states, key_major.states));
  EXPECT_FALSE(SameBits(value_major.raw_states, key_major.raw_states));
}

// A transposed state must not pass for the right one, square or not.
TEST_P(Property, TransposedStateIsNoticed) {
  Pack p = One(150, DenseBudget(), 15, {1, 2, 32, 32});
  p.final_layout = StateLayout::kValueMajor;
  const PackResult r = Run(p);
  const auto want = reference::RunRecurrence(ReferenceInput(p, 0, r.mask));
  EXPECT_GT(WorstHeadError(r.raw_states.data(), want.state.data(), 1, 2, 32 * 32), 0.5);
  EXPECT_LT(WorstHeadError(r.states.data(), want.state.data(), 1, 2, 32 * 32),
            device()->Tolerance(dtype()));
}

TEST_P(Property, FinalPoolMayBeTheInitialOne) {
  Pack p = One(300, RetentionBudget(0.4), 16);
  p.AddInitialState(17);
  p.AddInitialState(18);  // the sequence starts from slot 1
  p.sequences[0].final_slot = 0;
  const PackResult apart = Run(p);
  p.in_place = true;
  p.sequences[0].final_slot = 1;
  const PackResult same = Run(p);
  EXPECT_TRUE(SameBits(Part(same.states, 1, 2, p.state_size()), apart.states));
  EXPECT_TRUE(
      SameBits(Part(same.states, 0, 1, p.state_size()), Part(p.initial, 0, 1, p.state_size())));
}

TEST_P(Property, NegativeFinalSlotDropsTheState) {
  Pack p = One(100, DenseBudget(), 19);
  p.sequences[0].final_slot = -1;
  const PackResult r = Run(p);
  for (float x : r.states) EXPECT_TRUE(std::isnan(x));
  EXPECT_EQ(r.nonfinite[0], 0);
}

TEST_P(Property, GivenMaskIsUsedAndReported) {
  Pack p = One(700, DenseBudget(), 20);
  p.mask.resize(p.tokens() * 2);
  int32_t count[2] = {0, 0};
  for (int64_t i = 0; i < static_cast<int64_t>(p.mask.size()); ++i) {
    p.mask[i] = (i * 7919) % 5 < 2 ? 1 : 0;
    count[i % 2] += p.mask[i];
  }
  const PackResult r = Run(p);
  EXPECT_TRUE(SameBits(r.mask, p.mask));
  EXPECT_EQ(r.selected, (std::vector<int32_t>{count[0], count[1]}));
  ExpectMatchesReference(device(), p, r, "given mask");
}

TEST_P(Property, FullBudgetEqualsDense) {
  Pack p = One(700, DenseBudget(), 21);
  const PackResult dense = Run(p);
  p.sequences[0].budget = RetentionBudget(1.0);
  const PackResult full = Run(p);
  EXPECT_TRUE(SameBits(dense.mask, full.mask));
  EXPECT_TRUE(SameBits(dense.o, full.o));
  EXPECT_TRUE(SameBits(dense.states, full.states));
}

TEST_P(Property, BetaOutOfRangeSetsAStatusBit) {
  for (float beta : {-0.25f, 1.5f, std::nanf("")}) {
    Pack p = One(100, DenseBudget(), 22);
    p.beta[57] = beta;
    const PackResult dense = Run(p);
    EXPECT_EQ(dense.status_word, kStatusBetaOutOfRange) << beta;
    EXPECT_EQ(dense.nonfinite[0], std::isnan(beta) ? 1 : 0) << beta;
    // Never selected, a NaN leaves the state sound: the bit alone tells.
    p.sequences[0].budget = RetentionBudget(0.29);
    p.sequences[0].budget.keep_last = 0;
    EXPECT_EQ(Run(p).status_word, kStatusBetaOutOfRange) << beta;
  }
}

TEST_P(Property, NonfiniteStateIsFlaggedForItsSequenceOnly) {
  Pack p = MixedPack(dtype());
  p.v[(p.cu_seqlens[4] + 5) * p.shape.num_v_heads * p.shape.head_dim_v] = kInf;
  EXPECT_EQ(Run(p).nonfinite, (std::vector<int32_t>{0, 0, 0, 0, 1}));
}

// A NaN log_gate is a fault that must show: it may not read as full decay, nor as none.
TEST_P(Property, NanGateReachesOutputsAndState) {
  for (const bool dense : {true, false}) {
    Pack p = One(300, dense ? DenseBudget() : RetentionBudget(0.29), 23);
    if (!dense) p.sequences[0].budget.keep_last = 0;
    p.Add(100, DenseBudget());
    FillRandom(&p, 23);
    const GdnShape& s = p.shape;
    const PackResult clean = Run(p);
    // In the middle of a group, its first row, and one in the last group.
    for (const int64_t at : {int64_t{70}, int64_t{128}, int64_t{299}}) {
      constexpr int kHead = 1;
      Pack poisoned = p;
      poisoned.log_gate[at * s.num_v_heads + kHead] = kNan;
      const PackResult r = Run(poisoned);
      EXPECT_EQ(r.nonfinite, (std::vector<int32_t>{1, 0})) << at;
      EXPECT_TRUE(SameBits(r.mask, clean.mask)) << at;
      for (int64_t i = 0; i < static_cast<int64_t>(r.o.size()); ++i) {
        const int64_t token = i / (s.num_v_heads * s.head_dim_v);
        const bool same_head = token < 300 && i / s.head_dim_v % s.num_v_heads == kHead;
        // Earlier rows of the head may share products with the fault: nothing is promised there.
        if (same_head && token >= at) {
          ASSERT_TRUE(std::isnan(r.o[i])) << "token " << token << ", gate " << at;
        } else if (!same_head) {
          ASSERT_EQ(r.o[i], clean.o[i]) << "token " << token << ", gate " << at;
        }
      }
      const int64_t head_size = int64_t{s.head_dim_k} * s.head_dim_v;
      for (int64_t i = 0; i < head_size; ++i) {
        ASSERT_TRUE(std::isnan(r.states[kHead * head_size + i])) << i << ", gate " << at;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Property,
                         testing::Combine(testing::ValuesIn(TestDevices()),
                                          testing::Values(DType::kF32, DType::kBF16, DType::kF16)),
                         Name);
INSTANTIATE_TEST_SUITE_P(Widened, Property,
                         testing::Combine(testing::Values(WidenedCpuTestDevice()),
                                          testing::Values(DType::kBF16)),
                         Name);

}  // namespace
}  // namespace sparsegdn::test
