#include "server/engine/scheduler.h"

#include <algorithm>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace sparsegdn::engine {
namespace {

using Order = std::vector<size_t>;

Runnable Long(uint64_t sequence, int64_t last_step) {
  return {.started = true,
          .last_step = last_step,
          .chunk_tokens = 2048,
          .remaining_tokens = 100000,
          .sequence = sequence};
}
Runnable Fresh(uint64_t sequence, int64_t last_step, int64_t tokens = 100) {
  return {.last_step = last_step,
          .chunk_tokens = tokens,
          .remaining_tokens = tokens,
          .sequence = sequence};
}
StepLimits Limits(int64_t tokens, int32_t seqs) {
  return {.max_tokens = tokens, .max_seqs = seqs, .max_buffered_bytes = 1 << 30};
}

TEST(AdmissionOrder, PriorityThenArrival) {
  const std::vector<Waiting> waiting = {{0, 0, 0}, {2, 0, 1}, {0, 0, 2}, {2, 0, 3}, {-1, 0, 4}};
  EXPECT_EQ(AdmissionOrder(waiting, 0), (Order{1, 3, 0, 2, 4}));
}

TEST(AdmissionOrder, TheTenantThatRunsLeastComesFirstWithinAPriority) {
  const std::vector<Waiting> waiting = {{0, 0, 0, 3}, {0, 0, 1, 3}, {0, 0, 2, 0}, {1, 0, 3, 9}};
  EXPECT_EQ(AdmissionOrder(waiting, 0), (Order{3, 2, 0, 1}));
}

TEST(AdmissionOrder, WaitingRaisesPriority) {
  const std::vector<Waiting> waiting = {{-8, 0, 0}, {8, 15 * kAgingWaitNs, 1}};
  EXPECT_EQ(AdmissionOrder(waiting, 15 * kAgingWaitNs), (Order{1, 0}));
  EXPECT_EQ(AdmissionOrder(waiting, 16 * kAgingWaitNs - 1), (Order{1, 0}));
  const std::vector<Waiting> later = {{-8, 0, 0}, {8, 16 * kAgingWaitNs, 1}};
  EXPECT_EQ(AdmissionOrder(later, 16 * kAgingWaitNs), (Order{0, 1}));
}

TEST(PackStep, ANewShortRequestIsInTheNextStepHoweverManyLongOnesRun) {
  std::vector<Runnable> running;
  for (uint64_t i = 0; i < 30; ++i) running.push_back(Long(i, static_cast<int64_t>(i)));
  running.push_back(Fresh(99, 29));
  EXPECT_EQ(PackStep(running, 30, Limits(2048, 4)), (Order{30}));
}

TEST(PackStep, RoundRobinAmongEquals) {
  std::vector<Runnable> running = {Long(0, 5), Long(1, 3), Long(2, 4)};
  EXPECT_EQ(PackStep(running, 6, Limits(2048, 4)), (Order{1}));
  EXPECT_EQ(PackStep(running, 6, Limits(4096, 4)), (Order{1, 2}));
}

TEST(PackStep, ShortestFirstAmongNewOnes) {
  const std::vector<Runnable> running = {Fresh(0, 0, 2048), Fresh(1, 0, 30), Fresh(2, 0, 10)};
  EXPECT_EQ(PackStep(running, 1, Limits(2048, 4)), (Order{2, 1}));
}

TEST(PackStep, ASkippedChunkLetsSmallerOnesFillTheStep) {
  const std::vector<Runnable> running = {
      Long(0, 1),
      Long(1, 2),
      {.started = true, .last_step = 3, .chunk_tokens = 50, .remaining_tokens = 50}};
  EXPECT_EQ(PackStep(running, 4, Limits(3000, 4)), (Order{0, 2}));
}

TEST(PackStep, PriorityFirstButAgingEndsStarvation) {
  std::vector<Runnable> running = {Long(0, 0), Long(1, 0)};
  running[0].priority = 8;
  running[1].priority = -8;
  int64_t first_turn = -1;
  for (int64_t step = 1; step < 1000 && first_turn < 0; ++step) {
    const Order chosen = PackStep(running, step, Limits(2048, 4));
    ASSERT_EQ(chosen.size(), 1u);
    running[chosen[0]].last_step = step;
    if (chosen[0] == 1) first_turn = step;
  }
  EXPECT_EQ(first_turn, 16 * AgingSteps(2))
      << "one level for each span; 16 levels up they are equal";
}

TEST(PackStep, AStreamOfNewRequestsLeavesEverySecondStepToALongOne) {
  Runnable old = Long(0, 0);
  int64_t turns = 0;
  StepLimits limits = Limits(2048, 4);
  for (int64_t step = 1; step <= 100; ++step) {
    const std::vector<Runnable> running = {old, Fresh(static_cast<uint64_t>(step), step - 1, 2048)};
    const Order chosen = PackStep(running, step, limits);
    limits.started_first = NewOnesTookTheStep(running, chosen);
    if (chosen[0] == 0) {
      old.last_step = step;
      ++turns;
    }
  }
  EXPECT_EQ(turns, 50);
}

TEST(PackStep, BufferedBytesBoundTheStepButNeverAllOfIt) {
  std::vector<Runnable> running = {Long(0, 0), Long(1, 0)};
  running[0].emitted_bytes = running[1].emitted_bytes = 60;
  StepLimits limits = Limits(8192, 4);
  limits.max_buffered_bytes = 100;
  EXPECT_EQ(PackStep(running, 1, limits), (Order{0}));
  limits.buffered_bytes = 50;
  EXPECT_EQ(PackStep(running, 1, limits), (Order{}));
  limits.buffered_bytes = 0;
  running[0].emitted_bytes = 1000;  // larger than the bound, alone
  EXPECT_EQ(PackStep(running, 1, limits), (Order{0}));
}

// Small chunks whose frames are read two steps later keep 60 of 100 bytes occupied at any time.
TEST(PackStep, ALargeChunkIsNotPassedOverForEverByFramesOfSmallOnes) {
  std::vector<Runnable> running = {Long(0, 0), Long(1, 0), Long(2, 0)};
  running[0].emitted_bytes = 80;
  running[1].emitted_bytes = running[2].emitted_bytes = 30;
  StepLimits limits = Limits(2048, 1);
  limits.max_buffered_bytes = 100;
  int64_t unread[2] = {30, 30}, turn = -1, passed = 0;
  for (int64_t step = 1; step < 1000 && turn < 0; ++step) {
    limits.buffered_bytes = unread[0] + unread[1];
    const Order chosen = PackStep(running, step, limits);
    unread[step % 2] = 0;
    for (const size_t i : chosen) {
      running[i].last_step = step;
      unread[step % 2] = running[i].emitted_bytes;
      (i == 0 ? turn : passed) = i == 0 ? step : passed + 1;
    }
  }
  EXPECT_EQ(passed, AgingSteps(3)) << "small ones pass it for one span, not at once never";
  EXPECT_GT(turn, 0) << "the large one never ran";
}

TEST(PackStep, NeverBeyondItsLimitsAndNeverEmpty) {
  std::mt19937 rng(3);
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<Runnable> running(1 + rng() % 12);
    for (size_t i = 0; i < running.size(); ++i) {
      running[i] = {.priority = static_cast<int32_t>(rng() % 17) - 8,
                    .started = rng() % 2 == 0,
                    .last_step = static_cast<int64_t>(rng() % 50),
                    .chunk_tokens = 1 + static_cast<int64_t>(rng() % 2048),
                    .remaining_tokens = static_cast<int64_t>(rng() % 100000),
                    .sequence = i};
    }
    const StepLimits limits =
        Limits(2048 + static_cast<int64_t>(rng() % 4096), 1 + static_cast<int32_t>(rng() % 5));
    Order chosen = PackStep(running, 50, limits);
    ASSERT_FALSE(chosen.empty());
    int64_t tokens = 0;
    for (const size_t i : chosen) tokens += running[i].chunk_tokens;
    EXPECT_LE(tokens, limits.max_tokens);
    EXPECT_LE(std::ssize(chosen), limits.max_seqs);
    std::sort(chosen.begin(), chosen.end());
    EXPECT_EQ(std::adjacent_find(chosen.begin(), chosen.end()), chosen.end());
  }
}

}  // namespace
}  // namespace sparsegdn::engine
