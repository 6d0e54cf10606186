// How a call is cut into tasks for the thread pool.
#ifndef SPARSEGDN_KERNELS_CPU_TASK_LIST_H_
#define SPARSEGDN_KERNELS_CPU_TASK_LIST_H_

#include <cstdint>
#include <vector>

#include "sparsegdn/gdn.h"

namespace sparsegdn::cpu {

// Value heads [head_begin, head_end) (within the pair) of one sequence and head pair, restricted to
// panels of 32 columns [panel_begin, panel_end).
struct PairTask {
  int32_t sequence = 0;
  int32_t pair = 0;
  int head_begin = 0;
  int head_end = 0;
  int panel_begin = 0;
  int panel_end = 0;
};

// Splits pairs by value head, then by panels, only as far as it keeps the threads busy: each part
// repeats the pair's K K^T and Q K^T. Results do not depend on the split (kernel_table.h). Longest
// sequences come first.
std::vector<PairTask> MakeTasks(const GdnForwardArgs& args, int num_threads);

}  // namespace sparsegdn::cpu

#endif  // SPARSEGDN_KERNELS_CPU_TASK_LIST_H_
