// Goal: a checkpoint folder opens in every published layout, and a broken one is refused with a
// message that names the file or tensor, got and wanted.
#include "server/model/checkpoint.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "server/model/random_checkpoint.h"
#include "tests/unit/model/model_testing.h"
#include "tests/unit/model/test_files.h"

namespace sparsegdn::model::testing {
namespace {

constexpr char kShard[] = "model.safetensors-00001-of-00001.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";
constexpr char kNorm[] = "model.language_model.norm.weight";

absl::StatusOr<Checkpoint> Open(const TempDir& dir) {
  const auto config = LoadConfig(dir.path());
  if (!config.ok()) return config.status();
  return Checkpoint::Open(dir.path(), *config);
}

// The model with its weights in one file without an index, edited.
absl::StatusOr<Checkpoint> OpenEdited(const TempDir& dir,
                                      const std::function<void(Editable&)>& edit) {
  CopyModel("tiny-gdn", dir);
  Editable weights(dir.Read(kShard));
  edit(weights);
  std::filesystem::remove(dir.File(kIndex));
  std::filesystem::remove(dir.File(kShard));
  dir.Write("model.safetensors", weights.Serialize());
  return Open(dir);
}

void ExpectSame(const Checkpoint& a, const Checkpoint& b) {
  ASSERT_EQ(a.tensors().size(), b.tensors().size());
  for (const auto& [name, tensor] : a.tensors()) {
    const HostTensor& other = b.tensors().at(name);
    EXPECT_EQ(tensor.dtype, other.dtype) << name;
    EXPECT_TRUE(std::equal(tensor.bytes.begin(), tensor.bytes.end(), other.bytes.begin(),
                           other.bytes.end()))
        << name;
  }
}

TEST(CheckpointTest, EveryTextTensorIsTakenExactlyOnce) {
  const TempDir dir;
  CopyModel("tiny-hybrid", dir);
  const ModelConfig config = LoadConfig(dir.path()).value();
  auto checkpoint = Open(dir);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const std::vector<TensorSpec> specs = TextTensors(config);
  EXPECT_EQ(specs.size(), 3 * 14 + 11 + 2u);  // QWEN3.5: 14 per linear, 11 per full, embed, norm
  EXPECT_EQ(checkpoint->tensors().size(), specs.size());
  for (const TensorSpec& spec : specs) {
    EXPECT_EQ(checkpoint->CheckAllTaken().code(), absl::StatusCode::kInternal);
    ASSERT_TRUE(checkpoint->Take(spec.name).ok()) << spec.name;
    EXPECT_EQ(checkpoint->Take(spec.name).status().code(), absl::StatusCode::kInternal);
  }
  EXPECT_TRUE(checkpoint->CheckAllTaken().ok());
  EXPECT_EQ(checkpoint->Take("model.other").status().code(), absl::StatusCode::kInternal);
}

TEST(CheckpointTest, PublishedTensorCountsAreMet) {
  for (const auto& [shape, count] : {std::pair{"4b", 426u}, std::pair{"9b", 427u}}) {
    const ModelConfig config = ParseConfig(ConfigJsonOfShape(shape).value()).value();
    EXPECT_EQ(TextTensors(config).size(), count) << shape;
  }
}

TEST(CheckpointTest, SingleFileShardsAndBothPrefixesGiveTheSameTensors) {
  const TempDir published;
  CopyModel("tiny-gdn", published);
  const auto reference = Open(published);
  ASSERT_TRUE(reference.ok()) << reference.status();

  const TempDir single;
  const auto short_names = OpenEdited(single, [](Editable& weights) {
    for (Editable::Entry& entry : weights.entries) {
      const size_t at = entry.name.find("language_model.");
      if (at != std::string::npos) entry.name.erase(at, 15);
    }
  });
  ASSERT_TRUE(short_names.ok()) << short_names.status();
  EXPECT_EQ(short_names->files(), std::vector<std::string>{"model.safetensors"});
  ExpectSame(*reference, *short_names);

  const TempDir sharded;
  RandomCheckpointOptions options;
  options.config_json = ConfigJsonOfShape("tiny-gdn").value();
  options.out_dir = sharded.path();
  options.seed = 20;
  options.shard_bytes = 300'000;
  ASSERT_TRUE(WriteRandomCheckpoint(options).ok());
  const auto shards = Open(sharded);
  ASSERT_TRUE(shards.ok()) << shards.status();
  EXPECT_GT(shards->files().size(), 3u);
  ExpectSame(*reference, *shards);
}

TEST(CheckpointTest, VisionAndMtpAreSkippedWhateverTheirDtype) {
  const TempDir dir;
  const auto opened = OpenEdited(dir, [](Editable& weights) {
    weights.entries.push_back({"model.visual.patch_embed.weight", "I64", {1}, "12345678"});
    weights.entries.push_back({"mtp.fc.weight", "F8_E4M3", {3}, "abc"});
  });
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_TRUE(opened->warnings().empty());
}

TEST(CheckpointTest, LmHeadBesideATiedEmbeddingIsSkippedWithAWarning) {
  const TempDir dir;
  CopyModel("tiny-hybrid", dir);
  Editable weights(dir.Read(kShard));
  weights.entries.push_back({"lm_head.weight", "BF16", {1}, "ab"});
  std::filesystem::remove(dir.File(kIndex));
  dir.Write("model.safetensors", weights.Serialize());
  const auto opened = Open(dir);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->warnings(),
            std::vector<std::string>{"lm_head.weight is not used: tie_word_embeddings is true"});
  EXPECT_FALSE(opened->tensors().contains("lm_head.weight"));
}

TEST(CheckpointTest, UnalignedDataIsReadRight) {
  const TempDir dir;
  CopyModel("tiny-gdn", dir);
  const auto reference = Open(dir);
  const TempDir shifted;
  const auto opened = OpenEdited(shifted, [](Editable& weights) {
    weights.entries.insert(weights.entries.begin(), {"mtp.pad", "U8", {1}, "x"});
  });
  ASSERT_TRUE(opened.ok()) << opened.status();
  ExpectSame(*reference, *opened);
  const HostTensor& a = reference->tensors().at("model.layers.0.linear_attn.A_log");
  const HostTensor& b = opened->tensors().at("model.layers.0.linear_attn.A_log");
  for (int64_t i = 0; i < a.elements(); ++i) EXPECT_EQ(a.At(i), b.At(i));
}

// One tensor above 4 GB and one above 2 GB, in a sparse file: offsets, counts and elements have 64
// bits, and what lies behind them is found.
TEST(CheckpointTest, TensorsBeyondFourGigabytes) {
  constexpr int64_t kVocab = 8'400'000, kHidden = 128;
  constexpr int64_t kEmbedBytes = kVocab * kHidden * 4, kHeadBytes = kVocab * kHidden * 2;
  static_assert(kEmbedBytes > int64_t{1} << 32 && kHeadBytes > int64_t{1} << 31);
  const TempDir dir;
  CopyModel("tiny-gdn", dir);
  const auto reference = Open(dir);
  ASSERT_TRUE(reference.ok()) << reference.status();
  ModelConfig config = LoadConfig(dir.path()).value();
  config.vocab_size = kVocab;  // past what a config.json may say, to keep the other tensors small
  const Editable weights(dir.Read(kShard));
  nlohmann::ordered_json header;
  std::string rest;
  int64_t end = kEmbedBytes + kHeadBytes;
  for (const Editable::Entry& entry : weights.entries) {
    if (entry.name.ends_with("embed_tokens.weight")) {
      header[entry.name] = {
          {"dtype", "F32"}, {"shape", {kVocab, kHidden}}, {"data_offsets", {0, kEmbedBytes}}};
    } else if (entry.name == "lm_head.weight") {
      header[entry.name] = {{"dtype", "BF16"},
                            {"shape", {kVocab, kHidden}},
                            {"data_offsets", {kEmbedBytes, kEmbedBytes + kHeadBytes}}};
    } else {
      const int64_t begin = end;
      end += std::ssize(entry.bytes);
      header[entry.name] = {
          {"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {begin, end}}};
      rest += entry.bytes;
    }
  }
  const TempDir large;
  const std::string head = SafetensorsFile(header.dump(), "");
  std::ofstream file(large.File("model.safetensors"), std::ios::binary);
  const float last = 1.5f, middle = -2.0f;
  const int64_t middle_at = (int64_t{1} << 29) + 3;  // 2^31 bytes and a few into the embedding
  file << head;
  file.seekp(std::ssize(head) + 4 * middle_at);
  file.write(reinterpret_cast<const char*>(&middle), 4);
  file.seekp(std::ssize(head) + kEmbedBytes - 4);
  file.write(reinterpret_cast<const char*>(&last), 4);
  file.seekp(std::ssize(head) + kEmbedBytes + kHeadBytes - 2);
  file << std::string("\xc0\x3f", 2) << rest;  // 1.5 in BF16
  file.close();
  ASSERT_TRUE(file.good()) << "no room for a sparse file";

  const auto opened = Checkpoint::Open(large.path(), config);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const HostTensor& embed = opened->tensors().at("model.embed_tokens.weight");
  ASSERT_EQ(embed.elements(), kVocab * kHidden);
  EXPECT_EQ(embed.At(middle_at), middle);
  EXPECT_EQ(embed.At(middle_at - 1), 0.0f);
  EXPECT_EQ(embed.At(kVocab * kHidden - 1), last);
  const HostTensor& output = opened->tensors().at("lm_head.weight");
  ASSERT_EQ(output.elements(), kVocab * kHidden);
  EXPECT_EQ(output.At(0), 0.0f);
  EXPECT_EQ(output.At(kVocab * kHidden - 1), last);
  for (const auto& [name, tensor] : reference->tensors()) {
    if (name == "model.embed_tokens.weight" || name == "lm_head.weight") continue;
    const HostTensor& other = opened->tensors().at(name);
    EXPECT_TRUE(std::equal(tensor.bytes.begin(), tensor.bytes.end(), other.bytes.begin(),
                           other.bytes.end()))
        << name;
  }
}

TEST(CheckpointTest, DtypesAreWidened) {
  const uint8_t bf16[] = {0x80, 0x3f, 0x00, 0xc0};  // 1, -2
  const uint8_t f16[] = {0x00, 0x3c, 0x01, 0x00, 0x00, 0xfc, 0xff, 0x7b};
  EXPECT_EQ((HostTensor{DType::kBF16, {2}, bf16}).At(0), 1.0f);
  EXPECT_EQ((HostTensor{DType::kBF16, {2}, bf16}).At(1), -2.0f);
  const HostTensor half{DType::kF16, {4}, f16};
  EXPECT_EQ(half.At(0), 1.0f);
  EXPECT_EQ(half.At(1), 0x1p-24f);  // the smallest subnormal
  EXPECT_EQ(half.At(2), -std::numeric_limits<float>::infinity());
  EXPECT_EQ(half.At(3), 65504.0f);
}

struct Refusal {
  const char* name;
  void (*edit)(Editable&);
  const char* message;
};

class CheckpointRefusalTest : public ::testing::TestWithParam<Refusal> {};

TEST_P(CheckpointRefusalTest, NamesTensorGotWanted) {
  const TempDir dir;
  const auto opened = OpenEdited(dir, GetParam().edit);
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(opened.status().message()), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Rows, CheckpointRefusalTest,
    ::testing::Values(
        Refusal{"missing", [](Editable& w) { w.at(kNorm).name = "mtp.norm.weight"; },
                "tensor model.norm.weight: got nothing, wanted shape [128]"},
        Refusal{"shape",
                [](Editable& w) {
                  w.at(kNorm).shape = {2, 64};
                },
                "tensor model.norm.weight shape: got [2, 64], wanted [128]"},
        Refusal{"extra",
                [](Editable& w) {
                  w.entries.push_back({"model.language_model.norm.bias", "F32", {1}, "abcd"});
                },
                "tensor model.norm.bias: got shape [1], wanted no such tensor"},
        Refusal{"another_family",
                [](Editable& w) {
                  w.entries.push_back({"transformer.wte.weight", "F32", {1}, "abcd"});
                },
                "tensor transformer.wte.weight: got shape [1], wanted no such tensor"},
        Refusal{"both_prefixes",
                [](Editable& w) {
                  Editable::Entry copy = w.at(kNorm);
                  copy.name = "model.norm.weight";
                  w.entries.push_back(copy);
                },
                "tensor model.norm.weight: got it twice (with another prefix), wanted it once"},
        Refusal{"dtype",
                [](Editable& w) {
                  Editable::Entry& norm = w.at(kNorm);
                  norm.dtype = "F8_E4M3";
                  norm.bytes.resize(128);
                },
                "tensor model.language_model.norm.weight dtype: got \"F8_E4M3\", wanted F32, BF16 "
                "or F16"}),
    [](const auto& info) { return info.param.name; });

TEST(CheckpointTest, TruncatedShardsAreRefusedAtEveryLength) {
  const TempDir dir;
  CopyModel("tiny-gdn", dir);
  const std::string whole = dir.Read(kShard);
  for (const size_t length :
       {size_t{0}, size_t{7}, size_t{8}, size_t{100}, whole.size() / 2, whole.size() - 1}) {
    dir.Write(kShard, whole.substr(0, length));
    const auto opened = Open(dir);
    EXPECT_EQ(opened.status().code(), absl::StatusCode::kInvalidArgument) << length;
    EXPECT_EQ(opened.status().message().find(kShard), 0u) << opened.status();
  }
}

TEST(CheckpointTest, IndexFaultsAreRefused) {
  const TempDir dir;
  CopyModel("tiny-gdn", dir);
  const nlohmann::json good = nlohmann::json::parse(dir.Read(kIndex));
  const auto message = [&](const nlohmann::json& index) {
    dir.Write(kIndex, index.dump());
    return std::string(Open(dir).status().message());
  };
  nlohmann::json index = good;
  index["weight_map"][kNorm] = "../secret.safetensors";
  EXPECT_EQ(message(index),
            "model.safetensors.index.json: weight_map \"model.language_model.norm.weight\" = "
            "\"../secret.safetensors\", wanted a file name without a folder");
  index["weight_map"][kNorm] = 5;
  EXPECT_NE(message(index).find("= 5, wanted a file name"), std::string::npos);
  index = good;
  index["weight_map"].erase(kNorm);
  EXPECT_EQ(message(index),
            "tensor model.language_model.norm.weight: got it in "
            "model.safetensors-00001-of-00001.safetensors, wanted it in no file as "
            "model.safetensors.index.json says");
  index = good;
  index["weight_map"][kNorm] = "other.safetensors";
  EXPECT_NE(message(index).find("other.safetensors"), std::string::npos);
  EXPECT_NE(message("text").find("got no object \"weight_map\""), std::string::npos);
  dir.Write(kIndex, "{");
  EXPECT_NE(std::string(Open(dir).status().message()).find("weight_map"), std::string::npos);
}

TEST(CheckpointTest, FolderWithoutWeightsIsNotFound) {
  const TempDir dir;
  dir.Write("config.json", ConfigJsonOfShape("tiny").value());
  const auto opened = Open(dir);
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(opened.status().message().find("model.safetensors"), std::string::npos);
}

}  // namespace
}  // namespace sparsegdn::model::testing
