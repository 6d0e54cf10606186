// Filling a slot from a snapshot.
#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/model/narrow.h"
#include "server/model/qwen35_runner.h"
#include "server/model/status_macros.h"

namespace sparsegdn::model {
namespace {

absl::Status Wrong(size_t layer, const char* what, const std::string& got,
                   const std::string& wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat("layers[", layer, "].", what, ": got ", got, ", wanted ", wanted));
}

absl::Status CheckView(size_t layer, const char* what, const BufferView& view, int64_t elements,
                       bool may_be_narrow) {
  if (view.elements != elements || (elements > 0 && view.data == nullptr)) {
    return Wrong(layer, what, absl::StrCat(view.data == nullptr ? 0 : view.elements, " elements"),
                 absl::StrCat(elements));
  }
  const bool narrow = may_be_narrow && view.dtype == DType::kBF16;
  if (view.dtype != DType::kF32 && !narrow) {
    return Wrong(layer, what, view.dtype == DType::kBF16 ? "BF16" : "F16",
                 may_be_narrow ? "F32 or BF16" : "F32");
  }
  return absl::OkStatus();
}

// Elements [first, first + count) of a view in another dtype; FP32 and BF16 only.
std::vector<uint8_t> Converted(const BufferView& view, int64_t first, int64_t count, DType to) {
  const auto* wide = static_cast<const float*>(view.data) + first;
  const auto* narrow = static_cast<const uint16_t*>(view.data) + first;
  const size_t n = static_cast<size_t>(count);
  std::vector<uint8_t> out(n * (to == DType::kF32 ? 4 : 2));
  for (size_t i = 0; i < n; ++i) {
    if (to == DType::kF32) {
      const float value = view.dtype == DType::kF32 ? wide[i] : WidenBf16(narrow[i]);
      std::memcpy(out.data() + 4 * i, &value, 4);
    } else {
      const uint16_t value = view.dtype == DType::kF32 ? NarrowBf16(wide[i]) : narrow[i];
      std::memcpy(out.data() + 2 * i, &value, 2);
    }
  }
  return out;
}

absl::Status CheckSegments(size_t layer, const char* what, const std::vector<BufferView>& segments,
                           int64_t width, int64_t position) {
  int64_t rows = 0;
  for (const BufferView& segment : segments) {
    if (segment.elements < 0 || segment.elements % width != 0) {
      return Wrong(layer, what, absl::StrCat("a segment of ", segment.elements, " elements"),
                   absl::StrCat("a multiple of ", width));
    }
    SPARSEGDN_RETURN_IF_ERROR(CheckView(layer, what, segment, segment.elements, true));
    rows += segment.elements / width;
  }
  if (rows == position) return absl::OkStatus();
  return Wrong(layer, what, absl::StrCat(rows, " rows"), absl::StrCat(position));
}

// Reads rows across segment borders in the activation dtype.
class SegmentReader {
 public:
  SegmentReader(const std::vector<BufferView>& segments, int64_t width, DType dtype)
      : segments_(segments), width_(width), dtype_(dtype) {}

  // The next rows, at most max_rows, never more than the current segment has left. Valid until the
  // next call: bytes of the segment itself where its dtype is the wanted one.
  std::span<const uint8_t> Next(int64_t max_rows, int64_t* rows) {
    while (row_ * width_ == segments_[index_].elements) {
      ++index_;
      row_ = 0;
    }
    const BufferView& segment = segments_[index_];
    *rows = std::min(max_rows, segment.elements / width_ - row_);
    const int64_t first = row_ * width_, count = *rows * width_;
    row_ += *rows;
    if (segment.dtype == dtype_) {
      const size_t element = segment.bytes() / static_cast<size_t>(segment.elements);
      return {static_cast<const uint8_t*>(segment.data) + static_cast<size_t>(first) * element,
              static_cast<size_t>(count) * element};
    }
    converted_ = Converted(segment, first, count, dtype_);
    return converted_;
  }

