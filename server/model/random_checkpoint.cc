#include "server/model/random_checkpoint.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/model/config.h"
#include "server/model/files.h"
#include "server/model/narrow.h"
#include "server/model/random_weights.h"
#include "server/model/status_macros.h"
#include "server/model/weight_specs.h"

namespace sparsegdn::model {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little endian");

constexpr size_t kBufferElements = size_t{1} << 18;

struct Placed {
  TensorSpec spec;
  std::string name;  // as published
  DType dtype = DType::kBF16;
  int64_t bytes = 0;
};
using Shard = std::vector<Placed>;

std::string PublishedName(const std::string& canonical) {
  constexpr std::string_view kPrefix = "model.";
  if (canonical.starts_with(kPrefix)) {
    return absl::StrCat("model.language_model.", canonical.substr(kPrefix.size()));
  }
  return canonical;
}

std::vector<Shard> Place(const ModelConfig& config, const RandomCheckpointOptions& options) {
  std::vector<Shard> shards(1);
  int64_t filled = 0;
  for (TensorSpec& spec : TextTensors(config)) {
    Placed p;
    p.name = PublishedName(spec.name);
    const bool wide = spec.role == WeightRole::kALog || spec.role == WeightRole::kGateNorm;
    p.dtype = wide ? DType::kF32 : options.dtype;
    p.bytes = spec.elements() * (p.dtype == DType::kF32 ? 4 : 2);
    p.spec = std::move(spec);
    if (filled > 0 && filled + p.bytes > options.shard_bytes) {
      shards.emplace_back();
      filled = 0;
    }
    filled += p.bytes;
    shards.back().push_back(std::move(p));
  }
  return shards;
}

std::string HeaderOf(const Shard& shard) {
  nlohmann::ordered_json header = {{"__metadata__", {{"format", "pt"}}}};
  int64_t offset = 0;
  for (const Placed& p : shard) {
    header[p.name] = {{"dtype", p.dtype == DType::kF32 ? "F32" : "BF16"},
                      {"shape", p.spec.shape},
                      {"data_offsets", {offset, offset + p.bytes}}};
    offset += p.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // keeps the data eight-byte aligned
  return text;
}

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

absl::Status Write(std::FILE* file, const void* data, size_t bytes, const std::string& path) {
  if (std::fwrite(data, 1, bytes, file) == bytes) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
}

absl::Status WriteTensor(std::FILE* file, const Placed& p, size_t num_layers, uint64_t seed,
                         const std::string& path) {
  WeightStream stream(p.spec, num_layers, seed);
  std::vector<float> drawn(kBufferElements);
  std::vector<uint16_t> narrow(kBufferElements);
  for (int64_t left = p.spec.elements(); left > 0;) {
    const size_t n = static_cast<size_t>(std::min<int64_t>(left, kBufferElements));
    stream.Fill(std::span(drawn).first(n));
    if (p.dtype == DType::kF32) {
      SPARSEGDN_RETURN_IF_ERROR(Write(file, drawn.data(), n * sizeof(float), path));
    } else {
      std::transform(drawn.begin(), drawn.begin() + n, narrow.begin(), NarrowBf16);
      SPARSEGDN_RETURN_IF_ERROR(Write(file, narrow.data(), n * sizeof(uint16_t), path));
    }
    left -= static_cast<int64_t>(n);
  }
  return absl::OkStatus();
}

absl::Status WriteShard(const Shard& shard, const std::string& path, size_t num_layers,
                        uint64_t seed, const std::function<void(int64_t)>& wrote) {
  File file(std::fopen(path.c_str(), "wb"));
  if (file == nullptr) return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", path));
  const std::string header = HeaderOf(shard);
  const uint64_t length = header.size();
  SPARSEGDN_RETURN_IF_ERROR(Write(file.get(), &length, sizeof(length), path));
  SPARSEGDN_RETURN_IF_ERROR(Write(file.get(), header.data(), header.size(), path));
  for (const Placed& p : shard) {
    SPARSEGDN_RETURN_IF_ERROR(WriteTensor(file.get(), p, num_layers, seed, path));
    wrote(p.bytes);
  }
  if (std::fflush(file.get()) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
  }
  return absl::OkStatus();
}

absl::Status PrepareFolder(const std::string& dir) {
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  if (error) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot create folder ", dir, ": ", error.message()));
  }
  if (std::filesystem::exists(dir + "/config.json", error)) {
    return absl::AlreadyExistsError(absl::StrCat(dir, "/config.json is there already"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteRandomCheckpoint(const RandomCheckpointOptions& options) {
  if (options.dtype != DType::kBF16 && options.dtype != DType::kF32) {
    return absl::InvalidArgumentError("dtype: got F16, wanted BF16 or F32");
  }
  if (options.shard_bytes <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("shard_bytes = ", options.shard_bytes, ", wanted more than 0"));
  }
  SPARSEGDN_ASSIGN_OR_RETURN(const ModelConfig config, ParseConfig(options.config_json));
  SPARSEGDN_RETURN_IF_ERROR(PrepareFolder(options.out_dir));
  const std::vector<Shard> shards = Place(config, options);
  int64_t total = 0, done = 0;
  for (const Shard& shard : shards) {
    for (const Placed& p : shard) total += p.bytes;
  }
  nlohmann::ordered_json weight_map;
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name =
        absl::StrFormat("model.safetensors-%05d-of-%05d.safetensors", i + 1, shards.size());
    for (const Placed& p : shards[i]) weight_map[p.name] = name;
    SPARSEGDN_RETURN_IF_ERROR(WriteShard(shards[i], options.out_dir + "/" + name,
                                         config.layers.size(), options.seed, [&](int64_t bytes) {
                                           done += bytes;
                                           if (options.progress) options.progress(done, total);
                                         }));
  }
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", total}}},
                                        {"weight_map", weight_map}};
  SPARSEGDN_RETURN_IF_ERROR(
      WriteFileAtomically(options.out_dir + "/model.safetensors.index.json", index.dump(2) + "\n"));
  // Last, because a folder with a config.json counts as a model.
  return WriteFileAtomically(options.out_dir + "/config.json", options.config_json);
}

}  // namespace sparsegdn::model
