// The narrower dtypes and the other layouts on the stream, against conversions written out here.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "tests/unit/engine/engine_test_util.h"

namespace sparsegdn::testing {
namespace {

using engine::ConvLayout;
using engine::ExportDType;
using engine::PrefillRequest;

std::vector<float> Transposed(const std::vector<float>& in, int64_t heads, int64_t k, int64_t v) {
  std::vector<float> out(in.size());
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < v; ++j) out[(h * v + j) * k + i] = in[(h * k + i) * v + j];
    }
  }
  return out;
}

TEST(Export, StatesInEveryDTypeAndLayout) {
  const PrefillRequest base = Harness::Prompt(200);
  const std::span<const int32_t> prefix = std::span(base.tokens).first(199);
  for (const StateLayout layout : {StateLayout::kKeyMajor, StateLayout::kValueMajor}) {
    for (const ExportDType dtype : {ExportDType::kF32, ExportDType::kBF16, ExportDType::kF8E4M3}) {
      Harness h;
      PrefillRequest request = base;
      request.outputs.state_layout = layout;
      request.outputs.state_dtype = dtype;
      const Collected got = h.Complete(request);
      ASSERT_TRUE(got.status->ok());
      const bool value_major = layout == StateLayout::kValueMajor;
      for (const int32_t layer : {0, 1, 3}) {
        const std::string name = absl::StrCat("layers.", layer, ".recurrent_state");
        std::vector<float> want = FakeState(h.info, layer, prefix);
        if (value_major) want = Transposed(want, 4, 8, 16);
        EXPECT_EQ(got.Info(name).shape, value_major ? (std::vector<int64_t>{4, 16, 8})
                                                    : (std::vector<int64_t>{4, 8, 16}));
        EXPECT_EQ(got.Info(name).state_layout, layout);
        const int64_t columns = value_major ? 8 : 16;
        EXPECT_EQ(got.Has(name + "_scale"), dtype == ExportDType::kF8E4M3);
        if (dtype == ExportDType::kF32) {
          EXPECT_EQ(got.Floats(name), want);
        }
        if (dtype == ExportDType::kBF16) {
          const std::vector<float> values = got.Floats(name);
          ASSERT_EQ(values.size(), want.size());
          for (size_t i = 0; i < want.size(); ++i) {
            EXPECT_LE(std::fabs(values[i] - want[i]), std::fabs(want[i]) * 0x1p-8);  // half an ulp
          }
        }
        if (dtype == ExportDType::kF8E4M3) {
          const std::vector<float> scales = got.Floats(name + "_scale");
          ASSERT_EQ(std::ssize(scales) * columns, std::ssize(want));
          for (size_t r = 0; r < scales.size(); ++r) {
            float amax = 0;
            for (int64_t i = 0; i < columns; ++i) {
              amax = std::max(amax, std::fabs(want[r * columns + i]));
            }
            EXPECT_EQ(scales[r], amax / 448.0f);
          }
          EXPECT_EQ(got.Bytes(name).size(), want.size());
        }
      }
      h.ExpectNoLeak();
    }
  }
}

TEST(Export, ConvStateOfThreeColumns) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    FakeRunnerOptions options;
    options.info = SmallHybridInfo(compute);
    Harness h(options);
    PrefillRequest request = Harness::Prompt(3);  // column 0 of four would be zero
    request.tokens.push_back(5);
    request.tokens.push_back(6);
    request.outputs.conv_layout = ConvLayout::kThreeColumns;
    const Collected got = h.Complete(request);
    const std::vector<float> four =
        FakeConv(h.info, std::span(request.tokens).first(request.tokens.size() - 1));
    const std::vector<float> three = got.Floats("layers.1.conv_state");
    ASSERT_EQ(std::ssize(three), h.info.conv_channels * 3);
    for (int64_t c = 0; c < h.info.conv_channels; ++c) {
      for (int64_t j = 0; j < 3; ++j) EXPECT_EQ(three[c * 3 + j], four[c * 4 + j + 1]);
    }
    EXPECT_EQ(got.Info("layers.1.conv_state").dtype, engine::ExportOf(compute));
  }
}

TEST(Export, KvInEitherDTypeFromEitherComputeDType) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    for (const ExportDType dtype : {ExportDType::kF32, ExportDType::kBF16}) {
      for (const bool keep : {false, true}) {
        FakeRunnerOptions options;
        options.info = SmallHybridInfo(compute);
        Harness h(options);
        PrefillRequest request = Harness::Prompt(2100);
        request.outputs.kv_dtype = dtype;
        request.keep_snapshot = keep;
        const Collected got = h.Complete(request);
        ASSERT_TRUE(got.status->ok());
        const auto prefix = std::span(request.tokens).first(2099);
        EXPECT_EQ(got.Info("layers.2.key").dtype, dtype);
        EXPECT_EQ(got.Floats("layers.2.key"), FakeKv(h.info, 2, true, prefix));
        EXPECT_EQ(got.Floats("layers.2.value"), FakeKv(h.info, 2, false, prefix));
      }
    }
  }
}

TEST(Export, FramesStayWithinTheirSizeAndKvFramesHoldWholeRows) {
  Harness h;
  const auto call = h.Submit(Harness::Prompt(2100));
  h.RunRounds();
  std::shared_ptr<const engine::Manifest> manifest;
  int64_t frames = 0;
  while (const auto event = call->TryPop()) {
    if (const auto* m = std::get_if<std::shared_ptr<const engine::Manifest>>(&*event)) {
      manifest = *m;
    } else if (const auto* chunk = std::get_if<engine::TensorChunk>(&*event)) {
      ++frames;
      EXPECT_LE(chunk->data->size(), 512u);
      if (manifest->tensors[chunk->tensor].kind == engine::TensorKind::kKey) {
        EXPECT_EQ(chunk->byte_offset % (2 * 4 * 4), 0u);
      }
    }
  }
  EXPECT_GT(frames, 100);
}

TEST(Export, AKeptSnapshotSharesItsKvWithTheFrames) {
  Harness h;
  PrefillRequest request = Harness::Prompt(2100);
  request.keep_snapshot = true;
  const Collected got = h.Complete(request);
  ASSERT_TRUE(got.status->ok());
  EXPECT_EQ(h.engine().gauges().kept_snapshot_bytes, engine::Layout(h.info).kept_bytes(2099));
  EXPECT_EQ(got.result->snapshot_id.size(), 32u);
  EXPECT_EQ(got.result->snapshot_ttl_seconds, 300u);
}

}  // namespace
}  // namespace sparsegdn::testing
