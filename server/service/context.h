// What every call of the service needs, and what it reads from the call's metadata.
#ifndef SPARSEGDN_SERVER_SERVICE_CONTEXT_H_
#define SPARSEGDN_SERVER_SERVICE_CONTEXT_H_

#include <grpcpp/server_context.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "server/engine/engine.h"

namespace sparsegdn::service {

class CallRegistry;
class Health;
class Metrics;
class SegmentPool;
class TokenFile;
class WorkerPool;

// Borrowed; all of it outlives the gRPC server.
struct ServiceContext {
  Health* health = nullptr;
  Metrics* metrics = nullptr;
  CallRegistry* calls = nullptr;
  WorkerPool* workers = nullptr;
  engine::Clock* clock = nullptr;
  SegmentPool* segments = nullptr;
  const TokenFile* tokens = nullptr;  // null: no token is asked for
};

// The W3C `traceparent` of the call, empty when absent or malformed (which the standard says to
// ignore).
std::string TraceparentOf(const grpc::CallbackServerContext& context);
bool IsTraceparent(const std::string& text);

// The call's deadline on the engine's clock; absent when it has none.
std::optional<int64_t> DeadlineOf(const grpc::CallbackServerContext& context,
                                  const engine::Clock& clock);

// Tells a call that ran out of time from one whose client left. A client whose deadline passes
// resets the stream, and that may come before our own timer: the deadline on the wire is rounded
// up, by up to 1 %, and counts from arrival. So a cancel near the deadline is one by the deadline.
class CallDeadline {
 public:
  // At the call's arrival.
  CallDeadline(const grpc::CallbackServerContext& context, const engine::Clock& clock)
      : clock_(&clock), arrival_ns_(clock.NowNs()), deadline_ns_(DeadlineOf(context, clock)) {}
  const std::optional<int64_t>& ns() const { return deadline_ns_; }
  bool Passed() const;

 private:
  const engine::Clock* clock_;
  int64_t arrival_ns_;
  std::optional<int64_t> deadline_ns_;
};

// Why a call whose context is cancelled ends: DEADLINE_EXCEEDED or CANCELLED.
absl::Status CancelStatus(bool deadline_passed);

// 16 hex digits for a request that brought no id.
std::string NewRequestId();

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_CONTEXT_H_
