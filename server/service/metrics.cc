#include "server/service/metrics.h"

#include <grpcpp/support/status.h>
#include <prometheus/text_serializer.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "server/service/metric_names.h"
#include "server/service/status.h"

namespace sparsegdn::service {
namespace {

constexpr const char* kMethodNames[] = {"Prefill", "ImportSnapshot", "ReleaseSnapshot",
                                        "GetModelInfo"};
constexpr const char* kTierNames[] = {"dense", "high", "mid", "low"};
constexpr const char* kStageNames[] = {"queued", "computing", "streaming"};
constexpr const char* kDTypeNames[] = {"fp32", "bf16", "fp8_e4m3", "int32"};
constexpr const char* kMemoryKindNames[] = {"weights", "states", "kv", "workspace", "activations"};
constexpr const char* kBandNames[] = {"lt_1k", "1k_8k", "8k_32k", "32k_128k", "ge_128k"};
constexpr int64_t kBandEnds[] = {1024, 8192, 32768, 131072};

// A name that the table lacks is a bug of ours, seen by every test that creates a Metrics.
const MetricDef& Def(const char* name) {
  for (const MetricDef& def : metric::kAll) {
    if (std::strcmp(def.name + std::strlen("sparsegdn_"), name) == 0) return def;
  }
  std::abort();
}

template <typename Builder>
auto& MakeFamily(Builder builder, const char* name, prometheus::Registry& registry) {
  const MetricDef& def = Def(name);
  return builder.Name(def.name).Help(def.help).Register(registry);
}
auto& CounterFamily(const char* name, prometheus::Registry& registry) {
  return MakeFamily(prometheus::BuildCounter(), name, registry);
}
auto& GaugeFamily(const char* name, prometheus::Registry& registry) {
  return MakeFamily(prometheus::BuildGauge(), name, registry);
}
auto& HistogramFamily(const char* name, prometheus::Registry& registry) {
  return MakeFamily(prometheus::BuildHistogram(), name, registry);
}

using Buckets = prometheus::Histogram::BucketBoundaries;
// 1 ms to 600 s.
const Buckets kSeconds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
                          1,     2.5,    5,     10,   30,    60,   120, 300,  600};
// Parts of a step: from 100 us.
const Buckets kStepSeconds = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025,
                              0.05,   0.1,     0.25,   0.5,   1,      2.5,   5,    10};
const Buckets kTokens = {1, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072};
const Buckets kRequests = {1, 2, 4, 8, 16, 32, 64, 128};
const Buckets kShares = {0.02, 0.05, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.75, 1};

int BandOf(int64_t tokens) {
  int band = 0;
  while (band < 4 && tokens >= kBandEnds[band]) ++band;
  return band;
}

}  // namespace

BudgetTier TierOf(const engine::Result& result) {
  const Budget& budget = result.effective_budget;
  if (budget.mode == BudgetMode::kDense) return BudgetTier::kDense;
  double share = budget.retention;
  if (budget.mode == BudgetMode::kCoverage) {
    const engine::Usage& usage = result.usage;
    share = usage.events_total > 0 ? static_cast<double>(usage.events_selected) /
                                         static_cast<double>(usage.events_total)
                                   : 1.0;
  }
  return share >= 0.5 ? BudgetTier::kHigh : (share >= 0.2 ? BudgetTier::kMid : BudgetTier::kLow);
}

Metrics::Metrics(const std::string& version, const std::string& commit) {
  CreateCounters();
  CreateGauges();
  CreateHistograms();
  GaugeFamily("build_info", registry_).Add({{"version", version}, {"commit", commit}}).Set(1);
}

