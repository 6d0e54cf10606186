#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/bench_common.h"
#include "cli/cmd_load.h"
#include "cli/commands.h"
#include "cli/render.h"
#include "cli/request.h"
#include "cli/session.h"

namespace sparsegdn::cli {
namespace {

struct Options {
  std::vector<int64_t> lengths = {1024};
  int64_t requests = 16;
  int64_t concurrency = 1;
  int64_t warmup = 1;
  int64_t seed = 1;
};

absl::StatusOr<Options> ReadOptions(const Args& args) {
  Options options;
  for (absl::Status status : {args.ReadList("lengths", &options.lengths),
                              args.Read("requests", 1, 1 << 24, &options.requests),
                              args.Read("concurrency", 1, 1024, &options.concurrency),
                              args.Read("warmup", 0, 1 << 20, &options.warmup),
                              args.Read("seed", 0, INT64_MAX, &options.seed)}) {
    if (!status.ok()) return status;
  }
  if (!args.positional().empty()) return UsageError("bench takes no arguments");
  for (int64_t length : options.lengths) {
    if (length < 1 || length > (1 << 24)) {
      return UsageError(absl::StrCat("--lengths: ", length, " must be from 1 to 16777216"));
    }
  }
  return options;
}

struct Sample {
  double first_chunk = 0, total = 0, queue = 0, engine = 0, selection = 0, core = 0;
};

// Samples of one length, from all workers.
struct Cell {
  std::mutex mutex;
  std::vector<Sample> samples;
  int64_t errors = 0;
  absl::Status first_error;
  uint64_t bytes = 0;
  int64_t events_total = 0, events_selected = 0;
  double wall_seconds = 0;

  void Add(const absl::StatusOr<client::PrefillOutcome>& outcome) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!outcome.ok()) {
      if (errors++ == 0) first_error = outcome.status();
      return;
    }
    const v1::Timings& t = outcome->result.timings();
    samples.push_back({outcome->first_chunk_seconds.value_or(outcome->total_seconds),
                       outcome->total_seconds, t.queue_seconds(), t.engine_seconds(),
                       t.selection_seconds(), t.gdn_core_seconds()});
    bytes += outcome->snapshot.manifest().total_bytes();
    events_total += outcome->result.usage().events_total();
    events_selected += outcome->result.usage().events_selected();
  }
};

