#include "server/engine/snapshot.h"

#include <utility>

namespace sparsegdn::engine {
namespace {

model::BufferView ViewOf(const Blob& blob, ExportDType dtype) {
  return {blob->data(), dtype == ExportDType::kBF16 ? DType::kBF16 : DType::kF32,
          static_cast<int64_t>(blob->size()) / ElementBytes(dtype)};
}

}  // namespace

Snapshot ZeroSnapshot(const Layout& layout) {
  Snapshot snapshot;
  snapshot.layers.resize(layout.num_layers);
  const Blob recurrent = std::make_shared<const std::string>(layout.state_elements() * 4, '\0');
  const Blob conv = std::make_shared<const std::string>(
      layout.conv_elements() * ElementBytes(layout.compute), '\0');
  for (const int32_t layer : layout.linear_layers) {
    snapshot.layers[layer].recurrent = recurrent;
    snapshot.layers[layer].conv = conv;
  }
  return snapshot;
}

void AppendSegment(std::vector<Blob>& segments, Blob segment) {
  segments.push_back(std::move(segment));
  size_t merged = segments.back()->size();
  size_t first = segments.size() - 1;
  while (first > 0 && segments[first - 1]->size() <= merged &&
         segments[first - 1]->size() + merged <= kCompactBytes) {
    merged += segments[--first]->size();
  }
  if (first + 1 == segments.size()) return;
  std::string bytes;
  bytes.reserve(merged);
  for (size_t i = first; i < segments.size(); ++i) bytes += *segments[i];
  segments.resize(first);
  segments.push_back(std::make_shared<const std::string>(std::move(bytes)));
}

bool IsStable(const Blob& segment) { return segment->size() > kCompactBytes / 2; }

model::SlotImage ImageOf(const Snapshot& snapshot, const Layout& layout) {
  model::SlotImage image;
  image.position = snapshot.position;
  image.layers.resize(snapshot.layers.size());
  for (size_t i = 0; i < snapshot.layers.size(); ++i) {
    const Snapshot::Layer& layer = snapshot.layers[i];
    model::SlotImage::Layer& out = image.layers[i];
    if (layer.recurrent) out.recurrent = ViewOf(layer.recurrent, ExportDType::kF32);
    if (layer.conv) out.conv = ViewOf(layer.conv, layout.compute);
    for (const Blob& blob : layer.key) out.key_segments.push_back(ViewOf(blob, layout.compute));
    for (const Blob& blob : layer.value) out.value_segments.push_back(ViewOf(blob, layout.compute));
  }
  return image;
}

}  // namespace sparsegdn::engine
