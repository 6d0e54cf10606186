#include "server/engine/plan.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace sparsegdn::engine {
namespace {

// Appends tensors to a manifest and hands out their ids.
class ManifestBuilder {
 public:
  ManifestBuilder(const Layout& layout, const Outputs& outputs, Manifest& manifest)
      : layout_(layout), outputs_(outputs), manifest_(manifest) {}

  int32_t Add(std::string name, TensorKind kind, int32_t layer, ExportDType dtype,
              std::vector<int64_t> shape, int64_t position) {
    TensorInfo info;
    info.name = std::move(name);
    info.kind = kind;
    info.layer = layer;
    info.dtype = dtype;
    info.bytes = ElementBytes(dtype);
    for (const int64_t extent : shape) info.bytes *= static_cast<uint64_t>(extent);
    info.shape = std::move(shape);
    info.state_layout = outputs_.state_layout;
    info.conv_layout = outputs_.conv_layout;
    info.position = position;
    manifest_.total_bytes += info.bytes;
    manifest_.tensors.push_back(std::move(info));
    return static_cast<int32_t>(manifest_.tensors.size()) - 1;
  }

  // States of one linear layer after `position` tokens.
  LayerTensors AddStates(const std::string& prefix, int32_t layer, int64_t position) {
    LayerTensors ids;
    const std::string name = absl::StrCat(prefix, "layers.", layer, ".");
    if (outputs_.state) {
      int64_t rows = layout_.dim_k, columns = layout_.dim_v;
      if (outputs_.state_layout == StateLayout::kValueMajor) std::swap(rows, columns);
      ids.recurrent = Add(name + "recurrent_state", TensorKind::kRecurrentState, layer,
                          outputs_.state_dtype, {layout_.heads, rows, columns}, position);
      if (outputs_.state_dtype == ExportDType::kF8E4M3) {
        ids.scale = Add(name + "recurrent_state_scale", TensorKind::kRecurrentStateScale, layer,
                        ExportDType::kF32, {layout_.heads, rows}, position);
      }
    }
    if (outputs_.conv_state) {
      const int64_t columns = outputs_.conv_layout == ConvLayout::kFourColumns ? 4 : 3;
      ids.conv = Add(name + "conv_state", TensorKind::kConvState, layer, layout_.compute,
                     {layout_.conv_channels, columns}, position);
    }
    return ids;
  }

  void AddKv(int32_t layer, ExportDType dtype, int64_t first_position, int64_t rows,
             LayerTensors& ids) {
    const std::string name = absl::StrCat("layers.", layer, ".");
    const std::vector<int64_t> shape = {rows, layout_.num_kv_heads, layout_.attention_head_dim};
    ids.key = Add(name + "key", TensorKind::kKey, layer, dtype, shape, first_position);
    ids.value = Add(name + "value", TensorKind::kValue, layer, dtype, shape, first_position);
  }

 private:
  const Layout& layout_;
  const Outputs& outputs_;
  Manifest& manifest_;
};

void AddFinalTensors(const Layout& layout, ManifestBuilder& builder, RequestPlan& plan) {
  const Outputs& outputs = plan.request.outputs;
  const ExportDType kv_dtype = outputs.kv_dtype.value_or(layout.compute);
  const int64_t rows = plan.snapshot_position - plan.first_position;
  plan.final_tensors.assign(layout.num_layers, {});
  size_t linear = 0, full = 0;
  for (int32_t layer = 0; layer < layout.num_layers; ++layer) {
    if (linear < layout.linear_layers.size() && layout.linear_layers[linear] == layer) {
      ++linear;
      plan.final_tensors[layer] = builder.AddStates("", layer, plan.snapshot_position);
    } else if (full < layout.full_layers.size() && layout.full_layers[full] == layer) {
      ++full;
      if (outputs.kv) {
        builder.AddKv(layer, kv_dtype, plan.first_position, rows, plan.final_tensors[layer]);
      }
    }
  }
  if (outputs.kv) {
    plan.kv_row_bytes = static_cast<int64_t>(layout.full_layers.size()) * 2 *
                        layout.kv_row_elements() * ElementBytes(kv_dtype);
  }
}

void AddCheckpoints(const Layout& layout, ManifestBuilder& builder, RequestPlan& plan) {
  for (const int64_t position : plan.checkpoints) {
    std::vector<LayerTensors>& ids =
        plan.checkpoint_tensors.emplace_back(std::vector<LayerTensors>(layout.num_layers));
    const std::string prefix = absl::StrCat("checkpoints.", position, ".");
    for (const int32_t layer : layout.linear_layers) {
      ids[layer] = builder.AddStates(prefix, layer, position);
    }
  }
}

void AddLogits(ManifestBuilder& builder, int32_t vocab_size, RequestPlan& plan) {
  const Outputs& outputs = plan.request.outputs;
  const int64_t rows = static_cast<int64_t>(outputs.logits_positions.size());
  if (rows > 0 && outputs.top_k == 0) {
    plan.logits =
        builder.Add("logits", TensorKind::kLogits, -1, ExportDType::kF32, {rows, vocab_size}, 0);
    plan.logits_row_bytes = int64_t{vocab_size} * 4;
  } else if (rows > 0) {
    const int64_t k = outputs.top_k;
    plan.top_k_ids =
        builder.Add("top_k_ids", TensorKind::kTopKIds, -1, ExportDType::kI32, {rows, k}, 0);
    plan.top_k_logits =
        builder.Add("top_k_logits", TensorKind::kTopKLogits, -1, ExportDType::kF32, {rows, k}, 0);
    plan.logits_row_bytes = k * 8;
  }
  if (outputs.logprobs_from) {
    plan.prompt_logprobs =
        builder.Add("prompt_logprobs", TensorKind::kPromptLogprobs, -1, ExportDType::kF32,
                    {plan.prompt_tokens - *outputs.logprobs_from}, 0);
  }
}

// Elements of an ascending list within [begin, end).
int64_t CountWithin(const std::vector<int64_t>& sorted, int64_t begin, int64_t end) {
  return std::lower_bound(sorted.begin(), sorted.end(), end) -
         std::lower_bound(sorted.begin(), sorted.end(), begin);
}

}  // namespace

