#include "server/service/listeners.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <set>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"

namespace sparsegdn::service {
namespace {

constexpr std::string_view kScheme = "unix:";

absl::StatusOr<ListenAddress> ParseOne(const std::string& text, const std::string& flag) {
  ListenAddress out;
  if (text.rfind(kScheme, 0) != 0) {
    absl::StatusOr<HostPort> tcp = ParseHostPort(text, flag);
    if (!tcp.ok()) return tcp.status();
    out.tcp = *tcp;
    return out;
  }
  out.is_unix = true;
  out.path = text.substr(kScheme.size());
  if (out.path.rfind("///", 0) == 0) out.path.erase(0, 2);  // unix:///run/x is unix:/run/x
  if (out.path.size() < 2 || out.path[0] != '/' || out.path[1] == '/') {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, " = \"", text, "\", wanted unix:/absolute/path"));
  }
  constexpr size_t kMost = sizeof(sockaddr_un::sun_path) - 1;
  if (out.path.size() > kMost) {
    return absl::InvalidArgumentError(absl::StrCat(flag, " = \"", text, "\": the path has ",
                                                   out.path.size(), " bytes, wanted at most ",
                                                   kMost));
  }
  return out;
}

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());  // its length was checked
  return address;
}

// What a connect says: 0 when somebody listens.
int TryConnect(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return errno;
  const sockaddr_un address = AddressOf(path);
  const int done = connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  const int error = done == 0 ? 0 : errno;
  close(fd);
  return error == EAGAIN ? 0 : error;  // a full backlog is somebody's
}

}  // namespace

absl::StatusOr<std::vector<ListenAddress>> ParseListenList(const std::string& text,
                                                           const std::string& flag) {
  std::vector<ListenAddress> out;
  std::set<std::string> paths;
  size_t begin = 0;
  while (true) {
    const size_t comma = text.find(',', begin);
    absl::StatusOr<ListenAddress> one = ParseOne(text.substr(begin, comma - begin), flag);
    if (!one.ok()) return one.status();
    if (one->is_unix && !paths.insert(one->path).second) {
      return absl::InvalidArgumentError(absl::StrCat(flag, " names ", one->path, " twice"));
    }
    out.push_back(*std::move(one));
    if (out.size() > kMaxListeners) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag, " names more than ", kMaxListeners, " addresses"));
    }
    if (comma == text.npos) return out;
    begin = comma + 1;
  }
}

std::string ToText(const ListenAddress& listen) {
  return listen.is_unix ? absl::StrCat("unix:", listen.path) : ToText(listen.tcp);
}

bool IsLocal(const ListenAddress& listen) {
  const std::string& host = listen.tcp.host;
  return listen.is_unix || host == "localhost" || host == "::1" || host.rfind("127.", 0) == 0;
}

absl::StatusOr<std::unique_ptr<UnixSocketFile>> UnixSocketFile::Prepare(const std::string& path,
                                                                        const std::string& flag) {
  const std::string what = absl::StrCat(flag, " = unix:", path, ": ");
  struct stat info {};
  if (lstat(path.c_str(), &info) == 0) {
    if (!S_ISSOCK(info.st_mode)) {
      return absl::InvalidArgumentError(absl::StrCat(what, "there is a file that is no socket"));
    }
    const int error = TryConnect(path);
    if (error == 0) return absl::AlreadyExistsError(absl::StrCat(what, "another server listens"));
    if (error != ECONNREFUSED) return absl::UnavailableError(absl::StrCat(what, strerror(error)));
    if (unlink(path.c_str()) != 0 && errno != ENOENT) {
      return absl::UnavailableError(absl::StrCat(what, "a stale socket: ", strerror(errno)));
    }
  }
  const std::string folder = path.substr(0, path.rfind('/') + 1);
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    return absl::UnavailableError(absl::StrCat(what, folder, ": ", strerror(errno)));
  }
  return std::unique_ptr<UnixSocketFile>(new UnixSocketFile(path, flag));
}

UnixSocketFile::~UnixSocketFile() {
  struct stat info {};
  if (inode_ == 0 || lstat(path_.c_str(), &info) != 0) return;
  if (info.st_dev == device_ && info.st_ino == inode_) unlink(path_.c_str());
}

absl::Status UnixSocketFile::Bound(uint32_t mode) {
  struct stat info {};
  if (lstat(path_.c_str(), &info) != 0 || !S_ISSOCK(info.st_mode) ||
      chmod(path_.c_str(), static_cast<mode_t>(mode)) != 0) {
    return absl::UnavailableError(
        absl::StrCat(flag_, " = unix:", path_, ": permissions: ", strerror(errno)));
  }
  device_ = info.st_dev;
  inode_ = info.st_ino;
  return absl::OkStatus();
}

}  // namespace sparsegdn::service
