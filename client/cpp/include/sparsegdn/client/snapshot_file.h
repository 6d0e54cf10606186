// Snapshots as safetensors files with metadata (docs/snapshot_format.md).
#ifndef SPARSEGDN_CLIENT_SNAPSHOT_FILE_H_
#define SPARSEGDN_CLIENT_SNAPSHOT_FILE_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sparsegdn/client/snapshot.h"
#include "sparsegdn/v1/prefill.pb.h"

namespace sparsegdn::client {

// Writes `snapshot` (and, when given, the Result beside it) to `path`, replacing a file of that
// name, atomically: bytes go to an unnamed file (a hidden temporary name where the file system has
// none), fsync, rename, fsync of the folder. A full disk, an error or a kill leaves `path` as it
// was. Errors: reason FILE_IO, naming the path and the system's words.
absl::Status WriteSnapshotFile(const std::string& path, const Snapshot& snapshot,
                               const v1::Result* result = nullptr);

struct SnapshotFile {
  Snapshot snapshot;
  std::optional<v1::Result> result;
};

// Reads and verifies a file of WriteSnapshotFile: header grammar, every byte of the data section
// owned by exactly one tensor, whole-tensor hashes, digest. Errors: FILE_IO, FILE_FORMAT,
// FILE_CORRUPT, SNAPSHOT_TOO_LARGE above max_bytes.
absl::StatusOr<SnapshotFile> ReadSnapshotFile(const std::string& path,
                                              uint64_t max_bytes = uint64_t{64} << 30);

}  // namespace sparsegdn::client

#endif  // SPARSEGDN_CLIENT_SNAPSHOT_FILE_H_
