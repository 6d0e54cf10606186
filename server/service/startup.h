// What main.cc says and decides at start and at the end: exit codes, messages, what the model
// loader is asked for.
#ifndef SPARSEGDN_SERVER_SERVICE_STARTUP_H_
#define SPARSEGDN_SERVER_SERVICE_STARTUP_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/model/load_model.h"
#include "server/service/config.h"
#include "server/service/server.h"
#include "server/store/redis_store.h"

namespace sparsegdn::service {

// Documented in docs/operations.md and in --help.
enum class ExitCode : int {
  kDrained = 0,
  kInternal = 1,
  kConfig = 2,
  kModel = 3,
  kListen = 4,
  kDevice = 5
};

std::string VersionText();
// With --chunk-windows 0 made a number: 8 where the model will run on a GPU, which smaller chunks do
// not fill, else 1. Fewer where
// --max-batch-tokens has no room for them.
ServerConfig WithChunkWindows(ServerConfig config);
// What the loader is asked for. Reads the folder's config.json, by which --kv-tokens 0 is decided;
// its errors are LoadConfig's.
absl::StatusOr<model::LoadOptions> ToLoadOptions(const ServerConfig& config);

// What --redis asks for. INVALID_ARGUMENT for a URL or a password file that cannot be read.
absl::StatusOr<store::RedisOptions> ToRedisOptions(const ServerConfig& config);
// Puts it behind the store in memory, when --redis is given. Does not connect yet.
absl::Status AddRedis(const ServerConfig& config, const model::ModelInfo& info,
                      engine::EngineConfig& engine_config);

// On standard output, because --listen may ask for any free port.
void AnnouncePorts(const Server& server);
// The model and the effective default budget.
void LogServing(const engine::Engine& engine);
// Print why on standard error and log it.
ExitCode ReportLoadFailure(const absl::Status& status);
ExitCode ReportListenFailure(const absl::Status& status);

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_STARTUP_H_
