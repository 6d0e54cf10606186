// The text configuration of a Qwen3.5 model, read from config.json.
//
// Two shapes of file are accepted: the published one, with the text fields under "text_config",
// and the flat one that the text-only class saves. Missing fields take the defaults of the
// reference implementation (transformers, Qwen3_5TextConfig); shape fields have none and must be
// there. Anything that would change the mathematics and is not implemented is refused.
#ifndef SPARSEGDN_SERVER_MODEL_CONFIG_H_
#define SPARSEGDN_SERVER_MODEL_CONFIG_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/model_runner.h"
#include "sparsegdn/types.h"

namespace sparsegdn::model {

struct ModelConfig {
  int32_t vocab_size = 0;
  int32_t hidden_size = 0;
  int32_t intermediate_size = 0;
  std::vector<LayerKind> layers;
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = false;  // effective: text_config's, else the top level's, else false
  int64_t max_position_embeddings = 32768;

  // Full attention. q_proj carries query and gate, so it has 2 num_q_heads head_dim rows.
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 256;
  double rope_theta = 1e4;
  bool rope_theta_given = false;  // else it is the class default, as the reference takes it
  double partial_rotary_factor = 0.25;

  // Gated DeltaNet.
  GdnShape gdn;
  int32_t conv_kernel = 4;

  int64_t conv_channels() const {
    return 2 * int64_t{gdn.num_k_heads} * gdn.head_dim_k +
           int64_t{gdn.num_v_heads} * gdn.head_dim_v;
  }
  int64_t value_dim() const { return int64_t{gdn.num_v_heads} * gdn.head_dim_v; }
  // Rotated leading dimensions of a head, as the reference truncates them.
  int32_t rotary_dim() const { return static_cast<int32_t>(head_dim * partial_rotary_factor); }
};

// Largest config.json accepted, in bytes.
inline constexpr size_t kMaxConfigBytes = size_t{4} << 20;

// "linear_attention" or "full_attention", as in layer_types.
const char* LayerKindName(LayerKind kind);

// INVALID_ARGUMENT names field, got, wanted: not JSON, a field missing or of the wrong type, out
// of range, or asking for mathematics that is not implemented (layer type, activation, gate,
// rope type, bias, mixture of experts).
absl::StatusOr<ModelConfig> ParseConfig(std::string_view text);

// ParseConfig on `dir`/config.json. NOT_FOUND when the folder or the file is not there.
absl::StatusOr<ModelConfig> LoadConfig(const std::string& dir);

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_CONFIG_H_
