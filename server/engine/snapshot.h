// A snapshot that the server holds: states FP32 [Hv, Dk, Dv], conv [C, 4] and KV rows [n, Nkv, D]
// in the compute dtype, all as immutable blobs. Snapshots of one prefix share the prefix's KV
// blobs, so that a decode step costs its own rows and not a copy of the context.
#ifndef SPARSEGDN_SERVER_ENGINE_SNAPSHOT_H_
#define SPARSEGDN_SERVER_ENGINE_SNAPSHOT_H_

#include <cstdint>
#include <vector>

#include "server/engine/layout.h"
#include "server/model/model_runner.h"

namespace sparsegdn::engine {

// KV segments of at most this many bytes merge with their neighbour (AppendSegment).
inline constexpr size_t kCompactBytes = 256 << 10;

struct Snapshot {
  struct Layer {
    Blob recurrent, conv;          // linear layers
    std::vector<Blob> key, value;  // full layers; segments in row order
  };
  int64_t position = 0;
  std::vector<Layer> layers;

  template <typename Fn>
  void ForEachBlob(Fn fn) const {
    for (const Layer& layer : layers) {
      if (layer.recurrent) fn(layer.recurrent);
      if (layer.conv) fn(layer.conv);
      for (const Blob& blob : layer.key) fn(blob);
      for (const Blob& blob : layer.value) fn(blob);
    }
  }
};

// The zero state of a sequence that has seen nothing.
Snapshot ZeroSnapshot(const Layout& layout);

// Appends a segment and merges it with the last ones while these are no larger and the sum stays
// within kCompactBytes, as a binary counter carries: n one-row segments cost O(n log n) copied rows
// and leave O(log n) segments. Merged segments are new blobs; older snapshots keep theirs.
void AppendSegment(std::vector<Blob>& segments, Blob segment);

// What a later AppendSegment can never merge: these blobs stay shared whatever follows.
bool IsStable(const Blob& segment);

// Borrowed view for ModelRunner::Load; `snapshot` must outlive it.
model::SlotImage ImageOf(const Snapshot& snapshot, const Layout& layout);

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_SNAPSHOT_H_
