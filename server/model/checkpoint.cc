#include "server/model/checkpoint.h"

#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/model/json_fields.h"
#include "server/model/narrow.h"
#include "server/model/safetensors_header.h"
#include "server/model/status_macros.h"

namespace sparsegdn::model {
namespace {

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kSingleName[] = "model.safetensors";

using Route = std::map<std::string, std::string>;  // tensor name as written -> file name

bool IsSkipped(std::string_view name) {
  return name.starts_with("model.visual.") || name.starts_with("visual.") ||
         name.starts_with("mtp.");
}

// "model.language_model.X" -> "model.X"; other names stay.
std::string Canonical(const std::string& name) {
  constexpr std::string_view kPublished = "model.language_model.";
  if (!name.starts_with(kPublished)) return name;
  return "model." + name.substr(kPublished.size());
}

// A file name of the index must stay inside the folder.
bool IsPlainFileName(const std::string& name) {
  return !name.empty() && name.size() < 256 && name[0] != '.' &&
         name.find('/') == std::string::npos && name.find('\0') == std::string::npos;
}

absl::StatusOr<Route> ParseIndex(const std::string& text) {
  const nlohmann::json root = nlohmann::json::parse(text, nullptr, false);
  if (!root.is_object() || !root.contains("weight_map") || !root["weight_map"].is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(kIndexName, ": got no object \"weight_map\", wanted one"));
  }
  Route route;
  for (const auto& [tensor, file] : root["weight_map"].items()) {
    if (!file.is_string() || !IsPlainFileName(file.get<std::string>())) {
      return absl::InvalidArgumentError(absl::StrCat(kIndexName, ": weight_map ", Shown(tensor),
                                                     " = ", Shown(file),
                                                     ", wanted a file name without a folder"));
    }
    route[tensor] = file.get<std::string>();
  }
  return route;
}

std::optional<DType> DTypeOf(const std::string& text) {
  if (text == "F32") return DType::kF32;
  if (text == "BF16") return DType::kBF16;
  if (text == "F16") return DType::kF16;
  return std::nullopt;
}

absl::Status InFile(const std::string& file, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(file, ": ", status.message()));
}

}  // namespace

int64_t HostTensor::elements() const {
  return static_cast<int64_t>(bytes.size()) / (dtype == DType::kF32 ? 4 : 2);
}

float HostTensor::At(int64_t i) const {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, bytes.data() + 4 * i, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, bytes.data() + 2 * i, sizeof(bits));
  return dtype == DType::kBF16 ? WidenBf16(bits) : WidenF16(bits);
}

const char* SafetensorsDTypeName(DType dtype) {
  return dtype == DType::kF32 ? "F32" : dtype == DType::kBF16 ? "BF16" : "F16";
}

absl::Status Checkpoint::AddShard(const std::string& dir, const std::string& file,
                                  const Route* route) {
  SPARSEGDN_ASSIGN_OR_RETURN(MappedFile opened, MappedFile::Open(dir + "/" + file));
  shards_.push_back(std::make_unique<MappedFile>(std::move(opened)));
  const std::span<const uint8_t> bytes = shards_.back()->bytes();
  auto entries = ParseSafetensorsHeader(bytes, bytes.size());
  if (!entries.ok()) return InFile(file, entries.status());
  files_.push_back(file);
  for (SafetensorsEntry& entry : *entries) {
    if (IsSkipped(entry.name)) continue;
    if (route != nullptr) {
      auto wanted = route->find(entry.name);
      if (wanted == route->end() || wanted->second != file) {
        return absl::InvalidArgumentError(absl::StrCat(
            "tensor ", entry.name, ": got it in ", file, ", wanted it in ",
            wanted == route->end() ? "no file" : wanted->second, " as ", kIndexName, " says"));
      }
    }
    const std::optional<DType> dtype = DTypeOf(entry.dtype);
    if (!dtype.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", entry.name, " dtype: got ", Shown(entry.dtype), ", wanted F32, BF16 or F16"));
    }
    HostTensor tensor{*dtype, std::move(entry.shape),
                      bytes.subspan(entry.begin, entry.end - entry.begin)};
    if (!tensors_.emplace(Canonical(entry.name), std::move(tensor)).second) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", entry.name, ": got it twice (",
                                                     "with another prefix), wanted it once"));
    }
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::Check(const ModelConfig& config) {
  if (config.tie_word_embeddings && tensors_.erase("lm_head.weight") > 0) {
    warnings_.push_back("lm_head.weight is not used: tie_word_embeddings is true");
  }
  std::set<std::string> wanted;
  for (const TensorSpec& spec : TextTensors(config)) {
    wanted.insert(spec.name);
    auto it = tensors_.find(spec.name);
    if (it == tensors_.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", spec.name, ": got nothing, wanted shape ", ShapeText(spec.shape)));
    }
    if (it->second.shape != spec.shape) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", spec.name, " shape: got ",
                                                     ShapeText(it->second.shape), ", wanted ",
                                                     ShapeText(spec.shape)));
    }
  }
  for (const auto& [name, tensor] : tensors_) {
    if (!wanted.contains(name)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", name, ": got shape ", ShapeText(tensor.shape), ", wanted no such tensor"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& dir, const ModelConfig& config) {
  Checkpoint checkpoint;
  absl::StatusOr<std::string> index = ReadFile(dir + "/" + kIndexName, kMaxIndexBytes);
  if (index.ok()) {
    SPARSEGDN_ASSIGN_OR_RETURN(const Route route, ParseIndex(*index));
    std::set<std::string> files;
    for (const auto& [tensor, file] : route) files.insert(file);
    if (files.size() > kMaxShards) {
      return absl::InvalidArgumentError(
          absl::StrCat(kIndexName, ": got ", files.size(), " shards, wanted at most ", kMaxShards));
    }
    for (const std::string& file : files) {
      SPARSEGDN_RETURN_IF_ERROR(checkpoint.AddShard(dir, file, &route));
    }
  } else if (absl::IsNotFound(index.status())) {
    SPARSEGDN_RETURN_IF_ERROR(checkpoint.AddShard(dir, kSingleName, nullptr));
  } else {
    return index.status();
  }
  SPARSEGDN_RETURN_IF_ERROR(checkpoint.Check(config));
  return checkpoint;
}

absl::StatusOr<HostTensor> Checkpoint::Take(const std::string& name) {
  auto it = tensors_.find(name);
  if (it == tensors_.end()) return absl::InternalError(absl::StrCat("no text tensor ", name));
  if (!taken_.insert(name).second) {
    return absl::InternalError(absl::StrCat("tensor ", name, " was taken twice"));
  }
  return it->second;
}

absl::Status Checkpoint::CheckAllTaken() const {
  for (const auto& [name, tensor] : tensors_) {
    if (!taken_.contains(name)) {
      return absl::InternalError(absl::StrCat("tensor ", name, " was not taken"));
    }
  }
  return absl::OkStatus();
}

}  // namespace sparsegdn::model
