#include "server/engine/snapshot_table.h"

#include <sys/random.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/encode.h"
#include "server/engine/errors.h"
#include "server/engine/frame_writer.h"

namespace sparsegdn::engine {
namespace {

constexpr int64_t kTableFullRetryMs = 1000;

absl::StatusOr<std::string> RandomId() {
  unsigned char bytes[16];
  if (getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes)) {
    return absl::InternalError("getrandom gave no snapshot id");
  }
  constexpr char kHex[] = "0123456789abcdef";
  std::string id;
  for (const unsigned char byte : bytes) {
    id.push_back(kHex[byte >> 4]);
    id.push_back(kHex[byte & 15]);
  }
  return id;
}

}  // namespace

SnapshotTable::Reservation::~Reservation() {
  std::lock_guard lock(table_->mutex_);
  table_->ReturnRoomLocked(*this);
}

absl::Status SnapshotTable::Reservation::Grow(int64_t bytes) {
  std::lock_guard lock(table_->mutex_);
  if (absl::Status s = table_->MakeRoomLocked(bytes, tenant_); !s.ok()) return s;
  bytes_ += bytes;
  table_->reserved_bytes_ += bytes;
  table_->ChargeTenant(tenant_, bytes);
  return absl::OkStatus();
}

absl::Status SnapshotTable::Reservation::Pin(int64_t bytes) {
  std::lock_guard lock(table_->mutex_);
  const int64_t most = table_->max_bytes_ / 2;
  if (bytes > most) {
    return NeverFits("keep_snapshot.pin",
                     absl::StrCat("the snapshot has ", bytes, " bytes, wanted at most ", most,
                                  ", half of the table"));
  }
  if (table_->pinned_bytes_ + bytes > most) {
    return Refuse(absl::StatusCode::kResourceExhausted, "keep_snapshot.pin", "PIN_LIMIT",
                  absl::StrCat("the snapshot has ", bytes, " bytes, but pinned ones hold ",
                               table_->pinned_bytes_, " of ", most, ", half of the table"),
                  kTableFullRetryMs);
  }
  table_->pinned_bytes_ += bytes;
  pinned_bytes_ += bytes;
  return absl::OkStatus();
}

// A tenant that holds nothing costs nothing, however many names there have been.
void SnapshotTable::ChargeTenant(const std::string& tenant, int64_t bytes) {
  if (bytes == 0) return;
  const auto it = tenant_bytes_.try_emplace(tenant, 0).first;
  if ((it->second += bytes) == 0) tenant_bytes_.erase(it);
}

void SnapshotTable::ReturnRoomLocked(Reservation& reservation) {
  ChargeTenant(reservation.tenant_, -reservation.bytes_);
  reserved_bytes_ -= std::exchange(reservation.bytes_, 0);
  pinned_bytes_ -= std::exchange(reservation.pinned_bytes_, 0);
  for (const Blob& blob : reservation.shared_) DropBlob(blob);
  reservation.shared_.clear();
}

void SnapshotTable::AddBlob(const Blob& blob, const std::string& tenant) {
  BlobUse& use = blob_uses_[blob.get()];
  if (++use.uses > 1) return;
  use.tenant = tenant;
  blob_bytes_ += std::ssize(*blob);
  ChargeTenant(tenant, std::ssize(*blob));
}

void SnapshotTable::DropBlob(const Blob& blob) {
  const auto it = blob_uses_.find(blob.get());
  if (--it->second.uses > 0) return;
  blob_bytes_ -= std::ssize(*blob);
  ChargeTenant(it->second.tenant, -std::ssize(*blob));
  blob_uses_.erase(it);
}

void SnapshotTable::Erase(Entries::iterator it) {
  it->snapshot->ForEachBlob([this](const Blob& blob) { DropBlob(blob); });
  pinned_bytes_ -= it->pinned_bytes;
  by_id_.erase(it->id);
  entries_.erase(it);
}

