// Prefix reuse in the engine: what is found, what is loaded, what the client gets, and everything
// that must keep two requests apart.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <span>
#include <thread>
#include <vector>

#include "tests/unit/engine/engine_test_util.h"

namespace sparsegdn::testing {
namespace {

using engine::PrefillRequest;
using engine::SnapshotAt;

constexpr int64_t kW = kWindow;

engine::EngineConfig Config(int64_t bytes = 64 << 20) {
  engine::EngineConfig config = Harness::DenseConfig();
  config.prefix_cache_bytes = bytes;
  return config;
}

// `shared` tokens of one prompt, then others.
PrefillRequest Branch(int64_t shared, int64_t tokens, int32_t seed) {
  PrefillRequest request = Harness::Prompt(tokens);
  for (int64_t i = shared; i < tokens; ++i) {
    int32_t& token = request.tokens[static_cast<size_t>(i)];
    token = (token + 1 + seed) % 900;
  }
  return request;
}

struct Row {
  int64_t cached, computed;
};
Row UsageOf(const Collected& got) {
  EXPECT_TRUE(got.status && got.status->ok());
  if (!got.result) return {-1, -1};
  return {got.result->usage.cached_tokens, got.result->usage.computed_tokens};
}
bool operator==(const Row& a, const Row& b) {
  return a.cached == b.cached && a.computed == b.computed;
}
std::ostream& operator<<(std::ostream& out, const Row& row) {
  return out << row.cached << " cached, " << row.computed << " computed";
}

// Everything the client gets but the timings, from an engine that stores nothing.
void ExpectSameAsCold(const Collected& got, const PrefillRequest& request,
                      FakeRunnerOptions options = {}) {
  Harness cold(options, Harness::DenseConfig());
  PrefillRequest plain = request;
  plain.resume_from.clear();
  const Collected want = cold.Complete(plain);
  ASSERT_TRUE(got.result && want.result);
  EXPECT_EQ(got.tensors, want.tensors);
  EXPECT_EQ(got.result->digest, want.result->digest);
  EXPECT_EQ(got.result->next_token, want.result->next_token);
}

TEST(PrefixReuse, ASharedPrefixIsComputedOnce) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    for (const int64_t chunk_windows : {1, 2}) {
      FakeRunnerOptions options;
      options.info = SmallHybridInfo(compute);
      engine::EngineConfig config = Config();
      config.chunk_windows = chunk_windows;
      Harness h(options, config);
      EXPECT_EQ(UsageOf(h.Complete(Harness::Prompt(9000))), (Row{0, 8999}));
      const PrefillRequest second = Branch(3 * kW + 700, 9000, 1);
      const Collected got = h.Complete(second);
      EXPECT_EQ(UsageOf(got), (Row{3 * kW, 8999 - 3 * kW}));
      ExpectSameAsCold(got, second, options);
      h.ExpectNoLeak();
    }
  }
}

TEST(PrefixReuse, APrefixThatEndsInsideAWindowIsReusedUpToItsBoundary) {
  Harness h({}, Config());
  h.Complete(Harness::Prompt(2 * kW + 100));
  for (const auto& [shared, cached] : {std::pair<int64_t, int64_t>{kW - 1, 0},
                                       {kW, kW},
                                       {kW + 1, kW},
                                       {2 * kW - 1, kW},
                                       {2 * kW, 2 * kW}}) {
    const PrefillRequest request = Branch(shared, 3 * kW, static_cast<int32_t>(shared % 97));
    const Collected got = h.Complete(request);
    EXPECT_EQ(UsageOf(got).cached, cached) << shared;
    ExpectSameAsCold(got, request);
  }
}

TEST(PrefixReuse, EveryHitLoadsTheSameBits) {
  Harness h({}, Config());
  const PrefillRequest request = Harness::Prompt(3 * kW + 5);
  const Collected first = h.Complete(request);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(h.Complete(request).tensors, first.tensors);
  EXPECT_EQ(h.engine().gauges().prefix.memory_hits, 3);
  EXPECT_EQ(h.engine().gauges().prefix.misses, 1);
  EXPECT_EQ(h.engine().gauges().prefix.tokens_saved, 9 * kW);
}

