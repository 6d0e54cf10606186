// The engine behind engine.h. Three parts, each in a file: the front (engine_impl.cc: calls from
// any thread), the executor's rounds (executor.cc: reap, admit, step) and the end of a request
// (completion.cc).
//
// Threads: `queue_mutex_` guards what the front and the executor share; running requests belong to
// the executor alone. No callback runs and no model work is done under it.
#ifndef SPARSEGDN_SERVER_ENGINE_ENGINE_IMPL_H_
#define SPARSEGDN_SERVER_ENGINE_ENGINE_IMPL_H_

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "server/engine/engine.h"
#include "server/engine/event_stream.h"
#include "server/engine/layout.h"
#include "server/engine/prefix_cache.h"
#include "server/engine/request.h"
#include "server/engine/snapshot_checker.h"
#include "server/engine/snapshot_import.h"
#include "server/engine/snapshot_table.h"
#include "server/engine/tenant_ledger.h"

namespace sparsegdn::engine {

class EngineImpl final : public Engine {
 public:
  // kInline: no thread; a test calls RunOneRound.
  enum class Mode { kThread, kInline };

  static absl::StatusOr<std::unique_ptr<EngineImpl>> Create(
      const EngineConfig& config, std::unique_ptr<model::ModelRunner> runner,
      EngineObserver* observer, Clock* clock, Mode mode);
  ~EngineImpl() override;

  absl::StatusOr<std::shared_ptr<PrefillCall>> Submit(PrefillRequest request) override;
  absl::StatusOr<std::unique_ptr<SnapshotImport>> BeginImport(const Manifest& manifest,
                                                              uint32_t ttl_seconds,
                                                              std::string tenant) override;
  absl::Status ReleaseSnapshot(const std::string& id, const std::string& tenant) override;
  const model::ModelInfo& model_info() const override { return runner_->info(); }
  const EngineConfig& config() const override { return config_; }
  EngineGauges gauges() const override;
  absl::Status SetLimits(const EngineLimits& limits) override;
  bool healthy() const override;
  bool Drain(int64_t timeout_ns) override;

  // For tests: null without prefix reuse.
  PrefixCache* prefix_cache() { return prefix_cache_.get(); }
  SnapshotTable& snapshots() { return snapshots_; }

  // One scheduling round: reap, admit, at most one step. True when a step ran or a request ended.
  // Only in kInline mode, or from the executor.
  bool RunOneRound();

 private:
  EngineImpl(const EngineConfig& config, std::unique_ptr<model::ModelRunner> runner,
             EngineObserver* observer, Clock* clock, Mode mode);

  class Sink;
  using RequestPtr = std::unique_ptr<Request>;

  // Front and executor: ends what waits and was cancelled or has expired. True when there was any.
  bool ReapQueue(int64_t now);

  // Front.
  absl::Status CheckOpen() const;
  absl::Status CheckQueue(const Request& request) const;   // under queue_mutex_
  absl::Status CheckTenant(const Request& request) const;  // under queue_mutex_
  void CountQueued(const Request& request, int64_t sign);  // under queue_mutex_
  absl::Status Enqueue(RequestPtr& entry, PrefixPlan& prefix);
  int64_t RetryMs() const;
  EngineLimits limits() const;

  // Executor.
  void ExecutorLoop();
  bool Reap(const EngineLimits& limits);
  bool ReapRunning(int64_t now, const EngineLimits& limits);
  bool ReapStreaming(int64_t now, const EngineLimits& limits);
  bool Admit(const EngineLimits& limits);
  RequestPtr NextAdmission(const EngineLimits& limits);
  void Start(RequestPtr request);
  absl::Status CheckBase(const Request& request);
  absl::Status Prepare(Request& request);
  std::vector<size_t> Choose(const EngineLimits& limits);
  bool Step(const EngineLimits& limits);
  void AfterStep(const std::vector<size_t>& chosen, const std::vector<model::Chunk>& chunks,
                 const absl::Status& status, const model::StepStats& stats);
  void Account(Request& request, const model::Chunk& chunk, size_t index,
               const model::StepStats& stats, int64_t step_tokens);
  void FailDead();
  void PublishGauges();

  // Prefix reuse (prefix_flow.cc).
  bool SettlePrefix(Request& request);
  absl::Status LoadPrefix(Request& request);
  bool Replay(const EngineLimits& limits);
  void ReplayWindow(Request& request);
  void RecordChunk(Request& request, model::Chunk& chunk);
  void KeepRecorded(Request& request);

  // The end of a request.
  absl::Status StopReason(const Request& request, int64_t now) const;
  void Stop(Request& request, absl::Status status, EngineObserver::Stage stage);
  void Fail(Request& request, absl::Status status);
  void Finish(Request& request);
  Result MakeResult(const Request& request, uint64_t digest) const;
  void ReleaseSlot(Request& request);
  void Close(Request& request, absl::Status status);

  const EngineConfig config_;
  const std::unique_ptr<model::ModelRunner> runner_;
  EngineObserver* const observer_;
  Clock* const clock_;
  const Layout layout_;
  SnapshotTable snapshots_;
  ImportRegistry imports_;
  const std::shared_ptr<StreamShared> shared_;
  const std::unique_ptr<PrefixCache> prefix_cache_;  // null: no reuse
  SnapshotChecker checker_;

  mutable std::mutex queue_mutex_;
  EngineLimits limits_;
  std::vector<RequestPtr> waiting_;
  int64_t waiting_tokens_ = 0, waiting_bytes_ = 0;
  TenantLedger tenants_;  // of waiting and running requests
  uint64_t next_sequence_ = 0;

  // Executor only.
  struct Streaming {  // computed, not read to the end
    std::shared_ptr<EventStream> stream;
    int64_t since_ns;
    int64_t computed_tokens;
  };
  std::vector<RequestPtr> running_;
  std::vector<Streaming> streaming_;
  int64_t step_ = 0;
  bool started_first_ = false;  // NewOnesTookTheStep of the last step

  std::atomic<int64_t> active_{0};  // waiting and running
  std::atomic<bool> draining_{false};
  std::atomic<bool> cancel_all_{false};
  std::atomic<bool> dead_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> step_started_ns_{-1};
  std::atomic<double> tokens_per_second_{0};
  std::atomic<int64_t> running_count_{0}, free_slots_{0}, free_kv_tokens_{0};
  std::thread executor_;
};

// INVALID_ARGUMENT names the first field of the config that is out of range for this runner.
absl::Status ValidateConfig(const EngineConfig& config, const model::ModelRunner& runner);
absl::Status ValidateLimits(const EngineLimits& limits);

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_ENGINE_IMPL_H_
