// The tensors that a configuration calls for: canonical names and shapes.
#ifndef SPARSEGDN_SERVER_MODEL_WEIGHT_SPECS_H_
#define SPARSEGDN_SERVER_MODEL_WEIGHT_SPECS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "server/model/config.h"

namespace sparsegdn::model {

// What a tensor is for; decides how random weights are drawn and which dtype is published.
enum class WeightRole {
  kEmbedding,        // embed_tokens and lm_head
  kZeroCentredNorm,  // scales by 1 + w
  kGateNorm,         // linear_attn.norm: scales by w; published in F32
  kProjection,       // [out, in], y = W x
  kResidualOut,      // a projection whose output is added to the residual stream
  kConv,             // [C, 1, 4]
  kALog,             // [Hv], published in F32
  kDtBias,           // [Hv]
};

struct TensorSpec {
  std::string name;  // canonical: "model.layers.0.input_layernorm.weight", "lm_head.weight"
  std::vector<int64_t> shape;
  WeightRole role = WeightRole::kProjection;

  int64_t elements() const;
};

// Canonical prefix of a layer's tensors: "model.layers.N.".
std::string LayerPrefix(size_t layer);

// Every text tensor of the model, each once, in the order of the forward pass. lm_head.weight is
// absent when the embedding is tied.
std::vector<TensorSpec> TextTensors(const ModelConfig& config);

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_WEIGHT_SPECS_H_
