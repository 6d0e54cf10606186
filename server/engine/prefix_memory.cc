#include "server/engine/prefix_memory.h"

#include <utility>

namespace sparsegdn::engine {

int64_t PrefixMemory::PeekLocked(std::span<const PrefixKey> keys) const {
  if (layout_.full_layers.empty()) {
    for (int64_t n = std::ssize(keys); n > 0; --n) {
      const auto it = index_.find(keys[static_cast<size_t>(n - 1)]);
      if (it != index_.end() && it->second->entry->has_state) return n;
    }
    return 0;
  }
  int64_t usable = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto it = index_.find(keys[i]);
    if (it == index_.end()) break;
    if (it->second->entry->has_state) usable = static_cast<int64_t>(i) + 1;
  }
  return usable;
}

PrefixEntries PrefixMemory::TakeLocked(std::span<const PrefixKey> keys) {
  const size_t n = static_cast<size_t>(PeekLocked(keys));
  PrefixEntries entries(n);
  const size_t first = layout_.full_layers.empty() && n > 0 ? n - 1 : 0;
  for (size_t i = n; i-- > first;) {
    const auto it = index_.at(keys[i]);
    entries[i] = it->entry;
    items_.splice(items_.end(), items_, it);
  }
  return entries;
}

PrefixEntries PrefixMemory::Load(const Query& query) {
  while (true) {
    PrefixEntries entries;
    {
      std::lock_guard lock(mutex_);
      entries = TakeLocked(query.keys);
    }
    // Outside the lock: reading a gigabyte takes a while.
    size_t bad = entries.size();
    for (size_t i = 0; i < entries.size() && bad == entries.size(); ++i) {
      if (entries[i] != nullptr && !IsSound(*entries[i], layout_)) bad = i;
    }
    if (bad == entries.size()) return entries;
    std::lock_guard lock(mutex_);
    ++stats_.corrupt;
    const auto it = index_.find(query.keys[bad]);
    if (it != index_.end() && it->second->entry == entries[bad]) EraseLocked(it->second);
  }
}

// Moves the chain to the end of the list, its start last; false when a part of it is not there.
bool PrefixMemory::TouchLocked(std::span<const PrefixKey> chain) {
  for (size_t i = chain.size(); i-- > 0;) {
    const auto it = index_.find(chain[i]);
    if (it == index_.end()) return false;
    items_.splice(items_.end(), items_, it->second);
  }
  return true;
}

bool PrefixMemory::Put(std::span<const PrefixKey> chain, PrefixEntryPtr entry) {
  const PrefixKey& key = chain.back();
  const std::span<const PrefixKey> ancestors =
      layout_.full_layers.empty() ? chain.first(0) : chain.first(chain.size() - 1);
  std::lock_guard lock(mutex_);
  if (const auto it = index_.find(key); it != index_.end()) {
    const PrefixEntryPtr& old = it->second->entry;
    if (old->has_state || !entry->has_state) return true;
    auto joined = std::make_shared<PrefixEntry>(*old);
    joined->has_state = true;
    joined->recurrent = entry->recurrent;
    joined->conv = entry->conv;
    joined->state_hash = entry->state_hash;
    entry = std::move(joined);
    EraseLocked(it->second);
  }
  const int64_t bytes = entry->bytes();
  if (!TouchLocked(ancestors) || !MakeRoomLocked(bytes, std::ssize(ancestors))) {
    ++stats_.not_stored;
    return false;
  }
  stats_.bytes += bytes;
  items_.push_back({key, std::move(entry)});
  index_[key] = std::prev(items_.end());
  TouchLocked(ancestors);
  return true;
}

// Spares the last `spared` entries. use_count() can only grow under the lock, through Load: 1 here
// means that nobody uses it.
bool PrefixMemory::MakeRoomLocked(int64_t bytes, int64_t spared) {
  if (bytes > max_bytes_) return false;
  int64_t candidates = std::ssize(items_) - spared;
  for (auto it = items_.begin(); stats_.bytes + bytes > max_bytes_ && candidates > 0;
       --candidates) {
    const auto next = std::next(it);
    if (it->entry.use_count() == 1) {
      ++stats_.evictions;
      EraseLocked(it);
    }
    it = next;
  }
  return stats_.bytes + bytes <= max_bytes_;
}

void PrefixMemory::EraseLocked(Items::iterator it) {
  stats_.bytes -= it->entry->bytes();
  index_.erase(it->key);
  items_.erase(it);
}

void PrefixMemory::Remove(const PrefixKey& key) {
  std::lock_guard lock(mutex_);
  const auto it = index_.find(key);
  if (it != index_.end()) EraseLocked(it->second);
}

PrefixStoreStats PrefixMemory::stats() const {
  std::lock_guard lock(mutex_);
  PrefixStoreStats stats = stats_;
  stats.entries = std::ssize(items_);
  return stats;
}

int64_t PrefixMemory::Peek(std::span<const PrefixKey> keys) const {
  std::lock_guard lock(mutex_);
  return PeekLocked(keys);
}

bool PrefixMemory::HasState(const PrefixKey& key) const {
  std::lock_guard lock(mutex_);
  const auto it = index_.find(key);
  return it != index_.end() && it->second->entry->has_state;
}

}  // namespace sparsegdn::engine
