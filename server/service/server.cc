#include "server/service/server.h"

#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/service/address.h"
#include "server/service/call_registry.h"
#include "server/service/credentials.h"
#include "server/service/http_listener.h"
#include "server/service/listeners.h"
#include "server/service/log.h"
#include "server/service/prefill_service.h"
#include "server/service/shared_segment.h"
#include "server/service/tokens.h"
#include "server/service/worker_pool.h"

#ifndef SPARSEGDN_VERSION
#error "the build sets SPARSEGDN_VERSION and SPARSEGDN_COMMIT"
#endif

namespace sparsegdn::service {

const char kServerVersion[] = SPARSEGDN_VERSION;
const char kServerCommit[] = SPARSEGDN_COMMIT;

namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;
using std::chrono::system_clock;

// Uploads that are checked at once. Two, so that a large one does not hold up a small one; more
// would only take cores from the model.
constexpr int kWorkers = 2;
// Bounds on what one connection may hold before any of it is looked at.
constexpr int kMaxMetadataBytes = 16 << 10;
constexpr int kMaxStreamsPerConnection = 4096;

// The library's own lines join ours, so that the log stays one format.
void RouteGrpcLogs() {
  gpr_set_log_function([](gpr_log_func_args* args) {
    Log(args->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarning : LogLevel::kDebug, "grpc",
        {{"message", std::string(args->message)}});
  });
}

// Told once at start: what an operator may have overlooked.
void WarnOfOpenDoors(const ServerConfig& config, const std::vector<ListenAddress>& addresses) {
  if (!config.tls_cert.empty()) return;
  for (const ListenAddress& address : addresses) {
    if (IsLocal(address)) continue;
    Log(LogLevel::kWarning,
        config.auth_tokens.empty()
            ? "a listener without TLS and authentication is open to other machines"
            : "bearer tokens travel in clear text to a listener without TLS",
        {{"listen", ToText(address)}});
  }
}

void SetChannelArguments(const ServerConfig& config, grpc::ServerBuilder& builder) {
  builder.SetMaxReceiveMessageSize(static_cast<int>(ReceiveLimitBytes(config)));
  builder.SetMaxSendMessageSize(-1);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMaxMetadataBytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsPerConnection);
  // Without this a second server takes the same port and half of the calls, without an error.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // A soft bound: as it fills, the library reads less at a time and turns new connections away, and
  // beyond it ends idle ones, then cancels calls.
  grpc::ResourceQuota quota("server");
  quota.Resize(static_cast<size_t>(config.grpc_memory_bytes));
  builder.SetResourceQuota(quota);
  // Finds clients that are gone without a word.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, int(config.keepalive_seconds * 1000));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                             int(config.keepalive_timeout_seconds * 1000));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // A client may ping twice a second, also while no data flows, and keeps its long prefill.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 450);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 10);
  if (config.max_connection_age_seconds > 0) {
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS,
                               int(config.max_connection_age_seconds * 1000));
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS,
                               int(std::max<int64_t>(config.drain_seconds, 600) * 1000));
  }
  // Reflection alone runs on synchronous threads.
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2);
}

class ServerImpl final : public Server {
 public:
  explicit ServerImpl(const ServerConfig& config)
      : config_(config),
        metrics_(kServerVersion, kServerCommit),
        health_(&metrics_),
        limits_(ToEngineLimits(config)),
        calls_([this] { return StallTimeout(); }),
        segments_(static_cast<uint64_t>(config.shared_memory_bytes),
                  std::chrono::seconds(config.shared_memory_linger_seconds),
                  config.shared_memory_folder) {
    metrics_.SetMaxBatchTokens(BatchTokens(config));
  }
  ~ServerImpl() override { Shutdown(nanoseconds(0)); }

  absl::Status Listen();
  int port() const override { return port_; }
  int http_port() const override { return http_ ? http_->port() : 0; }
  Metrics& metrics() override { return metrics_; }
  Health& health() override { return health_; }
  void Serve(std::shared_ptr<engine::Engine> engine) override;
  absl::Status SetLimits(const engine::EngineLimits& limits) override;
  absl::Status ReloadTokens() override {
    return tokens_ == nullptr ? absl::OkStatus() : tokens_->Reload();
  }
  bool Drain(nanoseconds timeout) override;
  void Shutdown(nanoseconds grace) override;

