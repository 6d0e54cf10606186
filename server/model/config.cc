#include "server/model/config.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/model/files.h"
#include "server/model/json_fields.h"
#include "server/model/status_macros.h"
#include "sparsegdn/ops.h"

namespace sparsegdn::model {
namespace {

// Upper limits: an order of magnitude above any published size, low enough that no product of
// two of them overflows int64.
constexpr int64_t kMaxDim = 1 << 20;
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxHeads = 4096;
constexpr int64_t kMaxPositions = int64_t{1} << 31;

absl::Status WantText(const JsonFields& f, const char* key, const std::string& wanted) {
  SPARSEGDN_ASSIGN_OR_RETURN(std::string got, f.String(key, wanted));
  if (got == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(f.Name(key), " = ", f.Got(key), ", wanted \"", wanted, "\""));
}

absl::Status WantBool(const JsonFields& f, const char* key, bool wanted) {
  SPARSEGDN_ASSIGN_OR_RETURN(bool got, f.Bool(key, wanted));
  if (got == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(f.Name(key), " = ", f.Got(key), ", wanted ",
                                                 wanted ? "true" : "false", " or nothing"));
}

absl::StatusOr<LayerKind> ParseLayerKind(const nlohmann::json& value, const std::string& name) {
  if (value == "linear_attention") return LayerKind::kLinear;
  if (value == "full_attention") return LayerKind::kFull;
  return absl::InvalidArgumentError(absl::StrCat(
      name, " = ", Shown(value), ", wanted \"linear_attention\" or \"full_attention\""));
}

absl::Status ParseLayers(const JsonFields& f, ModelConfig& c) {
  SPARSEGDN_ASSIGN_OR_RETURN(int64_t count, f.Int("num_hidden_layers", 1, kMaxLayers));
  if (!f.Has("layer_types")) {
    // Every layer is linear when the interval exceeds the depth.
    SPARSEGDN_ASSIGN_OR_RETURN(int64_t interval,
                               f.Int("full_attention_interval", 1, kMaxLayers + 1, 4));
    for (int64_t i = 0; i < count; ++i) {
      c.layers.push_back((i + 1) % interval == 0 ? LayerKind::kFull : LayerKind::kLinear);
    }
    return absl::OkStatus();
  }
  const nlohmann::json& types = f.object()["layer_types"];
  if (!types.is_array() || static_cast<int64_t>(types.size()) != count) {
    return absl::InvalidArgumentError(absl::StrCat(f.Name("layer_types"), " = ",
                                                   f.Got("layer_types"), ", wanted an array of ",
                                                   count, " (num_hidden_layers)"));
  }
  for (size_t i = 0; i < types.size(); ++i) {
    SPARSEGDN_ASSIGN_OR_RETURN(
        LayerKind kind, ParseLayerKind(types[i], absl::StrCat(f.Name("layer_types"), "[", i, "]")));
    c.layers.push_back(kind);
  }
  return absl::OkStatus();
}

// rope_parameters (current files) before rope_scaling and the top-level fields (older ones).
absl::Status ParseRope(const JsonFields& f, ModelConfig& c) {
  SPARSEGDN_ASSIGN_OR_RETURN(c.rope_theta, f.Number("rope_theta", 1.0, 1e15, 1e4));
  c.rope_theta_given = f.Has("rope_theta");
  SPARSEGDN_ASSIGN_OR_RETURN(c.partial_rotary_factor,
                             f.Number("partial_rotary_factor", 0.0, 1.0, 0.25));
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!f.Has(key)) continue;
    if (!f.object()[key].is_object()) {
      return absl::InvalidArgumentError(
          absl::StrCat(f.Name(key), " = ", f.Got(key), ", wanted an object"));
    }
    const JsonFields rope(f.object()[key], f.Name(key) + ".");
    SPARSEGDN_RETURN_IF_ERROR(WantText(rope, "rope_type", "default"));
    if (!rope.Has("rope_type")) SPARSEGDN_RETURN_IF_ERROR(WantText(rope, "type", "default"));
    SPARSEGDN_ASSIGN_OR_RETURN(c.rope_theta, rope.Number("rope_theta", 1.0, 1e15, c.rope_theta));
    c.rope_theta_given = c.rope_theta_given || rope.Has("rope_theta");
    SPARSEGDN_ASSIGN_OR_RETURN(c.partial_rotary_factor, rope.Number("partial_rotary_factor", 0.0,
                                                                    1.0, c.partial_rotary_factor));
  }
  return absl::OkStatus();
}

absl::Status ParseAttention(const JsonFields& f, ModelConfig& c) {
  SPARSEGDN_ASSIGN_OR_RETURN(c.num_q_heads, f.Int("num_attention_heads", 1, kMaxHeads));
  SPARSEGDN_ASSIGN_OR_RETURN(c.num_kv_heads,
                             f.Int("num_key_value_heads", 1, kMaxHeads, c.num_q_heads));
  SPARSEGDN_ASSIGN_OR_RETURN(c.head_dim, f.Int("head_dim", 1, 1024, 256));
  SPARSEGDN_RETURN_IF_ERROR(ParseRope(f, c));
  if (c.num_q_heads % c.num_kv_heads != 0 || c.num_q_heads / c.num_kv_heads > kMaxQueryGroup) {
    return absl::InvalidArgumentError(absl::StrCat(
        f.Name("num_attention_heads"), " = ", c.num_q_heads,
        ", wanted at most 64 times and a multiple of ", "num_key_value_heads = ", c.num_kv_heads));
  }
  if (c.rotary_dim() % 2 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(f.Name("partial_rotary_factor"),
                                                   " * head_dim = ", c.rotary_dim(),
                                                   ", wanted an even number"));
  }
  SPARSEGDN_RETURN_IF_ERROR(WantBool(f, "attention_bias", false));
  SPARSEGDN_RETURN_IF_ERROR(WantBool(f, "attn_output_gate", true));
  return WantText(f, "output_gate_type", "swish");
}

