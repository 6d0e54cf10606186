#include "server/engine/topk.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace sparsegdn::engine {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(Greedy, NeverANaN) {
  EXPECT_EQ(Greedy(std::vector<float>{kNan, 1.0f, 2.0f, kNan}), 2);
  EXPECT_EQ(Greedy(std::vector<float>{kNan, -kInf}), 1);
  EXPECT_EQ(Greedy(std::vector<float>{kNan, kNan}), std::nullopt);
  EXPECT_EQ(Greedy({}), std::nullopt);
}

TEST(Greedy, TheLowestAmongEquals) {
  EXPECT_EQ(Greedy(std::vector<float>{1.0f, 3.0f, 3.0f, 2.0f}), 1);
  EXPECT_EQ(Greedy(std::vector<float>{-0.0f, 0.0f}), 0);
}

TEST(TopK, EqualsAFullSort) {
  std::mt19937 rng(7);
  for (int trial = 0; trial < 200; ++trial) {
    const size_t n = 1 + rng() % 300;
    const size_t k = 1 + rng() % n;
    std::vector<float> logits(n);
    // Few distinct values, so that ties are common.
    for (float& x : logits) x = static_cast<float>(static_cast<int>(rng() % 20)) - 10.0f;
    std::vector<int32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    std::vector<int32_t> ids(k, -1);
    std::vector<float> values(k, kNan);
    TopK(logits, ids, values);
    for (size_t i = 0; i < k; ++i) {
      EXPECT_EQ(ids[i], order[i]);
      EXPECT_EQ(values[i], logits[order[i]]);
    }
  }
}

TEST(TopK, NaNComesLast) {
  std::vector<int32_t> ids(3, -1);
  std::vector<float> values(3, kNan);
  TopK(std::vector<float>{kNan, 1.0f, kNan, 2.0f}, ids, values);
  EXPECT_EQ(ids, (std::vector<int32_t>{3, 1, 0}));
  EXPECT_EQ(values[2], -kInf);
}

}  // namespace
}  // namespace sparsegdn::engine
