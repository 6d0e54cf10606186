#include "server/engine/import_manifest.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/engine/errors.h"

namespace sparsegdn::engine {
namespace {

struct Expected {
  const char* suffix = nullptr;  // of the name
  int32_t* id = nullptr;         // where the tensor's id goes
  bool linear = false;           // kind of layer
  std::vector<ExportDType> dtypes;
  std::vector<int64_t> shape;
  int64_t position = 0;
  int64_t kept_bytes = 0;
};

absl::StatusOr<Expected> ExpectedOf(const TensorInfo& tensor, const std::string& field,
                                    const Layout& layout, int64_t position, LayerTensors& ids) {
  const int64_t kv_bytes = position * layout.kv_row_bytes();
  const std::vector<int64_t> kv_shape = {position, layout.num_kv_heads, layout.attention_head_dim};
  int64_t rows = layout.dim_k, columns = layout.dim_v;
  if (tensor.state_layout == StateLayout::kValueMajor) std::swap(rows, columns);
  switch (tensor.kind) {
    case TensorKind::kRecurrentState:
      return Expected{"recurrent_state",
                      &ids.recurrent,
                      true,
                      {ExportDType::kF32, ExportDType::kBF16, ExportDType::kF8E4M3},
                      {layout.heads, rows, columns},
                      position,
                      layout.state_elements() * 4};
    case TensorKind::kRecurrentStateScale:
      return Expected{"recurrent_state_scale", &ids.scale, true, {ExportDType::kF32},
                      {layout.heads, rows},    position,   0};
    case TensorKind::kConvState:
      return Expected{
          "conv_state",
          &ids.conv,
          true,
          {layout.compute},
          {layout.conv_channels, tensor.conv_layout == ConvLayout::kThreeColumns ? 3 : 4},
          position,
          layout.conv_elements() * ElementBytes(layout.compute)};
    case TensorKind::kKey:
      return Expected{"key",    &ids.key, false,   {ExportDType::kF32, ExportDType::kBF16},
                      kv_shape, 0,        kv_bytes};
    case TensorKind::kValue:
      return Expected{"value",  &ids.value, false,   {ExportDType::kF32, ExportDType::kBF16},
                      kv_shape, 0,          kv_bytes};
    case TensorKind::kLogits:
    case TensorKind::kTopKIds:
    case TensorKind::kTopKLogits:
    case TensorKind::kPromptLogprobs:
      break;
  }
  return Invalid(field + ".kind",
                 "wanted a recurrent state, its scale, a conv state, key or value");
}

absl::Status CheckTensor(const TensorInfo& tensor, const std::string& field,
                         const model::ModelInfo& model, const Expected& expected) {
  const bool linear = model.layers[tensor.layer] == model::LayerKind::kLinear;
  if (linear != expected.linear) {
    return Invalid(field + ".kind",
                   absl::StrCat("got ", expected.suffix, " for layer ", tensor.layer,
                                ", which is a ", linear ? "linear" : "full", " attention layer"));
  }
  const std::string name = absl::StrCat("layers.", tensor.layer, ".", expected.suffix);
  if (tensor.name != name) {
    return Invalid(field + ".name", absl::StrCat("wanted ", name));
  }
  if (*expected.id >= 0) {
    return Invalid(field + ".name", absl::StrCat(name, " is there twice"));
  }
  if (std::find(expected.dtypes.begin(), expected.dtypes.end(), tensor.dtype) ==
      expected.dtypes.end()) {
    return Invalid(field + ".dtype", absl::StrCat("got ", static_cast<int>(tensor.dtype),
                                                  ", which ", name, " cannot have here"));
  }
  if (tensor.shape != expected.shape) {
    return Invalid(field + ".shape",
                   absl::StrCat("got [", absl::StrJoin(tensor.shape, ", "), "], wanted [",
                                absl::StrJoin(expected.shape, ", "), "]"));
  }
  if (tensor.position != expected.position) {
    return Invalid(field + ".position",
                   absl::StrCat("got ", tensor.position, ", wanted ", expected.position));
  }
  uint64_t bytes = static_cast<uint64_t>(ElementBytes(tensor.dtype));
  for (const int64_t extent : tensor.shape) bytes *= static_cast<uint64_t>(extent);
  if (tensor.bytes != bytes) {
    return Invalid(field + ".bytes", absl::StrCat("got ", tensor.bytes, ", wanted ", bytes));
  }
  return absl::OkStatus();
}

absl::Status CheckHeader(const Manifest& manifest, const model::ModelInfo& model) {
  if (manifest.model_identity != model.identity) {
    return Refuse(
        absl::StatusCode::kFailedPrecondition, "manifest.model_identity", "MODEL_MISMATCH",
        absl::StrCat("the snapshot is of another model; this server holds ", model.identity));
  }
  if (manifest.format_version != kSnapshotFormatVersion) {
    return Refuse(
        absl::StatusCode::kFailedPrecondition, "manifest.format_version", "FORMAT_MISMATCH",
        absl::StrCat("got ", manifest.format_version, ", wanted ", kSnapshotFormatVersion));
  }
  if (manifest.position < 0 || manifest.position > model.max_context_tokens) {
    return Invalid("manifest.position", absl::StrCat("got ", manifest.position, ", wanted 0 to ",
                                                     model.max_context_tokens));
  }
  const size_t most = model.layers.size() * 3;
  if (manifest.tensors.size() > most) {
    return Invalid("manifest.tensors",
                   absl::StrCat("got ", manifest.tensors.size(), ", wanted at most ", most));
  }
  return absl::OkStatus();
}

absl::Status CheckComplete(const ImportPlan& plan, const Layout& layout) {
  const auto missing = [](int32_t layer, const char* what) {
    return Invalid("manifest.tensors", absl::StrCat("layers.", layer, ".", what, " is missing"));
  };
  for (const int32_t layer : layout.linear_layers) {
    const LayerTensors& ids = plan.layers[layer];
    if (ids.recurrent < 0) return missing(layer, "recurrent_state");
    if (ids.conv < 0) return missing(layer, "conv_state");
    const bool f8 = plan.tensors[ids.recurrent].dtype == ExportDType::kF8E4M3;
    if (f8 && ids.scale < 0) return missing(layer, "recurrent_state_scale");
    if (!f8 && ids.scale >= 0) {
      return Invalid("manifest.tensors",
                     absl::StrCat("layers.", layer, ".recurrent_state_scale without an FP8 state"));
    }
    if (f8 && plan.tensors[ids.scale].state_layout != plan.tensors[ids.recurrent].state_layout) {
      return Invalid("manifest.tensors",
                     absl::StrCat("layers.", layer, ": state and scale differ in layout"));
    }
  }
  for (const int32_t layer : layout.full_layers) {
    if (plan.layers[layer].key < 0) return missing(layer, "key");
    if (plan.layers[layer].value < 0) return missing(layer, "value");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ImportPlan> PlanImport(const Manifest& manifest, const model::ModelInfo& model,
                                      const Layout& layout) {
  if (absl::Status s = CheckHeader(manifest, model); !s.ok()) return s;
  ImportPlan plan;
  plan.position = manifest.position;
  plan.tensors = manifest.tensors;
  plan.layers.resize(model.layers.size());
  uint64_t total = 0;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const TensorInfo& tensor = plan.tensors[i];
    const std::string field = absl::StrCat("manifest.tensors[", i, "]");
    if (tensor.layer < 0 || tensor.layer >= layout.num_layers) {
      return Invalid(field + ".layer",
                     absl::StrCat("got ", tensor.layer, ", wanted 0 to ", layout.num_layers - 1));
    }
    const absl::StatusOr<Expected> expected =
        ExpectedOf(tensor, field, layout, plan.position, plan.layers[tensor.layer]);
    if (!expected.ok()) return expected.status();
    if (absl::Status s = CheckTensor(tensor, field, model, *expected); !s.ok()) return s;
    *expected->id = static_cast<int32_t>(i);
    total += tensor.bytes;
    plan.total_held_bytes += std::max(static_cast<int64_t>(tensor.bytes), expected->kept_bytes);
  }
  if (absl::Status s = CheckComplete(plan, layout); !s.ok()) return s;
  if (manifest.total_bytes != total) {
    return Invalid("manifest.total_bytes",
                   absl::StrCat("got ", manifest.total_bytes, ", wanted ", total));
  }
  return plan;
}

}  // namespace sparsegdn::engine
