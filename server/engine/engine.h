// The engine: admission, scheduling, chunked prefill, snapshots. Knows no gRPC and no metrics
// library; the service adapts it (docs/architecture.md, "The life of one request").
#ifndef SPARSEGDN_SERVER_ENGINE_ENGINE_H_
#define SPARSEGDN_SERVER_ENGINE_ENGINE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/types.h"
#include "server/model/model_runner.h"

namespace sparsegdn::engine {

// Steady time, injectable.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual int64_t NowNs() const = 0;
  static Clock* Real();
};

// Limits that may change at run time (SIGHUP); everything else is fixed at start.
struct EngineLimits {
  uint32_t max_queue_requests = 256;
  int64_t max_queue_tokens = 4 << 20;
  int64_t max_queue_bytes = 256 << 20;             // host memory of queued requests
  int64_t max_prompt_tokens = 0;                   // 0: the model's context limit
  int64_t max_tenant_requests = 0;                 // of one tenant, waiting and running; 0: any
  int64_t max_tenant_tokens = 0;                   // their tokens; 0: any
  int64_t max_tenant_kept_bytes = 0;               // kept and imported, and in the making; 0: any
  int64_t max_buffered_bytes_per_call = 64 << 20;  // unread frames before a call is paused
  int64_t max_buffered_bytes = int64_t{1} << 30;   // over all calls, unread frames
  double slow_reader_timeout_seconds = 30.0;       // a paused call whose reader takes nothing fails
  uint32_t default_ttl_seconds = 300;
  uint32_t max_ttl_seconds = 3600;
};

class PrefixStore;  // prefix_store.h

struct EngineConfig {
  Budget default_budget;      // retention 0.29, AUTO, SELF when nothing is configured
  int64_t chunk_windows = 1;  // a request is cut at absolute multiples of this many windows
  int64_t kept_snapshot_bytes = int64_t{1} << 30;
  int64_t prefix_cache_bytes = 0;  // of states and KV at window boundaries, for reuse; 0: none
  std::shared_ptr<PrefixStore> prefix_remote;  // behind the one in memory; null: none
  double prefix_fetch_seconds = 2.0;           // longest that a request waits for it
  int64_t frame_bytes = 1 << 20;               // of a TensorChunk, <= 3 MiB
  double stuck_step_seconds = 600.0;  // a step running longer makes healthy() false; 0: never
  EngineLimits limits;
};

// Measurements, called from engine threads and, for what leaves the queue unserved, from threads
// that submit; must be cheap and must not call back.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  enum class Stage { kQueued, kComputing, kStreaming };
  // From arrival until the first step begins (with nothing to run: until the frames leave).
  virtual void OnQueueWait(double /*seconds*/) {}
  virtual void OnStep(int64_t /*tokens*/, int64_t /*requests*/, const model::StepStats& /*stats*/) {
  }
  virtual void OnComputed(double /*prefill_seconds*/, const Result& /*result*/) {}
  virtual void OnFirstFrame(double /*seconds*/) {}
  virtual void OnSnapshotReady(double /*seconds*/) {}
  virtual void OnCancelled(Stage /*stage*/, int64_t /*wasted_tokens*/) {}
  virtual void OnExpiredInQueue() {}
  virtual void OnNonFinite() {}
  virtual void OnCorruptSnapshot() {}  // a kept one, found when a request resumed from it
  virtual void OnSnapshotBytes(ExportDType /*dtype*/, int64_t /*bytes*/) {}
  virtual void OnSlowReader(int64_t /*bytes*/) {}
};

// Of prefix reuse: counters since start, but for what says otherwise.
struct PrefixCacheStats {
  int64_t memory_hits = 0, remote_hits = 0, misses = 0;  // requests that could have reused a prefix
  int64_t tokens_saved = 0;
  int64_t bytes = 0, entries = 0;  // in memory now
  int64_t evictions = 0, corrupt = 0, not_stored = 0;
  int64_t remote_read_bytes = 0, remote_written_bytes = 0;
  int64_t remote_read_errors = 0, remote_write_errors = 0;
  bool remote_available = false;  // now; false without one
};

// Gauges, read at scrape time.
struct EngineGauges {
  int64_t queue_requests = 0, queue_tokens = 0, running_requests = 0;
  int64_t free_slots = 0, free_kv_tokens = 0;
  int64_t kept_snapshots = 0, kept_snapshot_bytes = 0, buffered_bytes = 0;
  int64_t queue_bytes = 0;
  PrefixCacheStats prefix;
};

// One call's stream of events, from Submit until its end. Thread-safe.
class PrefillCall {
 public:
  virtual ~PrefillCall() = default;
  // The next event, or nothing now. Never blocks.
  virtual std::optional<Event> TryPop() = 0;
  // After the last event was popped: the final status (OK only after a Result). Absent before.
  virtual std::optional<absl::Status> status() const = 0;
  // `ready` runs on an engine thread, at once, or (when the call leaves the queue unserved) on one
  // that submits another call, whenever TryPop or status may have news. It must not block and may
  // call TryPop.
  virtual void SetReadyCallback(std::function<void()> ready) = 0;
  // CANCELLED at the next step boundary; idempotent. DEADLINE_EXCEEDED when `deadline` is true.
  virtual void Cancel(bool deadline) = 0;
};

// An upload in progress; dropping it discards it. Not thread-safe.
class SnapshotImport {
 public:
  virtual ~SnapshotImport() = default;
  virtual absl::Status Add(uint32_t tensor, uint64_t byte_offset, std::string_view data,
                           uint64_t xxh3_64) = 0;
  virtual absl::StatusOr<SnapshotRef> Finish(uint64_t digest) = 0;
  // Before Finish: the snapshot is pinned, or Finish fails.
  virtual void Pin() {}
};

// Thread-safe. Owns the executor thread that steps the runner.
class Engine {
 public:
  // INVALID_ARGUMENT names a config field out of range. `observer` and `clock` outlive the engine.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineConfig& config,
                                                        std::unique_ptr<model::ModelRunner> runner,
                                                        EngineObserver* observer, Clock* clock);
  virtual ~Engine() = default;

  // Validates and queues. Every refusal of SERVING section 3 is an absl::Status whose payloads
  // (status_payload.h) name the field, the reason and the retry delay.
  virtual absl::StatusOr<std::shared_ptr<PrefillCall>> Submit(PrefillRequest request) = 0;

  virtual absl::StatusOr<std::unique_ptr<SnapshotImport>> BeginImport(const Manifest& manifest,
                                                                      uint32_t ttl_seconds,
                                                                      std::string tenant) = 0;
  virtual absl::Status ReleaseSnapshot(const std::string& id, const std::string& tenant) = 0;

  virtual const model::ModelInfo& model_info() const = 0;
  virtual const EngineConfig& config() const = 0;
  virtual EngineGauges gauges() const = 0;
  // INVALID_ARGUMENT names the limit that is out of range; then the old ones stay, all of them.
  virtual absl::Status SetLimits(const EngineLimits& limits) = 0;
  // False after a fatal device error or a stuck executor: liveness fails.
  virtual bool healthy() const = 0;

  // Refuses new calls (UNAVAILABLE), lets queued and running ones finish until the deadline, then
  // cancels the rest. Returns true when nothing had to be cancelled. Does not wait for readers.
  virtual bool Drain(int64_t timeout_ns) = 0;
};

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_ENGINE_H_
