// Which slots are in use, how many tokens each has seen, and which cache blocks it holds.
#ifndef SPARSEGDN_SERVER_MODEL_SLOT_POOL_H_
#define SPARSEGDN_SERVER_MODEL_SLOT_POOL_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/block_runs.h"
#include "server/model/model_runner.h"

namespace sparsegdn::model {

class SlotPool {
 public:
  struct Slot {
    bool used = false;
    int64_t position = 0;         // tokens seen
    int64_t capacity = 0;         // tokens that fit
    std::vector<int32_t> blocks;  // of the attention cache, in order of position
    bool consecutive = false;     // whether they follow one another
  };

  // INVALID_ARGUMENT names a limit out of range. Without full attention no cache is needed and
  // every slot holds any number of tokens.
  static absl::StatusOr<SlotPool> Create(const RunnerLimits& limits, bool needs_kv);

  // RESOURCE_EXHAUSTED when no slot or too few blocks are free now; INVALID_ARGUMENT when
  // max_tokens never fits.
  absl::StatusOr<int32_t> Acquire(int64_t max_tokens);
  // Nothing happens for a slot that is not in use.
  void Release(int32_t slot);

  // Null unless the slot is in use.
  Slot* Find(int32_t slot);

  int32_t free_slots() const { return static_cast<int32_t>(free_slots_.size()); }
  int64_t free_kv_tokens() const;
  int64_t num_blocks() const { return num_blocks_; }

 private:
  RunnerLimits limits_;
  bool needs_kv_ = false;
  int64_t num_blocks_ = 0;
  std::vector<Slot> slots_;
  std::vector<int32_t> free_slots_;
  BlockRuns free_blocks_;
};

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_SLOT_POOL_H_