void Metrics::CreateCounters() {
  auto& requests = CounterFamily("requests_total", registry_);
  for (int m = 0; m < kMethods; ++m) {
    for (int c = 0; c < kCodes; ++c) {
      const char* code = CodeName(static_cast<grpc::StatusCode>(c));
      requests_[m][c] = &requests.Add({{"method", kMethodNames[m]}, {"code", code}});
    }
  }
  auto& cancelled = CounterFamily("cancelled_total", registry_);
  for (int s = 0; s < 3; ++s) cancelled_[s] = &cancelled.Add({{"stage", kStageNames[s]}});
  auto& bytes = CounterFamily("snapshot_bytes_total", registry_);
  for (int d = 0; d < 4; ++d) snapshot_bytes_[d] = &bytes.Add({{"dtype", kDTypeNames[d]}});
  auto& shared = CounterFamily("shared_memory_calls_total", registry_);
  shared_memory_calls_ = {&shared.Add({{"outcome", "refused"}}),
                          &shared.Add({{"outcome", "given"}})};
  slow_readers_ = &CounterFamily("slow_readers_total", registry_).Add({});
  prompt_tokens_ = &CounterFamily("prompt_tokens_total", registry_).Add({});
  cached_tokens_ = &CounterFamily("cached_tokens_total", registry_).Add({});
  wasted_tokens_ = &CounterFamily("wasted_tokens_total", registry_).Add({});
  expired_ = &CounterFamily("expired_in_queue_total", registry_).Add({});
  events_ = &CounterFamily("events_total", registry_).Add({});
  events_selected_ = &CounterFamily("events_selected_total", registry_).Add({});
  nonfinite_ = &CounterFamily("nonfinite_states_total", registry_).Add({});
  corrupt_snapshots_ = &CounterFamily("kept_snapshots_corrupt_total", registry_).Add({});
}

void Metrics::CreateGauges() {
  queue_requests_ = &GaugeFamily("queue_requests", registry_).Add({});
  queue_tokens_ = &GaugeFamily("queue_tokens", registry_).Add({});
  queue_bytes_ = &GaugeFamily("queue_bytes", registry_).Add({});
  running_ = &GaugeFamily("running_requests", registry_).Add({});
  slots_free_ = &GaugeFamily("state_slots_free", registry_).Add({});
  kv_free_ = &GaugeFamily("kv_tokens_free", registry_).Add({});
  kept_ = &GaugeFamily("kept_snapshots", registry_).Add({});
  kept_bytes_ = &GaugeFamily("kept_snapshot_bytes", registry_).Add({});
  buffered_ = &GaugeFamily("slow_reader_bytes", registry_).Add({});
  overhead_ = &GaugeFamily("selection_overhead_ratio", registry_).Add({});
  max_batch_tokens_ = &GaugeFamily("max_batch_tokens", registry_).Add({});
  ready_ = &GaugeFamily("ready", registry_).Add({});
  shared_memory_bytes_ = &GaugeFamily("shared_memory_bytes", registry_).Add({});
  auto& memory = GaugeFamily("device_memory_bytes", registry_);
  for (int k = 0; k < kMemoryKinds; ++k) {
    device_memory_[k] = &memory.Add({{"kind", kMemoryKindNames[k]}});
  }
  model_info_ = &GaugeFamily("model_info", registry_);
  model_info_child_ = &model_info_->Add({{"name", ""}, {"identity", ""}, {"backend", ""}});
}

void Metrics::CreateHistograms() {
  const auto single = [&](const char* name, const Buckets& buckets) {
    return &HistogramFamily(name, registry_).Add({}, buckets);
  };
  queue_wait_ = single("queue_wait_seconds", kSeconds);
  first_frame_ = single("time_to_first_frame_seconds", kSeconds);
  to_snapshot_ = single("time_to_snapshot_seconds", kSeconds);
  stream_ = single("snapshot_stream_seconds", kSeconds);
  batch_tokens_ = single("batch_tokens", kTokens);
  batch_requests_ = single("batch_requests", kRequests);
  selection_ = single("selection_seconds", kStepSeconds);
  gdn_core_ = single("gdn_core_seconds", kStepSeconds);
  auto& prefill = HistogramFamily("prefill_seconds", registry_);
  auto& retention = HistogramFamily("retention_ratio", registry_);
  for (int t = 0; t < kTiers; ++t) {
    retention_[t] = &retention.Add({{"budget_tier", kTierNames[t]}}, kShares);
    for (int b = 0; b < kBands; ++b) {
      prefill_[t][b] =
          &prefill.Add({{"budget_tier", kTierNames[t]}, {"prompt_band", kBandNames[b]}}, kSeconds);
    }
  }
}

void Metrics::OnRequest(Method method, int grpc_code) {
  const int code = grpc_code >= 0 && grpc_code < kCodes ? grpc_code : 2;
  requests_[static_cast<int>(method)][code]->Increment();
}
void Metrics::OnStreamed(double seconds) { stream_->Observe(seconds); }
void Metrics::OnSharedMemory(bool given) { shared_memory_calls_[given ? 1 : 0]->Increment(); }
void Metrics::SetSharedMemoryBytes(uint64_t bytes) {
  shared_memory_bytes_->Set(static_cast<double>(bytes));
}
void Metrics::SetMaxBatchTokens(int64_t tokens) {
  max_batch_tokens_->Set(static_cast<double>(tokens));
}
void Metrics::SetReady(bool ready) { ready_->Set(ready ? 1 : 0); }

