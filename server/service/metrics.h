// Prometheus metrics (metric_names.h). Every child exists from the start, because a family without
// children is not exported; handles are cached, because a family look-up costs as much as thirty
// increments. No label ever holds a request id, a tenant or a raw number.
#ifndef SPARSEGDN_SERVER_SERVICE_METRICS_H_
#define SPARSEGDN_SERVER_SERVICE_METRICS_H_

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "server/engine/engine.h"
#include "server/service/prefix_metrics.h"

namespace sparsegdn::service {

enum class Method { kPrefill, kImportSnapshot, kReleaseSnapshot, kGetModelInfo };

// dense: every update. Otherwise by the share the budget asks for (retention) or got (coverage):
// high from 0.5, mid from 0.2, low below.
enum class BudgetTier { kDense, kHigh, kMid, kLow };
BudgetTier TierOf(const engine::Result& result);

// Thread-safe.
class Metrics final : public engine::EngineObserver {
 public:
  Metrics(const std::string& version, const std::string& commit);

  void OnRequest(Method method, int grpc_code);
  void OnStreamed(double seconds);
  // A call that asked for shared memory got it, or streams.
  void OnSharedMemory(bool given);
  void SetSharedMemoryBytes(uint64_t bytes);
  void SetMaxBatchTokens(int64_t tokens);
  void SetReady(bool ready);
  void SetModel(const model::ModelInfo& info);
  // The text exposition format; gauges are taken from `gauges` first.
  std::string Scrape(const engine::EngineGauges& gauges);

  void OnQueueWait(double seconds) override;
  void OnStep(int64_t tokens, int64_t requests, const model::StepStats& stats) override;
  void OnComputed(double prefill_seconds, const engine::Result& result) override;
  void OnFirstFrame(double seconds) override;
  void OnSnapshotReady(double seconds) override;
  void OnCancelled(Stage stage, int64_t wasted_tokens) override;
  void OnExpiredInQueue() override;
  void OnNonFinite() override;
  void OnCorruptSnapshot() override;
  void OnSnapshotBytes(engine::ExportDType dtype, int64_t bytes) override;
  void OnSlowReader(int64_t bytes) override;

 private:
  using Counter = prometheus::Counter;
  using Gauge = prometheus::Gauge;
  using Histogram = prometheus::Histogram;
  static constexpr int kMethods = 4;
  static constexpr int kCodes = 17;
  static constexpr int kTiers = 4;
  static constexpr int kBands = 5;

  void CreateCounters();
  void CreateGauges();
  void CreateHistograms();

  prometheus::Registry registry_;
  PrefixMetrics prefix_{registry_};
  std::array<std::array<Counter*, kCodes>, kMethods> requests_;
  std::array<Counter*, 3> cancelled_;
  std::array<Counter*, 4> snapshot_bytes_;
  std::array<Counter*, 2> shared_memory_calls_;
  Counter *slow_readers_, *prompt_tokens_, *cached_tokens_, *wasted_tokens_, *expired_, *events_,
      *events_selected_, *nonfinite_, *corrupt_snapshots_;
  Gauge *queue_requests_, *queue_tokens_, *queue_bytes_, *running_, *slots_free_, *kv_free_, *kept_,
      *kept_bytes_, *buffered_, *overhead_, *ready_, *shared_memory_bytes_, *max_batch_tokens_;
  prometheus::Family<Gauge>* model_info_;
  Gauge* model_info_child_;
  static constexpr int kMemoryKinds = 5;
  Gauge* device_memory_[kMemoryKinds];
  Histogram *queue_wait_, *first_frame_, *to_snapshot_, *stream_, *batch_tokens_, *batch_requests_,
      *selection_, *gdn_core_;
  std::array<std::array<Histogram*, kBands>, kTiers> prefill_;
  std::array<Histogram*, kTiers> retention_;
  std::atomic<int64_t> selection_ns_{0}, core_ns_{0};
};

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_METRICS_H_
