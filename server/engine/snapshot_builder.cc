#include "server/engine/snapshot_builder.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/encode.h"
#include "server/engine/topk.h"

namespace sparsegdn::engine {
namespace {

std::string_view BytesOf(const void* data, int64_t bytes) {
  return {static_cast<const char*>(data), static_cast<size_t>(bytes)};
}

DType DTypeOf(ExportDType dtype) {
  return dtype == ExportDType::kBF16 ? DType::kBF16 : DType::kF32;
}

}  // namespace

SnapshotBuilder::SnapshotBuilder(const RequestPlan& plan, const Layout& layout, int64_t frame_bytes,
                                 FrameWriter::Emit emit)
    : plan_(plan),
      layout_(layout),
      frame_bytes_(frame_bytes),
      writer_(*plan.manifest, frame_bytes, std::move(emit)),
      have_state_(plan.checkpoints.size() + 1, std::vector<bool>(layout.num_layers, false)) {
  if (plan.request.keep_snapshot) {
    kept_.emplace();
    kept_->position = plan.snapshot_position;
    kept_->layers.resize(layout.num_layers);
  }
}

void SnapshotBuilder::Fail(std::string message) {
  if (status_.ok()) status_ = absl::InternalError(message);
}

bool SnapshotBuilder::CheckElements(const char* what, int32_t layer, const model::BufferView& view,
                                    DType dtype, int64_t elements) {
  if (layer >= 0 && layer < layout_.num_layers && view.elements == elements &&
      view.dtype == dtype) {
    return true;
  }
  Fail(absl::StrCat("the runner gave ", view.elements, " elements of dtype ",
                    static_cast<int>(view.dtype), " for ", what, " of layer ", layer, ", wanted ",
                    elements, " of dtype ", static_cast<int>(dtype)));
  return false;
}

void SnapshotBuilder::AddState(int32_t layer, int64_t position, model::BufferView recurrent,
                               model::BufferView conv) {
  if (!CheckElements("the recurrent state", layer, recurrent, DType::kF32,
                     layout_.state_elements()) ||
      !CheckElements("the conv state", layer, conv, DTypeOf(layout_.compute),
                     layout_.conv_elements())) {
    return;
  }
  const bool is_snapshot = position == plan_.snapshot_position;
  size_t row = plan_.checkpoints.size();
  if (!is_snapshot) {
    const auto it = std::lower_bound(plan_.checkpoints.begin(), plan_.checkpoints.end(), position);
    if (it == plan_.checkpoints.end() || *it != position) return;
    row = static_cast<size_t>(it - plan_.checkpoints.begin());
  }
  if (have_state_[row][layer]) return;
  have_state_[row][layer] = true;
  const LayerTensors& ids =
      is_snapshot ? plan_.final_tensors[layer] : plan_.checkpoint_tensors[row][layer];
  EmitRecurrent(ids, static_cast<const float*>(recurrent.data));
  EmitConv(ids, static_cast<const char*>(conv.data));
  if (is_snapshot && kept_) {
    Snapshot::Layer& kept = kept_->layers[layer];
    kept.recurrent = std::make_shared<const std::string>(
        BytesOf(recurrent.data, static_cast<int64_t>(recurrent.bytes())));
    kept.conv =
        std::make_shared<const std::string>(BytesOf(conv.data, static_cast<int64_t>(conv.bytes())));
  }
}

void SnapshotBuilder::EmitRecurrent(const LayerTensors& ids, const float* state) {
  if (ids.recurrent < 0) return;
  const Outputs& outputs = plan_.request.outputs;
  const bool transpose = outputs.state_layout == StateLayout::kValueMajor;
  if (!transpose && outputs.state_dtype == ExportDType::kF32) {
    return writer_.Append(ids.recurrent, BytesOf(state, layout_.state_elements() * 4));
  }
  const int64_t n = layout_.head_elements();
  const int64_t columns = transpose ? layout_.dim_k : layout_.dim_v;
  const int64_t rows = n / columns;
  transposed_.resize(transpose ? n : 0);
  encoded_.resize(n * ElementBytes(outputs.state_dtype));
  scales_.resize(rows);
  for (int64_t head = 0; head < layout_.heads; ++head) {
    const float* in = state + head * n;
    if (transpose) {
      Transpose(in, layout_.dim_k, layout_.dim_v, transposed_.data());
      in = transposed_.data();
    }
    switch (outputs.state_dtype) {
      case ExportDType::kBF16:
        F32ToBf16(in, n, reinterpret_cast<uint16_t*>(encoded_.data()));
        writer_.Append(ids.recurrent, encoded_);
        break;
      case ExportDType::kF8E4M3:
        for (int64_t r = 0; r < rows; ++r) {
          F32RowToF8(in + r * columns, columns,
                     reinterpret_cast<uint8_t*>(encoded_.data()) + r * columns, &scales_[r]);
        }
        writer_.Append(ids.recurrent, encoded_);
        writer_.Append(ids.scale, BytesOf(scales_.data(), rows * 4));
        break;
      case ExportDType::kF32:
      case ExportDType::kI32:
        writer_.Append(ids.recurrent, BytesOf(in, n * 4));
        break;
    }
  }
}

void SnapshotBuilder::EmitConv(const LayerTensors& ids, const char* conv) {
  if (ids.conv < 0) return;
  const int64_t element = ElementBytes(layout_.compute);
  if (plan_.request.outputs.conv_layout == ConvLayout::kFourColumns) {
    return writer_.Append(ids.conv, BytesOf(conv, layout_.conv_elements() * element));
  }
  encoded_.resize(layout_.conv_channels * 3 * element);
  DropConvColumn(conv, layout_.conv_channels, element, encoded_.data());
  writer_.Append(ids.conv, encoded_);
}

void SnapshotBuilder::AddKv(int32_t layer, int64_t first_position, model::BufferView key,
                            model::BufferView value) {
  // The token that runs after a BEFORE_LAST snapshot belongs to the worker, not to the snapshot.
  if (first_position >= plan_.snapshot_position) return;
  const int64_t row = layout_.kv_row_elements();
  const int64_t rows = row == 0 ? 0 : key.elements / row;
  if (!CheckElements("the keys", layer, key, DTypeOf(layout_.compute), rows * row) ||
      !CheckElements("the values", layer, value, DTypeOf(layout_.compute), rows * row)) {
    return;
  }
  const LayerTensors& ids = plan_.final_tensors[layer];
  EmitRows(ids.key, kept_ ? &kept_->layers[layer].key : nullptr, key);
  EmitRows(ids.value, kept_ ? &kept_->layers[layer].value : nullptr, value);
}

// Frames hold whole rows, so that a frame in the compute dtype is at once a segment of the kept
// snapshot.
void SnapshotBuilder::EmitRows(int32_t tensor, std::vector<Blob>* kept,
                               const model::BufferView& view) {
  if (tensor < 0 && kept == nullptr) return;
  const int64_t row = layout_.kv_row_elements();
  const int64_t in_bytes = ElementBytes(layout_.compute);
  const ExportDType dtype = plan_.request.outputs.kv_dtype.value_or(layout_.compute);
  const int64_t widest = std::max(in_bytes, ElementBytes(dtype));
  const int64_t step = std::max<int64_t>(1, frame_bytes_ / (row * widest)) * row;
  const char* in = static_cast<const char*>(view.data);
  for (int64_t begin = 0; begin < view.elements; begin += step) {
    const int64_t n = std::min(step, view.elements - begin);
    const char* rows = in + begin * in_bytes;
    Blob same;
    if (kept != nullptr || dtype == layout_.compute) {
      same = std::make_shared<const std::string>(BytesOf(rows, n * in_bytes));
    }
    if (tensor >= 0 && dtype == layout_.compute) {
      writer_.AppendBlob(tensor, same);
    } else if (tensor >= 0) {
      std::string converted(n * ElementBytes(dtype), '\0');
      if (dtype == ExportDType::kBF16) {
        F32ToBf16(reinterpret_cast<const float*>(rows), n,
                  reinterpret_cast<uint16_t*>(converted.data()));
      } else {
        Bf16ToF32(reinterpret_cast<const uint16_t*>(rows), n,
                  reinterpret_cast<float*>(converted.data()));
      }
      writer_.AppendBlob(tensor, std::make_shared<const std::string>(std::move(converted)));
    }
    if (kept != nullptr) AppendSegment(*kept, std::move(same));
  }
}

void SnapshotBuilder::AddLogits(int64_t position, std::span<const float> logits) {
  if (plan_.wants_next_token() && position == plan_.prompt_tokens - 1) {
    next_token_ = Greedy(logits);
  }
  const Outputs& outputs = plan_.request.outputs;
  if (logits_rows_ >= outputs.logits_positions.size() ||
      outputs.logits_positions[logits_rows_] != position) {
    return;
  }
  ++logits_rows_;
  if (plan_.logits >= 0) {
    writer_.Append(plan_.logits, BytesOf(logits.data(), static_cast<int64_t>(logits.size()) * 4));
    return;
  }
  std::vector<int32_t> ids(outputs.top_k);
  std::vector<float> values(outputs.top_k);
  TopK(logits, ids, values);
  writer_.Append(plan_.top_k_ids, BytesOf(ids.data(), int64_t{outputs.top_k} * 4));
  writer_.Append(plan_.top_k_logits, BytesOf(values.data(), int64_t{outputs.top_k} * 4));
}

void SnapshotBuilder::AddLogprobs(int64_t first_position, std::span<const float> values) {
  if (plan_.prompt_logprobs < 0) return;
  const int64_t from = *plan_.request.outputs.logprobs_from;
  const int64_t skip =
      std::clamp<int64_t>(from - first_position, 0, static_cast<int64_t>(values.size()));
  const int64_t n = static_cast<int64_t>(values.size()) - skip;
  writer_.Append(plan_.prompt_logprobs, BytesOf(values.data() + skip, n * 4));
}

void SnapshotBuilder::EndStep() { writer_.Flush(); }

void SnapshotBuilder::StartFrom(const Snapshot& base) {
  if (!kept_) return;
  for (const int32_t layer : layout_.full_layers) {
    kept_->layers[layer].key = base.layers[layer].key;
    kept_->layers[layer].value = base.layers[layer].value;
  }
}

void SnapshotBuilder::EmitUnchanged(const Snapshot& base) {
  for (const int32_t layer : layout_.linear_layers) {
    const LayerTensors& ids = plan_.final_tensors[layer];
    EmitRecurrent(ids, reinterpret_cast<const float*>(base.layers[layer].recurrent->data()));
    EmitConv(ids, base.layers[layer].conv->data());
    have_state_.back()[layer] = true;
  }
  if (kept_) {
    kept_->layers = base.layers;
  }
  writer_.Flush();
}

absl::StatusOr<uint64_t> SnapshotBuilder::Finish() {
  if (!status_.ok()) return status_;
  for (const std::vector<bool>& row : have_state_) {
    for (const int32_t layer : layout_.linear_layers) {
      if (!row[layer]) {
        return absl::InternalError(absl::StrCat("the runner gave no state for layer ", layer));
      }
    }
  }
  if (plan_.wants_next_token() && !next_token_) {
    return absl::DataLossError("no logit after the last token is a number");
  }
  return writer_.Digest();
}

std::shared_ptr<const Snapshot> SnapshotBuilder::TakeKept() {
  if (!kept_) return nullptr;
  return std::make_shared<const Snapshot>(std::move(*std::exchange(kept_, std::nullopt)));
}

}  // namespace sparsegdn::engine
