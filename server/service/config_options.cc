// The table of options and everything derived from it that is not parsing.
#include <algorithm>
#include <cctype>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/service/config.h"

namespace sparsegdn::service {
namespace {

using C = ServerConfig;
constexpr double kBig = 9007199254740992.0;  // 2^53: whole numbers a JSON double holds exactly

const Option kOptions[] = {
    {"config", "", &C::config_file, "", 0, 0, "JSON file with any of the keys below"},
    {"model", "model.dir", &C::model_dir, "", 0, 0, "checkpoint folder (required)"},
    {"backend", "model.backend", &C::backend, "auto|cpu|cuda", 0, 0,
     "where the model runs; auto takes a CUDA device if this build and machine have one"},
    {"device", "model.device", &C::device, "", 0, 1023, "index of the CUDA device"},
    {"threads", "model.threads", &C::threads, "", 0, 1024,
     "CPU threads; 0 takes the cores this process may use"},
    {"round-a-log", "model.round_a_log", &C::round_a_log, "", 0, 0,
     "round A_log and the gated norm's weight to BF16 at load, as a BF16 load in transformers"},
    {"budget-profile", "model.budget_profile", &C::budget_profile, "", 0, 0,
     "file of relative retentions per GDN layer; unset: budget_profile.json beside the model, if "
     "there is one; none: every layer alike"},

    {"listen", "listen", &C::listen, "", 0, 0,
     "host:port or unix:/path for gRPC, several with commas between; port 0 takes a free one"},
    {"metrics-listen", "metrics_listen", &C::metrics_listen, "", 0, 0,
     "host:port for /metrics, /livez and /readyz; empty turns it off"},
    {"port-file", "port_file", &C::port_file, "", 0, 0,
     "file that receives the two chosen ports, gRPC first, one a line"},
    {"drain-seconds", "drain_seconds", &C::drain_seconds, "", 0, 86400,
     "how long running and streaming calls may finish after SIGTERM"},
    {"keepalive-seconds", "grpc.keepalive_seconds", &C::keepalive_seconds, "", 1, 7200,
     "idle time before the server pings a client"},
    {"keepalive-timeout-seconds", "grpc.keepalive_timeout_seconds", &C::keepalive_timeout_seconds,
     "", 1, 7200, "time after which an unanswered ping ends the connection"},
    {"max-connection-age-seconds", "grpc.max_connection_age_seconds",
     &C::max_connection_age_seconds, "", 0, 604800,
     "age at which clients are asked to reconnect, so that load spreads; 0 never"},
    {"grpc-memory-bytes", "grpc.memory_bytes", &C::grpc_memory_bytes, "", 16 << 20, kBig,
     "memory of what connections have sent and no call has taken yet; beyond it calls are "
     "cancelled"},
    {"tls-cert", "tls.cert", &C::tls_cert, "", 0, 0, "PEM certificate chain of the server"},
    {"tls-key", "tls.key", &C::tls_key, "", 0, 0, "PEM private key of the server"},
    {"tls-client-ca", "tls.client_ca", &C::tls_client_ca, "", 0, 0,
     "PEM authorities; clients must then present a certificate"},
    {"auth-tokens", "auth.tokens", &C::auth_tokens, "", 0, 0,
     "file of bearer tokens, lines of TENANT TOKEN; every call must then bring one"},
    {"auth-refresh-seconds", "auth.refresh_seconds", &C::auth_refresh_seconds, "", 1, 3600,
     "how often certificate and token files are looked at for a rotation"},
    {"unix-socket-mode", "unix_socket_mode", &C::unix_socket_mode, "0600|0660|0666", 0, 0,
     "permissions of a unix: listener"},
    {"shared-memory-bytes", "shared_memory.bytes", &C::shared_memory_bytes, "", 0, kBig,
     "most bytes of live shared-memory segments, for clients on unix: listeners; 0 offers none"},
    {"shared-memory-linger-seconds", "shared_memory.linger_seconds",
     &C::shared_memory_linger_seconds, "", 0, 3600,
     "how long a segment's name stays after its call ended well"},

    {"default-budget", "budget.mode", &C::default_budget, "dense|retention|coverage", 0, 0,
     "budget of requests that name none; unset: by the shares below, else retention 0.29"},
    {"default-retention", "budget.retention", &C::default_retention, "", 0, 1,
     "share of recurrent updates that are computed"},
    {"default-coverage", "budget.coverage", &C::default_coverage, "", 0, 1,
     "share of the squared score that the updates must hold"},
    {"default-min-retention", "budget.min_retention", &C::default_min_retention, "", 0, 1,
     "least share of a head pair"},
    {"default-max-retention", "budget.max_retention", &C::default_max_retention, "", 0, 1,
     "largest share of a head pair"},
    {"default-selector", "budget.selector", &C::default_selector, "beta|write_norm", 0, 0,
     "score by which updates are chosen"},
    {"default-solver", "budget.solver", &C::default_solver, "auto|exact|block_adjacent", 0, 0,
     "local Delta solve"},
    {"default-local", "budget.local", &C::default_local, "self|none", 0, 0,
     "output term of a token whose update is skipped"},
    {"default-keep-first", "budget.keep_first", &C::default_keep_first, "", 0, kBig,
     "first tokens that are always updates"},
    {"default-keep-last", "budget.keep_last", &C::default_keep_last, "", 0, kBig,
     "last tokens that are always updates"},

    {"chunk-windows", "engine.chunk_windows", &C::chunk_windows, "", 0, 512,
     "a request is cut at multiples of this many windows of 2,048 tokens; 0 takes 8 on a GPU, 1 on "
     "the CPU"},
    {"max-batch-tokens", "engine.max_batch_tokens", &C::max_batch_tokens, "", 0, kMaxBatchTokens,
     "tokens of one step, at least one chunk; 0 takes four chunks, at most 2,097,152"},
    {"max-batch-requests", "engine.max_batch_requests", &C::max_batch_requests, "", 1, 4096,
     "requests of one step"},
    {"state-slots", "engine.state_slots", &C::state_slots, "", 1, 65536,
     "sequences resident at once"},
    {"kv-tokens", "engine.kv_tokens", &C::kv_tokens, "", 0, kBig,
     "attention KV capacity over all slots, in tokens; 0: two of the longest prompts, within a "
     "quarter of the memory"},
    {"kept-snapshot-bytes", "engine.kept_snapshot_bytes", &C::kept_snapshot_bytes, "", 0, kBig,
     "memory for kept and imported snapshots"},
    {"prefix-cache-bytes", "prefix_cache.bytes", &C::prefix_cache_bytes, "", 0, kBig,
     "memory for states and KV at window boundaries that later prompts reuse; 0 turns reuse off"},
    {"redis", "prefix_cache.redis", &C::redis, "", 0, 0,
     "redis://[user@]host[:port][/database] or unix:///path of a Redis that replicas share stored "
     "prefixes through; needs --prefix-cache-bytes"},
    {"redis-password-file", "prefix_cache.redis_password_file", &C::redis_password_file, "", 0, 0,
     "file whose first line is the password of Redis"},
    {"redis-timeout-ms", "prefix_cache.redis_timeout_ms", &C::redis_timeout_ms, "", 1, 60000,
     "longest wait for a connection to Redis and for one answer"},
    {"redis-fetch-ms", "prefix_cache.redis_fetch_ms", &C::redis_fetch_ms, "", 1, 600000,
     "longest that a request waits for its prefix from Redis before it is computed"},
    {"redis-ttl-seconds", "prefix_cache.redis_ttl_seconds", &C::redis_ttl_seconds, "", 1, 31536000,
     "life of an entry in Redis since it was last used"},
    {"redis-max-entry-bytes", "prefix_cache.redis_max_entry_bytes", &C::redis_max_entry_bytes, "",
     1 << 10, kBig, "larger entries (one state and one window's KV) are not sent to Redis"},
    {"frame-bytes", "engine.frame_bytes", &C::frame_bytes, "", 4096, 3 << 20,
     "data bytes of one TensorChunk"},
    {"stuck-step-seconds", "engine.stuck_step_seconds", &C::stuck_step_seconds, "", 0, 86400,
     "a step that runs longer is a device fault; 0 never; unset: 600 on a GPU, never on the CPU"},

    {"max-prompt-tokens", "limits.max_prompt_tokens", &C::max_prompt_tokens, "", 0, 1 << 24,
     "longest prompt; 0 takes the model's context"},
    {"max-queue-requests", "limits.max_queue_requests", &C::max_queue_requests, "", 1, 1 << 20,
     "requests that may wait"},
    {"max-queue-tokens", "limits.max_queue_tokens", &C::max_queue_tokens, "", 1, kBig,
     "tokens that may wait"},
    {"max-queue-bytes", "limits.max_queue_bytes", &C::max_queue_bytes, "", 1 << 10, kBig,
     "host memory of the requests that wait"},
    {"max-tenant-requests", "limits.max_tenant_requests", &C::max_tenant_requests, "", 0, 1 << 20,
     "requests of one tenant that may wait or run; 0 as many as there is room for"},
    {"max-tenant-tokens", "limits.max_tenant_tokens", &C::max_tenant_tokens, "", 0, kBig,
     "their tokens; 0 as many as there is room for"},
    {"max-tenant-kept-bytes", "limits.max_tenant_kept_bytes", &C::max_tenant_kept_bytes, "", 0,
     kBig, "kept and imported snapshots of one tenant; 0 as much as there is room for"},
    {"max-buffered-bytes-per-call", "limits.max_buffered_bytes_per_call",
     &C::max_buffered_bytes_per_call, "", 1 << 16, kBig,
     "unread frames of one call before it is paused"},
    {"max-buffered-bytes", "limits.max_buffered_bytes", &C::max_buffered_bytes, "", 1 << 16, kBig,
     "unread frames of all calls"},
    {"slow-reader-timeout-seconds", "limits.slow_reader_timeout_seconds",
     &C::slow_reader_timeout_seconds, "", 0.05, 86400,
     "a call whose client takes nothing for this long is ended"},
    {"default-ttl-seconds", "limits.default_ttl_seconds", &C::default_ttl_seconds, "", 1,
     kBig / 4e6, "life of a kept snapshot that names none"},
    {"max-ttl-seconds", "limits.max_ttl_seconds", &C::max_ttl_seconds, "", 1, kBig / 4e6,
     "longest life of a kept snapshot"},

    {"log-level", "log.level", &C::log_level, "debug|info|warning|error", 0, 0,
     "least level logged"},
    {"log-format", "log.format", &C::log_format, "json|text", 0, 0, "lines on standard error"},
};

struct DefaultPrinter {
  ServerConfig config;
  std::string operator()(std::string C::*f) const { return config.*f; }
  std::string operator()(int64_t C::*f) const { return absl::StrCat(config.*f); }
  std::string operator()(double C::*f) const { return absl::StrCat(config.*f); }
  std::string operator()(bool C::*f) const { return config.*f ? "true" : "false"; }
  std::string operator()(std::optional<double> C::*f) const {
    return (config.*f).has_value() ? absl::StrCat(*(config.*f)) : "";
  }
};

}  // namespace

std::span<const Option> Options() { return kOptions; }

std::string EnvName(const Option& option) {
  std::string name = "SPARSEGDN_";
  for (const char* p = option.flag; *p != '\0'; ++p) {
    name.push_back(*p == '-' ? '_' : static_cast<char>(std::toupper(*p)));
  }
  return name;
}

std::string DefaultText(const Option& option) { return std::visit(DefaultPrinter{}, option.field); }

std::string HelpText() {
  std::string text =
      "sparsegdn-server: keeps a Gated Delta Network model resident and serves prefill over gRPC.\n"
      "\n"
      "usage: sparsegdn-server --model DIR [--option value ...]\n"
      "\n"
      "A flag wins over its variable (SPARSEGDN_MODEL for --model), a variable over the file "
      "given\n"
      "by --config. SIGHUP reloads limits.* and the tokens, SIGTERM drains and stops.\n"
      "Exit codes: 0 drained, 1 internal, 2 configuration, 3 model, 4 cannot listen, 5 device.\n\n";
  for (const Option& option : kOptions) {
    absl::StrAppend(&text, "  --", option.flag);
    if (option.choices[0] != '\0') absl::StrAppend(&text, " ", option.choices);
    const std::string standard = DefaultText(option);
    if (!standard.empty()) absl::StrAppend(&text, "  [", standard, "]");
    absl::StrAppend(&text, "\n      ", option.help);
    if (option.json[0] != '\0') absl::StrAppend(&text, " (", option.json, ")");
    absl::StrAppend(&text, "\n");
  }
  absl::StrAppend(&text, "  --help\n      this text\n  --version\n      version and commit\n");
  return text;
}

absl::StatusOr<Budget> DefaultBudget(const ServerConfig& config) {
  Budget budget;
  std::string mode = config.default_budget;
  if (mode.empty()) {
    if (config.default_retention && config.default_coverage) {
      return absl::InvalidArgumentError(
          "--default-retention and --default-coverage are both set: name --default-budget, or drop "
          "one");
    }
    mode = config.default_coverage ? "coverage" : "retention";
  }
  const auto unused = [&](const std::optional<double>& value, const char* flag) {
    return value ? absl::InvalidArgumentError(absl::StrCat(
                       "--", flag, " = ", *value, " is not used by --default-budget ", mode))
                 : absl::OkStatus();
  };
  absl::Status status;
  if (mode != "retention") status.Update(unused(config.default_retention, "default-retention"));
  if (mode != "coverage") status.Update(unused(config.default_coverage, "default-coverage"));
  if (mode == "dense") {
    status.Update(unused(config.default_min_retention, "default-min-retention"));
    status.Update(unused(config.default_max_retention, "default-max-retention"));
  }
  if (!status.ok()) return status;
  budget.mode = mode == "dense"      ? BudgetMode::kDense
                : mode == "coverage" ? BudgetMode::kCoverage
                                     : BudgetMode::kRetention;
  budget.selector = config.default_selector == "beta" ? Selector::kBeta : Selector::kWriteNorm;
  budget.solver = config.default_solver == "auto"    ? Solver::kAuto
                  : config.default_solver == "exact" ? Solver::kExact
                                                     : Solver::kBlockAdjacent;
  budget.local = config.default_local == "self" ? LocalTerm::kSelf : LocalTerm::kNone;
  budget.retention = config.default_retention.value_or(budget.retention);
  budget.coverage = config.default_coverage.value_or(budget.coverage);
  budget.min_retention = config.default_min_retention.value_or(budget.min_retention);
  budget.max_retention = config.default_max_retention.value_or(budget.max_retention);
  budget.keep_first = config.default_keep_first;
  budget.keep_last = config.default_keep_last;
  return budget;
}

engine::EngineLimits ToEngineLimits(const ServerConfig& config) {
  engine::EngineLimits limits;
  limits.max_queue_requests = static_cast<uint32_t>(config.max_queue_requests);
  limits.max_queue_tokens = config.max_queue_tokens;
  limits.max_queue_bytes = config.max_queue_bytes;
  limits.max_tenant_requests = config.max_tenant_requests;
  limits.max_tenant_tokens = config.max_tenant_tokens;
  limits.max_tenant_kept_bytes = config.max_tenant_kept_bytes;
  limits.max_prompt_tokens = config.max_prompt_tokens;
  limits.max_buffered_bytes_per_call = config.max_buffered_bytes_per_call;
  limits.max_buffered_bytes = config.max_buffered_bytes;
  limits.slow_reader_timeout_seconds = config.slow_reader_timeout_seconds;
  limits.default_ttl_seconds = static_cast<uint32_t>(config.default_ttl_seconds);
  limits.max_ttl_seconds = static_cast<uint32_t>(config.max_ttl_seconds);
  return limits;
}

absl::StatusOr<engine::EngineConfig> ToEngineConfig(const ServerConfig& config) {
  absl::StatusOr<Budget> budget = DefaultBudget(config);
  if (!budget.ok()) return budget.status();
  engine::EngineConfig result;
  result.default_budget = *budget;
  result.chunk_windows = std::max<int64_t>(1, config.chunk_windows);
  result.kept_snapshot_bytes = config.kept_snapshot_bytes;
  result.prefix_cache_bytes = config.prefix_cache_bytes;
  result.prefix_fetch_seconds = static_cast<double>(config.redis_fetch_ms) * 1e-3;
  result.frame_bytes = config.frame_bytes;
  result.limits = ToEngineLimits(config);
  return result;
}

double StuckStepSeconds(const ServerConfig& config, const std::string& backend) {
  return config.stuck_step_seconds.value_or(backend == "cpu" ? 0.0 : 600.0);
}

int64_t BatchTokens(const ServerConfig& config) {
  if (config.max_batch_tokens > 0) return config.max_batch_tokens;
  return std::min(4 * std::max<int64_t>(1, config.chunk_windows) * kWindow, kMaxBatchTokens);
}

int64_t ReceiveLimitBytes(const ServerConfig& config) {
  constexpr int64_t kSlack = 256 << 10;  // logits positions, names, budget
  const int64_t tokens =
      config.max_prompt_tokens > 0 ? config.max_prompt_tokens : kDefaultMaxPromptTokens;
  return std::max<int64_t>(tokens * 4, 4 << 20) + kSlack;
}

}  // namespace sparsegdn::service
