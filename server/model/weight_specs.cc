#include "server/model/weight_specs.h"

#include "absl/strings/str_cat.h"

namespace sparsegdn::model {
namespace {

void AddLinear(const ModelConfig& c, const std::string& prefix, std::vector<TensorSpec>& out) {
  const int64_t hidden = c.hidden_size, channels = c.conv_channels(), value = c.value_dim();
  const int64_t heads = c.gdn.num_v_heads;
  const std::string p = prefix + "linear_attn.";
  out.push_back({p + "in_proj_qkv.weight", {channels, hidden}, WeightRole::kProjection});
  out.push_back({p + "in_proj_z.weight", {value, hidden}, WeightRole::kProjection});
  out.push_back({p + "in_proj_b.weight", {heads, hidden}, WeightRole::kProjection});
  out.push_back({p + "in_proj_a.weight", {heads, hidden}, WeightRole::kProjection});
  out.push_back({p + "conv1d.weight", {channels, 1, c.conv_kernel}, WeightRole::kConv});
  out.push_back({p + "A_log", {heads}, WeightRole::kALog});
  out.push_back({p + "dt_bias", {heads}, WeightRole::kDtBias});
  out.push_back({p + "norm.weight", {c.gdn.head_dim_v}, WeightRole::kGateNorm});
  out.push_back({p + "out_proj.weight", {hidden, value}, WeightRole::kResidualOut});
}

void AddFull(const ModelConfig& c, const std::string& prefix, std::vector<TensorSpec>& out) {
  const int64_t hidden = c.hidden_size, dim = c.head_dim;
  const int64_t q = c.num_q_heads * dim, kv = c.num_kv_heads * dim;
  const std::string p = prefix + "self_attn.";
  out.push_back({p + "q_proj.weight", {2 * q, hidden}, WeightRole::kProjection});
  out.push_back({p + "k_proj.weight", {kv, hidden}, WeightRole::kProjection});
  out.push_back({p + "v_proj.weight", {kv, hidden}, WeightRole::kProjection});
  out.push_back({p + "o_proj.weight", {hidden, q}, WeightRole::kResidualOut});
  out.push_back({p + "q_norm.weight", {dim}, WeightRole::kZeroCentredNorm});
  out.push_back({p + "k_norm.weight", {dim}, WeightRole::kZeroCentredNorm});
}

}  // namespace

int64_t TensorSpec::elements() const {
  int64_t count = 1;
  for (int64_t d : shape) count *= d;
  return count;
}

std::string LayerPrefix(size_t layer) { return absl::StrCat("model.layers.", layer, "."); }

std::vector<TensorSpec> TextTensors(const ModelConfig& c) {
  const int64_t hidden = c.hidden_size, inner = c.intermediate_size, vocab = c.vocab_size;
  std::vector<TensorSpec> out;
  out.push_back({"model.embed_tokens.weight", {vocab, hidden}, WeightRole::kEmbedding});
  for (size_t i = 0; i < c.layers.size(); ++i) {
    const std::string p = LayerPrefix(i);
    out.push_back({p + "input_layernorm.weight", {hidden}, WeightRole::kZeroCentredNorm});
    if (c.layers[i] == LayerKind::kLinear) {
      AddLinear(c, p, out);
    } else {
      AddFull(c, p, out);
    }
    out.push_back({p + "post_attention_layernorm.weight", {hidden}, WeightRole::kZeroCentredNorm});
    out.push_back({p + "mlp.gate_proj.weight", {inner, hidden}, WeightRole::kProjection});
    out.push_back({p + "mlp.up_proj.weight", {inner, hidden}, WeightRole::kProjection});
    out.push_back({p + "mlp.down_proj.weight", {hidden, inner}, WeightRole::kResidualOut});
  }
  out.push_back({"model.norm.weight", {hidden}, WeightRole::kZeroCentredNorm});
  if (!c.tie_word_embeddings) {
    out.push_back({"lm_head.weight", {vocab, hidden}, WeightRole::kEmbedding});
  }
  return out;
}

}  // namespace sparsegdn::model
