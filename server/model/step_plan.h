// One step's chunks laid out as a pack, on the host and in the backend's memory.
#ifndef SPARSEGDN_SERVER_MODEL_STEP_PLAN_H_
#define SPARSEGDN_SERVER_MODEL_STEP_PLAN_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/budget_profile.h"
#include "server/model/config.h"
#include "server/model/model_runner.h"
#include "server/model/op_table.h"
#include "server/model/qwen35_memory.h"
#include "server/model/slot_pool.h"

namespace sparsegdn::model {

struct StepPlan {
  // A row whose logits or log-probability somebody asked for, in ascending order of row.
  struct HeadRow {
    size_t chunk = 0;
    int64_t position = 0;  // absolute
    int32_t row = 0;       // in the pack
    bool logits = false;
    int32_t target = -1;  // the token whose log p is wanted; -1: none
  };
  // A state to be shown after `position` tokens, which lie `rows` rows into the chunk.
  struct Checkpoint {
    size_t chunk = 0;
    int64_t position = 0;
    int64_t rows = 0;
    int64_t index = 0;  // into the checkpoint buffers
  };

  // Rows that lie side by side in the pack: whole chunks, but for the first one's beginning and the
  // last one's end.
  struct Stretch {
    int64_t first_row = 0;
    int32_t first_seq = 0;
    PackArgs pack;  // of these rows alone; device pointers
  };

  std::span<const Chunk> chunks;
  std::vector<int32_t> cu_seqlens;
  std::vector<HeadRow> head_rows;
  std::vector<Checkpoint> checkpoints;
  PackArgs pack;                          // device pointers
  bool consecutive_kv = false;            // every chunk's cache blocks follow one another
  std::vector<SequenceParams> sequences;  // budgets as requested
  Stretch whole;                          // all rows
  // What the head rows span: the rows of the last layer's output that anybody reads. Of each chunk
  // all rows from its first head row to its last one.
  std::vector<Stretch> head_stretches;
};

// INVALID_ARGUMENT naming the chunk's field, got, wanted: more tokens or chunks than the limits, an
// empty chunk, a slot that is not in use or comes twice, a first_position that is not the slot's,
// tokens beyond the slot's capacity or outside the vocabulary, a bad budget or logits position.
absl::Status CheckChunks(std::span<const Chunk> chunks, const ModelConfig& config,
                         const RunnerLimits& limits, SlotPool& slots);

// Lays the (checked) chunks out and copies the indices in, budgets shared out by `profile`.
absl::StatusOr<StepPlan> MakePlan(std::span<const Chunk> chunks, const BudgetProfile& profile,
                                  SlotPool& slots, const Qwen35Memory& memory, OpTable& ops);

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_STEP_PLAN_H_
