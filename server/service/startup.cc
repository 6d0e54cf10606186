#include "server/service/startup.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "server/model/config.h"
#include "server/model/cuda_op_table.h"
#include "server/service/convert_response.h"
#include "server/service/log.h"
#include "server/service/memory_limit.h"
#include "server/service/small_file.h"

namespace sparsegdn::service {
namespace {

constexpr int64_t kKvBlockTokens = 256;

constexpr int64_t kGpuChunkWindows = 8;

bool RunsOnGpu(const ServerConfig& config) {
  return config.backend == "cuda" ||
         (config.backend == "auto" && model::CudaDevicePresent(static_cast<int>(config.device)));
}

// With --kv-tokens 0: room for two of the longest prompts, but at most a quarter of the memory at
// FP32, and at least one chunk. A container's limit is no bound where KV lies on a device.
int64_t KvTokens(const ServerConfig& config, const model::ModelConfig& model) {
  if (config.kv_tokens > 0) return config.kv_tokens;
  int64_t longest = model.max_position_embeddings;
  if (config.max_prompt_tokens > 0) longest = std::min(longest, config.max_prompt_tokens);
  const int64_t full =
      std::count(model.layers.begin(), model.layers.end(), model::LayerKind::kFull);
  const int64_t bytes = full * 2 * model.num_kv_heads * model.head_dim * 4;
  const int64_t physical = PhysicalMemoryBytes();
  const int64_t memory = RunsOnGpu(config) ? physical : UsableMemoryBytes(physical);
  int64_t tokens = 2 * longest;
  if (bytes > 0) tokens = std::min(tokens, memory / 4 / bytes);
  tokens = std::max(tokens, config.chunk_windows * kWindow);
  return (tokens + kKvBlockTokens - 1) / kKvBlockTokens * kKvBlockTokens;
}

ExitCode Report(const char* what, const absl::Status& status, ExitCode code) {
  const std::string message(status.message());
  std::fprintf(stderr, "sparsegdn-server: %s: %s\n", what, message.c_str());
  Log(LogLevel::kError, what,
      {{"error", message}, {"exit_code", static_cast<int64_t>(static_cast<int>(code))}});
  return code;
}

}  // namespace

std::string VersionText() {
  return absl::StrCat("sparsegdn-server ", kServerVersion, " (", kServerCommit, "), gRPC ",
                      grpc::Version(), "\n");
}

ServerConfig WithChunkWindows(ServerConfig config) {
  if (config.chunk_windows > 0) return config;
  config.chunk_windows = RunsOnGpu(config) ? kGpuChunkWindows : 1;
  // ParseConfig has seen to it that a step holds one window at least.
  config.chunk_windows = std::min(config.chunk_windows, BatchTokens(config) / kWindow);
  return config;
}

absl::StatusOr<model::LoadOptions> ToLoadOptions(const ServerConfig& config) {
  absl::StatusOr<model::ModelConfig> model = model::LoadConfig(config.model_dir);
  if (!model.ok()) return model.status();
  model::LoadOptions options;
  options.dir = config.model_dir;
  options.backend = config.backend;
  options.device = static_cast<int>(config.device);
  options.num_threads = static_cast<int>(config.threads);
  options.round_a_log = config.round_a_log;
  options.budget_profile = config.budget_profile;
  model::RunnerLimits& limits = options.limits;
  limits.state_slots = static_cast<int32_t>(config.state_slots);
  limits.max_batch_tokens = BatchTokens(config);
  limits.max_batch_seqs =
      static_cast<int32_t>(std::min(config.max_batch_requests, config.state_slots));
  limits.kv_block_tokens = kKvBlockTokens;
  limits.kv_tokens = KvTokens(config, *model);
  // A line for every tenth of a stage, the rest for those who debug.
  options.progress = [tenth = int64_t{0}](std::string_view stage, int64_t done,
                                          int64_t total) mutable {
    const int64_t now = total > 0 ? 10 * done / total : 10;
    Log(now != tenth ? LogLevel::kInfo : LogLevel::kDebug, "loading",
        {{"stage", std::string(stage)}, {"done", done}, {"total", total}});
    tenth = now;
  };
  options.warning = [](std::string_view message) {
    Log(LogLevel::kWarning, "model", {{"message", std::string(message)}});
  };
  return options;
}

absl::StatusOr<store::RedisOptions> ToRedisOptions(const ServerConfig& config) {
  absl::StatusOr<store::RedisAddress> address = store::ParseRedisUrl(config.redis);
  if (!address.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--redis: ", std::string(address.status().message())));
  }
  store::RedisOptions options;
  options.address = *std::move(address);
  if (!config.redis_password_file.empty()) {
    absl::StatusOr<std::string> text = ReadSmallFile(config.redis_password_file);
    if (!text.ok() || text->empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--redis-password-file: cannot read ", config.redis_password_file, ": ",
                       text.ok() ? "it is empty" : std::string(text.status().message())));
    }
    options.address.password = text->substr(0, text->find('\n'));
  }
  options.timeout_ns = config.redis_timeout_ms * 1'000'000;
  options.ttl_seconds = config.redis_ttl_seconds;
  options.max_entry_bytes = config.redis_max_entry_bytes;
  return options;
}

absl::Status AddRedis(const ServerConfig& config, const model::ModelInfo& info,
                      engine::EngineConfig& engine_config) {
  if (config.redis.empty()) return absl::OkStatus();
  absl::StatusOr<store::RedisOptions> options = ToRedisOptions(config);
  if (!options.ok()) return options.status();
  engine_config.prefix_remote = std::make_shared<store::RedisStore>(
      *std::move(options), engine::Layout(info), engine::Clock::Real());
  return absl::OkStatus();
}

void AnnouncePorts(const Server& server) {
  std::printf("sparsegdn-server: gRPC on port %d", server.port());  // 0: Unix sockets alone
  if (server.http_port() > 0) std::printf(", metrics and probes on port %d", server.http_port());
  std::printf("\n");
  std::fflush(stdout);
  Log(LogLevel::kInfo, "listening",
      {{"port", static_cast<int64_t>(server.port())},
       {"http_port", static_cast<int64_t>(server.http_port())},
       {"version", std::string(kServerVersion)},
       {"commit", std::string(kServerCommit)}});
}

void LogServing(const engine::Engine& engine) {
  const model::ModelInfo& info = engine.model_info();
  Log(LogLevel::kInfo, "serving",
      {{"model", info.name},
       {"identity", info.identity},
       {"backend", info.backend},
       {"attention", info.attention.empty() ? "own kernel" : info.attention},
       {"layers", static_cast<int64_t>(info.layers.size())},
       {"max_context_tokens", info.max_context_tokens},
       {"default_budget", ToProto(engine.config().default_budget).ShortDebugString()}});
}

ExitCode ReportLoadFailure(const absl::Status& status) {
  const bool internal = absl::IsInternal(status) || absl::IsUnknown(status);
  return Report("cannot load the model", status, internal ? ExitCode::kInternal : ExitCode::kModel);
}

ExitCode ReportListenFailure(const absl::Status& status) {
  return Report("cannot listen", status,
                absl::IsInvalidArgument(status) ? ExitCode::kConfig : ExitCode::kListen);
}

}  // namespace sparsegdn::service
