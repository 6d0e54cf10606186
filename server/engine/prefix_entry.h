// What a store keeps of one window boundary.
#ifndef SPARSEGDN_SERVER_ENGINE_PREFIX_ENTRY_H_
#define SPARSEGDN_SERVER_ENGINE_PREFIX_ENTRY_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "server/engine/layout.h"
#include "server/engine/prefix_key.h"

namespace sparsegdn::engine {

// The state at boundary `position` and the KV of the window that ends there. Immutable once made.
// The state may be missing: a chain needs it of its last entry only, the KV of every entry.
struct PrefixEntry {
  int64_t position = 0;
  // In the order of Layout::linear_layers: FP32 [Hv, Dk, Dv] and conv [C, 4].
  std::vector<Blob> recurrent, conv;
  // In the order of Layout::full_layers: rows [kWindow, Nkv, D] in the compute dtype.
  std::vector<Blob> key, value;
  bool has_state = false;
  uint64_t state_hash = 0, kv_hash = 0;  // as SealEntry computes them

  int64_t bytes() const;
};
using PrefixEntryPtr = std::shared_ptr<const PrefixEntry>;

// Bytes of a state and of one window's KV in an entry.
int64_t StateBytes(const Layout& layout);
int64_t WindowKvBytes(const Layout& layout);

// XXH3-64 over the blobs in order.
uint64_t HashOfState(const PrefixEntry& entry);
uint64_t HashOfKv(const PrefixEntry& entry);
void SealEntry(PrefixEntry& entry);

// Sizes as the layout says, hashes as sealed, every value finite. Reads every byte.
bool IsSound(const PrefixEntry& entry, const Layout& layout);

// A usable prefix: entries of consecutive boundaries from the first on, the last with its state.
// Models without full attention need only that one: earlier ones are null there.
using PrefixEntries = std::vector<PrefixEntryPtr>;

inline int64_t PositionOf(const PrefixEntries& entries) {
  return entries.empty() ? 0 : entries.back()->position;
}

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_PREFIX_ENTRY_H_
