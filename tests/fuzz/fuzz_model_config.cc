// Input: the text of a model's config.json. Promise: a configuration within its limits, whose sizes
// multiply without overflow, or INVALID_ARGUMENT.
#include <string_view>

#include "server/model/config.h"
#include "server/model/random_checkpoint.h"
#include "tests/fuzz/fuzz_target.h"

namespace sparsegdn::fuzz {
namespace {

void CheckConfig(const model::ModelConfig& c) {
  Require(!c.layers.empty() && c.layers.size() <= 1024, "layers");
  for (const int64_t size :
       {int64_t{c.vocab_size}, int64_t{c.hidden_size}, int64_t{c.intermediate_size},
        int64_t{c.num_q_heads}, int64_t{c.num_kv_heads}, int64_t{c.head_dim}, c.conv_channels(),
        c.value_dim(), c.max_position_embeddings}) {
    Require(size >= 1 && size <= int64_t{1} << 31, "a size out of range");
  }
  Require(c.num_q_heads % c.num_kv_heads == 0, "num_q_heads");
  Require(c.gdn.num_v_heads % c.gdn.num_k_heads == 0, "num_v_heads");
  Require(c.rotary_dim() >= 0 && c.rotary_dim() <= c.head_dim && c.rotary_dim() % 2 == 0, "rotary");
  Require(c.rms_norm_eps >= 0 && c.rms_norm_eps <= 1, "rms_norm_eps");
  Require(c.rope_theta >= 1 && c.rope_theta <= 1e15, "rope_theta");
  Require(c.conv_kernel == 4, "conv_kernel");
}

}  // namespace

int FuzzModelConfig(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto config = model::ParseConfig(std::string_view(text));
  NoteOutcome(config.status());
  if (config.ok()) {
    CheckConfig(*config);
  } else {
    RequireRefusal(config.status(), {absl::StatusCode::kInvalidArgument}, 1024);
  }
  return 0;
}

std::vector<std::string> ModelConfigSeeds() {
  std::vector<std::string> seeds;
  for (const char* shape : {"tiny", "tiny-gdn", "0.8b", "27b"}) {
    seeds.push_back(model::ConfigJsonOfShape(shape).value());
  }
  const std::string sizes =
      R"({"model_type":"qwen3_5_text","vocab_size":64,"hidden_size":32,"intermediate_size":64,)"
      R"("num_hidden_layers":4,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":64,)"
      R"("linear_num_key_heads":2,"linear_num_value_heads":4)";
  seeds.push_back(sizes + R"(,"full_attention_interval":2,"rope_theta":10000000})");
  seeds.push_back(sizes + R"(,"rope_scaling":{"type":"default"},"tie_word_embeddings":true})");
  seeds.push_back(sizes + R"(,"attention_bias":true})");
  seeds.push_back(sizes + R"(,"layer_types":)" + Nested(kDeep) + "}");
  seeds.push_back(R"({"text_config":)" + Nested(kDeep) + "}");
  seeds.push_back(std::string(100'000, '['));
  return seeds;
}

}  // namespace sparsegdn::fuzz
