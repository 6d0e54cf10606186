#include "server/service/prefix_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "server/service/metric_names.h"

namespace sparsegdn::service {
namespace {

using engine::PrefixCacheStats;

// A name that the table lacks is a bug of ours, seen by every test that creates a Metrics.
const MetricDef& Def(const std::string& name) {
  for (const MetricDef& def : metric::kAll) {
    if (def.name == "sparsegdn_prefix_cache_" + name) return def;
  }
  std::abort();
}

struct CounterRow {
  const char* name;
  const char* label;  // empty: none
  const char* value;
  int64_t PrefixCacheStats::*field;
};
constexpr CounterRow kCounters[] = {
    {"hits_total", "tier", "memory", &PrefixCacheStats::memory_hits},
    {"hits_total", "tier", "redis", &PrefixCacheStats::remote_hits},
    {"misses_total", "", "", &PrefixCacheStats::misses},
    {"tokens_saved_total", "", "", &PrefixCacheStats::tokens_saved},
    {"evictions_total", "", "", &PrefixCacheStats::evictions},
    {"corrupt_total", "", "", &PrefixCacheStats::corrupt},
    {"not_stored_total", "", "", &PrefixCacheStats::not_stored},
    {"redis_bytes_total", "direction", "read", &PrefixCacheStats::remote_read_bytes},
    {"redis_bytes_total", "direction", "write", &PrefixCacheStats::remote_written_bytes},
    {"redis_errors_total", "direction", "read", &PrefixCacheStats::remote_read_errors},
    {"redis_errors_total", "direction", "write", &PrefixCacheStats::remote_write_errors},
};

}  // namespace

PrefixMetrics::PrefixMetrics(prometheus::Registry& registry) {
  for (const CounterRow& row : kCounters) {
    const MetricDef& def = Def(row.name);
    prometheus::Labels labels;
    if (row.label[0] != '\0') labels[row.label] = row.value;
    auto& counter =
        prometheus::BuildCounter().Name(def.name).Help(def.help).Register(registry).Add(labels);
    copies_.push_back([&counter, field = row.field](const PrefixCacheStats& stats) {
      const double more = static_cast<double>(stats.*field) - counter.Value();
      if (more > 0) counter.Increment(more);
    });
  }
  const auto gauge = [&](const char* name) -> prometheus::Gauge& {
    const MetricDef& def = Def(name);
    return prometheus::BuildGauge().Name(def.name).Help(def.help).Register(registry).Add({});
  };
  copies_.push_back([&bytes = gauge("bytes")](const PrefixCacheStats& stats) {
    bytes.Set(static_cast<double>(stats.bytes));
  });
  copies_.push_back([&entries = gauge("entries")](const PrefixCacheStats& stats) {
    entries.Set(static_cast<double>(stats.entries));
  });
  copies_.push_back([&up = gauge("redis_up")](const PrefixCacheStats& stats) {
    up.Set(stats.remote_available ? 1 : 0);
  });
}

void PrefixMetrics::Set(const PrefixCacheStats& stats) {
  std::lock_guard lock(mutex_);
  for (const auto& copy : copies_) copy(stats);
}

}  // namespace sparsegdn::service
