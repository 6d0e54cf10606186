// A file that appears under its name complete, or not at all.
#ifndef SPARSEGDN_CLIENT_SRC_ATOMIC_FILE_H_
#define SPARSEGDN_CLIENT_SRC_ATOMIC_FILE_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sparsegdn::client {

// Dropping it before Commit leaves nothing behind. Not thread-safe.
class AtomicFile {
 public:
  // FILE_IO when the folder is missing or not writable. `unnamed` false acts as on a file system
  // without unnamed files.
  static absl::StatusOr<std::unique_ptr<AtomicFile>> Create(const std::string& path,
                                                            bool unnamed = true);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  absl::Status Write(const void* data, size_t size);
  // fsync, give the file its name (replacing what had it), fsync the folder.
  absl::Status Commit();

 private:
  explicit AtomicFile(std::string path) : path_(std::move(path)) {}
  absl::Status Open(bool unnamed);
  absl::Status LinkAnonymous();
  std::string TemporaryName() const;

  std::string path_;
  std::string folder_;
  std::string temporary_;  // a name on disk to be removed; empty while the file is anonymous
  int fd_ = -1;
};

}  // namespace sparsegdn::client

#endif  // SPARSEGDN_CLIENT_SRC_ATOMIC_FILE_H_