TEST(PrefixReuse, SnapshotAtTheBoundaryNeedsNoWork) {
  Harness h({}, Config());
  h.Complete(Harness::Prompt(3 * kW));
  const int64_t steps = h.log->counts().steps;
  const PrefillRequest request = Harness::Prompt(2 * kW + 1);  // snapshot after 2 W tokens
  const Collected got = h.Complete(request);
  EXPECT_EQ(UsageOf(got), (Row{2 * kW, 0}));
  EXPECT_EQ(h.log->counts().steps, steps);
  ExpectSameAsCold(got, request);
  h.ExpectNoLeak();
}

TEST(PrefixReuse, AfterLastRunsItsLastToken) {
  Harness h({}, Config());
  h.Complete(Harness::Prompt(3 * kW));
  PrefillRequest request = Harness::Prompt(2 * kW);
  request.snapshot_at = SnapshotAt::kAfterLast;
  const Collected got = h.Complete(request);
  EXPECT_EQ(UsageOf(got), (Row{kW, kW}));
  ExpectSameAsCold(got, request);
  // A dense state after all N tokens is a function of them, and stored.
  PrefillRequest longer = Harness::Prompt(2 * kW + 10);
  EXPECT_EQ(UsageOf(h.Complete(longer)).cached, 2 * kW);
}

TEST(PrefixReuse, LogitsAtTheSnapshotRunTheLastTokenOnly) {
  Harness h({}, Config());
  h.Complete(Harness::Prompt(3 * kW));
  PrefillRequest request = Harness::Prompt(2 * kW + 1);
  request.outputs.logits_positions = {2 * kW};
  const Collected got = h.Complete(request);
  EXPECT_EQ(UsageOf(got), (Row{2 * kW, 1}));
  ExpectSameAsCold(got, request);
}

TEST(PrefixReuse, WhatTheClientAsksForBoundsTheReuse) {
  Harness h({}, Config());
  h.Complete(Harness::Prompt(4 * kW));
  PrefillRequest logits = Harness::Prompt(4 * kW);
  logits.outputs.logits_positions = {kW + 3, 4 * kW - 1};
  PrefillRequest logprobs = Harness::Prompt(4 * kW);
  logprobs.outputs.logprobs_from = 2 * kW;
  PrefillRequest checkpoints = Harness::Prompt(4 * kW);
  checkpoints.outputs.checkpoint_every = 2 * kW;
  PrefillRequest fine = Harness::Prompt(4 * kW);
  fine.outputs.checkpoint_every = 64;
  const struct {
    const char* name;
    PrefillRequest request;
    int64_t cached;
  } rows[] = {{"logits", logits, kW},
              {"logprobs need the token before", logprobs, kW},
              {"a checkpoint at the boundary", checkpoints, 2 * kW},
              {"checkpoints inside the first window", fine, 0}};
  for (const auto& row : rows) {
    SCOPED_TRACE(row.name);
    const Collected got = h.Complete(row.request);
    EXPECT_EQ(UsageOf(got).cached, row.cached);
    ExpectSameAsCold(got, row.request);
  }
}

TEST(PrefixReuse, OutputsInOtherFormsComeFromTheSameEntries) {
  Harness h({}, Config());
  h.Complete(Harness::Prompt(3 * kW));
  PrefillRequest request = Harness::Prompt(3 * kW);
  request.outputs.state_dtype = engine::ExportDType::kBF16;
  request.outputs.kv_dtype = engine::ExportDType::kBF16;
  request.outputs.state_layout = StateLayout::kValueMajor;
  request.outputs.conv_layout = engine::ConvLayout::kThreeColumns;
  ExpectSameAsCold(h.Complete(request), request);
  request.outputs.kv = false;
  ExpectSameAsCold(h.Complete(request), request);
}

