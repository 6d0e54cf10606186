// Input: two texts (frames.h), the index and the cached identity of a model folder whose
// configuration and shards are good. Promise: INVALID_ARGUMENT or NOT_FOUND, or every tensor of the
// model and an identity of 64 hex digits, whatever the cache says.
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "server/model/checkpoint.h"
#include "server/model/config.h"
#include "server/model/model_identity.h"
#include "server/model/random_checkpoint.h"
#include "tests/fuzz/frames.h"
#include "tests/fuzz/fuzz_target.h"

namespace sparsegdn::fuzz {
namespace {

namespace fs = std::filesystem;

constexpr char kConfig[] =
    R"({"model_type":"qwen3_5_text","vocab_size":8,"hidden_size":8,"intermediate_size":8,)"
    R"("num_hidden_layers":1,"num_attention_heads":1,"num_key_value_heads":1,"head_dim":8,)"
    R"("linear_num_key_heads":1,"linear_num_value_heads":1,"linear_key_head_dim":8,)"
    R"("linear_value_head_dim":8,"layer_types":["linear_attention"]})";

// Made once, gone with the process.
class ModelFolder {
 public:
  static const ModelFolder& Get() {
    static const ModelFolder folder;
    return folder;
  }
  ~ModelFolder() { fs::remove_all(dir_); }

  const std::string& dir() const { return dir_; }
  const model::ModelConfig& config() const { return config_; }
  std::string index, cache;  // the good ones

  void Write(const std::string& new_index, const std::string& new_cache) const {
    std::ofstream(dir_ + "/model.safetensors.index.json", std::ios::binary) << new_index;
    std::ofstream(dir_ + "/" + model::kIdentityCacheName, std::ios::binary) << new_cache;
  }

 private:
  ModelFolder() {
    std::string name = (fs::temp_directory_path() / "sparsegdn-fuzz-XXXXXX").string();
    Require(mkdtemp(name.data()) != nullptr, "mkdtemp");
    dir_ = name;
    model::RandomCheckpointOptions options;
    options.config_json = kConfig;
    options.out_dir = dir_;
    options.shard_bytes = 1000;
    const absl::Status written = model::WriteRandomCheckpoint(options);
    Require(written.ok(), written.ToString());
    config_ = model::LoadConfig(dir_).value();
    const auto checkpoint = model::Checkpoint::Open(dir_, config_);
    Require(checkpoint.ok(), checkpoint.status().ToString());
    Require(model::ModelIdentity(dir_, config_, *checkpoint, false, {}).ok(), "identity");
    index = Read("model.safetensors.index.json");
    cache = Read(model::kIdentityCacheName);
  }
  std::string Read(const std::string& name) const {
    std::ifstream file(dir_ + "/" + name, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

  std::string dir_;
  model::ModelConfig config_;
};

std::string InputOf(const std::string& index, const std::string& cache) {
  return JoinFrames({{0, index}, {0, cache}});
}

}  // namespace

int FuzzCheckpointFolder(const uint8_t* data, size_t size) {
  const ModelFolder& folder = ModelFolder::Get();
  std::vector<Frame> texts = SplitFrames({reinterpret_cast<const char*>(data), size});
  texts.resize(2);
  folder.Write(texts[0].bytes, texts[1].bytes);
  const auto checkpoint = model::Checkpoint::Open(folder.dir(), folder.config());
  NoteOutcome(checkpoint.status());
  if (!checkpoint.ok()) {
    RequireRefusal(checkpoint.status(),
                   {absl::StatusCode::kInvalidArgument, absl::StatusCode::kNotFound}, 4096);
    return 0;
  }
  const auto identity = model::ModelIdentity(folder.dir(), folder.config(), *checkpoint, false, {});
  Require(identity.ok(), identity.status().ToString());
  Require(identity->size() == 64 &&
              identity->find_first_not_of("0123456789abcdef") == std::string::npos,
          "an identity that is none");
  return 0;
}

std::vector<std::string> CheckpointFolderSeeds() {
  const ModelFolder& folder = ModelFolder::Get();
  const std::string deep = Nested(kDeep);
  return {InputOf(folder.index, folder.cache),
          InputOf(folder.index, ""),
          InputOf(folder.index, R"({"identity":")" + std::string(64, 'a') +
                                    R"(","round_a_log":false,"files":)" + deep + "}"),
          InputOf(folder.index, R"({"identity":")" + std::string(64, 'a') + R"(","round_a_log":)" +
                                    deep + R"(,"files":[]})"),
          InputOf(folder.index, deep),
          InputOf(R"({"weight_map":)" + deep + "}", folder.cache),
          InputOf(R"({"weight_map":{"a":)" + deep + "}}", folder.cache),
          InputOf(R"({"weight_map":{"a":"../x"}})", folder.cache),
          InputOf(R"({"weight_map":{"a":"absent.safetensors"}})", folder.cache)};
}

}  // namespace sparsegdn::fuzz
