#include "server/service/address.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace sparsegdn::service {

absl::StatusOr<HostPort> ParseHostPort(const std::string& text, const std::string& flag) {
  HostPort out;
  const size_t colon = text.rfind(':');
  std::string host = colon == std::string::npos ? "" : text.substr(0, colon);
  const bool bracketed = host.size() >= 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  const bool ambiguous = !bracketed && host.find(':') != std::string::npos;
  if (colon == std::string::npos || ambiguous ||
      !absl::SimpleAtoi(text.substr(colon + 1), &out.port) || out.port < 0 || out.port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, " = \"", text, "\", wanted host:port, e.g. 127.0.0.1:0 or [::]:50051"));
  }
  out.host = host;
  return out;
}

std::string ToText(const HostPort& address) {
  const std::string host = address.host.empty() ? "::" : address.host;
  if (host.find(':') == std::string::npos) return absl::StrCat(host, ":", address.port);
  return absl::StrCat("[", host, "]:", address.port);
}

absl::Status ProbeBind(const HostPort& address, const std::string& flag) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const std::string port = absl::StrCat(address.port);
  const int error = getaddrinfo(address.host.empty() ? nullptr : address.host.c_str(), port.c_str(),
                                &hints, &found);
  if (error != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        flag, " = ", ToText(address), ": the host does not resolve: ", gai_strerror(error)));
  }
  absl::Status status;
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  // Linux lets a bind succeed beside a listener in some cases; listen() does not.
  if (fd < 0 || bind(fd, found->ai_addr, found->ai_addrlen) != 0 || listen(fd, 1) != 0) {
    const int code = errno;
    const std::string text = absl::StrCat(flag, " = ", ToText(address), ": ", std::strerror(code));
    status = code == EADDRINUSE ? absl::AlreadyExistsError(text) : absl::UnavailableError(text);
  }
  if (fd >= 0) close(fd);
  freeaddrinfo(found);
  return status;
}

}  // namespace sparsegdn::service
