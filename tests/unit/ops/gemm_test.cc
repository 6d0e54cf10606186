// Goal: y = x W^T (+ residual) for every edge of the tiling, and the same bits for a row whatever
// it is batched with. Reference: fp64 on the same (rounded) weights.
#include <gtest/gtest.h>

#include "sparsegdn/cpu_ops.h"
#include "tests/unit/ops/ops_testing.h"

namespace sparsegdn::ops_testing {
namespace {

uint16_t ToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// A weight's elements as they lie in a file, and what they stand for.
struct Source {
  Source(Random& random, DType type, int64_t out, int64_t in) : dtype(type) {
    values = random.Vector(out * in, 1.0f / std::sqrt(static_cast<float>(in)));
    const size_t width = type == DType::kF32 ? 4 : 2;
    bytes.resize(values.size() * width + 1);  // one byte in: no alignment at all
    for (size_t i = 0; i < values.size(); ++i) {
      uint8_t* to = bytes.data() + 1 + i * width;
      if (type == DType::kF32) {
        std::memcpy(to, &values[i], 4);
        continue;
      }
      // Multiples of 1/64 below 4 are exact in FP16: sign, exponent and mantissa by hand.
      uint16_t bits = ToBf16(values[i]);
      if (type == DType::kF16) {
        const float magnitude = std::ldexp(1.0f, static_cast<int>(i % 3));
        values[i] = i % 2 == 0 ? magnitude : -magnitude;
        bits = static_cast<uint16_t>((i % 2 << 15) | ((15 + i % 3) << 10));
      } else {
        values[i] = std::bit_cast<float>(uint32_t{bits} << 16);
      }
      std::memcpy(to, &bits, 2);
    }
  }
  const uint8_t* data() const { return bytes.data() + 1; }

  DType dtype;
  std::vector<float> values;
  std::vector<uint8_t> bytes;
};

struct Case {
  const char* name;
  int64_t rows, out, in;
  DType dtype;
};

class GemmTest : public ::testing::TestWithParam<Case> {};

TEST_P(GemmTest, MatchesFp64AndKeepsOffTheRest) {
  const Case& c = GetParam();
  Random random(1);
  const Source source(random, c.dtype, c.out, c.in);
  CpuOps ops(2);
  PackedMatrix weight(c.dtype, c.out, c.in);
  ops.Pack(weight, 0, c.out, source.data(), c.dtype);
  Matrix x(c.rows, c.in), residual(c.rows, c.out), y(c.rows, c.out), sum(c.rows, c.out);
  random.Fill(x);
  random.Fill(residual);
  ops.Gemm(c.rows, x, weight, {}, y);
  ops.Gemm(c.rows, x, weight, residual, sum);
  EXPECT_TRUE(y.GuardsIntact() && sum.GuardsIntact() && x.GuardsIntact());
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t n = 0; n < c.out; ++n) {
      double wanted = 0.0, magnitude = 0.0;
      for (int64_t k = 0; k < c.in; ++k) {
        const double term = double{x.at(r, k)} * source.values[static_cast<size_t>(n * c.in + k)];
        wanted += term;
        magnitude += std::abs(term);
      }
      // One rounding of 2^-24 per term, each at most the sum of magnitudes.
      const double bound = 0x1p-24 * static_cast<double>(c.in) * magnitude + 1e-30;
      ASSERT_LE(std::abs(y.at(r, n) - wanted), bound) << r << ", " << n;
      ASSERT_TRUE(SameBits(sum.at(r, n), residual.at(r, n) + y.at(r, n))) << r << ", " << n;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, GemmTest,
                         ::testing::Values(Case{"one_by_one", 1, 1, 1, DType::kF32},
                                           Case{"single_row", 1, 100, 300, DType::kBF16},
                                           Case{"below_micro_tile", 11, 33, 31, DType::kF32},
                                           Case{"micro_tile", 12, 32, 256, DType::kBF16},
                                           Case{"above_micro_tile", 13, 31, 257, DType::kBF16},
                                           Case{"row_tile", 96, 64, 64, DType::kF32},
                                           Case{"above_row_tile", 97, 65, 513, DType::kBF16},
                                           Case{"several_row_tiles", 200, 40, 20, DType::kF32},
                                           Case{"fp16_weights", 5, 70, 90, DType::kF16}),
                         [](const auto& info) { return info.param.name; });

TEST(GemmInvarianceTest, RowsDoNotDependOnTheBatchOrOnThreads) {
  Random random(2);
  const int64_t rows = 203, out = 150, in = 700;
  const Source source(random, DType::kBF16, out, in);
  CpuOps one(1), two(2);
  PackedMatrix weight(DType::kBF16, out, in);
  one.Pack(weight, 0, out, source.data(), DType::kBF16);
  Matrix x(rows, in), whole(rows, out), again(rows, out);
  random.Fill(x);
  two.Gemm(rows, x, weight, {}, whole);
  one.Gemm(rows, x, weight, {}, again);
  for (int64_t r = 0; r < rows; ++r) {
    Matrix alone(1, out);
    two.Gemm(1, ConstRows(x.row(r), 1), weight, {}, alone);
    for (int64_t n = 0; n < out; ++n) {
      ASSERT_TRUE(SameBits(whole.at(r, n), alone.at(0, n))) << r << ", " << n;
      ASSERT_TRUE(SameBits(whole.at(r, n), again.at(r, n))) << r << ", " << n;
    }
  }
}

TEST(GemmInvarianceTest, NanStaysInItsRow) {
  Random random(3);
  const Source source(random, DType::kF32, 40, 40);
  CpuOps ops(1);
  PackedMatrix weight(DType::kF32, 40, 40);
  ops.Pack(weight, 0, 40, source.data(), DType::kF32);
  Matrix x(20, 40), y(20, 40);
  random.Fill(x);
  x.at(7, 3) = std::numeric_limits<float>::quiet_NaN();
  ops.Gemm(20, x, weight, {}, y);
  for (int64_t r = 0; r < 20; ++r) {
    for (int64_t n = 0; n < 40; ++n) EXPECT_EQ(std::isnan(y.at(r, n)), r == 7) << r << ", " << n;
  }
}

TEST(PackedMatrixTest, StackedPartsAndRowsReadBack) {
  Random random(4);
  const Source a(random, DType::kBF16, 37, 50), b(random, DType::kF32, 20, 50);
  CpuOps ops(2);
  PackedMatrix stacked(DType::kF32, 57, 50);
  ops.Pack(stacked, 0, 37, a.data(), DType::kBF16);
  ops.Pack(stacked, 37, 20, b.data(), DType::kF32);
  const std::vector<int32_t> tokens = {0, 36, 37, 56, 31, 32};
  Matrix rows(std::ssize(tokens), 50);
  ops.Embed(std::ssize(tokens), tokens.data(), stacked, rows);
  EXPECT_TRUE(rows.GuardsIntact());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const Source& from = tokens[i] < 37 ? a : b;
    const int64_t row = tokens[i] < 37 ? tokens[i] : tokens[i] - 37;
    for (int64_t c = 0; c < 50; ++c) {
      EXPECT_EQ(rows.at(static_cast<int64_t>(i), c),
                from.values[static_cast<size_t>(row * 50 + c)]);
    }
  }
}

}  // namespace
}  // namespace sparsegdn::ops_testing
