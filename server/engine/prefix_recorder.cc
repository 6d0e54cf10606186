#include "server/engine/prefix_recorder.h"

#include <algorithm>
#include <utility>

#include "sparsegdn/gdn.h"

namespace sparsegdn::engine {
namespace {

// Index of `layer` in an ascending list, or -1.
int64_t IndexOf(const std::vector<int32_t>& layers, int32_t layer) {
  const auto it = std::lower_bound(layers.begin(), layers.end(), layer);
  return it != layers.end() && *it == layer ? it - layers.begin() : -1;
}

Blob CopyOf(const void* data, int64_t bytes) {
  return std::make_shared<const std::string>(static_cast<const char*>(data),
                                             static_cast<size_t>(bytes));
}

bool Complete(const std::vector<Blob>& blobs) {
  return std::none_of(blobs.begin(), blobs.end(), [](const Blob& b) { return b == nullptr; });
}

}  // namespace

void PrefixRecorder::Begin(const std::vector<int64_t>& positions) {
  parts_.clear();
  for (const int64_t position : positions) {
    auto entry = std::make_shared<PrefixEntry>();
    entry->position = position;
    entry->has_state = true;
    entry->recurrent.resize(layout_.linear_layers.size());
    entry->conv.resize(layout_.linear_layers.size());
    entry->key.resize(layout_.full_layers.size());
    entry->value.resize(layout_.full_layers.size());
    parts_.push_back(std::move(entry));
  }
}

void PrefixRecorder::AddState(int32_t layer, int64_t position, const model::BufferView& recurrent,
                              const model::BufferView& conv) {
  const int64_t index = IndexOf(layout_.linear_layers, layer);
  if (index < 0) return;
  for (const std::shared_ptr<PrefixEntry>& entry : parts_) {
    if (entry->position != position || entry->recurrent[index] != nullptr) continue;
    entry->recurrent[index] = CopyOf(recurrent.data, static_cast<int64_t>(recurrent.bytes()));
    entry->conv[index] = CopyOf(conv.data, static_cast<int64_t>(conv.bytes()));
  }
}

void PrefixRecorder::AddKv(int32_t layer, int64_t first_position, const model::BufferView& key,
                           const model::BufferView& value) {
  const int64_t index = IndexOf(layout_.full_layers, layer);
  const int64_t row = layout_.kv_row_bytes();
  if (index < 0 || row == 0 || key.bytes() != value.bytes()) return;
  const int64_t end = first_position + static_cast<int64_t>(key.bytes()) / row;
  for (const std::shared_ptr<PrefixEntry>& entry : parts_) {
    const int64_t begin = entry->position - kWindow;
    if (begin < first_position || entry->position > end) continue;
    const int64_t offset = (begin - first_position) * row;
    entry->key[index] = CopyOf(static_cast<const char*>(key.data) + offset, kWindow * row);
    entry->value[index] = CopyOf(static_cast<const char*>(value.data) + offset, kWindow * row);
  }
}

std::vector<std::shared_ptr<PrefixEntry>> PrefixRecorder::Take() {
  std::vector<std::shared_ptr<PrefixEntry>> out;
  for (std::shared_ptr<PrefixEntry>& entry : parts_) {
    if (Complete(entry->recurrent) && Complete(entry->conv) && Complete(entry->key) &&
        Complete(entry->value)) {
      out.push_back(std::move(entry));
    }
  }
  parts_.clear();
  return out;
}

}  // namespace sparsegdn::engine
