#include "server/model/qwen35_graph.h"

#include "server/model/status_macros.h"

namespace sparsegdn::model {

ConstRows Columns(const Rows& rows, int64_t first, size_t element_bytes) {
  return {static_cast<const char*>(rows.data) + static_cast<size_t>(first) * element_bytes,
          rows.stride};
}

Qwen35Graph::Qwen35Graph(const ModelConfig& config, const RunnerLimits& limits,
                         const ModelWeights& weights, const Qwen35Memory& memory, OpTable& ops)
    : config_(config), limits_(limits), weights_(weights), memory_(memory), ops_(ops) {
  for (const LayerKind kind : config.layers) {
    linear_index_.push_back(kind == LayerKind::kLinear ? num_linear_++ : -1);
  }
}

BufferView Qwen35Graph::ActivationView(const void* data, int64_t elements) const {
  return {data, ops_.activation_dtype(), elements};
}

absl::Status Qwen35Graph::Show(std::string_view name, int32_t layer, ConstRows rows, int64_t count,
                               int64_t cols) {
  if (!probe_) return absl::OkStatus();
  const MemoryRange range{rows.data, static_cast<size_t>(((count - 1) * rows.stride + cols) * 4)};
  const void* view = nullptr;
  SPARSEGDN_RETURN_IF_ERROR(ops_.ToHost({&range, 1}, {&view, 1}));
  probe_(name, layer, static_cast<const float*>(view), count, cols, rows.stride);
  return absl::OkStatus();
}

Rows Qwen35Graph::From(const Rows& rows, const StepPlan::Stretch& stretch) const {
  const int64_t elements = stretch.first_row * rows.stride;
  return {static_cast<char*>(rows.data) + static_cast<size_t>(elements) * memory_.activation_bytes,
          rows.stride};
}

absl::Status Qwen35Graph::Norm(const StepPlan::Stretch& stretch, const float* weight) {
  return ops_.RmsNorm({.rows = stretch.pack.num_tokens,
                       .cols = config_.hidden_size,
                       .x = From(memory_.x, stretch),
                       .weight = weight,
                       .eps = static_cast<float>(config_.rms_norm_eps),
                       .y = From(memory_.normed, stretch)});
}

absl::Status Qwen35Graph::RunCore(const StepPlan& plan, size_t layer, ConstRows qkv) {
  const GdnShape& shape = config_.gdn;
  const Qwen35Memory& m = memory_;
  const int64_t key_dim = int64_t{shape.num_k_heads} * shape.head_dim_k;
  const DType dtype = ops_.activation_dtype();
  const auto part = [&](int64_t first, int64_t head_dim) {
    const auto* data = static_cast<const char*>(qkv.data) + first * m.activation_bytes;
    return ConstTensorRef{data, dtype, qkv.stride, head_dim};
  };
  const int64_t seqs = plan.pack.num_seqs, linear = linear_index_[layer];
  GdnForwardArgs args;
  args.shape = shape;
  args.num_tokens = plan.pack.num_tokens;
  args.num_seqs = plan.pack.num_seqs;
  args.cu_seqlens = plan.pack.cu_seqlens;
  args.sequences = m.sequences + linear * seqs;
  args.q = part(0, shape.head_dim_k);
  args.k = part(key_dim, shape.head_dim_k);
  args.v = part(2 * key_dim, shape.head_dim_v);
  args.log_gate = {m.log_gate, DType::kF32, shape.num_v_heads, 1};
  args.beta = {m.beta, DType::kF32, shape.num_v_heads, 1};
  args.normalize_qk = true;
  args.initial_state =
      args.final_state = {m.layers[layer].recurrent, limits_.state_slots, StateLayout::kKeyMajor};
  args.o = {m.mixer_out.data, dtype, m.mixer_out.stride, shape.head_dim_v};
  args.selected = m.selected + linear * seqs * shape.num_k_heads;
  args.nonfinite = m.nonfinite + linear * seqs;
  args.status = m.gdn_status + linear;
  if (!plan.checkpoints.empty()) {
    args.snapshots = m.checkpoint_recurrent;
    args.snapshot_slots = m.max_checkpoints;
  }
  args.workspace = m.workspace;
  args.workspace_bytes = m.workspace_bytes;
  return ops_.GdnForward(args);
}

absl::Status Qwen35Graph::RunLinear(const StepPlan& plan, size_t layer, StepSink& sink) {
  const LinearWeights& w = weights_.layers[layer].linear;
  const Qwen35Memory& m = memory_;
  const int32_t index = static_cast<int32_t>(layer);
  const int64_t rows = plan.pack.num_tokens, channels = config_.conv_channels();
  const int64_t value = config_.value_dim(), heads = config_.gdn.num_v_heads;
  SPARSEGDN_RETURN_IF_ERROR(ops_.Gemm(rows, m.normed, *w.in, {}, m.fused));
  SPARSEGDN_RETURN_IF_ERROR(Show("projections", index, m.fused, rows, w.in->out()));
  SPARSEGDN_RETURN_IF_ERROR(SaveConvCheckpoints(plan, layer, m.fused));
  SPARSEGDN_RETURN_IF_ERROR(
      ops_.GdnFront({.pack = plan.pack,
                     .channels = channels,
                     .num_v_heads = config_.gdn.num_v_heads,
                     .x = m.fused,
                     .a = Columns(m.fused, channels + value + heads, m.activation_bytes),
                     .b = Columns(m.fused, channels + value, m.activation_bytes),
                     .taps = w.taps,
                     .a_log = w.a_log,
                     .dt_bias = w.dt_bias,
                     .conv_state = m.layers[layer].conv,
                     .y = m.mixed,
                     .log_gate = m.log_gate,
                     .beta = m.beta}));
  SPARSEGDN_RETURN_IF_ERROR(Show("conv", index, m.mixed, rows, channels));
  SPARSEGDN_RETURN_IF_ERROR(Show("log_gate", index, {m.log_gate, heads}, rows, heads));
  SPARSEGDN_RETURN_IF_ERROR(Show("beta", index, {m.beta, heads}, rows, heads));
  SPARSEGDN_RETURN_IF_ERROR(RunCore(plan, layer, m.mixed));
  return EmitStates(plan, layer, sink);
}

absl::Status Qwen35Graph::FinishLinear(const StepPlan::Stretch& stretch, size_t layer) {
  const LinearWeights& w = weights_.layers[layer].linear;
  const Qwen35Memory& m = memory_;
  const int32_t index = static_cast<int32_t>(layer);
  const int64_t rows = stretch.pack.num_tokens, value = config_.value_dim();
  const Rows out = From(m.mixer_out, stretch), x = From(m.x, stretch);
  SPARSEGDN_RETURN_IF_ERROR(Show("core", index, out, rows, value));
  SPARSEGDN_RETURN_IF_ERROR(ops_.GatedNorm(
      {.rows = rows,
       .heads = config_.gdn.num_v_heads,
       .dim = config_.gdn.head_dim_v,
       .o = out,
       .z = Columns(From(m.fused, stretch), config_.conv_channels(), m.activation_bytes),
       .weight = w.gate_norm,
       .eps = static_cast<float>(config_.rms_norm_eps),
       .y = out}));
  SPARSEGDN_RETURN_IF_ERROR(Show("mixer_out", index, out, rows, value));
  return ops_.Gemm(rows, out, *w.out, x, x);
}

KvCacheRef Qwen35Graph::CacheOf(const StepPlan& plan, size_t layer, int32_t first_seq) const {
  return {memory_.layers[layer].kv, memory_.block_tables + first_seq * memory_.max_blocks,
          memory_.max_blocks, limits_.kv_block_tokens, plan.consecutive_kv};
}

absl::Status Qwen35Graph::RunFull(const StepPlan& plan, size_t layer, StepSink& sink) {
  const FullWeights& w = weights_.layers[layer].full;
  const Qwen35Memory& m = memory_;
  const int32_t index = static_cast<int32_t>(layer);
  const int64_t rows = plan.pack.num_tokens;
  const int64_t q = int64_t{config_.num_q_heads} * config_.head_dim;
  const int64_t kv = int64_t{config_.num_kv_heads} * config_.head_dim;
  const AttentionShape shape = AttentionShapeOf(config_);
  SPARSEGDN_RETURN_IF_ERROR(ops_.Gemm(rows, m.normed, *w.in, {}, m.fused));
  SPARSEGDN_RETURN_IF_ERROR(Show("projections", index, m.fused, rows, w.in->out()));
  SPARSEGDN_RETURN_IF_ERROR(
      ops_.AttentionFront({.pack = plan.pack,
                           .shape = shape,
                           .q_gate = m.fused,
                           .k = Columns(m.fused, 2 * q, m.activation_bytes),
                           .v = Columns(m.fused, 2 * q + kv, m.activation_bytes),
                           .q_norm = w.q_norm,
                           .k_norm = w.k_norm,
                           .eps = static_cast<float>(config_.rms_norm_eps),
                           .cos = m.cos,
                           .sin = m.sin,
                           .q_out = m.mixed,
                           .k_out = m.k,
                           .v_out = m.v,
                           .cache = CacheOf(plan, layer, 0)}));
  SPARSEGDN_RETURN_IF_ERROR(EmitKv(plan, layer, sink));
  return Show("query", index, m.mixed, rows, q);
}

absl::Status Qwen35Graph::FinishFull(const StepPlan& plan, const StepPlan::Stretch& stretch,
                                     size_t layer) {
  const Qwen35Memory& m = memory_;
  const int64_t rows = stretch.pack.num_tokens;
  const Rows out = From(m.mixer_out, stretch), x = From(m.x, stretch);
  SPARSEGDN_RETURN_IF_ERROR(ops_.Attention(
      {.pack = stretch.pack,
       .shape = AttentionShapeOf(config_),
       .q = From(m.mixed, stretch),
       .q_gate = From(m.fused, stretch),
       .cache = CacheOf(plan, layer, stretch.first_seq),
       .out = out}));
  SPARSEGDN_RETURN_IF_ERROR(Show("mixer_out", static_cast<int32_t>(layer), out, rows,
                                 int64_t{config_.num_q_heads} * config_.head_dim));
  return ops_.Gemm(rows, out, *weights_.layers[layer].full.out, x, x);
}

absl::Status Qwen35Graph::RunMlp(const StepPlan::Stretch& stretch, size_t layer) {
  const LayerWeights& w = weights_.layers[layer];
  const int64_t rows = stretch.pack.num_tokens, inner = config_.intermediate_size;
  const Rows fused = From(memory_.fused, stretch), mixed = From(memory_.mixed, stretch);
  const Rows x = From(memory_.x, stretch);
  SPARSEGDN_RETURN_IF_ERROR(ops_.Gemm(rows, From(memory_.normed, stretch), *w.gate_up, {}, fused));
  SPARSEGDN_RETURN_IF_ERROR(
      ops_.SwiGlu({.rows = rows, .inner = inner, .gate_up = fused, .y = mixed}));
  SPARSEGDN_RETURN_IF_ERROR(Show("swiglu", static_cast<int32_t>(layer), mixed, rows, inner));
  return ops_.Gemm(rows, mixed, *w.down, x, x);
}

absl::Status Qwen35Graph::FinishLayer(const StepPlan& plan, const StepPlan::Stretch& stretch,
                                      size_t layer) {
  const int64_t rows = stretch.pack.num_tokens, hidden = config_.hidden_size;
  const int32_t index = static_cast<int32_t>(layer);
  const Rows x = From(memory_.x, stretch);
  SPARSEGDN_RETURN_IF_ERROR(config_.layers[layer] == LayerKind::kLinear
                                ? FinishLinear(stretch, layer)
                                : FinishFull(plan, stretch, layer));
  SPARSEGDN_RETURN_IF_ERROR(Show("after_mixer", index, x, rows, hidden));
  SPARSEGDN_RETURN_IF_ERROR(Norm(stretch, weights_.layers[layer].post_norm));
  SPARSEGDN_RETURN_IF_ERROR(Show("post_norm", index, From(memory_.normed, stretch), rows, hidden));
  SPARSEGDN_RETURN_IF_ERROR(RunMlp(stretch, layer));
  return Show("output", index, x, rows, hidden);
}

absl::Status Qwen35Graph::RunLayer(const StepPlan& plan, size_t layer, StepSink& sink) {
  const int64_t rows = plan.pack.num_tokens, hidden = config_.hidden_size;
  const int32_t index = static_cast<int32_t>(layer);
  SPARSEGDN_RETURN_IF_ERROR(Show("input", index, memory_.x, rows, hidden));
  SPARSEGDN_RETURN_IF_ERROR(Norm(plan.whole, weights_.layers[layer].input_norm));
  SPARSEGDN_RETURN_IF_ERROR(Show("input_norm", index, memory_.normed, rows, hidden));
  SPARSEGDN_RETURN_IF_ERROR(config_.layers[layer] == LayerKind::kLinear
                                ? RunLinear(plan, layer, sink)
                                : RunFull(plan, layer, sink));
  // A probe sees every row.
  if (layer + 1 < config_.layers.size() || probe_) return FinishLayer(plan, plan.whole, layer);
  for (const StepPlan::Stretch& stretch : plan.head_stretches) {
    SPARSEGDN_RETURN_IF_ERROR(FinishLayer(plan, stretch, layer));
  }
  return absl::OkStatus();
}

// Flags sequences with NaN or Inf in the residual stream, or in the last layer's keys and values,
// which no output of theirs need show.
absl::Status Qwen35Graph::CheckStream(const StepPlan& plan) {
  const Qwen35Memory& m = memory_;
  int32_t* flags = m.nonfinite + num_linear_ * plan.pack.num_seqs;
  SPARSEGDN_RETURN_IF_ERROR(ops_.CheckFinite(plan.pack, config_.hidden_size, m.x, flags));
  if (config_.layers.back() != LayerKind::kFull) return absl::OkStatus();
  const int64_t kv = int64_t{config_.num_kv_heads} * config_.head_dim;
  SPARSEGDN_RETURN_IF_ERROR(ops_.CheckFinite(plan.pack, kv, {m.k, kv}, flags));
  return ops_.CheckFinite(plan.pack, kv, {m.v, kv}, flags);
}

absl::Status Qwen35Graph::Run(const StepPlan& plan, StepSink& sink, StepStats& stats) {
  const Qwen35Memory& m = memory_;
  const int64_t seqs = plan.pack.num_seqs;
  SPARSEGDN_RETURN_IF_ERROR(
      ops_.Zero(m.nonfinite, static_cast<size_t>((num_linear_ + 1) * seqs) * sizeof(int32_t)));
  SPARSEGDN_RETURN_IF_ERROR(ops_.Embed(plan.pack.num_tokens, m.tokens, *weights_.embedding, m.x));
  if (num_linear_ < std::ssize(config_.layers)) {
    SPARSEGDN_RETURN_IF_ERROR(ops_.RopeTable({.pack = plan.pack,
                                              .inv_freq = weights_.inv_freq,
                                              .half = config_.rotary_dim() / 2,
                                              .cos = m.cos,
                                              .sin = m.sin}));
  }
  for (size_t layer = 0; layer < config_.layers.size(); ++layer) {
    SPARSEGDN_RETURN_IF_ERROR(RunLayer(plan, layer, sink));
  }
  SPARSEGDN_RETURN_IF_ERROR(CheckStream(plan));
  stats.chunks.assign(plan.chunks.size(), {});
  SPARSEGDN_RETURN_IF_ERROR(RunHead(plan, sink, stats));
  return CollectStats(plan, stats);
}

}  // namespace sparsegdn::model
