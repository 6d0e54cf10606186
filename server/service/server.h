// The gRPC server with everything around it: early port, health, reflection, metrics, HTTP
// listener, drain. main.cc drives it; tests start it with a fake engine.
#ifndef SPARSEGDN_SERVER_SERVICE_SERVER_H_
#define SPARSEGDN_SERVER_SERVICE_SERVER_H_

#include <chrono>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/service/config.h"
#include "server/service/health.h"
#include "server/service/metrics.h"

namespace sparsegdn::service {

extern const char kServerVersion[];
extern const char kServerCommit[];

class Server {
 public:
  // Listens on both addresses and answers NOT_SERVING and UNAVAILABLE. Writes --port-file.
  // ALREADY_EXISTS or UNAVAILABLE when a listener cannot be had, INVALID_ARGUMENT for an address
  // or a certificate that is none.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerConfig& config);
  virtual ~Server() = default;  // Shutdown(0) if it was not shut down

  virtual int port() const = 0;       // of the first TCP listener; 0 without one
  virtual int http_port() const = 0;  // 0 without an HTTP listener
  virtual Metrics& metrics() = 0;     // the engine's observer
  virtual Health& health() = 0;

  // The model is loaded: SERVING, under the limits last set.
  virtual void Serve(std::shared_ptr<engine::Engine> engine) = 0;
  // INVALID_ARGUMENT, and nothing changes, for a prompt longer than the receive limit allows or
  // for limits that the engine refuses.
  virtual absl::Status SetLimits(const engine::EngineLimits& limits) = 0;

  // Reads the token file again. OK without one.
  virtual absl::Status ReloadTokens() = 0;

  // NOT_SERVING; new calls are refused; queued, running and streaming ones may finish until
  // `timeout` has passed. True when all of them did. A device fault meanwhile is left in health().
  virtual bool Drain(std::chrono::nanoseconds timeout) = 0;
  // Cancels what is left after `grace` and stops the listeners. Idempotent.
  virtual void Shutdown(std::chrono::nanoseconds grace) = 0;
};

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_SERVER_H_
