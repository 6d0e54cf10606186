#include "src/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <random>

#include "absl/strings/str_cat.h"
#include "src/errors.h"

namespace sparsegdn::client {

absl::StatusOr<std::unique_ptr<AtomicFile>> AtomicFile::Create(const std::string& path,
                                                               bool unnamed) {
  std::unique_ptr<AtomicFile> file(new AtomicFile(path));
  absl::Status status = file->Open(unnamed);
  if (!status.ok()) return status;
  return file;
}

std::string AtomicFile::TemporaryName() const {
  const std::filesystem::path path(path_);
  const std::string name = absl::StrCat(".", path.filename().string().substr(0, 200), ".tmp.",
                                        getpid(), ".", std::random_device{}());
  return (std::filesystem::path(folder_) / name).string();
}

absl::Status AtomicFile::Open(bool unnamed) {
  const std::filesystem::path path(path_);
  if (path.filename().empty()) return FileError("write", path_, EISDIR);
  std::error_code ignored;
  const std::filesystem::file_status there = std::filesystem::status(path, ignored);
  if (std::filesystem::is_directory(there)) return FileError("write", path_, EISDIR);
  // The rename would put a file in the place of a device, a pipe or a socket: of /dev/null, say.
  if (std::filesystem::exists(there) && !std::filesystem::is_regular_file(there)) {
    return FileError("write", absl::StrCat(path_, ", which is there and is no regular file"),
                     EEXIST);
  }
  folder_ = path.has_parent_path() ? path.parent_path().string() : ".";
  // A file without a name vanishes with the process, even with kill -9.
  if (unnamed) fd_ = open(folder_.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0644);
  if (fd_ >= 0) return absl::OkStatus();
  if (unnamed && errno != EOPNOTSUPP && errno != EISDIR && errno != ENOSYS) {
    return FileError("write", path_, errno);
  }
  temporary_ = TemporaryName();
  fd_ = open(temporary_.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644);
  if (fd_ >= 0) return absl::OkStatus();
  temporary_.clear();
  return FileError("write", path_, errno);
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) close(fd_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

absl::Status AtomicFile::Write(const void* data, size_t size) {
  const char* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = write(fd_, bytes, std::min<size_t>(size, size_t{1} << 30));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FileError("write", path_, errno);
    bytes += written;
    size -= static_cast<size_t>(written);
  }
  return absl::OkStatus();
}

absl::Status AtomicFile::LinkAnonymous() {
  // linkat never replaces a file, so a complete file gets a temporary name first.
  const std::string name = TemporaryName();
  const std::string self = absl::StrCat("/proc/self/fd/", fd_);
  if (linkat(AT_FDCWD, self.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) != 0) {
    return FileError("name", path_, errno);
  }
  temporary_ = name;
  return absl::OkStatus();
}

absl::Status AtomicFile::Commit() {
  if (fsync(fd_) != 0) return FileError("flush", path_, errno);
  if (temporary_.empty()) {
    absl::Status status = LinkAnonymous();
    if (!status.ok()) return status;
  }
  // Some network file systems report a full disk only here.
  const int fd = fd_;
  fd_ = -1;
  if (close(fd) != 0) return FileError("close", path_, errno);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) return FileError("rename", path_, errno);
  temporary_.clear();
  const int folder = open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    // The file is complete under its name already; a folder that cannot be flushed changes nothing.
    if (fsync(folder) != 0) errno = 0;
    close(folder);
  }
  return absl::OkStatus();
}

}  // namespace sparsegdn::client
