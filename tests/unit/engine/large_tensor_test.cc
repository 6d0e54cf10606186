// Sizes and offsets beyond 2^31 and 2^32 bytes.
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "server/engine/frame_writer.h"
#include "server/engine/plan.h"
#include "tests/unit/engine/fake_runner.h"

namespace sparsegdn::engine {
namespace {

TEST(LargeTensors, ThePlanCountsIn64Bits) {
  model::ModelInfo info = testing::SmallHybridInfo();
  info.num_kv_heads = 4;
  info.attention_head_dim = 256;
  RequestPlan plan;
  for (int64_t p = 0; p < 4096; ++p) plan.request.outputs.logits_positions.push_back(p);
  plan.prompt_tokens = (1 << 20) + 1;
  plan.snapshot_position = plan.end_position = 1 << 20;
  plan.chunk_tokens = 2048;
  ASSERT_TRUE(PlanTensors(Layout(info), "x", 248320, plan).ok());
  EXPECT_EQ(plan.manifest->tensors[plan.logits].bytes, uint64_t{4096} * 248320 * 4);
  EXPECT_EQ(plan.manifest->tensors[plan.final_tensors[2].key].bytes, uint64_t{1} << 32);
  EXPECT_EQ(plan.EmittedBytes(0, 2048), int64_t{2048} * (248320 * 4 + 2 * 4096));
  EXPECT_EQ(plan.MaxChunkBytes(), plan.EmittedBytes(0, 2048));
}

TEST(LargeTensors, OffsetsPassFourGigabytes) {
  constexpr uint64_t kBlob = 64 << 20;
  constexpr uint64_t kBytes = (uint64_t{1} << 32) + kBlob;
  const auto blob = std::make_shared<const std::string>(kBlob, 'x');
  Manifest manifest;
  manifest.tensors.resize(1);
  manifest.tensors[0].bytes = kBytes;
  uint64_t next = 0;
  FrameWriter writer(manifest, 1 << 20, [&](TensorChunk chunk) {
    EXPECT_EQ(chunk.byte_offset, next);
    next += chunk.data->size();
  });
  for (uint64_t at = 0; at < kBytes; at += kBlob) writer.AppendBlob(0, blob);
  EXPECT_EQ(next, kBytes);
  EXPECT_TRUE(writer.Digest().ok());
}

TEST(FrameWriter, MissingAndExcessBytesAreInternalErrors) {
  Manifest manifest;
  manifest.tensors.resize(2);
  manifest.tensors[0].bytes = 10;
  manifest.tensors[0].name = "first";
  const auto drop = [](TensorChunk) {};
  FrameWriter missing(manifest, 64, drop);
  missing.Append(0, "123456789");
  EXPECT_EQ(missing.Digest().status().code(), absl::StatusCode::kInternal);
  FrameWriter excess(manifest, 64, drop);
  excess.Append(0, "1234567890");
  excess.Append(0, "1");
  EXPECT_EQ(excess.Digest().status().code(), absl::StatusCode::kInternal);
  FrameWriter whole(manifest, 64, drop);
  whole.Append(0, "1234567890");
  EXPECT_EQ(*whole.Digest(), DigestOf({Xxh3("1234567890"), Xxh3("")}));
}

TEST(FrameWriter, TheHashOfManyFramesIsTheHashOfTheWhole) {
  Manifest manifest;
  manifest.tensors.resize(1);
  manifest.tensors[0].bytes = 1000;
  std::string bytes;
  for (int i = 0; i < 1000; ++i) bytes.push_back(static_cast<char>(i * 7));
  for (const size_t piece : {1, 63, 64, 65, 999, 1000}) {
    std::string got;
    FrameWriter writer(manifest, 64, [&](TensorChunk chunk) {
      EXPECT_LE(chunk.data->size(), 64u);
      got += *chunk.data;
    });
    for (size_t at = 0; at < bytes.size(); at += piece) writer.Append(0, bytes.substr(at, piece));
    EXPECT_EQ(*writer.Digest(), DigestOf({Xxh3(bytes)}));
    EXPECT_EQ(got, bytes);
  }
}

}  // namespace
}  // namespace sparsegdn::engine
