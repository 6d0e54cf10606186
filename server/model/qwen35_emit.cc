// What a step hands out: states, attention KV, logits and log-probabilities, statistics.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/model/qwen35_graph.h"
#include "server/model/status_macros.h"

namespace sparsegdn::model {
namespace {

bool AllFinite(const float* values, int64_t count) {
  return std::all_of(values, values + count, [](float v) { return std::isfinite(v); });
}

// Gathers each chunk's log-probabilities, so that the sink gets them in one call.
class LogprobCollector {
 public:
  explicit LogprobCollector(size_t chunks) : chunks_(chunks) {}
  void Add(const StepPlan::HeadRow& row, float value) {
    Values& values = chunks_[row.chunk];
    if (values.logprobs.empty()) values.first = row.position + 1;
    values.logprobs.push_back(value);
  }
  void Emit(StepSink& sink, StepStats& stats) const {
    for (size_t i = 0; i < chunks_.size(); ++i) {
      const std::vector<float>& values = chunks_[i].logprobs;
      if (values.empty()) continue;
      if (!AllFinite(values.data(), std::ssize(values))) stats.chunks[i].nonfinite = true;
      sink.OnLogprobs(i, chunks_[i].first, values);
    }
  }

 private:
  struct Values {
    int64_t first = 0;
    std::vector<float> logprobs;
  };
  std::vector<Values> chunks_;
};

}  // namespace

absl::Status Qwen35Graph::SaveConvCheckpoints(const StepPlan& plan, size_t layer, ConstRows raw) {
  const size_t bytes = static_cast<size_t>(memory_.conv_elements) * memory_.activation_bytes;
  for (const StepPlan::Checkpoint& c : plan.checkpoints) {
    const auto* first = static_cast<const char*>(raw.data) +
                        plan.cu_seqlens[c.chunk] * raw.stride * memory_.activation_bytes;
    const size_t slot = static_cast<size_t>(plan.chunks[c.chunk].slot);
    SPARSEGDN_RETURN_IF_ERROR(ops_.ConvStateAt(
        {.channels = config_.conv_channels(),
         .x = {first, raw.stride},
         .rows = c.rows,
         .state = static_cast<const char*>(memory_.layers[layer].conv) + slot * bytes,
         .out = static_cast<char*>(memory_.checkpoint_conv) + c.index * bytes}));
  }
  return absl::OkStatus();
}

absl::Status Qwen35Graph::EmitStates(const StepPlan& plan, size_t layer, StepSink& sink) {
  const Qwen35Memory& m = memory_;
  const size_t conv_bytes = static_cast<size_t>(m.conv_elements) * m.activation_bytes;
  const size_t recurrent_bytes = static_cast<size_t>(m.recurrent_elements) * sizeof(float);
  const auto emit = [&](size_t chunk, int64_t position, const float* recurrent, const void* conv,
                        int64_t index) -> absl::Status {
    const MemoryRange ranges[] = {
        {recurrent + index * m.recurrent_elements, recurrent_bytes},
        {static_cast<const char*>(conv) + index * conv_bytes, conv_bytes}};
    return ops_.ToHostLater(ranges, [=, this, &sink](OpTable::HostViews views) {
      sink.OnState(chunk, static_cast<int32_t>(layer), position,
                   {views[0], DType::kF32, memory_.recurrent_elements},
                   ActivationView(views[1], memory_.conv_elements));
    });
  };
  auto checkpoint = plan.checkpoints.begin();
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    for (; checkpoint != plan.checkpoints.end() && checkpoint->chunk == i; ++checkpoint) {
      SPARSEGDN_RETURN_IF_ERROR(emit(i, checkpoint->position, m.checkpoint_recurrent,
                                     m.checkpoint_conv, checkpoint->index));
    }
    const Chunk& chunk = plan.chunks[i];
    if (!chunk.emit_state) continue;
    SPARSEGDN_RETURN_IF_ERROR(emit(i, chunk.first_position + std::ssize(chunk.tokens),
                                   m.layers[layer].recurrent, m.layers[layer].conv, chunk.slot));
  }
  return absl::OkStatus();
}

absl::Status Qwen35Graph::EmitKv(const StepPlan& plan, size_t layer, StepSink& sink) {
  const int64_t width = int64_t{config_.num_kv_heads} * config_.head_dim;
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    if (!plan.chunks[i].emit_kv) continue;
    const size_t first = static_cast<size_t>(plan.cu_seqlens[i] * width) * memory_.activation_bytes;
    const int64_t elements = std::ssize(plan.chunks[i].tokens) * width;
    const size_t bytes = static_cast<size_t>(elements) * memory_.activation_bytes;
    const MemoryRange ranges[] = {{static_cast<const char*>(memory_.k) + first, bytes},
                                  {static_cast<const char*>(memory_.v) + first, bytes}};
    const int64_t position = plan.chunks[i].first_position;
    SPARSEGDN_RETURN_IF_ERROR(ops_.ToHostLater(ranges, [=, this, &sink](OpTable::HostViews views) {
      sink.OnKv(i, static_cast<int32_t>(layer), position, ActivationView(views[0], elements),
                ActivationView(views[1], elements));
    }));
  }
  return absl::OkStatus();
}

