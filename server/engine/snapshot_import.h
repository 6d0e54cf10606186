// Uploads: chunks in any order, each byte once, every hash checked; nothing is kept on failure.
#ifndef SPARSEGDN_SERVER_ENGINE_SNAPSHOT_IMPORT_H_
#define SPARSEGDN_SERVER_ENGINE_SNAPSHOT_IMPORT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/engine/import_manifest.h"
#include "server/engine/snapshot_table.h"

namespace sparsegdn::engine {

// Pieces of one tensor may arrive in any order, but leave at most so many gaps.
inline constexpr size_t kMaxImportGaps = 1024;

// What a piece that comes ahead of its turn is charged beyond its bytes.
inline constexpr int64_t kImportPieceBytes = 128;

// One upload. It holds, and is charged in the table for, the bytes that came, so that neither a
// header nor one byte of each tensor costs memory or evicts anything; Finish reserves what the
// kept form takes beyond them. Thread-safe, because the executor ends idle uploads.
class ImportState {
 public:
  ImportState(ImportPlan plan, const Layout& layout, SnapshotTable& table, const Clock* clock,
              uint32_t ttl_seconds, std::string tenant);

  absl::Status Add(uint32_t tensor, uint64_t byte_offset, std::string_view data, uint64_t hash);
  absl::StatusOr<SnapshotRef> Finish(uint64_t digest);
  void Pin();
  // Frees everything; later calls return `status`.
  void End(absl::Status status);
  // Never waits: an upload that another thread works on is not idle.
  void EndIfIdle(int64_t now_ns, double idle_seconds);

 private:
  struct Tensor {
    std::string bytes;                      // from the front on, as far as there is no gap
    std::map<uint64_t, std::string> ahead;  // pieces beyond a gap
    std::map<uint64_t, uint64_t> have;      // begin to end, disjoint, not touching
  };
  absl::Status AddLocked(uint32_t tensor, uint64_t byte_offset, std::string_view data,
                         uint64_t hash);
  absl::Status Mark(Tensor& tensor, const std::string& field, uint64_t begin, uint64_t end);
  static void Store(Tensor& tensor, uint64_t begin, std::string_view data, uint64_t tensor_bytes);
  absl::Status Charge(int64_t bytes);
  absl::StatusOr<SnapshotRef> FinishLocked(uint64_t digest);
  absl::Status CheckComplete(uint64_t digest) const;
  absl::StatusOr<std::shared_ptr<const Snapshot>> MakeSnapshot();
  Blob TakeRecurrent(const LayerTensors& ids);
  Blob TakeConv(int32_t id);
  Blob TakeKv(int32_t id);
  void EndLocked(absl::Status status);

  const ImportPlan plan_;
  const Layout& layout_;
  SnapshotTable& table_;
  const Clock* const clock_;
  const uint32_t ttl_seconds_;
  const std::string tenant_;

  std::mutex mutex_;
  absl::Status ended_;  // OK while chunks may come
  std::vector<Tensor> tensors_;
  std::unique_ptr<SnapshotTable::Reservation> reservation_;
  int64_t charged_bytes_ = 0;  // of the reservation
  int64_t last_ns_;
  bool pin_ = false;
};

// The uploads of one engine. Ends them all when it goes.
class ImportRegistry {
 public:
  ~ImportRegistry();
  absl::StatusOr<std::unique_ptr<SnapshotImport>> Begin(const Manifest& manifest,
                                                        const model::ModelInfo& model,
                                                        const Layout& layout, SnapshotTable& table,
                                                        const Clock* clock, uint32_t ttl_seconds,
                                                        std::string tenant);
  void Sweep(int64_t now_ns, double idle_seconds);
  size_t size() const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<ImportState>> states_;
};

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_SNAPSHOT_IMPORT_H_
