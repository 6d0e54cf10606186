// Health, readiness, refusals while loading and draining, the other methods, listeners in use.
#include <grpcpp/impl/codegen/client_unary_call.h>
#include <httplib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <future>
#include <string>
#include <thread>

#include "server/engine/status_payload.h"
#include "tests/unit/service/service_fixture.h"

namespace sparsegdn::service {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

class LifecycleTest : public ServiceTest {
 protected:
  // grpc.health.v1: 1 SERVING, 2 NOT_SERVING, -1 an error. Written by hand, because Debian ships no
  // C++ code for health.proto.
  int HealthOf(const std::string& service) {
    std::string bytes;
    if (!service.empty()) bytes = "\x0a" + std::string(1, char(service.size())) + service;
    const grpc::Slice slice(bytes);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer reply;
    const auto context = Context();
    const grpc::internal::RpcMethod method("/grpc.health.v1.Health/Check",
                                           grpc::internal::RpcMethod::NORMAL_RPC);
    const grpc::Status status =
        grpc::internal::BlockingUnaryCall<grpc::ByteBuffer, grpc::ByteBuffer>(
            channel_.get(), method, context.get(), request, &reply);
    if (!status.ok()) return -1;
    grpc::Slice out;
    EXPECT_TRUE(reply.DumpToSingleSlice(&out).ok());
    return out.size() == 2 ? out.begin()[1] : 0;
  }
  httplib::Result Get(const char* path) {
    httplib::Client client("127.0.0.1", server_->http_port());
    client.set_connection_timeout(5);
    client.set_read_timeout(5);
    return client.Get(path);
  }
  static constexpr char kName[] = "sparsegdn.v1.PrefillService";
};

TEST_F(LifecycleTest, RefusesUntilTheModelIsLoaded) {
  Start(LoopbackConfig(), /*serve=*/false);
  EXPECT_EQ(HealthOf(""), 2);
  EXPECT_EQ(HealthOf(kName), 2);
  EXPECT_EQ(Get("/readyz")->status, 503);
  EXPECT_EQ(Get("/readyz")->body, "loading\n");
  EXPECT_EQ(Get("/livez")->status, 200);
  EXPECT_NE(Get("/metrics")->body.find("sparsegdn_ready 0"), std::string::npos);

  const auto check = [](const grpc::Status& status) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
    EXPECT_EQ(DetailsOf(status).reason, "MODEL_LOADING");
    EXPECT_EQ(DetailsOf(status).retry_seconds, 1.0);
  };
  check(Prefill(Request()).status);
  v1::SnapshotRef ref;
  v1::SnapshotFrame header;
  header.mutable_header();
  check(Import({header}, &ref));
  v1::ModelInfo info;
  check(stub_->GetModelInfo(Context().get(), {}, &info));
  v1::ReleaseSnapshotResponse released;
  check(stub_->ReleaseSnapshot(Context().get(), {}, &released));

  server_->Serve(engine_);
  EXPECT_EQ(HealthOf(""), 1);
  EXPECT_EQ(HealthOf(kName), 1);
  EXPECT_EQ(HealthOf("no.such.Service"), -1);
  EXPECT_EQ(Get("/readyz")->status, 200);
  EXPECT_TRUE(Prefill(Request()).status.ok());
}

TEST_F(LifecycleTest, AStopDuringTheLoadStays) {
  Start(LoopbackConfig(), /*serve=*/false);
  EXPECT_TRUE(server_->Drain(milliseconds(100)));
  server_->Serve(engine_);  // the loader finishes late
  EXPECT_EQ(HealthOf(kName), 2);
  EXPECT_EQ(DetailsOf(Prefill(Request()).status).reason, "DRAINING");
}

