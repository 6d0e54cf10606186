// sparsegdn-server: parse, listen, load, serve, drain. Exit codes: docs/operations.md.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <ctime>
#include <future>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/engine/engine.h"
#include "server/model/load_model.h"
#include "server/service/config.h"
#include "server/service/log.h"
#include "server/service/server.h"
#include "server/service/startup.h"

namespace {

namespace service = sparsegdn::service;
namespace engine = sparsegdn::engine;
using service::ExitCode;
using service::Log;
using service::LogLevel;

using EnginePtr = std::shared_ptr<engine::Engine>;

constexpr auto kShutdownGrace = std::chrono::milliseconds(500);

absl::StatusOr<EnginePtr> TryLoadEngine(const service::ServerConfig& config,
                                        engine::EngineObserver* observer) {
  absl::StatusOr<engine::EngineConfig> engine_config = service::ToEngineConfig(config);
  if (!engine_config.ok()) return engine_config.status();
  auto options = service::ToLoadOptions(config);
  if (!options.ok()) return options.status();
  auto runner = sparsegdn::model::LoadModel(*options);
  if (!runner.ok()) return runner.status();
  absl::Status redis = service::AddRedis(config, (*runner)->info(), *engine_config);
  if (!redis.ok()) return redis;
  engine_config->stuck_step_seconds = service::StuckStepSeconds(config, (*runner)->info().backend);
  auto created =
      engine::Engine::Create(*engine_config, *std::move(runner), observer, engine::Clock::Real());
  if (!created.ok()) return created.status();
  return EnginePtr(*std::move(created));
}

// Everything is reserved at start, so this is where a machine that is too small shows.
absl::StatusOr<EnginePtr> LoadEngine(const service::ServerConfig& config,
                                     engine::EngineObserver* observer) {
  try {
    return TryLoadEngine(config, observer);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        "not enough memory for the model with these --state-slots, --kv-tokens and "
        "--max-batch-tokens");
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot start --threads ", config.threads,
                     " threads: the limits on processes or memory are too low: ", error.what()));
  }
}

// The next signal of the set, or nothing after 20 ms.
std::optional<int> NextSignal(const sigset_t& set) {
  const timespec wait{0, 20'000'000};
  const int signal = sigtimedwait(&set, nullptr, &wait);
  return signal > 0 ? std::optional<int>(signal) : std::nullopt;
}

void Reload(const std::vector<std::string>& args, const std::vector<std::string>& env,
            service::Server& server) {
  if (absl::Status status = server.ReloadTokens(); !status.ok()) {
    Log(LogLevel::kError, "tokens not reloaded, the old ones stay",
        {{"error", std::string(status.message())}});
  }
  absl::StatusOr<service::Invocation> read = service::ParseConfig(args, env);
  absl::Status status = read.status();
  if (status.ok()) status = server.SetLimits(service::ToEngineLimits(read->config));
  if (status.ok()) {
    Log(LogLevel::kInfo, "limits reloaded");
  } else {
    Log(LogLevel::kError, "limits not reloaded, the old ones stay",
        {{"error", std::string(status.message())}});
  }
}

ExitCode DeviceFault() {
  Log(LogLevel::kError, "device fault: the model cannot run any more");
  return ExitCode::kDevice;
}

// Until SIGTERM, SIGINT or a fault. The model loads on its own thread, so that a stop during the
// load is obeyed at once.
ExitCode Run(const service::ServerConfig& config, const std::vector<std::string>& args,
             const std::vector<std::string>& env, const sigset_t& signals,
             service::Server& server) {
  // Shared: the loader may outlive this function. What it borrows (config, server) is main's.
  auto promise = std::make_shared<std::promise<absl::StatusOr<EnginePtr>>>();
  std::future<absl::StatusOr<EnginePtr>> loaded = promise->get_future();
  std::thread([promise, &config, &server] {
    promise->set_value(LoadEngine(config, &server.metrics()));
  }).detach();  // never joined: the process ends by _exit
  EnginePtr engine;
  while (true) {
    const std::optional<int> signal = NextSignal(signals);
    if (signal == SIGHUP) Reload(args, env, server);
    if (signal == SIGTERM || signal == SIGINT) {
      Log(LogLevel::kInfo, "draining", {{"drain_seconds", config.drain_seconds}});
      const bool all = server.Drain(std::chrono::seconds(config.drain_seconds));
      Log(all ? LogLevel::kInfo : LogLevel::kWarning, "drained", {{"calls_cut", !all}});
      return server.health().live() ? ExitCode::kDrained : DeviceFault();
    }
    if (engine == nullptr && loaded.valid() &&
        loaded.wait_for(std::chrono::seconds(0)) == std::future_status::ready) {
      absl::StatusOr<EnginePtr> result = loaded.get();
      if (!result.ok()) return service::ReportLoadFailure(result.status());
      engine = *std::move(result);
      server.Serve(engine);
      service::LogServing(*engine);
    }
    if (engine != nullptr && !engine->healthy()) {
      server.health().SetFailed();
      return DeviceFault();
    }
  }
}

// Listens, runs and stops. std::thread throws where the system gives no thread (limits on processes
// or on address space): an end with a reason, not an abort. What gRPC holds then is left as it is.
ExitCode Serve(const service::ServerConfig& config, const std::vector<std::string>& args,
               const std::vector<std::string>& env, const sigset_t& signals) {
  static absl::StatusOr<std::unique_ptr<service::Server>> server;
  try {
    server = service::Server::Start(config);
    if (!server.ok()) return service::ReportListenFailure(server.status());
    service::AnnouncePorts(**server);
    const ExitCode code = Run(config, args, env, signals, **server);
    (*server)->Shutdown(kShutdownGrace);
    return code;
  } catch (const std::system_error& error) {
    Log(LogLevel::kError, "cannot start a thread: the limits on processes or memory are too low",
        {{"error", error.what()}});
    return ExitCode::kInternal;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  std::vector<std::string> env;
  for (char** entry = environ; *entry != nullptr; ++entry) env.emplace_back(*entry);

  absl::StatusOr<service::Invocation> invocation = service::ParseConfig(args, env);
  if (invocation.ok() && !invocation->config.redis.empty()) {
    const absl::Status redis = service::ToRedisOptions(invocation->config).status();
    if (!redis.ok()) invocation = redis;
  }
  if (!invocation.ok()) {
    std::fprintf(stderr, "sparsegdn-server: %s\n",
                 std::string(invocation.status().message()).c_str());
    return static_cast<int>(ExitCode::kConfig);
  }
  if (invocation->help || invocation->version) {
    std::fputs(invocation->help ? service::HelpText().c_str() : service::VersionText().c_str(),
               stdout);
    return 0;
  }

  // Blocked before any thread starts, so that only Run takes them.
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&signals, signal);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);

  const service::ServerConfig config = service::WithChunkWindows(invocation->config);
  service::StartLog(config.log_level, config.log_format);
  const ExitCode code = Serve(config, args, env, signals);
  service::StopLog();
  // Not by return: after large responses gRPC's exit handlers have taken up to ten seconds, and the
  // engine's threads still run.
  _exit(static_cast<int>(code));
}