TEST(PrefixReuse, AKeptSnapshotOfAHitResumesAsACold) {
  Harness h({}, Config());
  h.Complete(Harness::Prompt(3 * kW));
  PrefillRequest request = Harness::Prompt(3 * kW);
  request.keep_snapshot = true;
  request.outputs.kv = false;
  const Collected kept = h.Complete(request);
  EXPECT_EQ(UsageOf(kept).cached, 2 * kW);
  PrefillRequest next;
  next.tokens = {5, 6};
  next.resume_from = kept.result->snapshot_id;
  next.snapshot_at = SnapshotAt::kAfterLast;
  const Collected got = h.Complete(next);
  PrefillRequest whole = Harness::Prompt(3 * kW - 1);
  whole.tokens.insert(whole.tokens.end(), {5, 6});
  whole.snapshot_at = SnapshotAt::kAfterLast;
  Harness cold;
  const Collected want = cold.Complete(whole);
  EXPECT_EQ(got.result->next_token, want.result->next_token);
  EXPECT_EQ(got.Floats("layers.0.recurrent_state"), want.Floats("layers.0.recurrent_state"));
}

TEST(PrefixReuse, APinnedSnapshotThatHasNoRoomIsRefused) {
  engine::EngineConfig config = Config();
  Harness probe({}, config);
  PrefillRequest request = Harness::Prompt(100);
  request.keep_snapshot = true;
  request.pin_snapshot = true;
  EXPECT_TRUE(probe.Complete(request).status->ok());
  config.kept_snapshot_bytes = probe.engine().gauges().kept_snapshot_bytes * 3;
  Harness h({}, config);
  EXPECT_TRUE(h.Complete(request).status->ok());
  EXPECT_EQ(Describe(*h.Complete(request).status),
            "RESOURCE_EXHAUSTED keep_snapshot.pin PIN_LIMIT");
  h.ExpectNoLeak();
}

TEST(PrefixReuse, ResumeFromNeitherReusesNorStores) {
  Harness h({}, Config());
  PrefillRequest first = Harness::Prompt(kW);
  first.snapshot_at = SnapshotAt::kAfterLast;
  first.keep_snapshot = true;
  const Collected kept = h.Complete(first);
  const int64_t entries = h.engine().gauges().prefix.entries;
  PrefillRequest rest = Harness::Prompt(3 * kW);
  rest.tokens.erase(rest.tokens.begin(), rest.tokens.begin() + kW);
  rest.resume_from = kept.result->snapshot_id;
  const Collected got = h.Complete(rest);
  EXPECT_EQ(UsageOf(got), (Row{kW, 2 * kW - 1}));
  EXPECT_EQ(h.engine().gauges().prefix.entries, entries) << "its tokens start nobody's prompt";
  // And the same tokens without the snapshot are another prompt.
  rest.resume_from.clear();
  EXPECT_EQ(UsageOf(h.Complete(rest)).cached, 0);
}

TEST(PrefixReuse, OptingOutNeitherReusesNorStores) {
  Harness h({}, Config());
  PrefillRequest off = Harness::Prompt(2 * kW);
  off.prefix_reuse = false;
  EXPECT_EQ(UsageOf(h.Complete(off)).cached, 0);
  EXPECT_EQ(h.engine().gauges().prefix.entries, 0);
  h.Complete(Harness::Prompt(2 * kW));
  EXPECT_EQ(UsageOf(h.Complete(off)).cached, 0);
  EXPECT_EQ(h.engine().gauges().prefix.memory_hits, 0);
  EXPECT_EQ(h.engine().gauges().prefix.misses, 1);
}

TEST(PrefixReuse, TenantsDoNotShare) {
  Harness h({}, Config());
  PrefillRequest request = Harness::Prompt(2 * kW);
  request.tenant = "a";
  h.Complete(request);
  request.tenant = "b";
  EXPECT_EQ(UsageOf(h.Complete(request)).cached, 0);
  request.tenant.clear();
  EXPECT_EQ(UsageOf(h.Complete(request)).cached, 0);
  request.tenant = "a";
  EXPECT_EQ(UsageOf(h.Complete(request)).cached, kW);
}

