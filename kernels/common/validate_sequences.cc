#include <string>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "kernels/common/validate.h"

namespace sparsegdn {
namespace {

absl::Status BadSequence(int32_t i, const char* field, int64_t got, const std::string& wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat("sequences[", i, "].", field, " = ", got, ", must be ", wanted));
}

absl::Status CheckCuSeqlens(const GdnForwardArgs& args) {
  const int32_t* cu = args.cu_seqlens;
  if (cu[0] != 0) {
    return absl::InvalidArgumentError(absl::StrCat("cu_seqlens[0] = ", cu[0], ", must be 0"));
  }
  for (int32_t i = 0; i < args.num_seqs; ++i) {
    if (cu[i + 1] < cu[i]) {
      return absl::InvalidArgumentError(absl::StrCat("cu_seqlens[", i + 1, "] = ", cu[i + 1],
                                                     ", must be >= cu_seqlens[", i, "] = ", cu[i]));
    }
  }
  if (cu[args.num_seqs] > args.num_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("cu_seqlens[", args.num_seqs,
                                                   "] = ", cu[args.num_seqs],
                                                   ", must be <= num_tokens = ", args.num_tokens));
  }
  return absl::OkStatus();
}

absl::Status CheckPositions(const SequenceParams& p, int32_t i, int64_t length) {
  if (p.first_position < 0 || p.first_position > kMaxPosition) {
    return BadSequence(i, "first_position", p.first_position,
                       absl::StrCat("in [0, ", kMaxPosition, "]"));
  }
  if (p.prompt_tokens < p.first_position + length || p.prompt_tokens > 2 * kMaxPosition) {
    return BadSequence(i, "prompt_tokens", p.prompt_tokens,
                       absl::StrCat(">= first_position + length = ", p.first_position + length,
                                    " and <= ", 2 * kMaxPosition));
  }
  return absl::OkStatus();
}

absl::Status CheckSnapshots(const GdnForwardArgs& args, int32_t i, int64_t length) {
  const SequenceParams& p = args.sequences[i];
  const int64_t unit = p.budget.mode == BudgetMode::kDense ? kGroup : kWindow;
  if (p.snapshot_every < 0 || p.snapshot_every % unit != 0) {
    return BadSequence(i, "snapshot_every", p.snapshot_every,
                       absl::StrCat("0 or a multiple of ", unit));
  }
  const int64_t count = CountSnapshots(p.first_position, length, p.snapshot_every);
  if (count > 0 && (p.snapshot_index < 0 || p.snapshot_index > args.snapshot_slots - count)) {
    return BadSequence(i, "snapshot_index", p.snapshot_index,
                       absl::StrCat("in [0, ", args.snapshot_slots - count, "]: ", count,
                                    " snapshots, snapshot_slots = ", args.snapshot_slots));
  }
  return absl::OkStatus();
}

absl::Status CheckSlot(int32_t i, const char* field, int32_t slot, int32_t slots) {
  if (slot < slots) return absl::OkStatus();
  return BadSequence(i, field, slot, absl::StrCat("below the pool's slots = ", slots));
}

// Two sequences may not write one slot, and none may write the slot another one starts from.
absl::Status CheckSlotOwners(const GdnForwardArgs& args) {
  // By slot. As large as the call, not as the pool: that is a number that a caller may just claim.
  std::unordered_map<int32_t, int32_t> writer;
  for (int32_t i = 0; i < args.num_seqs; ++i) {
    const int32_t slot = args.sequences[i].final_slot;
    if (slot < 0) continue;
    const auto [known, is_new] = writer.emplace(slot, i);
    if (!is_new) {
      return BadSequence(i, "final_slot", slot,
                         absl::StrCat("unlike that of sequences[", known->second, "]"));
    }
  }
  if (args.initial_state.data != args.final_state.data) return absl::OkStatus();
  for (int32_t i = 0; i < args.num_seqs; ++i) {
    const int32_t slot = args.sequences[i].initial_slot;
    const auto known = writer.find(slot);
    if (known == writer.end() || known->second == i) continue;
    return BadSequence(i, "initial_slot", slot,
                       absl::StrCat("no slot that sequences[", known->second, "] writes"));
  }
  return absl::OkStatus();
}

absl::Status CheckSequence(const GdnForwardArgs& args, EntryPoint entry, int32_t i) {
  const SequenceParams& p = args.sequences[i];
  const int64_t length = args.cu_seqlens[i + 1] - args.cu_seqlens[i];
  if (auto s = CheckPositions(p, i, length); !s.ok()) return s;
  if (auto s = ValidateBudget(p.budget); !s.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("sequences[", i, "].", s.message()));
  }
  if (p.budget.mode != BudgetMode::kDense && p.budget.selector == Selector::kWriteNorm &&
      args.mask == nullptr && args.v.data == nullptr && length > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("v = null, must be given: sequences[", i, "].budget.selector is WRITE_NORM"));
  }
  if (entry == EntryPoint::kSelect) return absl::OkStatus();
  if (auto s = CheckSnapshots(args, i, length); !s.ok()) return s;
  if (auto s = CheckSlot(i, "initial_slot", p.initial_slot, args.initial_state.slots); !s.ok()) {
    return s;
  }
  return CheckSlot(i, "final_slot", p.final_slot, args.final_state.slots);
}

}  // namespace

int64_t CountSnapshots(int64_t first_position, int64_t length, int64_t snapshot_every) {
  if (snapshot_every <= 0) return 0;
  return (first_position + length) / snapshot_every - first_position / snapshot_every;
}

absl::Status ValidateSequences(const GdnForwardArgs& args, EntryPoint entry, uint32_t* status) {
  *status = 0;
  if (args.num_seqs == 0) return absl::OkStatus();
  if (auto s = CheckCuSeqlens(args); !s.ok()) {
    *status = kStatusBadCuSeqlens;
    return s;
  }
  absl::Status s;
  for (int32_t i = 0; i < args.num_seqs && s.ok(); ++i) s = CheckSequence(args, entry, i);
  if (s.ok() && entry == EntryPoint::kForward) s = CheckSlotOwners(args);
  if (!s.ok()) *status = kStatusBadSequence;
  return s;
}

}  // namespace sparsegdn