 private:
  absl::Status OpenTokens();
  absl::Status ListenGrpc();
  absl::Status Bind(grpc::ServerBuilder& builder, const std::vector<ListenAddress>& addresses,
                    const std::vector<int>& ports);
  absl::Status WhyNot(const std::vector<ListenAddress>& addresses) const;
  absl::Status ListenHttp();
  absl::Status WritePortFile() const;
  nanoseconds StallTimeout() const {
    return nanoseconds(static_cast<int64_t>(limits().slow_reader_timeout_seconds * 1e9));
  }
  engine::EngineLimits limits() const {
    std::lock_guard lock(limits_mutex_);
    return limits_;
  }

  const ServerConfig config_;
  Metrics metrics_;
  Health health_;
  mutable std::mutex limits_mutex_;
  engine::EngineLimits limits_;
  CallRegistry calls_;
  SegmentPool segments_;
  WorkerPool workers_{kWorkers};
  std::unique_ptr<TokenFile> tokens_;
  std::unique_ptr<PrefillServiceImpl> service_;
  std::vector<std::unique_ptr<UnixSocketFile>> socket_files_;
  std::unique_ptr<grpc::Server> grpc_;
  std::unique_ptr<HttpListener> http_;
  int port_ = 0;
};

absl::Status ServerImpl::Listen() {
  absl::Status status = OpenTokens();
  if (status.ok()) status = ListenGrpc();
  if (status.ok()) status = ListenHttp();
  if (status.ok()) status = WritePortFile();
  return status;
}

absl::Status ServerImpl::OpenTokens() {
  if (config_.auth_tokens.empty()) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<TokenFile>> tokens =
      TokenFile::Open(config_.auth_tokens, "--auth-tokens", config_.auth_refresh_seconds);
  if (!tokens.ok()) return tokens.status();
  tokens_ = *std::move(tokens);
  return absl::OkStatus();
}

absl::Status ServerImpl::ListenGrpc() {
  absl::StatusOr<std::vector<ListenAddress>> addresses =
      ParseListenList(config_.listen, "--listen");
  if (!addresses.ok()) return addresses.status();
  absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> credentials = MakeCredentials(config_);
  if (!credentials.ok()) return credentials.status();
  WarnOfOpenDoors(config_, *addresses);
  RouteGrpcLogs();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  service_ = std::make_unique<PrefillServiceImpl>(
      ServiceContext{&health_, &metrics_, &calls_, &workers_, engine::Clock::Real(), &segments_,
                     tokens_.get()},
      kServerVersion, [this] { return limits(); });
  grpc::ServerBuilder builder;
  SetChannelArguments(config_, builder);
  std::vector<int> ports(addresses->size(), 0);
  for (size_t i = 0; i < addresses->size(); ++i) {
    const ListenAddress& address = (*addresses)[i];
    if (address.is_unix) {
      absl::StatusOr<std::unique_ptr<UnixSocketFile>> file =
          UnixSocketFile::Prepare(address.path, "--listen");
      if (!file.ok()) return file.status();
      socket_files_.push_back(*std::move(file));
    }
    builder.AddListeningPort(ToText(address), *credentials, &ports[i]);
  }
  builder.RegisterService(service_.get());
  if (absl::Status status = Bind(builder, *addresses, ports); !status.ok()) return status;
  // The library announces SERVING for "" by itself: withdrawn at once, the model is not there yet.
  health_.Attach(grpc_->GetHealthCheckService());
  return absl::OkStatus();
}

absl::Status ServerImpl::Bind(grpc::ServerBuilder& builder,
                              const std::vector<ListenAddress>& addresses,
                              const std::vector<int>& ports) {
  // Nobody but this user reaches a socket file between its bind and the chmod below.
  const mode_t mask = umask(S_IRWXG | S_IRWXO);
  grpc_ = builder.BuildAndStart();
  umask(mask);
  if (grpc_ == nullptr || std::find(ports.begin(), ports.end(), 0) != ports.end()) {
    return WhyNot(addresses);
  }
  for (const auto& file : socket_files_) {
    const auto mode = static_cast<uint32_t>(std::stoul(config_.unix_socket_mode, nullptr, 8));
    if (absl::Status status = file->Bound(mode); !status.ok()) return status;
  }
  for (size_t i = ports.size(); i-- > 0;) {
    if (!addresses[i].is_unix) port_ = ports[i];
  }
  if (const int stale = segments_.RemoveLeftovers(); stale > 0) {
    Log(LogLevel::kInfo, "shared memory of a dead server removed",
        {{"segments", static_cast<int64_t>(stale)}});
  }
  return absl::OkStatus();
}

