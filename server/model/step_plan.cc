#include "server/model/step_plan.h"

#include <algorithm>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/model/status_macros.h"

namespace sparsegdn::model {
namespace {

absl::Status Bad(size_t chunk, const std::string& field, int64_t got, const std::string& wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat("chunks[", chunk, "].", field, " = ", got, ", wanted ", wanted));
}

absl::Status CheckOutputs(size_t i, const Chunk& chunk) {
  const int64_t end = chunk.first_position + std::ssize(chunk.tokens);
  int64_t previous = chunk.first_position - 1;
  for (const int64_t position : chunk.logits_positions) {
    if (position <= previous || position >= end) {
      return Bad(i, "logits_positions", position,
                 absl::StrCat("ascending in [", chunk.first_position, ", ", end, ")"));
    }
    previous = position;
  }
  const int64_t unit = chunk.budget.mode == BudgetMode::kDense ? kGroup : kWindow;
  if (chunk.checkpoint_every < 0 || chunk.checkpoint_every % unit != 0) {
    return Bad(i, "checkpoint_every", chunk.checkpoint_every, absl::StrCat("a multiple of ", unit));
  }
  if (chunk.prompt_tokens < end) {
    return Bad(i, "prompt_tokens", chunk.prompt_tokens, absl::StrCat("at least ", end));
  }
  return absl::OkStatus();
}

absl::Status CheckChunk(size_t i, const Chunk& chunk, const ModelConfig& config, SlotPool& slots) {
  const SlotPool::Slot* slot = slots.Find(chunk.slot);
  if (slot == nullptr) return Bad(i, "slot", chunk.slot, "a slot in use");
  if (chunk.tokens.empty()) return Bad(i, "tokens.size", 0, "at least 1");
  if (chunk.first_position != slot->position) {
    return Bad(i, "first_position", chunk.first_position,
               absl::StrCat(slot->position, ", the tokens its slot has seen"));
  }
  const int64_t room =
      std::min(slot->capacity, config.max_position_embeddings) - chunk.first_position;
  if (std::ssize(chunk.tokens) > room) {
    return Bad(i, "tokens.size", std::ssize(chunk.tokens),
               absl::StrCat("at most ", room, ", the room left in its slot"));
  }
  for (size_t t = 0; t < chunk.tokens.size(); ++t) {
    if (chunk.tokens[t] < 0 || chunk.tokens[t] >= config.vocab_size) {
      return Bad(i, absl::StrCat("tokens[", t, "]"), chunk.tokens[t],
                 absl::StrCat("[0, ", config.vocab_size, ")"));
    }
  }
  if (chunk.next_token < -1 || chunk.next_token >= config.vocab_size) {
    return Bad(i, "next_token", chunk.next_token, absl::StrCat("[-1, ", config.vocab_size, ")"));
  }
  SPARSEGDN_RETURN_IF_ERROR(ValidateBudget(chunk.budget));
  return CheckOutputs(i, chunk);
}

void AddHeadRows(size_t index, const Chunk& chunk, int32_t first_row, StepPlan& plan) {
  const int64_t count = std::ssize(chunk.tokens);
  auto wanted = chunk.logits_positions.begin();
  for (int64_t t = 0; t < count; ++t) {
    StepPlan::HeadRow row{index, chunk.first_position + t, first_row + static_cast<int32_t>(t)};
    if (wanted != chunk.logits_positions.end() && *wanted == row.position) {
      row.logits = true;
      ++wanted;
    }
    if (chunk.logprobs_from >= 0 && row.position + 1 >= chunk.logprobs_from) {
      row.target = t + 1 < count ? chunk.tokens[static_cast<size_t>(t + 1)] : chunk.next_token;
    }
    if (row.logits || row.target >= 0) plan.head_rows.push_back(row);
  }
}

void AddSequence(size_t index, const Chunk& chunk, StepPlan& plan) {
  SequenceParams sequence;
  sequence.first_position = chunk.first_position;
  sequence.prompt_tokens = chunk.prompt_tokens;
  sequence.budget = chunk.budget;
  sequence.snapshot_every = chunk.checkpoint_every;
  sequence.snapshot_index = std::ssize(plan.checkpoints);
  sequence.initial_slot = chunk.slot;
  sequence.final_slot = chunk.slot;
  plan.sequences.push_back(sequence);
  if (chunk.checkpoint_every == 0) return;
  const int64_t every = chunk.checkpoint_every;
  const int64_t end = chunk.first_position + std::ssize(chunk.tokens);
  for (int64_t p = (chunk.first_position / every + 1) * every; p <= end; p += every) {
    plan.checkpoints.push_back({index, p, p - chunk.first_position, std::ssize(plan.checkpoints)});
  }
}

template <typename T>
absl::Status Upload(OpTable& ops, T* to, const std::vector<T>& from) {
  return ops.CopyIn(to, from.data(), from.size() * sizeof(T));
}

// Fills plan.head_stretches from head_rows, cu_seqlens and the chunks' positions. Index arrays of
// all stretches lie one after the other: at most two chunks' worth of cu_seqlens each.
absl::Status AddStretches(StepPlan& plan, const Qwen35Memory& m, OpTable& ops) {
  struct Range {
    size_t chunk;
    int32_t begin, end;  // rows of the pack
  };
  std::vector<Range> ranges;
  for (const StepPlan::HeadRow& row : plan.head_rows) {
    if (ranges.empty() || ranges.back().chunk != row.chunk) {
      ranges.push_back({row.chunk, row.row, row.row});
    }
    ranges.back().end = row.row + 1;
  }
  std::vector<int32_t> cu_seqlens;
  std::vector<int64_t> first_positions;
  for (const Range& range : ranges) {
    const bool joins =
        !plan.head_stretches.empty() &&
        plan.head_stretches.back().first_row + plan.head_stretches.back().pack.num_tokens ==
            range.begin;
    if (!joins) {
      StepPlan::Stretch stretch{range.begin, static_cast<int32_t>(range.chunk), {}};
      stretch.pack.cu_seqlens = m.head_cu_seqlens + cu_seqlens.size();
      stretch.pack.slots = m.slots + range.chunk;
      stretch.pack.first_positions = m.head_first_positions + first_positions.size();
      plan.head_stretches.push_back(stretch);
      cu_seqlens.push_back(0);
    }
    PackArgs& pack = plan.head_stretches.back().pack;
    ++pack.num_seqs;
    pack.num_tokens += range.end - range.begin;
    cu_seqlens.push_back(static_cast<int32_t>(pack.num_tokens));
    first_positions.push_back(plan.chunks[range.chunk].first_position + range.begin -
                              plan.cu_seqlens[range.chunk]);
  }
  SPARSEGDN_RETURN_IF_ERROR(Upload(ops, m.head_cu_seqlens, cu_seqlens));
  return Upload(ops, m.head_first_positions, first_positions);
}

// The sequences once for each GDN layer, [linear layers, S].
std::vector<SequenceParams> LayerSequences(const std::vector<SequenceParams>& sequences,
                                           const BudgetProfile& profile, const Qwen35Memory& m) {
  const size_t linear = static_cast<size_t>(std::ranges::count_if(
      m.layers, [](const Qwen35Memory::Layer& layer) { return layer.recurrent != nullptr; }));
  std::vector<SequenceParams> all;
  all.reserve(linear * sequences.size());
  for (size_t i = 0; i < linear; ++i) all.insert(all.end(), sequences.begin(), sequences.end());
  for (size_t s = 0; s < sequences.size(); ++s) {
    const std::vector<Budget> budgets =
        LayerBudgets(sequences[s].budget, profile, static_cast<int64_t>(linear));
    for (size_t i = 0; i < linear; ++i) all[i * sequences.size() + s].budget = budgets[i];
  }
  return all;
}

}  // namespace

