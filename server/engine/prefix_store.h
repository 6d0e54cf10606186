// The interface of a store of prefix entries, implemented in memory (prefix_memory.h) and over
// Redis (redis_store.h).
#ifndef SPARSEGDN_SERVER_ENGINE_PREFIX_STORE_H_
#define SPARSEGDN_SERVER_ENGINE_PREFIX_STORE_H_

#include <cstdint>
#include <span>

#include "server/engine/prefix_entry.h"

namespace sparsegdn::engine {

// Counters since start, and sizes now. What a store does not have stays 0.
struct PrefixStoreStats {
  int64_t entries = 0, bytes = 0;
  int64_t evictions = 0;   // for room
  int64_t corrupt = 0;     // entries that failed a check and were dropped
  int64_t not_stored = 0;  // too large, no room, or the writer fell behind
  int64_t read_bytes = 0, written_bytes = 0;
  int64_t read_errors = 0, write_errors = 0;
  bool available = true;
};

// Thread-safe. Nothing here fails a request: what cannot be read is not there, what cannot be
// written is not kept.
class PrefixStore {
 public:
  struct Query {
    std::span<const PrefixKey> keys;  // of boundaries 1, 2, ...
    PrefixEntries have;               // the best prefix so far: not read again
    int64_t max_bytes = 0;            // of what is read
    int64_t deadline_ns = 0;          // of the engine's clock
  };

  virtual ~PrefixStore() = default;
  // The longest usable prefix, or `have` where the store knows no longer one. Every entry that
  // comes from the store has passed IsSound on this call; one that fails is dropped from the store.
  virtual PrefixEntries Load(const Query& query) = 0;
  // Keeps the entry of the last of `chain`, the keys from boundary 1 on. The first entry of a key
  // stays: every later load gives the same bits. A state joins an entry that has none. False when
  // nothing was kept.
  virtual bool Put(std::span<const PrefixKey> chain, PrefixEntryPtr entry) = 0;
  virtual void Remove(const PrefixKey& key) = 0;
  virtual PrefixStoreStats stats() const = 0;
};

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_PREFIX_STORE_H_
