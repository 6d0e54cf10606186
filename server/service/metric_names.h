// Every metric the server exports, in one table: metrics.cc creates all of them at start,
// docs/operations.md lists them, and dashboards and alert rules may name no other.
#ifndef SPARSEGDN_SERVER_SERVICE_METRIC_NAMES_H_
#define SPARSEGDN_SERVER_SERVICE_METRIC_NAMES_H_

namespace sparsegdn::service {

enum class MetricType { kCounter, kGauge, kHistogram };

struct MetricDef {
  const char* name;
  MetricType type;
  const char* labels;  // comma separated
  const char* help;
};

namespace metric {

inline constexpr MetricDef kAll[] = {
    {"sparsegdn_requests_total", MetricType::kCounter, "method,code", "Calls ended, by code."},
    {"sparsegdn_queue_requests", MetricType::kGauge, "", "Requests waiting."},
    {"sparsegdn_queue_tokens", MetricType::kGauge, "", "Tokens waiting."},
    {"sparsegdn_queue_bytes", MetricType::kGauge, "", "Host memory of the requests waiting."},
    {"sparsegdn_running_requests", MetricType::kGauge, "", "Requests that hold a state slot."},
    {"sparsegdn_state_slots_free", MetricType::kGauge, "", "Free state slots."},
    {"sparsegdn_kv_tokens_free", MetricType::kGauge, "", "Free attention KV capacity in tokens."},
    {"sparsegdn_kept_snapshots", MetricType::kGauge, "", "Kept and imported snapshots."},
    {"sparsegdn_kept_snapshot_bytes", MetricType::kGauge, "", "Their bytes."},
    {"sparsegdn_slow_reader_bytes", MetricType::kGauge, "",
     "Bytes computed that no client has read yet."},
    {"sparsegdn_slow_readers_total", MetricType::kCounter, "",
     "Calls paused or ended because their client read too slowly."},
    {"sparsegdn_queue_wait_seconds", MetricType::kHistogram, "",
     "Arrival until the first step begins; without one, until the frames leave."},
    {"sparsegdn_prefill_seconds", MetricType::kHistogram, "budget_tier,prompt_band",
     "Leaving the queue until the last step ends."},
    {"sparsegdn_time_to_first_frame_seconds", MetricType::kHistogram, "",
     "Arrival until the first tensor frame is ready."},
    {"sparsegdn_time_to_snapshot_seconds", MetricType::kHistogram, "",
     "Arrival until the result is ready for the client."},
    {"sparsegdn_snapshot_stream_seconds", MetricType::kHistogram, "",
     "First tensor frame written until the result is taken by the transport."},
    {"sparsegdn_batch_tokens", MetricType::kHistogram, "", "Tokens of a step."},
    {"sparsegdn_batch_requests", MetricType::kHistogram, "", "Requests of a step."},
    {"sparsegdn_max_batch_tokens", MetricType::kGauge, "", "Most tokens of a step."},
    {"sparsegdn_prompt_tokens_total", MetricType::kCounter, "",
     "Prompt tokens of finished requests, cached ones included."},
    {"sparsegdn_cached_tokens_total", MetricType::kCounter, "",
     "Prompt tokens taken from a snapshot."},
    {"sparsegdn_wasted_tokens_total", MetricType::kCounter, "",
     "Tokens computed for requests that were then cancelled."},
    {"sparsegdn_cancelled_total", MetricType::kCounter, "stage",
     "Requests cancelled while queued, computing or streaming."},
    {"sparsegdn_expired_in_queue_total", MetricType::kCounter, "",
     "Requests whose deadline passed before any work."},
    {"sparsegdn_selection_seconds", MetricType::kHistogram, "", "Selection time of a step."},
    {"sparsegdn_gdn_core_seconds", MetricType::kHistogram, "",
     "GDN core time of a step, selection excluded."},
    {"sparsegdn_selection_overhead_ratio", MetricType::kGauge, "",
     "Selection time over selection plus core time since start."},
    {"sparsegdn_events_total", MetricType::kCounter, "",
     "Recurrent updates a dense run would have made: tokens x head pairs x layers."},
    {"sparsegdn_events_selected_total", MetricType::kCounter, "", "Recurrent updates made."},
    {"sparsegdn_retention_ratio", MetricType::kHistogram, "budget_tier",
     "Share of updates made, per request."},
    {"sparsegdn_snapshot_bytes_total", MetricType::kCounter, "dtype", "Bytes of tensors exported."},
    {"sparsegdn_prefix_cache_hits_total", MetricType::kCounter, "tier",
     "Requests that started from a stored prefix, by where the last of it came from."},
    {"sparsegdn_prefix_cache_misses_total", MetricType::kCounter, "",
     "Requests that could have reused a prefix and found none."},
    {"sparsegdn_prefix_cache_tokens_saved_total", MetricType::kCounter, "",
     "Prompt tokens that were not computed because their prefix was stored."},
    {"sparsegdn_prefix_cache_evictions_total", MetricType::kCounter, "",
     "Entries dropped from memory for room."},
    {"sparsegdn_prefix_cache_corrupt_total", MetricType::kCounter, "",
     "Entries that failed a check when loaded and were dropped."},
    {"sparsegdn_prefix_cache_not_stored_total", MetricType::kCounter, "",
     "Entries not kept: too large, no room, or the writer fell behind."},
    {"sparsegdn_prefix_cache_bytes", MetricType::kGauge, "", "Stored prefixes in memory."},
    {"sparsegdn_prefix_cache_entries", MetricType::kGauge, "", "Window boundaries in memory."},
    {"sparsegdn_prefix_cache_redis_bytes_total", MetricType::kCounter, "direction",
     "Compressed bytes read from and written to Redis."},
    {"sparsegdn_prefix_cache_redis_errors_total", MetricType::kCounter, "direction",
     "Reads and writes that Redis failed, refused or answered too late."},
    {"sparsegdn_prefix_cache_redis_up", MetricType::kGauge, "",
     "1 while Redis is used; 0 without one and while its circuit breaker is open."},
    {"sparsegdn_shared_memory_bytes", MetricType::kGauge, "",
     "Bytes of live shared-memory segments."},
    {"sparsegdn_shared_memory_calls_total", MetricType::kCounter, "outcome",
     "Calls that asked for shared memory: given, or refused and streamed."},
    {"sparsegdn_nonfinite_states_total", MetricType::kCounter, "",
     "Requests that failed with NaN or Inf in a state."},
    {"sparsegdn_kept_snapshots_corrupt_total", MetricType::kCounter, "",
     "Kept snapshots that failed a check when a request resumed from them and were dropped."},
    {"sparsegdn_ready", MetricType::kGauge, "", "1 while the model serves, else 0."},
    {"sparsegdn_build_info", MetricType::kGauge, "version,commit", "1."},
    {"sparsegdn_model_info", MetricType::kGauge, "name,identity,backend",
     "1 for the resident model; empty labels while it loads."},
    {"sparsegdn_device_memory_bytes", MetricType::kGauge, "kind",
     "Bytes reserved at load on the CUDA device, by use; 0 on the CPU."},
};

}  // namespace metric
}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_METRIC_NAMES_H_
