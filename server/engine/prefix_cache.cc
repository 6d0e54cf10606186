#include "server/engine/prefix_cache.h"

#include <algorithm>
#include <utility>

#include "sparsegdn/gdn.h"

namespace sparsegdn::engine {
namespace {

constexpr int32_t kMaxRepeats = 2;
// Entries that wait to be hashed or written count against the memory store's room for nobody else:
// a quarter of it, but always room for one ordinary entry.
constexpr int64_t kMinPendingBytes = 64 << 20;

TaskThread::Mode RemoteMode(const PrefixCache::Options& options) {
  return options.remote ? options.mode : TaskThread::Mode::kInline;
}

}  // namespace

PrefixPlan PlanPrefix(const RequestPlan& plan, const model::ModelInfo& model) {
  const PrefillRequest& request = plan.request;
  PrefixPlan out;
  if (!request.prefix_reuse || !request.resume_from.empty()) return out;
  const int64_t limit = PrefixLimit(plan.budget, plan.prompt_tokens, plan.snapshot_position);
  const int64_t windows = std::max<int64_t>(0, limit / kWindow);
  if (windows == 0) return out;
  out.keys =
      PrefixChain(PrefixSeed(model, plan.chunk_tokens / kWindow, plan.budget, request.tenant),
                  request.tokens, windows);
  int64_t reuse = limit;
  if (!plan.runner_logits.empty()) reuse = std::min(reuse, plan.runner_logits.front());
  if (request.outputs.logprobs_from) reuse = std::min(reuse, *request.outputs.logprobs_from - 1);
  if (!plan.checkpoints.empty()) reuse = std::min(reuse, plan.checkpoints.front());
  out.reusable = reuse / kWindow;
  return out;
}

PrefixCache::PrefixCache(Options options, const Layout& layout, const Clock* clock,
                         std::function<void()> wake)
    : clock_(clock),
      wake_(std::move(wake)),
      fetch_ns_(options.fetch_ns),
      remote_(options.remote),
      memory_(options.max_bytes, layout),
      write_(RemoteMode(options), std::max(kMinPendingBytes, options.max_bytes / 4)),
      fetch_(RemoteMode(options), 0),
      work_(options.mode, std::max(kMinPendingBytes, options.max_bytes / 4)) {}

std::shared_ptr<PrefixLookup> PrefixCache::Start(PrefixPlan plan) {
  if (plan.keys.empty()) return nullptr;
  std::shared_ptr<PrefixLookup> lookup(new PrefixLookup(std::move(plan)));
  lookup->deadline_ns_ = clock_->NowNs() + fetch_ns_;
  if (lookup->plan_.reusable == 0) {
    lookup->done_ = true;
    return lookup;
  }
  work_.Post(0, [this, lookup] { Resolve(lookup); });
  return lookup;
}

void PrefixCache::Resolve(const std::shared_ptr<PrefixLookup>& lookup) {
  const size_t reusable = static_cast<size_t>(lookup->plan_.reusable);
  PrefixStore::Query query;
  query.keys = std::span(lookup->plan_.keys).first(reusable);
  PrefixEntries entries = memory_.Load(query);
  if (remote_ == nullptr || entries.size() == reusable) {
    return Done(*lookup, std::move(entries), false, true);
  }
  Done(*lookup, entries, false, false);
  fetch_.Post(0, [this, lookup, have = std::move(entries)] { Fetch(lookup, have); });
}

void PrefixCache::Fetch(const std::shared_ptr<PrefixLookup>& lookup, PrefixEntries have) {
  {
    std::lock_guard lock(lookup->mutex_);
    if (lookup->abandoned_) return;
  }
  PrefixStore::Query query;
  query.keys = std::span(lookup->plan_.keys).first(static_cast<size_t>(lookup->plan_.reusable));
  query.have = have;
  query.max_bytes = memory_.max_bytes();
  query.deadline_ns = lookup->deadline_ns_;
  PrefixEntries entries = remote_->Load(query);
  // Only what memory takes is used, so that its bound holds for what requests wait with.
  const bool longer =
      entries.size() > have.size() && KeepFetched(lookup->plan_, entries, have.size());
  if (!longer) entries = std::move(have);
  Done(*lookup, std::move(entries), longer, true);
}

void PrefixLookup::Drop() {
  std::lock_guard lock(mutex_);
  abandoned_ = true;
  found_.clear();
  entries_.clear();
}

bool PrefixCache::KeepFetched(const PrefixPlan& plan, const PrefixEntries& entries, size_t from) {
  for (size_t i = from; i < entries.size(); ++i) {
    if (entries[i] != nullptr && !memory_.Put(std::span(plan.keys).first(i + 1), entries[i])) {
      return false;
    }
  }
  return true;
}

void PrefixCache::Done(PrefixLookup& lookup, PrefixEntries entries, bool remote, bool last) {
  {
    std::lock_guard lock(lookup.mutex_);
    if (lookup.abandoned_) return;
    lookup.found_ = std::move(entries);
    lookup.found_remote_ |= remote;
    lookup.done_ = last;
  }
  if (last) wake_();
}

bool PrefixCache::Settled(PrefixLookup& lookup) {
  const std::span<const PrefixKey> keys =
      std::span(lookup.plan_.keys).first(static_cast<size_t>(lookup.plan_.reusable));
  while (true) {
    const int64_t now = clock_->NowNs();
    {
      std::lock_guard lock(lookup.mutex_);
      if (lookup.abandoned_) return true;
      if (!lookup.done_ && now < lookup.deadline_ns_) return false;
      lookup.abandoned_ = !lookup.done_;  // what comes after this comes too late
      lookup.entries_ = lookup.found_;
      lookup.from_remote_ = lookup.found_remote_;
      if (lookup.abandoned_ || lookup.repeats_ == kMaxRepeats ||
          memory_.Peek(keys) <= std::ssize(lookup.found_)) {
        return true;
      }
      ++lookup.repeats_;
      lookup.done_ = false;
      lookup.deadline_ns_ = now + fetch_ns_;
    }
    work_.Post(0, [this, again = lookup.shared_from_this()] { Resolve(again); });
  }
}

void PrefixCache::Count(const PrefixLookup& lookup) {
  if (lookup.plan_.reusable == 0) return;
  if (lookup.entries_.empty()) {
    misses_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  (lookup.from_remote_ ? remote_hits_ : memory_hits_).fetch_add(1, std::memory_order_relaxed);
  tokens_saved_.fetch_add(lookup.position(), std::memory_order_relaxed);
}

void PrefixCache::Put(std::vector<PrefixKey> chain, std::shared_ptr<PrefixEntry> entry) {
  const int64_t bytes = entry->bytes();
  const bool posted = work_.Post(bytes, [this, chain = std::move(chain), entry, bytes] {
    SealEntry(*entry);
    if (!memory_.Put(chain, entry) || remote_ == nullptr) return;
    if (!write_.Post(bytes, [this, chain, entry] { remote_->Put(chain, entry); })) ++dropped_;
  });
  if (!posted) ++dropped_;
}

void PrefixCache::Evict(const PrefixPlan& plan, int64_t windows) {
  for (int64_t i = 0; i < windows; ++i) memory_.Remove(plan.keys[static_cast<size_t>(i)]);
}

PrefixCacheStats PrefixCache::stats() const {
  PrefixCacheStats out;
  out.memory_hits = memory_hits_;
  out.remote_hits = remote_hits_;
  out.misses = misses_;
  out.tokens_saved = tokens_saved_;
  const PrefixStoreStats memory = memory_.stats();
  out.bytes = memory.bytes;
  out.entries = memory.entries;
  out.evictions = memory.evictions;
  out.corrupt = memory.corrupt;
  out.not_stored = memory.not_stored + dropped_;
  if (remote_ != nullptr) {
    const PrefixStoreStats remote = remote_->stats();
    out.corrupt += remote.corrupt;
    out.not_stored += remote.not_stored;
    out.remote_read_bytes = remote.read_bytes;
    out.remote_written_bytes = remote.written_bytes;
    out.remote_read_errors = remote.read_errors;
    out.remote_write_errors = remote.write_errors;
    out.remote_available = remote.available;
  }
  return out;
}

}  // namespace sparsegdn::engine