// Which of the addresses could not be had.
absl::Status ServerImpl::WhyNot(const std::vector<ListenAddress>& addresses) const {
  for (const ListenAddress& address : addresses) {
    if (address.is_unix || (address.tcp.port == 0 && grpc_ != nullptr)) continue;
    if (absl::Status why = ProbeBind(address.tcp, "--listen"); !why.ok()) return why;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--listen = ", config_.listen,
                   config_.tls_cert.empty() ? ": cannot listen"
                                            : ": cannot listen with this certificate and key"));
}

absl::Status ServerImpl::ListenHttp() {
  if (config_.metrics_listen.empty()) return absl::OkStatus();
  HttpHandlers handlers;
  handlers.metrics = [this] {
    const std::shared_ptr<engine::Engine> engine = health_.engine();
    metrics_.SetSharedMemoryBytes(segments_.live_bytes());
    return metrics_.Scrape(engine ? engine->gauges() : engine::EngineGauges{});
  };
  handlers.live = [this] { return health_.live(); };
  handlers.not_ready = [this] { return health_.NotReadyReason(); };
  absl::StatusOr<std::unique_ptr<HttpListener>> http =
      HttpListener::Start(config_.metrics_listen, std::move(handlers));
  if (!http.ok()) return http.status();
  http_ = *std::move(http);
  return absl::OkStatus();
}

// Renamed into place, so that a reader never sees half of it.
absl::Status ServerImpl::WritePortFile() const {
  if (config_.port_file.empty()) return absl::OkStatus();
  // The rename would put a file in the place of a device or a pipe: of /dev/stdout, say.
  struct stat info {};
  if (stat(config_.port_file.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--port-file = ", config_.port_file, ": is there and is no regular file"));
  }
  const std::string temporary = config_.port_file + ".tmp";
  std::ofstream file(temporary, std::ios::trunc);
  file << port_ << "\n" << http_port() << "\n";
  file.close();
  if (!file || std::rename(temporary.c_str(), config_.port_file.c_str()) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--port-file = ", config_.port_file, ": cannot be written"));
  }
  return absl::OkStatus();
}

void ServerImpl::Serve(std::shared_ptr<engine::Engine> engine) {
  // Those of a reload during the load: the engine was made with the ones read at start.
  if (absl::Status status = engine->SetLimits(limits()); !status.ok()) {
    Log(LogLevel::kError, "limits not applied, those of the start stay",
        {{"error", std::string(status.message())}});
  }
  metrics_.SetModel(engine->model_info());
  health_.SetServing(std::move(engine));
}

absl::Status ServerImpl::SetLimits(const engine::EngineLimits& limits) {
  const int64_t most =
      config_.max_prompt_tokens > 0 ? config_.max_prompt_tokens : kDefaultMaxPromptTokens;
  if (limits.max_prompt_tokens > std::max(most, kDefaultMaxPromptTokens)) {
    return absl::InvalidArgumentError(
        absl::StrCat("limits.max_prompt_tokens = ", limits.max_prompt_tokens,
                     ", wanted at most what the receive limit was sized for at start"));
  }
  if (const std::shared_ptr<engine::Engine> engine = health_.engine()) {
    if (absl::Status status = engine->SetLimits(limits); !status.ok()) return status;
  }
  std::lock_guard lock(limits_mutex_);
  limits_ = limits;
  return absl::OkStatus();
}

bool ServerImpl::Drain(nanoseconds timeout) {
  const steady_clock::time_point deadline = steady_clock::now() + timeout;
  health_.SetDraining();
  bool all = true;
  if (const std::shared_ptr<engine::Engine> engine = health_.engine()) {
    all = engine->Drain(timeout.count());
  }
  // The engine does not wait for readers: streams may still be sending.
  all = calls_.WaitIdle(deadline) && all;
  if (const std::shared_ptr<engine::Engine> engine = health_.engine();
      engine != nullptr && !engine->healthy()) {
    health_.SetFailed();
  }
  return all;
}

void ServerImpl::Shutdown(nanoseconds grace) {
  if (grpc_ != nullptr) {
    health_.Detach();
    grpc_->Shutdown(system_clock::now() +
                    std::chrono::duration_cast<system_clock::duration>(grace));
    grpc_->Wait();
    grpc_.reset();
  }
  socket_files_.clear();
  segments_.Close();
  http_.reset();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerConfig& config) {
  auto server = std::make_unique<ServerImpl>(config);
  absl::Status status = server->Listen();
  if (!status.ok()) return status;
  return server;
}

}  // namespace sparsegdn::service
