// The real executor thread under many callers: run under TSan as well.
#include <atomic>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "server/engine/status_payload.h"
#include "tests/unit/engine/live_engine.h"

namespace sparsegdn::testing {
namespace {

using engine::PrefillRequest;
using std::chrono::milliseconds;

TEST(Threads, CallersInParallelEachGetTheirOwnState) {
  Live live;
  const model::ModelInfo info = live.engine->model_info();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 15; ++i) {
        const PrefillRequest request = Harness::Prompt(1 + (i * 977 + t * 313) % 6000, t * 100 + i);
        auto call = live.engine->Submit(request);
        ASSERT_TRUE(call.ok()) << call.status();
        const Collected got = ReadToEnd(**call);
        ASSERT_TRUE(got.status->ok()) << *got.status;
        EXPECT_EQ(got.Floats("layers.1.recurrent_state"),
                  FakeState(info, 1, std::span(request.tokens).first(request.tokens.size() - 1)));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(live.engine->gauges().running_requests, 0);
}

// Snapshots are sealed and checked on a thread of their own while others are kept, released and
// evicted.
TEST(Threads, ChainsOfDecodeStepsGoOnFromTheirOwnSnapshots) {
  Live live;
  const model::ModelInfo info = live.engine->model_info();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<int32_t> seen;
      std::string from;
      for (int step = 0; step < 25; ++step) {
        PrefillRequest request = Harness::Prompt(step == 0 ? 3000 : 1, t * 100 + step);
        request.snapshot_at = engine::SnapshotAt::kAfterLast;
        request.keep_snapshot = true;
        request.resume_from = from;
        seen.insert(seen.end(), request.tokens.begin(), request.tokens.end());
        auto call = live.engine->Submit(std::move(request));
        ASSERT_TRUE(call.ok()) << call.status();
        const Collected got = ReadToEnd(**call);
        ASSERT_TRUE(got.status->ok()) << *got.status;
        ASSERT_EQ(got.Floats("layers.1.recurrent_state"), FakeState(info, 1, seen));
        if (step > 0) {
          EXPECT_TRUE(live.engine->ReleaseSnapshot(from, "").ok());
        }
        from = got.result->snapshot_id;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(live.engine->gauges().kept_snapshots, 4);
  EXPECT_EQ(live.observer.corrupt_snapshots, 0);
}

TEST(Threads, ThousandsOfCancelsAtRandomMomentsLeakNothing) {
  FakeRunnerOptions options;
  options.ns_per_step = 20'000;
  engine::EngineConfig config = Harness::DenseConfig();
  config.limits.max_queue_requests = 64;
  config.limits.max_buffered_bytes_per_call = 50'000;
  Live live(options, config);
  constexpr int kThreads = 4, kCalls = 600;
  std::atomic<int> ok{0}, cancelled{0}, expired{0}, refused{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 rng(static_cast<uint32_t>(t));
      for (int i = 0; i < kCalls; ++i) {
        PrefillRequest request =
            Harness::Prompt(1 + static_cast<int64_t>(rng() % (i % 4 == 0 ? 5000 : 300)), i);
        request.keep_snapshot = rng() % 4 == 0;
        request.priority = static_cast<int32_t>(rng() % 17) - 8;
        if (rng() % 8 == 0) {
          request.deadline_ns =
              engine::Clock::Real()->NowNs() + 1 + static_cast<int64_t>(rng() % 300'000);
        }
        auto call = live.engine->Submit(std::move(request));
        if (!call.ok()) {
          ++refused;
          continue;
        }
        if (rng() % 4 == 0) continue;  // dropped at once
        Collected got;
        const int pops = static_cast<int>(rng() % 30);
        for (int p = 0; p < pops && !got.status; ++p) {
          ReadAvailable(**call, got);
          std::this_thread::sleep_for(std::chrono::microseconds(rng() % 40));
        }
        if (rng() % 2 == 0) (*call)->Cancel(rng() % 3 == 0);
        if (!got.status)
          got = [&] {
            Collected rest = std::move(got);
            while (!rest.status) {
              ReadAvailable(**call, rest);
              if (!rest.status) std::this_thread::sleep_for(std::chrono::microseconds(50));
            }
            return rest;
          }();
        ok += got.status->ok();
        cancelled += absl::IsCancelled(*got.status);
        expired += absl::IsDeadlineExceeded(*got.status);
        EXPECT_TRUE(got.status->ok() || absl::IsCancelled(*got.status) ||
                    absl::IsDeadlineExceeded(*got.status))
            << *got.status;
        if (got.status->ok()) {
          EXPECT_TRUE(got.result);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(live.engine->Drain(int64_t{30} * 1'000'000'000));
  const engine::EngineGauges gauges = live.engine->gauges();
  EXPECT_EQ(gauges.buffered_bytes, 0);
  EXPECT_EQ(gauges.queue_requests, 0);
  EXPECT_EQ(gauges.queue_tokens, 0);
  live.engine.reset();
  EXPECT_EQ(live.log->counts().acquires, live.log->counts().releases);
  EXPECT_GT(ok, 100);
  EXPECT_GT(cancelled, 100);
}

// Callers who cancel at once against a queue that steps empty slowly: one that submits ends what
// others cancelled. Two may empty the queue together and find it full again, rarely.
TEST(Threads, WhatIsCancelledDoesNotFillTheQueue) {
  FakeRunnerOptions options;
  options.ns_per_step = 20'000'000;
  engine::EngineConfig config = Harness::DenseConfig();
  config.limits.max_queue_requests = 16;
  Live live(options, config);
  std::atomic<int> accepted{0}, refused{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        auto call = live.engine->Submit(Harness::Prompt(20, t * 1000 + i));
        ++(call.ok() ? accepted : refused);
        if (call.ok()) (*call)->Cancel(false);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(refused, 40);
  EXPECT_TRUE(live.engine->Drain(int64_t{30} * 1'000'000'000));
  EXPECT_EQ(live.engine->gauges().queue_requests, 0);
  EXPECT_EQ(live.observer.cancelled[0] + live.observer.cancelled[1] + live.observer.computed,
            accepted);
  live.engine.reset();
  EXPECT_EQ(live.log->counts().acquires, live.log->counts().releases);
}

TEST(Threads, AReplacedCallbackNeverRunsAgain) {
  FakeRunnerOptions options;
  options.ns_per_step = 100'000;
  Live live(options);
  for (int i = 0; i < 50; ++i) {
    auto call = *live.engine->Submit(Harness::Prompt(20000));
    auto alive = std::make_unique<std::atomic<int>>(0);
    call->SetReadyCallback([raw = alive.get()] { ++*raw; });
    std::this_thread::sleep_for(std::chrono::microseconds(i * 20));
    call->SetReadyCallback(nullptr);
    alive.reset();  // a late call would write freed memory: ASan and TSan see it
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    call->Cancel(false);
  }
}

TEST(Threads, TheCallbackMayPopAndMayClearItself) {
  Live live;
  auto call = *live.engine->Submit(Harness::Prompt(3000));
  Collected got;
  std::atomic<bool> done{false};
  call->SetReadyCallback([&] {
    ReadAvailable(*call, got);
    if (!got.status) return;
    call->SetReadyCallback(nullptr);
    done = true;
  });
  for (int i = 0; i < 2000 && !done; ++i) std::this_thread::sleep_for(milliseconds(5));
  ASSERT_TRUE(done);
  EXPECT_TRUE(got.status->ok());
}

TEST(Threads, CallsOutliveTheEngine) {
  FakeRunnerOptions options;
  options.ns_per_step = 5'000'000;
  options.limits.state_slots = 1;
  auto live = std::make_unique<Live>(options);
  std::vector<std::shared_ptr<engine::PrefillCall>> calls;
  for (int i = 0; i < 3; ++i) calls.push_back(*live->engine->Submit(Harness::Prompt(30000)));
  std::this_thread::sleep_for(milliseconds(20));
  engine::Manifest manifest;
  live->engine.reset();
  for (const auto& call : calls) {
    Collected got;
    ReadAvailable(*call, got);
    EXPECT_EQ(Describe(*got.status), "UNAVAILABLE  SHUTTING_DOWN");
    EXPECT_EQ(engine::DetailsOf(*got.status).retry_after_ms, 1000);
    call->Cancel(false);
  }
  EXPECT_EQ(live->log->counts().acquires, live->log->counts().releases);
}

TEST(Threads, DrainWithThreadCancelsWhatIsLeft) {
  FakeRunnerOptions options;
  options.ns_per_step = 10'000'000;
  Live live(options);
  auto call = *live.engine->Submit(Harness::Prompt(60000));
  EXPECT_FALSE(live.engine->Drain(30'000'000));
  EXPECT_EQ(Describe(ReadToEnd(*call).status.value()), "UNAVAILABLE  DRAINING");
}

TEST(Threads, GaugesLimitsAndReleaseWhileRunning) {
  FakeRunnerOptions options;
  options.ns_per_step = 50'000;
  Live live(options);
  std::atomic<bool> stop{false};
  std::thread watcher([&] {
    while (!stop) {
      const engine::EngineGauges gauges = live.engine->gauges();
      EXPECT_GE(gauges.free_slots, 0);
      EXPECT_GE(gauges.buffered_bytes, 0);
      EXPECT_TRUE(live.engine->healthy());
      engine::EngineLimits limits;
      limits.max_queue_requests = 100;
      EXPECT_TRUE(live.engine->SetLimits(limits).ok());
    }
  });
  for (int i = 0; i < 100; ++i) {
    PrefillRequest request = Harness::Prompt(1 + i * 53 % 3000, i);
    request.keep_snapshot = true;
    auto call = *live.engine->Submit(request);
    const Collected got = ReadToEnd(*call);
    ASSERT_TRUE(got.status->ok()) << *got.status;
    if (i % 2 == 0) {
      EXPECT_TRUE(live.engine->ReleaseSnapshot(got.result->snapshot_id, "").ok());
    }
  }
  stop = true;
  watcher.join();
}

}  // namespace
}  // namespace sparsegdn::testing
