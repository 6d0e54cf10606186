#include "server/engine/budget.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "gtest/gtest.h"
#include "server/engine/status_payload.h"

namespace sparsegdn::engine {
namespace {

TEST(ResolveBudget, NothingGivenIsTheDefaultWithItsBounds) {
  const auto budget = ResolveBudget({}, Budget{});
  ASSERT_TRUE(budget.ok());
  EXPECT_EQ(budget->mode, BudgetMode::kRetention);
  EXPECT_EQ(budget->retention, 0.29);
  EXPECT_DOUBLE_EQ(budget->min_retention, 0.0725);
  EXPECT_DOUBLE_EQ(budget->max_retention, 0.58);
  EXPECT_EQ(budget->keep_last, 64);
}

TEST(ResolveBudget, RetentionOrCoverageAloneChoosesTheMode) {
  BudgetOverrides o;
  o.coverage = 0.8;
  EXPECT_EQ(ResolveBudget(o, Budget{})->mode, BudgetMode::kCoverage);
  EXPECT_EQ(ResolveBudget(o, Budget{})->min_retention, 0.02);
  EXPECT_EQ(ResolveBudget(o, Budget{})->max_retention, 0.5);
  Budget dense;
  dense.mode = BudgetMode::kDense;
  o = {};
  o.retention = 0.1;
  EXPECT_EQ(ResolveBudget(o, dense)->mode, BudgetMode::kRetention);
}

TEST(ResolveBudget, TheDefaultsBoundsServeTheDefaultsTargetOnly) {
  Budget configured;
  configured.min_retention = 0.2;
  configured.max_retention = 0.4;
  EXPECT_EQ(ResolveBudget({}, configured)->min_retention, 0.2);
  BudgetOverrides o;
  o.solver = Solver::kExact;
  EXPECT_EQ(ResolveBudget(o, configured)->max_retention, 0.4);
  o.retention = 0.1;
  ASSERT_TRUE(ResolveBudget(o, configured).ok());
  EXPECT_EQ(ResolveBudget(o, configured)->min_retention, 0.025);
  EXPECT_EQ(ResolveBudget(o, configured)->max_retention, 0.2);
}

TEST(ResolveBudget, EnumsOverride) {
  BudgetOverrides o;
  o.mode = BudgetMode::kDense;
  o.selector = Selector::kWriteNorm;
  o.solver = Solver::kBlockAdjacent;
  o.local = LocalTerm::kNone;
  const auto budget = ResolveBudget(o, Budget{});
  ASSERT_TRUE(budget.ok());
  EXPECT_EQ(budget->mode, BudgetMode::kDense);
  EXPECT_EQ(budget->selector, Selector::kWriteNorm);
  EXPECT_EQ(budget->solver, Solver::kBlockAdjacent);
  EXPECT_EQ(budget->local, LocalTerm::kNone);
}

struct Refused {
  const char* name;
  std::function<void(BudgetOverrides&)> set;
  const char* field;
};

TEST(ResolveBudget, RefusalsNameTheField) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Refused rows[] = {
      {"zero", [](auto& o) { o.retention = 0.0; }, "budget.retention"},
      {"above one", [](auto& o) { o.retention = 1.5; }, "budget.retention"},
      {"negative", [](auto& o) { o.retention = -0.1; }, "budget.retention"},
      {"nan", [=](auto& o) { o.retention = nan; }, "budget.retention"},
      {"coverage zero", [](auto& o) { o.coverage = 0.0; }, "budget.coverage"},
      {"coverage nan", [=](auto& o) { o.coverage = nan; }, "budget.coverage"},
      {"negative bound", [](auto& o) { o.min_retention = -1.0; }, "budget.min_retention"},
      {"bound above one", [](auto& o) { o.max_retention = 1.01; }, "budget.max_retention"},
      {"upper bound below the default lower one", [](auto& o) { o.max_retention = 0.0; },
       "budget.max_retention"},
      {"lower bound above the default upper one", [](auto& o) { o.min_retention = 1.0; },
       "budget.min_retention"},
      {"bound nan", [=](auto& o) { o.max_retention = nan; }, "budget.max_retention"},
      {"bounds crossed",
       [](auto& o) {
         o.min_retention = 0.5;
         o.max_retention = 0.2;
       },
       "budget.min_retention"},
      {"target below its bounds",
       [](auto& o) {
         o.retention = 0.1;
         o.min_retention = 0.15;
       },
       "budget.retention"},
      {"target above its bounds",
       [](auto& o) {
         o.retention = 0.6;
         o.max_retention = 0.5;
       },
       "budget.retention"},
      {"keep_first", [](auto& o) { o.keep_first = -1; }, "budget.keep_first"},
      {"keep_last", [](auto& o) { o.keep_last = int64_t{1} << 62; }, "budget.keep_last"},
      {"both targets",
       [](auto& o) {
         o.retention = 0.3;
         o.coverage = 0.9;
       },
       "budget.mode"},
      {"coverage with retention",
       [](auto& o) {
         o.mode = BudgetMode::kRetention;
         o.coverage = 0.9;
       },
       "budget.coverage"},
      {"retention with dense",
       [](auto& o) {
         o.mode = BudgetMode::kDense;
         o.retention = 0.3;
       },
       "budget.retention"},
      {"keep_last with dense",
       [](auto& o) {
         o.mode = BudgetMode::kDense;
         o.keep_last = 3;
       },
       "budget.keep_last"},
  };
  for (const Refused& row : rows) {
    BudgetOverrides o;
    row.set(o);
    const auto budget = ResolveBudget(o, Budget{});
    ASSERT_FALSE(budget.ok()) << row.name;
    EXPECT_EQ(budget.status().code(), absl::StatusCode::kInvalidArgument) << row.name;
    EXPECT_EQ(DetailsOf(budget.status()).field, row.field) << row.name;
    EXPECT_NE(std::string(budget.status().message()).find("got"), std::string::npos)
        << budget.status();
  }
}

TEST(StatusPayload, RoundTripsAndToleratesOthers) {
  const StatusDetails in{"token_ids[3]", "QUEUE_FULL", 1500};
  const absl::Status status = WithDetails(absl::ResourceExhaustedError("full"), in);
  EXPECT_EQ(DetailsOf(status).field, in.field);
  EXPECT_EQ(DetailsOf(status).reason, in.reason);
  EXPECT_EQ(DetailsOf(status).retry_after_ms, in.retry_after_ms);
  const absl::Status no_retry = WithDetails(absl::InternalError("x"), {"", "Y", std::nullopt});
  EXPECT_EQ(DetailsOf(no_retry).retry_after_ms, std::nullopt);
  EXPECT_EQ(DetailsOf(absl::InternalError("plain")).reason, "");
  EXPECT_TRUE(WithDetails(absl::OkStatus(), in).ok());
}

}  // namespace
}  // namespace sparsegdn::engine
