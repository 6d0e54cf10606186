// Conversions against fp64 or an exhaustive search of the target's grid, which share no bit trick
// with the code.
#include "server/engine/encode.h"

#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace sparsegdn::engine {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<float> RandomFloats(size_t n, uint32_t seed, int min_exponent, int max_exponent) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<double> mantissa(-2.0, 2.0);
  std::uniform_int_distribution<int> exponent(min_exponent, max_exponent);
  std::vector<float> out(n);
  for (float& x : out) x = static_cast<float>(std::ldexp(mantissa(rng), exponent(rng)));
  return out;
}

double F8Decoded(uint8_t bits) {  // from the definition: 1-4-3, bias 7
  const int exponent = (bits >> 3) & 15, mantissa = bits & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(1.0 + mantissa / 8.0, exponent - 7);
  return bits & 0x80 ? -magnitude : magnitude;
}

// The nearest finite code, ties to the even one, by search.
uint8_t NearestF8(double x) {
  static const std::map<double, uint8_t> grid = [] {
    std::map<double, uint8_t> g;
    for (int b = 0; b < 0x7f; ++b) g[F8Decoded(static_cast<uint8_t>(b))] = static_cast<uint8_t>(b);
    return g;
  }();
  const double a = std::fabs(x);
  auto above = grid.lower_bound(a);
  uint8_t code;
  if (above == grid.end()) {
    code = 0x7e;
  } else if (above == grid.begin() || above->first == a) {
    code = above->second;
  } else {
    const auto below = std::prev(above);
    const double up = above->first - a, down = a - below->first;
    code = up < down || (up == down && above->second % 2 == 0) ? above->second : below->second;
  }
  return static_cast<uint8_t>(code | (std::signbit(x) ? 0x80 : 0));
}

TEST(Encode, Bf16RoundsToNearestEven) {
  std::vector<float> in = RandomFloats(20000, 1, -140, 127);
  for (const float x : {0.0f, -0.0f, 1.0f, 1.00390625f, 1.01171875f, -1.00390625f, 3.4e38f, 1e-40f,
                        std::numeric_limits<float>::max(), kInf, -kInf}) {
    in.push_back(x);
  }
  std::vector<uint16_t> out(in.size());
  F32ToBf16(in.data(), std::ssize(in), out.data());
  for (size_t i = 0; i < in.size(); ++i) {
    const float got = std::bit_cast<float>(uint32_t{out[i]} << 16);
    // Neighbours on the bf16 grid around the truncated value; nearest in fp64, ties to even.
    const uint32_t low = std::bit_cast<uint32_t>(in[i]) >> 16;
    if (std::isinf(in[i])) {
      EXPECT_EQ(got, in[i]);
      continue;
    }
    const double down = std::bit_cast<float>(low << 16);
    // Past the largest finite value the next step up stands where 2^128 would.
    const float next = std::bit_cast<float>((low + 1) << 16);
    const double up = std::isinf(next) ? std::copysign(std::ldexp(1.0, 128), next) : next;
    const double to_down = std::fabs(in[i] - down), to_up = std::fabs(up - in[i]);
    const bool take_up = to_up < to_down || (to_up == to_down && low % 2 == 1);
    EXPECT_EQ(out[i], take_up ? low + 1 : low) << in[i];
  }
  uint16_t nan;
  F32ToBf16(&kNan, 1, &nan);
  EXPECT_TRUE(std::isnan(std::bit_cast<float>(uint32_t{nan} << 16)));
  const float tiny_nan = std::bit_cast<float>(0x7f800001u);  // its payload is below bf16's
  F32ToBf16(&tiny_nan, 1, &nan);
  EXPECT_TRUE(std::isnan(std::bit_cast<float>(uint32_t{nan} << 16)));
}

TEST(Encode, Bf16ToF32IsExact) {
  for (uint32_t b = 0; b < 0x10000; ++b) {
    const uint16_t in = static_cast<uint16_t>(b);
    float out = kNan;
    Bf16ToF32(&in, 1, &out);
    EXPECT_EQ(std::bit_cast<uint32_t>(out), b << 16);
  }
}

