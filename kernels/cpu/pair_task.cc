#include "kernels/cpu/pair_task.h"

#include <algorithm>

#include "kernels/common/validate.h"
#include "kernels/cpu/group_step.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/state_io.h"

namespace sparsegdn::cpu {
namespace {

// Positions where groups restart: window boundaries and snapshots.
int64_t NextBoundary(int64_t position, int64_t snapshot_every) {
  const int64_t window = (position / kWindow + 1) * kWindow;
  if (snapshot_every <= 0) return window;
  return std::min(window, (position / snapshot_every + 1) * snapshot_every);
}

StateSlice Slice(const CoreCall& call, const PairTask& task, int h, int64_t slot) {
  const int64_t heads = call.args->shape.num_v_heads;
  const int ratio = call.args->shape.num_v_heads / call.args->shape.num_k_heads;
  return {slot * heads + int64_t{task.pair} * ratio + h, task.panel_begin, task.panel_end};
}

template <typename E>
void LoadStates(const CoreCall& call, const PairTask& task, const ProductKernels<E>& product,
                const TaskDims& dims, TaskScratch<E>* scratch) {
  const StatePool& pool = call.args->initial_state;
  const int32_t slot = call.args->sequences[task.sequence].initial_slot;
  for (int h = task.head_begin; h < task.head_end; ++h) {
    HeadScratch<E>& head = scratch->heads[h];
    const StateSlice slice = Slice(call, task, h, std::max(slot, 0));
    if (slot >= 0) {
      LoadState(pool.data, pool.layout, dims, slice, head.state);
    } else {
      ZeroState(dims, slice, head.state);
    }
    for (int n = task.panel_begin; n < task.panel_end; ++n) {
      product.pack_state(head.state + n * dims.state_panel, dims.dim_k,
                         head.state_packed + n * dims.state_panel);
    }
  }
}

template <typename E>
void StoreStates(const CoreCall& call, const PairTask& task, const TaskDims& dims,
                 const TaskScratch<E>& scratch, float* pool, int64_t slot) {
  for (int h = task.head_begin; h < task.head_end; ++h) {
    StoreState(scratch.heads[h].state, dims, Slice(call, task, h, slot),
               call.args->final_state.layout, pool);
  }
}

// Rows [begin, end) lie in one segment: splits its events into groups.
template <typename E>
void RunSegment(GroupStep<E>* step, int64_t begin, int64_t end) {
  const int64_t events = step->OpenSegment(begin, end);
  int64_t owned = begin;
  for (int64_t first = 0; first == 0 || first < events; first += kGroup) {
    const int64_t last = std::min(first + kGroup, events);
    const int64_t next = last < events ? step->EventRow(last) : end;
    step->Run(first, last, owned, next);
    owned = next;
  }
}

template <typename E>
bool RunTyped(const CoreCall& call, const PairTask& task, const ProductKernels<E>& product,
              void* memory) {
  const GdnForwardArgs& args = *call.args;
  const SequenceParams& params = args.sequences[task.sequence];
  const TaskDims dims(args.shape);
  Arena arena(memory);
  TaskScratch<E> scratch(&arena, dims);
  LoadStates(call, task, product, dims, &scratch);
  GroupStep<E> step(call, task, product, dims, &scratch);

  const int64_t first_row = args.cu_seqlens[task.sequence];
  const int64_t end_row = args.cu_seqlens[task.sequence + 1];
  const int64_t shift = params.first_position - first_row;  // position = row + shift
  int64_t snapshot = params.snapshot_index;
  for (int64_t row = first_row; row < end_row;) {
    const int64_t next =
        std::min(end_row, NextBoundary(row + shift, params.snapshot_every) - shift);
    RunSegment(&step, row, next);
    if (params.snapshot_every > 0 && (next + shift) % params.snapshot_every == 0) {
      StoreStates(call, task, dims, scratch, args.snapshots, snapshot++);
    }
    row = next;
  }

  bool finite = true;
  for (int h = task.head_begin; h < task.head_end; ++h) {
    finite = IsFinite(scratch.heads[h].state, dims, Slice(call, task, h, 0)) && finite;
  }
  if (params.final_slot >= 0) {
    StoreStates(call, task, dims, scratch, args.final_state.data, params.final_slot);
  }
  return finite;
}

template <typename E>
size_t ScratchBytes(const GdnShape& shape) {
  Arena arena(nullptr);
  TaskScratch<E> scratch(&arena, TaskDims(shape));
  return arena.bytes();
}

}  // namespace

bool UsesBf16(const CoreCall& call) {
  return call.bf16 != nullptr && call.args->q.dtype == DType::kBF16;
}

size_t TaskScratchBytes(const GdnShape& shape, bool bf16) {
  return bf16 ? ScratchBytes<uint16_t>(shape) : ScratchBytes<float>(shape);
}

bool RunPairTask(const CoreCall& call, const PairTask& task, void* scratch) {
  return UsesBf16(call) ? RunTyped<uint16_t>(call, task, *call.bf16, scratch)
                        : RunTyped<float>(call, task, call.vector->product, scratch);
}

}  // namespace sparsegdn::cpu
