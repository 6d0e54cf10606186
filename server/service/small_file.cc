#include "server/service/small_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace sparsegdn::service {
namespace {

absl::StatusOr<std::string> ReadOpen(int fd, size_t max_bytes, struct stat* info) {
  if (fstat(fd, info) != 0) return absl::InvalidArgumentError(std::strerror(errno));
  if (!S_ISREG(info->st_mode)) return absl::InvalidArgumentError("wanted a regular file");
  std::string text(max_bytes + 1, '\0');  // in one piece: no copy of a secret stays behind
  size_t size = 0;
  while (size < text.size()) {
    const ssize_t got = read(fd, text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::InvalidArgumentError(std::strerror(errno));
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  if (size > max_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("the file has more than ", max_bytes, " bytes"));
  }
  text.resize(size);
  return text;
}

}  // namespace

absl::StatusOr<std::string> ReadSmallFile(const std::string& path, size_t max_bytes,
                                          struct stat* info) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    return errno == ENOENT ? absl::NotFoundError(std::strerror(errno))
                           : absl::InvalidArgumentError(std::strerror(errno));
  }
  struct stat own {};
  absl::StatusOr<std::string> text = ReadOpen(fd, max_bytes, info != nullptr ? info : &own);
  close(fd);
  return text;
}

}  // namespace sparsegdn::service
