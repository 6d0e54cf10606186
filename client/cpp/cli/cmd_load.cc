#include "cli/cmd_load.h"

#include <cmath>
#include <cstdio>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cli/bench_common.h"
#include "cli/load_report.h"
#include "cli/load_run.h"
#include "cli/metrics_scrape.h"
#include "cli/render.h"
#include "cli/session.h"

namespace sparsegdn::cli {
namespace {

constexpr int64_t kMostTokens = 1 << 24;
constexpr double kMostArrivals = 1e7;

// Leaves *out alone when the flag is absent.
absl::Status ReadNumber(const Args& args, const std::string& name, double min, double max,
                        double scale, double* out) {
  std::optional<double> value;
  absl::Status status = args.Read(name, &value);
  if (!status.ok() || !value) return status;
  if (!(*value >= min && *value <= max)) {
    return UsageError(
        absl::StrCat("--", name, " = ", args.Text(name), ", must be from ", min, " to ", max));
  }
  *out = *value * scale;
  return absl::OkStatus();
}

absl::Status ReadMix(const Args& args, const std::string& name, int64_t min, int64_t max,
                     Mix* out) {
  if (!args.Has(name)) return absl::OkStatus();
  absl::StatusOr<Mix> mix = ParseMix(name, args.Text(name), min, max);
  if (!mix.ok()) return mix.status();
  *out = *std::move(mix);
  return absl::OkStatus();
}

absl::Status CheckPairs(const Args& args) {
  if (!args.positional().empty()) return UsageError("bench takes no arguments");
  for (const char* closed : {"lengths", "requests", "concurrency"}) {
    if (args.Has(closed)) {
      return UsageError(absl::StrCat("--", closed, " is of the closed loop, --rate of the open"));
    }
  }
  if (args.Has("deadline-share") != args.Has("deadline-ms")) {
    return UsageError("--deadline-share and --deadline-ms need each other");
  }
  const std::pair<const char*, const char*> needs[] = {
      {"cancel-ms", "cancel-share"}, {"slow-bytes", "slow-share"}, {"step-tokens", "metrics"}};
  for (const auto& [name, other] : needs) {
    if (args.Has(name) && !args.Has(other)) {
      return UsageError(absl::StrCat("--", name, " needs --", other));
    }
  }
  if (args.Has("priority") && args.Has("priority-mix")) {
    return UsageError("--priority and --priority-mix exclude each other");
  }
  return absl::OkStatus();
}

}  // namespace

FlagGroup OpenLoopFlags() {
  return {"Open loop",
          {{"rate", "R", "Arrivals per second on average, as a Poisson process."},
           {"seconds", "S", "Arrivals for this long (default 10); then wait for the last call."},
           {"mix", "N:WEIGHT,...", "Prompt lengths in tokens (default 1024:1)."},
           {"priority-mix", "P:WEIGHT,...", "Priorities, -8 to 8."},
           {"cancel-share", "SHARE", "This share of the calls is cancelled, unless it ends first,"},
           {"cancel-ms", "MS", "uniformly at random within this time (default 1000)."},
           {"deadline-share", "SHARE", "This share of the calls has a deadline,"},
           {"deadline-ms", "MS", "so long after its arrival."},
           {"slow-share", "SHARE", "This share of the callers reads its snapshot slowly,"},
           {"slow-bytes", "N", "at N bytes per second (default 1048576)."},
           {"objective-ms", "MS", "Goodput counts prompts whose first frame came within this."},
           {"max-outstanding", "N",
            "Calls at the same time (default 512); arrivals beyond are not sent, and counted."},
           {"metrics", "URL", "The server's http://HOST:PORT/metrics, for batches and waste."},
           {"step-tokens", "N", "Its --max-batch-tokens, if it does not export it."}}};
}

absl::StatusOr<LoadOptions> ReadLoadOptions(const Args& args) {
  LoadOptions o;
  o.seconds = 10;
  for (absl::Status status :
       {CheckPairs(args), ReadNumber(args, "rate", 1e-6, 1e6, 1, &o.rate),
        ReadNumber(args, "seconds", 0.001, 1e6, 1, &o.seconds),
        ReadMix(args, "mix", 1, kMostTokens, &o.lengths),
        ReadMix(args, "priority-mix", -8, 8, &o.priorities),
        ReadNumber(args, "cancel-share", 0, 1, 1, &o.cancel_share),
        ReadNumber(args, "cancel-ms", 0, 1e9, 1e-3, &o.cancel_seconds),
        ReadNumber(args, "deadline-share", 0, 1, 1, &o.deadline_share),
        ReadNumber(args, "deadline-ms", 1, 1e9, 1e-3, &o.deadline_seconds),
        ReadNumber(args, "slow-share", 0, 1, 1, &o.slow_share),
        ReadNumber(args, "slow-bytes", 1, 1e12, 1, &o.slow_bytes_per_second),
        ReadNumber(args, "objective-ms", 0.001, 1e9, 1e-3, &o.objective_seconds),
        args.Read("max-outstanding", 1, 4096, &o.max_outstanding),
        args.Read("step-tokens", 1, kMostTokens, &o.step_tokens),
        args.Read("warmup", 0, 1 << 20, &o.warmup), args.Read("seed", 0, INT64_MAX, &o.seed)}) {
    if (!status.ok()) return status;
  }
  if (o.rate * o.seconds > kMostArrivals) {
    return UsageError(absl::StrCat("--rate times --seconds = ", o.rate * o.seconds,
                                   " arrivals, must be at most ", kMostArrivals));
  }
  return o;
}

absl::Status RunOpenLoop(const Args& args) {
  const absl::StatusOr<LoadOptions> options = ReadLoadOptions(args);
  if (!options.ok()) return options.status();
  absl::StatusOr<Metrics> before = Metrics(), after = Metrics();
  if (args.Has("metrics")) before = FetchMetrics(args.Text("metrics"));  // a bad URL fails early
  if (!before.ok()) return before.status();
  absl::StatusOr<BenchTarget> target = OpenBench(args);
  if (!target.ok()) return target.status();
  const uint32_t vocab_size = target->info.vocab_size();
  client::Client* const client = target->session.client.get();
  for (int64_t i = 0; i < options->warmup; ++i) {
    auto warm = client->Prefill(BenchRequest(target->base, options->lengths.front().value, -1 - i,
                                             vocab_size, options->seed),
                                target->session.call);
    if (!warm.ok()) return warm.status();
  }
  if (args.Has("metrics")) before = FetchMetrics(args.Text("metrics"));
  if (!before.ok()) return before.status();
  const LoadResult result = RunLoad(client, target->session.call, target->base, vocab_size,
                                    *options, PlanArrivals(*options));
  if (args.Has("metrics")) after = FetchMetrics(args.Text("metrics"));
  Json report = {{"model", target->info.model_name()},
                 {"backend", target->info.backend()},
                 {"server_version", target->info.server_version()},
                 {"loop", "open"}};
  report.update(LoadJson(*options, result));
  report["server"] = args.Has("metrics") && after.ok()
                         ? ServerWork(*before, *after, static_cast<double>(options->step_tokens))
                         : Json(nullptr);
  std::printf("%s", target->session.json ? absl::StrCat(report.dump(2), "\n").c_str()
                                         : LoadTable(report).c_str());
  const absl::Status verdict = LoadVerdict(result);  // the report stands in any case
  return verdict.ok() ? after.status() : verdict;
}

}  // namespace sparsegdn::cli
