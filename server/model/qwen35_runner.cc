#include "server/model/qwen35_runner.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/model/status_macros.h"
#include "server/model/step_plan.h"
#include "server/model/weight_specs.h"

namespace sparsegdn::model {
namespace {

constexpr size_t kAllocationGranule = 512;
constexpr int64_t kLeastTunedRows = 1024, kMostTunedRows = 32'768;

// Asks the table for everything that the weights and the memory of a model will take. All 0 where
// the table does not count (MatrixBytes).
absl::StatusOr<DeviceMemory> Reserve(const ModelConfig& config, const RunnerLimits& limits,
                                     int64_t num_blocks, OpTable& ops) {
  SPARSEGDN_ASSIGN_OR_RETURN(MemoryNeeds needs,
                             NeededMemory(config, limits, num_blocks, kAllocationGranule, ops));
  DeviceMemory& device = needs.device;
  for (const TensorSpec& tensor : TextTensors(config)) {
    const bool matrix = tensor.role == WeightRole::kEmbedding ||
                        tensor.role == WeightRole::kProjection ||
                        tensor.role == WeightRole::kResidualOut;
    const size_t bytes = matrix ? ops.MatrixBytes(tensor.elements())
                                : static_cast<size_t>(tensor.elements()) * sizeof(float);
    device.weights += static_cast<int64_t>((bytes + kAllocationGranule - 1) / kAllocationGranule *
                                           kAllocationGranule);
  }
  const int64_t total =
      device.weights + device.states + device.kv + device.workspace + device.activations;
  SPARSEGDN_RETURN_IF_ERROR(ops.Reserve(static_cast<size_t>(total), needs.to_host_bytes));
  return ops.MatrixBytes(1) > 0 ? device : DeviceMemory{};
}

ModelInfo InfoOf(const Qwen35Options& options, const OpTable& ops) {
  const ModelConfig& c = options.config;
  ModelInfo info;
  info.identity = options.identity;
  info.name = options.name;
  info.backend = ops.name();
  info.layers = c.layers;
  info.vocab_size = c.vocab_size;
  info.hidden_size = c.hidden_size;
  info.max_context_tokens = c.max_position_embeddings;
  info.gdn = c.gdn;
  info.conv_channels = static_cast<int32_t>(c.conv_channels());
  info.conv_kernel = c.conv_kernel;
  info.num_q_heads = c.num_q_heads;
  info.num_kv_heads = c.num_kv_heads;
  info.attention_head_dim = c.head_dim;
  info.compute_dtype = ops.activation_dtype();
  info.round_a_log = options.round_a_log;
  info.budget_profile = options.profile;
  return info;
}

}  // namespace

Qwen35Runner::Qwen35Runner(Qwen35Options options, std::unique_ptr<OpTable> ops, SlotPool slots)
    : options_(std::move(options)), ops_(std::move(ops)), slots_(std::move(slots)) {
  info_ = InfoOf(options_, *ops_);
}

absl::StatusOr<std::unique_ptr<Qwen35Runner>> Qwen35Runner::Create(Qwen35Options options,
                                                                   Checkpoint checkpoint,
                                                                   std::unique_ptr<OpTable> ops) {
  bool needs_kv = false;
  for (const LayerKind kind : options.config.layers) needs_kv |= kind == LayerKind::kFull;
  SPARSEGDN_ASSIGN_OR_RETURN(SlotPool slots, SlotPool::Create(options.limits, needs_kv));
  std::unique_ptr<Qwen35Runner> runner(
      new Qwen35Runner(std::move(options), std::move(ops), std::move(slots)));
  const Qwen35Options& kept = runner->options_;
  runner->info_.weight_dtype = checkpoint.tensors().at("model.embed_tokens.weight").dtype;
  SPARSEGDN_ASSIGN_OR_RETURN(
      runner->info_.device_memory,
      Reserve(kept.config, kept.limits, runner->slots_.num_blocks(), *runner->ops_));
  SPARSEGDN_ASSIGN_OR_RETURN(
      runner->weights_,
      UploadWeights(kept.config, checkpoint, kept.round_a_log, *runner->ops_, kept.progress));
  SPARSEGDN_ASSIGN_OR_RETURN(
      runner->memory_,
      AllocateMemory(kept.config, kept.limits, runner->slots_.num_blocks(), *runner->ops_));
  if (needs_kv) runner->PrepareAttention();
  if (runner->ops_->tunes_gemm()) SPARSEGDN_RETURN_IF_ERROR(runner->TuneProducts());
  runner->graph_ = std::make_unique<Qwen35Graph>(kept.config, kept.limits, runner->weights_,
                                                 runner->memory_, *runner->ops_);
  return runner;
}

void Qwen35Runner::PrepareAttention() {
  const RunnerLimits& limits = options_.limits;
  info_.attention = ops_->PrepareAttention({.shape = AttentionShapeOf(options_.config),
                                            .max_tokens = limits.max_batch_tokens,
                                            .max_seqs = limits.max_batch_seqs,
                                            .kv_tokens = slots_.num_blocks() *
                                                         limits.kv_block_tokens,
                                            .block_tokens = limits.kv_block_tokens,
                                            .q_stride = memory_.mixed.stride,
                                            .out_stride = memory_.mixer_out.stride});
}

// At each power of two of rows that a step may have: the products of one layer of each kind stand
// for all. Below kLeastTunedRows weights are what takes the time, and any way reads them once.
absl::Status Qwen35Runner::TuneProducts() {
  const Qwen35Memory& m = memory_;
  const auto tune = [&](int64_t rows, const Rows& x, const Weight& weight, ConstRows residual,
                        Rows y) { return ops_->TuneGemm(rows, x, weight, residual, y); };
  for (int64_t rows = kLeastTunedRows;
       rows <= std::min(options_.limits.max_batch_tokens, kMostTunedRows); rows *= 2) {
    // Any values but zeros, which cost less power: token 0's embedding, then its products.
    SPARSEGDN_RETURN_IF_ERROR(ops_->Embed(rows, m.tokens, *weights_.embedding, m.normed));
    bool seen[2] = {}, mlp_seen = false;
    for (size_t i = 0; i < weights_.layers.size(); ++i) {
      const bool linear = options_.config.layers[i] == LayerKind::kLinear;
      if (std::exchange(seen[linear ? 0 : 1], true)) continue;
      const LayerWeights& w = weights_.layers[i];
      const Weight *in = linear ? w.linear.in : w.full.in, *out = linear ? w.linear.out : w.full.out;
      SPARSEGDN_RETURN_IF_ERROR(tune(rows, m.normed, *in, {}, m.fused));
      SPARSEGDN_RETURN_IF_ERROR(tune(rows, m.fused, *out, m.x, m.x));
      if (std::exchange(mlp_seen, true)) continue;
      SPARSEGDN_RETURN_IF_ERROR(tune(rows, m.normed, *w.gate_up, {}, m.fused));
      SPARSEGDN_RETURN_IF_ERROR(tune(rows, m.fused, *w.down, m.x, m.x));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<int32_t> Qwen35Runner::Acquire(int64_t max_tokens) {
  SPARSEGDN_ASSIGN_OR_RETURN(const int32_t slot, slots_.Acquire(max_tokens));
  const size_t conv_bytes = static_cast<size_t>(memory_.conv_elements) * memory_.activation_bytes;
  const size_t recurrent_bytes = static_cast<size_t>(memory_.recurrent_elements) * sizeof(float);
  absl::Status status;
  for (const Qwen35Memory::Layer& layer : memory_.layers) {
    if (layer.recurrent == nullptr) continue;
    status.Update(ops_->Zero(layer.recurrent + slot * memory_.recurrent_elements, recurrent_bytes));
    status.Update(ops_->Zero(
        static_cast<char*>(layer.conv) + static_cast<size_t>(slot) * conv_bytes, conv_bytes));
  }
  if (!status.ok()) {
    slots_.Release(slot);
    return status;
  }
  return slot;
}

absl::Status Qwen35Runner::Step(std::span<const Chunk> chunks, StepSink& sink, StepStats& stats) {
  const auto start = std::chrono::steady_clock::now();
  stats = StepStats{};
  SPARSEGDN_RETURN_IF_ERROR(CheckChunks(chunks, options_.config, options_.limits, slots_));
  if (chunks.empty()) return absl::OkStatus();
  SPARSEGDN_ASSIGN_OR_RETURN(const StepPlan plan,
                             MakePlan(chunks, options_.profile, slots_, memory_, *ops_));
  absl::Status status = graph_->Run(plan, sink, stats);
  status.Update(ops_->FinishToHost());  // on any path: what is on its way refers to plan and sink
  if (!status.ok()) return status;
  for (const Chunk& chunk : chunks) {
    slots_.Find(chunk.slot)->position += std::ssize(chunk.tokens);
  }
  stats.total_ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start)
          .count();
  return absl::OkStatus();
}

}  // namespace sparsegdn::model
