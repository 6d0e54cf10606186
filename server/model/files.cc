#include "server/model/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/model/status_macros.h"

namespace sparsegdn::model {
namespace {

// Closes a descriptor at the end of a scope.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

absl::Status Failed(const char* what, const std::string& path) {
  return absl::ErrnoToStatus(errno, absl::StrCat(what, " ", path));
}

absl::StatusOr<FileStamp> StampOf(int fd, const std::string& path) {
  struct stat info;
  if (fstat(fd, &info) != 0) return Failed("cannot stat", path);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": wanted a regular file"));
  }
  return FileStamp{info.st_size,
                   int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec};
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path, size_t max_bytes) {
  Descriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) return Failed("cannot open", path);
  SPARSEGDN_ASSIGN_OR_RETURN(FileStamp stamp, StampOf(fd.get(), path));
  if (static_cast<uint64_t>(stamp.bytes) > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": got ", stamp.bytes, " bytes, wanted at most ", max_bytes));
  }
  std::string content(static_cast<size_t>(stamp.bytes), '\0');
  size_t done = 0;
  while (done < content.size()) {
    const ssize_t got = read(fd.get(), content.data() + done, content.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Failed("cannot read", path);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  content.resize(done);
  return content;
}

absl::Status WriteFileAtomically(const std::string& path, std::string_view content) {
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".tmp");
  {
    Descriptor fd(open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (fd.get() < 0) return Failed("cannot create", temporary);
    size_t done = 0;
    while (done < content.size()) {
      const ssize_t put = write(fd.get(), content.data() + done, content.size() - done);
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) {
        absl::Status status = Failed("cannot write", temporary);
        unlink(temporary.c_str());
        return status;
      }
      done += static_cast<size_t>(put);
    }
  }
  if (rename(temporary.c_str(), path.c_str()) != 0) {
    absl::Status status = Failed("cannot rename to", path);
    unlink(temporary.c_str());
    return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<FileStamp> StatFile(const std::string& path) {
  Descriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) return Failed("cannot open", path);
  return StampOf(fd.get(), path);
}

absl::StatusOr<MappedFile> MappedFile::Open(const std::string& path) {
  Descriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) return Failed("cannot open", path);
  SPARSEGDN_ASSIGN_OR_RETURN(FileStamp stamp, StampOf(fd.get(), path));
  MappedFile file;
  if (stamp.bytes == 0) return file;  // mmap refuses an empty range
  void* data = mmap(nullptr, static_cast<size_t>(stamp.bytes), PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (data == MAP_FAILED) return Failed("cannot map", path);
  file.data_ = static_cast<const uint8_t*>(data);
  file.size_ = static_cast<size_t>(stamp.bytes);
  return file;
}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<uint8_t*>(data_), size_);
}

}  // namespace sparsegdn::model
