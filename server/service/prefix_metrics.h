// The prefix_cache_* metrics: the engine counts, a scrape copies.
#ifndef SPARSEGDN_SERVER_SERVICE_PREFIX_METRICS_H_
#define SPARSEGDN_SERVER_SERVICE_PREFIX_METRICS_H_

#include <prometheus/registry.h>

#include <functional>
#include <mutex>
#include <vector>

#include "server/engine/engine.h"

namespace sparsegdn::service {

// Thread-safe. `registry` outlives it.
class PrefixMetrics {
 public:
  explicit PrefixMetrics(prometheus::Registry& registry);
  void Set(const engine::PrefixCacheStats& stats);

 private:
  std::mutex mutex_;  // of scrapes: counters grow by the difference to what they show
  std::vector<std::function<void(const engine::PrefixCacheStats&)>> copies_;
};

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_PREFIX_METRICS_H_
