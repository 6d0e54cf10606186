#include "server/service/health.h"

#include <grpcpp/health_check_service_interface.h>

#include "server/engine/status_payload.h"
#include "server/service/metrics.h"

namespace sparsegdn::service {
namespace {

constexpr char kServiceName[] = "sparsegdn.v1.PrefillService";

absl::Status Refusal(const char* message, const char* reason, int64_t retry_after_ms) {
  return engine::WithDetails(absl::UnavailableError(message), {"", reason, retry_after_ms});
}

}  // namespace

void Health::Attach(grpc::HealthCheckServiceInterface* grpc_health) {
  std::lock_guard lock(mutex_);
  grpc_health_ = grpc_health;
  PublishLocked();
}

void Health::Detach() {
  std::lock_guard lock(mutex_);
  grpc_health_ = nullptr;
}

void Health::PublishLocked() {
  const bool serving = phase_ == Phase::kServing;
  metrics_->SetReady(serving);
  if (grpc_health_ == nullptr) return;
  grpc_health_->SetServingStatus("", serving);
  grpc_health_->SetServingStatus(kServiceName, serving);
}

void Health::SetServing(std::shared_ptr<engine::Engine> engine) {
  std::lock_guard lock(mutex_);
  engine_ = std::move(engine);
  if (phase_ == Phase::kLoading) phase_ = Phase::kServing;
  PublishLocked();
}

void Health::SetDraining() {
  std::lock_guard lock(mutex_);
  if (phase_ != Phase::kFailed) phase_ = Phase::kDraining;
  PublishLocked();
}

void Health::SetFailed() {
  std::lock_guard lock(mutex_);
  phase_ = Phase::kFailed;
  PublishLocked();
}

Health::Phase Health::phase() const {
  std::lock_guard lock(mutex_);
  return phase_;
}

std::string Health::NotReadyReason() const {
  switch (phase()) {
    case Phase::kLoading:
      return "loading";
    case Phase::kServing:
      return "";
    case Phase::kDraining:
      return "draining";
    case Phase::kFailed:
      return "device fault";
  }
  return "unknown";
}

absl::StatusOr<std::shared_ptr<engine::Engine>> Health::ForNewCall() const {
  std::lock_guard lock(mutex_);
  switch (phase_) {
    case Phase::kLoading:
      return Refusal("the model is still loading", "MODEL_LOADING", 1000);
    case Phase::kDraining:
      return Refusal("the server is draining; retry on another replica", "DRAINING", 1000);
    case Phase::kFailed:
      return Refusal("the device failed; the server is about to exit", "DEVICE_FAULT", 5000);
    case Phase::kServing:
      break;
  }
  return engine_;
}

std::shared_ptr<engine::Engine> Health::engine() const {
  std::lock_guard lock(mutex_);
  return engine_;
}

}  // namespace sparsegdn::service
