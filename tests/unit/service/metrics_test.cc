// Every metric of the table is exported with every child before any call, observations land where
// they should, labels stay bounded, and docs/operations.md lists the same names.
#include "server/service/metrics.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "server/service/metric_names.h"
#include "tests/unit/service/fake_engine.h"

namespace sparsegdn::service {
namespace {

double Value(const std::string& text, const std::string& series) {
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    if (line.rfind(series + " ", 0) == 0) return std::stod(line.substr(series.size() + 1));
  }
  return -1;
}

const char* TypeName(MetricType type) {
  return type == MetricType::kCounter ? "counter"
         : type == MetricType::kGauge ? "gauge"
                                      : "histogram";
}

TEST(Metrics, EverythingIsExportedFromTheStart) {
  Metrics metrics("1", "c");
  const std::string text = metrics.Scrape({});
  for (const MetricDef& def : metric::kAll) {
    EXPECT_NE(text.find(std::string("# TYPE ") + def.name + " " + TypeName(def.type)),
              std::string::npos)
        << def.name;
  }
  for (const char* series : {
           "sparsegdn_requests_total{code=\"DATA_LOSS\",method=\"ReleaseSnapshot\"}",
           "sparsegdn_cancelled_total{stage=\"queued\"}",
           "sparsegdn_cancelled_total{stage=\"computing\"}",
           "sparsegdn_cancelled_total{stage=\"streaming\"}",
           "sparsegdn_snapshot_bytes_total{dtype=\"bf16\"}",
           "sparsegdn_prefill_seconds_count{budget_tier=\"low\",prompt_band=\"ge_128k\"}",
           "sparsegdn_retention_ratio_count{budget_tier=\"dense\"}",
           "sparsegdn_expired_in_queue_total",
       }) {
    EXPECT_EQ(Value(text, series), 0) << series;
  }
  EXPECT_EQ(Value(text, "sparsegdn_build_info{commit=\"c\",version=\"1\"}") +
                Value(text, "sparsegdn_build_info{version=\"1\",commit=\"c\"}"),
            0);  // one of them is 1, the other absent (-1)
}

TEST(Metrics, NoNameIsExportedThatTheTableLacks) {
  Metrics metrics("1", "c");
  std::set<std::string> known;
  for (const MetricDef& def : metric::kAll) known.insert(def.name);
  std::istringstream lines(metrics.Scrape({}));
  std::string word, kind, name;
  std::string line;
  while (std::getline(lines, line)) {
    std::istringstream fields(line);
    fields >> word >> kind >> name;
    if (kind == "TYPE") {
      EXPECT_TRUE(known.count(name)) << name;
    }
  }
}

TEST(Metrics, ObservationsLand) {
  Metrics metrics("1", "c");
  engine::Result result = MakeResult();
  metrics.OnComputed(0.5, result);
  result.effective_budget.mode = BudgetMode::kDense;
  result.usage.prompt_tokens = 40000;
  metrics.OnComputed(0.5, result);
  model::StepStats stats;
  stats.selection_ns = 1'000'000;
  stats.gdn_core_ns = 3'000'000;
  metrics.OnStep(4096, 2, stats);
  metrics.OnCancelled(engine::EngineObserver::Stage::kComputing, 77);
  metrics.OnSnapshotBytes(engine::ExportDType::kBF16, 123);
  metrics.OnQueueWait(0.02);
  metrics.OnFirstFrame(0.02);
  metrics.OnSnapshotReady(0.02);
  metrics.OnExpiredInQueue();
  metrics.OnNonFinite();
  metrics.SetMaxBatchTokens(65536);
  engine::EngineGauges gauges;
  gauges.queue_tokens = 11;
  gauges.buffered_bytes = 12;
  const std::string text = metrics.Scrape(gauges);
  EXPECT_EQ(Value(text, "sparsegdn_events_total"), 2000);
  EXPECT_EQ(Value(text, "sparsegdn_events_selected_total"), 580);
  EXPECT_EQ(Value(text, "sparsegdn_prompt_tokens_total"), 40100);
  EXPECT_EQ(Value(text, "sparsegdn_cached_tokens_total"), 20);
  EXPECT_EQ(
      Value(text, "sparsegdn_prefill_seconds_count{budget_tier=\"mid\",prompt_band=\"lt_1k\"}"), 1);
  EXPECT_EQ(
      Value(text,
            "sparsegdn_prefill_seconds_count{budget_tier=\"dense\",prompt_band=\"32k_128k\"}"),
      1);
  EXPECT_EQ(Value(text, "sparsegdn_retention_ratio_sum{budget_tier=\"mid\"}"), 0.29);
  EXPECT_EQ(Value(text, "sparsegdn_selection_overhead_ratio"), 0.25);
  EXPECT_EQ(Value(text, "sparsegdn_batch_tokens_sum"), 4096);
  EXPECT_EQ(Value(text, "sparsegdn_max_batch_tokens"), 65536);
  EXPECT_EQ(Value(text, "sparsegdn_cancelled_total{stage=\"computing\"}"), 1);
  EXPECT_EQ(Value(text, "sparsegdn_wasted_tokens_total"), 77);
  EXPECT_EQ(Value(text, "sparsegdn_snapshot_bytes_total{dtype=\"bf16\"}"), 123);
  EXPECT_EQ(Value(text, "sparsegdn_queue_wait_seconds_count"), 1);
  EXPECT_EQ(Value(text, "sparsegdn_time_to_first_frame_seconds_count"), 1);
  EXPECT_EQ(Value(text, "sparsegdn_time_to_snapshot_seconds_count"), 1);
  EXPECT_EQ(Value(text, "sparsegdn_expired_in_queue_total"), 1);
  EXPECT_EQ(Value(text, "sparsegdn_nonfinite_states_total"), 1);
  EXPECT_EQ(Value(text, "sparsegdn_queue_tokens"), 11);
  EXPECT_EQ(Value(text, "sparsegdn_slow_reader_bytes"), 12);
}

TEST(Metrics, TiersFollowTheBudgetOrWhatItGot) {
  engine::Result result = MakeResult();
  const auto tier = [&](double retention) {
    result.effective_budget.retention = retention;
    return TierOf(result);
  };
  EXPECT_EQ(tier(1.0), BudgetTier::kHigh);
  EXPECT_EQ(tier(0.5), BudgetTier::kHigh);
  EXPECT_EQ(tier(0.49), BudgetTier::kMid);
  EXPECT_EQ(tier(0.2), BudgetTier::kMid);
  EXPECT_EQ(tier(0.19), BudgetTier::kLow);
  result.effective_budget.mode = BudgetMode::kCoverage;
  result.usage.events_selected = 100;
  EXPECT_EQ(TierOf(result), BudgetTier::kLow);
  result.effective_budget.mode = BudgetMode::kDense;
  EXPECT_EQ(TierOf(result), BudgetTier::kDense);
}

TEST(Metrics, TheModelReplacesTheEmptyChild) {
  Metrics metrics("1", "c");
  model::ModelInfo info;
  info.name = "tiny";
  info.identity = "abc";
  info.backend = "cpu";
  info.device_memory.kv = 4096;
  metrics.SetModel(info);
  const std::string text = metrics.Scrape({});
  EXPECT_NE(text.find("sparsegdn_device_memory_bytes{kind=\"kv\"} 4096"), std::string::npos);
  EXPECT_NE(text.find("\"tiny\""), std::string::npos);
  EXPECT_EQ(text.find("name=\"\""), std::string::npos);
}

TEST(Metrics, TheDocumentationListsThemAll) {
  std::ifstream file(SPARSEGDN_SOURCE_DIR "/docs/operations.md");
  std::stringstream text;
  text << file.rdbuf();
  const std::string docs = text.str();
  ASSERT_FALSE(docs.empty());
  std::set<std::string> known;
  for (const MetricDef& def : metric::kAll) {
    known.insert(def.name);
    EXPECT_NE(docs.find(std::string("`") + def.name + "`"), std::string::npos) << def.name;
  }
  for (size_t at = 0; (at = docs.find("`sparsegdn_", at)) != std::string::npos;) {
    const size_t end = docs.find('`', ++at);
    const std::string name = docs.substr(at, end - at);
    EXPECT_TRUE(known.count(name)) << name << " is in the documentation alone";
    at = end + 1;
  }
}

}  // namespace
}  // namespace sparsegdn::service