TEST(PrefixReuse, BudgetsThatSelectOtherUpdatesDoNotShare) {
  Harness h({}, Config());
  const auto with = [](auto change) {
    PrefillRequest request = Harness::Prompt(3 * kW);
    request.budget.mode = BudgetMode::kRetention;
    request.budget.retention = 0.25;
    change(request.budget);
    return request;
  };
  EXPECT_EQ(UsageOf(h.Complete(Harness::Prompt(3 * kW))).cached, 0);  // dense
  EXPECT_EQ(UsageOf(h.Complete(with([](auto&) {}))).cached, 0);
  EXPECT_EQ(UsageOf(h.Complete(with([](auto&) {}))).cached, 2 * kW);
  const struct {
    const char* name;
    std::function<void(engine::BudgetOverrides&)> change;
  } rows[] = {{"retention", [](auto& b) { b.retention = 0.26; }},
              {"selector", [](auto& b) { b.selector = Selector::kWriteNorm; }},
              {"solver", [](auto& b) { b.solver = Solver::kExact; }},
              {"local", [](auto& b) { b.local = LocalTerm::kNone; }},
              {"min", [](auto& b) { b.min_retention = 0.01; }},
              {"max", [](auto& b) { b.max_retention = 0.9; }},
              {"keep_first", [](auto& b) { b.keep_first = 1; }},
              {"coverage", [](auto& b) {
                 b.mode = BudgetMode::kCoverage;
                 b.retention.reset();
                 b.coverage = 0.25;
               }}};
  for (const auto& row : rows) {
    EXPECT_EQ(UsageOf(h.Complete(with(row.change))).cached, 0) << row.name;
  }
}

// The last keep_last tokens are forced: a window that holds some of them is no function of the
// prefix, and a request whose forced tokens reach before a boundary must not start from it.
TEST(PrefixReuse, ForcedLastTokensBoundWhatIsStoredAndReused) {
  const auto sparse = [](int64_t tokens, int64_t keep_last) {
    PrefillRequest request = Harness::Prompt(tokens);
    request.budget.mode = BudgetMode::kRetention;
    request.budget.retention = 0.25;
    request.budget.keep_last = keep_last;
    return request;
  };
  Harness h({}, Config());
  h.Complete(sparse(2 * kW + 63, 64));  // the second boundary is not stored
  EXPECT_EQ(h.engine().gauges().prefix.entries, 1);
  h.Complete(sparse(2 * kW + 64, 64));
  EXPECT_EQ(h.engine().gauges().prefix.entries, 2);
  EXPECT_EQ(UsageOf(h.Complete(sparse(2 * kW + 63, 64))).cached, kW);
  EXPECT_EQ(UsageOf(h.Complete(sparse(2 * kW + 63, 63))).cached, 2 * kW)
      << "keep_last itself changes nothing before the boundary";
  EXPECT_EQ(UsageOf(h.Complete(sparse(2 * kW + 64, kW + 65))).cached, 0);
}

TEST(PrefixReuse, AnotherModelOrChunkingHasOtherKeys) {
  const Budget budget;
  const model::ModelInfo info = SmallHybridInfo();
  const engine::PrefixKey base = engine::PrefixSeed(info, 1, budget, "t");
  model::ModelInfo other = info;
  other.identity[0] = 'b';
  EXPECT_NE(engine::PrefixSeed(other, 1, budget, "t"), base);
  other = info;
  other.backend = "cuda";
  EXPECT_NE(engine::PrefixSeed(other, 1, budget, "t"), base);
  EXPECT_NE(engine::PrefixSeed(SmallHybridInfo(DType::kBF16), 1, budget, "t"), base);
  EXPECT_NE(engine::PrefixSeed(info, 2, budget, "t"), base);
  other = info;
  other.budget_profile = {1.0, 2.0};
  Budget sparse = budget;
  sparse.mode = BudgetMode::kRetention;
  EXPECT_NE(engine::PrefixSeed(other, 1, sparse, "t"), engine::PrefixSeed(info, 1, sparse, "t"));
  EXPECT_EQ(engine::PrefixSeed(info, 1, budget, "t"), base);
}