absl::Status ParseGdn(const JsonFields& f, ModelConfig& c) {
  SPARSEGDN_ASSIGN_OR_RETURN(c.gdn.num_k_heads, f.Int("linear_num_key_heads", 1, kMaxHeads));
  SPARSEGDN_ASSIGN_OR_RETURN(c.gdn.num_v_heads, f.Int("linear_num_value_heads", 1, kMaxHeads));
  SPARSEGDN_ASSIGN_OR_RETURN(c.gdn.head_dim_k, f.Int("linear_key_head_dim", 1, kMaxHeadDim, 128));
  SPARSEGDN_ASSIGN_OR_RETURN(c.gdn.head_dim_v, f.Int("linear_value_head_dim", 1, kMaxHeadDim, 128));
  SPARSEGDN_ASSIGN_OR_RETURN(c.conv_kernel, f.Int("linear_conv_kernel_dim", 4, 4, 4));
  const int32_t hk = c.gdn.num_k_heads, hv = c.gdn.num_v_heads;
  if (hv % hk != 0 || hv / hk > 4) {
    return absl::InvalidArgumentError(absl::StrCat(f.Name("linear_num_value_heads"), " = ", hv,
                                                   ", wanted 1, 2, 3 or 4 times ",
                                                   "linear_num_key_heads = ", hk));
  }
  return absl::OkStatus();
}

absl::Status ParseTie(const JsonFields& top, const JsonFields& text, ModelConfig& c) {
  SPARSEGDN_ASSIGN_OR_RETURN(const bool outer, top.Bool("tie_word_embeddings", false));
  SPARSEGDN_ASSIGN_OR_RETURN(c.tie_word_embeddings, text.Bool("tie_word_embeddings", outer));
  if (top.Has("tie_word_embeddings") && c.tie_word_embeddings != outer) {
    return absl::InvalidArgumentError(absl::StrCat(
        text.Name("tie_word_embeddings"), " = ", text.Got("tie_word_embeddings"), ", wanted ",
        top.Got("tie_word_embeddings"), " as in ", top.Name("tie_word_embeddings")));
  }
  return absl::OkStatus();
}

absl::Status CheckModelType(const JsonFields& f) {
  SPARSEGDN_ASSIGN_OR_RETURN(std::string type, f.String("model_type", "qwen3_5_text"));
  if (type == "qwen3_5" || type == "qwen3_5_text") return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(f.Name("model_type"), " = ", f.Got("model_type"),
                                                 ", wanted \"qwen3_5\" or \"qwen3_5_text\""));
}

}  // namespace

const char* LayerKindName(LayerKind kind) {
  return kind == LayerKind::kLinear ? "linear_attention" : "full_attention";
}

absl::StatusOr<ModelConfig> ParseConfig(std::string_view text) {
  const nlohmann::json root = nlohmann::json::parse(text.begin(), text.end(), nullptr, false);
  if (!root.is_object()) {
    return absl::InvalidArgumentError("config.json: got no JSON object, wanted one");
  }
  const JsonFields top(root, "config.json: ");
  SPARSEGDN_RETURN_IF_ERROR(CheckModelType(top));
  const bool nested = top.Has("text_config");
  if (nested && !root["text_config"].is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(top.Name("text_config"), " = ", top.Got("text_config"), ", wanted an object"));
  }
  const JsonFields f(nested ? root["text_config"] : root,
                     nested ? "config.json: text_config." : "config.json: ");
  SPARSEGDN_RETURN_IF_ERROR(CheckModelType(f));

  ModelConfig c;
  SPARSEGDN_ASSIGN_OR_RETURN(c.vocab_size, f.Int("vocab_size", 1, kMaxDim));
  SPARSEGDN_ASSIGN_OR_RETURN(c.hidden_size, f.Int("hidden_size", 1, kMaxDim));
  SPARSEGDN_ASSIGN_OR_RETURN(c.intermediate_size, f.Int("intermediate_size", 1, kMaxDim));
  SPARSEGDN_ASSIGN_OR_RETURN(c.max_position_embeddings,
                             f.Int("max_position_embeddings", 1, kMaxPositions, 32768));
  SPARSEGDN_ASSIGN_OR_RETURN(c.rms_norm_eps, f.Number("rms_norm_eps", 0.0, 1.0, 1e-6));
  SPARSEGDN_RETURN_IF_ERROR(WantText(f, "hidden_act", "silu"));
  SPARSEGDN_RETURN_IF_ERROR(ParseLayers(f, c));
  SPARSEGDN_RETURN_IF_ERROR(ParseAttention(f, c));
  SPARSEGDN_RETURN_IF_ERROR(ParseGdn(f, c));
  SPARSEGDN_RETURN_IF_ERROR(ParseTie(top, f, c));
  return c;
}

absl::StatusOr<ModelConfig> LoadConfig(const std::string& dir) {
  SPARSEGDN_ASSIGN_OR_RETURN(std::string text, ReadFile(dir + "/config.json", kMaxConfigBytes));
  return ParseConfig(text);
}

}  // namespace sparsegdn::model