SnapshotTable::Entries::iterator SnapshotTable::FindLive(const std::string& id,
                                                         const std::string& tenant) {
  const auto it = by_id_.find(id);
  if (it == by_id_.end() || it->second->dead || it->second->tenant != tenant ||
      it->second->expires_ns <= clock_->NowNs()) {
    return entries_.end();
  }
  return it->second;
}

std::shared_ptr<const Snapshot> SnapshotTable::Find(const std::string& id,
                                                    const std::string& tenant) {
  std::lock_guard lock(mutex_);
  const auto it = FindLive(id, tenant);
  if (it == entries_.end()) return nullptr;
  entries_.splice(entries_.end(), entries_, it);
  return it->snapshot;
}

bool SnapshotTable::Release(const std::string& id, const std::string& tenant) {
  std::lock_guard lock(mutex_);
  const auto it = FindLive(id, tenant);
  if (it == entries_.end()) return false;
  it->dead = true;
  if (it->snapshot.use_count() == 1) Erase(it);
  return true;
}

// use_count() can only grow under the lock, through Find and Seal: 1 here means that nobody uses
// it.
void SnapshotTable::SweepLocked() {
  const int64_t now = clock_->NowNs();
  for (auto it = entries_.begin(); it != entries_.end();) {
    const auto next = std::next(it);
    if (it->expires_ns <= now) it->dead = true;
    if (it->dead && it->snapshot.use_count() == 1) Erase(it);
    it = next;
  }
}

absl::Status SnapshotTable::CheckSize(const std::string& field, int64_t bytes) const {
  if (bytes > max_bytes_) {
    return NeverFits(field, absl::StrCat("the snapshot has ", bytes, " bytes, wanted at most ",
                                         max_bytes_, ", the size of the table"));
  }
  if (const int64_t most = tenant_limit_; most > 0 && bytes > most) {
    return NeverFits(field, absl::StrCat("the snapshot has ", bytes, " bytes, wanted at most ",
                                         most, ", what a tenant may keep"));
  }
  return absl::OkStatus();
}

absl::Status SnapshotTable::MakeRoomLocked(int64_t bytes, const std::string& tenant) {
  const int64_t tenant_most = tenant_limit_;
  const auto held = [&] {
    const auto it = tenant_bytes_.find(tenant);
    return it == tenant_bytes_.end() ? 0 : it->second;
  };
  const auto evict_until = [&](const auto& fits, bool own_alone) {
    if (!fits()) SweepLocked();
    for (auto it = entries_.begin(); !fits() && it != entries_.end();) {
      const auto next = std::next(it);
      const bool candidate = !own_alone || it->tenant == tenant;
      if (candidate && it->snapshot.use_count() == 1 && it->pinned_bytes == 0) Erase(it);
      it = next;
    }
    return fits();
  };
  if (!evict_until([&] { return tenant_most == 0 || held() + bytes <= tenant_most; }, true)) {
    return Refuse(
        absl::StatusCode::kResourceExhausted, "keep_snapshot", "TENANT_SNAPSHOT_LIMIT",
        absl::StrCat("the snapshot has ", bytes, " bytes, but the tenant's in use or pinned hold ",
                     held(), " and may hold ", tenant_most),
        kTableFullRetryMs);
  }
  if (evict_until([&] { return blob_bytes_ + reserved_bytes_ + bytes <= max_bytes_; }, false)) {
    return absl::OkStatus();
  }
  return Refuse(
      absl::StatusCode::kResourceExhausted, "keep_snapshot", "SNAPSHOT_TABLE_FULL",
      absl::StrCat("the snapshot has ", bytes, " bytes, but snapshots in use or pinned hold ",
                   blob_bytes_ + reserved_bytes_, " of ", max_bytes_),
      kTableFullRetryMs);
}

