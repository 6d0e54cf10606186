// Reuse of prefixes across requests: a store in memory, read first, and optionally a remote one
// behind it that replicas share. Lookups, checks and writes run on threads of its own, so that
// neither callers nor the executor wait for them.
#ifndef SPARSEGDN_SERVER_ENGINE_PREFIX_CACHE_H_
#define SPARSEGDN_SERVER_ENGINE_PREFIX_CACHE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "server/engine/engine.h"
#include "server/engine/plan.h"
#include "server/engine/prefix_memory.h"
#include "server/engine/prefix_store.h"
#include "server/engine/task_thread.h"

namespace sparsegdn::engine {

// What a request may store and reuse. No keys: neither.
struct PrefixPlan {
  std::vector<PrefixKey> keys;  // of the boundaries that it may store
  int64_t reusable = 0;         // of these, so many from the first on may it start from
};

// Nothing for a request that opts out or resumes from a snapshot (whose tokens are not known).
// Reuse ends before the first token whose logits or log-probability are asked for, and at the first
// checkpoint.
PrefixPlan PlanPrefix(const RequestPlan& plan, const model::ModelInfo& model);

// One request's lookup. Made by PrefixCache::Start; the executor asks Settled until it is true.
class PrefixLookup : public std::enable_shared_from_this<PrefixLookup> {
 public:
  const PrefixPlan& plan() const { return plan_; }
  // After Settled.
  const PrefixEntries& entries() const { return entries_; }
  int64_t position() const { return PositionOf(entries_); }
  bool from_remote() const { return from_remote_; }
  // The entries turned out to be unusable, or are used up.
  void Drop();

 private:
  friend class PrefixCache;
  explicit PrefixLookup(PrefixPlan plan) : plan_(std::move(plan)) {}

  const PrefixPlan plan_;
  PrefixEntries entries_;  // the executor's
  bool from_remote_ = false;
  int32_t repeats_ = 0;
  int64_t deadline_ns_ = 0;

  std::mutex mutex_;  // guards what follows, between the executor and the lookup's threads
  bool done_ = false;
  bool abandoned_ = false;
  PrefixEntries found_;
  bool found_remote_ = false;
};

class PrefixCache {
 public:
  struct Options {
    int64_t max_bytes = 0;
    int64_t fetch_ns = 0;  // longest that a request waits for the remote store
    std::shared_ptr<PrefixStore> remote;
    TaskThread::Mode mode = TaskThread::Mode::kThread;
  };
  // `wake` runs on the cache's threads when a lookup is done. `layout` and `clock` outlive it.
  PrefixCache(Options options, const Layout& layout, const Clock* clock,
              std::function<void()> wake);

  std::shared_ptr<PrefixLookup> Start(PrefixPlan plan);
  // False while the lookup runs, at most fetch_ns. Looks again, at most twice, when memory has got
  // more meanwhile: of many requests with one prefix that queue together, the later ones find it.
  bool Settled(PrefixLookup& lookup);
  // Counts the outcome of a request that could have reused something, once.
  void Count(const PrefixLookup& lookup);

  bool HasState(const PrefixKey& key) const { return memory_.HasState(key); }
  // Keeps the entry of the last of `chain`; not sealed yet.
  void Put(std::vector<PrefixKey> chain, std::shared_ptr<PrefixEntry> entry);
  // Entries that the model did not accept.
  void Evict(const PrefixPlan& plan, int64_t windows);

  PrefixCacheStats stats() const;
  PrefixMemory& memory() { return memory_; }

 private:
  void Resolve(const std::shared_ptr<PrefixLookup>& lookup);
  void Fetch(const std::shared_ptr<PrefixLookup>& lookup, PrefixEntries have);
  void Done(PrefixLookup& lookup, PrefixEntries entries, bool remote, bool last);
  bool KeepFetched(const PrefixPlan& plan, const PrefixEntries& entries, size_t from);

  const Clock* const clock_;
  const std::function<void()> wake_;
  const int64_t fetch_ns_;
  const std::shared_ptr<PrefixStore> remote_;
  PrefixMemory memory_;
  std::atomic<int64_t> memory_hits_{0}, remote_hits_{0}, misses_{0}, tokens_saved_{0}, dropped_{0};
  // Last, so that they end first. `work_` reads and checks memory, `fetch_` and `write_` talk to
  // the remote store.
  TaskThread write_, fetch_, work_;
};

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_PREFIX_CACHE_H_