TEST(PrefixReuse, ACorruptEntryIsEvictedAndTheRequestRecomputed) {
  const auto flip_state = [](engine::PrefixEntry& e) {
    const_cast<std::string&>(*e.recurrent[1])[9] ^= 1;
  };
  const auto flip_kv = [](engine::PrefixEntry& e) {
    const_cast<std::string&>(*e.value[0])[77] ^= 4;
  };
  // A checksum that holds over a value that is not finite: the writer's memory was bad.
  const auto poison = [](engine::PrefixEntry& e) {
    std::string& bytes = const_cast<std::string&>(*e.recurrent[0]);
    bytes[2] = '\xc0', bytes[3] = '\x7f';
    engine::SealEntry(e);
  };
  const auto cut = [](engine::PrefixEntry& e) {
    const_cast<std::string&>(*e.key[0]).resize(8);
    engine::SealEntry(e);
  };
  const struct {
    const char* name;
    std::function<void(engine::PrefixEntry&)> damage;
    int64_t window, cached;
  } rows[] = {{"state of the last", flip_state, 2, 2 * kW},
              {"kv in the middle", flip_kv, 1, kW},
              {"state that nobody loads", flip_state, 0, 0},
              {"not finite", poison, 2, 2 * kW},
              {"cut", cut, 1, kW}};
  for (const auto& row : rows) {
    SCOPED_TRACE(row.name);
    Harness h({}, Config());
    const PrefillRequest request = Harness::Prompt(3 * kW + 5);
    h.Complete(request);
    engine::PrefixMemory& memory = h.engine().prefix_cache()->memory();
    const auto keys = engine::PrefixChain(
        engine::PrefixSeed(h.info, 1, Config().default_budget, ""), request.tokens, 3);
    {
      engine::PrefixStore::Query query;
      query.keys = keys;
      const engine::PrefixEntries entries = memory.Load(query);
      ASSERT_EQ(entries.size(), 3u);
      row.damage(const_cast<engine::PrefixEntry&>(*entries[static_cast<size_t>(row.window)]));
    }
    const Collected got = h.Complete(request);
    EXPECT_EQ(UsageOf(got).cached, row.cached);
    EXPECT_EQ(h.engine().gauges().prefix.corrupt, 1);
    ExpectSameAsCold(got, request);
    EXPECT_EQ(UsageOf(h.Complete(request)).cached, 3 * kW) << "stored anew";
    h.ExpectNoLeak();
  }
}

