// A server's counters, read from its /metrics page.
#ifndef SPARSEGDN_CLIENT_CLI_METRICS_SCRAPE_H_
#define SPARSEGDN_CLIENT_CLI_METRICS_SCRAPE_H_

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"

namespace sparsegdn::cli {

// Value by series as written: "name" or "name{label=\"value\",...}".
using Metrics = std::map<std::string, double>;

// Prometheus' text format. INVALID_ARGUMENT names the line that is not of it.
absl::StatusOr<Metrics> ParseMetrics(const std::string& text);

// A usage error unless `url` is http://host[:port]/path; UNAVAILABLE without an answer of 200.
absl::StatusOr<Metrics> FetchMetrics(const std::string& url);

// What the server did between two scrapes: steps and what they held, tokens prefilled and wasted.
// `step_tokens` is the most tokens of a step; 0: as the server exports it. A figure whose counter
// is absent, or fell (the server was started again), is null.
nlohmann::ordered_json ServerWork(const Metrics& before, const Metrics& after, double step_tokens);

}  // namespace sparsegdn::cli

#endif  // SPARSEGDN_CLIENT_CLI_METRICS_SCRAPE_H_
