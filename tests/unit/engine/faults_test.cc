// Requests that end early: cancel, deadline, non-finite states, failing steps, slow readers, drain.
// Each time everything is freed and the others go on.
#include <vector>

#include "server/engine/status_payload.h"
#include "tests/unit/engine/engine_test_util.h"

namespace sparsegdn::testing {
namespace {

using engine::PrefillRequest;
using Stage = engine::EngineObserver::Stage;

int64_t Cancelled(const CountingObserver& observer, Stage stage) {
  return observer.cancelled[static_cast<int>(stage)];
}

TEST(Deadline, InTheQueueEndsBeforeAnyStep) {
  Harness h;
  PrefillRequest request = Harness::Prompt(5000);
  request.deadline_ns = h.clock.NowNs() + 1'000'000'000;
  const auto call = h.Submit(request);
  h.clock.AdvanceSeconds(1.0);
  h.RunRounds();
  Collected got;
  ReadAvailable(*call, got);
  EXPECT_EQ(Describe(*got.status), "DEADLINE_EXCEEDED  DEADLINE_EXCEEDED");
  EXPECT_EQ(h.log->counts().steps, 0);
  EXPECT_EQ(h.log->counts().acquires, 0);
  EXPECT_EQ(h.observer.expired, 1);
  EXPECT_EQ(Cancelled(h.observer, Stage::kQueued), 0);
  h.ExpectNoLeak();
}

TEST(Deadline, WhileComputingEndsAtTheNextStep) {
  Harness h;
  PrefillRequest request = Harness::Prompt(20000);
  request.deadline_ns = h.clock.NowNs() + 1'000'000'000;
  const auto call = h.Submit(request);
  h.RunRounds(2);
  h.clock.AdvanceSeconds(2.0);
  h.RunRounds();
  Collected got;
  ReadAvailable(*call, got);
  EXPECT_EQ(got.status->code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(got.result);
  EXPECT_EQ(h.log->counts().steps, 2);
  EXPECT_EQ(h.observer.wasted_tokens, 4096);
  h.ExpectNoLeak();
}

TEST(Cancel, InTheQueueAndWhileComputingAndAfterwards) {
  FakeRunnerOptions options;
  options.limits.state_slots = 1;
  Harness h(options);
  const auto running = h.Submit(Harness::Prompt(20000));
  const auto queued = h.Submit(Harness::Prompt(3000));
  h.RunRounds(2);
  running->Cancel(false);
  running->Cancel(false);
  queued->Cancel(false);
  EXPECT_EQ(h.engine().gauges().buffered_bytes, 0) << "frames of a cancelled call go at once";
  h.RunRounds();
  EXPECT_EQ(running->status()->code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(queued->status()->code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(Cancelled(h.observer, Stage::kComputing), 1);
  EXPECT_EQ(Cancelled(h.observer, Stage::kQueued), 1);
  EXPECT_EQ(h.observer.wasted_tokens, 4096);
  EXPECT_EQ(h.log->counts().steps, 2);
  h.ExpectNoLeak();

  const auto unread = h.Submit(Harness::Prompt(100));
  h.RunRounds();
  unread->Cancel(false);
  EXPECT_EQ(unread->status()->code(), absl::StatusCode::kCancelled) << "nothing partial is OK";
  h.RunRounds();
  EXPECT_EQ(Cancelled(h.observer, Stage::kStreaming), 1);
  const auto read = h.Submit(Harness::Prompt(100));
  h.RunRounds();
  Collected got;
  ReadAvailable(*read, got);
  read->Cancel(false);
  EXPECT_TRUE(read->status()->ok()) << "after the end a cancel changes nothing";
  h.ExpectNoLeak();
}

TEST(Cancel, DuringTheLastStepNeverGivesOkWithoutAResult) {
  std::shared_ptr<engine::PrefillCall> call;
  FakeRunnerOptions options;
  options.after_step = [&] { call->Cancel(false); };
  Harness h(options);
  PrefillRequest request = Harness::Prompt(100);
  request.keep_snapshot = true;
  call = h.Submit(request);
  h.RunRounds();
  Collected got;
  ReadAvailable(*call, got);
  EXPECT_EQ(got.status->code(), absl::StatusCode::kCancelled);
  EXPECT_FALSE(got.result);
  EXPECT_EQ(h.engine().gauges().kept_snapshots, 0);
  EXPECT_EQ(h.engine().gauges().kept_snapshot_bytes, 0);
  h.ExpectNoLeak();
}

TEST(Cancel, DroppingTheCallIsACancel) {
  Harness h;
  h.Submit(Harness::Prompt(20000));
  h.RunRounds();
  EXPECT_EQ(h.log->counts().steps, 0);
  EXPECT_EQ(Cancelled(h.observer, Stage::kQueued), 1);
  h.ExpectNoLeak();
}

TEST(NonFinite, FailsItsOwnRequestAlone) {
  FakeRunnerOptions options;
  options.nan_token = 950;
  Harness h(options);
  PrefillRequest bad = Harness::Prompt(200);
  bad.tokens[100] = 950;
  bad.keep_snapshot = true;
  const auto bad_call = h.Submit(bad);
  PrefillRequest good = Harness::Prompt(300, 2);
  const auto good_call = h.Submit(good);
  h.RunRounds(1);
  EXPECT_EQ(h.log->counts().steps, 1) << "both were in one step";
  h.RunRounds();
  Collected failed, fine;
  ReadAvailable(*bad_call, failed);
  ReadAvailable(*good_call, fine);
  EXPECT_EQ(Describe(*failed.status), "DATA_LOSS  NON_FINITE_STATE");
  EXPECT_FALSE(failed.result);
  EXPECT_TRUE(fine.status->ok());
  EXPECT_EQ(fine.Floats("layers.3.recurrent_state"),
            FakeState(h.info, 3, std::span(good.tokens).first(299)));
  EXPECT_EQ(h.observer.nonfinite, 1);
  EXPECT_EQ(h.engine().gauges().kept_snapshots, 0) << "a bad state is not kept";
  h.ExpectNoLeak();
}

TEST(StepError, FailsItsBatchAndNothingElse) {
  FakeRunnerOptions options;
  options.error_token = 950;
  Harness h(options);
  PrefillRequest bad = Harness::Prompt(200);
  bad.tokens[10] = 950;
  const auto a = h.Submit(bad);
  const auto b = h.Submit(Harness::Prompt(300));
  h.RunRounds();
  for (const auto& call : {a, b}) {
    Collected got;
    ReadAvailable(*call, got);
    EXPECT_EQ(Describe(*got.status), "INTERNAL  STEP_FAILED");
  }
  EXPECT_TRUE(h.engine().healthy());
  EXPECT_TRUE(h.Complete(Harness::Prompt(300)).status->ok());
  h.ExpectNoLeak();
}

TEST(StepError, AStickyFaultEndsEverythingAndHealth) {
  FakeRunnerOptions options;
  options.fatal_token = 950;
  options.limits.state_slots = 2;
  options.limits.max_batch_seqs = 1;
  Harness h(options);
  PrefillRequest bad = Harness::Prompt(200);
  bad.tokens[10] = 950;
  bad.priority = 1;
  const auto failing = h.Submit(bad);
  const auto running = h.Submit(Harness::Prompt(300));
  const auto queued = h.Submit(Harness::Prompt(300));
  EXPECT_TRUE(h.engine().healthy());
  h.RunRounds();
  EXPECT_FALSE(h.engine().healthy());
  std::vector<std::string> ends;
  for (const auto& call : {failing, running, queued}) {
    Collected got;
    ReadAvailable(*call, got);
    ends.push_back(Describe(*got.status));
  }
  EXPECT_EQ(ends, (std::vector<std::string>{"INTERNAL  STEP_FAILED", "INTERNAL  DEVICE_LOST",
                                            "UNAVAILABLE  DEVICE_LOST"}));
  EXPECT_EQ(Describe(h.SubmitError(Harness::Prompt(10))), "UNAVAILABLE  DEVICE_LOST");
  EXPECT_EQ(h.log->counts().acquires, h.log->counts().releases);
}

TEST(StepError, ARunnerThatGivesNoStateIsNeverOkWithPartialState) {
  FakeRunnerOptions options;
  options.silent_token = 950;
  Harness h(options);
  PrefillRequest request = Harness::Prompt(200);
  request.tokens[10] = 950;
  const Collected got = h.Complete(request);
  EXPECT_EQ(got.status->code(), absl::StatusCode::kInternal);
  EXPECT_FALSE(got.result);
  h.ExpectNoLeak();
}

TEST(Health, AStuckStepIsSeenFromOutside) {
  engine::EngineConfig config = Harness::DenseConfig();
  config.stuck_step_seconds = 10;
  Harness* harness = nullptr;
  std::vector<bool> seen;
  FakeRunnerOptions options;
  options.on_step = [&](auto) {
    seen.push_back(harness->engine().healthy());
    harness->clock.AdvanceSeconds(11);
    seen.push_back(harness->engine().healthy());
  };
  Harness h(options, config);
  harness = &h;
  EXPECT_TRUE(h.Complete(Harness::Prompt(100)).status->ok());
  EXPECT_EQ(seen, (std::vector<bool>{true, false}));
  EXPECT_TRUE(h.engine().healthy());
}

engine::EngineConfig SmallBuffers() {
  engine::EngineConfig config = Harness::DenseConfig();
  config.limits.max_buffered_bytes_per_call = 100'000;  // one chunk's KV is 131,072
  config.limits.slow_reader_timeout_seconds = 5;
  return config;
}

TEST(SlowReader, PausesItsOwnCallOnly) {
  Harness h({}, SmallBuffers());
  const auto slow = h.Submit(Harness::Prompt(20000));
  h.RunRounds();
  EXPECT_EQ(h.log->counts().steps, 1) << "one chunk fills the buffer";
  EXPECT_EQ(h.observer.slow, 1);
  const int64_t waiting = h.engine().gauges().buffered_bytes;
  EXPECT_GT(waiting, 100'000);
  EXPECT_LT(waiting, 150'000);
  EXPECT_TRUE(h.Complete(Harness::Prompt(2000, 3)).status->ok()) << "others go on";
  EXPECT_EQ(h.engine().gauges().buffered_bytes, waiting);
  Collected got;
  while (!got.status) {
    ReadAvailable(*slow, got);
    h.RunRounds();
  }
  EXPECT_TRUE(got.status->ok()) << "a reader that comes back gets everything";
  h.ExpectNoLeak();
}

TEST(SlowReader, OneThatTakesNothingFailsAndFreesAll) {
  Harness h({}, SmallBuffers());
  const auto slow = h.Submit(Harness::Prompt(20000));
  h.RunRounds();
  h.clock.AdvanceSeconds(4.9);
  h.RunRounds();
  EXPECT_FALSE(slow->status());
  EXPECT_TRUE(slow->TryPop());
  h.clock.AdvanceSeconds(4.9);  // counted from the last event taken
  h.RunRounds();
  EXPECT_EQ(h.engine().gauges().running_requests, 1);
  h.clock.AdvanceSeconds(0.2);
  h.RunRounds();
  EXPECT_EQ(Describe(*slow->status()), "RESOURCE_EXHAUSTED  SLOW_READER");
  EXPECT_EQ(Cancelled(h.observer, Stage::kComputing), 1);
  h.ExpectNoLeak();
}

TEST(SlowReader, AfterTheComputationToo) {
  Harness h({}, SmallBuffers());
  const auto slow = h.Submit(Harness::Prompt(100));
  h.RunRounds();
  EXPECT_EQ(h.engine().gauges().running_requests, 0);
  EXPECT_EQ(h.engine().gauges().free_slots, 4) << "a slow reader holds no device memory";
  EXPECT_GT(h.engine().gauges().buffered_bytes, 0);
  h.clock.AdvanceSeconds(5.1);
  h.RunRounds();
  EXPECT_EQ(Describe(*slow->status()), "RESOURCE_EXHAUSTED  SLOW_READER");
  EXPECT_EQ(Cancelled(h.observer, Stage::kStreaming), 1);
  h.ExpectNoLeak();
}

TEST(SlowReader, TheBoundOverAllCallsHolds) {
  engine::EngineConfig config = SmallBuffers();
  config.limits.max_buffered_bytes_per_call = 1 << 20;
  config.limits.max_buffered_bytes = 300'000;
  Harness h({}, config);
  std::vector<std::shared_ptr<engine::PrefillCall>> calls;
  for (int i = 0; i < 4; ++i) calls.push_back(h.Submit(Harness::Prompt(20000, i)));
  h.RunRounds();
  EXPECT_LE(h.engine().gauges().buffered_bytes, 300'000);
  EXPECT_GT(h.engine().gauges().buffered_bytes, 150'000);
  h.clock.AdvanceSeconds(6);
  h.RunRounds();
  h.clock.AdvanceSeconds(6);
  h.RunRounds();
  h.clock.AdvanceSeconds(6);
  h.RunRounds();
  for (const auto& call : calls) {
    Collected got;
    ReadAvailable(*call, got);
    EXPECT_EQ(Describe(*got.status), "RESOURCE_EXHAUSTED  SLOW_READER");
  }
  h.ExpectNoLeak();
}

// One token before the last has nothing to run: its zero state leaves without a step.
TEST(SlowReader, TheBoundOverAllCallsHoldsForCallsWithNothingToRun) {
  Harness probe;
  const int64_t bytes =
      static_cast<int64_t>(probe.Complete(Harness::Prompt(1)).manifest->total_bytes);
  engine::EngineConfig config = SmallBuffers();
  config.limits.max_buffered_bytes = 3 * bytes + bytes / 2;
  Harness h({}, config);
  std::vector<std::shared_ptr<engine::PrefillCall>> calls;
  for (int i = 0; i < 50; ++i) calls.push_back(h.Submit(Harness::Prompt(1, i)));
  h.RunRounds();
  EXPECT_EQ(h.engine().gauges().buffered_bytes, 3 * bytes);
  EXPECT_EQ(h.engine().gauges().queue_requests, 47) << "the others wait for room";
  for (const auto& call : calls) {
    Collected got;
    ReadAvailable(*call, got);
    EXPECT_TRUE(got.status && got.status->ok());
    h.RunRounds();
    EXPECT_LE(h.engine().gauges().buffered_bytes, 3 * bytes);
  }
  h.ExpectNoLeak();
}

TEST(Gauges, RunningRequestsAreCountedAtAnyTimeOfTheClock) {
  for (const double seconds : {-1.0, -5.0}) {  // the clock stands at 1 s: zero, and before it
    Harness h;
    h.clock.AdvanceSeconds(seconds);
    EXPECT_TRUE(h.Complete(Harness::Prompt(100)).status->ok());
    h.ExpectNoLeak();
  }
}

TEST(Drain, FinishesWhatItHasAndRefusesTheRest) {
  Harness h;
  const auto call = h.Submit(Harness::Prompt(10000));
  EXPECT_TRUE(h.engine().Drain(int64_t{1} << 40));
  Collected got;
  ReadAvailable(*call, got);
  EXPECT_TRUE(got.status->ok());
  for (const absl::Status& refused :
       {h.SubmitError(Harness::Prompt(10)), h.engine().BeginImport({}, 0, "").status()}) {
    EXPECT_EQ(Describe(refused), "UNAVAILABLE  DRAINING");
    EXPECT_EQ(engine::DetailsOf(refused).retry_after_ms, 1000) << "another replica may take it";
  }
  h.ExpectNoLeak();
}

TEST(Drain, CancelsWhatIsLeftAtTheDeadline) {
  FakeRunnerOptions options;
  Harness* harness = nullptr;
  options.on_step = [&](auto) { harness->clock.AdvanceSeconds(1); };
  Harness h(options);
  harness = &h;
  const auto call = h.Submit(Harness::Prompt(30000));
  EXPECT_FALSE(h.engine().Drain(3'000'000'000));
  Collected got;
  ReadAvailable(*call, got);
  EXPECT_EQ(Describe(*got.status), "UNAVAILABLE  DRAINING");
  EXPECT_EQ(engine::DetailsOf(*got.status).retry_after_ms, 1000);
  EXPECT_EQ(h.log->counts().steps, 3);
  h.ExpectNoLeak();
}

}  // namespace
}  // namespace sparsegdn::testing
