// Everything about a request that can be refused before it queues.
#ifndef SPARSEGDN_SERVER_ENGINE_REQUEST_VALIDATION_H_
#define SPARSEGDN_SERVER_ENGINE_REQUEST_VALIDATION_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/engine/plan.h"
#include "server/engine/snapshot_table.h"

namespace sparsegdn::engine {

inline constexpr int32_t kMinPriority = -8, kMaxPriority = 8;
inline constexpr size_t kMaxRequestIdBytes = 128;

struct ValidationContext {
  const model::ModelInfo& model;
  const model::RunnerLimits& runner;
  const Layout& layout;
  const EngineConfig& config;
  const EngineLimits& limits;  // as they are now
  SnapshotTable& snapshots;
  int64_t now_ns = 0;
};

// The plan of a request that can run, or why it cannot:
//   INVALID_ARGUMENT    a field, named
//   OUT_OF_RANGE        longer than the context or the configured limit
//   NOT_FOUND           resume_from
//   RESOURCE_EXHAUSTED  NEVER_FITS: KV, frames of one step, or the kept snapshot; no retry delay
//   DEADLINE_EXCEEDED   passed already
// Cheap checks come first; token ids are read once.
absl::StatusOr<RequestPlan> PlanRequest(PrefillRequest request, const ValidationContext& context);

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_REQUEST_VALIDATION_H_
