// AUTO's bound, EXACT's independence of decay, and what BLOCK_ADJACENT computes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tests/unit/kernels/case_families.h"
#include "tests/unit/kernels/test_pack.h"

namespace sparsegdn::test {
namespace {

class SolverTest : public testing::TestWithParam<std::tuple<TestDevice*, DType>> {
 protected:
  TestDevice* device() const { return std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }

  Pack Random(int64_t length, float log_gate, Solver solver, double retention = 1.0) {
    Pack p;
    p.shape = {2, 4, 32, 24};
    p.dtype = dtype();
    Budget b = RetentionBudget(retention);
    b.solver = solver;
    p.Add(length, b);
    p.AddInitialState(60);
    FillRandom(&p, 61);
    std::fill(p.log_gate.begin(), p.log_gate.end(), log_gate);
    return p;
  }
  PackResult Run(Pack p, Solver solver) {
    p.sequences[0].budget.solver = solver;
    PackResult r = RunPack(device(), p);
    EXPECT_TRUE(r.status.ok()) << r.status.message();
    return r;
  }
};

std::string Name(const testing::TestParamInfo<std::tuple<TestDevice*, DType>>& info) {
  return std::string(std::get<0>(info.param)->name()) +
         (std::get<1>(info.param) == DType::kF32 ? "_f32" : "_bf16");
}

INSTANTIATE_TEST_SUITE_P(All, SolverTest,
                         testing::Combine(testing::ValuesIn(TestDevices()),
                                          testing::Values(DType::kF32, DType::kBF16)),
                         Name);
INSTANTIATE_TEST_SUITE_P(Widened, SolverTest,
                         testing::Combine(testing::Values(WidenedCpuTestDevice()),
                                          testing::Values(DType::kBF16)),
                         Name);

// Against the fp64 group form with the same blocks dropped, on gates from none to strong, full and
// ragged groups.
TEST_P(SolverTest, BlockAdjacentMatchesItsReference) {
  for (float gate : {-0.3f, -0.05f}) {
    for (double retention : {1.0, 0.29}) {
      Pack p = Random(Scaled(700, 300), gate, Solver::kBlockAdjacent, retention);
      const PackResult r = Run(p, Solver::kBlockAdjacent);
      const auto want = reference::RunGrouped(ReferenceInput(p, 0, r.mask), Solver::kBlockAdjacent);
      const double tolerance = device()->Tolerance(dtype());
      EXPECT_LE(WorstHeadError(r.o.data(), want.o.data(), p.tokens(), 4, 24), tolerance) << gate;
      EXPECT_LE(WorstHeadError(r.states.data(), want.state.data(), 1, 4, 32 * 24), tolerance);
    }
  }
}

// It is an approximation: where decay does not hide the far blocks it differs from the recurrence.
TEST_P(SolverTest, BlockAdjacentDropsSomething) {
  const Pack p = Random(256, 0.0f, Solver::kBlockAdjacent);
  const PackResult r = Run(p, Solver::kBlockAdjacent);
  const auto oracle = reference::RunRecurrence(ReferenceInput(p, 0, r.mask));
  EXPECT_GT(WorstHeadError(r.o.data(), oracle.o.data(), p.tokens(), 4, 24), 0.02);
}

// Above the bound AUTO is EXACT to the bit. 17 tokens from event 15 to event 32 cross ln 512 at
// 0.367 a token.
TEST_P(SolverTest, AutoIsExactAboveItsBound) {
  for (float gate : {0.0f, -0.1f, -0.36f}) {
    const Pack p = Random(256, gate, Solver::kAuto);
    const PackResult by_auto = Run(p, Solver::kAuto), exact = Run(p, Solver::kExact);
    EXPECT_EQ(0, std::memcmp(by_auto.o.data(), exact.o.data(), exact.o.size() * 4)) << gate;
  }
}

// Below it, it stays within the tolerance of its products.
TEST_P(SolverTest, AutoIsAccurateBelowItsBound) {
  for (float gate : {-0.375f, -0.6f, -1.0f, -3.0f}) {
    const Pack p = Random(256, gate, Solver::kAuto);
    ExpectMatchesReference(device(), p, Run(p, Solver::kAuto), "auto");
  }
}

// The CPU drops at one rounding of its products: 2^-9 where it has bf16 products, 2^-24 in fp32
// (0.979 a token), which bf16 inputs are widened to elsewhere. Other backends choose where below
// the bound to drop.
class CpuSolverTest : public SolverTest {};
INSTANTIATE_TEST_SUITE_P(All, CpuSolverTest,
                         testing::Combine(testing::Values(TestDevices()[0], WidenedCpuTestDevice()),
                                          testing::Values(DType::kF32, DType::kBF16)),
                         Name);

TEST_P(CpuSolverTest, AutoDropsAtOneRounding) {
  const bool bf16 = device()->RoundsToBf16(dtype());
  const Pack p = Random(256, bf16 ? -0.375f : -1.0f, Solver::kAuto);
  const PackResult by_auto = Run(p, Solver::kAuto), exact = Run(p, Solver::kExact);
  const PackResult adjacent = Run(p, Solver::kBlockAdjacent);
  EXPECT_EQ(0, std::memcmp(by_auto.o.data(), adjacent.o.data(), exact.o.size() * 4));
  if (bf16) {
    EXPECT_NE(0, std::memcmp(by_auto.o.data(), exact.o.data(), exact.o.size() * 4));
  }
}

// Above the bound of fp32 products AUTO keeps what the bound of bf16 products would drop.
TEST_P(CpuSolverTest, AutoKeepsWhatFp32ProductsSee) {
  if (device()->RoundsToBf16(dtype())) GTEST_SKIP() << "drops at the bound of bf16 products";
  const Pack p = Random(256, -0.375f, Solver::kAuto);
  const PackResult by_auto = Run(p, Solver::kAuto), exact = Run(p, Solver::kExact);
  const PackResult adjacent = Run(p, Solver::kBlockAdjacent);
  EXPECT_EQ(0, std::memcmp(by_auto.o.data(), exact.o.data(), exact.o.size() * 4));
  EXPECT_NE(0, std::memcmp(by_auto.o.data(), adjacent.o.data(), exact.o.size() * 4));
}

// Each dropped entry of the inverse is at most beta / 512, whatever the keys: with identical keys
// (the worst case) the entries reach their bound's order, and the output moves by no more.
TEST_P(SolverTest, AutoBoundHoldsForIdenticalKeys) {
  Pack p = Random(256, -0.375f, Solver::kAuto);
  const int dk = p.shape.head_dim_k;
  for (size_t i = 0; i < p.k.size(); ++i) p.k[i] = p.k[i % dk];
  std::fill(p.beta.begin(), p.beta.end(), 1.0f);
  RoundInputs(&p);
  ExpectMatchesReference(device(), p, Run(p, Solver::kAuto), "identical keys",
                         std::max(1.0 / 512, device()->Tolerance(dtype())));
}

// The bound needs |k| <= 1: with longer keys AUTO must solve exactly, whatever the decay.
TEST_P(SolverTest, AutoSolvesExactlyForLongKeys) {
  Pack p = Random(256, -0.375f, Solver::kAuto);
  for (float& k : p.k) k *= 1.25f;
  for (float& b : p.beta) b *= 0.5f;
  RoundInputs(&p);
  const PackResult by_auto = Run(p, Solver::kAuto), exact = Run(p, Solver::kExact);
  EXPECT_EQ(0, std::memcmp(by_auto.o.data(), exact.o.data(), exact.o.size() * 4));
}

// Repeated keys without decay, where dropping blocks is off by half: AUTO must not drop.
TEST_P(SolverTest, RepeatedKeysAreSolvedExactly) {
  for (const CaseFamily& family : CaseFamilies()) {
    if (std::strcmp(family.name, "repeated_keys") != 0) continue;
    const Pack p = family.build(dtype(), DenseBudget());
    const PackResult adjacent = Run(p, Solver::kBlockAdjacent);
    const auto oracle = reference::RunRecurrence(ReferenceInput(p, 0, adjacent.mask));
    const int64_t width = p.shape.head_dim_v;
    EXPECT_GT(
        WorstHeadError(adjacent.o.data(), oracle.o.data(), p.tokens(), p.shape.num_v_heads, width),
        0.1);
    ExpectMatchesReference(device(), p, Run(p, Solver::kAuto), family.name);
  }
}

// The fp64 group form is the recurrence: the references agree with each other.
TEST(References, GroupFormEqualsRecurrence) {
  Pack p;
  p.Add(400, RetentionBudget(0.3));
  p.sequences[0].snapshot_every = 0;
  FillRandom(&p, 62);
  const PackResult r = RunPack(TestDevices()[0], p);
  const reference::Sequence in = ReferenceInput(p, 0, r.mask);
  const auto grouped = reference::RunGrouped(in, Solver::kExact);
  const auto oracle = reference::RunRecurrence(in);
  const std::vector<float> o(grouped.o.begin(), grouped.o.end());
  EXPECT_LE(WorstHeadError(o.data(), oracle.o.data(), 400, 4, 32), 1e-6);
}

}  // namespace
}  // namespace sparsegdn::test
