// Selection on the CPU: docs/algorithm.md, "Budgets", with the arithmetic of selection_math.h.
#ifndef SPARSEGDN_KERNELS_CPU_SELECTION_H_
#define SPARSEGDN_KERNELS_CPU_SELECTION_H_

#include <cstdint>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/thread_pool.h"
#include "sparsegdn/gdn.h"

namespace sparsegdn::cpu {

// Sort keys of every (window, pair), [num_tokens * Hk].
int64_t SelectionKeyCount(int64_t num_tokens, const GdnShape& shape);

// Writes mask [num_tokens, Hk] for every sequence whose budget is not dense, and for dense ones
// (all ones) when fill_dense is set. keys: SelectionKeyCount entries of scratch.
void SelectEvents(const GdnForwardArgs& args, const VectorKernels& vector, bool fill_dense,
                  ThreadPool* pool, uint64_t* keys, uint8_t* mask);

// args.selected from a mask, null for all ones where a sequence is dense.
void CountSelected(const GdnForwardArgs& args, const uint8_t* mask, bool mask_covers_dense);

}  // namespace sparsegdn::cpu

#endif  // SPARSEGDN_KERNELS_CPU_SELECTION_H_
