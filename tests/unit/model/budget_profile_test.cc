// Goal: a request's retention is shared out over layers as the profile says, its mean is kept, and
// a bad file is refused by name. Arithmetic is exact but for the rounding of doubles: 1e-12.
#include "server/model/budget_profile.h"

#include <gtest/gtest.h>

#include <numeric>

#include "server/model/load_model.h"
#include "sparsegdn/gdn.h"
#include "tests/unit/model/model_testing.h"
#include "tests/unit/model/test_files.h"

namespace sparsegdn::model::testing {
namespace {

double Mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

TEST(LayerRetentionsTest, KeepRatiosAndMean) {
  const std::vector<double> shares = LayerRetentions(0.29, std::vector<double>{1, 2, 3, 2});
  EXPECT_NEAR(Mean(shares), 0.29, 1e-12);
  EXPECT_NEAR(shares[1], 2 * shares[0], 1e-12);
  EXPECT_NEAR(shares[2], 3 * shares[0], 1e-12);
}

TEST(LayerRetentionsTest, AFullLayerLeavesTheRestToTheOthers) {
  const std::vector<double> shares = LayerRetentions(0.5, std::vector<double>{1, 1, 2, 1000});
  EXPECT_EQ(shares[3], 1.0);
  EXPECT_NEAR(Mean(shares), 0.5, 1e-12);
  EXPECT_NEAR(shares[2], 2 * shares[0], 1e-12);
  EXPECT_EQ(LayerRetentions(1.0, std::vector<double>{1, 5}), (std::vector<double>{1, 1}));
}

// How one layer is made sparse alone: the others are so heavy that they fill up first.
TEST(LayerRetentionsTest, OneLayerAlone) {
  const std::vector<double> shares =
      LayerRetentions((3 + 0.15) / 4, std::vector<double>{1e9, 1, 1e9, 1e9});
  EXPECT_EQ(shares[0], 1.0);
  EXPECT_NEAR(shares[1], 0.15, 1e-12);
}

TEST(LayerRetentionsTest, AnythingLegalStaysLegal) {
  const std::vector<std::vector<double>> profiles = {
      {1}, {1e-6, 1e9}, {1e9, 1e9, 1e-6}, {0.1, 1, 10}, {1, 1, 1, 1, 1, 1, 1, 1}};
  for (const std::vector<double>& profile : profiles) {
    for (const double retention : {1e-4, 0.01, 0.29, 0.5, 0.999, 1.0}) {
      Budget budget;
      budget.retention = retention;
      budget.min_retention = retention / 4;
      budget.max_retention = std::min(1.0, 2 * retention);
      const auto budgets = LayerBudgets(budget, profile, std::ssize(profile));
      double sum = 0.0;
      for (const Budget& layer : budgets) {
        EXPECT_TRUE(ValidateBudget(layer).ok()) << ValidateBudget(layer);
        sum += layer.retention;
      }
      EXPECT_NEAR(sum / static_cast<double>(profile.size()), retention, 1e-6);
    }
  }
}

TEST(LayerBudgetsTest, OnlyRetentionIsSharedOut) {
  const std::vector<double> profile = {1, 3};
  Budget budget;
  for (const BudgetMode mode : {BudgetMode::kDense, BudgetMode::kCoverage}) {
    budget.mode = mode;
    for (const Budget& layer : LayerBudgets(budget, profile, 2)) EXPECT_EQ(layer.retention, 0.29);
  }
  budget.mode = BudgetMode::kRetention;
  EXPECT_EQ(LayerBudgets(budget, {}, 2)[1].retention, 0.29);
  EXPECT_EQ(LayerBudgets(budget, {}, 2).size(), 2u);
  EXPECT_NEAR(LayerBudgets(budget, profile, 2)[1].retention, 0.435, 1e-12);
  EXPECT_EQ(LayerBudgets(budget, profile, 2)[1].min_retention, -1.0);
}

TEST(LoadBudgetProfileTest, RefusesByName) {
  const TempDir dir;
  const std::string path = dir.File("profile.json");
  EXPECT_EQ(LoadBudgetProfile(path, 2).status().code(), absl::StatusCode::kNotFound);
  const std::pair<const char*, const char*> rows[] = {
      {"[1, 2]", "content = an array of 2, wanted a JSON object"},
      {"{", "content = "},
      {"{}", "relative_retention = null, wanted an array of 2 numbers, one per GDN layer"},
      {R"({"relative_retention": [1]})",
       "relative_retention = an array of 1, wanted an array of 2"},
      {R"({"relative_retention": [1, 0]})", "relative_retention[1] = 0, wanted a number in [1e-06"},
      {R"({"relative_retention": [1, "x"]})", "relative_retention[1] = \"x\""},
      {R"({"relative_retention": [1, 2e9]})", "relative_retention[1] = 2000000000.0"},
      {R"({"relative_retention": [1, 2], "x": 1})", "\"x\" = 1, wanted only"},
  };
  for (const auto& [text, message] : rows) {
    dir.Write("profile.json", text);
    const absl::Status status = LoadBudgetProfile(path, 2).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(std::string(status.message()).find(message), std::string::npos) << status;
    EXPECT_EQ(status.message().find(path), 0u) << status;
  }
  dir.Write("profile.json", R"({"relative_retention": [1, 2.5], "about": {"by": "hand"}})");
  EXPECT_EQ(LoadBudgetProfile(path, 2).value(), (BudgetProfile{1, 2.5}));
}

TEST(FindBudgetProfileTest, BesideTheModelNamedOrNone) {
  const TempDir dir;
  EXPECT_TRUE(FindBudgetProfile("", dir.path(), 1).value().empty());
  dir.Write("budget_profile.json", R"({"relative_retention": [7]})");
  dir.Write("other.json", R"({"relative_retention": [8]})");
  EXPECT_EQ(FindBudgetProfile("", dir.path(), 1).value(), BudgetProfile{7});
  EXPECT_TRUE(FindBudgetProfile("none", dir.path(), 1).value().empty());
  EXPECT_EQ(FindBudgetProfile(dir.File("other.json"), dir.path(), 1).value(), BudgetProfile{8});
  EXPECT_FALSE(FindBudgetProfile(dir.File("gone.json"), dir.path(), 1).ok());
}

// The counts that a step reports per layer follow the profile; the total is the request's.
TEST(BudgetProfileTest, LayersOfAModelSelectAsTold) {
  const TempDir dir;
  CopyModel("tiny-gdn", dir);
  LoadOptions options;
  options.dir = dir.path();
  options.backend = "cpu";
  options.num_threads = 2;
  options.limits = SmallLimits();
  const int64_t linear = std::ssize(LoadModel(options).value()->info().layers);
  std::string weights = "0.5";
  for (int64_t i = 1; i < linear; ++i) weights += ", 1";
  dir.Write("budget_profile.json", "{\"relative_retention\": [" + weights + "]}");
  auto runner = LoadModel(options).value();
  ASSERT_EQ(std::ssize(runner->info().budget_profile), linear);
  Chunk chunk;
  const std::vector<int32_t> tokens = TokenIds(2000, runner->info().vocab_size, 3);
  chunk.tokens = tokens;
  chunk.prompt_tokens = 2000;
  chunk.slot = runner->Acquire(2000).value();
  chunk.budget.retention = 0.2;
  chunk.budget.keep_last = 0;
  KeepingSink sink;
  StepStats stats;
  ASSERT_TRUE(runner->Step(std::span(&chunk, 1), sink, stats).ok());
  const int64_t pairs = runner->info().gdn.num_k_heads;
  const std::vector<double> shares = LayerRetentions(0.2, runner->info().budget_profile);
  for (int64_t layer = 0; layer < linear; ++layer) {
    int64_t selected = 0;
    for (int64_t p = 0; p < pairs; ++p) selected += stats.chunks[0].selected[layer * pairs + p];
    const double wanted = shares[static_cast<size_t>(layer)] * 2000 * static_cast<double>(pairs);
    EXPECT_NEAR(static_cast<double>(selected), wanted, 1.0) << "layer " << layer;
  }
}

}  // namespace
}  // namespace sparsegdn::model::testing
