// Parts of the CPU backend that other tests reach only through their sum.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "kernels/common/float_convert.h"
#include "kernels/common/selection_math.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/task_list.h"
#include "kernels/cpu/thread_pool.h"

namespace sparsegdn::cpu {
namespace {

TEST(ThreadPool, RunsEveryIndexOnce) {
  for (int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (int64_t count : {0, 1, 2, 1000}) {
      std::vector<std::atomic<int>> hits(count);
      std::atomic<int> bad_thread{0};
      pool.Run(count, [&](int64_t i, int thread) {
        ++hits[i];
        if (thread < 0 || thread >= threads) ++bad_thread;
      });
      for (auto& h : hits) EXPECT_EQ(h.load(), 1);
      EXPECT_EQ(bad_thread.load(), 0);
    }
  }
}

TEST(ThreadPool, ManyShortRuns) {
  ThreadPool pool(3);
  int64_t sum = 0;  // plain: Run must order the workers' writes before its return
  std::vector<int64_t> parts(8);
  for (int run = 0; run < 500; ++run) {
    pool.Run(8, [&](int64_t i, int) { parts[i] = i + run; });
    for (int64_t p : parts) sum += p;
  }
  EXPECT_EQ(sum, 500 * 28 + 8 * (499 * 500 / 2));
}

TEST(FloatConvert, EveryHalfSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto h = static_cast<uint16_t>(bits);
    const float from_f16 = F16ToFloat(h), from_bf16 = Bf16ToFloat(h);
    EXPECT_TRUE(std::isnan(from_f16) || FloatToF16(from_f16) == h) << bits;
    EXPECT_TRUE(std::isnan(from_bf16) || FloatToBf16(from_bf16) == h) << bits;
  }
}

TEST(FloatConvert, RoundsToNearestEven) {
  EXPECT_EQ(FloatToBf16(1.0f + 0x1p-8f), 0x3f80);  // tie to even
  EXPECT_EQ(FloatToBf16(1.0f + 0x3p-8f), 0x3f82);
  EXPECT_EQ(FloatToBf16(3.4e38f), 0x7f80);
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(NAN))));
  EXPECT_EQ(FloatToF16(1.0f + 0x1p-11f), 0x3c00);
  EXPECT_EQ(FloatToF16(1.0f + 0x3p-11f), 0x3c02);
  EXPECT_EQ(FloatToF16(65519.0f), 0x7bff);
  EXPECT_EQ(FloatToF16(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToF16(0x1p-25f), 0);
  EXPECT_EQ(FloatToF16(0x1.8p-25f), 1);
  EXPECT_TRUE(std::isnan(F16ToFloat(FloatToF16(NAN))));
}

// Where a run is held to a target (tests/unit/target_main.cc), its rows must have run there.
TEST(VectorKernels, RunOnTheTargetAskedFor) {
  if (const char* target = std::getenv("SPARSEGDN_TEST_TARGET"); target != nullptr) {
    EXPECT_STREQ(GetVectorKernels().target, target);
    EXPECT_STREQ(GetVectorKernels().product.name, target);
  }
}

// The vector kernels widen 16-bit inputs exactly, whatever the bits.
TEST(VectorKernels, WidenEveryHalf) {
  std::vector<uint16_t> bits(65536);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  std::vector<float> wide(bits.size());
  const int32_t row = 0;
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    GetVectorKernels().load_rows(bits.data(), dtype, 0, &row, 1, 65536, wide.data(), 65536);
    for (size_t i = 0; i < bits.size(); ++i) {
      const float want = LoadElement(bits.data(), dtype, static_cast<int64_t>(i));
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(wide[i])) << i;
      } else {
        EXPECT_EQ(wide[i], want) << i;
      }
    }
  }
}

// |v| must be selection_math's to the bit, because masks depend on it.
TEST(VectorKernels, RowNormIsSelectionMath) {
  std::vector<float> v(256);
  std::vector<uint16_t> half(256);
  for (int i = 0; i < 256; ++i) {
    v[i] = std::sin(1.7f * i) * std::pow(10.0f, static_cast<float>(i % 9 - 4));
    half[i] = FloatToBf16(v[i]);
  }
  for (int dim : {1, 7, 31, 32, 33, 64, 100, 128, 255, 256}) {
    EXPECT_EQ(GetVectorKernels().row_norm(v.data(), DType::kF32, dim),
              selection::RowNorm([&](int i) { return v[i]; }, dim))
        << dim;
    EXPECT_EQ(GetVectorKernels().row_norm(half.data(), DType::kBF16, dim),
              selection::RowNorm([&](int i) { return Bf16ToFloat(half[i]); }, dim))
        << dim;
  }
}

GdnForwardArgs ArgsFor(const GdnShape& shape, const std::vector<int32_t>& cu) {
  GdnForwardArgs args;
  args.shape = shape;
  args.num_seqs = static_cast<int32_t>(cu.size()) - 1;
  args.cu_seqlens = cu.data();
  return args;
}

// Every (sequence, value head, panel) belongs to exactly one task.
TEST(TaskList, CoversEverythingOnce) {
  const std::vector<int32_t> cu = {0, 10, 10, 500};
  for (const GdnShape& shape : {GdnShape{1, 3, 64, 160}, GdnShape{4, 4, 64, 40}}) {
    const int ratio = shape.num_v_heads / shape.num_k_heads;
    const int panels = (shape.head_dim_v + kPanel - 1) / kPanel;
    for (int threads : {1, 2, 5, 64}) {
      std::vector<int> hits(3 * shape.num_v_heads * panels, 0);
      for (const PairTask& t : MakeTasks(ArgsFor(shape, cu), threads)) {
        for (int h = t.head_begin; h < t.head_end; ++h) {
          for (int n = t.panel_begin; n < t.panel_end; ++n) {
            ++hits[((t.sequence * shape.num_k_heads + t.pair) * ratio + h) * panels + n];
          }
        }
      }
      for (int h : hits) EXPECT_EQ(h, 1) << threads;
    }
  }
}

// One sequence with a single pair still gives every thread something to do; many pairs are whole.
TEST(TaskList, SplitsOnlyWhenThreadsWouldIdle) {
  const std::vector<int32_t> one = {0, 4096};
  EXPECT_GE(MakeTasks(ArgsFor({1, 2, 128, 128}, one), 2).size(), 2u);
  EXPECT_GE(MakeTasks(ArgsFor({2, 4, 128, 128}, one), 16).size(), 8u);
  EXPECT_EQ(MakeTasks(ArgsFor({16, 32, 128, 128}, one), 2).size(), 16u);
}

}  // namespace
}  // namespace sparsegdn::cpu
