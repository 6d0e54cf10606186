// Where the process stands: loading, serving, draining or failed. The one answer behind the gRPC
// health service, /livez, /readyz and the refusals of calls.
#ifndef SPARSEGDN_SERVER_SERVICE_HEALTH_H_
#define SPARSEGDN_SERVER_SERVICE_HEALTH_H_

#include <memory>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"
#include "server/engine/engine.h"

namespace grpc {
class HealthCheckServiceInterface;
}

namespace sparsegdn::service {

class Metrics;

// Thread-safe.
class Health {
 public:
  enum class Phase { kLoading, kServing, kDraining, kFailed };

  explicit Health(Metrics* metrics) : metrics_(metrics) {}

  // `grpc_health` belongs to the server and may be null; it is told at once and at every change.
  void Attach(grpc::HealthCheckServiceInterface* grpc_health);
  void Detach();

  // kLoading -> kServing; later phases win over earlier ones, so a drain that began while the model
  // loaded stays a drain.
  void SetServing(std::shared_ptr<engine::Engine> engine);
  void SetDraining();
  void SetFailed();

  Phase phase() const;
  bool live() const { return phase() != Phase::kFailed; }
  std::string NotReadyReason() const;  // empty when serving

  // The engine for a new call: UNAVAILABLE with RetryInfo while loading or draining.
  absl::StatusOr<std::shared_ptr<engine::Engine>> ForNewCall() const;
  // The engine whatever the phase; null while loading.
  std::shared_ptr<engine::Engine> engine() const;

 private:
  void PublishLocked();

  Metrics* const metrics_;
  mutable std::mutex mutex_;
  Phase phase_ = Phase::kLoading;
  std::shared_ptr<engine::Engine> engine_;
  grpc::HealthCheckServiceInterface* grpc_health_ = nullptr;
};

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_HEALTH_H_
