// How fast Prefill streams a snapshot, against a bare gRPC loop that writes the same frames.
//
// Goal: at least 70 % of the bare loop. Method: one process, two servers on loopback: ours with a
// scripted engine whose frames are ready, and a synchronous service of the same proto that only
// calls Write on prepared messages. The same client code reads both, alternating, `rounds` times;
// the median of each is compared. What every frame holds is checked once before timing.
//
// usage: sparsegdn-service-bench [frames] [frame_bytes] [rounds]; prints JSON.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "server/service/server.h"
#include "sparsegdn/v1/prefill.grpc.pb.h"
#include "tests/unit/service/fake_engine.h"

namespace sparsegdn::service {
namespace {

struct Load {
  int frames = 256;
  size_t frame_bytes = 1 << 20;
  int rounds = 7;
};

// The bare loop: messages made once, then written.
class BareService final : public v1::PrefillService::Service {
 public:
  explicit BareService(const Load& load) {
    for (int i = 0; i < load.frames; ++i) {
      v1::TensorChunk* chunk = messages_.emplace_back().mutable_chunk();
      chunk->set_byte_offset(static_cast<uint64_t>(i) * load.frame_bytes);
      chunk->set_xxh3_64(0x1122334455667788u);
      chunk->set_data(std::string(load.frame_bytes, static_cast<char>('a' + i % 26)));
    }
  }
  grpc::Status Prefill(grpc::ServerContext*, const v1::PrefillRequest*,
                       grpc::ServerWriter<v1::PrefillResponse>* writer) override {
    for (const v1::PrefillResponse& message : messages_) {
      if (!writer->Write(message)) break;
    }
    return grpc::Status::OK;
  }

 private:
  std::vector<v1::PrefillResponse> messages_;
};

std::unique_ptr<v1::PrefillService::Stub> StubFor(int port) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return v1::PrefillService::NewStub(grpc::CreateCustomChannel(
      "127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials(), arguments));
}

// Seconds for one stream, or a negative number when it is not the one expected.
double ReadAll(v1::PrefillService::Stub& stub, const Load& load, bool check) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  v1::PrefillRequest request;
  request.add_token_ids(1);
  const auto start = std::chrono::steady_clock::now();
  auto reader = stub.Prefill(&context, request);
  v1::PrefillResponse event;
  int frames = 0;
  bool good = true;
  while (reader->Read(&event)) {
    if (!event.has_chunk()) continue;
    const std::string& data = event.chunk().data();
    good = good && data.size() == load.frame_bytes;
    if (check) good = good && data == std::string(load.frame_bytes, char('a' + frames % 26));
    ++frames;
  }
  const bool ok = reader->Finish().ok();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return ok && good && frames == load.frames ? seconds : -1;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int Main(const Load& load) {
  ServerConfig config;
  config.listen = "127.0.0.1:0";
  config.metrics_listen = "";
  auto server = Server::Start(config);
  if (!server.ok()) return 1;
  auto engine = std::make_shared<FakeEngine>();
  std::vector<engine::TensorChunk> chunks;
  for (int i = 0; i < load.frames; ++i) {
    chunks.push_back(MakeChunk(0, static_cast<uint64_t>(i) * load.frame_bytes,
                               std::string(load.frame_bytes, static_cast<char>('a' + i % 26))));
  }
  engine->on_submit = [&](const engine::PrefillRequest&) {
    auto call = std::make_shared<FakeCall>();
    for (const engine::TensorChunk& chunk : chunks) call->Push(chunk);
    call->Push(MakeResult());
    call->Close(absl::OkStatus());
    return call;
  };
  (*server)->Serve(engine);
  BareService bare(load);
  grpc::ServerBuilder builder;
  int bare_port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &bare_port);
  builder.RegisterService(&bare);
  const std::unique_ptr<grpc::Server> bare_server = builder.BuildAndStart();
  auto ours_stub = StubFor((*server)->port()), bare_stub = StubFor(bare_port);
  if (ReadAll(*ours_stub, load, true) < 0 || ReadAll(*bare_stub, load, true) < 0) return 1;
  std::vector<double> ours, theirs;
  for (int round = 0; round < load.rounds; ++round) {
    ours.push_back(ReadAll(*ours_stub, load, false));
    theirs.push_back(ReadAll(*bare_stub, load, false));
    if (ours.back() < 0 || theirs.back() < 0) return 1;
  }
  const double bytes = static_cast<double>(load.frames) * static_cast<double>(load.frame_bytes);
  const double ours_rate = bytes / Median(ours) * 1e-9, bare_rate = bytes / Median(theirs) * 1e-9;
  std::printf(
      "{\"frames\": %d, \"frame_bytes\": %zu, \"rounds\": %d, \"service_gb_per_s\": %.3f, "
      "\"bare_grpc_gb_per_s\": %.3f, \"ratio\": %.3f, \"goal\": 0.70}\n",
      load.frames, load.frame_bytes, load.rounds, ours_rate, bare_rate, ours_rate / bare_rate);
  (*server)->Shutdown(std::chrono::milliseconds(100));
  bare_server->Shutdown(std::chrono::system_clock::now());
  return 0;
}

}  // namespace
}  // namespace sparsegdn::service

int main(int argc, char** argv) {
  sparsegdn::service::Load load;
  if (argc > 1) load.frames = std::max(1, std::atoi(argv[1]));
  if (argc > 2) load.frame_bytes = static_cast<size_t>(std::max(1, std::atoi(argv[2])));
  if (argc > 3) load.rounds = std::max(1, std::atoi(argv[3]));
  return sparsegdn::service::Main(load);
}