TEST(PrefixReuse, ARequestThatFailsLeavesNothingOfTheFailingStep) {
  FakeRunnerOptions options;
  options.nan_token = 950;
  Harness h(options, Config());
  PrefillRequest bad = Harness::Prompt(3 * kW);
  bad.tokens[static_cast<size_t>(kW + 10)] = 950;
  EXPECT_EQ(h.Complete(bad).status->code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(h.engine().gauges().prefix.entries, 1);
  EXPECT_EQ(UsageOf(h.Complete(Branch(kW, 3 * kW, 1))).cached, kW);
}

TEST(PrefixReuse, ACancelledRequestLeavesWholeEntriesOnly) {
  Harness h({}, Config());
  const auto call = h.Submit(Harness::Prompt(4 * kW));
  h.RunRounds(2);
  call->Cancel(false);
  h.RunRounds();
  EXPECT_EQ(h.engine().gauges().prefix.entries, 2);
  const PrefillRequest request = Harness::Prompt(4 * kW);
  const Collected got = h.Complete(request);
  EXPECT_EQ(UsageOf(got).cached, 2 * kW);
  ExpectSameAsCold(got, request);
}

TEST(PrefixReuse, OfIdenticalPromptsInTheQueueTheLaterOnesReuse) {
  FakeRunnerOptions options;
  options.limits.state_slots = 1;
  Harness h(options, Config());
  std::vector<std::shared_ptr<engine::PrefillCall>> calls;
  for (int i = 0; i < 3; ++i) calls.push_back(h.Submit(Harness::Prompt(3 * kW)));
  std::vector<Collected> got(3);
  for (int round = 0; round < 1000; ++round) {
    h.engine().RunOneRound();
    for (int i = 0; i < 3; ++i) ReadAvailable(*calls[i], got[i]);
  }
  EXPECT_EQ(UsageOf(got[0]).cached, 0);
  EXPECT_EQ(UsageOf(got[1]).cached, 2 * kW);
  EXPECT_EQ(UsageOf(got[2]).cached, 2 * kW);
  EXPECT_EQ(got[1].tensors, got[0].tensors);
  EXPECT_EQ(got[2].tensors, got[0].tensors);
}

TEST(PrefixReuse, IdenticalPromptsThatRunTogetherStoreOneOfEach) {
  Harness h({}, Config());
  std::vector<std::shared_ptr<engine::PrefillCall>> calls;
  for (int i = 0; i < 3; ++i) calls.push_back(h.Submit(Harness::Prompt(3 * kW)));
  std::vector<Collected> got(3);
  for (int round = 0; round < 1000; ++round) {
    h.engine().RunOneRound();
    for (int i = 0; i < 3; ++i) ReadAvailable(*calls[i], got[i]);
  }
  EXPECT_EQ(got[1].tensors, got[0].tensors);
  EXPECT_EQ(h.engine().gauges().prefix.entries, 2);
}

TEST(PrefixReuse, AStoreSmallerThanOneEntryStoresNothingAndHarmsNobody) {
  Harness h({}, Config(100));
  const PrefillRequest request = Harness::Prompt(3 * kW);
  h.Complete(request);
  const Collected got = h.Complete(request);
  EXPECT_EQ(UsageOf(got).cached, 0);
  EXPECT_EQ(h.engine().gauges().prefix.bytes, 0);
  EXPECT_GT(h.engine().gauges().prefix.not_stored, 0);
  ExpectSameAsCold(got, request);
}

TEST(PrefixReuse, ALongPrefixReachesASlowReaderInPieces) {
  engine::EngineConfig config = Config();
  Harness h({}, config);
  h.Complete(Harness::Prompt(6 * kW));
  engine::EngineLimits limits = config.limits;
  // One window's keys and values are 256 KiB.
  limits.max_buffered_bytes_per_call = 300 << 10;
  limits.max_buffered_bytes = 1 << 20;
  ASSERT_TRUE(h.engine().SetLimits(limits).ok());
  const PrefillRequest request = Harness::Prompt(6 * kW);
  const auto call = h.Submit(request);
  h.RunRounds();
  EXPECT_LT(h.engine().gauges().buffered_bytes, 700 << 10);
  Collected got;
  for (int i = 0; i < 100 && !got.status; ++i) {
    ReadAvailable(*call, got);
    h.RunRounds();
  }
  EXPECT_EQ(UsageOf(got).cached, 5 * kW);
  ExpectSameAsCold(got, request);
  // And one that takes nothing at all is ended.
  const auto stuck = h.Submit(request);
  h.RunRounds();
  h.clock.AdvanceSeconds(31);
  h.RunRounds();
  EXPECT_EQ(Describe(*stuck->status()), "RESOURCE_EXHAUSTED  SLOW_READER");
  h.ExpectNoLeak();
}

TEST(PrefixReuse, ACancelDuringTheReplayFreesEverything) {
  engine::EngineConfig config = Config();
  config.limits.max_buffered_bytes_per_call = 300 << 10;
  Harness h({}, config);
  {
    const auto call = h.Submit(Harness::Prompt(6 * kW));
    Collected got;
    for (int i = 0; i < 200 && !got.status; ++i) {
      h.RunRounds();
      ReadAvailable(*call, got);
    }
    ASSERT_TRUE(got.status && got.status->ok());
  }
  const auto call = h.Submit(Harness::Prompt(6 * kW));
  h.RunRounds();
  call->Cancel(false);
  h.RunRounds();
  EXPECT_EQ(call->status()->code(), absl::StatusCode::kCancelled);
  h.ExpectNoLeak();
}

TEST(PrefixReuse, ModelsWithoutFullAttentionKeepStatesAlone) {
  FakeRunnerOptions options;
  options.info.layers = {model::LayerKind::kLinear, model::LayerKind::kLinear};
  Harness h(options, Config());
  h.Complete(Harness::Prompt(4 * kW));
  const PrefillRequest request = Branch(3 * kW + 5, 4 * kW, 2);
  const Collected got = h.Complete(request);
  EXPECT_EQ(UsageOf(got).cached, 3 * kW);
  ExpectSameAsCold(got, request, options);
}

// A store behind the one in memory, as Redis is, whose answers a test chooses.
class FakeRemote final : public engine::PrefixStore {
 public:
  engine::PrefixEntries Load(const Query& query) override {
    ++loads;
    return load ? load(query) : query.have;
  }
  bool Put(std::span<const engine::PrefixKey> chain, engine::PrefixEntryPtr entry) override {
    stored.emplace_back(chain.back(), std::move(entry));
    return true;
  }
  void Remove(const engine::PrefixKey&) override {}
  engine::PrefixStoreStats stats() const override { return {}; }

  std::function<engine::PrefixEntries(const Query&)> load;
  std::vector<std::pair<engine::PrefixKey, engine::PrefixEntryPtr>> stored;
  int loads = 0;
};

engine::PrefixEntries Found(const FakeRemote& remote, const FakeRemote::Query& query) {
  engine::PrefixEntries entries = query.have;
  for (size_t i = entries.size(); i < query.keys.size(); ++i) {
    for (const auto& [key, entry] : remote.stored) {
      if (key == query.keys[i]) entries.push_back(entry);
    }
    if (entries.size() == i) break;
  }
  return entries;
}

TEST(PrefixRemote, WhatMemoryLacksComesFromBehindIt) {
  auto remote = std::make_shared<FakeRemote>();
  engine::EngineConfig config = Config();
  config.prefix_remote = remote;
  const PrefillRequest request = Harness::Prompt(4 * kW);
  {
    Harness writer({}, config);
    writer.Complete(request);
    EXPECT_EQ(remote->stored.size(), 3u);
    writer.Complete(request);
    EXPECT_EQ(remote->stored.size(), 3u) << "what memory had is not written again";
  }
  Harness reader({}, config);
  remote->load = [&](const FakeRemote::Query& q) { return Found(*remote, q); };
  const Collected got = reader.Complete(request);
  EXPECT_EQ(UsageOf(got).cached, 3 * kW);
  ExpectSameAsCold(got, request);
  const int loads = remote->loads;
  EXPECT_EQ(UsageOf(reader.Complete(request)).cached, 3 * kW);
  EXPECT_EQ(remote->loads, loads) << "memory has it now";
  const engine::PrefixCacheStats stats = reader.engine().gauges().prefix;
  EXPECT_EQ(stats.remote_hits, 1);
  EXPECT_EQ(stats.memory_hits, 1);
}

TEST(PrefixRemote, WhatMemoryCannotHoldIsNotUsed) {
  auto remote = std::make_shared<FakeRemote>();
  engine::EngineConfig config = Config();
  config.prefix_remote = remote;
  const PrefillRequest request = Harness::Prompt(4 * kW);
  Harness(FakeRunnerOptions(), config).Complete(request);
  remote->load = [&](const FakeRemote::Query& q) { return Found(*remote, q); };
  config.prefix_cache_bytes = 2 * remote->stored[0].second->bytes();
  Harness reader({}, config);
  const Collected got = reader.Complete(request);
  EXPECT_TRUE(got.status->ok());
  EXPECT_LE(reader.engine().gauges().prefix.bytes, config.prefix_cache_bytes);
  ExpectSameAsCold(got, request);
  reader.ExpectNoLeak();
}

// The engine's own thread: a remote store that takes its time delays a request by the configured
// wait and no more, and holds up nobody else.
TEST(PrefixRemote, ASlowOneDelaysItsRequestAlone) {
  auto remote = std::make_shared<FakeRemote>();
  std::atomic<bool> released{false};
  remote->load = [&](const FakeRemote::Query& query) {
    while (!released) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return query.have;
  };
  engine::EngineConfig config = Config();
  config.prefix_remote = remote;
  config.prefix_fetch_seconds = 0.2;
  CountingObserver observer;
  auto engine = *engine::Engine::Create(
      config, std::make_unique<FakeRunner>(FakeRunnerOptions(), std::make_shared<FakeRunnerLog>()),
      &observer, engine::Clock::Real());
  const auto wait = [&](engine::PrefillCall& call) {
    Collected got;
    for (int i = 0; i < 5000 && !got.status; ++i) {
      ReadAvailable(call, got);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return got;
  };
  const auto start = std::chrono::steady_clock::now();
  const auto slow = *engine->Submit(Harness::Prompt(2 * kW));
  const auto quick = *engine->Submit(Harness::Prompt(100));
  EXPECT_TRUE(wait(*quick).status->ok());
  const auto quick_after = std::chrono::steady_clock::now() - start;
  EXPECT_TRUE(wait(*slow).status->ok());
  const auto slow_after = std::chrono::steady_clock::now() - start;
  EXPECT_LT(quick_after, std::chrono::milliseconds(190));
  EXPECT_GE(slow_after, std::chrono::milliseconds(200));
  EXPECT_LT(slow_after, std::chrono::milliseconds(2000));
  // One that is cancelled while it waits leaves at once.
  const auto cancelled = *engine->Submit(Harness::Prompt(2 * kW, 2));
  cancelled->Cancel(false);
  EXPECT_EQ(wait(*cancelled).status->code(), absl::StatusCode::kCancelled);
  released = true;
}

// Many threads, few entries: loads, puts and evictions at once.
TEST(PrefixThreads, AnswersStayRightUnderEviction) {
  engine::EngineConfig config = Config();
  {
    Harness probe({}, Config());
    probe.Complete(Harness::Prompt(2 * kW));
    config.prefix_cache_bytes = 3 * probe.engine().gauges().prefix.bytes;
  }
  CountingObserver observer;
  auto engine = *engine::Engine::Create(
      config, std::make_unique<FakeRunner>(FakeRunnerOptions(), std::make_shared<FakeRunnerLog>()),
      &observer, engine::Clock::Real());
  std::vector<std::vector<std::string>> wanted;
  for (int seed = 0; seed < 4; ++seed) {
    Harness cold({}, Harness::DenseConfig());
    wanted.push_back(cold.Complete(Harness::Prompt(3 * kW + 3, seed)).tensors);
  }
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 12; ++i) {
        const int seed = (i * (t + 1)) % 4;
        const auto call = *engine->Submit(Harness::Prompt(3 * kW + 3, seed));
        if ((i + t) % 5 == 0) {
          call->Cancel(false);
          continue;
        }
        Collected got;
        while (!got.status) {
          ReadAvailable(*call, got);
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        right += got.status->ok() && got.tensors == wanted[static_cast<size_t>(seed)];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 29);
  const engine::PrefixCacheStats stats = engine->gauges().prefix;
  EXPECT_LE(stats.bytes, config.prefix_cache_bytes);
  EXPECT_EQ(stats.corrupt, 0);
}

}  // namespace
}  // namespace sparsegdn::testing
