// Goal: the CUDA operations equal the CPU's on the same BF16 inputs, which the CPU's own tests hold
// against fp64. Tolerance: one rounding of the result to 8 bits is 2^-9 relative, and FP32 sums in
// another order can move it to the next value: 2^-8. Skipped, saying so, without a device.
#include <gtest/gtest.h>

#include "sparsegdn/cpu_ops.h"
#include "tests/unit/ops/cuda_ops_testing.h"

namespace sparsegdn::ops_testing {
namespace {

constexpr double kRelative = 0x1p-8, kAbsolute = 1e-6;
constexpr int64_t kWidths[] = {1, 2, 15, 16, 17, 64, 100, 128, 2560};
constexpr int64_t kPads[] = {8, 5};  // whole vectors, and rows that start anywhere

class CudaRowOpsTest : public CudaTest {
 protected:
  CpuOps cpu_{2};
};

TEST_F(CudaRowOpsTest, RmsNorm) {
  for (const int64_t width : kWidths) {
    for (const int64_t pad : kPads) {
      Random random(static_cast<uint32_t>(width));
      Matrix x(37, width), wanted(37, width);
      random.Fill(x, 3.0f);
      RoundAll(x);
      const std::vector<float> weight = random.Vector(width, 0.2f);
      const DeviceRows in(x, pad), out(37, width, pad);
      const DeviceArray<float> w(weight);
      cpu_.RmsNorm({37, width, x, weight.data(), 1e-6f, wanted});
      Expect(ops_->RmsNorm({37, width, in, w.data(), 1e-6f, out}));
      ExpectClose(out.Read(), wanted, kRelative, kAbsolute);
    }
  }
}

TEST_F(CudaRowOpsTest, GatedNormAlsoInPlace) {
  for (const int64_t dim : {1, 15, 64, 100, 128, 256}) {
    for (const int64_t pad : kPads) {
      Random random(static_cast<uint32_t>(dim));
      const int32_t heads = 3, narrow = static_cast<int32_t>(dim);
      Matrix o(9, heads * dim), z(9, heads * dim), wanted(9, heads * dim);
      random.Fill(o);
      random.Fill(z, 4.0f);
      RoundAll(o);
      RoundAll(z);
      const std::vector<float> weight = random.Vector(dim);
      const DeviceArray<float> w(weight);
      const DeviceRows o_in(o, pad), z_in(z, pad), out(9, heads * dim, pad);
      cpu_.GatedNorm({9, heads, narrow, o, z, weight.data(), 1e-6f, wanted});
      Expect(ops_->GatedNorm({9, heads, narrow, o_in, z_in, w.data(), 1e-6f, out}));
      ExpectClose(out.Read(), wanted, kRelative, kAbsolute);
      Expect(ops_->GatedNorm({9, heads, narrow, o_in, z_in, w.data(), 1e-6f, o_in}));
      ExpectClose(o_in.Read(), wanted, kRelative, kAbsolute);
    }
  }
}

TEST_F(CudaRowOpsTest, SwiGluIncludingExtremes) {
  for (const int64_t width : kWidths) {
    for (const int64_t pad : kPads) {
      Random random(static_cast<uint32_t>(width));
      Matrix x(5, 2 * width), wanted(5, width);
      random.Fill(x, 5.0f);
      x.at(0, 0) = -200.0f;
      x.at(1, 0) = 200.0f;
      RoundAll(x);
      const DeviceRows in(x, pad), out(5, width, pad);
      cpu_.SwiGlu({5, width, x, wanted});
      Expect(ops_->SwiGlu({5, width, in, out}));
      ExpectClose(out.Read(), wanted, kRelative, kAbsolute);
    }
  }
}

TEST_F(CudaRowOpsTest, GatherRowsCopies) {
  for (const int64_t width : kWidths) {
    Matrix x(6, width);
    Random random(7);
    random.Fill(x);
    RoundAll(x);
    const DeviceRows in(x, 8), out(3, width, 8);
    const DeviceArray<int32_t> index(std::vector<int32_t>{5, 0, 5});
    Expect(ops_->GatherRows(3, width, index.data(), in, out));
    const Matrix got = out.Read();
    for (int64_t c = 0; c < width; ++c) {
      EXPECT_EQ(got.at(0, c), x.at(5, c));
      EXPECT_EQ(got.at(1, c), x.at(0, c));
      EXPECT_EQ(got.at(2, c), x.at(5, c));
    }
  }
}

TEST_F(CudaRowOpsTest, LogProbOfLargeAndShiftedLogits) {
  const int64_t vocab = 10'007;
  Random random(5);
  std::vector<float> logits = random.Vector(3 * vocab, 3.0f);
  for (int64_t i = 0; i < vocab; ++i) logits[static_cast<size_t>(vocab + i)] += 500.0f;
  logits[static_cast<size_t>(2 * vocab + 9'999)] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<int32_t> targets = {0, 10'006, 77};
  std::vector<float> wanted(3, 0.0f);
  cpu_.LogProb({3, vocab, logits.data(), targets.data(), wanted.data()});
  const DeviceArray<float> in(logits), out(3);
  const DeviceArray<int32_t> at(targets);
  Expect(ops_->LogProb({3, vocab, in.data(), at.data(), out.data()}));
  const std::vector<float> got = out.Read();
  // 40 terms a thread and eight partial sums in FP32; logits near 500 have an ulp of 3e-5.
  EXPECT_NEAR(got[0], wanted[0], 1e-4);
  EXPECT_NEAR(got[1], wanted[1], 1e-4);
  EXPECT_TRUE(std::isnan(got[2]));
}

TEST_F(CudaRowOpsTest, CheckFiniteFlagsTheRightSequence) {
  Pack pack;
  for (const int32_t length : {3, 5, 1, 4}) pack.Add(length, 0, 0);
  const DevicePack device(pack);
  Matrix x(13, 37);
  Random random(6);
  random.Fill(x);
  const DeviceArray<int32_t> flags(std::vector<int32_t>(4, 0));
  Expect(ops_->CheckFinite(device.args, 37, DeviceRows(x, 3), flags.data()));
  EXPECT_EQ(flags.Read(), (std::vector<int32_t>{0, 0, 0, 0}));
  x.at(7, 36) = std::numeric_limits<float>::infinity();
  x.at(12, 0) = std::numeric_limits<float>::quiet_NaN();
  Expect(ops_->CheckFinite(device.args, 37, DeviceRows(x, 3), flags.data()));
  EXPECT_EQ(flags.Read(), (std::vector<int32_t>{0, 1, 0, 1}));
}

struct GemmCase {
  int64_t rows, out, in;
  bool tuned = false;  // at fewer rows
};

TEST_F(CudaRowOpsTest, GemmWithResidualAndFp32Logits) {
  for (const GemmCase& c : {GemmCase{1, 8, 8}, GemmCase{1, 12360, 256}, GemmCase{77, 264, 1024},
                            GemmCase{130, 512, 128}, GemmCase{1300, 264, 128, true}}) {
    SCOPED_TRACE(c.rows);
    Random random(1);
    Matrix x(c.rows, c.in), residual(c.rows, c.out), w(c.out, c.in);
    random.Fill(x);
    random.Fill(residual);
    random.Fill(w);
    for (Matrix* m : {&x, &residual, &w}) RoundAll(*m);
    Matrix plain(c.rows, c.out), sum(c.rows, c.out), fp32(c.rows, c.out, 0);
    for (int64_t r = 0; r < c.rows; ++r) {
      for (int64_t n = 0; n < c.out; ++n) {
        double total = 0.0;
        for (int64_t k = 0; k < c.in; ++k) total += double{x.at(r, k)} * w.at(n, k);
        plain.at(r, n) = static_cast<float>(total);
        sum.at(r, n) = static_cast<float>(total + residual.at(r, n));
      }
    }
    const DeviceRows x_in(x, 8), add(residual, 16), y(c.rows, c.out, 8), weight(w, 0);
    const CudaMatrix matrix{weight.column(0), c.out, c.in};
    const DeviceArray<float> logits(static_cast<size_t>(c.rows * c.out));
    // FP32 sums of |in| terms of order one: 2^-24 in, and the rounding of the result.
    const double absolute = 1e-6 * static_cast<double>(c.in);
    if (c.tuned) {
      Expect(ops_->TuneGemm(1024, x_in, matrix, {}, y));
      Expect(ops_->TuneGemm(1024, x_in, matrix, y, y));
      for (const bool with_residual : {false, true}) {
        EXPECT_EQ(ops_->TunedRows(c.rows, matrix, with_residual), 1024);
        EXPECT_EQ(ops_->TunedRows(767, matrix, with_residual), 0);
        EXPECT_EQ(ops_->TunedRows(768, matrix, with_residual), 1024);
      }
      EXPECT_EQ(ops_->TunedRows(c.rows, {matrix.data, c.out, c.in + 8}, false), 0);
    }
    Expect(ops_->Gemm(c.rows, x_in, matrix, {}, y));
    ExpectClose(y.Read(), plain, kRelative, absolute);
    // The library may round the product before it adds: 2^-9 of the product and 2^-9 of the sum are
    // half a step of a number just above a power of two, 2^-8 of one just below. The product is at
    // most the sum and the residual, which is below 5.
    const double twice = 2.0 * kRelative, beside = absolute + 5.0 * kRelative;
    Expect(ops_->Gemm(c.rows, x_in, matrix, add, y));
    ExpectClose(y.Read(), sum, twice, beside);
    Expect(ops_->Gemm(c.rows, x_in, matrix, add, add));
    ExpectClose(add.Read(), sum, twice, beside);
    Expect(ops_->GemmLogits(c.rows, x_in, matrix, logits.data()));
    const std::vector<float> got = logits.Read();
    for (int64_t i = 0; i < c.rows * c.out; ++i) {
      ASSERT_NEAR(got[static_cast<size_t>(i)], plain.at(i / c.out, i % c.out),
                  absolute + 1e-6 * std::abs(plain.at(i / c.out, i % c.out)));
    }
  }
  const DeviceRows odd(Matrix(1, 12), 0);
  EXPECT_EQ(ops_->Gemm(1, odd, {odd.column(0), 1, 12}, {}, odd).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(CudaRowOpsTest, GdnFrontAndConvState) {
  Pack pack;  // sequences shorter and longer than the kernel and than a thread's run
  pack.Add(1, 6, 10);
  pack.Add(200, 0, 0);
  pack.Add(3, 2, 5);
  pack.Add(0, 5, 9);
  pack.Add(4, 1, 0);
  pack.Add(64, 3, 0);
  const int64_t rows = pack.cu_seqlens.back();
  for (const int64_t channels : {int64_t{45}, int64_t{1280}}) {
    SCOPED_TRACE(channels);
    const int32_t heads = 3;
    Random random(1);
    Matrix x(rows, channels), a(rows, heads), b(rows, heads), states(8, channels * 4, 0);
    Matrix wanted(rows, channels);
    random.Fill(x);
    random.Fill(a, 4.0f);
    random.Fill(b, 4.0f);
    random.Fill(states);
    for (Matrix* m : {&x, &a, &b, &states}) RoundAll(*m);
    const auto taps = random.Vector(4 * channels), a_log = random.Vector(heads);
    const auto dt_bias = random.Vector(heads, 3.0f);
    const DeviceRows x_in(x, 8), a_in(a, 5), b_in(b, 5), out(rows, channels, 8);
    const DeviceRows state(states, 0), at(1, channels * 4, 0);
    const DeviceArray<float> taps_in(taps), a_log_in(a_log), dt_in(dt_bias);
    const size_t gates = static_cast<size_t>(rows * heads);
    const DeviceArray<float> log_gate(gates), beta(gates);
    std::vector<float> wanted_gate(gates), wanted_beta(gates);
    Matrix wanted_at(1, channels * 4, 0);
    const DevicePack device(pack);
    cpu_.ConvStateAt(
        {channels, ConstRows(x.row(1), ConstRows(x).stride), 2, states.row(0), wanted_at.row(0)});
    cpu_.GdnFront({pack.args(), channels, heads, x, a, b, taps.data(), a_log.data(), dt_bias.data(),
                   states.row(0), wanted, wanted_gate.data(), wanted_beta.data()});
    const uint16_t* second = x_in.column(0) + x_in.stride();
    Expect(ops_->ConvStateAt(
        {channels, ConstRows(second, x_in.stride()), 2, state.column(0), at.column(0)}));
    Expect(ops_->GdnFront({device.args, channels, heads, x_in, a_in, b_in, taps_in.data(),
                           a_log_in.data(), dt_in.data(), state.column(0), out, log_gate.data(),
                           beta.data()}));
    // Four products of order one may cancel: 2e-6 of their sum beside the rounding.
    ExpectClose(out.Read(), wanted, kRelative, 2e-5);
    ExpectClose(state.Read(), states, 0.0, 0.0);
    ExpectClose(at.Read(), wanted_at, 0.0, 0.0);
    const std::vector<float> got_gate = log_gate.Read(), got_beta = beta.Read();
    for (size_t i = 0; i < gates; ++i) {
      ASSERT_NEAR(got_gate[i], wanted_gate[i], 4e-6 * std::abs(wanted_gate[i]) + 1e-9);
      ASSERT_NEAR(got_beta[i], wanted_beta[i], 4e-6 * wanted_beta[i] + 1e-9);
    }
  }
}

}  // namespace
}  // namespace sparsegdn::ops_testing
