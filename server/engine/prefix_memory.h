// Prefix entries in memory: bounded in bytes, least recently used first to go, never one that a
// request holds.
#ifndef SPARSEGDN_SERVER_ENGINE_PREFIX_MEMORY_H_
#define SPARSEGDN_SERVER_ENGINE_PREFIX_MEMORY_H_

#include <cstdint>
#include <list>
#include <mutex>
#include <unordered_map>

#include "server/engine/prefix_store.h"

namespace sparsegdn::engine {

class PrefixMemory final : public PrefixStore {
 public:
  // `layout` outlives the store.
  PrefixMemory(int64_t max_bytes, const Layout& layout) : max_bytes_(max_bytes), layout_(layout) {}

  // Touches what it gives, the first windows last, so that a chain loses its end before its start.
  // Ignores all of the query but its keys.
  PrefixEntries Load(const Query& query) override;
  // Never evicts the entry's own ancestors, and keeps nothing whose ancestors are gone: a prefix
  // that does not fit keeps its start. (Without full attention an entry needs no ancestors.)
  bool Put(std::span<const PrefixKey> chain, PrefixEntryPtr entry) override;
  void Remove(const PrefixKey& key) override;
  PrefixStoreStats stats() const override;

  // Windows of the longest usable prefix, by the index alone: nothing is read or touched.
  int64_t Peek(std::span<const PrefixKey> keys) const;
  bool HasState(const PrefixKey& key) const;
  int64_t max_bytes() const { return max_bytes_; }

 private:
  struct Item {
    PrefixKey key;
    PrefixEntryPtr entry;
  };
  using Items = std::list<Item>;  // least recently used first

  int64_t PeekLocked(std::span<const PrefixKey> keys) const;
  PrefixEntries TakeLocked(std::span<const PrefixKey> keys);
  bool TouchLocked(std::span<const PrefixKey> chain);
  bool MakeRoomLocked(int64_t bytes, int64_t spared);
  void EraseLocked(Items::iterator it);

  const int64_t max_bytes_;
  const Layout& layout_;
  mutable std::mutex mutex_;
  Items items_;
  std::unordered_map<PrefixKey, Items::iterator, PrefixKeyHash> index_;
  PrefixStoreStats stats_;
};

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_PREFIX_MEMORY_H_
