// Goal: random checkpoints are a function of the seed alone, load, and have realistic weights.
#include "server/model/random_checkpoint.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "server/model/checkpoint.h"
#include "server/model/random_weights.h"
#include "tests/unit/model/model_testing.h"
#include "tests/unit/model/test_files.h"

namespace sparsegdn::model::testing {
namespace {

RandomCheckpointOptions Options(const std::string& shape, const std::string& dir) {
  RandomCheckpointOptions options;
  options.config_json = ConfigJsonOfShape(shape).value();
  options.out_dir = dir;
  return options;
}

TEST(RandomCheckpointTest, BundledModelsAreReproduced) {
  for (const auto& [shape, name] :
       {std::pair{"tiny", "tiny-hybrid"}, std::pair{"tiny-gdn", "tiny-gdn"}}) {
    const TempDir dir;
    RandomCheckpointOptions options = Options(shape, dir.path());
    options.seed = 20;
    ASSERT_TRUE(WriteRandomCheckpoint(options).ok());
    const TempDir bundled;
    CopyModel(name, bundled);
    for (const auto& file : std::filesystem::directory_iterator(bundled.path())) {
      const std::string base = file.path().filename().string();
      EXPECT_EQ(dir.Read(base), bundled.Read(base)) << base;
    }
  }
}

TEST(RandomCheckpointTest, SeedDtypeAndShardsDoWhatTheySay) {
  const TempDir a, b, c, d;
  RandomCheckpointOptions options = Options("tiny-gdn", a.path());
  ASSERT_TRUE(WriteRandomCheckpoint(options).ok());
  options.out_dir = b.path();
  options.shard_bytes = 200'000;
  ASSERT_TRUE(WriteRandomCheckpoint(options).ok());
  options.out_dir = c.path();
  options.seed = 2;
  ASSERT_TRUE(WriteRandomCheckpoint(options).ok());
  options = Options("tiny-gdn", d.path());
  options.dtype = DType::kF32;
  ASSERT_TRUE(WriteRandomCheckpoint(options).ok());
  const ModelConfig config = LoadConfig(a.path()).value();
  const Checkpoint one = Checkpoint::Open(a.path(), config).value();
  const Checkpoint shards = Checkpoint::Open(b.path(), config).value();
  const Checkpoint other = Checkpoint::Open(c.path(), config).value();
  const Checkpoint wide = Checkpoint::Open(d.path(), config).value();
  EXPECT_GT(shards.files().size(), 5u);
  for (const auto& [name, tensor] : one.tensors()) {
    const HostTensor& same = shards.tensors().at(name);
    EXPECT_TRUE(std::equal(tensor.bytes.begin(), tensor.bytes.end(), same.bytes.begin())) << name;
    const HostTensor& differs = other.tensors().at(name);
    EXPECT_FALSE(std::equal(tensor.bytes.begin(), tensor.bytes.end(), differs.bytes.begin()))
        << name;
    const bool always_wide = name.ends_with("A_log") || name.ends_with("linear_attn.norm.weight");
    EXPECT_EQ(tensor.dtype, always_wide ? DType::kF32 : DType::kBF16) << name;
    EXPECT_EQ(wide.tensors().at(name).dtype, DType::kF32) << name;
  }
}

TEST(RandomCheckpointTest, DecaysAreDiverse) {
  std::vector<float> a_log(1000), dt_bias(1000);
  WeightStream({"a", {1000}, WeightRole::kALog}, 4, 1).Fill(a_log);
  WeightStream({"d", {1000}, WeightRole::kDtBias}, 4, 1).Fill(dt_bias);
  std::vector<double> log_gates;
  for (size_t i = 0; i < 1000; ++i) {
    EXPECT_GE(a_log[i], std::log(0.01f));
    EXPECT_LE(a_log[i], std::log(16.0f));
    log_gates.push_back(-std::exp(a_log[i]) * std::log1p(std::exp(dt_bias[i])));
  }
  std::sort(log_gates.begin(), log_gates.end());
  EXPECT_LT(log_gates[50], -0.4);    // some heads forget within tens of tokens
  EXPECT_GT(log_gates[950], -0.01);  // some remember hundreds
}

TEST(RandomCheckpointTest, ProjectionsHaveUnitGain) {
  std::vector<float> weights(200'000);
  WeightStream({"w", {1000, 200}, WeightRole::kProjection}, 4, 3).Fill(weights);
  double sum = 0.0, squares = 0.0;
  for (const float w : weights) {
    sum += w;
    squares += double{w} * w;
  }
  EXPECT_NEAR(sum / 200'000, 0.0, 1e-3);            // 5 standard errors of 0.07 / sqrt(200,000)
  EXPECT_NEAR(squares / 200'000 * 200, 1.0, 0.01);  // variance 1 / fan_in
}

TEST(RandomCheckpointTest, RefusalsLeaveNothingBehind) {
  const TempDir dir;
  dir.Write("config.json", "{}");
  EXPECT_EQ(WriteRandomCheckpoint(Options("tiny", dir.path())).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(dir.Read("config.json"), "{}");
  RandomCheckpointOptions options = Options("tiny", dir.File("new"));
  options.config_json = "{}";
  EXPECT_EQ(WriteRandomCheckpoint(options).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(std::filesystem::exists(dir.File("new")));
  options = Options("tiny", dir.File("new"));
  options.dtype = DType::kF16;
  EXPECT_EQ(WriteRandomCheckpoint(options).code(), absl::StatusCode::kInvalidArgument);
  options = Options("tiny", dir.File("config.json") + "/below-a-file");
  EXPECT_FALSE(WriteRandomCheckpoint(options).ok());
  EXPECT_EQ(std::string(ConfigJsonOfShape("5b").status().message()),
            "shape = \"5b\", wanted one of tiny, tiny-gdn, 0.8b, 2b, 4b, 9b, 27b");
}

}  // namespace
}  // namespace sparsegdn::model::testing
