// Configuration of the server: one table of options, each settable by flag, SPARSEGDN_* variable
// and JSON path. A flag wins over a variable, a variable over the --config file, the file over the
// default. An unknown flag, variable or key is an error.
#ifndef SPARSEGDN_SERVER_SERVICE_CONFIG_H_
#define SPARSEGDN_SERVER_SERVICE_CONFIG_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/engine.h"

namespace sparsegdn::service {

// Largest prompt that the receive limit is sized for when limits.max_prompt_tokens is 0.
inline constexpr int64_t kDefaultMaxPromptTokens = int64_t{1} << 20;
// Most that --max-batch-tokens takes.
inline constexpr int64_t kMaxBatchTokens = int64_t{1} << 21;

struct ServerConfig {
  std::string config_file;
  std::string model_dir;
  std::string backend = "auto";
  int64_t device = 0;   // CUDA
  int64_t threads = 0;  // 0: the cores this process may use
  bool round_a_log = false;
  std::string budget_profile;  // a file; "none"; empty: beside the model, if there is one

  std::string listen = "127.0.0.1:50051";
  std::string metrics_listen = "127.0.0.1:9464";  // empty: no HTTP listener
  std::string port_file;
  int64_t drain_seconds = 60;
  int64_t keepalive_seconds = 10;
  int64_t keepalive_timeout_seconds = 5;
  int64_t max_connection_age_seconds = 0;        // 0: connections live as long as the peer likes
  int64_t grpc_memory_bytes = int64_t{1} << 30;  // of what connections hold unread
  std::string tls_cert, tls_key, tls_client_ca;
  std::string auth_tokens;            // file of bearer tokens; empty: none is asked for
  int64_t auth_refresh_seconds = 10;  // how often certificate and token files are looked at
  std::string unix_socket_mode = "0600";
  int64_t shared_memory_bytes = int64_t{4} << 30;  // of live segments; 0: none is offered
  int64_t shared_memory_linger_seconds = 10;
  std::string shared_memory_folder = "/dev/shm";  // no option: shm_open knows no other

  std::string default_budget;  // empty: what the shares below imply, else retention
  std::optional<double> default_retention, default_coverage;
  std::optional<double> default_min_retention, default_max_retention;
  std::string default_selector = "beta";
  std::string default_solver = "auto";
  std::string default_local = "self";
  int64_t default_keep_first = 0;
  int64_t default_keep_last = 64;

  int64_t chunk_windows = 0;     // 0: by the device, see WithChunkWindows
  int64_t max_batch_tokens = 0;  // 0: see BatchTokens
  int64_t max_batch_requests = 32;
  int64_t state_slots = 32;
  int64_t kv_tokens = 0;  // 0: what the model's context and the slots ask for, bounded
  int64_t kept_snapshot_bytes = int64_t{1} << 30;
  int64_t prefix_cache_bytes = int64_t{1} << 30;
  std::string redis;  // URL; empty: none
  std::string redis_password_file;
  int64_t redis_timeout_ms = 500;
  int64_t redis_fetch_ms = 2000;
  int64_t redis_ttl_seconds = 3600;
  int64_t redis_max_entry_bytes = 256 << 20;
  int64_t frame_bytes = 1 << 20;
  std::optional<double> stuck_step_seconds;  // absent: by the backend

  // limits.*: reloaded on SIGHUP.
  int64_t max_prompt_tokens = 0;  // 0: the model's context
  int64_t max_queue_requests = 256;
  int64_t max_queue_tokens = 4 << 20;
  int64_t max_queue_bytes = 256 << 20;
  int64_t max_tenant_requests = 0, max_tenant_tokens = 0, max_tenant_kept_bytes = 0;  // 0: any
  int64_t max_buffered_bytes_per_call = 64 << 20;
  int64_t max_buffered_bytes = int64_t{1} << 30;
  double slow_reader_timeout_seconds = 30.0;
  int64_t default_ttl_seconds = 300;
  int64_t max_ttl_seconds = 3600;

  std::string log_level = "info";
  std::string log_format = "json";
};

// One row of the table. `min` and `max` bound numbers; `choices` ("a|b|c") bounds strings.
struct Option {
  using Field =
      std::variant<std::string ServerConfig::*, int64_t ServerConfig::*, double ServerConfig::*,
                   bool ServerConfig::*, std::optional<double> ServerConfig::*>;
  const char* flag;  // without the dashes; the variable is SPARSEGDN_ + upper case, - as _
  const char* json;  // dotted path; empty: not settable from the file
  Field field;
  const char* choices;
  double min;
  double max;
  const char* help;
};

std::span<const Option> Options();
std::string EnvName(const Option& option);
std::string DefaultText(const Option& option);

struct Invocation {
  ServerConfig config;
  bool help = false;
  bool version = false;
};

// `args` without the program's name; `env` as NAME=value. Reads the --config file. INVALID_ARGUMENT
// names the flag, variable or key, what it got and what it wanted; NOT_FOUND a missing file.
// Variables that Kubernetes injects for a Service called sparsegdn (SPARSEGDN_PORT,
// SPARSEGDN_SERVICE_HOST, SPARSEGDN_PORT_1_TCP, ...) and the client's SPARSEGDN_SERVER are passed
// over.
absl::StatusOr<Invocation> ParseConfig(const std::vector<std::string>& args,
                                       const std::vector<std::string>& env);

// The file's part, split off for tests and fuzzing.
absl::Status ApplyJson(const std::string& text, ServerConfig& config);

std::string HelpText();

// The effective default budget; retention 0.29, AUTO, SELF when nothing is configured.
absl::StatusOr<Budget> DefaultBudget(const ServerConfig& config);
engine::EngineLimits ToEngineLimits(const ServerConfig& config);
absl::StatusOr<engine::EngineConfig> ToEngineConfig(const ServerConfig& config);
// For EngineConfig. `backend` is the one that runs, as in ModelInfo. A step on a GPU that takes ten
// minutes hangs; on a CPU a large model's may take as long, so there none counts as stuck unless
// configured.
double StuckStepSeconds(const ServerConfig& config, const std::string& backend);
// Tokens of one step: --max-batch-tokens, or four chunks, at most kMaxBatchTokens.
int64_t BatchTokens(const ServerConfig& config);
// Bytes of the largest message a client may send: the longest prompt, or an import frame.
int64_t ReceiveLimitBytes(const ServerConfig& config);

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_CONFIG_H_
