// sparsegdn-bench model: prefill time of a resident model, driven as the engine drives it.
//
// One step after another in chunks of --chunk tokens, states and KV handed out as for a snapshot
// before the last token; the time ends when the last logits are on the host. Tokens per second
// count prompt tokens over all prompts of a batch.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "server/model/load_model.h"
#include "tests/bench/bench_command.h"

namespace sparsegdn::bench {
namespace {

using Clock = std::chrono::steady_clock;

double MillisSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// Counts what it is shown: the price of handing out is inside the time, that of keeping is not.
class CountingSink : public model::StepSink {
 public:
  void OnState(size_t, int32_t, int64_t, model::BufferView a, model::BufferView b) override {
    bytes += a.bytes() + b.bytes();
  }
  void OnKv(size_t, int32_t, int64_t, model::BufferView a, model::BufferView b) override {
    bytes += a.bytes() + b.bytes();
  }
  void OnLogits(size_t, int64_t, std::span<const float> logits) override {
    bytes += logits.size_bytes();
  }
  void OnLogprobs(size_t, int64_t, std::span<const float>) override {}
  size_t bytes = 0;
};

struct Setup {
  std::vector<int64_t> tokens;
  int64_t batch = 1, chunk = 0;
  Budget budget;
  bool kv = false;
  int repeats = 3;
};

struct Timing {
  double total_ms = 0.0, core_ms = 0.0, selection_ms = 0.0;
  int64_t selected = 0;
};

// One prefill of `batch` prompts of `tokens` tokens.
absl::StatusOr<Timing> Prefill(model::ModelRunner& runner, const Setup& setup, int64_t tokens) {
  std::vector<int32_t> ids(static_cast<size_t>(tokens));
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int32_t>((i * 2654435761u >> 7) % runner.info().vocab_size);
  }
  std::vector<int32_t> slots;
  absl::Status status;
  for (int64_t b = 0; b < setup.batch && status.ok(); ++b) {
    const absl::StatusOr<int32_t> slot = runner.Acquire(tokens);
    status = slot.status();
    if (slot.ok()) slots.push_back(*slot);
  }
  Timing timing;
  CountingSink sink;
  const int64_t last = tokens - 1;
  const auto start = Clock::now();
  for (int64_t first = 0; first < tokens && status.ok(); first += setup.chunk) {
    const int64_t count = std::min(setup.chunk, tokens - first);
    std::vector<model::Chunk> chunks;
    for (const int32_t slot : slots) {
      model::Chunk chunk;
      chunk.slot = slot;
      chunk.tokens = std::span(ids).subspan(static_cast<size_t>(first), static_cast<size_t>(count));
      chunk.first_position = first;
      chunk.prompt_tokens = tokens;
      chunk.budget = setup.budget;
      chunk.emit_state = first + count == tokens;
      chunk.emit_kv = setup.kv;
      if (chunk.emit_state) chunk.logits_positions = {&last, 1};
      chunks.push_back(chunk);
    }
    model::StepStats stats;
    status = runner.Step(chunks, sink, stats);
    timing.core_ms += 1e-6 * static_cast<double>(stats.gdn_core_ns);
    timing.selection_ms += 1e-6 * static_cast<double>(stats.selection_ns);
    for (const model::ChunkStats& c : stats.chunks) {
      for (const int32_t s : c.selected) timing.selected += s;
    }
  }
  timing.total_ms = MillisSince(start);
  for (const int32_t slot : slots) runner.Release(slot);
  if (!status.ok()) return status;
  return timing;
}

int Fail(const std::string& message) {
  std::fprintf(stderr, "sparsegdn-bench model: %s\n", message.c_str());
  return 1;
}

absl::Status Measure(model::ModelRunner& runner, const Setup& setup, std::ostream& json) {
  json << "{\"benchmark\": \"model\", \"backend\": \"" << runner.info().backend
       << "\", \"model\": \"" << runner.info().name << "\", \"commit\": \"" << SPARSEGDN_COMMIT_TEXT
       << "\", \"batch\": " << setup.batch << ", \"chunk\": " << setup.chunk << ", \"rows\": [";
  const char* separator = "";
  for (const int64_t tokens : setup.tokens) {
    std::vector<double> times;
    Timing timing;
    for (int i = -1; i < setup.repeats; ++i) {  // the first is a warm-up
      absl::StatusOr<Timing> run = Prefill(runner, setup, tokens);
      if (!run.ok()) return run.status();
      timing = *run;
      if (i >= 0) times.push_back(timing.total_ms);
    }
    const Summary summary = Summarize(times);
    const double rate = 1e3 * static_cast<double>(tokens * setup.batch) / summary.median_ms;
    std::printf(
        "%8lld tokens x %lld: median %.2f ms, p90 %.2f ms, %.0f tokens/s, "
        "GDN core %.2f ms, selection %.2f ms\n",
        static_cast<long long>(tokens), static_cast<long long>(setup.batch), summary.median_ms,
        summary.p90_ms, rate, timing.core_ms, timing.selection_ms);
    json << separator << "{\"tokens\": " << tokens << ", \"median_ms\": " << summary.median_ms
         << ", \"p90_ms\": " << summary.p90_ms << ", \"tokens_per_s\": " << rate
         << ", \"gdn_core_ms\": " << timing.core_ms << ", \"selection_ms\": " << timing.selection_ms
         << ", \"selected\": " << timing.selected << "}";
    separator = ", ";
  }
  json << "]}\n";
  return absl::OkStatus();
}

std::vector<int64_t> ParseList(const std::string& text) {
  std::vector<int64_t> values;
  std::istringstream in(text);
  for (std::string item; std::getline(in, item, ',');) values.push_back(std::stoll(item));
  return values;
}

}  // namespace

