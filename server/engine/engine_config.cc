#include "absl/strings/str_cat.h"
#include "server/engine/engine_impl.h"
#include "server/engine/errors.h"
#include "sparsegdn/gdn.h"

namespace sparsegdn::engine {
namespace {

constexpr int64_t kMinFrameBytes = 64;
constexpr int64_t kMaxFrameBytes = 3 << 20;  // below gRPC's default 4 MiB message

absl::Status AtLeast(const char* field, int64_t got, int64_t least) {
  if (got >= least) return absl::OkStatus();
  return Invalid(field, absl::StrCat("got ", got, ", wanted at least ", least));
}

}  // namespace

absl::Status ValidateLimits(const EngineLimits& limits) {
  absl::Status status;
  status.Update(AtLeast("limits.max_queue_requests", limits.max_queue_requests, 1));
  status.Update(AtLeast("limits.max_queue_tokens", limits.max_queue_tokens, 1));
  status.Update(AtLeast("limits.max_queue_bytes", limits.max_queue_bytes, 1));
  status.Update(AtLeast("limits.max_prompt_tokens", limits.max_prompt_tokens, 0));
  status.Update(AtLeast("limits.max_tenant_requests", limits.max_tenant_requests, 0));
  status.Update(AtLeast("limits.max_tenant_tokens", limits.max_tenant_tokens, 0));
  status.Update(AtLeast("limits.max_tenant_kept_bytes", limits.max_tenant_kept_bytes, 0));
  status.Update(
      AtLeast("limits.max_buffered_bytes_per_call", limits.max_buffered_bytes_per_call, 1));
  status.Update(AtLeast("limits.max_buffered_bytes", limits.max_buffered_bytes, 1));
  if (!(limits.slow_reader_timeout_seconds > 0 && limits.slow_reader_timeout_seconds <= 86400)) {
    status.Update(Invalid("limits.slow_reader_timeout_seconds",
                          absl::StrCat("got ", limits.slow_reader_timeout_seconds,
                                       ", wanted more than 0 and at most 86400")));
  }
  status.Update(AtLeast("limits.default_ttl_seconds", limits.default_ttl_seconds, 1));
  status.Update(
      AtLeast("limits.max_ttl_seconds", limits.max_ttl_seconds, limits.default_ttl_seconds));
  return status;
}

absl::Status ValidateConfig(const EngineConfig& config, const model::ModelRunner& runner) {
  if (absl::Status s = ValidateBudget(config.default_budget); !s.ok()) {
    return Invalid("default_budget", std::string(s.message()));
  }
  const model::RunnerLimits& limits = runner.limits();
  absl::Status status = AtLeast("chunk_windows", config.chunk_windows, 1);
  const int64_t most = limits.max_batch_tokens / kWindow;
  if (status.ok() && config.chunk_windows > most) {
    status = Invalid("chunk_windows",
                     absl::StrCat("got ", config.chunk_windows, ", wanted at most ", most,
                                  " for a step of ", limits.max_batch_tokens, " tokens"));
  }
  status.Update(AtLeast("kept_snapshot_bytes", config.kept_snapshot_bytes, 0));
  status.Update(AtLeast("prefix_cache_bytes", config.prefix_cache_bytes, 0));
  if (!(config.prefix_fetch_seconds >= 0 && config.prefix_fetch_seconds <= 600)) {
    status.Update(Invalid("prefix_fetch_seconds", "wanted 0 to 600"));
  }
  if (config.frame_bytes < kMinFrameBytes || config.frame_bytes > kMaxFrameBytes) {
    status.Update(Invalid("frame_bytes", absl::StrCat("got ", config.frame_bytes, ", wanted ",
                                                      kMinFrameBytes, " to ", kMaxFrameBytes)));
  }
  if (!(config.stuck_step_seconds >= 0)) {
    status.Update(Invalid("stuck_step_seconds", "wanted 0 or more"));
  }
  status.Update(AtLeast("runner.state_slots", limits.state_slots, 1));
  status.Update(AtLeast("runner.max_batch_seqs", limits.max_batch_seqs, 1));
  const DType compute = runner.info().compute_dtype;
  if (compute != DType::kF32 && compute != DType::kBF16) {
    status.Update(Invalid("runner.compute_dtype", "wanted FP32 or BF16"));
  }
  status.Update(ValidateLimits(config.limits));
  return status;
}

}  // namespace sparsegdn::engine
