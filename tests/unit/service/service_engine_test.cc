// The service over the real engine with a runner that has no model: what only shows when both run
// together. Streams of many clients are whole and verified, cancels leak nothing, snapshots go out
// and come back in, bounds hold against readers that do not read.
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "tests/unit/engine/fake_runner.h"
#include "tests/unit/service/service_fixture.h"

namespace sparsegdn::service {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::FakeRunner;
using testing::FakeRunnerLog;
using testing::FakeRunnerOptions;

// A stream put together the way a client must: every byte once, every checksum, the digest.
struct Snapshot {
  grpc::Status status;
  v1::Manifest manifest;
  std::vector<std::string> tensors;
  v1::Result result;
  bool whole = false;
};

class ServiceEngineTest : public ::testing::Test {
 protected:
  void Start(FakeRunnerOptions options = {}, ServerConfig config = LoopbackConfig()) {
    auto server = Server::Start(config);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    auto engine_config = ToEngineConfig(config);
    ASSERT_TRUE(engine_config.ok());
    auto engine = engine::Engine::Create(
        *engine_config, std::make_unique<FakeRunner>(options, std::make_shared<FakeRunnerLog>()),
        &server_->metrics(), engine::Clock::Real());
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    server_->Serve(engine_);
    stub_ = NewStub();
  }
  void TearDown() override {
    if (server_) server_->Shutdown(std::chrono::nanoseconds(0));
  }
  std::unique_ptr<v1::PrefillService::Stub> NewStub() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    auto channel = grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(server_->port()),
                                             grpc::InsecureChannelCredentials(), arguments);
    EXPECT_TRUE(channel->WaitForConnected(std::chrono::system_clock::now() + seconds(20)));
    return v1::PrefillService::NewStub(channel);
  }
  static v1::PrefillRequest Prompt(int tokens, int seed = 0) {
    v1::PrefillRequest request;
    for (int i = 0; i < tokens; ++i) request.add_token_ids((i * 7 + seed) % 1000);
    return request;
  }
  static void SetDeadline(grpc::ClientContext& context, int ms = 20000) {
    context.set_deadline(std::chrono::system_clock::now() + milliseconds(ms));
  }
  Snapshot Run(const v1::PrefillRequest& request, v1::PrefillService::Stub* stub = nullptr);
  bool Idle() {
    const engine::EngineGauges g = engine_->gauges();
    return g.queue_requests == 0 && g.queue_tokens == 0 && g.running_requests == 0 &&
           g.buffered_bytes == 0 && g.free_slots == testing::SmallLimits().state_slots &&
           g.free_kv_tokens == testing::SmallLimits().kv_tokens;
  }

  std::unique_ptr<Server> server_;
  std::shared_ptr<engine::Engine> engine_;
  std::unique_ptr<v1::PrefillService::Stub> stub_;
};

Snapshot ServiceEngineTest::Run(const v1::PrefillRequest& request, v1::PrefillService::Stub* stub) {
  Snapshot out;
  grpc::ClientContext context;
  SetDeadline(context);
  auto reader = (stub ? stub : stub_.get())->Prefill(&context, request);
  v1::PrefillResponse event;
  std::vector<std::pair<uint32_t, v1::TensorChunk>> early;
  uint64_t bytes = 0;
  bool result = false;
  while (reader->Read(&event)) {
    if (event.has_manifest()) {
      out.manifest = event.manifest();
      for (const auto& tensor : out.manifest.tensors()) out.tensors.emplace_back(tensor.bytes(), 0);
    } else if (event.has_chunk()) {
      const v1::TensorChunk& chunk = event.chunk();
      EXPECT_EQ(XXH3_64bits(chunk.data().data(), chunk.data().size()), chunk.xxh3_64());
      out.tensors.at(chunk.tensor())
          .replace(chunk.byte_offset(), chunk.data().size(), chunk.data());
      bytes += chunk.data().size();
    } else if (event.has_result()) {
      out.result = event.result();
      result = true;
    }
  }
  out.status = reader->Finish();
  std::string hashes;
  for (const std::string& tensor : out.tensors) {
    const uint64_t hash = XXH3_64bits(tensor.data(), tensor.size());
    hashes.append(reinterpret_cast<const char*>(&hash), sizeof(hash));
  }
  out.whole = out.status.ok() && result && bytes == out.manifest.total_bytes() &&
              XXH3_64bits(hashes.data(), hashes.size()) == out.result.digest();
  return out;
}

