// The open loop's arithmetic: arrivals, mixes, percentiles, metrics, and what a run counts.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "cli/bench_common.h"
#include "cli/cmd_load.h"
#include "cli/exit_codes.h"
#include "cli/load_plan.h"
#include "cli/load_report.h"
#include "cli/load_run.h"
#include "cli/metrics_scrape.h"
#include "cli/render.h"

namespace sparsegdn::cli {
namespace {

TEST(MixTest, Accepted) {
  const auto mix = ParseMix("mix", "256:0.7,4096:2.5e-1,32768", 1, 1 << 24);
  ASSERT_TRUE(mix.ok()) << mix.status();
  ASSERT_EQ(mix->size(), 3u);
  EXPECT_EQ((*mix)[1].value, 4096);
  EXPECT_DOUBLE_EQ((*mix)[1].weight, 0.25);
  EXPECT_DOUBLE_EQ((*mix)[2].weight, 1);
  EXPECT_EQ((*ParseMix("priority-mix", "-8:1,8:1", -8, 8))[0].value, -8);
}

TEST(MixTest, Refused) {
  for (const char* text : {"", "256:0.7,", "x:1", "256:", "256:x", "256:0", "256:-1", "256:nan",
                           "256:inf", "0:1", "257:1", "4:1:1", "4:1,4:2", "4.5:1"}) {
    const auto mix = ParseMix("mix", text, 1, 256);
    EXPECT_EQ(ExitCodeOf(mix.status()), kUsage) << text;
    EXPECT_NE(mix.status().message().find("--mix"), std::string::npos) << text;
  }
}

LoadOptions Poisson(double rate, double seconds) {
  LoadOptions options;
  options.rate = rate;
  options.seconds = seconds;
  options.lengths = {{256, 7}, {4096, 2.5}, {32768, 0.5}};
  return options;
}

TEST(PlanTest, GapsAreExponential) {
  const auto plan = PlanArrivals(Poisson(100, 1000));
  // A Poisson count of mean 1e5 has a deviation of 316; four of them.
  EXPECT_NEAR(static_cast<double>(plan.size()), 1e5, 4 * 317);
  double sum = 0, squares = 0, above = 0, before = 0;
  for (const Arrival& arrival : plan) {
    const double gap = arrival.at - before;
    ASSERT_GE(gap, 0);
    sum += gap;
    squares += gap * gap;
    above += gap > 0.01;  // the mean; exp(-1) of the gaps are longer
    before = arrival.at;
  }
  EXPECT_LT(before, 1000);
  const double n = static_cast<double>(plan.size());
  const double mean = sum / n, deviation = std::sqrt(squares / n - mean * mean);
  EXPECT_NEAR(mean, 0.01, 4 * 0.01 / std::sqrt(n));
  // Kurtosis 9: the deviation of a sampled deviation is sqrt((9 - 1) / 4 / n) of it.
  EXPECT_NEAR(deviation, 0.01, 4 * 0.01 * std::sqrt(2 / n));
  EXPECT_NEAR(above / n, std::exp(-1), 4 * 0.5 / std::sqrt(n));
}

TEST(PlanTest, SharesAndMixAreKept) {
  LoadOptions options = Poisson(1000, 100);
  options.cancel_share = 0.1;
  options.cancel_seconds = 2;
  options.deadline_share = 0.2;
  options.deadline_seconds = 3;
  options.slow_share = 0.3;
  options.priorities = {{-1, 1}, {5, 3}};
  const auto plan = PlanArrivals(options);
  double cancels = 0, deadlines = 0, slow = 0, small = 0, large = 0, high = 0, cancel_sum = 0;
  for (const Arrival& arrival : plan) {
    small += arrival.length == 256;
    large += arrival.length == 32768;
    high += arrival.priority == 5;
    slow += arrival.bytes_per_second.has_value();
    deadlines += arrival.deadline == 3;
    if (!arrival.cancel_after) continue;
    ++cancels;
    cancel_sum += *arrival.cancel_after;
    ASSERT_TRUE(*arrival.cancel_after >= 0 && *arrival.cancel_after < 2);
  }
  const double n = static_cast<double>(plan.size()), tolerance = 4 * 0.5 / std::sqrt(n);
  EXPECT_NEAR(small / n, 0.7, tolerance);
  EXPECT_NEAR(large / n, 0.05, tolerance);
  EXPECT_NEAR(high / n, 0.75, tolerance);
  EXPECT_NEAR(cancels / n, 0.1, tolerance);
  EXPECT_NEAR(deadlines / n, 0.2, tolerance);
  EXPECT_NEAR(slow / n, 0.3, tolerance);
  // Uniform over two seconds: mean 1, deviation 2 / sqrt(12).
  EXPECT_NEAR(cancel_sum / cancels, 1, 4 * 0.58 / std::sqrt(cancels));
}

TEST(PlanTest, TheSeedAloneDecides) {
  LoadOptions options = Poisson(50, 10);
  const auto plan = PlanArrivals(options), same = PlanArrivals(options);
  options.lengths = {{1, 1}};
  options.cancel_share = 1;
  const auto other_marks = PlanArrivals(options);
  ASSERT_EQ(plan.size(), same.size());
  ASSERT_EQ(plan.size(), other_marks.size());
  for (size_t i = 0; i < plan.size(); ++i) {
    EXPECT_EQ(plan[i].at, same[i].at);
    EXPECT_EQ(plan[i].length, same[i].length);
    EXPECT_EQ(plan[i].at, other_marks[i].at);
  }
  options.seed = 2;
  EXPECT_NE(PlanArrivals(options).front().at, plan.front().at);
}

TEST(PercentileTest, NearestRank) {
  const std::vector<double> ten = {10, 1, 9, 2, 8, 3, 7, 4, 6, 5};
  EXPECT_EQ(Percentile({}, 0.5), 0);
  EXPECT_EQ(Percentile({7}, 0.99), 7);
  EXPECT_EQ(Percentile(ten, 0.5), 5);
  EXPECT_EQ(Percentile(ten, 0.9), 9);
  EXPECT_EQ(Percentile(ten, 0.91), 10);
  EXPECT_EQ(Percentile(ten, 0.99), 10);
  EXPECT_EQ(Percentile(ten, 1), 10);
}

TEST(MetricsTest, Parsed) {
  const auto metrics = ParseMetrics(
      "# HELP a_total Text with {braces} and \"quotes\".\n# TYPE a_total counter\n"
      "a_total 12\n"
      "b{x=\"a } \\\" b\",y=\"c d\"} 1.5e3 1700000000000\n\n"
      "c_bucket{le=\"+Inf\"} +Inf\r\n"
      "d\tNaN");
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  EXPECT_EQ(metrics->size(), 4u);
  EXPECT_EQ(metrics->at("a_total"), 12);
  EXPECT_EQ(metrics->at("b{x=\"a } \\\" b\",y=\"c d\"}"), 1500);
  EXPECT_TRUE(std::isinf(metrics->at("c_bucket{le=\"+Inf\"}")));
  EXPECT_TRUE(std::isnan(metrics->at("d")));
  for (const char* text : {"<html>", "a", "a b", "a{x=\"1\" 2", "a 1 2 3", " 1"}) {
    EXPECT_FALSE(ParseMetrics(text).ok()) << text;
  }
}

TEST(MetricsTest, WorkIsTheDifference) {
  const Metrics before = {{"sparsegdn_batch_tokens_sum", 1000},
                          {"sparsegdn_batch_tokens_count", 10},
                          {"sparsegdn_batch_tokens_bucket{le=\"64\"}", 4},
                          {"sparsegdn_batch_tokens_bucket{le=\"256\"}", 9},
                          {"sparsegdn_batch_tokens_bucket{le=\"+Inf\"}", 10},
                          {"sparsegdn_prompt_tokens_total", 900}};
  const Metrics after = {{"sparsegdn_batch_tokens_sum", 3000},
                         {"sparsegdn_batch_tokens_count", 20},
                         {"sparsegdn_batch_tokens_bucket{le=\"64\"}", 5},
                         {"sparsegdn_batch_tokens_bucket{le=\"256\"}", 17},
                         {"sparsegdn_batch_tokens_bucket{le=\"+Inf\"}", 20},
                         {"sparsegdn_prompt_tokens_total", 800},
                         {"sparsegdn_wasted_tokens_total", 100}};
  const Json work = ServerWork(before, after, 400);
  EXPECT_EQ(work["steps"], 10);
  EXPECT_EQ(work["tokens_per_step"], 200);
  EXPECT_EQ(work["batch_fill"], 0.5);
  EXPECT_EQ(work["wasted_tokens"], 100);
  EXPECT_EQ(work["wasted_share"], 0.05);
  EXPECT_TRUE(work["prompt_tokens"].is_null());  // fell: another process
  EXPECT_TRUE(work["requests_per_step"].is_null());
  EXPECT_EQ(work["steps_by_tokens"], Json({{"64", 1}, {"256", 7}, {"+Inf", 2}}));
  EXPECT_TRUE(ServerWork(before, after, 0)["batch_fill"].is_null());
  EXPECT_TRUE(ServerWork(before, after, 0)["step_tokens"].is_null());
}

TEST(MetricsTest, TheServerSaysWhatAStepHolds) {
  const Metrics before = {{"sparsegdn_batch_tokens_sum", 0}, {"sparsegdn_batch_tokens_count", 0}};
  const Metrics after = {{"sparsegdn_batch_tokens_sum", 2000},
                         {"sparsegdn_batch_tokens_count", 10},
                         {"sparsegdn_max_batch_tokens", 800}};
  EXPECT_EQ(ServerWork(before, after, 0)["batch_fill"], 0.25);
  EXPECT_EQ(ServerWork(before, after, 0)["step_tokens"], 800);
  EXPECT_EQ(ServerWork(before, after, 400)["batch_fill"], 0.5);  // the flag wins
}

TEST(MetricsTest, AddressesRefused) {
  for (const char* url : {"", "127.0.0.1:9464", "https://127.0.0.1/metrics", "http:///metrics"}) {
    EXPECT_EQ(ExitCodeOf(FetchMetrics(url).status()), kUsage) << url;
  }
}

// Serves every call in `service` seconds, but one at a time: a queue.
class OneAtATime : public client::Client {
 public:
  explicit OneAtATime(double service) : service_(service) {}