void Metrics::SetModel(const model::ModelInfo& info) {
  model_info_->Remove(model_info_child_);
  model_info_child_ = &model_info_->Add(
      {{"name", info.name}, {"identity", info.identity}, {"backend", info.backend}});
  model_info_child_->Set(1);
  const model::DeviceMemory& memory = info.device_memory;
  const int64_t bytes[] = {memory.weights, memory.states, memory.kv, memory.workspace,
                           memory.activations};
  for (int k = 0; k < kMemoryKinds; ++k) device_memory_[k]->Set(static_cast<double>(bytes[k]));
}

std::string Metrics::Scrape(const engine::EngineGauges& gauges) {
  queue_requests_->Set(static_cast<double>(gauges.queue_requests));
  queue_tokens_->Set(static_cast<double>(gauges.queue_tokens));
  queue_bytes_->Set(static_cast<double>(gauges.queue_bytes));
  running_->Set(static_cast<double>(gauges.running_requests));
  slots_free_->Set(static_cast<double>(gauges.free_slots));
  kv_free_->Set(static_cast<double>(gauges.free_kv_tokens));
  kept_->Set(static_cast<double>(gauges.kept_snapshots));
  kept_bytes_->Set(static_cast<double>(gauges.kept_snapshot_bytes));
  buffered_->Set(static_cast<double>(gauges.buffered_bytes));
  prefix_.Set(gauges.prefix);
  return prometheus::TextSerializer().Serialize(registry_.Collect());
}

void Metrics::OnQueueWait(double seconds) { queue_wait_->Observe(seconds); }

void Metrics::OnStep(int64_t tokens, int64_t requests, const model::StepStats& stats) {
  batch_tokens_->Observe(static_cast<double>(tokens));
  batch_requests_->Observe(static_cast<double>(requests));
  selection_->Observe(static_cast<double>(stats.selection_ns) * 1e-9);
  gdn_core_->Observe(static_cast<double>(stats.gdn_core_ns) * 1e-9);
  const int64_t selection = selection_ns_ += stats.selection_ns;
  const int64_t core = core_ns_ += stats.gdn_core_ns;
  if (selection + core > 0) {
    overhead_->Set(static_cast<double>(selection) / static_cast<double>(selection + core));
  }
}

void Metrics::OnComputed(double prefill_seconds, const engine::Result& result) {
  const int tier = static_cast<int>(TierOf(result));
  const engine::Usage& usage = result.usage;
  prefill_[tier][BandOf(usage.prompt_tokens)]->Observe(prefill_seconds);
  prompt_tokens_->Increment(static_cast<double>(usage.prompt_tokens));
  cached_tokens_->Increment(static_cast<double>(usage.cached_tokens));
  events_->Increment(static_cast<double>(usage.events_total));
  events_selected_->Increment(static_cast<double>(usage.events_selected));
  if (usage.events_total > 0) {
    retention_[tier]->Observe(static_cast<double>(usage.events_selected) /
                              static_cast<double>(usage.events_total));
  }
}

void Metrics::OnFirstFrame(double seconds) { first_frame_->Observe(seconds); }
void Metrics::OnSnapshotReady(double seconds) { to_snapshot_->Observe(seconds); }

void Metrics::OnCancelled(Stage stage, int64_t wasted_tokens) {
  cancelled_[static_cast<int>(stage)]->Increment();
  if (wasted_tokens > 0) wasted_tokens_->Increment(static_cast<double>(wasted_tokens));
}

void Metrics::OnExpiredInQueue() { expired_->Increment(); }
void Metrics::OnNonFinite() { nonfinite_->Increment(); }

void Metrics::OnCorruptSnapshot() { corrupt_snapshots_->Increment(); }

void Metrics::OnSnapshotBytes(engine::ExportDType dtype, int64_t bytes) {
  snapshot_bytes_[static_cast<int>(dtype)]->Increment(static_cast<double>(bytes));
}

void Metrics::OnSlowReader(int64_t) { slow_readers_->Increment(); }

}  // namespace sparsegdn::service