TEST(Encode, F8RowIsTheNearestCodeOfTheScaledValue) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    std::vector<float> in = RandomFloats(257, seed, -20, static_cast<int>(seed) - 20);
    in[3] = 0.0f;
    in[4] = -0.0f;
    std::vector<uint8_t> out(in.size(), 0xff);
    float scale = kNan;
    F32RowToF8(in.data(), std::ssize(in), out.data(), &scale);
    float amax = 0;
    for (const float x : in) amax = std::max(amax, std::fabs(x));
    EXPECT_EQ(scale, amax / 448.0f);
    for (size_t i = 0; i < in.size(); ++i) {
      EXPECT_EQ(out[i], NearestF8(in[i] / scale)) << in[i] << " / " << scale;
    }
    std::vector<float> back(in.size(), kNan);
    F8RowToF32(out.data(), std::ssize(out), scale, back.data());
    for (size_t i = 0; i < in.size(); ++i) {
      // Half a step of 3 mantissa bits, or of the subnormal grid 2^-9; plus the rounding of x / s.
      const double bound = std::max(std::fabs(in[i]) * (0x1p-4 + 0x1p-20), scale * 0x1.01p-10);
      EXPECT_LE(std::fabs(double{back[i]} - in[i]), bound);
      EXPECT_EQ(back[i], static_cast<float>(F8Decoded(out[i])) * scale);
    }
  }
}

TEST(Encode, F8RowOfZerosAndOfTinyValues) {
  const std::vector<float> zeros(16, 0.0f);
  std::vector<uint8_t> out(16, 0xff);
  float scale = kNan;
  F32RowToF8(zeros.data(), 16, out.data(), &scale);
  EXPECT_EQ(scale, 0x1p-126f);
  EXPECT_EQ(out, std::vector<uint8_t>(16, 0));
  const std::vector<float> tiny = {1e-40f, -1e-44f, 1e-38f, 0.0f};
  F32RowToF8(tiny.data(), 4, out.data(), &scale);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(out[i], NearestF8(double{tiny[i]} / scale));
  const std::vector<float> huge = {std::numeric_limits<float>::max(), 1.0f, -3e38f};
  F32RowToF8(huge.data(), 3, out.data(), &scale);
  EXPECT_EQ(out[0], 0x7e) << "the largest finite code, never NaN";
  EXPECT_EQ(out[1], 0);
}

TEST(Encode, TransposeOfAnyShape) {
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 1},
                                      {1, 7},
                                      {7, 1},
                                      {16, 16},
                                      {17, 15},
                                      {8, 16},
                                      {128, 128},
                                      {100, 33}}) {
    std::vector<float> in(rows * columns);
    for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i);
    std::vector<float> out(rows * columns + 2, kNan);
    Transpose(in.data(), rows, columns, out.data() + 1);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) EXPECT_EQ(out[1 + c * rows + r], in[r * columns + c]);
    }
    EXPECT_TRUE(std::isnan(out.front()) && std::isnan(out.back()));
  }
}

TEST(Encode, ConvColumns) {
  const std::vector<uint32_t> in = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<uint32_t> three(6), four(8, 99);
  DropConvColumn(reinterpret_cast<const char*>(in.data()), 2, 4,
                 reinterpret_cast<char*>(three.data()));
  EXPECT_EQ(three, (std::vector<uint32_t>{2, 3, 4, 6, 7, 8}));
  RestoreConvColumn(reinterpret_cast<const char*>(three.data()), 2, 4,
                    reinterpret_cast<char*>(four.data()));
  EXPECT_EQ(four, (std::vector<uint32_t>{0, 2, 3, 4, 0, 6, 7, 8}));
  const std::vector<uint16_t> narrow = {1, 2, 3, 4};
  std::vector<uint16_t> narrow_out(3);
  DropConvColumn(reinterpret_cast<const char*>(narrow.data()), 1, 2,
                 reinterpret_cast<char*>(narrow_out.data()));
  EXPECT_EQ(narrow_out, (std::vector<uint16_t>{2, 3, 4}));
}

TEST(Encode, AllFinite) {
  for (const float bad : {kNan, kInf, -kInf}) {
    std::vector<float> x(100, 1.0f);
    EXPECT_TRUE(AllFinite(x.data(), ExportDType::kF32, 100));
    x[99] = bad;
    EXPECT_FALSE(AllFinite(x.data(), ExportDType::kF32, 100));
    EXPECT_TRUE(AllFinite(x.data(), ExportDType::kF32, 99));
    std::vector<uint16_t> b(100);
    F32ToBf16(x.data(), 100, b.data());
    EXPECT_FALSE(AllFinite(b.data(), ExportDType::kBF16, 100));
    EXPECT_TRUE(AllFinite(b.data(), ExportDType::kBF16, 99));
  }
  for (int code = 0; code < 256; ++code) {
    const uint8_t bits = static_cast<uint8_t>(code);
    EXPECT_EQ(AllFinite(&bits, ExportDType::kF8E4M3, 1), (code & 0x7f) != 0x7f);
  }
}

}  // namespace
}  // namespace sparsegdn::engine