int RunModel(Flags* flags) {
  Setup setup;
  model::LoadOptions load;
  load.dir = flags->Get("model", "");
  load.backend = flags->Get("backend", "auto");
  load.device = static_cast<int>(flags->GetInt("device", 0));
  load.num_threads = static_cast<int>(flags->GetInt("threads", 0));
  setup.tokens = ParseList(flags->Get("tokens", "4096"));
  setup.batch = flags->GetInt("batch", 1);
  setup.chunk = flags->GetInt("chunk", 8 * kWindow);
  setup.kv = flags->Get("kv", "0") != "0";
  setup.repeats = static_cast<int>(flags->GetInt("repeats", 3));
  setup.budget.retention = flags->GetDouble("retention", 0.29);
  if (setup.budget.retention == 1.0) setup.budget.mode = BudgetMode::kDense;
  const std::string json = flags->Get("json", "");
  for (const std::string& name : flags->Unknown()) return Fail("unknown flag --" + name);
  if (load.dir.empty()) return Fail("--model is missing, wanted a checkpoint folder");
  if (setup.tokens.empty() || setup.batch < 1 || setup.chunk < 1) {
    return Fail("--tokens, --batch and --chunk must be positive");
  }
  int64_t longest = 0;
  for (const int64_t tokens : setup.tokens) longest = std::max(longest, tokens);
  constexpr int64_t kBlock = 256;
  load.limits.state_slots = static_cast<int32_t>(setup.batch);
  load.limits.kv_block_tokens = kBlock;
  load.limits.kv_tokens = setup.batch * ((longest + kBlock - 1) / kBlock * kBlock);
  load.limits.max_batch_tokens = setup.batch * std::min(setup.chunk, longest);
  load.limits.max_batch_seqs = static_cast<int32_t>(setup.batch);
  const auto start = Clock::now();
  auto runner = model::LoadModel(load);
  if (!runner.ok()) return Fail(std::string(runner.status().message()));
  std::printf("loaded in %.1f s on %s\n", 1e-3 * MillisSince(start),
              (*runner)->info().backend.c_str());
  std::ostringstream out;
  const absl::Status status = Measure(**runner, setup, out);
  if (!status.ok()) return Fail(std::string(status.message()));
  if (!json.empty()) std::ofstream(json) << out.str();
  return 0;
}

}  // namespace sparsegdn::bench