absl::Status Qwen35Graph::RunHead(const StepPlan& plan, StepSink& sink, StepStats& stats) {
  const Qwen35Memory& m = memory_;
  const int64_t vocab = config_.vocab_size;
  LogprobCollector logprobs(plan.chunks.size());
  for (size_t begin = 0; begin < plan.head_rows.size(); begin += kLogitRows) {
    const auto rows =
        std::span(plan.head_rows)
            .subspan(begin, std::min<size_t>(kLogitRows, plan.head_rows.size() - begin));
    const int64_t count = std::ssize(rows);
    int32_t index[kLogitRows], targets[kLogitRows];
    for (int64_t i = 0; i < count; ++i) {
      index[i] = rows[i].row;
      targets[i] = std::max(0, rows[i].target);  // rows without a target are not read back
    }
    const size_t index_bytes = static_cast<size_t>(count) * sizeof(int32_t);
    SPARSEGDN_RETURN_IF_ERROR(ops_.CopyIn(m.head_index, index, index_bytes));
    SPARSEGDN_RETURN_IF_ERROR(ops_.CopyIn(m.head_targets, targets, index_bytes));
    SPARSEGDN_RETURN_IF_ERROR(
        ops_.GatherRows(count, config_.hidden_size, m.head_index, m.x, m.head_rows));
    SPARSEGDN_RETURN_IF_ERROR(ops_.RmsNorm({.rows = count,
                                            .cols = config_.hidden_size,
                                            .x = m.head_rows,
                                            .weight = weights_.final_norm,
                                            .eps = static_cast<float>(config_.rms_norm_eps),
                                            .y = m.head_normed}));
    SPARSEGDN_RETURN_IF_ERROR(Show("final_norm", -1, m.head_normed, count, config_.hidden_size));
    SPARSEGDN_RETURN_IF_ERROR(ops_.GemmLogits(count, m.head_normed, *weights_.lm_head, m.logits));
    SPARSEGDN_RETURN_IF_ERROR(ops_.LogProb({.rows = count,
                                            .vocab = vocab,
                                            .logits = m.logits,
                                            .targets = m.head_targets,
                                            .out = m.log_probs}));
    const MemoryRange ranges[] = {{m.logits, static_cast<size_t>(count * vocab) * sizeof(float)},
                                  {m.log_probs, static_cast<size_t>(count) * sizeof(float)}};
    const void* views[2] = {};
    // The rows compute while the last states are handed on; then the sink is called on this thread.
    SPARSEGDN_RETURN_IF_ERROR(ops_.FinishToHost());
    SPARSEGDN_RETURN_IF_ERROR(ops_.ToHost(ranges, views));
    for (int64_t i = 0; i < count; ++i) {
      const float* logits = static_cast<const float*>(views[0]) + i * vocab;
      if (rows[i].logits) {
        if (!AllFinite(logits, vocab)) stats.chunks[rows[i].chunk].nonfinite = true;
        sink.OnLogits(rows[i].chunk, rows[i].position, {logits, static_cast<size_t>(vocab)});
      }
      if (rows[i].target >= 0) logprobs.Add(rows[i], static_cast<const float*>(views[1])[i]);
    }
  }
  SPARSEGDN_RETURN_IF_ERROR(ops_.FinishToHost());
  logprobs.Emit(sink, stats);
  return absl::OkStatus();
}

absl::Status Qwen35Graph::CollectStats(const StepPlan& plan, StepStats& stats) {
  const Qwen35Memory& m = memory_;
  const size_t seqs = plan.chunks.size(), linear = static_cast<size_t>(num_linear_);
  const size_t pairs = static_cast<size_t>(config_.gdn.num_k_heads);
  const MemoryRange ranges[] = {{m.selected, linear * seqs * pairs * sizeof(int32_t)},
                                {m.nonfinite, (linear + 1) * seqs * sizeof(int32_t)},
                                {m.gdn_status, linear * sizeof(uint32_t)}};
  const void* views[3] = {};
  SPARSEGDN_RETURN_IF_ERROR(ops_.ToHost(ranges, views));
  const auto* selected = static_cast<const int32_t*>(views[0]);
  const auto* nonfinite = static_cast<const int32_t*>(views[1]);
  const auto* status = static_cast<const uint32_t*>(views[2]);
  for (size_t i = 0; i < seqs; ++i) {
    ChunkStats& chunk = stats.chunks[i];
    for (size_t l = 0; l < linear; ++l) {
      const int32_t* row = selected + (l * seqs + i) * pairs;
      chunk.selected.insert(chunk.selected.end(), row, row + pairs);
    }
    for (size_t l = 0; l <= linear; ++l) chunk.nonfinite |= nonfinite[l * seqs + i] != 0;
  }
  // A NaN beta is out of range too, and its chunk is flagged above; the other bits are our bugs.
  for (size_t l = 0; l < linear; ++l) {
    if ((status[l] & ~kStatusBetaOutOfRange) != 0) {
      return absl::InternalError(
          absl::StrCat("GDN core of linear layer ", l, ": status ", status[l], ", wanted 0"));
    }
  }
  SPARSEGDN_ASSIGN_OR_RETURN(const GdnTimings timings, ops_.TakeGdnTimings());
  stats.selection_ns = timings.selection_ns;
  stats.gdn_core_ns = timings.core_ns;
  return absl::OkStatus();
}

}  // namespace sparsegdn::model
