// The addresses of --listen: host:port and Unix-domain sockets, several with commas between.
#ifndef SPARSEGDN_SERVER_SERVICE_LISTENERS_H_
#define SPARSEGDN_SERVER_SERVICE_LISTENERS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/service/address.h"

namespace sparsegdn::service {

inline constexpr size_t kMaxListeners = 16;

struct ListenAddress {
  bool is_unix = false;
  HostPort tcp;
  std::string path;  // absolute, of the socket
};

// "127.0.0.1:50051", "unix:/run/sparsegdn/grpc.sock", or a list. INVALID_ARGUMENT names `flag`.
absl::StatusOr<std::vector<ListenAddress>> ParseListenList(const std::string& text,
                                                           const std::string& flag);

// As gRPC wants it.
std::string ToText(const ListenAddress& listen);

// True when only this machine can reach it.
bool IsLocal(const ListenAddress& listen);

// A socket file from before it is bound until the server ends. A file that is in the way is removed
// only when it is a socket on which nobody listens: what a killed server left behind.
class UnixSocketFile {
 public:
  // Makes the path free. ALREADY_EXISTS when another process listens there, INVALID_ARGUMENT when
  // the path is something else or too long, UNAVAILABLE when the folder cannot be written to.
  static absl::StatusOr<std::unique_ptr<UnixSocketFile>> Prepare(const std::string& path,
                                                                 const std::string& flag);
  // Removes the file, if it is still the one that Bound saw.
  ~UnixSocketFile();
  // After the bind: sets the permissions (e.g. 0600).
  absl::Status Bound(uint32_t mode);

 private:
  UnixSocketFile(std::string path, std::string flag)
      : path_(std::move(path)), flag_(std::move(flag)) {}

  const std::string path_, flag_;
  uint64_t device_ = 0, inode_ = 0;
};

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_LISTENERS_H_
