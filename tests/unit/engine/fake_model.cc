#include "tests/unit/engine/fake_model.h"

#include <algorithm>
#include <string>

namespace sparsegdn::testing {
namespace {

uint64_t Mix(uint64_t x) {  // the finaliser of SplitMix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

uint64_t HashOf(std::span<const int32_t> tokens) {
  uint64_t hash = kFakeEmptyHash;
  for (const int32_t token : tokens) hash = FakeAdvance(hash, token);
  return hash;
}

}  // namespace

model::ModelInfo SmallHybridInfo(DType compute_dtype) {
  model::ModelInfo info;
  info.identity = std::string(64, 'a');
  info.name = "fake-hybrid";
  info.backend = "cpu";
  info.layers = {model::LayerKind::kLinear, model::LayerKind::kLinear, model::LayerKind::kFull,
                 model::LayerKind::kLinear};
  info.vocab_size = 1000;
  info.hidden_size = 32;
  info.max_context_tokens = 65536;
  info.gdn = {.num_k_heads = 2, .num_v_heads = 4, .head_dim_k = 8, .head_dim_v = 16};
  info.conv_channels = 2 * 2 * 8 + 4 * 16;
  info.num_q_heads = 4;
  info.num_kv_heads = 2;
  info.attention_head_dim = 4;
  info.compute_dtype = compute_dtype;
  return info;
}

model::RunnerLimits SmallLimits() {
  return {.state_slots = 4,
          .kv_tokens = 65536,
          .kv_block_tokens = 64,
          .max_batch_tokens = 4096,
          .max_batch_seqs = 4};
}

uint64_t FakeAdvance(uint64_t hash, int32_t token) {
  return Mix(hash + 0x9e3779b97f4a7c15ull * (static_cast<uint64_t>(token) + 1));
}

void FakeFillState(uint64_t hash, int32_t layer, std::span<float> out) {
  if (hash == kFakeEmptyHash) return std::fill(out.begin(), out.end(), 0.0f);
  for (size_t i = 0; i < 8; ++i) out[i] = static_cast<float>((hash >> (8 * i)) & 0xff);
  uint64_t x = Mix(hash + static_cast<uint64_t>(layer));
  for (size_t i = 8; i < out.size(); ++i) {
    x = x * 6364136223846793005ull + 1442695040888963407ull;
    out[i] = static_cast<float>(static_cast<int32_t>(x >> 40)) * 0x1p-23f - 1.0f;
  }
}

float FakeKvValue(int32_t layer, bool key, int64_t position, int32_t token, int64_t element) {
  return static_cast<float>((position * 13 + token * 7 + layer * 3 + element + (key ? 0 : 100)) %
                            251) -
         125.0f;
}

float FakeConvValue(int32_t token, int64_t channel) {
  return static_cast<float>((int64_t{token} * 31 + channel * 7 + 1) % 255);
}

void FakeFillLogits(uint64_t hash, int64_t kv_sum, std::span<float> out) {
  for (size_t v = 0; v < out.size(); ++v) {
    const uint64_t x = Mix(hash + v + static_cast<uint64_t>(kv_sum) * 31);
    out[v] = static_cast<float>(x >> 40) * 0x1p-20f - 8.0f;
  }
}

float FakeLogprob(uint64_t hash, int32_t next_token) {
  return -0.01f - static_cast<float>(FakeAdvance(hash, next_token) & 1023) / 64.0f;
}

int64_t FakeStateElements(const model::ModelInfo& info) {
  return int64_t{info.gdn.num_v_heads} * info.gdn.head_dim_k * info.gdn.head_dim_v;
}
int64_t FakeRowElements(const model::ModelInfo& info) {
  return int64_t{info.num_kv_heads} * info.attention_head_dim;
}

std::vector<float> FakeState(const model::ModelInfo& info, int32_t layer,
                             std::span<const int32_t> prefix) {
  std::vector<float> state(FakeStateElements(info));
  FakeFillState(HashOf(prefix), layer, state);
  return state;
}

std::vector<float> FakeConv(const model::ModelInfo& info, std::span<const int32_t> prefix) {
  std::vector<float> conv(info.conv_channels * 4, 0.0f);
  for (int64_t c = 0; c < info.conv_channels; ++c) {
    for (int64_t j = 0; j < 4; ++j) {
      const int64_t t = std::ssize(prefix) - 4 + j;
      if (t >= 0) conv[c * 4 + j] = FakeConvValue(prefix[t], c);
    }
  }
  return conv;
}

std::vector<float> FakeKv(const model::ModelInfo& info, int32_t layer, bool key,
                          std::span<const int32_t> prefix) {
  std::vector<float> rows;
  for (int64_t t = 0; t < std::ssize(prefix); ++t) {
    for (int64_t e = 0; e < FakeRowElements(info); ++e) {
      rows.push_back(FakeKvValue(layer, key, t, prefix[t], e));
    }
  }
  return rows;
}

std::vector<float> FakeLogits(const model::ModelInfo& info, std::span<const int32_t> prefix) {
  int64_t kv_sum = 0;
  for (int32_t layer = 0; layer < std::ssize(info.layers); ++layer) {
    if (info.layers[layer] != model::LayerKind::kFull) continue;
    for (const bool key : {true, false}) {
      const std::vector<float> rows = FakeKv(info, layer, key, prefix);
      const int64_t row = FakeRowElements(info);
      for (int64_t i = 0; i < std::ssize(rows); ++i) {
        kv_sum += static_cast<int64_t>(rows[i]) * ((i % row) % 5 + 1);
      }
    }
  }
  std::vector<float> logits(info.vocab_size);
  FakeFillLogits(HashOf(prefix), kv_sum, logits);
  return logits;
}

float FakeLogprob(std::span<const int32_t> prefix, int32_t next_token) {
  return FakeLogprob(HashOf(prefix), next_token);
}

}  // namespace sparsegdn::testing
