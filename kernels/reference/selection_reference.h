// Selection written straight from docs/algorithm.md, "Budgets": full sorts, no shared helper.
//
// It shares no arithmetic header with the backends on purpose, so that a mistake there shows.
#ifndef SPARSEGDN_KERNELS_REFERENCE_SELECTION_REFERENCE_H_
#define SPARSEGDN_KERNELS_REFERENCE_SELECTION_REFERENCE_H_

#include <cstdint>
#include <vector>

#include "sparsegdn/types.h"

namespace sparsegdn::reference {

// One call's part of one request, as fp32 values (bf16 inputs widened).
struct SelectionInput {
  GdnShape shape;
  int64_t num_tokens = 0;
  int64_t first_position = 0;
  int64_t prompt_tokens = 0;
  Budget budget;
  std::vector<float> beta;  // [num_tokens, Hv]
  std::vector<float> v;     // [num_tokens, Hv, Dv], Selector::kWriteNorm only
};

// The mask [num_tokens, Hk].
std::vector<uint8_t> SelectEvents(const SelectionInput& input);

}  // namespace sparsegdn::reference

#endif  // SPARSEGDN_KERNELS_REFERENCE_SELECTION_REFERENCE_H_
