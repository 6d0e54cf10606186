// The core of one head pair of one sequence: groups in order, outputs and states.
#ifndef SPARSEGDN_KERNELS_CPU_PAIR_TASK_H_
#define SPARSEGDN_KERNELS_CPU_PAIR_TASK_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/task_list.h"
#include "sparsegdn/gdn.h"

namespace sparsegdn::cpu {

// What all tasks of one call share.
struct CoreCall {
  const GdnForwardArgs* args = nullptr;
  const uint8_t* mask = nullptr;   // [num_tokens, Hk]; unused for sequences that are all events
  bool mask_covers_dense = false;  // the caller gave the mask: dense budgets obey it too
  const VectorKernels* vector = nullptr;
  const ProductKernels<uint16_t>* bf16 = nullptr;  // null: fp32 products
};

// Whether this call's products run in bf16: bf16 inputs on a CPU with bf16 dot products.
bool UsesBf16(const CoreCall& call);

// Bytes of one thread's working memory.
size_t TaskScratchBytes(const GdnShape& shape, bool bf16);

// Returns false if the part of the final state that the task owns holds NaN or Inf.
bool RunPairTask(const CoreCall& call, const PairTask& task, void* scratch);

}  // namespace sparsegdn::cpu

#endif  // SPARSEGDN_KERNELS_CPU_PAIR_TASK_H_
