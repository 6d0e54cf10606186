// Greedy choice and the k largest logits of one row.
#ifndef SPARSEGDN_SERVER_ENGINE_TOPK_H_
#define SPARSEGDN_SERVER_ENGINE_TOPK_H_

#include <cstdint>
#include <optional>
#include <span>

namespace sparsegdn::engine {

// The index of the largest logit, the lowest among equals. NaN never wins; absent when every logit
// is NaN or the row is empty.
std::optional<int32_t> Greedy(std::span<const float> logits);

// The k largest, best first, ties to the lower index; NaN counts as -inf. ids and values hold k
// entries each, k <= logits.size().
void TopK(std::span<const float> logits, std::span<int32_t> ids, std::span<float> values);

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_TOPK_H_