void RunCell(Session* session, const v1::PrefillRequest& base, const Options& options,
             int64_t length, uint32_t vocab_size, Cell* cell) {
  for (int64_t i = 0; i < options.warmup; ++i) {
    auto warm = session->client->Prefill(
        BenchRequest(base, length, -1 - i, vocab_size, options.seed), session->call);
    if (!warm.ok()) return cell->Add(warm);
  }
  std::atomic<int64_t> next{0};
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> workers;
  for (int64_t w = 0; w < options.concurrency; ++w) {
    workers.emplace_back([&] {
      for (int64_t i = next++; i < options.requests && !Interrupt().cancelled(); i = next++) {
        cell->Add(session->client->Prefill(BenchRequest(base, length, i, vocab_size, options.seed),
                                           session->call));
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  cell->wall_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double Quantile(const std::vector<Sample>& samples, double Sample::*field, double q) {
  std::vector<double> values;
  for (const Sample& sample : samples) values.push_back(sample.*field);
  return Percentile(std::move(values), q);
}

Json QuantilesJson(const std::vector<Sample>& samples, double Sample::*field) {
  return {{"median", Quantile(samples, field, 0.5)}, {"p90", Quantile(samples, field, 0.9)}};
}

Json CellJson(const Cell& cell, int64_t length) {
  const double tokens = static_cast<double>(length) * static_cast<double>(cell.samples.size());
  const double wall = cell.wall_seconds > 0 ? cell.wall_seconds : 1;
  return {{"length", length},
          {"requests", cell.samples.size()},
          {"errors", cell.errors},
          {"wall_seconds", cell.wall_seconds},
          {"first_chunk_seconds", QuantilesJson(cell.samples, &Sample::first_chunk)},
          {"snapshot_seconds", QuantilesJson(cell.samples, &Sample::total)},
          {"queue_seconds", QuantilesJson(cell.samples, &Sample::queue)},
          {"engine_seconds", QuantilesJson(cell.samples, &Sample::engine)},
          {"selection_seconds", QuantilesJson(cell.samples, &Sample::selection)},
          {"gdn_core_seconds", QuantilesJson(cell.samples, &Sample::core)},
          {"tokens_per_second", tokens / wall},
          {"snapshot_bytes_per_second", static_cast<double>(cell.bytes) / wall},
          {"events_total", cell.events_total},
          {"events_selected", cell.events_selected}};
}

std::string CellRow(const Json& cell) {
  auto pair = [&cell](const char* key) {
    return absl::StrFormat("%8.4f %8.4f", cell[key]["median"].get<double>(),
                           cell[key]["p90"].get<double>());
  };
  return absl::StrFormat(
      "%8s %5d %4d  %s  %s  %s  %s %11s %9s/s\n", Grouped(cell["length"].get<int64_t>()),
      cell["requests"].get<int64_t>(), cell["errors"].get<int64_t>(), pair("queue_seconds"),
      pair("engine_seconds"), pair("first_chunk_seconds"), pair("snapshot_seconds"),
      Grouped(static_cast<int64_t>(cell["tokens_per_second"].get<double>())),
      Bytes(static_cast<uint64_t>(cell["snapshot_bytes_per_second"].get<double>())));
}

constexpr char kTableHead[] =
    "                     queue              engine             first chunk        snapshot\n"
    "  tokens  done  err    median      p90    median      p90    median      p90    median      "
    "p90    tokens/s  snapshots\n";

absl::Status Run(const Args& args) {
  if (args.Has("rate")) return RunOpenLoop(args);
  for (const Flag& flag : OpenLoopFlags().flags) {
    if (args.Has(flag.name)) return UsageError(absl::StrCat("--", flag.name, " needs --rate"));
  }
  absl::StatusOr<Options> options = ReadOptions(args);
  if (!options.ok()) return options.status();
  absl::StatusOr<BenchTarget> target = OpenBench(args);
  if (!target.ok()) return target.status();
  Session* const session = &target->session;
  const v1::ModelInfo* const info = &target->info;
  Json cells = Json::array();
  if (!session->json) std::fputs(kTableHead, stdout);
  absl::Status first_error;
  for (int64_t length : options->lengths) {
    Cell cell;
    RunCell(session, target->base, *options, length, info->vocab_size(), &cell);
    cells.push_back(CellJson(cell, length));
    if (!session->json) std::fputs(CellRow(cells.back()).c_str(), stdout);
    if (first_error.ok()) first_error = cell.first_error;
    if (Interrupt().cancelled()) break;
  }
  if (session->json) {
    const Json json = {{"model", info->model_name()},
                       {"backend", info->backend()},
                       {"server_version", info->server_version()},
                       {"concurrency", options->concurrency},
                       {"seed", options->seed},
                       {"loop", "closed"},
                       {"lengths", cells}};
    std::printf("%s\n", json.dump(2).c_str());
  }
  return first_error;  // the report stands, the exit code says that something failed
}

}  // namespace

Command BenchCommand() {
  return {
      "bench",
      "",
      "measure the service: N requests from C callers, or arrivals at a rate",
      "Closed loop: random prompts (a fixed seed) of each length; every caller waits for its\n"
      "snapshot before it sends the next prompt. Times in seconds: queue and engine as the server\n"
      "saw them, first chunk and snapshot as seen here.\n\n"
      "  sparsegdn bench --lengths 1024,4096 --requests 32 --concurrency 4\n\n"
      "Open loop, with --rate: prompts arrive when they arrive, however long the service takes.\n"
      "Times count from the planned arrival. A full queue, a deadline, a cancelled call and a\n"
      "server that is away are results; any other error, or no completed call, is a failure.\n\n"
      "  sparsegdn bench --rate 20 --seconds 30 --mix 256:0.7,4096:0.3 --objective-ms 500\n",
      {{"Closed loop",
        {{"lengths", "N,...", "Prompt lengths in tokens (default 1024)."},
         {"requests", "N", "Requests for each length (default 16)."},
         {"concurrency", "N", "Callers at the same time (default 1)."},
         {"warmup", "N", "Requests before the clock starts, in both loops (default 1)."},
         {"seed", "N", "Of the random tokens and arrivals, in both loops (default 1)."}}},
       OpenLoopFlags(),
       BudgetFlags(),
       OutputFlags(),
       CallFlags(),
       SessionFlags()},
      Run};
}

}  // namespace sparsegdn::cli