TEST_F(LifecycleTest, ADrainCoversAStreamThatIsStillSending) {
  auto call = WholeCall(32, 1 << 20);
  engine_->on_submit = [&](const auto&) { return call; };
  const auto context = Context();
  auto reader = stub_->Prefill(context.get(), Request());
  v1::PrefillResponse event;
  ASSERT_TRUE(reader->Read(&event));
  auto drained = std::async(std::launch::async, [&] { return server_->Drain(seconds(8)); });
  ASSERT_TRUE(Eventually([&] { return server_->health().phase() == Health::Phase::kDraining; }));
  EXPECT_EQ(HealthOf(kName), 2);
  EXPECT_EQ(Get("/readyz")->body, "draining\n");
  EXPECT_EQ(Get("/livez")->status, 200);
  const Reply refused = Prefill(Request());
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(DetailsOf(refused.status).reason, "DRAINING");
  EXPECT_GT(DetailsOf(refused.status).retry_seconds, 0);
  EXPECT_EQ(drained.wait_for(milliseconds(100)), std::future_status::timeout);
  int frames = 0;
  while (reader->Read(&event)) frames += event.has_chunk();
  EXPECT_EQ(frames, 32);
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_TRUE(drained.get());
}

TEST_F(LifecycleTest, ADrainEndsWithItsTime) {
  auto call = WholeCall(32, 1 << 20);
  engine_->on_submit = [&](const auto&) { return call; };
  const auto context = Context();
  auto reader = stub_->Prefill(context.get(), Request());
  ASSERT_TRUE(Eventually([&] { return !engine_->requests().empty(); }));
  const auto start = steady_clock::now();
  EXPECT_FALSE(server_->Drain(milliseconds(200)));
  EXPECT_LT(steady_clock::now() - start, seconds(2));
  server_->Shutdown(milliseconds(100));
  EXPECT_LT(steady_clock::now() - start, seconds(4));
  v1::PrefillResponse event;
  while (reader->Read(&event)) EXPECT_FALSE(event.has_result());
  EXPECT_FALSE(reader->Finish().ok());
}

TEST_F(LifecycleTest, ADeviceFaultDuringTheDrainShows) {
  EXPECT_TRUE(server_->Drain(milliseconds(100)));
  EXPECT_TRUE(server_->health().live());
  engine_->on_drain = [this](int64_t) {
    engine_->healthy_now = false;
    return false;
  };
  EXPECT_FALSE(server_->Drain(milliseconds(100)));
  EXPECT_FALSE(server_->health().live());  // by which main chooses the exit code
}

TEST_F(LifecycleTest, ADeviceFaultFailsLiveness) {
  server_->health().SetFailed();
  EXPECT_EQ(HealthOf(""), 2);
  EXPECT_EQ(Get("/livez")->status, 503);
  EXPECT_EQ(Get("/readyz")->status, 503);
  EXPECT_EQ(DetailsOf(Prefill(Request()).status).reason, "DEVICE_FAULT");
  server_->health().SetDraining();  // does not hide the fault
  EXPECT_EQ(Get("/livez")->status, 503);
}

TEST_F(LifecycleTest, ModelInfoIsComplete) {
  v1::ModelInfo info;
  ASSERT_TRUE(stub_->GetModelInfo(Context().get(), {}, &info).ok());
  EXPECT_EQ(info.model_identity(), std::string(64, 'a'));
  EXPECT_EQ(info.model_name(), "fake");
  EXPECT_EQ(info.server_version(), kServerVersion);
  EXPECT_EQ(info.layers_size(), 2);
  EXPECT_EQ(info.layers(1), v1::LAYER_KIND_FULL_ATTENTION);
  EXPECT_EQ(info.window(), 2048u);
  EXPECT_EQ(info.chunk_tokens(), 2048);
  EXPECT_EQ(info.head_dim_v(), 64u);
  EXPECT_EQ(info.state_dtypes_size(), 3);
  EXPECT_EQ(info.default_budget().mode(), v1::BUDGET_MODE_RETENTION);
  EXPECT_EQ(info.default_budget().retention(), 0.29);
  EXPECT_EQ(info.default_budget().solver(), v1::SOLVER_AUTO);
  EXPECT_EQ(info.default_budget().local(), v1::LOCAL_TERM_SELF);
  EXPECT_FALSE(info.default_budget().has_coverage());
  EXPECT_EQ(info.limits().max_context_tokens(), 32768);
  EXPECT_EQ(info.limits().max_queue_requests(), 256u);
}

