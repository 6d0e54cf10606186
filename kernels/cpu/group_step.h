// One group of one head pair, read top to bottom in Run: docs/algorithm.md, "Groups".
#ifndef SPARSEGDN_KERNELS_CPU_GROUP_STEP_H_
#define SPARSEGDN_KERNELS_CPU_GROUP_STEP_H_

#include <cstdint>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/pair_task.h"
#include "kernels/cpu/scratch.h"

namespace sparsegdn::cpu {

// Per value head, with S_B the state before the first owned token and G summed from there:
//   u_i = beta_i (v_i - e^{G_i} S_B^T k_i) - sum_{l<i} beta_i e^{G_i - G_l} (k_i . k_l) u_l
//   o_t = scale (e^{G_t} S_B^T q_t + sum_{i<=t} e^{G_t - G_i} (q_t . k_i) u_i) + self term
//   S_B <- e^{G_end} S_B + sum_i e^{G_end - G_i} k_i u_i^T
// Normalisation of q and k enters as factors of rows and columns, so that bf16 inputs are never
// rounded again.
template <typename E>
class GroupStep {
 public:
  GroupStep(const CoreCall& call, const PairTask& task, const ProductKernels<E>& product,
            const TaskDims& dims, TaskScratch<E>* scratch);

  // Collects the events of rows [begin, end), sums their gates, and returns how many there are.
  int64_t OpenSegment(int64_t begin, int64_t end);
  int64_t EventRow(int64_t event) const { return scratch_->events[event]; }

  // Events [first, last) of the segment, owning rows [begin, end).
  void Run(int64_t first, int64_t last, int64_t begin, int64_t end);

 private:
  struct QueryRows {
    const E* data;
    int64_t ld;
  };

  void SumGates(int h, int64_t begin, int64_t end);
  void SetGroupGates(int h, int64_t begin, int64_t end);
  void GatherKeys();
  bool DropsFarBlocks(int h) const;
  void SolveHead(int h);
  void OutputTile(int64_t row, int rows);
  QueryRows LoadQueries(int64_t row, int rows);
  void PrepareRows(int64_t row, int rows);
  void OutputHead(int h, int64_t row, int rows, const QueryRows& q);
  void UpdateHead(int h, int64_t end);
  bool AllUpdatesZero(const HeadScratch<E>& head) const;
  const void* Row(const ConstTensorRef& x, int64_t row, int head, int column = 0) const;
  int value_head(int h) const { return task_.pair * dims_.ratio + h; }

  const CoreCall& call_;
  const GdnForwardArgs& args_;
  const PairTask& task_;
  const ProductKernels<E>& product_;
  const TaskDims& dims_;
  TaskScratch<E>* scratch_;
  const uint8_t* mask_;  // null: every token is an event
  Solver solver_;
  bool self_term_;
  float scale_;

  // The current segment and group.
  int64_t segment_begin_ = 0;
  int64_t group_begin_ = 0;
  const int32_t* events_ = nullptr;
  int num_events_ = 0;
  int next_event_ = 0;  // first event at or past the next tile
};

}  // namespace sparsegdn::cpu

#endif  // SPARSEGDN_KERNELS_CPU_GROUP_STEP_H_
