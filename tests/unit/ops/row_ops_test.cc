// Goal: the row-wise operations equal their equations in fp64, for widths around the vector length.
// Tolerance: a handful of roundings of 2^-24 and exp within a few ulp: 2e-6 relative.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>

#include "kernels/cpu/ops/ops_kernels.h"
#include "sparsegdn/cpu_ops.h"
#include "tests/unit/ops/ops_testing.h"

namespace sparsegdn::ops_testing {
namespace {

constexpr double kRelative = 2e-6, kAbsolute = 1e-7;
constexpr int64_t kWidths[] = {1, 2, 15, 16, 17, 64, 100, 128};

double InverseRms(const Matrix& x, int64_t row, int64_t first, int64_t n, double eps) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += double{x.at(row, first + i)} * x.at(row, first + i);
  return 1.0 / std::sqrt(sum / static_cast<double>(n) + eps);
}

// Where a run is held to a target (tests/unit/target_main.cc), its rows must have run there.
TEST(RowOpsTest, RunOnTheTargetAskedFor) {
  if (const char* target = std::getenv("SPARSEGDN_TEST_TARGET"); target != nullptr) {
    EXPECT_STREQ(cpu_ops::TargetName(), target);
  }
}

TEST(RowOpsTest, RmsNormIsZeroCentred) {
  CpuOps ops(2);
  for (const int64_t width : kWidths) {
    Random random(static_cast<uint32_t>(width));
    Matrix x(37, width), y(37, width);
    random.Fill(x, 3.0f);
    const std::vector<float> weight = random.Vector(width, 0.2f);
    ops.RmsNorm({37, width, x, weight.data(), 1e-6f, y});
    EXPECT_TRUE(y.GuardsIntact());
    for (int64_t r = 0; r < 37; ++r) {
      const double scale = InverseRms(x, r, 0, width, 1e-6);
      for (int64_t c = 0; c < width; ++c) {
        ExpectNear(y.at(r, c), x.at(r, c) * scale * (1.0 + weight[static_cast<size_t>(c)]),
                   kRelative, kAbsolute, "rmsnorm");
      }
    }
  }
}

TEST(RowOpsTest, RmsNormOfZerosIsZero) {
  CpuOps ops(1);
  Matrix x(1, 20), y(1, 20);
  for (int64_t c = 0; c < 20; ++c) x.at(0, c) = 0.0f;
  const std::vector<float> weight(20, 0.5f);
  ops.RmsNorm({1, 20, x, weight.data(), 1e-6f, y});
  for (int64_t c = 0; c < 20; ++c) EXPECT_EQ(y.at(0, c), 0.0f);
}

TEST(RowOpsTest, GatedNormUsesThePlainWeightAndWorksInPlace) {
  CpuOps ops(2);
  for (const int64_t dim : kWidths) {
    Random random(static_cast<uint32_t>(dim));
    const int32_t heads = 3;
    Matrix o(9, heads * dim), z(9, heads * dim), y(9, heads * dim);
    random.Fill(o);
    random.Fill(z, 4.0f);
    const std::vector<float> weight = random.Vector(dim);
    const int32_t narrow = static_cast<int32_t>(dim);
    ops.GatedNorm({9, heads, narrow, o, z, weight.data(), 1e-6f, y});
    EXPECT_TRUE(y.GuardsIntact());
    for (int64_t r = 0; r < 9; ++r) {
      for (int64_t c = 0; c < heads * dim; ++c) {
        const double scale = InverseRms(o, r, c / dim * dim, dim, 1e-6);
        const double wanted =
            weight[static_cast<size_t>(c % dim)] * o.at(r, c) * scale * Silu(z.at(r, c));
        ExpectNear(y.at(r, c), wanted, kRelative, kAbsolute, "gated norm");
      }
    }
    ops.GatedNorm({9, heads, narrow, o, z, weight.data(), 1e-6f, o});
    for (int64_t c = 0; c < heads * dim; ++c) EXPECT_TRUE(SameBits(o.at(4, c), y.at(4, c)));
  }
}

TEST(RowOpsTest, SwiGluIncludingExtremes) {
  CpuOps ops(1);
  for (const int64_t width : kWidths) {
    Random random(static_cast<uint32_t>(width));
    Matrix x(2, 2 * width), y(2, width);
    random.Fill(x, 5.0f);
    x.at(0, 0) = -200.0f;  // exp(200) overflows FP32
    x.at(1, 0) = 200.0f;
    ops.SwiGlu({2, width, x, y});
    EXPECT_TRUE(y.GuardsIntact());
    for (int64_t r = 0; r < 2; ++r) {
      for (int64_t c = 0; c < width; ++c) {
        ExpectNear(y.at(r, c), Silu(x.at(r, c)) * x.at(r, width + c), kRelative, kAbsolute,
                   "swiglu");
      }
    }
  }
}

TEST(RowOpsTest, NanPassesThroughActivations) {
  CpuOps ops(1);
  for (const int64_t at : {0, 17, 19}) {  // in a whole vector and in the rest
    Matrix x(1, 40), y(1, 20);
    for (int64_t c = 0; c < 40; ++c) x.at(0, c) = 1.0f;
    x.at(0, at) = std::numeric_limits<float>::quiet_NaN();
    ops.SwiGlu({1, 20, x, y});
    for (int64_t c = 0; c < 20; ++c) EXPECT_EQ(std::isnan(y.at(0, c)), c == at);
  }
}

TEST(RowOpsTest, LogProbOfLargeAndShiftedLogits) {
  CpuOps ops(2);
  const int64_t vocab = 10'007;
  Random random(5);
  std::vector<float> logits = random.Vector(4 * vocab, 3.0f);
  for (int64_t i = 0; i < vocab; ++i) {
    logits[static_cast<size_t>(vocab + i)] += 500.0f;  // exp would overflow
    logits[static_cast<size_t>(2 * vocab + i)] = -1000.0f;
  }
  logits[static_cast<size_t>(3 * vocab + 9'999)] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<int32_t> targets = {0, 10'006, 77, 5};
  std::vector<float> out(4, 0.0f);
  ops.LogProb({4, vocab, logits.data(), targets.data(), out.data()});
  for (int64_t r = 0; r < 3; ++r) {
    const float* row = logits.data() + r * vocab;
    double max = row[0], sum = 0.0;
    for (int64_t i = 0; i < vocab; ++i) max = std::max<double>(max, row[i]);
    for (int64_t i = 0; i < vocab; ++i) sum += std::exp(row[i] - max);
    // The sum of 10,007 terms in FP32 stretches of 4,096: 1e-6 in its logarithm at most.
    ExpectNear(out[static_cast<size_t>(r)],
               row[targets[static_cast<size_t>(r)]] - max - std::log(sum), 1e-6, 1e-6, "log p");
  }
  EXPECT_TRUE(std::isnan(out[3]));
}

TEST(RowOpsTest, CheckFiniteFlagsTheRightSequence) {
  CpuOps ops(2);
  Pack pack;
  for (const int32_t length : {3, 5, 1, 4}) pack.Add(length, 0, 0);
  Matrix x(13, 37);
  Random random(6);
  random.Fill(x);
  std::array<int32_t, 4> flags = {0, 0, 0, 0};
  ops.CheckFinite(pack.args(), 37, x, flags.data());
  EXPECT_EQ(flags, (std::array<int32_t, 4>{0, 0, 0, 0}));
  x.at(7, 36) = std::numeric_limits<float>::infinity();
  x.at(12, 0) = std::numeric_limits<float>::quiet_NaN();
  ops.CheckFinite(pack.args(), 37, x, flags.data());
  EXPECT_EQ(flags, (std::array<int32_t, 4>{0, 1, 0, 1}));
}

TEST(RowOpsTest, GatherRowsCopies) {
  CpuOps ops(1);
  Matrix x(6, 9), y(3, 9);
  Random random(7);
  random.Fill(x);
  const std::vector<int32_t> index = {5, 0, 5};
  ops.GatherRows(3, 9, index.data(), x, y);
  EXPECT_TRUE(y.GuardsIntact());
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t c = 0; c < 9; ++c) {
      EXPECT_EQ(y.at(r, c), x.at(index[static_cast<size_t>(r)], c));
    }
  }
}

TEST(RowOpsTest, EmptyInputsDoNothing) {
  CpuOps ops(2);
  Matrix y(1, 4);
  PackedMatrix weight(DType::kF32, 4, 4);
  ops.Gemm(0, y, weight, {}, y);
  ops.RmsNorm({0, 4, y, nullptr, 1e-6f, y});
  ops.SwiGlu({0, 4, y, y});
  ops.CheckFinite({}, 4, y, nullptr);
  EXPECT_TRUE(std::isnan(y.at(0, 0)));
}

}  // namespace
}  // namespace sparsegdn::ops_testing