TEST_F(LifecycleTest, LimitsReachEngineAndModelInfo) {
  engine::EngineLimits limits;
  limits.max_queue_requests = 3;
  limits.max_prompt_tokens = 1000;
  ASSERT_TRUE(server_->SetLimits(limits).ok());
  EXPECT_EQ(engine_->limits().max_queue_requests, 3u);
  v1::ModelInfo info;
  ASSERT_TRUE(stub_->GetModelInfo(Context().get(), {}, &info).ok());
  EXPECT_EQ(info.limits().max_queue_requests(), 3u);
  EXPECT_EQ(info.limits().max_context_tokens(), 1000);
  limits.max_prompt_tokens = (1 << 20) + 1;  // could not be received
  EXPECT_TRUE(absl::IsInvalidArgument(server_->SetLimits(limits)));
  EXPECT_EQ(engine_->limits().max_prompt_tokens, 1000);
}

TEST_F(LifecycleTest, LimitsSetDuringTheLoadReachTheEngine) {
  Start(LoopbackConfig(), /*serve=*/false);
  engine::EngineLimits limits;
  limits.max_queue_requests = 3;
  ASSERT_TRUE(server_->SetLimits(limits).ok());
  server_->Serve(engine_);
  EXPECT_EQ(engine_->limits().max_queue_requests, 3u);
}

