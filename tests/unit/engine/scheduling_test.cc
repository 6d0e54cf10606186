// Scheduling seen from outside: which chunks the runner got, in which steps.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "server/engine/scheduler.h"
#include "tests/unit/engine/engine_test_util.h"

namespace sparsegdn::testing {
namespace {

using engine::PrefillRequest;
using Record = FakeRunnerLog::ChunkRecord;
using Cuts = std::vector<std::pair<int64_t, int64_t>>;  // first position, tokens

// Prompts of distinct lengths, so that a chunk's prompt_tokens says whose it is.
std::map<int64_t, Cuts> CutsByPrompt(const std::vector<Record>& chunks) {
  std::map<int64_t, Cuts> cuts;
  for (const Record& c : chunks) cuts[c.prompt_tokens].emplace_back(c.first_position, c.tokens);
  return cuts;
}

TEST(ChunkSchedule, AbsoluteMultiplesThatDependOnTheRequestAlone) {
  std::mt19937 rng(11);
  for (const int64_t windows : {1, 2}) {
    engine::EngineConfig config = Harness::DenseConfig();
    config.chunk_windows = windows;
    std::map<int64_t, Cuts> alone;
    std::vector<PrefillRequest> requests;
    for (int i = 0; i < 8; ++i) {
      requests.push_back(Harness::Prompt(1 + static_cast<int64_t>(rng() % 3000) * 8 + i, i));
      Harness h({}, config);
      ASSERT_TRUE(h.Complete(requests.back()).status->ok());
      const std::map<int64_t, Cuts> cuts = CutsByPrompt(h.log->chunks());
      alone.insert(cuts.begin(), cuts.end());
    }
    for (const auto& [prompt, cuts] : alone) {
      for (const auto& [first, tokens] : cuts) {
        EXPECT_EQ(first % (windows * kWindow), 0);
        EXPECT_LE(tokens, windows * kWindow);
        EXPECT_TRUE(tokens == windows * kWindow || first + tokens == prompt - 1);
      }
    }
    Harness together({}, config);
    std::vector<std::shared_ptr<engine::PrefillCall>> calls;
    for (PrefillRequest& request : requests) {
      request.priority = static_cast<int32_t>(rng() % 17) - 8;
      calls.push_back(together.Submit(request));
      together.RunRounds(static_cast<int>(rng() % 3));
      for (const auto& call : calls) {
        while (call->TryPop()) {
        }
      }
    }
    while (together.engine().RunOneRound()) {
      for (const auto& call : calls) {
        while (call->TryPop()) {
        }
      }
    }
    EXPECT_EQ(CutsByPrompt(together.log->chunks()), alone);
  }
}

TEST(ChunkSchedule, AResumedCallReturnsToTheAbsoluteBoundaries) {
  Harness h;
  PrefillRequest a = Harness::Prompt(1000);
  a.keep_snapshot = true;
  const std::string id = h.Complete(a).result->snapshot_id;
  PrefillRequest b = Harness::Prompt(5000);
  b.resume_from = id;
  ASSERT_TRUE(h.Complete(b).status->ok());
  EXPECT_EQ(CutsByPrompt(h.log->chunks())[5999], (Cuts{{999, 1049}, {2048, 2048}, {4096, 1902}}));
}

TEST(Packing, ShortRequestsShareAStep) {
  FakeRunnerOptions options;
  options.limits.state_slots = 8;
  options.limits.max_batch_seqs = 8;
  Harness h(options);
  std::vector<std::shared_ptr<engine::PrefillCall>> calls;
  for (int i = 0; i < 8; ++i) calls.push_back(h.Submit(Harness::Prompt(500 + i, i)));
  h.RunRounds();
  EXPECT_EQ(h.log->counts().steps, 1) << "4,020 tokens fit one step of 4,096";
  for (const auto& call : calls) {
    Collected got;
    ReadAvailable(*call, got);
    EXPECT_TRUE(got.status->ok());
  }
  h.ExpectNoLeak();
}

// Reads a call; submits `request` in its place once it has ended well.
void Replace(Harness& h, std::shared_ptr<engine::PrefillCall>& call,
             const PrefillRequest& request) {
  while (call->TryPop()) {
  }
  if (!call->status()) return;
  EXPECT_TRUE(call->status()->ok());
  call = h.Submit(request);
}

TEST(Packing, CallersOfShortPromptsFillTheSteps) {
  FakeRunnerOptions options;
  options.limits.state_slots = options.limits.max_batch_seqs = 64;
  options.limits.max_batch_tokens = 8192;
  options.limits.kv_tokens = 1 << 20;
  Harness h(options);
  std::vector<std::shared_ptr<engine::PrefillCall>> calls;
  for (int i = 0; i < 64; ++i) calls.push_back(h.Submit(Harness::Prompt(256, i)));
  for (int round = 0; round < 20; ++round) {
    h.RunRounds(1);
    for (auto& call : calls) Replace(h, call, Harness::Prompt(256, round));
  }
  EXPECT_EQ(h.log->counts().steps, 20);
  EXPECT_EQ(h.log->counts().tokens, 20 * 32 * 255) << "32 prompts of 255 tokens fill 8,192";
}

TEST(Fairness, ALongPromptRunsInEveryStepBesideACallerOfShortOnes) {
  FakeRunnerOptions options;
  options.limits.kv_tokens = 1 << 20;
  Harness h(options);
  const auto alone = h.Submit(Harness::Prompt(60000));
  auto other = h.Submit(Harness::Prompt(256));
  for (int64_t round = 1; !alone->status(); ++round) {
    h.RunRounds(1);
    while (alone->TryPop()) {
    }
    Replace(h, other, Harness::Prompt(256, static_cast<int32_t>(round)));
    ASSERT_LE(round, 31);
  }
  EXPECT_EQ(h.log->counts().steps, 30) << "as many as alone";
  // The steps are longer by the short prompts' tokens alone: 13 %.
  EXPECT_LE(h.log->counts().tokens, 60000 + 30 * 255);
}

TEST(Fairness, AShortPromptWaitsForAtMostOneStepOfLongOnes) {
  FakeRunnerOptions options;
  options.limits.state_slots = 8;
  options.limits.max_batch_tokens = 2048;  // one long chunk fills a step
  options.limits.kv_tokens = 1 << 20;
  Harness h(options);
  std::vector<std::shared_ptr<engine::PrefillCall>> longs;
  const auto read = [&] {
    for (const auto& call : longs) {
      while (call->TryPop()) {
      }
    }
  };
  for (int i = 0; i < 9; ++i) longs.push_back(h.Submit(Harness::Prompt(60000 + i, i)));
  for (int i = 0; i < 40; ++i) {
    h.RunRounds(1);
    read();
  }
  for (int i = 0; i < 20; ++i) {
    const int64_t before = h.log->counts().steps;
    const auto call = h.Submit(Harness::Prompt(101));
    Collected got;
    while (!got.status) {
      h.RunRounds(1);
      read();
      ReadAvailable(*call, got);
    }
    EXPECT_TRUE(got.status->ok());
    // Its own step, after at most one of a long prompt; every second step is theirs.
    EXPECT_LE(h.log->counts().steps, before + 2);
  }
  EXPECT_EQ(h.log->counts().steps, 40 + 2 * 20 - 1);
}

TEST(Fairness, TheLastSlotIsForShortPrompts) {
  Harness h;  // four slots
  std::vector<std::shared_ptr<engine::PrefillCall>> longs;
  for (int i = 0; i < 4; ++i) longs.push_back(h.Submit(Harness::Prompt(10000 + i, i)));
  h.RunRounds(1);
  EXPECT_EQ(h.engine().gauges().running_requests, 3);
  EXPECT_EQ(h.engine().gauges().free_slots, 1);
  EXPECT_TRUE(h.Complete(Harness::Prompt(100)).status->ok());
  h.RunRounds();
  EXPECT_EQ(h.observer.computed, 5);
}

TEST(Fairness, ALongPromptIsNotKeptFromTheLastSlotForEver) {
  engine::EngineConfig config = Harness::DenseConfig();
  config.limits.max_buffered_bytes_per_call = 100'000;  // unread, a long one stops in its slot
  Harness h({}, config);
  std::vector<std::shared_ptr<engine::PrefillCall>> stopped;
  for (int i = 0; i < 3; ++i) stopped.push_back(h.Submit(Harness::Prompt(10000 + i, i)));
  h.RunRounds();
  const auto last = h.Submit(Harness::Prompt(10003));
  Collected got;
  int shorts = 0;
  for (; shorts < 200 && !got.status; ++shorts) {
    const auto call = h.Submit(Harness::Prompt(100, shorts));
    for (Collected one; !one.status;) {
      ASSERT_TRUE(h.engine().RunOneRound());
      ReadAvailable(*call, one);
      ReadAvailable(*last, got);
    }
  }
  ASSERT_TRUE(got.status && got.status->ok());
  EXPECT_EQ(shorts, engine::kMaxBypass + 1);
}

TEST(Admission, TheQueueWaitEndsWithTheFirstStepNotWithTheSlot) {
  FakeRunnerOptions options;
  options.limits.max_batch_seqs = 1;
  Harness* harness = nullptr;
  options.on_step = [&](auto) { harness->clock.AdvanceSeconds(1); };
  Harness h(options);
  harness = &h;
  const auto first = h.Submit(Harness::Prompt(100));
  const auto second = h.Submit(Harness::Prompt(200));
  h.RunRounds(1);
  EXPECT_EQ(h.engine().gauges().running_requests, 1) << "both were admitted, one has ended";
  EXPECT_EQ(h.observer.queue_waits, 1);
  EXPECT_EQ(h.observer.last_queue_wait, 0);
  h.RunRounds(1);
  EXPECT_EQ(h.observer.queue_waits, 2);
  EXPECT_EQ(h.observer.last_queue_wait, 1);
  EXPECT_TRUE(h.Complete(Harness::Prompt(1)).status->ok());
  EXPECT_EQ(h.observer.queue_waits, 3) << "with nothing to run as well";
}

TEST(Admission, PriorityThenArrival) {
  FakeRunnerOptions options;
  options.limits.state_slots = 1;
  Harness h(options);
  std::vector<std::shared_ptr<engine::PrefillCall>> calls;
  for (const auto& [tokens, priority] :
       {std::pair<int64_t, int32_t>{101, 0}, {102, -1}, {103, 5}, {104, 0}, {105, 5}}) {
    PrefillRequest request = Harness::Prompt(tokens);
    request.priority = priority;
    calls.push_back(h.Submit(request));
  }
  h.RunRounds();
  std::vector<int64_t> order;
  for (const Record& c : h.log->chunks()) order.push_back(c.prompt_tokens);
  EXPECT_EQ(order, (std::vector<int64_t>{103, 105, 101, 104, 102}));
}

TEST(Admission, SmallOnesPassOneThatLacksKvButNotForEver) {
  FakeRunnerOptions options;
  options.limits.kv_tokens = 8192;    // three small ones, or the large one alone
  options.limits.max_batch_seqs = 1;  // one ends at a time, so room for the large one never comes
  options.limits.state_slots = 8;
  Harness h(options);
  std::vector<std::shared_ptr<engine::PrefillCall>> calls;
  calls.push_back(h.Submit(Harness::Prompt(4000)));
  h.RunRounds(1);
  calls.push_back(h.Submit(Harness::Prompt(6200)));
  for (int i = 0; i < 100; ++i) calls.push_back(h.Submit(Harness::Prompt(2100 + i, i)));
  while (h.engine().RunOneRound()) {
    for (const auto& call : calls) {
      while (call->TryPop()) {
      }
    }
  }
  EXPECT_EQ(h.observer.computed, 102);
  std::set<int64_t> before;
  for (const Record& c : h.log->chunks()) {
    if (c.prompt_tokens == 6200) break;
    before.insert(c.prompt_tokens);
  }
  EXPECT_EQ(std::ssize(before), 1 + engine::kMaxBypass);
}

TEST(Admission, KvIsAcquiredForWhatRunsAndReturned) {
  Harness h;
  const auto call = h.Submit(Harness::Prompt(5000));
  h.RunRounds(1);
  EXPECT_EQ(h.engine().gauges().free_kv_tokens, 65536 - 5056);  // 4,999 in blocks of 64
  Collected got;
  while (!got.status) {
    h.RunRounds(1);
    ReadAvailable(*call, got);
  }
  h.ExpectNoLeak();
}

}  // namespace
}  // namespace sparsegdn::testing
