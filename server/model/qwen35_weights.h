// The weights of a Qwen3.5 model in a backend's memory.
#ifndef SPARSEGDN_SERVER_MODEL_QWEN35_WEIGHTS_H_
#define SPARSEGDN_SERVER_MODEL_QWEN35_WEIGHTS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/checkpoint.h"
#include "server/model/config.h"
#include "server/model/op_table.h"

namespace sparsegdn::model {

// Projections that read the same input are stacked, so that a layer is four products. Vectors are
// FP32.
struct LinearWeights {
  const Weight* in = nullptr;        // qkv | z | b | a: [C + Hv Dv + 2 Hv, H]
  const Weight* out = nullptr;       // [H, Hv Dv]
  const float* taps = nullptr;       // [4, C], transposed from the checkpoint's [C, 1, 4]
  const float* a_log = nullptr;      // [Hv]
  const float* dt_bias = nullptr;    // [Hv]
  const float* gate_norm = nullptr;  // [Dv]
};
struct FullWeights {
  const Weight* in = nullptr;     // q and gate per head | k | v: [2 Nq D + 2 Nkv D, H]
  const Weight* out = nullptr;    // [H, Nq D]
  const float* q_norm = nullptr;  // [D]
  const float* k_norm = nullptr;  // [D]
};
struct LayerWeights {
  const float* input_norm = nullptr;  // [H]
  const float* post_norm = nullptr;   // [H]
  LinearWeights linear;               // by the layer's kind
  FullWeights full;
  const Weight* gate_up = nullptr;  // [2 I, H]
  const Weight* down = nullptr;     // [H, I]
};
struct ModelWeights {
  const Weight* embedding = nullptr;  // [V, H]
  const Weight* lm_head = nullptr;    // the embedding when tied
  const float* final_norm = nullptr;  // [H]
  const float* inv_freq = nullptr;    // [rotary_dim / 2]
  std::vector<LayerWeights> layers;
};

// inv_freq[i] = 1 / theta^(2 i / rotary_dim), every step rounded to FP32 as the reference does.
std::vector<float> InverseFrequencies(const ModelConfig& config);

// Uploads every text tensor exactly once. round_a_log rounds A_log and linear_attn.norm.weight to
// BF16 first, which is what the reference does when it loads a model in BF16. `progress` may be
// empty. Errors of the table, or INTERNAL when a tensor is left over.
absl::StatusOr<ModelWeights> UploadWeights(
    const ModelConfig& config, Checkpoint& checkpoint, bool round_a_log, OpTable& ops,
    const std::function<void(int64_t done_layers, int64_t total_layers)>& progress);

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_QWEN35_WEIGHTS_H_