TEST_F(ServiceEngineTest, ManyClientsGetWholeSnapshots) {
  Start();
  std::map<int, uint64_t> alone;
  for (const int tokens : {1, 63, 2048, 5000}) {
    const Snapshot snapshot = Run(Prompt(tokens));
    ASSERT_TRUE(snapshot.whole) << tokens << " " << snapshot.status.error_message();
    alone[tokens] = snapshot.result.digest();
  }
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      const auto stub = NewStub();
      const int sizes[] = {1, 63, 2048, 5000};
      for (int i = 0; i < 8; ++i) {
        const int tokens = sizes[(t + i) % 4];
        const Snapshot snapshot = Run(Prompt(tokens), stub.get());
        good += snapshot.whole && snapshot.result.digest() == alone[tokens];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 64);
  EXPECT_TRUE(Eventually([&] { return Idle(); }));
}

TEST_F(ServiceEngineTest, ACancelStormLeaksNothing) {
  FakeRunnerOptions options;
  options.ns_per_step = 200'000;
  Start(options);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto stub = NewStub();
      std::mt19937 random(static_cast<unsigned>(t));
      for (int i = 0; i < 100; ++i) {
        grpc::ClientContext context;
        SetDeadline(context, i % 3 == 0 ? 1 + int(random() % 10) : 20000);
        auto reader = stub->Prefill(&context, Prompt(1 + int(random() % 9000)));
        v1::PrefillResponse event;
        for (unsigned reads = random() % 12; reads > 0 && reader->Read(&event); --reads) {
        }
        context.TryCancel();
        while (reader->Read(&event)) {
        }
        reader->Finish();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(Eventually([&] { return Idle(); }));
  EXPECT_TRUE(Run(Prompt(3000)).whole);
}

TEST_F(ServiceEngineTest, SnapshotsLeaveAndComeBack) {
  Start();
  v1::PrefillRequest head = Prompt(3000);
  head.mutable_keep_snapshot();
  head.set_snapshot_at(v1::SNAPSHOT_AT_AFTER_LAST);
  const Snapshot first = Run(head);
  ASSERT_TRUE(first.whole) << first.status.error_message();
  ASSERT_FALSE(first.result.snapshot_id().empty());

  grpc::ClientContext context;
  SetDeadline(context);
  v1::SnapshotRef ref;
  auto writer = stub_->ImportSnapshot(&context, &ref);
  v1::SnapshotFrame frame;
  v1::Manifest* manifest = frame.mutable_header()->mutable_manifest();
  *manifest = first.manifest;
  ASSERT_TRUE(writer->Write(frame));
  for (size_t i = 0; i < first.tensors.size(); ++i) {
    v1::TensorChunk* chunk = frame.mutable_chunk();
    chunk->set_tensor(static_cast<uint32_t>(i));
    chunk->set_data(first.tensors[i]);
    chunk->set_xxh3_64(XXH3_64bits(first.tensors[i].data(), first.tensors[i].size()));
    ASSERT_TRUE(writer->Write(frame));
  }
  frame.mutable_end()->set_digest(first.result.digest());
  writer->Write(frame);
  const grpc::Status imported = writer->Finish();
  ASSERT_TRUE(imported.ok()) << imported.error_message();
  EXPECT_EQ(ref.position(), 3000);

  v1::PrefillRequest tail = Prompt(500, 3);
  tail.set_first_position(3000);
  tail.set_resume_from(first.result.snapshot_id());
  const Snapshot kept = Run(tail);
  tail.set_resume_from(ref.snapshot_id());
  const Snapshot uploaded = Run(tail);
  ASSERT_TRUE(kept.whole) << kept.status.error_message();
  ASSERT_TRUE(uploaded.whole) << uploaded.status.error_message();
  EXPECT_EQ(kept.result.digest(), uploaded.result.digest());
  EXPECT_EQ(kept.result.usage().cached_tokens(), 3000);

  for (const std::string& id : {first.result.snapshot_id(), ref.snapshot_id()}) {
    v1::ReleaseSnapshotRequest request;
    request.set_snapshot_id(id);
    v1::ReleaseSnapshotResponse response;
    grpc::ClientContext one, two;
    EXPECT_TRUE(stub_->ReleaseSnapshot(&one, request, &response).ok());
    EXPECT_EQ(stub_->ReleaseSnapshot(&two, request, &response).error_code(),
              grpc::StatusCode::NOT_FOUND);
  }
  EXPECT_EQ(Run(tail).status.error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ServiceEngineTest, RefusalsOverTheWire) {
  FakeRunnerOptions options;
  options.nan_token = 999;
  options.error_token = 998;
  ServerConfig config = LoopbackConfig();
  config.max_prompt_tokens = 20000;
  Start(options, config);
  const struct {
    const char* name;
    std::function<void(v1::PrefillRequest&)> set;
    grpc::StatusCode code;
    const char* field;
  } rows[] = {
      {"empty prompt", [](auto& r) { r.clear_token_ids(); }, grpc::INVALID_ARGUMENT, "token_ids"},
      {"negative token", [](auto& r) { r.set_token_ids(5, -1); }, grpc::INVALID_ARGUMENT,
       "token_ids[5]"},
      {"token beyond the vocabulary", [](auto& r) { r.set_token_ids(9, 1000); },
       grpc::INVALID_ARGUMENT, "token_ids[9]"},
      {"retention 0", [](auto& r) { r.mutable_budget()->set_retention(0); }, grpc::INVALID_ARGUMENT,
       "budget.retention"},
      {"retention 1.5", [](auto& r) { r.mutable_budget()->set_retention(1.5); },
       grpc::INVALID_ARGUMENT, "budget.retention"},
      {"retention NaN", [](auto& r) { r.mutable_budget()->set_retention(std::nan("")); },
       grpc::INVALID_ARGUMENT, "budget.retention"},
      {"coverage in mode dense",
       [](auto& r) {
         r.mutable_budget()->set_mode(v1::BUDGET_MODE_DENSE);
         r.mutable_budget()->set_coverage(0.5);
       },
       grpc::INVALID_ARGUMENT, "budget.coverage"},
      {"checkpoint off the window", [](auto& r) { r.mutable_outputs()->set_checkpoint_every(100); },
       grpc::INVALID_ARGUMENT, "outputs.checkpoint_every"},
      {"too long", [](auto& r) { r = Prompt(20001); }, grpc::OUT_OF_RANGE, "token_ids"},
      {"unknown snapshot", [](auto& r) { r.set_resume_from("nope"); }, grpc::NOT_FOUND,
       "resume_from"},
      {"NaN state", [](auto& r) { r.set_token_ids(0, 999); }, grpc::DATA_LOSS, ""},
      {"failed step", [](auto& r) { r.set_token_ids(0, 998); }, grpc::INTERNAL, ""},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.name);
    v1::PrefillRequest request = Prompt(10);
    row.set(request);
    const Snapshot got = Run(request);
    EXPECT_EQ(got.status.error_code(), row.code) << got.status.error_message();
    EXPECT_EQ(DetailsOf(got.status).field, row.field);
    EXPECT_TRUE(Run(Prompt(100)).whole) << "the next request must work";
  }
  EXPECT_TRUE(Eventually([&] { return Idle(); }));
}

TEST_F(ServiceEngineTest, AFullQueueSaysWhenToRetry) {
  FakeRunnerOptions options;
  options.ns_per_step = 100'000'000;
  ServerConfig config = LoopbackConfig();
  config.max_queue_requests = 2;
  Start(options, config);
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::PrefillResponse>>> readers;
  for (int i = 0; i < 12; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    SetDeadline(*contexts.back());
    readers.push_back(stub_->Prefill(contexts.back().get(), Prompt(2048)));
  }
  int refused = 0, whole = 0;
  for (auto& reader : readers) {
    v1::PrefillResponse event;
    while (reader->Read(&event)) {
    }
    const grpc::Status status = reader->Finish();
    if (status.ok()) {
      ++whole;
    } else {
      EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
      EXPECT_EQ(DetailsOf(status).reason, "QUEUE_FULL");
      EXPECT_GT(DetailsOf(status).retry_seconds, 0);
      ++refused;
    }
  }
  EXPECT_GE(refused, 1);
  EXPECT_GE(whole, 2);
}

TEST_F(ServiceEngineTest, ADeadlineInTheQueueCostsNoWork) {
  FakeRunnerOptions options;
  options.ns_per_step = 300'000'000;
  options.limits.max_batch_seqs = 1;
  options.limits.state_slots = 1;
  Start(options);
  grpc::ClientContext first, second;
  SetDeadline(first);
  auto running = stub_->Prefill(&first, Prompt(4000));
  ASSERT_TRUE(Eventually([&] { return engine_->gauges().running_requests == 1; }));
  SetDeadline(second, 100);
  auto waiting = stub_->Prefill(&second, Prompt(10));
  v1::PrefillResponse event;
  while (waiting->Read(&event)) {
  }
  EXPECT_EQ(waiting->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  while (running->Read(&event)) {
  }
  EXPECT_TRUE(running->Finish().ok());
  const auto scraped = [&](const char* line) {
    return server_->metrics().Scrape({}).find(line) != std::string::npos;
  };
  EXPECT_TRUE(Eventually([&] { return scraped("sparsegdn_expired_in_queue_total 1\n"); }));
  EXPECT_TRUE(scraped("sparsegdn_wasted_tokens_total 0\n"));
}

TEST_F(ServiceEngineTest, AReaderThatStopsIsBoundedAndCut) {
  FakeRunnerOptions options;
  // 4 x 256 x 512 floats: 2 MiB a state, 6 MiB a boundary.
  options.info.gdn = {2, 4, 256, 512};
  ServerConfig config = LoopbackConfig();
  config.slow_reader_timeout_seconds = 0.5;
  config.max_buffered_bytes_per_call = 8 << 20;
  Start(options, config);
  grpc::ClientContext context;
  SetDeadline(context);
  v1::PrefillRequest request = Prompt(40000);
  request.mutable_outputs()->set_checkpoint_every(2048);
  request.mutable_outputs()->set_kv(false);
  auto reader = stub_->Prefill(&context, request);
  int64_t most = 0;
  EXPECT_TRUE(Eventually([&] {
    most = std::max(most, engine_->gauges().buffered_bytes);
    const std::string code = "sparsegdn_requests_total{code=\"RESOURCE_EXHAUSTED\",";
    return server_->metrics().Scrape({}).find(code + "method=\"Prefill\"} 1") != code.npos;
  }));
  EXPECT_TRUE(Eventually([&] { return Idle(); }));
  EXPECT_GT(most, 0);
  EXPECT_LE(most, int64_t{32} << 20) << "of 120 MiB";
  v1::PrefillResponse event;
  while (reader->Read(&event)) EXPECT_FALSE(event.has_result());
  EXPECT_FALSE(reader->Finish().ok());
  EXPECT_TRUE(Run(Prompt(100)).whole);
}

TEST_F(ServiceEngineTest, ADrainFinishesWhatRuns) {
  FakeRunnerOptions options;
  options.ns_per_step = 50'000'000;
  Start(options);
  Snapshot snapshot;
  std::thread client([&] { snapshot = Run(Prompt(8000)); });
  ASSERT_TRUE(Eventually([&] { return engine_->gauges().running_requests == 1; }));
  EXPECT_TRUE(server_->Drain(seconds(10)));
  client.join();
  EXPECT_TRUE(snapshot.whole) << snapshot.status.error_message();
  EXPECT_EQ(Run(Prompt(1)).status.error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ServiceEngineTest, ADrainThatIsTooShortCuts) {
  FakeRunnerOptions options;
  options.ns_per_step = 200'000'000;
  Start(options);
  Snapshot snapshot;
  std::thread client([&] { snapshot = Run(Prompt(60000)); });
  ASSERT_TRUE(Eventually([&] { return engine_->gauges().running_requests == 1; }));
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(server_->Drain(milliseconds(300)));
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(2));
  client.join();
  EXPECT_FALSE(snapshot.whole);
  EXPECT_EQ(snapshot.status.error_code(), grpc::StatusCode::UNAVAILABLE)
      << snapshot.status.error_message();
}

TEST_F(ServiceEngineTest, AFatalFaultIsSeen) {
  FakeRunnerOptions options;
  options.fatal_token = 997;
  Start(options);
  v1::PrefillRequest request = Prompt(10);
  request.set_token_ids(0, 997);
  EXPECT_FALSE(Run(request).status.ok());
  EXPECT_TRUE(Eventually([&] { return !engine_->healthy(); }));
}

}  // namespace
}  // namespace sparsegdn::service