  absl::StatusOr<client::PrefillOutcome> Prefill(const v1::PrefillRequest&,
                                                 const client::CallOptions& options) override {
    most_ = std::max<int>(most_, ++inside_);
    absl::StatusOr<client::PrefillOutcome> outcome = Serve(options);
    --inside_;
    return outcome;
  }
  absl::StatusOr<v1::SnapshotRef> Import(const client::Snapshot&, const v1::Keep&,
                                         const std::string&, const client::CallOptions&) override {
    return absl::UnimplementedError("not of this test");
  }
  absl::Status Release(const std::string&, const std::string&,
                       const client::CallOptions&) override {
    return absl::UnimplementedError("not of this test");
  }
  absl::StatusOr<v1::ModelInfo> Info(const client::CallOptions&) override {
    return absl::UnimplementedError("not of this test");
  }
  int most() const { return most_; }

 private:
  absl::StatusOr<client::PrefillOutcome> Serve(const client::CallOptions& options) {
    std::lock_guard<std::mutex> lock(device_);
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(service_);
    while (std::chrono::steady_clock::now() < end) {
      if (options.cancellation != nullptr && options.cancellation->cancelled()) {
        return absl::CancelledError("cancelled");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (options.timeout && *options.timeout < absl::Seconds(service_)) {
      return absl::DeadlineExceededError("late");
    }
    client::PrefillProgress progress;
    progress.stage = client::PrefillProgress::Stage::kStreaming;
    for (uint64_t part = 1; part <= 2; ++part) {
      progress.bytes_done = 100 * part;
      options.progress(progress);
    }
    v1::Manifest manifest;
    manifest.set_format_version(client::kFormatVersion);
    absl::StatusOr<client::Snapshot> snapshot = client::Snapshot::Create(manifest, {});
    if (!snapshot.ok()) return snapshot.status();
    return client::PrefillOutcome{*std::move(snapshot), {}, std::nullopt, service_};
  }

  const double service_;
  std::mutex device_;
  std::atomic<int> inside_{0}, most_{0};
};

std::vector<Arrival> Every(double gap, int count) {
  std::vector<Arrival> plan(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    plan[static_cast<size_t>(i)].at = i * gap;
    plan[static_cast<size_t>(i)].length = 8;
  }
  return plan;
}

TEST(LoadRunTest, LatencyCountsTheQueueOfAnOverloadedServer) {
  OneAtATime server(0.04);
  LoadOptions options;
  options.rate = 100;
  options.seconds = 0.2;
  const LoadResult result = RunLoad(&server, {}, {}, 97, options, Every(0.01, 20));
  ASSERT_EQ(result.calls.size(), 20u);
  double longest = 0;
  for (const CallRecord& call : result.calls) {
    EXPECT_TRUE(call.status.ok() && !call.dropped);
    EXPECT_GE(call.snapshot, 0.04);
    longest = std::max(longest, call.snapshot);
  }
  // The last served of 20 ends after 0.8 s and arrived at most 0.19 s after the first: a closed
  // loop would have measured 0.04 s throughout.
  EXPECT_GE(longest, 20 * 0.04 - 0.19);
  EXPECT_GE(result.wall_seconds, 0.8);
}

TEST(LoadRunTest, ArrivalsBeyondTheBoundAreDroppedNotDelayed) {
  OneAtATime server(0.6);
  LoadOptions options;
  options.rate = 100;
  options.seconds = 0.1;
  options.max_outstanding = 2;
  const LoadResult result = RunLoad(&server, {}, {}, 97, options, Every(0.01, 10));
  ASSERT_EQ(result.calls.size(), 10u);
  EXPECT_FALSE(result.calls[0].dropped);
  EXPECT_FALSE(result.calls[1].dropped);
  for (size_t i = 2; i < 10; ++i) EXPECT_TRUE(result.calls[i].dropped) << i;
  EXPECT_EQ(server.most(), 2);
  const Json report = LoadJson(options, result);
  EXPECT_EQ(report["dropped_by_client"], 8);
  EXPECT_EQ(report["arrivals"], 10);
  EXPECT_EQ(report["codes"], Json({{"OK", 2}}));
}

TEST(LoadRunTest, CallersCancelHaveDeadlinesAndReadSlowly) {
  OneAtATime server(0.2);
  std::vector<Arrival> plan = Every(0.5, 4);
  plan[0].cancel_after = 0.05;
  plan[1].deadline = 0.1;
  plan[2].bytes_per_second = 400;  // 200 bytes: 0.5 s
  LoadOptions options;
  options.seconds = 2;
  const LoadResult result = RunLoad(&server, {}, {}, 97, options, plan);
  EXPECT_EQ(result.calls[0].status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(result.calls[1].status.code(), absl::StatusCode::kDeadlineExceeded);
  ASSERT_TRUE(result.calls[2].status.ok());
  EXPECT_GE(result.calls[2].snapshot - result.calls[2].first_frame, 0.4999);
  EXPECT_LT(result.calls[3].snapshot - result.calls[3].first_frame, 0.4);
  EXPECT_TRUE(LoadVerdict(result).ok());
  const Json report = LoadJson(options, result);
  EXPECT_EQ(report["all"]["completed"], 2);
  // The slow reader's own time is not the service's.
  EXPECT_EQ(report["all"]["snapshot_seconds"]["max"], result.calls[3].snapshot);
}

TEST(LoadRunTest, AnInterruptEndsItEarly) {
  OneAtATime server(10);
  client::Cancellation interrupt;
  client::CallOptions call;
  call.cancellation = &interrupt;
  LoadOptions options;
  options.seconds = 60;
  std::vector<Arrival> plan = Every(0.01, 3);
  plan[1].cancel_after = 30;  // watched by the timer: the interrupt reaches it too
  plan[2].at = 50;
  std::thread later([&interrupt] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    interrupt.Cancel();
  });
  const LoadResult result = RunLoad(&server, call, {}, 97, options, plan);
  later.join();
  EXPECT_TRUE(result.interrupted);
  EXPECT_EQ(result.calls.size(), 2u);  // the third had not arrived
  EXPECT_LT(result.wall_seconds, 5);
  EXPECT_EQ(ExitCodeOf(LoadVerdict(result)), kInterrupted);
}

CallRecord Ended(int64_t length, double first_frame, absl::Status status = absl::OkStatus()) {
  CallRecord call;
  call.length = length;
  call.status = std::move(status);
  call.first_frame = first_frame;
  call.snapshot = 2 * first_frame;
  return call;
}

TEST(LoadReportTest, GoodputIsOfPromptsWithinTheObjective) {
  LoadOptions options;
  options.seconds = 2;
  options.objective_seconds = 0.5;
  LoadResult result;
  result.wall_seconds = 4;
  result.calls = {Ended(100, 0.5), Ended(1000, 0.51), Ended(100, 0.1),
                  Ended(100, 0.1, absl::ResourceExhaustedError("full"))};
  const Json report = LoadJson(options, result);
  EXPECT_EQ(report["offered_rate"], 2);
  EXPECT_EQ(report["offered_tokens_per_second"], 650);
  EXPECT_EQ(report["completed_rate"], 0.75);
  EXPECT_EQ(report["completed_tokens_per_second"], 300);
  EXPECT_EQ(report["goodput_tokens_per_second"], 50);
  EXPECT_EQ(report["within_objective"], 2);
  EXPECT_EQ(report["lengths"][0]["completed"], 2);
  EXPECT_EQ(report["lengths"][1]["first_frame_seconds"]["p50"], 0.51);
  EXPECT_EQ(report["codes"], Json({{"OK", 3}, {"RESOURCE_EXHAUSTED", 1}}));
  EXPECT_NE(LoadTable(report).find("RESOURCE_EXHAUSTED 1"), std::string::npos);
}

TEST(LoadReportTest, VerdictKnowsLoadFromFailure) {
  LoadResult result;
  result.calls = {Ended(1, 0, absl::UnavailableError("away"))};
  EXPECT_EQ(ExitCodeOf(LoadVerdict(result)), kTryLater);  // nothing completed
  result.calls.push_back(Ended(1, 0.1));
  EXPECT_TRUE(LoadVerdict(result).ok());
  result.calls.push_back(Ended(1, 0, absl::DataLossError("digest")));
  EXPECT_EQ(ExitCodeOf(LoadVerdict(result)), kIntegrity);
}

TEST(LoadFlagsTest, ContradictionsAreRefused) {
  const std::vector<std::string> rows[] = {
      {"--rate", "0"},
      {"--rate", "nan"},
      {"--rate", "1", "--concurrency", "2"},
      {"--rate", "1", "--deadline-share", "0.5"},
      {"--rate", "1", "--cancel-share", "1.5"},
      {"--rate", "1", "--cancel-ms", "5"},
      {"--rate", "1", "--slow-bytes", "5"},
      {"--rate", "1", "--step-tokens", "5"},
      {"--rate", "1000000", "--seconds", "1000"},
      {"--rate", "1", "--mix", "0:1"},
      {"--rate", "1", "--priority-mix", "9:1"},
  };
  FlagGroup closed = {"", {{"concurrency", "N", ""}, {"priority", "N", ""}}};
  for (const auto& row : rows) {
    const auto args = Args::Parse({OpenLoopFlags(), closed}, row);
    ASSERT_TRUE(args.ok()) << args.status();
    EXPECT_EQ(ExitCodeOf(ReadLoadOptions(*args).status()), kUsage) << row[1] << row.back();
  }
}

}  // namespace
}  // namespace sparsegdn::cli
