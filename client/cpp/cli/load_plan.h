// The open loop's plan: when which prompt arrives and what its caller does, all of it fixed by the
// seed before the first call.
#ifndef SPARSEGDN_CLIENT_CLI_LOAD_PLAN_H_
#define SPARSEGDN_CLIENT_CLI_LOAD_PLAN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace sparsegdn::cli {

struct MixEntry {
  int64_t value = 0;
  double weight = 1;  // positive; the weights of a mix need not sum to one
};
using Mix = std::vector<MixEntry>;

// "256:0.7,4096:0.3": values from `min` to `max`, each once. A value without a weight weighs 1.
// Usage errors name `flag`.
absl::StatusOr<Mix> ParseMix(const std::string& flag, const std::string& text, int64_t min,
                             int64_t max);

// Shares are of all arrivals, 0 to 1, drawn independently of each other.
struct LoadOptions {
  double rate = 0;     // arrivals per second
  double seconds = 0;  // of arrivals; calls may end later
  Mix lengths = {{1024, 1}};
  Mix priorities;  // empty: every call keeps the base request's
  double cancel_share = 0;
  double cancel_seconds = 1;  // a cancel comes at a uniformly random time up to this
  double deadline_share = 0;
  double deadline_seconds = 0;
  double slow_share = 0;
  double slow_bytes_per_second = 1 << 20;
  double objective_seconds = 0;  // bound on the time to the first frame; 0: none
  int64_t max_outstanding = 512;
  int64_t step_tokens = 0;  // the server's most tokens of a step; 0: not known
  int64_t warmup = 1;
  int64_t seed = 1;
};

struct Arrival {
  double at = 0;  // seconds after the start
  int64_t length = 0;
  std::optional<int64_t> priority;
  std::optional<double> cancel_after, deadline;  // seconds after `at`
  std::optional<double> bytes_per_second;        // bound of a slow reader
};

// Poisson: exponential gaps of mean 1 / rate. What a caller does is drawn apart from when it
// comes, so that another mix leaves the times as they are.
std::vector<Arrival> PlanArrivals(const LoadOptions& options);

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_LOAD_PLAN_H_
