// Files of a model folder: whole reads with a limit, read-only mappings, atomic writes.
#ifndef SPARSEGDN_SERVER_MODEL_FILES_H_
#define SPARSEGDN_SERVER_MODEL_FILES_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sparsegdn::model {

// NOT_FOUND when the path does not exist, INVALID_ARGUMENT when it is no regular file or longer
// than max_bytes, otherwise the errno's code; every message names the path.
absl::StatusOr<std::string> ReadFile(const std::string& path, size_t max_bytes);

// Writes beside the target and renames over it, so that a reader sees the old or the new content.
absl::Status WriteFileAtomically(const std::string& path, std::string_view content);

// Size and time of last change of a regular file; errors as ReadFile.
struct FileStamp {
  int64_t bytes = 0;
  int64_t mtime_ns = 0;
};
absl::StatusOr<FileStamp> StatFile(const std::string& path);

// A read-only private mapping of a whole file. Move-only. A file that another process truncates
// while it is mapped raises SIGBUS on access, as for any mapping: checkpoints must not be
// rewritten in place under a starting server.
class MappedFile {
 public:
  static absl::StatusOr<MappedFile> Open(const std::string& path);
  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const uint8_t> bytes() const { return {data_, size_}; }

 private:
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_FILES_H_
