// Checks kept snapshots on a thread of its own, so that neither callers nor the executor wait for
// the reading of every byte: hashes are taken after a snapshot is kept, and compared, with the
// values' finiteness, before each request that resumes from it.
#ifndef SPARSEGDN_SERVER_ENGINE_SNAPSHOT_CHECKER_H_
#define SPARSEGDN_SERVER_ENGINE_SNAPSHOT_CHECKER_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "server/engine/layout.h"
#include "server/engine/snapshot_table.h"
#include "server/engine/task_thread.h"

namespace sparsegdn::engine {

// One request's check. A request that goes before its turn takes its check with it.
class SnapshotCheck {
 public:
  bool done() const { return verdict_.load(std::memory_order_acquire) != Verdict::kOpen; }
  bool sound() const { return verdict_.load(std::memory_order_acquire) == Verdict::kSound; }

 private:
  friend class SnapshotChecker;
  enum class Verdict { kOpen, kSound, kCorrupt };
  explicit SnapshotCheck(std::shared_ptr<const Snapshot> snapshot)
      : snapshot_(std::move(snapshot)) {}

  std::shared_ptr<const Snapshot> snapshot_;  // until done
  std::atomic<Verdict> verdict_{Verdict::kOpen};
};

// Thread-safe. Tasks run in order: an id is known to callers after its Seal was posted, so what is
// checked is sealed.
class SnapshotChecker {
 public:
  // `wake` runs on the thread when a check is done. `table` and `layout` outlive this.
  SnapshotChecker(TaskThread::Mode mode, SnapshotTable& table, const Layout& layout,
                  std::function<void()> wake)
      : table_(table), layout_(layout), wake_(std::move(wake)), thread_(mode, 0) {}

  void Seal(const std::string& id) {
    thread_.Post(0, [this, id] { table_.Seal(id); });
  }
  // `snapshot` is from the table's Find.
  std::shared_ptr<SnapshotCheck> Start(std::shared_ptr<const Snapshot> snapshot) {
    std::shared_ptr<SnapshotCheck> check(new SnapshotCheck(std::move(snapshot)));
    thread_.Post(0, [this, weak = std::weak_ptr(check)] {
      const std::shared_ptr<SnapshotCheck> open = weak.lock();
      if (open == nullptr) return;
      const bool sound = table_.IsSound(*open->snapshot_, layout_);
      open->snapshot_.reset();
      open->verdict_.store(
          sound ? SnapshotCheck::Verdict::kSound : SnapshotCheck::Verdict::kCorrupt,
          std::memory_order_release);
      wake_();
    });
    return check;
  }

 private:
  SnapshotTable& table_;
  const Layout& layout_;
  const std::function<void()> wake_;
  TaskThread thread_;  // last, so that it ends first
};

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_SNAPSHOT_CHECKER_H_
