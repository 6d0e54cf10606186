// The truth behind the fake runner: states, KV and logits as functions of the tokens alone.
#ifndef SPARSEGDN_TESTS_UNIT_ENGINE_FAKE_MODEL_H_
#define SPARSEGDN_TESTS_UNIT_ENGINE_FAKE_MODEL_H_

#include <cstdint>
#include <span>
#include <vector>

#include "server/model/model_runner.h"

namespace sparsegdn::testing {

// Four layers (linear, linear, full, linear), Hk 2, Hv 4, Dk 8, Dv 16, so that no two extents
// agree by accident; vocabulary 1000, context 65,536.
model::ModelInfo SmallHybridInfo(DType compute_dtype = DType::kF32);
model::RunnerLimits SmallLimits();

// The fake's truth, from the tokens alone. Recurrent state [Hv, Dk, Dv] of a linear layer, conv
// state [C, 4] as FP32, KV rows [n, Nkv, D] as FP32, logits and one log-probability.
std::vector<float> FakeState(const model::ModelInfo& info, int32_t layer,
                             std::span<const int32_t> prefix);
std::vector<float> FakeConv(const model::ModelInfo& info, std::span<const int32_t> prefix);
std::vector<float> FakeKv(const model::ModelInfo& info, int32_t layer, bool key,
                          std::span<const int32_t> prefix);
std::vector<float> FakeLogits(const model::ModelInfo& info, std::span<const int32_t> prefix);
float FakeLogprob(std::span<const int32_t> prefix, int32_t next_token);

// The same, step by step, from a running hash of the tokens.
inline constexpr uint64_t kFakeEmptyHash = 0x243f6a8885a308d3ull;
uint64_t FakeAdvance(uint64_t hash, int32_t token);
// The first eight elements are the hash's bytes, so that Load can go on from a state alone (from a
// BF16 state too: 8 bits are exact in it). An empty sequence has the zero state.
void FakeFillState(uint64_t hash, int32_t layer, std::span<float> out);
void FakeFillLogits(uint64_t hash, int64_t kv_sum, std::span<float> out);
float FakeLogprob(uint64_t hash, int32_t next_token);
float FakeConvValue(int32_t token, int64_t channel);
float FakeKvValue(int32_t layer, bool key, int64_t position, int32_t token, int64_t element);
int64_t FakeStateElements(const model::ModelInfo& info);
int64_t FakeRowElements(const model::ModelInfo& info);  // of one KV row

}  // namespace sparsegdn::testing

#endif  // SPARSEGDN_TESTS_UNIT_ENGINE_FAKE_MODEL_H_
