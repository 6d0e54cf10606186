// What a call returns: states, conv, KV, logits and log-probabilities against the fake's truth, in
// every dtype and layout, whole or resumed.
#include <algorithm>
#include <span>

#include "absl/strings/str_cat.h"
#include "tests/unit/engine/engine_test_util.h"

namespace sparsegdn::testing {
namespace {

using engine::ExportDType;
using engine::PrefillRequest;
using engine::SnapshotAt;

std::span<const int32_t> Prefix(const PrefillRequest& request, int64_t n) {
  return std::span(request.tokens).first(static_cast<size_t>(n));
}

// All of the snapshot after `position` tokens of `tokens`, FP32, key-major, four columns; KV rows
// from `first` on.
void ExpectSnapshot(const Collected& got, const model::ModelInfo& info,
                    std::span<const int32_t> prefix, int64_t first = 0) {
  ASSERT_TRUE(got.status.has_value());
  ASSERT_TRUE(got.status->ok()) << got.status->ToString();
  EXPECT_EQ(got.manifest->position, std::ssize(prefix));
  EXPECT_EQ(got.result->snapshot_position, std::ssize(prefix));
  for (int32_t layer : {0, 1, 3}) {
    const std::string name = absl::StrCat("layers.", layer, ".");
    EXPECT_EQ(got.Floats(name + "recurrent_state"), FakeState(info, layer, prefix));
    EXPECT_EQ(got.Floats(name + "conv_state"), FakeConv(info, prefix));
    EXPECT_EQ(got.Info(name + "conv_state").position, std::ssize(prefix));
  }
  for (const bool key : {true, false}) {
    std::vector<float> rows = FakeKv(info, 2, key, prefix);
    rows.erase(rows.begin(), rows.begin() + first * FakeRowElements(info));
    const std::string name = key ? "layers.2.key" : "layers.2.value";
    EXPECT_EQ(got.Floats(name), rows);
    EXPECT_EQ(got.Info(name).position, first);
  }
}

TEST(EngineResults, BeforeLastIsTheStateOfAllButTheLastToken) {
  for (const int64_t n : {2, 3, 64, 65, 2047, 2048, 2049, 5000}) {
    Harness h;
    const PrefillRequest request = Harness::Prompt(n);
    const Collected got = h.Complete(request);
    ExpectSnapshot(got, h.info, Prefix(request, n - 1));
    EXPECT_FALSE(got.result->next_token);
    EXPECT_EQ(got.result->usage.computed_tokens, n - 1);
    EXPECT_EQ(h.log->counts().tokens, n - 1) << "the worker runs the last token, not the server";
    h.ExpectNoLeak();
  }
}

TEST(EngineResults, AfterLastHasTheNextToken) {
  for (const int64_t n : {1, 2, 2048, 2049, 4097}) {
    Harness h;
    PrefillRequest request = Harness::Prompt(n);
    request.snapshot_at = SnapshotAt::kAfterLast;
    const Collected got = h.Complete(request);
    ExpectSnapshot(got, h.info, Prefix(request, n));
    const std::vector<float> logits = FakeLogits(h.info, request.tokens);
    EXPECT_EQ(got.result->next_token,
              std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
}

TEST(EngineResults, OneTokenBeforeLastIsTheZeroStateWithoutWork) {
  Harness h;
  const PrefillRequest request = Harness::Prompt(1);
  const Collected got = h.Complete(request);
  ExpectSnapshot(got, h.info, Prefix(request, 0));
  EXPECT_EQ(got.Info("layers.2.key").shape, (std::vector<int64_t>{0, 2, 4}));
  EXPECT_EQ(h.log->counts().steps, 0);
  EXPECT_EQ(h.log->counts().acquires, 0);
}

TEST(EngineResults, ResumeEqualsTheWholePrompt) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    for (const int64_t cut : {1, 63, 2048, 3000}) {
      FakeRunnerOptions options;
      options.info = SmallHybridInfo(compute);
      Harness h(options);
      const PrefillRequest whole = Harness::Prompt(4500);
      PrefillRequest a;
      a.tokens.assign(whole.tokens.begin(), whole.tokens.begin() + cut);
      a.snapshot_at = SnapshotAt::kAfterLast;
      a.keep_snapshot = true;
      const Collected first = h.Complete(a);
      ASSERT_TRUE(first.status->ok());
      PrefillRequest b;
      b.tokens.assign(whole.tokens.begin() + cut, whole.tokens.end());
      b.resume_from = first.result->snapshot_id;
      b.first_position = cut;
      b.snapshot_at = SnapshotAt::kAfterLast;
      const Collected second = h.Complete(b);
      ExpectSnapshot(second, h.info, whole.tokens, cut);
      PrefillRequest whole_after = whole;
      whole_after.snapshot_at = SnapshotAt::kAfterLast;
      EXPECT_EQ(h.Complete(whole_after).result->next_token, second.result->next_token);
      EXPECT_EQ(second.result->usage.cached_tokens, cut);
      EXPECT_EQ(second.result->usage.prompt_tokens, 4500);
      EXPECT_EQ(second.result->usage.computed_tokens, 4500 - cut);
      h.ExpectNoLeak();
    }
  }
}

// Decoding token by token: each step resumes from the one before.
TEST(EngineResults, OneTokenStepsEqualOnePrompt) {
  Harness h;
  const PrefillRequest whole = Harness::Prompt(400);
  PrefillRequest start;
  start.tokens.assign(whole.tokens.begin(), whole.tokens.begin() + 100);
  start.snapshot_at = SnapshotAt::kAfterLast;
  start.keep_snapshot = true;
  std::string id = h.Complete(start).result->snapshot_id;
  Collected last;
  for (int64_t i = 100; i < 400; ++i) {
    PrefillRequest step;
    step.tokens = {whole.tokens[i]};
    step.resume_from = id;
    step.snapshot_at = SnapshotAt::kAfterLast;
    step.keep_snapshot = true;
    last = h.Complete(step);
    ASSERT_TRUE(last.status->ok()) << last.status->ToString();
    const std::string next = last.result->snapshot_id;
    ASSERT_TRUE(h.engine().ReleaseSnapshot(id, "").ok());
    id = next;
  }
  ExpectSnapshot(last, h.info, whole.tokens, 399);
  const std::vector<float> logits = FakeLogits(h.info, whole.tokens);
  EXPECT_EQ(last.result->next_token,
            std::max_element(logits.begin(), logits.end()) - logits.begin());
  EXPECT_EQ(h.engine().gauges().kept_snapshots, 1);
}

TEST(EngineResults, ResumeWithOneTokenBeforeLastGivesTheSameState) {
  Harness h;
  PrefillRequest a = Harness::Prompt(300);
  a.snapshot_at = SnapshotAt::kAfterLast;
  a.keep_snapshot = true;
  const Collected first = h.Complete(a);
  const int64_t steps = h.log->counts().steps;
  PrefillRequest b = Harness::Prompt(1);
  b.resume_from = first.result->snapshot_id;
  b.keep_snapshot = true;
  const Collected second = h.Complete(b);
  ExpectSnapshot(second, h.info, a.tokens, 300);
  EXPECT_EQ(h.log->counts().steps, steps);
  EXPECT_NE(second.result->snapshot_id, first.result->snapshot_id);
  EXPECT_EQ(h.engine().gauges().kept_snapshot_bytes, engine::Layout(h.info).kept_bytes(300))
      << "the same bytes are held once";
}

TEST(EngineResults, BeforeLastWithLogitsOfTheLastTokenRunsItAfterTheStateLeft) {
  Harness h;
  PrefillRequest request = Harness::Prompt(2100);
  request.outputs.logits_positions = {0, 2047, 2099};
  const Collected got = h.Complete(request);
  ExpectSnapshot(got, h.info, Prefix(request, 2099));
  const std::vector<float> rows = got.Floats("logits");
  ASSERT_EQ(rows.size(), 3u * 1000);
  for (const auto& [row, position] : {std::pair(0, 0), {1, 2047}, {2, 2099}}) {
    EXPECT_EQ(std::vector<float>(rows.begin() + row * 1000, rows.begin() + (row + 1) * 1000),
              FakeLogits(h.info, Prefix(request, position + 1)));
  }
  EXPECT_EQ(h.log->chunks().back().tokens, 1);
  EXPECT_FALSE(h.log->chunks().back().emit_state);
  EXPECT_FALSE(got.result->next_token);
}

TEST(EngineResults, OneTokenBeforeLastWithLogitsRunsOneToken) {
  Harness h;
  PrefillRequest request = Harness::Prompt(1);
  request.outputs.logits_positions = {0};
  const Collected got = h.Complete(request);
  ExpectSnapshot(got, h.info, Prefix(request, 0));
  EXPECT_EQ(got.Floats("logits"), FakeLogits(h.info, request.tokens));
  EXPECT_EQ(h.log->counts().tokens, 1);
}

TEST(EngineResults, TopKIsBestFirst) {
  Harness h;
  PrefillRequest request = Harness::Prompt(100);
  request.outputs.logits_positions = {5, 99};
  request.outputs.top_k = 3;
  const Collected got = h.Complete(request);
  const std::vector<float> values = got.Floats("top_k_logits");
  ASSERT_EQ(values.size(), 6u);
  std::vector<float> logits = FakeLogits(h.info, request.tokens);
  const int32_t* ids = reinterpret_cast<const int32_t*>(got.Bytes("top_k_ids").data());
  for (int i = 3; i < 6; ++i) {
    const auto best = std::max_element(logits.begin(), logits.end());
    EXPECT_EQ(ids[i], best - logits.begin());
    EXPECT_EQ(values[i], *best);
    *best = -1e30f;
  }
  EXPECT_EQ(got.Info("top_k_ids").dtype, ExportDType::kI32);
}

TEST(EngineResults, LogprobsCoverEveryTokenFromTheFirstAsked) {
  for (const SnapshotAt at : {SnapshotAt::kBeforeLast, SnapshotAt::kAfterLast}) {
    for (const int64_t from : {1, 2047, 2048, 2049, 4099}) {
      Harness h;
      PrefillRequest request = Harness::Prompt(4100);
      request.snapshot_at = at;
      request.outputs.logprobs_from = from;
      const Collected got = h.Complete(request);
      std::vector<float> want;
      for (int64_t t = from; t < 4100; ++t) {
        want.push_back(FakeLogprob(Prefix(request, t), request.tokens[t]));
      }
      EXPECT_EQ(got.Floats("prompt_logprobs"), want) << "from " << from;
    }
  }
}

TEST(EngineResults, CheckpointsAreStatesOfPrefixes) {
  Harness h;
  PrefillRequest request = Harness::Prompt(2500);
  request.outputs.checkpoint_every = 640;
  const Collected got = h.Complete(request);
  ExpectSnapshot(got, h.info, Prefix(request, 2499));
  for (const int64_t position : {640, 1280, 1920}) {
    for (int32_t layer : {0, 1, 3}) {
      const std::string name = absl::StrCat("checkpoints.", position, ".layers.", layer, ".");
      EXPECT_EQ(got.Floats(name + "recurrent_state"),
                FakeState(h.info, layer, Prefix(request, position)));
      EXPECT_EQ(got.Floats(name + "conv_state"), FakeConv(h.info, Prefix(request, position)));
      EXPECT_EQ(got.Info(name + "conv_state").position, position);
    }
  }
  EXPECT_FALSE(got.Has("checkpoints.2560.layers.0.recurrent_state"));
}

TEST(EngineResults, ACheckpointAtTheSnapshotIsTheSnapshot) {
  Harness h;
  PrefillRequest request = Harness::Prompt(1280);
  request.snapshot_at = SnapshotAt::kAfterLast;
  request.outputs.checkpoint_every = 640;
  const Collected got = h.Complete(request);
  ExpectSnapshot(got, h.info, request.tokens);
  EXPECT_TRUE(got.Has("checkpoints.640.layers.0.recurrent_state"));
  EXPECT_FALSE(got.Has("checkpoints.1280.layers.0.recurrent_state"));
}

TEST(EngineResults, OnlyWhatIsAskedIsReturned) {
  Harness h;
  PrefillRequest request = Harness::Prompt(100);
  request.outputs.state = request.outputs.kv = false;
  Collected got = h.Complete(request);
  ASSERT_TRUE(got.status->ok());
  EXPECT_EQ(got.tensors.size(), 3u);
  EXPECT_TRUE(got.Has("layers.0.conv_state"));
  request.outputs.conv_state = false;
  got = h.Complete(request);
  ASSERT_TRUE(got.status->ok());
  EXPECT_EQ(got.tensors.size(), 0u);
  EXPECT_EQ(got.frames, 0u);
}

TEST(EngineResults, UsageAndRetainedShares) {
  engine::EngineConfig config = Harness::DenseConfig();
  config.default_budget = {};
  config.default_budget.retention = 0.25;
  Harness h({}, config);
  const Collected got = h.Complete(Harness::Prompt(4097));
  ASSERT_TRUE(got.status->ok());
  const engine::Result& result = *got.result;
  EXPECT_EQ(result.usage.events_total, 4096 * 2 * 3);
  EXPECT_EQ(result.usage.events_selected, 1024 * 2 * 3);
  EXPECT_EQ(result.retained_layers, (std::vector<int32_t>{0, 1, 3}));
  EXPECT_EQ(result.retained, std::vector(3, std::vector<float>(2, 0.25f)));
  EXPECT_EQ(result.effective_budget.retention, 0.25);
  EXPECT_EQ(result.effective_budget.max_retention, 0.5);
  EXPECT_EQ(got.progress.front().tokens_total, 4096);
  EXPECT_EQ(got.progress.back().tokens_done, 4096);
  EXPECT_GT(result.timings.gdn_core_seconds, 0);
}

TEST(EngineResults, KvAndFinishedLayersStreamWhileTheStepStillRuns) {
  Harness* harness = nullptr;
  std::shared_ptr<engine::PrefillCall> call;
  Collected got;
  size_t frames_in_last_step = 0;
  FakeRunnerOptions options;
  options.after_step = [&] {
    const size_t before = got.frames;
    ReadAvailable(*call, got);
    frames_in_last_step = got.frames - before;
  };
  Harness h(options);
  harness = &h;
  call = harness->Submit(Harness::Prompt(2049));
  h.RunRounds();
  ReadAvailable(*call, got);
  ASSERT_TRUE(got.status->ok());
  EXPECT_EQ(frames_in_last_step, got.frames) << "all frames left before the step returned";
}

}  // namespace
}  // namespace sparsegdn::testing
