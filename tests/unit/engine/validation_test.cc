// Every refusal before the queue: code, field and reason, and that the next request works.
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "server/engine/status_payload.h"
#include "tests/unit/engine/engine_test_util.h"

namespace sparsegdn::testing {
namespace {

using engine::ExportDType;
using engine::PrefillRequest;
using engine::SnapshotAt;

struct Row {
  const char* name;
  std::function<void(PrefillRequest&)> set;
  const char* want;  // code, field, reason
};

TEST(Validation, EveryBadFieldIsNamedAndTheNextRequestWorks) {
  const Row rows[] = {
      {"empty prompt", [](auto& r) { r.tokens.clear(); },
       "INVALID_ARGUMENT token_ids INVALID_FIELD"},
      {"token -1", [](auto& r) { r.tokens[17] = -1; },
       "INVALID_ARGUMENT token_ids[17] INVALID_FIELD"},
      {"token = vocabulary", [](auto& r) { r.tokens[99] = 1000; },
       "INVALID_ARGUMENT token_ids[99] INVALID_FIELD"},
      {"token INT_MIN", [](auto& r) { r.tokens[0] = std::numeric_limits<int32_t>::min(); },
       "INVALID_ARGUMENT token_ids[0] INVALID_FIELD"},
      {"longer than the context", [](auto& r) { r.tokens.resize(65537, 1); },
       "OUT_OF_RANGE token_ids PROMPT_TOO_LONG"},
      {"budget 0", [](auto& r) { r.budget.retention = 0.0; },
       "INVALID_ARGUMENT budget.retention INVALID_FIELD"},
      {"keep_last 0 with BEFORE_LAST",
       [](auto& r) {
         r.budget.retention = 0.3;
         r.budget.keep_last = 0;
       },
       "INVALID_ARGUMENT budget.keep_last INVALID_FIELD"},
      {"first_position without resume", [](auto& r) { r.first_position = 1; },
       "INVALID_ARGUMENT first_position INVALID_FIELD"},
      {"unknown snapshot", [](auto& r) { r.resume_from = "0123"; },
       "NOT_FOUND resume_from SNAPSHOT_NOT_FOUND"},
      {"priority high", [](auto& r) { r.priority = 9; }, "INVALID_ARGUMENT priority INVALID_FIELD"},
      {"priority low", [](auto& r) { r.priority = -9; }, "INVALID_ARGUMENT priority INVALID_FIELD"},
      {"long request id", [](auto& r) { r.request_id.assign(129, 'x'); },
       "INVALID_ARGUMENT request_id INVALID_FIELD"},
      {"newline in request id", [](auto& r) { r.request_id = "a\nb"; },
       "INVALID_ARGUMENT request_id INVALID_FIELD"},
      {"long tenant", [](auto& r) { r.tenant.assign(257, 'x'); },
       "INVALID_ARGUMENT tenant INVALID_FIELD"},
      {"int32 state", [](auto& r) { r.outputs.state_dtype = ExportDType::kI32; },
       "INVALID_ARGUMENT outputs.state_dtype INVALID_FIELD"},
      {"fp8 kv", [](auto& r) { r.outputs.kv_dtype = ExportDType::kF8E4M3; },
       "INVALID_ARGUMENT outputs.kv_dtype INVALID_FIELD"},
      {"negative checkpoints", [](auto& r) { r.outputs.checkpoint_every = -64; },
       "INVALID_ARGUMENT outputs.checkpoint_every INVALID_FIELD"},
      {"checkpoints off the group", [](auto& r) { r.outputs.checkpoint_every = 100; },
       "INVALID_ARGUMENT outputs.checkpoint_every INVALID_FIELD"},
      {"checkpoints off the window",
       [](auto& r) {
         r.budget.retention = 0.3;
         r.outputs.checkpoint_every = 1024;
       },
       "INVALID_ARGUMENT outputs.checkpoint_every INVALID_FIELD"},
      {"checkpoints of nothing",
       [](auto& r) {
         r.outputs.checkpoint_every = 64;
         r.outputs.state = r.outputs.conv_state = false;
       },
       "INVALID_ARGUMENT outputs.checkpoint_every INVALID_FIELD"},
      {"logits past the end",
       [](auto& r) {
         r.outputs.logits_positions = {3, 100};
       },
       "INVALID_ARGUMENT outputs.logits.positions[1] INVALID_FIELD"},
      {"logits at -1", [](auto& r) { r.outputs.logits_positions = {-1}; },
       "INVALID_ARGUMENT outputs.logits.positions[0] INVALID_FIELD"},
      {"logits twice",
       [](auto& r) {
         r.outputs.logits_positions = {3, 3};
       },
       "INVALID_ARGUMENT outputs.logits.positions[1] INVALID_FIELD"},
      {"logits unordered",
       [](auto& r) {
         r.outputs.logits_positions = {3, 2};
       },
       "INVALID_ARGUMENT outputs.logits.positions[1] INVALID_FIELD"},
      {"too many logits", [](auto& r) { r.outputs.logits_positions.resize(4097); },
       "INVALID_ARGUMENT outputs.logits.positions INVALID_FIELD"},
      {"top_k above its maximum",
       [](auto& r) {
         r.outputs.logits_positions = {3};
         r.outputs.top_k = 1001;
       },
       "INVALID_ARGUMENT outputs.logits.top_k INVALID_FIELD"},
      {"top_k of nothing", [](auto& r) { r.outputs.top_k = 1; },
       "INVALID_ARGUMENT outputs.logits.top_k INVALID_FIELD"},
      {"logprobs from 0", [](auto& r) { r.outputs.logprobs_from = 0; },
       "INVALID_ARGUMENT outputs.prompt_logprobs_from INVALID_FIELD"},
      {"logprobs past the end", [](auto& r) { r.outputs.logprobs_from = 100; },
       "INVALID_ARGUMENT outputs.prompt_logprobs_from INVALID_FIELD"},
      {"deadline passed", [](auto& r) { r.deadline_ns = 0; },
       "DEADLINE_EXCEEDED  DEADLINE_EXCEEDED"},
  };
  Harness h;
  for (const Row& row : rows) {
    PrefillRequest request = Harness::Prompt(100);
    row.set(request);
    const absl::Status status = h.SubmitError(request);
    EXPECT_EQ(Describe(status), row.want) << row.name << ": " << status;
    EXPECT_FALSE(engine::DetailsOf(status).retry_after_ms) << row.name;
    EXPECT_LT(status.message().size(), 1000u) << row.name;
  }
  EXPECT_EQ(h.log->counts().steps, 0);
  EXPECT_EQ(h.log->counts().acquires, 0);
  EXPECT_TRUE(h.Complete(Harness::Prompt(100)).status->ok());
  h.ExpectNoLeak();
}

TEST(Validation, AnEmptyPromptLeavesItsBatchMatesAlone) {
  Harness h;
  const auto before = h.Submit(Harness::Prompt(100));
  EXPECT_EQ(Describe(h.SubmitError({})), "INVALID_ARGUMENT token_ids INVALID_FIELD");
  const auto after = h.Submit(Harness::Prompt(100));
  h.RunRounds();
  for (const auto& call : {before, after}) {
    Collected got;
    ReadAvailable(*call, got);
    EXPECT_TRUE(got.status->ok());
  }
  EXPECT_EQ(h.log->counts().steps, 1);
}

TEST(Validation, EdgesThatAreLegal) {
  const Row rows[] = {
      {"one token", [](auto& r) { r.tokens.resize(1); }, ""},
      {"the whole context", [](auto& r) { r.tokens.resize(65536, 1); }, ""},
      {"first_position 0", [](auto& r) { r.first_position = 0; }, ""},
      {"priorities", [](auto& r) { r.priority = -8; }, ""},
      {"keep_last 0 with AFTER_LAST",
       [](auto& r) {
         r.budget.retention = 0.3;
         r.budget.keep_last = 0;
         r.snapshot_at = SnapshotAt::kAfterLast;
       },
       ""},
      {"the whole vocabulary as top-k",
       [](auto& r) {
         r.outputs.logits_positions = {0, 99};
         r.outputs.top_k = 1000;
       },
       ""},
      {"logprobs of the last token", [](auto& r) { r.outputs.logprobs_from = 99; }, ""},
      {"checkpoints beyond the prompt", [](auto& r) { r.outputs.checkpoint_every = 1 << 20; }, ""},
  };
  for (const Row& row : rows) {
    Harness h;
    PrefillRequest request = Harness::Prompt(100);
    row.set(request);
    const Collected got = h.Complete(request);
    ASSERT_TRUE(got.status) << row.name;
    EXPECT_TRUE(got.status->ok()) << row.name << ": " << *got.status;
    h.ExpectNoLeak();
  }
}

TEST(Validation, PositionOfTheSnapshotAndItsTenant) {
  Harness h;
  PrefillRequest a = Harness::Prompt(100);
  a.keep_snapshot = true;
  a.tenant = "red";
  const std::string id = h.Complete(a).result->snapshot_id;
  PrefillRequest b = Harness::Prompt(5);
  b.resume_from = id;
  b.tenant = "blue";
  EXPECT_EQ(Describe(h.SubmitError(b)), "NOT_FOUND resume_from SNAPSHOT_NOT_FOUND");
  EXPECT_EQ(Describe(h.engine().ReleaseSnapshot(id, "blue")),
            "NOT_FOUND snapshot_id SNAPSHOT_NOT_FOUND");
  b.tenant = "red";
  b.first_position = 100;  // BEFORE_LAST kept 99 tokens
  EXPECT_EQ(Describe(h.SubmitError(b)), "INVALID_ARGUMENT first_position INVALID_FIELD");
  b.first_position = 99;
  b.outputs.logits_positions = {98};
  EXPECT_EQ(Describe(h.SubmitError(b)),
            "INVALID_ARGUMENT outputs.logits.positions[0] INVALID_FIELD");
  b.outputs.logits_positions = {};
  b.outputs.logprobs_from = 99;  // its probability needs token 98
  EXPECT_EQ(Describe(h.SubmitError(b)),
            "INVALID_ARGUMENT outputs.prompt_logprobs_from INVALID_FIELD");
  b.outputs.logprobs_from = 100;
  EXPECT_TRUE(h.Complete(b).status->ok());
  b.tokens.resize(65536 - 98, 1);
  EXPECT_EQ(Describe(h.SubmitError(b)), "OUT_OF_RANGE token_ids PROMPT_TOO_LONG");
}

TEST(Validation, ConfiguredPromptLimit) {
  engine::EngineConfig config = Harness::DenseConfig();
  config.limits.max_prompt_tokens = 50;
  Harness h({}, config);
  EXPECT_EQ(Describe(h.SubmitError(Harness::Prompt(51))), "OUT_OF_RANGE token_ids PROMPT_TOO_LONG");
  EXPECT_TRUE(h.Complete(Harness::Prompt(50)).status->ok());
  engine::EngineLimits limits = config.limits;
  limits.max_prompt_tokens = 60;
  EXPECT_TRUE(h.engine().SetLimits(limits).ok());
  EXPECT_TRUE(h.Complete(Harness::Prompt(60)).status->ok());
  limits.max_prompt_tokens = 70;
  limits.max_queue_bytes = 0;
  EXPECT_EQ(Describe(h.engine().SetLimits(limits)),
            "INVALID_ARGUMENT limits.max_queue_bytes INVALID_FIELD");
  EXPECT_EQ(Describe(h.SubmitError(Harness::Prompt(61))), "OUT_OF_RANGE token_ids PROMPT_TOO_LONG")
      << "the old ones stay";
}

TEST(NeverFits, IsImmediateAndWithoutRetry) {
  FakeRunnerOptions options;
  options.limits.kv_tokens = 1024;
  engine::EngineConfig config = Harness::DenseConfig();
  config.kept_snapshot_bytes = 10000;
  config.limits.max_buffered_bytes = 1 << 20;
  config.limits.max_queue_tokens = 2000;
  Harness h(options, config);
  const auto expect = [&](PrefillRequest request, const char* field) {
    const absl::Status status = h.SubmitError(std::move(request));
    EXPECT_EQ(Describe(status), std::string("RESOURCE_EXHAUSTED ") + field + " NEVER_FITS");
    EXPECT_FALSE(engine::DetailsOf(status).retry_after_ms);
  };
  expect(Harness::Prompt(2001), "token_ids");  // the queue
  expect(Harness::Prompt(1026), "token_ids");  // KV
  PrefillRequest keep = Harness::Prompt(100);
  keep.keep_snapshot = true;
  expect(keep, "keep_snapshot");
  PrefillRequest wide = Harness::Prompt(1000);
  for (int64_t p = 0; p < 300; ++p) wide.outputs.logits_positions.push_back(p);
  expect(wide, "outputs");
  EXPECT_TRUE(h.Complete(Harness::Prompt(1025)).status->ok()) << "BEFORE_LAST runs 1024";
  h.ExpectNoLeak();
}

TEST(NeverFits, ManyCheckpointsAreRefusedBeforeTheirManifestIsBuilt) {
  Harness h;
  PrefillRequest request = Harness::Prompt(60000);
  request.outputs.checkpoint_every = 64;
  EXPECT_TRUE(h.Complete(request).status->ok());
  FakeRunnerOptions options;
  options.info.max_context_tokens = options.limits.kv_tokens = 1 << 22;
  engine::EngineConfig config = Harness::DenseConfig();
  Harness large(options, config);
  request.tokens.resize(1 << 20, 1);
  EXPECT_EQ(Describe(large.SubmitError(request)),
            "INVALID_ARGUMENT outputs.checkpoint_every INVALID_FIELD");
}

// Tokens are 4 bytes each; a checkpoint is tensors of the manifest, whatever the tokens.
TEST(QueueFull, ByBytesOfTokensAndPlans) {
  engine::EngineConfig config = Harness::DenseConfig();
  config.limits.max_queue_bytes = 100'000;
  Harness h({}, config);
  EXPECT_EQ(Describe(h.SubmitError(Harness::Prompt(25'000))), "RESOURCE_EXHAUSTED  NEVER_FITS");
  const PrefillRequest request = Harness::Prompt(10'000);
  const auto plain = h.Submit(request);
  EXPECT_GT(h.engine().gauges().queue_bytes, 40'000);
  EXPECT_LT(h.engine().gauges().queue_bytes, 50'000);
  PrefillRequest checkpoints = request;  // fits alone
  checkpoints.outputs.checkpoint_every = 256;
  const absl::Status status = h.SubmitError(checkpoints);
  EXPECT_EQ(Describe(status), "RESOURCE_EXHAUSTED  QUEUE_FULL");
  EXPECT_GE(engine::DetailsOf(status).retry_after_ms.value_or(0), 100);
  const auto second = h.Submit(request);
  second->Cancel(false);
  Collected got;
  while (!got.status && h.engine().RunOneRound()) ReadAvailable(*plain, got);
  ReadAvailable(*plain, got);
  EXPECT_TRUE(got.status->ok());
  h.ExpectNoLeak();
}

TEST(TenantLimit, BoundsOneTenantAndNobodyElse) {
  engine::EngineConfig config = Harness::DenseConfig();
  config.limits.max_tenant_requests = 2;
  config.limits.max_tenant_tokens = 1000;
  Harness h({}, config);
  const auto prompt = [](const char* tenant, int64_t tokens) {
    PrefillRequest request = Harness::Prompt(tokens);
    request.tenant = tenant;
    return request;
  };
  EXPECT_EQ(Describe(h.SubmitError(prompt("a", 1001))), "RESOURCE_EXHAUSTED token_ids NEVER_FITS");
  auto first = h.Submit(prompt("a", 700));
  absl::Status status = h.SubmitError(prompt("a", 301));
  EXPECT_EQ(Describe(status), "RESOURCE_EXHAUSTED  TENANT_LIMIT");
  EXPECT_GE(engine::DetailsOf(status).retry_after_ms.value_or(0), 100);
  auto second = h.Submit(prompt("a", 300));
  EXPECT_EQ(Describe(h.SubmitError(prompt("a", 1))), "RESOURCE_EXHAUSTED  TENANT_LIMIT");
  auto other = h.Submit(prompt("b", 700));
  // What has ended, in whatever way, counts no longer.
  second->Cancel(false);
  Collected got;
  while (!got.status && h.engine().RunOneRound()) ReadAvailable(*first, got);
  EXPECT_TRUE(got.status->ok());
  while (h.engine().RunOneRound()) {
  }
  for (auto& call : {&second, &other}) call->reset();
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(h.Complete(prompt("a", 900)).status->ok());
  h.ExpectNoLeak();
}

TEST(TenantLimit, BoundsWhatOneTenantKeeps) {
  const int64_t kept = engine::Layout(SmallHybridInfo()).kept_bytes(99);
  engine::EngineConfig config = Harness::DenseConfig();
  config.limits.max_tenant_kept_bytes = 2 * kept;
  Harness h({}, config);
  const auto keep = [&](const char* tenant, int64_t tokens, bool pin) {
    PrefillRequest request = Harness::Prompt(tokens);
    request.tenant = tenant;
    request.keep_snapshot = true;
    request.pin_snapshot = pin;
    return request;
  };
  EXPECT_EQ(Describe(h.SubmitError(keep("a", 1000, false))),
            "RESOURCE_EXHAUSTED keep_snapshot NEVER_FITS");
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(h.Complete(keep("a", 100, true)).status->ok());
  EXPECT_EQ(Describe(*h.Complete(keep("a", 100, false)).status),
            "RESOURCE_EXHAUSTED keep_snapshot TENANT_SNAPSHOT_LIMIT");
  EXPECT_TRUE(h.Complete(keep("b", 100, false)).status->ok());
  // A reload applies to the next request.
  engine::EngineLimits limits = config.limits;
  limits.max_tenant_kept_bytes = 3 * kept;
  ASSERT_TRUE(h.engine().SetLimits(limits).ok());
  EXPECT_TRUE(h.Complete(keep("a", 100, false)).status->ok());
  limits.max_tenant_kept_bytes = -1;
  EXPECT_FALSE(h.engine().SetLimits(limits).ok());
  h.ExpectNoLeak();
}

TEST(TenantLimit, AFreeSlotGoesToTheTenantWithTheFewest) {
  FakeRunnerOptions options;
  options.limits.state_slots = 2;
  options.limits.max_batch_seqs = 1;
  Harness h(options, Harness::DenseConfig());
  std::vector<std::shared_ptr<engine::PrefillCall>> calls;
  for (int i = 0; i < 6; ++i) {
    PrefillRequest request = Harness::Prompt(100 + i);
    request.tenant = i < 5 ? "many" : "few";
    calls.push_back(h.Submit(request));
  }
  while (h.engine().RunOneRound()) {
  }
  std::vector<int64_t> order;
  for (const auto& chunk : h.log->chunks()) order.push_back(chunk.prompt_tokens);
  EXPECT_EQ(order, (std::vector<int64_t>{100, 105, 101, 102, 103, 104}));
  calls.clear();
  h.ExpectNoLeak();
}

// While a step runs nothing is reaped: no round is run here between the calls.
TEST(QueueFull, CancelledAndExpiredOnesMakeRoomAtOnce) {
  engine::EngineConfig config = Harness::DenseConfig();
  config.limits.max_queue_requests = 3;
  config.limits.max_queue_tokens = 1000;
  config.limits.max_tenant_requests = 2;
  Harness h({}, config);
  const auto prompt = [](const char* tenant, int64_t tokens) {
    PrefillRequest request = Harness::Prompt(tokens);
    request.tenant = tenant;
    return request;
  };
  auto kept = h.Submit(prompt("a", 300));
  auto cancelled = h.Submit(prompt("a", 300));
  PrefillRequest hasty = prompt("b", 300);
  hasty.deadline_ns = h.clock.NowNs() + 1'000'000'000;
  auto expired = h.Submit(hasty);
  EXPECT_EQ(Describe(h.SubmitError(prompt("c", 1))), "RESOURCE_EXHAUSTED  QUEUE_FULL");
  EXPECT_FALSE(cancelled->status());

  cancelled->Cancel(false);
  auto tenant_limit = h.Submit(prompt("a", 300));
  EXPECT_TRUE(absl::IsCancelled(*cancelled->status()));
  EXPECT_EQ(h.observer.cancelled[0], 1);
  h.clock.AdvanceSeconds(2);
  auto tokens_limit = h.Submit(prompt("c", 400));
  EXPECT_TRUE(absl::IsDeadlineExceeded(*expired->status()));
  EXPECT_EQ(h.observer.expired, 1);
  EXPECT_EQ(Describe(h.SubmitError(prompt("d", 1))), "RESOURCE_EXHAUSTED  QUEUE_FULL");

  EXPECT_EQ(h.engine().gauges().queue_requests, 3);
  EXPECT_EQ(h.engine().gauges().queue_tokens, 1000);
  h.RunRounds();
  for (auto* call : {&kept, &tenant_limit, &tokens_limit}) {
    Collected got;
    ReadAvailable(**call, got);
    EXPECT_TRUE(got.status->ok());
    call->reset();
  }
  h.ExpectNoLeak();
}

TEST(QueueFull, ByRequestsAndByTokensWithRetryDelay) {
  engine::EngineConfig config = Harness::DenseConfig();
  config.limits.max_queue_requests = 3;
  config.limits.max_queue_tokens = 1000;
  Harness h({}, config);
  std::vector<std::shared_ptr<engine::PrefillCall>> calls;
  for (int i = 0; i < 2; ++i) calls.push_back(h.Submit(Harness::Prompt(400)));
  absl::Status status = h.SubmitError(Harness::Prompt(201));
  EXPECT_EQ(Describe(status), "RESOURCE_EXHAUSTED  QUEUE_FULL");
  EXPECT_GE(engine::DetailsOf(status).retry_after_ms.value_or(0), 100);
  calls.push_back(h.Submit(Harness::Prompt(200)));
  Collected last;
  ReadAvailable(*calls.back(), last);
  EXPECT_EQ(last.accepted->queue_position, 2u);
  EXPECT_EQ(last.accepted->queued_tokens, 800);
  status = h.SubmitError(Harness::Prompt(1));
  EXPECT_EQ(Describe(status), "RESOURCE_EXHAUSTED  QUEUE_FULL");
  EXPECT_TRUE(engine::DetailsOf(status).retry_after_ms);
  EXPECT_EQ(h.engine().gauges().queue_requests, 3);
  EXPECT_EQ(h.engine().gauges().queue_tokens, 1000);
  h.RunRounds();
  EXPECT_TRUE(h.Complete(Harness::Prompt(10)).status->ok());
}

TEST(Config, EveryBadFieldIsNamed) {
  struct ConfigRow {
    const char* field;
    std::function<void(engine::EngineConfig&)> set;
  };
  const ConfigRow rows[] = {
      {"default_budget",
       [](auto& c) {
         c.default_budget.retention = 1.5;
         c.default_budget.mode = BudgetMode::kRetention;
       }},
      {"chunk_windows", [](auto& c) { c.chunk_windows = 0; }},
      {"chunk_windows", [](auto& c) { c.chunk_windows = 3; }},  // a step takes 4096 tokens
      {"kept_snapshot_bytes", [](auto& c) { c.kept_snapshot_bytes = -1; }},
      {"frame_bytes", [](auto& c) { c.frame_bytes = 0; }},
      {"frame_bytes", [](auto& c) { c.frame_bytes = 4 << 20; }},
      {"stuck_step_seconds", [](auto& c) { c.stuck_step_seconds = -1; }},
      {"limits.max_queue_requests", [](auto& c) { c.limits.max_queue_requests = 0; }},
      {"limits.max_queue_tokens", [](auto& c) { c.limits.max_queue_tokens = 0; }},
      {"limits.max_prompt_tokens", [](auto& c) { c.limits.max_prompt_tokens = -1; }},
      {"limits.max_buffered_bytes_per_call",
       [](auto& c) { c.limits.max_buffered_bytes_per_call = 0; }},
      {"limits.max_buffered_bytes", [](auto& c) { c.limits.max_buffered_bytes = 0; }},
      {"limits.slow_reader_timeout_seconds",
       [](auto& c) { c.limits.slow_reader_timeout_seconds = std::nan(""); }},
      {"limits.default_ttl_seconds", [](auto& c) { c.limits.default_ttl_seconds = 0; }},
      {"limits.max_ttl_seconds", [](auto& c) { c.limits.max_ttl_seconds = 10; }},
  };
  for (const ConfigRow& row : rows) {
    engine::EngineConfig config = Harness::DenseConfig();
    row.set(config);
    CountingObserver observer;
    const auto engine = engine::Engine::Create(
        config,
        std::make_unique<FakeRunner>(FakeRunnerOptions{}, std::make_shared<FakeRunnerLog>()),
        &observer, engine::Clock::Real());
    ASSERT_FALSE(engine.ok()) << row.field;
    EXPECT_EQ(Describe(engine.status()),
              std::string("INVALID_ARGUMENT ") + row.field + " INVALID_FIELD");
  }
}

}  // namespace
}  // namespace sparsegdn::testing