absl::StatusOr<std::unique_ptr<SnapshotTable::Reservation>> SnapshotTable::Reserve(
    int64_t bytes, const Snapshot* base, std::string tenant) {
  if (absl::Status s = CheckSize("keep_snapshot", bytes); !s.ok()) return s;
  std::unique_ptr<Reservation> reservation(new Reservation(this, std::move(tenant)));
  if (base != nullptr) {
    std::lock_guard lock(mutex_);
    const auto share = [&](const Blob& blob) {
      if (!IsStable(blob)) return;
      // Counted already as a rule: the base comes from this table and is in use.
      AddBlob(blob, reservation->tenant_);
      reservation->shared_.push_back(blob);
      bytes -= static_cast<int64_t>(blob->size());
    };
    for (const Snapshot::Layer& layer : base->layers) {
      for (const Blob& blob : layer.key) share(blob);
      for (const Blob& blob : layer.value) share(blob);
    }
  }
  if (absl::Status s = reservation->Grow(bytes); !s.ok()) return s;
  return reservation;
}

absl::StatusOr<std::string> SnapshotTable::Commit(std::unique_ptr<Reservation> reservation,
                                                  std::shared_ptr<const Snapshot> snapshot,
                                                  uint32_t ttl_seconds) {
  absl::StatusOr<std::string> id = RandomId();
  if (!id.ok()) return id.status();
  const int64_t expires_ns = clock_->NowNs() + int64_t{ttl_seconds} * 1'000'000'000;
  std::lock_guard lock(mutex_);
  const std::string& tenant = reservation->tenant_;
  snapshot->ForEachBlob([&](const Blob& blob) { AddBlob(blob, tenant); });
  const int64_t pinned_bytes = std::exchange(reservation->pinned_bytes_, 0);
  entries_.push_back({*id, tenant, std::move(snapshot), expires_ns, pinned_bytes, false});
  by_id_[*id] = std::prev(entries_.end());
  ReturnRoomLocked(*reservation);
  return id;
}

void SnapshotTable::Seal(const std::string& id) {
  std::shared_ptr<const Snapshot> snapshot;
  std::vector<Blob> open;
  {
    std::lock_guard lock(mutex_);
    const auto it = by_id_.find(id);
    if (it == by_id_.end()) return;
    snapshot = it->second->snapshot;  // keeps its blobs in the table
    snapshot->ForEachBlob([&](const Blob& blob) {
      if (!blob_uses_.at(blob.get()).hash) open.push_back(blob);
    });
  }
  std::vector<uint64_t> hashes;
  for (const Blob& blob : open) hashes.push_back(Xxh3(*blob));
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < open.size(); ++i) blob_uses_.at(open[i].get()).hash = hashes[i];
}

bool SnapshotTable::IsSound(const Snapshot& snapshot, const Layout& layout) const {
  const auto sound = [&](const Blob& blob, ExportDType dtype) {
    std::optional<uint64_t> sealed;
    {
      std::lock_guard lock(mutex_);
      if (const auto it = blob_uses_.find(blob.get()); it != blob_uses_.end()) {
        sealed = it->second.hash;
      }
    }
    return sealed == Xxh3(*blob) &&
           AllFinite(blob->data(), dtype, std::ssize(*blob) / ElementBytes(dtype));
  };
  for (const Snapshot::Layer& layer : snapshot.layers) {
    if (layer.recurrent && !sound(layer.recurrent, ExportDType::kF32)) return false;
    if (layer.conv && !sound(layer.conv, layout.compute)) return false;
    for (const Blob& blob : layer.key) {
      if (!sound(blob, layout.compute)) return false;
    }
    for (const Blob& blob : layer.value) {
      if (!sound(blob, layout.compute)) return false;
    }
  }
  return true;
}

void SnapshotTable::Sweep() {
  std::lock_guard lock(mutex_);
  SweepLocked();
}

int64_t SnapshotTable::bytes() const {
  std::lock_guard lock(mutex_);
  return blob_bytes_ + reserved_bytes_;
}

int64_t SnapshotTable::size() const {
  std::lock_guard lock(mutex_);
  const int64_t now = clock_->NowNs();
  int64_t live = 0;
  for (const Entry& entry : entries_) live += !entry.dead && entry.expires_ns > now;
  return live;
}

}  // namespace sparsegdn::engine
