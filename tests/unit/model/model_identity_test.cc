// Goal: the identity is the documented hash and changes with everything it covers; the cache is
// used only while no file has changed.
#include "server/model/model_identity.h"

#include <gtest/gtest.h>
#include <openssl/evp.h>

#include <filesystem>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/model/random_checkpoint.h"
#include "tests/unit/model/model_testing.h"
#include "tests/unit/model/test_files.h"

namespace sparsegdn::model::testing {
namespace {

constexpr char kShard[] = "model.safetensors-00001-of-00001.safetensors";

std::string Identity(const std::string& dir, bool round_a_log = false) {
  const ModelConfig config = LoadConfig(dir).value();
  const Checkpoint checkpoint = Checkpoint::Open(dir, config).value();
  return ComputeModelIdentity(config, checkpoint, round_a_log, nullptr).value();
}

std::string Cached(const std::string& dir, bool round_a_log, int* computed) {
  const ModelConfig config = LoadConfig(dir).value();
  const Checkpoint checkpoint = Checkpoint::Open(dir, config).value();
  const auto count = [&](int64_t done, int64_t total) { *computed += done == total; };
  return ModelIdentity(dir, config, checkpoint, round_a_log, count).value();
}

TEST(ModelIdentityTest, ConfigurationLinesAreSpelledOut) {
  const ModelConfig config = ParseConfig(ConfigJsonOfShape("tiny").value()).value();
  EXPECT_EQ(IdentityConfig(config),
            "attention_head_dim=64\n"
            "conv_kernel=4\n"
            "eps=9.9999999999999995e-07\n"
            "head_dim_k=128\n"
            "head_dim_v=128\n"
            "hidden_size=128\n"
            "intermediate_size=256\n"
            "layer_types=linear_attention,linear_attention,linear_attention,full_attention\n"
            "num_k_heads=2\n"
            "num_kv_heads=2\n"
            "num_q_heads=4\n"
            "num_v_heads=4\n"
            "partial_rotary_factor=0.25\n"
            "rope_theta=10000000\n"
            "tie_word_embeddings=true\n"
            "vocab_size=512\n");
}

// The same hash written down a second time, over one string.
TEST(ModelIdentityTest, IsTheDocumentedHash) {
  const std::string dir = ModelDir("tiny-gdn");
  const ModelConfig config = LoadConfig(dir).value();
  const Checkpoint checkpoint = Checkpoint::Open(dir, config).value();
  std::string text = "sparsegdn-model-identity-1\n" + IdentityConfig(config);
  text += "round_a_log=false\n";
  std::string previous;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    EXPECT_LT(previous, name);  // bytewise sorted
    previous = name;
    EXPECT_EQ(name.find("language_model"), std::string::npos);
    text += name;
    text += '\0';
    text += tensor.dtype == DType::kF32 ? "F32" : "BF16";
    text += '\0';
    for (size_t i = 0; i < tensor.shape.size(); ++i) {
      absl::StrAppend(&text, i > 0 ? "," : "", tensor.shape[i]);
    }
    text += '\0';
    for (int i = 0; i < 8; ++i) {
      text += static_cast<char>(uint64_t{tensor.bytes.size()} >> (8 * i));
    }
    text.append(tensor.bytes.begin(), tensor.bytes.end());
  }
  unsigned char digest[32];
  ASSERT_EQ(EVP_Digest(text.data(), text.size(), digest, nullptr, EVP_sha256(), nullptr), 1);
  const std::string wanted =
      absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(digest), 32));
  EXPECT_EQ(Identity(dir), wanted);
}

TEST(ModelIdentityTest, DependsOnContentAlone) {
  const std::string hybrid = Identity(ModelDir("tiny-hybrid"));
  EXPECT_EQ(hybrid.size(), 64u);
  EXPECT_NE(hybrid, Identity(ModelDir("tiny-hybrid"), true));
  EXPECT_NE(hybrid, Identity(ModelDir("tiny-gdn")));
  // Shards, prefixes and skipped tensors do not matter; a bit of a weight does.
  const TempDir dir;
  CopyModel("tiny-hybrid", dir);
  Editable weights(dir.Read(kShard));
  for (Editable::Entry& entry : weights.entries) {
    if (const size_t at = entry.name.find("language_model."); at != std::string::npos) {
      entry.name.erase(at, 15);
    }
  }
  std::swap(weights.entries.front(), weights.entries.back());
  weights.entries.push_back({"mtp.fc.weight", "F32", {1}, "abcd"});
  std::filesystem::remove(dir.File("model.safetensors.index.json"));
  std::filesystem::remove(dir.File(kShard));
  dir.Write("model.safetensors", weights.Serialize());
  EXPECT_EQ(Identity(dir.path()), hybrid);
  weights.at("model.norm.weight").bytes[0] ^= 1;
  dir.Write("model.safetensors", weights.Serialize());
  EXPECT_NE(Identity(dir.path()), hybrid);
}

TEST(ModelIdentityTest, CacheIsUsedUntilAFileChanges) {
  const TempDir dir;
  CopyModel("tiny-gdn", dir);
  int computed = 0;
  const std::string identity = Cached(dir.path(), false, &computed);
  EXPECT_EQ(computed, 1);
  EXPECT_EQ(Cached(dir.path(), false, &computed), identity);
  EXPECT_EQ(computed, 1);
  EXPECT_NE(Cached(dir.path(), true, &computed), identity);  // another switch
  EXPECT_EQ(computed, 2);
  EXPECT_EQ(Cached(dir.path(), false, &computed), identity);
  EXPECT_EQ(computed, 3);
  std::filesystem::last_write_time(
      dir.File(kShard), std::filesystem::file_time_type::clock::now() + std::chrono::seconds(5));
  EXPECT_EQ(Cached(dir.path(), false, &computed), identity);
  EXPECT_EQ(computed, 4);
}

TEST(ModelIdentityTest, BrokenCacheIsComputedAnew) {
  const TempDir dir;
  CopyModel("tiny-gdn", dir);
  int computed = 0;
  const std::string identity = Cached(dir.path(), false, &computed);
  const std::string good = dir.Read(kIdentityCacheName);
  // So deep that to copy it runs out of stack.
  const std::string deep = std::string(500'000, '[') + std::string(500'000, ']');
  const std::string head = "{\"identity\": \"" + std::string(64, 'a') + "\", \"round_a_log\": ";
  for (const std::string& text :
       {std::string("{"), std::string("[]"), std::string("{\"identity\": 5}"),
        head + "false, \"files\": " + deep + "}", head + deep + ", \"files\": []}",
        good.substr(0, good.size() / 2), std::string(3 << 20, ' ')}) {
    dir.Write(kIdentityCacheName, text);
    computed = 0;
    EXPECT_EQ(Cached(dir.path(), false, &computed), identity);
    EXPECT_EQ(computed, 1);
  }
  // Well-formed but no identity: not to be handed on.
  nlohmann::json cache = nlohmann::json::parse(good);
  cache["identity"] = std::string(64, 'G');
  dir.Write(kIdentityCacheName, cache.dump());
  computed = 0;
  EXPECT_EQ(Cached(dir.path(), false, &computed), identity);
  EXPECT_EQ(computed, 1);
}

}  // namespace
}  // namespace sparsegdn::model::testing
