// The snapshots that the server keeps: bounded in bytes, least recently used first to go, never one
// that a request holds, each gone after its time to live, each seen by its tenant alone. Each blob
// has a hash, taken once, by which bytes that changed in memory are found before they are used.
#ifndef SPARSEGDN_SERVER_ENGINE_SNAPSHOT_TABLE_H_
#define SPARSEGDN_SERVER_ENGINE_SNAPSHOT_TABLE_H_

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/engine/snapshot.h"

namespace sparsegdn::engine {

// Thread-safe. A blob that several snapshots share counts once. Room is reserved before a snapshot
// is built, so that keeping it cannot fail after the work.
class SnapshotTable {
 public:
  // Bytes set aside for one snapshot in the making; returns them when destroyed. Does not outlive
  // the table. Not thread-safe in itself.
  class Reservation {
   public:
    ~Reservation();
    Reservation(const Reservation&) = delete;
    Reservation& operator=(const Reservation&) = delete;
    // Evicts as needed. RESOURCE_EXHAUSTED as Reserve.
    absl::Status Grow(int64_t bytes);
    // The snapshot, of `bytes` in all, will stay until its time: nothing evicts it.
    // RESOURCE_EXHAUSTED (PIN_LIMIT) when pinned snapshots would hold more than half of the table.
    absl::Status Pin(int64_t bytes);

   private:
    friend class SnapshotTable;
    explicit Reservation(SnapshotTable* table) : table_(table) {}
    SnapshotTable* const table_;
    int64_t bytes_ = 0;
    int64_t pinned_bytes_ = 0;
    std::vector<Blob> shared_;  // counted like a snapshot's
  };

  SnapshotTable(int64_t max_bytes, const Clock* clock) : max_bytes_(max_bytes), clock_(clock) {}

  // Null when unknown, expired or another tenant's. Marks it as just used. The pointer keeps it
  // from eviction.
  std::shared_ptr<const Snapshot> Find(const std::string& id, const std::string& tenant);
  // False as Find. Whoever holds it still may go on using it.
  bool Release(const std::string& id, const std::string& tenant);

  // Room for a snapshot of `bytes` in all, of which the stable KV segments of `base` (may be null)
  // are shared. RESOURCE_EXHAUSTED, with a retry delay, when snapshots in use leave no room;
  // NEVER_FITS when no table of this size could hold it.
  absl::StatusOr<std::unique_ptr<Reservation>> Reserve(int64_t bytes, const Snapshot* base);

  // Keeps a snapshot within its reservation and returns its id: 128 random bits in hex. To be sealed
  // before anybody is told the id, or on the thread that checks it later.
  absl::StatusOr<std::string> Commit(std::unique_ptr<Reservation> reservation,
                                     std::shared_ptr<const Snapshot> snapshot, std::string tenant,
                                     uint32_t ttl_seconds);

  // XXH3-64 of the snapshot's blobs that have none yet. Reads them without holding up the table.
  // Nothing when the snapshot is gone.
  void Seal(const std::string& id);
  // Whether each blob has the hash that it was sealed with, and finite values alone. Reads every
  // byte. `snapshot` is from Find.
  bool IsSound(const Snapshot& snapshot, const Layout& layout) const;

  // Forgets what has expired.
  void Sweep();

  int64_t max_bytes() const { return max_bytes_; }
  int64_t bytes() const;  // of blobs and reservations
  int64_t size() const;   // snapshots that can be found

 private:
  struct Entry {
    std::string id, tenant;
    std::shared_ptr<const Snapshot> snapshot;
    int64_t expires_ns = 0;
    int64_t pinned_bytes = 0;  // 0: may be evicted
    bool dead = false;         // expired or released, but still in use
  };
  using Entries = std::list<Entry>;  // least recently used first
  struct BlobUse {
    int64_t uses = 0;
    std::optional<uint64_t> hash;  // absent until sealed
  };

  void AddBlob(const Blob& blob);
  void DropBlob(const Blob& blob);
  void Erase(Entries::iterator it);
  Entries::iterator FindLive(const std::string& id, const std::string& tenant);
  void SweepLocked();
  absl::Status MakeRoomLocked(int64_t bytes);

  const int64_t max_bytes_;
  const Clock* const clock_;
  mutable std::mutex mutex_;
  Entries entries_;
  std::map<std::string, Entries::iterator> by_id_;
  std::unordered_map<const std::string*, BlobUse> blob_uses_;
  int64_t blob_bytes_ = 0;
  int64_t reserved_bytes_ = 0;
  int64_t pinned_bytes_ = 0;  // of reservations and entries
};

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_SNAPSHOT_TABLE_H_
