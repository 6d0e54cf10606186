#include "cli/load_report.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/bench_common.h"
#include "cli/render.h"
#include "sparsegdn/client/status.h"

namespace sparsegdn::cli {
namespace {

using Calls = std::vector<const CallRecord*>;

Calls Where(const Calls& calls, const std::function<bool(const CallRecord&)>& keep) {
  Calls out;
  for (const CallRecord* call : calls) {
    if (keep(*call)) out.push_back(call);
  }
  return out;
}

bool Completed(const CallRecord& call) { return !call.dropped && call.status.ok(); }

// Null of no calls, so that nobody takes an absent figure for a good one.
Json Percentiles(const Calls& calls, double CallRecord::*field) {
  std::vector<double> values;
  for (const CallRecord* call : calls) values.push_back(call->*field);
  if (values.empty()) return nullptr;
  Json out;
  out["p50"] = Percentile(values, 0.5);
  out["p90"] = Percentile(values, 0.9);
  out["p99"] = Percentile(values, 0.99);
  out["max"] = *std::max_element(values.begin(), values.end());
  return out;
}

Json Group(const Calls& calls) {
  const Calls completed = Where(calls, Completed);
  const Calls quick = Where(completed, [](const CallRecord& c) { return !c.slow; });
  return {{"arrivals", calls.size()},
          {"completed", completed.size()},
          {"queue_seconds", Percentiles(completed, &CallRecord::queue)},
          {"first_frame_seconds", Percentiles(completed, &CallRecord::first_frame)},
          {"snapshot_seconds", Percentiles(quick, &CallRecord::snapshot)}};
}

// One group for each value of `field` that occurs, rising.
Json Groups(const Calls& calls, const char* name, int64_t CallRecord::*field) {
  std::map<int64_t, Calls> by_value;
  for (const CallRecord* call : calls) by_value[call->*field].push_back(call);
  Json out = Json::array();
  for (const auto& [value, members] : by_value) {
    Json group = {{name, value}};
    group.update(Group(members));
    out.push_back(group);
  }
  return out;
}

double Tokens(const Calls& calls) {
  double tokens = 0;
  for (const CallRecord* call : calls) tokens += static_cast<double>(call->length);
  return tokens;
}

Json MixJson(const Mix& mix) {
  Json out = Json::array();
  for (const MixEntry& entry : mix) {
    out.push_back({{"value", entry.value}, {"weight", entry.weight}});
  }
  return out;
}

Json OptionsJson(const LoadOptions& o) {
  return {{"rate", o.rate},
          {"seconds", o.seconds},
          {"seed", o.seed},
          {"mix", MixJson(o.lengths)},
          {"priority_mix", MixJson(o.priorities)},
          {"cancel_share", o.cancel_share},
          {"cancel_seconds", o.cancel_seconds},
          {"deadline_share", o.deadline_share},
          {"deadline_seconds", o.deadline_seconds},
          {"slow_share", o.slow_share},
          {"slow_bytes_per_second", o.slow_bytes_per_second},
          {"objective_seconds", o.objective_seconds > 0 ? Json(o.objective_seconds) : Json()},
          {"max_outstanding", o.max_outstanding}};
}

// Counts of sent calls by gRPC code, and of failed ones by the reason that the server gave.
std::pair<Json, Json> Codes(const Calls& sent) {
  std::map<std::string, int64_t> codes, reasons;
  for (const CallRecord* call : sent) {
    ++codes[absl::StatusCodeToString(call->status.code())];
    const std::string reason = client::DetailsOf(call->status).reason;
    if (!reason.empty()) ++reasons[reason];
  }
  return {Json(codes), Json(reasons)};
}

std::string PercentileRows(const Json& report, const char* title, const char* field) {
  auto row = [field](const std::string& label, const Json& group) {
    const Json& p = group[field];
    std::string out =
        absl::StrFormat("  %-18s %8s", label, Grouped(group["completed"].get<int64_t>()));
    for (const char* key : {"p50", "p90", "p99", "max"}) {
      out += p.is_null() ? absl::StrFormat(" %10s", "-")
                         : absl::StrFormat(" %10.4f", p[key].get<double>());
    }
    return out + "\n";
  };
  std::string out = absl::StrCat(title, "\n", row("all", report["all"]));
  if (report["lengths"].size() > 1) {
    for (const Json& group : report["lengths"]) {
      out += row(absl::StrCat(Grouped(group["length"].get<int64_t>()), " tokens"), group);
    }
  }
  if (report["priorities"].size() > 1) {
    for (const Json& group : report["priorities"]) {
      out += row(absl::StrCat("priority ", group["priority"].get<int64_t>()), group);
    }
  }
  return out;
}

std::string RateRow(const char* name, const Json& rate, const Json& tokens) {
  return absl::StrFormat("%-12s %9.2f /s %14s tokens/s", name, rate.get<double>(),
                         Grouped(static_cast<int64_t>(tokens.get<double>())));
}

std::string ServerRows(const Json& server) {
  auto number = [&server](const char* key, int decimals) {
    const Json& value = server[key];
    return value.is_null() ? "?" : absl::StrFormat("%.*f", decimals, value.get<double>());
  };
  std::string out =
      absl::StrCat("server       ", number("steps", 0), " steps of ", number("tokens_per_step", 1),
                   " tokens and ", number("requests_per_step", 2), " requests");
  if (!server["step_tokens"].is_null()) {
    absl::StrAppend(&out, ", fill ", number("batch_fill", 3), " of ", number("step_tokens", 0));
  }
  absl::StrAppend(&out, "\n             ", number("computed_tokens", 0), " tokens computed, ",
                  number("prompt_tokens", 0), " of finished prompts, ", number("cached_tokens", 0),
                  " cached, ", number("wasted_tokens", 0), " wasted\n");
  return out;
}

}  // namespace

Json LoadJson(const LoadOptions& options, const LoadResult& result) {
  Calls all;
  for (const CallRecord& call : result.calls) all.push_back(&call);
  const Calls sent = Where(all, [](const CallRecord& c) { return !c.dropped; });
  const Calls completed = Where(sent, Completed);
  const Calls good = Where(completed, [&options](const CallRecord& c) {
    return options.objective_seconds <= 0 || c.first_frame <= options.objective_seconds;
  });
  const double planned = result.interrupted ? result.wall_seconds : options.seconds;
  auto rate = [](double count, double seconds) { return seconds > 0 ? count / seconds : 0.0; };
  auto count = [](const Calls& calls) { return static_cast<double>(calls.size()); };
  const auto [codes, reasons] = Codes(sent);
  Json out = OptionsJson(options);
  out.update({{"interrupted", result.interrupted},
              {"wall_seconds", result.wall_seconds},
              {"arrivals", all.size()},
              {"dropped_by_client", all.size() - sent.size()},
              {"completed", completed.size()},
              {"within_objective", good.size()},
              {"offered_rate", rate(count(all), planned)},
              {"completed_rate", rate(count(completed), result.wall_seconds)},
              {"goodput_rate", rate(count(good), result.wall_seconds)},
              {"offered_tokens_per_second", rate(Tokens(all), planned)},
              {"completed_tokens_per_second", rate(Tokens(completed), result.wall_seconds)},
              {"goodput_tokens_per_second", rate(Tokens(good), result.wall_seconds)},
              {"codes", codes},
              {"reasons", reasons},
              {"send_lag_seconds", Percentiles(sent, &CallRecord::lag)},
              {"all", Group(all)},
              {"lengths", Groups(all, "length", &CallRecord::length)},
              {"priorities", Groups(all, "priority", &CallRecord::priority)}});
  return out;
}

std::string LoadTable(const Json& r) {
  std::string out =
      absl::StrFormat("%s, %d arrivals in %.1f s\n%s, the last after %.1f s\n",
                      RateRow("offered", r["offered_rate"], r["offered_tokens_per_second"]),
                      r["arrivals"].get<int64_t>(), r["seconds"].get<double>(),
                      RateRow("completed", r["completed_rate"], r["completed_tokens_per_second"]),
                      r["wall_seconds"].get<double>());
  absl::StrAppend(&out, RateRow("goodput", r["goodput_rate"], r["goodput_tokens_per_second"]));
  if (!r["objective_seconds"].is_null()) {
    absl::StrAppendFormat(&out, ", first frame within %g s", r["objective_seconds"].get<double>());
  }
  absl::StrAppend(&out, "\ncalls        ");
  for (const auto& [code, calls] : r["codes"].items()) {
    absl::StrAppend(&out, code, " ", Grouped(calls.get<int64_t>()), ", ");
  }
  absl::StrAppendFormat(&out, "not sent %s (%d outstanding at most)\n",
                        Grouped(r["dropped_by_client"].get<int64_t>()),
                        r["max_outstanding"].get<int64_t>());
  if (const Json& lag = r["send_lag_seconds"]; !lag.is_null()) {
    absl::StrAppendFormat(&out, "sent late by p50 %.4f, p99 %.4f, max %.4f s (counted below)\n",
                          lag["p50"].get<double>(), lag["p99"].get<double>(),
                          lag["max"].get<double>());
  }
  if (r.contains("server") && !r["server"].is_null()) out += ServerRows(r["server"]);
  absl::StrAppendFormat(&out, "\n%-20s %8s %10s %10s %10s %10s\n", "seconds", "done", "p50", "p90",
                        "p99", "max");
  return out + PercentileRows(r, "queue wait", "queue_seconds") +
         PercentileRows(r, "first frame", "first_frame_seconds") +
         PercentileRows(r, "snapshot", "snapshot_seconds");
}

absl::Status LoadVerdict(const LoadResult& result) {
  bool any_completed = false;
  absl::Status first, first_unexpected;
  for (const CallRecord& call : result.calls) {
    if (call.dropped) continue;
    any_completed |= call.status.ok();
    if (first.ok()) first = call.status;
    switch (call.status.code()) {
      case absl::StatusCode::kOk:
      case absl::StatusCode::kCancelled:
      case absl::StatusCode::kDeadlineExceeded:
      case absl::StatusCode::kResourceExhausted:
      case absl::StatusCode::kUnavailable:
        break;
      default:
        if (first_unexpected.ok()) first_unexpected = call.status;
    }
  }
  if (!first_unexpected.ok()) return first_unexpected;
  if (result.interrupted) return absl::CancelledError("interrupted; the report covers a part");
  return any_completed ? absl::OkStatus() : first;
}

}  // namespace sparsegdn::cli