TEST_F(LifecycleTest, ReleaseSnapshot) {
  v1::ReleaseSnapshotRequest request;
  v1::ReleaseSnapshotResponse response;
  EXPECT_EQ(stub_->ReleaseSnapshot(Context().get(), request, &response).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  request.set_snapshot_id("s1");
  request.set_tenant("t1");
  EXPECT_TRUE(stub_->ReleaseSnapshot(Context().get(), request, &response).ok());
  EXPECT_EQ(engine_->releases().at(0), std::make_pair(std::string("s1"), std::string("t1")));
  engine_->release = engine::WithDetails(absl::NotFoundError("snapshot_id = s1, not held"),
                                         {"snapshot_id", "SNAPSHOT_NOT_FOUND", {}});
  const grpc::Status status = stub_->ReleaseSnapshot(Context().get(), request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(DetailsOf(status).field, "snapshot_id");
}

TEST_F(LifecycleTest, BytesThatAreNoMessageAreNamed) {
  for (const char* name : {"ReleaseSnapshot", "GetModelInfo", "ImportSnapshot"}) {
    const grpc::Slice slice(std::string("\x0a\xff\xff\xff\xff\x7f garbage"));
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer reply;
    const auto context = Context();
    const std::string path = std::string("/sparsegdn.v1.PrefillService/") + name;
    const grpc::internal::RpcMethod method(path.c_str(), grpc::internal::RpcMethod::NORMAL_RPC);
    const grpc::Status status =
        grpc::internal::BlockingUnaryCall<grpc::ByteBuffer, grpc::ByteBuffer>(
            channel_.get(), method, context.get(), request, &reply);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << name;
    EXPECT_EQ(DetailsOf(status).reason, "MALFORMED_MESSAGE") << name;
    EXPECT_NE(status.error_message().find("the message is not a "), std::string::npos) << name;
  }
  v1::ModelInfo info;
  EXPECT_TRUE(stub_->GetModelInfo(Context().get(), {}, &info).ok());
}

TEST_F(LifecycleTest, AListenerInUseIsAClearError) {
  ServerConfig config = LoopbackConfig();
  config.listen = "127.0.0.1:" + std::to_string(server_->port());
  absl::StatusOr<std::unique_ptr<Server>> second = Server::Start(config);
  EXPECT_TRUE(absl::IsAlreadyExists(second.status())) << second.status();
  EXPECT_NE(second.status().ToString().find("--listen = " + config.listen), std::string::npos);

  config = LoopbackConfig();
  config.metrics_listen = "127.0.0.1:" + std::to_string(server_->http_port());
  second = Server::Start(config);
  EXPECT_TRUE(absl::IsAlreadyExists(second.status())) << second.status();
  EXPECT_NE(second.status().ToString().find("--metrics-listen = "), std::string::npos);
}

TEST_F(LifecycleTest, AddressesThatAreNone) {
  for (const char* address : {"50051", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", "::1:80",
                              "no-such-host.invalid:0"}) {
    ServerConfig config = LoopbackConfig();
    config.listen = address;
    EXPECT_TRUE(absl::IsInvalidArgument(Server::Start(config).status())) << address;
    config = LoopbackConfig();
    config.metrics_listen = address;
    EXPECT_TRUE(absl::IsInvalidArgument(Server::Start(config).status())) << address;
  }
}

TEST_F(LifecycleTest, ThePortFileHoldsBothPorts) {
  ServerConfig config = LoopbackConfig();
  config.port_file = ::testing::TempDir() + "/ports-" + std::to_string(getpid());
  Start(config);
  std::ifstream file(config.port_file);
  int grpc_port = 0, http_port = 0;
  file >> grpc_port >> http_port;
  EXPECT_EQ(grpc_port, server_->port());
  EXPECT_EQ(http_port, server_->http_port());
  config.port_file = "/nonexistent-folder/ports";
  EXPECT_TRUE(absl::IsInvalidArgument(Server::Start(config).status()));
  // A pipe, or a device, is not replaced by a file.
  config.port_file = ::testing::TempDir() + "/pipe-" + std::to_string(getpid());
  ASSERT_EQ(mkfifo(config.port_file.c_str(), 0600), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(Server::Start(config).status()));
  EXPECT_EQ(unlink(config.port_file.c_str()), 0);
}

TEST_F(LifecycleTest, ScrapesGoOnBesideHalfOpenConnections) {
  std::vector<std::unique_ptr<httplib::Client>> clients;
  std::vector<std::thread> threads;
  std::vector<int> sockets;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(server_->http_port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  for (int i = 0; i < 3; ++i) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(write(fd, "GET /met", 8), 8);
    sockets.push_back(fd);
  }
  const auto start = steady_clock::now();
  const httplib::Result result = Get("/metrics");
  EXPECT_TRUE(result && result->status == 200);
  EXPECT_LT(steady_clock::now() - start, seconds(1));
  EXPECT_EQ(Get("/other")->status, 404);
  for (const int fd : sockets) close(fd);
}

// Each byte comes before a timeout on reads would pass: what ends such a connection is its age.
TEST_F(LifecycleTest, ClientsThatDripHoldNeitherProbesNorTheStop) {
  constexpr int kClients = 24;  // more than there are threads
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(server_->http_port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::vector<int> sockets;
  for (int i = 0; i < kClients; ++i) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(send(fd, "GET /livez HTTP/1.1\r\nX: ", 24, MSG_NOSIGNAL), 24);
    sockets.push_back(fd);
  }
  std::atomic<bool> enough{false};
  std::thread drip([&] {
    while (!enough) {
      for (const int fd : sockets) (void)send(fd, "a", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
      std::this_thread::sleep_for(milliseconds(100));
    }
  });
  httplib::Client client("127.0.0.1", server_->http_port());
  client.set_read_timeout(20);
  const httplib::Result live = client.Get("/livez");
  EXPECT_TRUE(live && live->status == 200);
  // New ones, which a stop must not wait for either.
  for (int& fd : sockets) {
    close(fd);
    fd = socket(AF_INET, SOCK_STREAM, 0);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(send(fd, "GET /livez HTTP/1.1\r\nX: ", 24, MSG_NOSIGNAL), 24);
  }
  const auto start = steady_clock::now();
  server_->Shutdown(std::chrono::nanoseconds(0));
  server_.reset();
  EXPECT_LT(steady_clock::now() - start, seconds(2));
  enough = true;
  drip.join();
  for (const int fd : sockets) close(fd);
}

}  // namespace
}  // namespace sparsegdn::service