absl::Status CheckChunks(std::span<const Chunk> chunks, const ModelConfig& config,
                         const RunnerLimits& limits, SlotPool& slots) {
  if (std::ssize(chunks) > limits.max_batch_seqs) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunks.size = ", chunks.size(), ", wanted at most ", limits.max_batch_seqs));
  }
  std::set<int32_t> seen;
  int64_t tokens = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    SPARSEGDN_RETURN_IF_ERROR(CheckChunk(i, chunks[i], config, slots));
    if (!seen.insert(chunks[i].slot).second) {
      return Bad(i, "slot", chunks[i].slot, "a slot that no other chunk has");
    }
    tokens += std::ssize(chunks[i].tokens);
  }
  if (tokens > limits.max_batch_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("tokens of the step = ", tokens,
                                                   ", wanted at most ", limits.max_batch_tokens));
  }
  return absl::OkStatus();
}

absl::StatusOr<StepPlan> MakePlan(std::span<const Chunk> chunks, const BudgetProfile& profile,
                                  SlotPool& slots, const Qwen35Memory& m, OpTable& ops) {
  StepPlan plan;
  plan.chunks = chunks;
  plan.cu_seqlens = {0};
  plan.consecutive_kv = true;
  std::vector<int32_t> tokens, slot_of, block_tables;
  std::vector<int64_t> first_positions;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const Chunk& chunk = chunks[i];
    AddHeadRows(i, chunk, plan.cu_seqlens.back(), plan);
    AddSequence(i, chunk, plan);
    tokens.insert(tokens.end(), chunk.tokens.begin(), chunk.tokens.end());
    plan.cu_seqlens.push_back(static_cast<int32_t>(tokens.size()));
    slot_of.push_back(chunk.slot);
    first_positions.push_back(chunk.first_position);
    const SlotPool::Slot& slot = *slots.Find(chunk.slot);
    plan.consecutive_kv &= slot.consecutive;
    std::vector<int32_t> row = slot.blocks;
    row.resize(static_cast<size_t>(m.max_blocks), 0);
    block_tables.insert(block_tables.end(), row.begin(), row.end());
  }
  SPARSEGDN_RETURN_IF_ERROR(Upload(ops, m.tokens, tokens));
  SPARSEGDN_RETURN_IF_ERROR(Upload(ops, m.cu_seqlens, plan.cu_seqlens));
  SPARSEGDN_RETURN_IF_ERROR(Upload(ops, m.slots, slot_of));
  SPARSEGDN_RETURN_IF_ERROR(Upload(ops, m.first_positions, first_positions));
  SPARSEGDN_RETURN_IF_ERROR(Upload(ops, m.block_tables, block_tables));
  SPARSEGDN_RETURN_IF_ERROR(Upload(ops, m.sequences, LayerSequences(plan.sequences, profile, m)));
  plan.pack = {static_cast<int32_t>(chunks.size()), static_cast<int64_t>(tokens.size()),
               m.cu_seqlens, m.slots, m.first_positions};
  plan.whole = {0, 0, plan.pack};
  SPARSEGDN_RETURN_IF_ERROR(AddStretches(plan, m, ops));
  return plan;
}

}  // namespace sparsegdn::model
