// What every call of the service needs, and what it reads from the call's metadata.
#ifndef SPARSEGDN_SERVER_SERVICE_CONTEXT_H_
#define SPARSEGDN_SERVER_SERVICE_CONTEXT_H_

#include <grpcpp/server_context.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/engine.h"

namespace sparsegdn::service {

class CallRegistry;
class Health;
class Metrics;
class WorkerPool;

// Borrowed; all of it outlives the gRPC server.
struct ServiceContext {
  Health* health = nullptr;
  Metrics* metrics = nullptr;
  CallRegistry* calls = nullptr;
  WorkerPool* workers = nullptr;
  engine::Clock* clock = nullptr;
};

// The W3C `traceparent` of the call, empty when absent or malformed (which the standard says to
// ignore).
std::string TraceparentOf(const grpc::CallbackServerContext& context);
bool IsTraceparent(const std::string& text);

// The call's deadline on the engine's clock; absent when it has none.
std::optional<int64_t> DeadlineOf(const grpc::CallbackServerContext& context,
                                  const engine::Clock& clock);

// `field` counts because authentication is off. The one place to change when it is on.
absl::StatusOr<std::string> TenantOf(const grpc::CallbackServerContext& context,
                                     const std::string& field);

// 16 hex digits for a request that brought no id.
std::string NewRequestId();

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_CONTEXT_H_
