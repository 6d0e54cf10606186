// Goal: blocks of a sequence follow one another whenever a run is long enough, none is handed out
// twice or lost over any order of takes and returns, and the shortest fitting run is taken.
#include "server/model/block_runs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

namespace sparsegdn::model {
namespace {

std::vector<int32_t> Range(int32_t first, int32_t count) {
  std::vector<int32_t> out(static_cast<size_t>(count));
  std::iota(out.begin(), out.end(), first);
  return out;
}

TEST(BlockRuns, NoBlocksAreNoRuns) {
  BlockRuns none;
  EXPECT_EQ(none.free(), 0);
  EXPECT_TRUE(none.Take(0).empty());
  EXPECT_TRUE(AreConsecutive({}));
}

TEST(BlockRuns, TheShortestRunThatFitsIsTaken) {
  BlockRuns runs(20);
  const auto a = runs.Take(6), b = runs.Take(3), c = runs.Take(4), d = runs.Take(7);
  EXPECT_EQ(a, Range(0, 6));
  EXPECT_EQ(d, Range(13, 7));
  runs.Return(a);
  runs.Return(c);  // runs of 6 and 4
  EXPECT_EQ(runs.Take(4), Range(9, 4));
  EXPECT_EQ(runs.Take(5), Range(0, 5));
  EXPECT_EQ(runs.free(), 1);
}

TEST(BlockRuns, NeighboursJoinInEveryOrder) {
  std::vector<int> order{0, 1, 2, 3};
  do {
    BlockRuns runs(12);
    std::vector<std::vector<int32_t>> parts;
    for (int i = 0; i < 4; ++i) parts.push_back(runs.Take(3));
    for (const int i : order) runs.Return(parts[static_cast<size_t>(i)]);
    EXPECT_EQ(runs.Take(12), Range(0, 12));
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(BlockRuns, FragmentsServeWhatNoRunCan) {
  BlockRuns runs(10);
  const auto a = runs.Take(2), b = runs.Take(3), c = runs.Take(2), d = runs.Take(3);
  runs.Return(a);
  runs.Return(d);
  const auto split = runs.Take(4);
  EXPECT_FALSE(AreConsecutive(split));
  EXPECT_EQ(split, (std::vector<int32_t>{7, 8, 9, 0}));
  runs.Return(split);
  runs.Return(b);
  runs.Return(c);
  EXPECT_EQ(runs.Take(10), Range(0, 10));
}

TEST(BlockRuns, NothingIsLostOrHandedOutTwice) {
  std::mt19937 random(5);
  constexpr int32_t kBlocks = 97;
  BlockRuns runs(kBlocks);
  std::vector<std::vector<int32_t>> held;
  std::set<int32_t> used;
  for (int step = 0; step < 5000; ++step) {
    if (!held.empty() && random() % 2 == 0) {
      std::swap(held[random() % held.size()], held.back());
      for (const int32_t block : held.back()) used.erase(block);
      runs.Return(held.back());
      held.pop_back();
    } else {
      const auto want = static_cast<int64_t>(random() % 20);
      if (want > runs.free()) continue;
      held.push_back(runs.Take(want));
      ASSERT_EQ(std::ssize(held.back()), want);
      for (const int32_t block : held.back()) {
        ASSERT_GE(block, 0);
        ASSERT_LT(block, kBlocks);
        ASSERT_TRUE(used.insert(block).second) << block;
      }
    }
    ASSERT_EQ(runs.free(), kBlocks - std::ssize(used));
  }
}

}  // namespace
}  // namespace sparsegdn::model
