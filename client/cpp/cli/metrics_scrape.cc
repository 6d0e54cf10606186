#include "cli/metrics_scrape.h"

#include <httplib.h>

#include <optional>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cli/flags.h"

namespace sparsegdn::cli {
namespace {

using Json = nlohmann::ordered_json;

// Where the series of `line` ends: after its name, or after the brace that closes its labels.
size_t SeriesEnd(const std::string& line) {
  bool labels = false, quoted = false;
  for (size_t i = line.find_first_of("{ \t"); i < line.size(); ++i) {
    if (line[i] == '\\' && quoted) {
      ++i;
    } else if (line[i] == '"') {
      quoted = !quoted;
    } else if (line[i] == '{' && !quoted) {
      labels = true;
    } else if (line[i] == '}' && !quoted) {
      return i + 1;
    } else if ((line[i] == ' ' || line[i] == '\t') && !labels) {
      return i;
    }
  }
  return std::string::npos;
}

// After minus before; a series that is new began at zero.
std::optional<double> Difference(const Metrics& before, const Metrics& after,
                                 const std::string& series) {
  const auto now = after.find(series);
  if (now == after.end()) return std::nullopt;
  const auto then = before.find(series);
  const double difference = now->second - (then == before.end() ? 0 : then->second);
  return difference >= 0 ? std::optional<double>(difference) : std::nullopt;
}

Json Number(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }

std::optional<double> Ratio(const std::optional<double>& a, const std::optional<double>& b) {
  return a && b && *b > 0 ? std::optional<double>(*a / *b) : std::nullopt;
}

// Steps by upper bound, each step in one bucket (the page's buckets hold those below them too).
Json Buckets(const Metrics& before, const Metrics& after, const std::string& name) {
  const std::string head = name + "_bucket{le=\"";
  std::map<double, std::pair<std::string, double>> cumulative;
  for (auto it = after.lower_bound(head); it != after.end(); ++it) {
    if (it->first.compare(0, head.size(), head) != 0) break;
    const std::string bound =
        it->first.substr(head.size(), it->first.find('"', head.size()) - head.size());
    double value = 0;
    const std::optional<double> steps = Difference(before, after, it->first);
    if (absl::SimpleAtod(bound, &value) && steps) cumulative[value] = {bound, *steps};
  }
  Json out = Json::object();
  double below = 0;
  for (const auto& [value, entry] : cumulative) {
    out[entry.first] = entry.second - below;
    below = entry.second;
  }
  return out;
}

}  // namespace

absl::StatusOr<Metrics> ParseMetrics(const std::string& text) {
  Metrics metrics;
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(text, '\n'))) {
    if (line.empty() || line == "\r" || line[0] == '#') continue;
    const size_t end = SeriesEnd(line);
    std::vector<std::string> rest;
    if (end != std::string::npos && end > 0) {
      rest = absl::StrSplit(line.substr(end), absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    }
    double value = 0;
    if (rest.empty() || rest.size() > 2 || !absl::SimpleAtod(rest[0], &value)) {
      return absl::InvalidArgumentError(
          absl::StrCat("not a line of metrics: \"", line.substr(0, 80), "\""));
    }
    metrics[line.substr(0, end)] = value;
  }
  return metrics;
}

absl::StatusOr<Metrics> FetchMetrics(const std::string& url) {
  const std::string scheme = "http://";
  const size_t slash = url.find('/', scheme.size());
  if (url.compare(0, scheme.size(), scheme) != 0 || slash == scheme.size()) {
    return UsageError(absl::StrCat("--metrics: \"", url, "\", wanted http://HOST:PORT/metrics"));
  }
  httplib::Client http(url.substr(0, slash));
  http.set_connection_timeout(5);
  http.set_read_timeout(30);
  const auto answer = http.Get(slash == std::string::npos ? "/metrics" : url.substr(slash));
  if (!answer) {
    return absl::UnavailableError(
        absl::StrCat("no answer from ", url, ": ", httplib::to_string(answer.error())));
  }
  if (answer->status != 200) {
    return absl::UnavailableError(absl::StrCat(url, " answered ", answer->status));
  }
  return ParseMetrics(answer->body);
}

Json ServerWork(const Metrics& before, const Metrics& after, double step_tokens) {
  auto difference = [&](const std::string& name) {
    return Difference(before, after, "sparsegdn_" + name);
  };
  const std::optional<double> steps = difference("batch_tokens_count");
  const std::optional<double> tokens = Ratio(difference("batch_tokens_sum"), steps);
  const std::optional<double> wasted = difference("wasted_tokens_total");
  std::optional<double> most;
  if (const auto own = after.find("sparsegdn_max_batch_tokens"); step_tokens > 0) {
    most = step_tokens;
  } else if (own != after.end() && own->second > 0) {
    most = own->second;
  }
  return {{"steps", Number(steps)},
          {"tokens_per_step", Number(tokens)},
          {"requests_per_step",
           Number(Ratio(difference("batch_requests_sum"), difference("batch_requests_count")))},
          {"batch_fill", Number(Ratio(tokens, most))},
          {"step_tokens", Number(most)},
          {"computed_tokens", Number(difference("batch_tokens_sum"))},
          {"prompt_tokens", Number(difference("prompt_tokens_total"))},
          {"cached_tokens", Number(difference("cached_tokens_total"))},
          {"wasted_tokens", Number(wasted)},
          {"wasted_share", Number(Ratio(wasted, difference("batch_tokens_sum")))},
          {"steps_by_tokens", Buckets(before, after, "sparsegdn_batch_tokens")},
          {"steps_by_requests", Buckets(before, after, "sparsegdn_batch_requests")}};
}

}  // namespace sparsegdn::cli
