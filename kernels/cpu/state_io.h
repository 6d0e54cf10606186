// States between the caller's pools and the panels that the core works on.
#ifndef SPARSEGDN_KERNELS_CPU_STATE_IO_H_
#define SPARSEGDN_KERNELS_CPU_STATE_IO_H_

#include <cstdint>

#include "kernels/cpu/scratch.h"
#include "sparsegdn/gdn.h"

namespace sparsegdn::cpu {

// The part of one head's state that a task owns: whole panels of columns.
struct StateSlice {
  int64_t head = 0;  // index of the [Dk, Dv] matrix in the pool: slot * Hv + value head
  int panel_begin = 0;
  int panel_end = 0;
};

// Fills panels [panel_begin, panel_end) of `state`; columns past dim_v are zero.
void LoadState(const float* pool, StateLayout layout, const TaskDims& dims, const StateSlice& slice,
               float* state);
void ZeroState(const TaskDims& dims, const StateSlice& slice, float* state);
void StoreState(const float* state, const TaskDims& dims, const StateSlice& slice,
                StateLayout layout, float* pool);
bool IsFinite(const float* state, const TaskDims& dims, const StateSlice& slice);

}  // namespace sparsegdn::cpu

#endif  // SPARSEGDN_KERNELS_CPU_STATE_IO_H_
