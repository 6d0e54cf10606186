// Goal: every published shape of config.json is read, and what is not understood is refused with
// a message that names field, got and wanted.
#include "server/model/config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "server/model/random_checkpoint.h"

namespace sparsegdn::model {
namespace {

using nlohmann::json;

json Nested(const std::string& shape = "tiny") {
  return json::parse(ConfigJsonOfShape(shape).value());
}

absl::StatusOr<ModelConfig> Parse(const json& config) { return ParseConfig(config.dump()); }

TEST(ConfigTest, PublishedShapesAreRead) {
  struct Row {
    const char* name;
    int hidden, inner, layers, full, q, kv, k, v, vocab;
    bool tied;
  };
  for (const Row& row : {Row{"0.8b", 1024, 3584, 24, 6, 8, 2, 16, 16, 248320, true},
                         Row{"2b", 2048, 6144, 24, 6, 8, 2, 16, 16, 248320, true},
                         Row{"4b", 2560, 9216, 32, 8, 16, 4, 16, 32, 248320, true},
                         Row{"9b", 4096, 12288, 32, 8, 16, 4, 16, 32, 248320, false},
                         Row{"27b", 5120, 17408, 64, 16, 24, 4, 16, 48, 248320, false},
                         Row{"tiny", 128, 256, 4, 1, 4, 2, 2, 4, 512, true},
                         Row{"tiny-gdn", 128, 256, 2, 0, 4, 2, 2, 4, 512, false}}) {
    SCOPED_TRACE(row.name);
    const auto parsed = Parse(Nested(row.name));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    const ModelConfig& c = *parsed;
    EXPECT_EQ(c.hidden_size, row.hidden);
    EXPECT_EQ(c.intermediate_size, row.inner);
    EXPECT_EQ(std::ssize(c.layers), row.layers);
    EXPECT_EQ(std::count(c.layers.begin(), c.layers.end(), LayerKind::kFull), row.full);
    EXPECT_EQ(c.num_q_heads, row.q);
    EXPECT_EQ(c.num_kv_heads, row.kv);
    EXPECT_EQ(c.gdn.num_k_heads, row.k);
    EXPECT_EQ(c.gdn.num_v_heads, row.v);
    EXPECT_EQ(c.gdn.head_dim_k, 128);
    EXPECT_EQ(c.vocab_size, row.vocab);
    EXPECT_EQ(c.tie_word_embeddings, row.tied);
    EXPECT_EQ(c.rope_theta, 1e7);
    EXPECT_EQ(c.rotary_dim(), row.hidden == 128 ? 16 : 64);
    EXPECT_EQ(c.max_position_embeddings, 262144);
  }
}

TEST(ConfigTest, FlatFileEqualsNested) {
  json nested = Nested();
  json flat = nested["text_config"];
  const auto a = Parse(nested), b = Parse(flat);
  ASSERT_TRUE(a.ok() && b.ok()) << a.status() << b.status();
  EXPECT_EQ(a->layers, b->layers);
  EXPECT_EQ(a->tie_word_embeddings, b->tie_word_embeddings);
  EXPECT_EQ(a->rope_theta, b->rope_theta);
}

TEST(ConfigTest, TieIsReadInBothPlaces) {
  json config = Nested();
  config["text_config"].erase("tie_word_embeddings");
  EXPECT_TRUE(Parse(config)->tie_word_embeddings);  // top level alone, as the 9B file has it
  config.erase("tie_word_embeddings");
  EXPECT_FALSE(Parse(config)->tie_word_embeddings);  // nowhere
  config["text_config"]["tie_word_embeddings"] = true;
  EXPECT_TRUE(Parse(config)->tie_word_embeddings);  // text_config alone
  config["tie_word_embeddings"] = nullptr;
  EXPECT_TRUE(Parse(config)->tie_word_embeddings);  // null counts as absent
}

TEST(ConfigTest, LayersComeFromTheIntervalWhenNotListed) {
  json config = Nested();
  config["text_config"].erase("layer_types");
  EXPECT_EQ(Parse(config)->layers[3], LayerKind::kFull);
  config["text_config"]["full_attention_interval"] = 2;
  const auto parsed = Parse(config);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->layers, (std::vector<LayerKind>{LayerKind::kLinear, LayerKind::kFull,
                                                    LayerKind::kLinear, LayerKind::kFull}));
}

TEST(ConfigTest, RopeIsReadFromOldAndNewPlaces) {
  json config = Nested();
  json& text = config["text_config"];
  text.erase("rope_parameters");
  EXPECT_EQ(Parse(config)->rope_theta, 1e4);  // the class default
  EXPECT_FALSE(Parse(config)->rope_theta_given);
  text["rope_parameters"] = nullptr;
  EXPECT_EQ(Parse(config)->rope_theta, 1e4);
  EXPECT_FALSE(Parse(config)->rope_theta_given);
  text["rope_parameters"] = {{"rope_theta", 3e6}};
  EXPECT_TRUE(Parse(config)->rope_theta_given);
  text.erase("rope_parameters");
  EXPECT_EQ(Parse(config)->partial_rotary_factor, 0.25);
  text["rope_theta"] = 5e6;
  text["partial_rotary_factor"] = 0.5;
  EXPECT_EQ(Parse(config)->rope_theta, 5e6);
  EXPECT_TRUE(Parse(config)->rope_theta_given);
  EXPECT_EQ(Parse(config)->rotary_dim(), 32);
  text["rope_scaling"] = {{"type", "default"}};
  EXPECT_EQ(Parse(config)->rope_theta, 5e6);
  text["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1e7}};
  EXPECT_EQ(Parse(config)->rope_theta, 1e7);  // the new place wins
}

struct Refusal {
  const char* name;
  const char* patch;    // merged into the file
  const char* message;  // all of field, got, wanted
};

class ConfigRefusalTest : public ::testing::TestWithParam<Refusal> {};

TEST_P(ConfigRefusalTest, NamesFieldGotWanted) {
  json config = Nested();
  config.merge_patch(json::parse(GetParam().patch));
  const auto parsed = Parse(config);
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(parsed.status().message()), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Rows, ConfigRefusalTest,
    ::testing::Values(
        Refusal{"unknown_layer_type",
                R"({"text_config": {"layer_types":
                    ["linear_attention", "sliding_attention", "x", "x"]}})",
                "config.json: text_config.layer_types[1] = \"sliding_attention\", wanted "
                "\"linear_attention\" or \"full_attention\""},
        Refusal{"layer_type_not_text", R"({"text_config": {"layer_types": [1, 2, 3, 4]}})",
                "config.json: text_config.layer_types[0] = 1, wanted \"linear_attention\" or "
                "\"full_attention\""},
        Refusal{"layer_count", R"({"text_config": {"layer_types": ["linear_attention"]}})",
                "config.json: text_config.layer_types = an array of 1, wanted an array of 4 "
                "(num_hidden_layers)"},
        Refusal{"output_gate", R"({"text_config": {"output_gate_type": "sigmoid"}})",
                "config.json: text_config.output_gate_type = \"sigmoid\", wanted \"swish\""},
        Refusal{"no_output_gate", R"({"text_config": {"attn_output_gate": false}})",
                "config.json: text_config.attn_output_gate = false, wanted true or nothing"},
        Refusal{"activation", R"({"text_config": {"hidden_act": "gelu"}})",
                "config.json: text_config.hidden_act = \"gelu\", wanted \"silu\""},
        Refusal{"bias", R"({"text_config": {"attention_bias": true}})",
                "config.json: text_config.attention_bias = true, wanted false or nothing"},
        Refusal{"rope_type", R"({"text_config": {"rope_parameters": {"rope_type": "yarn"}}})",
                "config.json: text_config.rope_parameters.rope_type = \"yarn\", wanted "
                "\"default\""},
        Refusal{"old_rope_type", R"({"text_config": {"rope_scaling": {"type": "linear"}}})",
                "config.json: text_config.rope_scaling.type = \"linear\", wanted \"default\""},
        Refusal{"rope_not_an_object", R"({"text_config": {"rope_parameters": 3}})",
                "config.json: text_config.rope_parameters = 3, wanted an object"},
        Refusal{"moe", R"({"model_type": "qwen3_5_moe"})",
                "config.json: model_type = \"qwen3_5_moe\", wanted \"qwen3_5\" or "
                "\"qwen3_5_text\""},
        Refusal{"moe_text", R"({"text_config": {"model_type": "qwen3_next"}})",
                "config.json: text_config.model_type = \"qwen3_next\", wanted \"qwen3_5\" or "
                "\"qwen3_5_text\""},
        Refusal{
            "missing", R"({"text_config": {"hidden_size": null}})",
            "config.json: text_config.hidden_size = nothing, wanted an integer in [1, 1048576]"},
        Refusal{"negative", R"({"text_config": {"vocab_size": -5}})",
                "config.json: text_config.vocab_size = -5, wanted an integer in [1, 1048576]"},
        Refusal{"huge", R"({"text_config": {"intermediate_size": 18446744073709551615}})",
                "config.json: text_config.intermediate_size = 18446744073709551615, wanted an "
                "integer in [1, 1048576]"},
        Refusal{"float", R"({"text_config": {"num_hidden_layers": 4.5}})",
                "config.json: text_config.num_hidden_layers = 4.5, wanted an integer in [1, 1024]"},
        Refusal{"text", R"({"text_config": {"rms_norm_eps": "small"}})",
                "config.json: text_config.rms_norm_eps = \"small\", wanted a number in [0, 1]"},
        Refusal{"not_boolean", R"({"text_config": {"tie_word_embeddings": 1}})",
                "config.json: text_config.tie_word_embeddings = 1, wanted true or false"},
        Refusal{"ties_differ", R"({"tie_word_embeddings": false})",
                "config.json: text_config.tie_word_embeddings = true, wanted false as in "
                "config.json: tie_word_embeddings"},
        Refusal{"value_heads", R"({"text_config": {"linear_num_value_heads": 5}})",
                "config.json: text_config.linear_num_value_heads = 5, wanted 1, 2, 3 or 4 times "
                "linear_num_key_heads = 2"},
        Refusal{"head_ratio", R"({"text_config": {"linear_num_value_heads": 10}})",
                "config.json: text_config.linear_num_value_heads = 10, wanted 1, 2, 3 or 4 times "
                "linear_num_key_heads = 2"},
        Refusal{"head_dim", R"({"text_config": {"linear_key_head_dim": 512}})",
                "config.json: text_config.linear_key_head_dim = 512, wanted an integer in "
                "[1, 256]"},
        Refusal{"conv", R"({"text_config": {"linear_conv_kernel_dim": 3}})",
                "config.json: text_config.linear_conv_kernel_dim = 3, wanted an integer in [4, 4]"},
        Refusal{"kv_heads", R"({"text_config": {"num_key_value_heads": 3}})",
                "config.json: text_config.num_attention_heads = 4, wanted at most 64 times and a "
                "multiple of num_key_value_heads = 3"},
        Refusal{"odd_rotary", R"({"text_config": {"head_dim": 60}})",
                "config.json: text_config.partial_rotary_factor * head_dim = 15, wanted an even "
                "number"},
        Refusal{"text_config", R"({"text_config": 7})",
                "config.json: text_config = 7, wanted an object"}),
    [](const auto& info) { return info.param.name; });

TEST(ConfigTest, WhatIsNoJsonIsRefused) {
  for (const char* text : {"", "{", "[]", "null", "\"text\"", "{\"a\": }", "\xff\xfe"}) {
    EXPECT_EQ(ParseConfig(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_FALSE(ParseConfig(std::string(1 << 20, '[')).ok());  // depth must not overflow the stack
}

TEST(ConfigTest, MissingFolderIsNotFound) {
  const auto config = LoadConfig("/nonexistent/model");
  EXPECT_EQ(config.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(config.status().message().find("/nonexistent/model/config.json"), std::string::npos);
}

}  // namespace
}  // namespace sparsegdn::model
