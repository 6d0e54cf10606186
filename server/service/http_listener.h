// The one HTTP listener: /metrics, /livez, /readyz. Plain HTTP, also when gRPC runs under mTLS, so
// that kubelet probes and scrapers work without a certificate.
#ifndef SPARSEGDN_SERVER_SERVICE_HTTP_LISTENER_H_
#define SPARSEGDN_SERVER_SERVICE_HTTP_LISTENER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sparsegdn::service {

struct HttpHandlers {
  std::function<std::string()> metrics;  // text exposition format
  std::function<bool()> live;
  std::function<std::string()> not_ready;  // empty when ready, else why not
};

class HttpListener {
 public:
  // `address` is host:port, port 0 takes a free one. Handlers run on several threads at once.
  // ALREADY_EXISTS when the port is in use, INVALID_ARGUMENT for an address that is none.
  static absl::StatusOr<std::unique_ptr<HttpListener>> Start(const std::string& address,
                                                             HttpHandlers handlers);
  virtual ~HttpListener() = default;  // stops and joins
  virtual int port() const = 0;
};

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_HTTP_LISTENER_H_
