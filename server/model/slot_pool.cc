#include "server/model/slot_pool.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "server/model/status_macros.h"
#include "sparsegdn/ops.h"

namespace sparsegdn::model {
namespace {

absl::Status InRange(const char* field, int64_t got, int64_t low, int64_t high) {
  if (got >= low && got <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("limits.", field, " = ", got, ", wanted [", low, ", ", high, "]"));
}

}  // namespace

absl::StatusOr<SlotPool> SlotPool::Create(const RunnerLimits& limits, bool needs_kv) {
  // The GDN backend's own bounds on a pack.
  SPARSEGDN_RETURN_IF_ERROR(InRange("state_slots", limits.state_slots, 1, 1 << 20));
  SPARSEGDN_RETURN_IF_ERROR(InRange("max_batch_tokens", limits.max_batch_tokens, 1, 1 << 21));
  SPARSEGDN_RETURN_IF_ERROR(InRange("max_batch_seqs", limits.max_batch_seqs, 1, 65'536));
  SlotPool pool;
  pool.limits_ = limits;
  pool.needs_kv_ = needs_kv;
  pool.slots_.resize(static_cast<size_t>(limits.state_slots));
  for (int32_t i = limits.state_slots - 1; i >= 0; --i) pool.free_slots_.push_back(i);
  if (!needs_kv) return pool;
  SPARSEGDN_RETURN_IF_ERROR(InRange("kv_block_tokens", limits.kv_block_tokens, kKvTile, 1 << 20));
  if (limits.kv_block_tokens % kKvTile != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "limits.kv_block_tokens = ", limits.kv_block_tokens, ", wanted a multiple of ", kKvTile));
  }
  SPARSEGDN_RETURN_IF_ERROR(InRange("kv_tokens", limits.kv_tokens, limits.kv_block_tokens,
                                    int64_t{std::numeric_limits<int32_t>::max()} * kKvTile));
  pool.num_blocks_ = limits.kv_tokens / limits.kv_block_tokens;
  pool.free_blocks_ = BlockRuns(pool.num_blocks_);
  return pool;
}

absl::StatusOr<int32_t> SlotPool::Acquire(int64_t max_tokens) {
  if (max_tokens < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_tokens = ", max_tokens, ", wanted at least 1"));
  }
  int64_t blocks = 0;
  if (needs_kv_) {
    if (max_tokens > num_blocks_ * limits_.kv_block_tokens) {
      return absl::InvalidArgumentError(
          absl::StrCat("max_tokens = ", max_tokens, ", wanted at most ",
                       num_blocks_ * limits_.kv_block_tokens, ", the attention cache"));
    }
    blocks = (max_tokens + limits_.kv_block_tokens - 1) / limits_.kv_block_tokens;
  }
  if (free_slots_.empty()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("state slots: all ", limits_.state_slots, " are in use, wanted one"));
  }
  if (blocks > free_blocks_.free()) {
    return absl::ResourceExhaustedError(absl::StrCat("attention cache: ", free_kv_tokens(),
                                                     " tokens are free, wanted ", max_tokens));
  }
  const int32_t index = free_slots_.back();
  free_slots_.pop_back();
  Slot& slot = slots_[static_cast<size_t>(index)];
  slot.used = true;
  slot.position = 0;
  slot.capacity =
      needs_kv_ ? blocks * limits_.kv_block_tokens : std::numeric_limits<int64_t>::max();
  slot.blocks = free_blocks_.Take(blocks);
  slot.consecutive = AreConsecutive(slot.blocks);
  return index;
}

void SlotPool::Release(int32_t index) {
  Slot* slot = Find(index);
  if (slot == nullptr) return;
  free_blocks_.Return(slot->blocks);
  *slot = Slot{};
  free_slots_.push_back(index);
}

SlotPool::Slot* SlotPool::Find(int32_t slot) {
  if (slot < 0 || static_cast<size_t>(slot) >= slots_.size()) return nullptr;
  return slots_[static_cast<size_t>(slot)].used ? &slots_[static_cast<size_t>(slot)] : nullptr;
}

int64_t SlotPool::free_kv_tokens() const {
  if (!needs_kv_) return limits_.kv_tokens;
  return free_blocks_.free() * limits_.kv_block_tokens;
}

}  // namespace sparsegdn::model
