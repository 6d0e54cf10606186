#include "server/model/qwen35_weights.h"

#include <cmath>
#include <string>

#include "server/model/narrow.h"
#include "server/model/status_macros.h"
#include "server/model/weight_specs.h"

namespace sparsegdn::model {
namespace {

class Uploader {
 public:
  Uploader(Checkpoint& checkpoint, OpTable& ops) : checkpoint_(checkpoint), ops_(ops) {}

  absl::StatusOr<const float*> Vector(const std::vector<float>& values, const std::string& name) {
    const size_t bytes = values.size() * sizeof(float);
    SPARSEGDN_ASSIGN_OR_RETURN(void* memory, ops_.Allocate(bytes, name));
    SPARSEGDN_RETURN_IF_ERROR(ops_.CopyIn(memory, values.data(), bytes));
    return static_cast<const float*>(memory);
  }

  // A small tensor widened to FP32.
  absl::StatusOr<std::vector<float>> Values(const std::string& name) {
    SPARSEGDN_ASSIGN_OR_RETURN(const HostTensor tensor, checkpoint_.Take(name));
    std::vector<float> values(static_cast<size_t>(tensor.elements()));
    for (size_t i = 0; i < values.size(); ++i) values[i] = tensor.At(static_cast<int64_t>(i));
    return values;
  }

  absl::StatusOr<const float*> Vector(const std::string& name, bool round = false) {
    SPARSEGDN_ASSIGN_OR_RETURN(std::vector<float> values, Values(name));
    if (round) {
      for (float& value : values) value = RoundToBf16(value);
    }
    return Vector(values, name);
  }

  absl::StatusOr<const Weight*> Matrix(const std::vector<std::string>& names) {
    std::vector<HostTensor> parts;
    for (const std::string& name : names) {
      SPARSEGDN_ASSIGN_OR_RETURN(HostTensor part, checkpoint_.Take(name));
      parts.push_back(std::move(part));
    }
    return ops_.UploadMatrix(parts);
  }

  absl::StatusOr<LinearWeights> Linear(const ModelConfig& c, const std::string& layer,
                                       bool round_a_log) {
    const std::string p = layer + "linear_attn.";
    LinearWeights w;
    SPARSEGDN_ASSIGN_OR_RETURN(w.in, Matrix({p + "in_proj_qkv.weight", p + "in_proj_z.weight",
                                             p + "in_proj_b.weight", p + "in_proj_a.weight"}));
    SPARSEGDN_ASSIGN_OR_RETURN(w.out, Matrix({p + "out_proj.weight"}));
    SPARSEGDN_ASSIGN_OR_RETURN(const std::vector<float> conv, Values(p + "conv1d.weight"));
    std::vector<float> taps(conv.size());
    const size_t channels = static_cast<size_t>(c.conv_channels());
    const size_t kernel = static_cast<size_t>(c.conv_kernel);
    for (size_t ch = 0; ch < channels; ++ch) {
      for (size_t j = 0; j < kernel; ++j) taps[j * channels + ch] = conv[ch * kernel + j];
    }
    SPARSEGDN_ASSIGN_OR_RETURN(w.taps, Vector(taps, p + "conv1d.weight"));
    SPARSEGDN_ASSIGN_OR_RETURN(w.a_log, Vector(p + "A_log", round_a_log));
    SPARSEGDN_ASSIGN_OR_RETURN(w.dt_bias, Vector(p + "dt_bias"));
    SPARSEGDN_ASSIGN_OR_RETURN(w.gate_norm, Vector(p + "norm.weight", round_a_log));
    return w;
  }

  absl::StatusOr<FullWeights> Full(const std::string& layer) {
    const std::string p = layer + "self_attn.";
    FullWeights w;
    SPARSEGDN_ASSIGN_OR_RETURN(
        w.in, Matrix({p + "q_proj.weight", p + "k_proj.weight", p + "v_proj.weight"}));
    SPARSEGDN_ASSIGN_OR_RETURN(w.out, Matrix({p + "o_proj.weight"}));
    SPARSEGDN_ASSIGN_OR_RETURN(w.q_norm, Vector(p + "q_norm.weight"));
    SPARSEGDN_ASSIGN_OR_RETURN(w.k_norm, Vector(p + "k_norm.weight"));
    return w;
  }

 private:
  Checkpoint& checkpoint_;
  OpTable& ops_;
};

}  // namespace

std::vector<float> InverseFrequencies(const ModelConfig& config) {
  const int32_t dim = config.rotary_dim();
  std::vector<float> inv_freq;
  for (int32_t i = 0; i < dim; i += 2) {
    const float exponent = static_cast<float>(i) / static_cast<float>(dim);
    inv_freq.push_back(1.0f / std::pow(static_cast<float>(config.rope_theta), exponent));
  }
  return inv_freq;
}

absl::StatusOr<ModelWeights> UploadWeights(const ModelConfig& config, Checkpoint& checkpoint,
                                           bool round_a_log, OpTable& ops,
                                           const std::function<void(int64_t, int64_t)>& progress) {
  Uploader up(checkpoint, ops);
  ModelWeights weights;
  SPARSEGDN_ASSIGN_OR_RETURN(weights.embedding, up.Matrix({"model.embed_tokens.weight"}));
  weights.lm_head = weights.embedding;
  if (!config.tie_word_embeddings) {
    SPARSEGDN_ASSIGN_OR_RETURN(weights.lm_head, up.Matrix({"lm_head.weight"}));
  }
  SPARSEGDN_ASSIGN_OR_RETURN(weights.final_norm, up.Vector("model.norm.weight"));
  SPARSEGDN_ASSIGN_OR_RETURN(weights.inv_freq, up.Vector(InverseFrequencies(config), "inv_freq"));
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const std::string p = LayerPrefix(i);
    LayerWeights layer;
    SPARSEGDN_ASSIGN_OR_RETURN(layer.input_norm, up.Vector(p + "input_layernorm.weight"));
    SPARSEGDN_ASSIGN_OR_RETURN(layer.post_norm, up.Vector(p + "post_attention_layernorm.weight"));
    if (config.layers[i] == LayerKind::kLinear) {
      SPARSEGDN_ASSIGN_OR_RETURN(layer.linear, up.Linear(config, p, round_a_log));
    } else {
      SPARSEGDN_ASSIGN_OR_RETURN(layer.full, up.Full(p));
    }
    SPARSEGDN_ASSIGN_OR_RETURN(layer.gate_up,
                               up.Matrix({p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight"}));
    SPARSEGDN_ASSIGN_OR_RETURN(layer.down, up.Matrix({p + "mlp.down_proj.weight"}));
    weights.layers.push_back(layer);
    if (progress) progress(static_cast<int64_t>(i + 1), static_cast<int64_t>(config.layers.size()));
  }
  SPARSEGDN_RETURN_IF_ERROR(checkpoint.CheckAllTaken());
  return weights;
}

}  // namespace sparsegdn::model
