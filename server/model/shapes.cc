// config.json of the published dense sizes, and of the small models of the tests.
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "server/model/random_checkpoint.h"

namespace sparsegdn::model {
namespace {

struct Shape {
  const char* name;
  int hidden, inner, layers, q_heads, kv_heads, k_heads, v_heads;
  bool tied;
  int vocab, head_dim, full_interval, eos;
};

constexpr Shape kShapes[] = {
    {"tiny", 128, 256, 4, 4, 2, 2, 4, true, 512, 64, 4, 0},
    {"tiny-gdn", 128, 256, 2, 4, 2, 2, 4, false, 512, 64, 0, 0},
    {"0.8b", 1024, 3584, 24, 8, 2, 16, 16, true, 248320, 256, 4, 248044},
    {"2b", 2048, 6144, 24, 8, 2, 16, 16, true, 248320, 256, 4, 248044},
    {"4b", 2560, 9216, 32, 16, 4, 16, 32, true, 248320, 256, 4, 248044},
    {"9b", 4096, 12288, 32, 16, 4, 16, 32, false, 248320, 256, 4, 248044},
    {"27b", 5120, 17408, 64, 24, 4, 16, 48, false, 248320, 256, 4, 248044},
};

nlohmann::ordered_json TextConfig(const Shape& s) {
  nlohmann::ordered_json types = nlohmann::ordered_json::array();
  for (int i = 0; i < s.layers; ++i) {
    const bool full = s.full_interval > 0 && (i + 1) % s.full_interval == 0;
    types.push_back(full ? "full_attention" : "linear_attention");
  }
  return {
      {"attention_bias", false},
      {"attn_output_gate", true},
      {"bos_token_id", nullptr},
      {"dtype", "bfloat16"},
      {"eos_token_id", s.eos},
      {"head_dim", s.head_dim},
      {"hidden_act", "silu"},
      {"hidden_size", s.hidden},
      {"intermediate_size", s.inner},
      {"layer_types", types},
      {"linear_conv_kernel_dim", 4},
      {"linear_key_head_dim", 128},
      {"linear_num_key_heads", s.k_heads},
      {"linear_num_value_heads", s.v_heads},
      {"linear_value_head_dim", 128},
      {"max_position_embeddings", 262144},
      {"model_type", "qwen3_5_text"},
      {"num_attention_heads", s.q_heads},
      {"num_hidden_layers", s.layers},
      {"num_key_value_heads", s.kv_heads},
      {"rms_norm_eps", 1e-6},
      {"rope_parameters",
       {{"mrope_interleaved", true},
        {"mrope_section", {11, 11, 10}},
        {"partial_rotary_factor", 0.25},
        {"rope_theta", 10000000},
        {"rope_type", "default"}}},
      {"tie_word_embeddings", s.tied},
      {"vocab_size", s.vocab},
  };
}

}  // namespace

absl::StatusOr<std::string> ConfigJsonOfShape(const std::string& shape) {
  std::string names;
  for (const Shape& s : kShapes) {
    if (shape == s.name) {
      const nlohmann::ordered_json root = {
          {"architectures", {"Qwen3_5ForConditionalGeneration"}},
          {"model_type", "qwen3_5"},
          {"text_config", TextConfig(s)},
          {"tie_word_embeddings", s.tied},
      };
      return root.dump(2) + "\n";
    }
    absl::StrAppend(&names, names.empty() ? "" : ", ", s.name);
  }
  return absl::InvalidArgumentError(absl::StrCat("shape = \"", shape, "\", wanted one of ", names));
}

}  // namespace sparsegdn::model
