// The snapshots that the server keeps: bounded in bytes, least recently used first to go, never one
// that a request holds, each gone after its time to live, each seen by its tenant alone. Each blob
// has a hash, taken once, by which bytes that changed in memory are found before they are used.
#ifndef SPARSEGDN_SERVER_ENGINE_SNAPSHOT_TABLE_H_
#define SPARSEGDN_SERVER_ENGINE_SNAPSHOT_TABLE_H_

#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
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
    // Evicts as needed. RESOURCE_EXHAUSTED as Reserve, but NEVER_FITS.
    absl::Status Grow(int64_t bytes);
    // The snapshot, of `bytes` in all, will stay until its time: nothing evicts it.
    // RESOURCE_EXHAUSTED (PIN_LIMIT) when pinned snapshots would hold more than half of the table.
    absl::Status Pin(int64_t bytes);

   private:
    friend class SnapshotTable;
    Reservation(SnapshotTable* table, std::string tenant)
        : table_(table), tenant_(std::move(tenant)) {}
    SnapshotTable* const table_;
    const std::string tenant_;
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

  // Most that snapshots and reservations of one tenant hold; 0: as much as there is room for. What
  // a tenant has beyond a limit that was lowered stays until it asks for room.
  void SetTenantLimit(int64_t bytes) { tenant_limit_ = bytes; }

  // NEVER_FITS, naming `field`, when no snapshot of `bytes` could be held, however empty the table.
  absl::Status CheckSize(const std::string& field, int64_t bytes) const;

  // Room for a snapshot of `bytes` in all, of which the stable KV segments of `base` (may be null)
  // are shared. A tenant at its limit makes room among its own snapshots first. RESOURCE_EXHAUSTED,
  // with a retry delay, when snapshots in use or pinned leave no room: TENANT_SNAPSHOT_LIMIT when
  // they are the tenant's, else SNAPSHOT_TABLE_FULL. NEVER_FITS as CheckSize.
  absl::StatusOr<std::unique_ptr<Reservation>> Reserve(int64_t bytes, const Snapshot* base,
                                                       std::string tenant);

  // Keeps a snapshot within its reservation, for its tenant, and returns its id: 128 random bits in
  // hex. To be sealed before anybody is told the id, or on the thread that checks it later.
  absl::StatusOr<std::string> Commit(std::unique_ptr<Reservation> reservation,
                                     std::shared_ptr<const Snapshot> snapshot,
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
    std::string tenant;            // who pays: only a tenant's own snapshots share
    std::optional<uint64_t> hash;  // absent until sealed
  };

  void AddBlob(const Blob& blob, const std::string& tenant);
  void DropBlob(const Blob& blob);
  void Erase(Entries::iterator it);
  Entries::iterator FindLive(const std::string& id, const std::string& tenant);
  void SweepLocked();
  void ChargeTenant(const std::string& tenant, int64_t bytes);
  void ReturnRoomLocked(Reservation& reservation);
  absl::Status MakeRoomLocked(int64_t bytes, const std::string& tenant);

  const int64_t max_bytes_;
  const Clock* const clock_;
  std::atomic<int64_t> tenant_limit_{0};
  mutable std::mutex mutex_;
  Entries entries_;
  std::map<std::string, Entries::iterator> by_id_;
  std::unordered_map<const std::string*, BlobUse> blob_uses_;
  std::unordered_map<std::string, int64_t> tenant_bytes_;  // of blobs and reservations
  int64_t blob_bytes_ = 0;
  int64_t reserved_bytes_ = 0;
  int64_t pinned_bytes_ = 0;  // of reservations and entries
};

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_SNAPSHOT_TABLE_H_