 private:
  const std::vector<BufferView>& segments_;
  int64_t width_;
  DType dtype_;
  size_t index_ = 0;
  int64_t row_ = 0;
  std::vector<uint8_t> converted_;
};

// Copies the next `count` rows of a reader to the backend.
absl::Status CopyRows(SegmentReader& reader, int64_t count, void* to, OpTable& ops) {
  auto* out = static_cast<char*>(to);
  while (count > 0) {
    int64_t rows = 0;
    const std::span<const uint8_t> bytes = reader.Next(count, &rows);
    SPARSEGDN_RETURN_IF_ERROR(ops.CopyIn(out, bytes.data(), bytes.size()));
    out += bytes.size();
    count -= rows;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Qwen35Runner::LoadLinear(int32_t slot, size_t layer, const SlotImage::Layer& image) {
  const Qwen35Memory& m = memory_;
  const DType dtype = ops_->activation_dtype();
  SPARSEGDN_RETURN_IF_ERROR(ops_->CopyIn(m.layers[layer].recurrent + slot * m.recurrent_elements,
                                         image.recurrent.data, image.recurrent.bytes()));
  const std::vector<uint8_t> conv = Converted(image.conv, 0, image.conv.elements, dtype);
  return ops_->CopyIn(
      static_cast<char*>(m.layers[layer].conv) + static_cast<size_t>(slot) * conv.size(),
      conv.data(), conv.size());
}

absl::Status Qwen35Runner::LoadFull(const SlotPool::Slot& slot, size_t layer, int64_t position,
                                    const SlotImage::Layer& image) {
  const Qwen35Memory& m = memory_;
  const int64_t width = int64_t{options_.config.num_kv_heads} * options_.config.head_dim;
  SPARSEGDN_RETURN_IF_ERROR(
      ops_->CopyIn(m.block_tables, slot.blocks.data(), slot.blocks.size() * sizeof(int32_t)));
  SegmentReader keys(image.key_segments, width, ops_->activation_dtype());
  SegmentReader values(image.value_segments, width, ops_->activation_dtype());
  for (int64_t first = 0; first < position; first += options_.limits.max_batch_tokens) {
    const int64_t rows = std::min(position - first, options_.limits.max_batch_tokens);
    SPARSEGDN_RETURN_IF_ERROR(CopyRows(keys, rows, m.k, *ops_));
    SPARSEGDN_RETURN_IF_ERROR(CopyRows(values, rows, m.v, *ops_));
    SPARSEGDN_RETURN_IF_ERROR(
        ops_->KvLoad({.shape = AttentionShapeOf(options_.config),
                      .rows = rows,
                      .first_position = first,
                      .k = m.k,
                      .v = m.v,
                      .cache = {m.layers[layer].kv, m.block_tables, m.max_blocks,
                                options_.limits.kv_block_tokens}}));
  }
  return absl::OkStatus();
}

absl::Status Qwen35Runner::Load(int32_t index, const SlotImage& image) {
  const ModelConfig& c = options_.config;
  SlotPool::Slot* slot = slots_.Find(index);
  if (slot == nullptr || slot->position != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("slot = ", index, ", wanted a freshly acquired one"));
  }
  const int64_t room = std::min(slot->capacity, c.max_position_embeddings);
  if (image.position < 0 || image.position > room) {
    return absl::InvalidArgumentError(
        absl::StrCat("position = ", image.position, ", wanted [0, ", room, "]"));
  }
  if (image.layers.size() != c.layers.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("layers.size = ", image.layers.size(), ", wanted ", c.layers.size()));
  }
  // Everything is checked before anything is written.
  const int64_t width = int64_t{c.num_kv_heads} * c.head_dim;
  for (size_t i = 0; i < c.layers.size(); ++i) {
    const SlotImage::Layer& layer = image.layers[i];
    if (c.layers[i] == LayerKind::kLinear) {
      SPARSEGDN_RETURN_IF_ERROR(
          CheckView(i, "recurrent", layer.recurrent, memory_.recurrent_elements, false));
      SPARSEGDN_RETURN_IF_ERROR(CheckView(i, "conv", layer.conv, memory_.conv_elements, true));
    } else {
      SPARSEGDN_RETURN_IF_ERROR(CheckSegments(i, "key", layer.key_segments, width, image.position));
      SPARSEGDN_RETURN_IF_ERROR(
          CheckSegments(i, "value", layer.value_segments, width, image.position));
    }
  }
  for (size_t i = 0; i < c.layers.size(); ++i) {
    SPARSEGDN_RETURN_IF_ERROR(c.layers[i] == LayerKind::kLinear
                                  ? LoadLinear(index, i, image.layers[i])
                                  : LoadFull(*slot, i, image.position, image.layers[i]));
  }
  slot->position = image.position;
  return absl::OkStatus();
}

}  // namespace sparsegdn::model
