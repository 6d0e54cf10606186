// Every accuracy row of the case table, dense and sparse, in every input dtype.
//
// Goal: outputs, states and snapshots equal the masked recurrence. Method: the fp64 oracle under
// the mask that the run reports. Tolerance: TestDevice::Tolerance.
//
// The rows are inputs that broke other implementations. Those that are no matter of accuracy under
// one call have tests of their own:
//   int32-overflow      LargePack.EqualsItsSequencesOneByOne (large_pack_test.cc, long)
//   neighbour-NaN       Property.NeighbourNanChangesNothing
//   split-resume        Property.ResumeAnywhereAgrees, ResumeAtWindowIsBitwise
//   state-layout        Property.StateLayoutsHoldTheSameMatrices, TransposedStateIsNoticed
//   checkpoint-index    Property.SnapshotEqualsPrefixRun
// Bits beside the accuracy of a row here: empty-sequences Property.EmptySequenceKeepsItsStateBits,
// beta-edges Property.BetaZeroGateZeroKeepsStateBits, tied-scores
// Selection.TiedScoresSpreadOverTheWindow. near-collinear was reported without its v, so that its
// largest output of 0.0098 is not asserted.
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "tests/unit/kernels/case_families.h"

namespace sparsegdn::test {
namespace {

struct BudgetRow {
  const char* name;
  Budget budget;
};

std::vector<BudgetRow> BudgetRows() {
  Budget exact = RetentionBudget(0.29);
  exact.solver = Solver::kExact;
  exact.local = LocalTerm::kNone;
  Budget coverage;
  coverage.mode = BudgetMode::kCoverage;
  coverage.selector = Selector::kWriteNorm;
  coverage.coverage = 0.6;
  coverage.keep_first = 10;
  Budget dense_exact = DenseBudget();
  dense_exact.solver = Solver::kExact;
  return {{"dense", DenseBudget()},
          {"dense_exact", dense_exact},
          {"retention", RetentionBudget(0.29)},
          {"retention_exact_no_self", exact},
          {"coverage_write_norm", coverage}};
}

using Param = std::tuple<TestDevice*, CaseFamily, BudgetRow, DType>;

const char* DTypeName(DType dtype) {
  return dtype == DType::kF32 ? "f32" : dtype == DType::kBF16 ? "bf16" : "f16";
}

class CaseTable : public testing::TestWithParam<Param> {};

TEST_P(CaseTable, MatchesMaskedRecurrence) {
  const auto& [device, family, row, dtype] = GetParam();
  const Pack pack = family.build(dtype, row.budget);
  const PackResult result = RunPack(device, pack);
  const double slack = device->RoundsToBf16(dtype) ? family.bf16_slack : 1.0;
  ExpectMatchesReference(device, pack, result, family.name, slack * device->Tolerance(dtype));
  for (int32_t flag : result.nonfinite) EXPECT_EQ(flag, 0);
  EXPECT_EQ(result.status_word, 0u);
}

std::string Name(const testing::TestParamInfo<Param>& info) {
  const auto& [device, family, row, dtype] = info.param;
  return std::string(device->name()) + "_" + family.name + "_" + row.name + "_" + DTypeName(dtype);
}

INSTANTIATE_TEST_SUITE_P(All, CaseTable,
                         testing::Combine(testing::ValuesIn(TestDevices()),
                                          testing::ValuesIn(CaseFamilies()),
                                          testing::ValuesIn(BudgetRows()),
                                          testing::Values(DType::kF32, DType::kBF16, DType::kF16)),
                         Name);
INSTANTIATE_TEST_SUITE_P(Widened, CaseTable,
                         testing::Combine(testing::Values(WidenedCpuTestDevice()),
                                          testing::ValuesIn(CaseFamilies()),
                                          testing::ValuesIn(BudgetRows()),
                                          testing::Values(DType::kBF16)),
                         Name);

}  // namespace
}  // namespace sparsegdn::test