int64_t RequestPlan::ChunkEnd(int64_t position) const {
  const int64_t boundary = (position / chunk_tokens + 1) * chunk_tokens;
  const int64_t stop = position < snapshot_position ? snapshot_position : end_position;
  return std::min(boundary, stop);
}

int64_t RequestPlan::EmittedBytes(int64_t begin, int64_t end) const {
  int64_t states = CountWithin(checkpoints, begin + 1, end + 1);
  states += begin < snapshot_position && end == snapshot_position;
  const int64_t rows =
      std::max<int64_t>(0, std::min(end, snapshot_position) - std::min(begin, snapshot_position));
  int64_t bytes = states * state_bytes + rows * kv_row_bytes +
                  CountWithin(request.outputs.logits_positions, begin, end) * logits_row_bytes;
  if (request.outputs.logprobs_from) {
    // Row t of the chunk gives the log-probability of token t + 1.
    const int64_t first = std::max(begin + 1, *request.outputs.logprobs_from);
    bytes += std::max<int64_t>(0, std::min(end, prompt_tokens - 1) - first + 1) * 4;
  }
  return bytes;
}

int64_t RequestPlan::MaxChunkBytes() const {
  int64_t most = snapshot_position == first_position ? state_bytes : 0;
  for (int64_t begin = first_position; begin < end_position;) {
    const int64_t end = ChunkEnd(begin);
    most = std::max(most, EmittedBytes(begin, end));
    begin = end;
  }
  return most;
}

int64_t RequestPlan::QueuedBytes() const {
  size_t bytes = sizeof(RequestPlan) + sizeof(Manifest);
  bytes += request.tokens.capacity() * sizeof(int32_t);
  bytes += (request.outputs.logits_positions.capacity() + runner_logits.capacity() +
            checkpoints.capacity()) *
           sizeof(int64_t);
  bytes += final_tensors.capacity() * sizeof(LayerTensors);
  for (const std::vector<LayerTensors>& row : checkpoint_tensors) {
    bytes += sizeof(row) + row.capacity() * sizeof(LayerTensors);
  }
  for (const TensorInfo& tensor : manifest->tensors) {
    bytes += sizeof(tensor) + tensor.name.capacity() + tensor.shape.capacity() * sizeof(int64_t);
  }
  return static_cast<int64_t>(bytes);
}

absl::Status PlanTensors(const Layout& layout, const std::string& identity, int32_t vocab_size,
                         RequestPlan& plan) {
  const Outputs& outputs = plan.request.outputs;
  plan.checkpoints.clear();
  if (const int64_t every = outputs.checkpoint_every; every > 0) {
    const int64_t per_layer = (outputs.state_dtype == ExportDType::kF8E4M3) + 2;
    const int64_t per_checkpoint =
        std::max<int64_t>(1, per_layer * static_cast<int64_t>(layout.linear_layers.size()));
    // Strictly before the snapshot: at its own position the snapshot is the checkpoint.
    const int64_t count =
        std::max<int64_t>(0, (plan.snapshot_position - 1) / every - plan.first_position / every);
    const int64_t most = kMaxCheckpointTensors / per_checkpoint;
    if (count > most) {
      return Invalid("outputs.checkpoint_every",
                     absl::StrCat("got ", every, ", which gives ", count,
                                  " checkpoints, wanted at most ", most));
    }
    for (int64_t i = 1; i <= count; ++i) {
      plan.checkpoints.push_back((plan.first_position / every + i) * every);
    }
  }
  auto manifest = std::make_shared<Manifest>();
  manifest->model_identity = identity;
  manifest->position = plan.snapshot_position;
  ManifestBuilder builder(layout, outputs, *manifest);
  AddFinalTensors(layout, builder, plan);
  AddCheckpoints(layout, builder, plan);
  AddLogits(builder, vocab_size, plan);
  plan.state_bytes = 0;
  for (const LayerTensors& ids : plan.final_tensors) {
    for (const int32_t id : {ids.recurrent, ids.scale, ids.conv}) {
      if (id >= 0) plan.state_bytes += static_cast<int64_t>(manifest->tensors[id].bytes);
    }
  }
  plan.manifest = std::move(manifest);
  return absl::OkStatus();
}

}  // namespace sparsegdn::engine
