// Shared-memory hand-off between a server with a scripted engine and the C++ client: the same bytes
// as on the stream, offered on Unix sockets alone, refused when there is no room, gone with its
// call.
#include <unistd.h>
#include <xxhash.h>

#include <filesystem>

#include "sparsegdn/client/client.h"
#include "tests/unit/service/service_fixture.h"

namespace sparsegdn::service {
namespace {

constexpr int kTensors = 3;

std::string BytesOf(int tensor) {
  std::string bytes(4 * (5000 + 777 * tensor), '\0');
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<char>((i * 31 + static_cast<size_t>(tensor)) >> 3);
  }
  return bytes;
}

uint64_t Hash(const std::string& bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

// A whole stream in chunks of 3,000 bytes, tensors mixed; one chunk with a wrong checksum, if
// asked.
std::shared_ptr<FakeCall> Call(bool corrupt = false, bool end = true) {
  auto call = std::make_shared<FakeCall>();
  auto manifest = std::make_shared<engine::Manifest>();
  std::string hashes;
  for (int i = 0; i < kTensors; ++i) {
    const std::string bytes = BytesOf(i);
    engine::TensorInfo info;
    info.name = "layers." + std::to_string(i) + ".recurrent_state";
    info.layer = i;
    info.shape = {1, 1, static_cast<int64_t>(bytes.size() / 4)};
    info.bytes = bytes.size();
    manifest->total_bytes += bytes.size();
    manifest->tensors.push_back(info);
    const uint64_t hash = Hash(bytes);
    hashes.append(reinterpret_cast<const char*>(&hash), 8);
  }
  call->Push(engine::Accepted{});
  call->Push(std::shared_ptr<const engine::Manifest>(manifest));
  for (size_t at = 0; at < 30000; at += 3000) {
    for (int i = 0; i < kTensors; ++i) {
      const std::string bytes = BytesOf(i);
      if (at >= bytes.size()) continue;
      engine::TensorChunk chunk = MakeChunk(static_cast<uint32_t>(i), at, bytes.substr(at, 3000));
      chunk.xxh3_64 = Hash(*chunk.data) + (corrupt && at == 6000 && i == 1);
      call->Push(chunk);
      if (at == 12000) call->Push(engine::Progress{1, 2});
    }
  }
  if (!end) return call;
  engine::Result result = MakeResult();
  result.digest = Hash(hashes);
  call->Push(result);
  call->Close(absl::OkStatus());
  return call;
}

bool NameExists(const std::string& name) { return access(("/dev/shm" + name).c_str(), F_OK) == 0; }

class HandOffTest : public ServiceTest {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "/hand-" + std::to_string(getpid());
    std::filesystem::create_directory(folder_);
    StartWith({});
  }
  void TearDown() override {
    ServiceTest::TearDown();
    std::filesystem::remove_all(folder_);
  }
  void StartWith(ServerConfig config) {
    config.metrics_listen = "";
    config.listen = "127.0.0.1:0,unix:" + folder_ + "/g.sock";
    Start(config);
    engine_->on_submit = [](const auto&) { return Call(); };
  }
  std::string Socket() const { return "unix:" + folder_ + "/g.sock"; }
  std::string Tcp() const { return "127.0.0.1:" + std::to_string(server_->port()); }
  std::unique_ptr<client::Client> Connect(const std::string& target, bool shared) {
    client::ConnectOptions options;
    options.target = target;
    options.shared_memory = shared;
    return client::Client::Connect(options).value();
  }
  absl::StatusOr<client::PrefillOutcome> Run(client::Client& client,
                                             client::CallOptions options = {}) {
    options.timeout = absl::Seconds(20);
    return client.Prefill(Request(), options);
  }
  // The answers of a call that asks, as they are on the wire.
  void Stub(const std::string& target) {
    stub_ = v1::PrefillService::NewStub(
        grpc::CreateChannel(target, grpc::InsecureChannelCredentials()));
  }
  Reply Raw(const std::string& target, bool ask = true) {
    Stub(target);
    v1::PrefillRequest request = Request();
    request.set_shared_memory(ask);
    return Prefill(request);
  }
  static void ExpectWhole(const absl::StatusOr<client::PrefillOutcome>& outcome) {
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    ASSERT_EQ(outcome->snapshot.size(), kTensors);
    for (int i = 0; i < kTensors; ++i) {
      const auto data = outcome->snapshot.data(i);
      EXPECT_EQ(std::string(data.begin(), data.end()), BytesOf(i));
    }
    EXPECT_FALSE(outcome->snapshot.manifest().has_shared_memory());
  }
  double Given() { return Sample("sparsegdn_shared_memory_calls_total{outcome=\"given\"}"); }
  double Refused() { return Sample("sparsegdn_shared_memory_calls_total{outcome=\"refused\"}"); }
  std::string folder_, name_;
};

TEST_F(HandOffTest, GivesTheSameBytesAsTheStream) {
  const auto shared = Connect(Socket(), true), plain = Connect(Socket(), false);
  ExpectWhole(Run(*plain));
  EXPECT_EQ(Given(), 0);
  for (int i = 0; i < 3; ++i) {
    const auto outcome = Run(*shared);
    ExpectWhole(outcome);
    EXPECT_EQ(Given(), i + 1);
  }
}

TEST_F(HandOffTest, TheSnapshotOutlivesNameAndServer) {
  const auto outcome = Run(*Connect(Socket(), true));
  server_->Shutdown(std::chrono::nanoseconds(0));
  ExpectWhole(outcome);
}

TEST_F(HandOffTest, IsOfferedToThoseThatAskOnUnixSocketsAlone) {
  const struct {
    const char* name;
    std::string target;
    bool ask, offered;
  } rows[] = {{"unix, asked", Socket(), true, true},
              {"unix, not asked", Socket(), false, false},
              {"TCP, asked", Tcp(), true, false},
              {"TCP, not asked", Tcp(), false, false}};
  for (const auto& row : rows) {
    SCOPED_TRACE(row.name);
    const Reply reply = Raw(row.target, row.ask);
    ASSERT_TRUE(reply.status.ok()) << reply.status.error_message();
    bool offered = false, in_chunks = false;
    for (const v1::PrefillResponse& event : reply.events) {
      offered = offered || event.manifest().has_shared_memory();
      in_chunks = in_chunks || event.has_chunk();
    }
    EXPECT_EQ(offered, row.offered);
    EXPECT_EQ(in_chunks, !row.offered);
  }
  ExpectWhole(Run(*Connect(Tcp(), true)));
}

TEST_F(HandOffTest, StreamsWhenThereIsNoRoom) {
  for (const int64_t bytes : {int64_t{0}, int64_t{1000}}) {
    ServerConfig config;
    config.shared_memory_bytes = bytes;
    StartWith(config);
    ExpectWhole(Run(*Connect(Socket(), true)));
    EXPECT_EQ(Refused(), 1);
    EXPECT_EQ(Given(), 0);
  }
}

TEST_F(HandOffTest, AWrongByteFailsTheCall) {
  engine_->on_submit = [](const auto&) { return Call(/*corrupt=*/true); };
  const auto outcome = Run(*Connect(Socket(), true));
  EXPECT_TRUE(absl::IsDataLoss(outcome.status())) << outcome.status();
  EXPECT_EQ(client::DetailsOf(outcome.status()).reason, "CHUNK_HASH");
}

TEST_F(HandOffTest, TheNameGoesWithACallThatFailsOrIsCancelled) {
  for (const bool cancel : {false, true}) {
    std::shared_ptr<FakeCall> call = Call(false, /*end=*/false);
    engine_->on_submit = [&](const auto&) { return call; };
    Stub(Socket());
    v1::PrefillRequest request = Request();
    request.set_shared_memory(true);
    const auto context = Context();
    auto reader = stub_->Prefill(context.get(), request);
    v1::PrefillResponse event;
    while (!event.has_shared_chunks() && reader->Read(&event)) {
      if (event.has_manifest()) name_ = event.manifest().shared_memory().name();
    }
    ASSERT_TRUE(event.has_shared_chunks());
    EXPECT_TRUE(NameExists(name_)) << name_;
    if (cancel) {
      context->TryCancel();
    } else {
      call->Close(absl::DataLossError("a state is not finite"));
    }
    while (reader->Read(&event)) {
    }
    EXPECT_FALSE(reader->Finish().ok());
    EXPECT_TRUE(Eventually([&] { return !NameExists(name_); }));
  }
}

TEST_F(HandOffTest, TheNameOfACallThatEndedWellStaysForTheDelay) {
  ServerConfig config;
  config.shared_memory_linger_seconds = 1;
  StartWith(config);
  const Reply reply = Raw(Socket());
  const auto end = std::chrono::steady_clock::now();
  ASSERT_TRUE(reply.status.ok());
  for (const v1::PrefillResponse& event : reply.events) {
    if (event.has_manifest()) name_ = event.manifest().shared_memory().name();
  }
  EXPECT_TRUE(NameExists(name_));
  EXPECT_TRUE(Eventually([&] { return !NameExists(name_); }));
  EXPECT_GT(std::chrono::steady_clock::now() - end, std::chrono::milliseconds(700));
}

TEST_F(HandOffTest, AClientThatCannotMapRepeatsTheCallWithout) {
  // As when the two see another /dev/shm each.
  ServerConfig config;
  config.shared_memory_folder = folder_;
  StartWith(config);
  const auto client = Connect(Socket(), true);
  ExpectWhole(Run(*client));
  EXPECT_EQ(engine_->requests().size(), 2u);
  EXPECT_EQ(Given(), 1);
  ExpectWhole(Run(*client));  // and does not ask again
  EXPECT_EQ(engine_->requests().size(), 3u);
  EXPECT_EQ(Given(), 1);
}

}  // namespace
}  // namespace sparsegdn::service
