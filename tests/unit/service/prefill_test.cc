// The Prefill method over loopback with a scripted engine: order and content of the stream, every
// error code, refusals before any work, cancellation, deadlines, slow and absent readers.
#include <grpcpp/generic/generic_stub.h>

#include <chrono>
#include <string>
#include <thread>

#include "server/engine/status_payload.h"
#include "tests/unit/service/service_fixture.h"

namespace sparsegdn::service {
namespace {

using engine::StatusDetails;
using engine::WithDetails;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

TEST_F(ServiceTest, StreamsTheWholeCallInOrder) {
  const auto context = Context();
  const std::string traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
  context->AddMetadata("traceparent", traceparent);
  const Reply reply = Prefill(Request(), context.get());
  ASSERT_TRUE(reply.status.ok()) << reply.status.error_message();
  ASSERT_EQ(reply.events.size(), 6u);
  EXPECT_EQ(reply.events[0].accepted().queue_position(), 3u);
  EXPECT_EQ(reply.events[0].accepted().queued_tokens(), 4096);
  EXPECT_EQ(reply.events[1].progress().tokens_done(), 50);
  EXPECT_EQ(reply.events[2].manifest().tensors(0).name(), "state.0");
  for (int i = 0; i < 2; ++i) {
    const v1::TensorChunk& chunk = reply.events[3 + i].chunk();
    EXPECT_EQ(chunk.byte_offset(), i * 1024u);
    EXPECT_EQ(chunk.data(), std::string(1024, 'a' + i));
    EXPECT_EQ(chunk.xxh3_64(), 0x1122334455667788u);
  }
  const v1::Result& result = reply.events[5].result();
  EXPECT_EQ(result.digest(), 0xfedcba9876543210u);
  EXPECT_EQ(result.traceparent(), traceparent);
  EXPECT_EQ(result.next_token(), 7);
  EXPECT_EQ(result.effective_budget().retention(), 0.29);
  EXPECT_EQ(result.retained(1).layer(), 2);
  EXPECT_EQ(Sample("sparsegdn_requests_total{code=\"OK\",method=\"Prefill\"}"), 1);
  EXPECT_EQ(Sample("sparsegdn_snapshot_stream_seconds_count"), 1);
}

TEST_F(ServiceTest, EveryEngineErrorKeepsItsCodeAndDetails) {
  const struct {
    absl::StatusCode code;
    StatusDetails details;
  } rows[] = {
      {absl::StatusCode::kInvalidArgument, {"token_ids[17]", "TOKEN_OUT_OF_RANGE", {}}},
      {absl::StatusCode::kOutOfRange, {"token_ids", "PROMPT_TOO_LONG", {}}},
      {absl::StatusCode::kFailedPrecondition, {"first_position", "POSITION_MISMATCH", {}}},
      {absl::StatusCode::kNotFound, {"resume_from", "SNAPSHOT_NOT_FOUND", {}}},
      {absl::StatusCode::kResourceExhausted, {"", "QUEUE_FULL", 1500}},
      {absl::StatusCode::kResourceExhausted, {"", "NEVER_FITS", {}}},
      {absl::StatusCode::kUnavailable, {"", "DRAINING", 250}},
      {absl::StatusCode::kDeadlineExceeded, {"", "DEADLINE_IN_QUEUE", {}}},
      {absl::StatusCode::kDataLoss, {"", "NON_FINITE_STATE", {}}},
      {absl::StatusCode::kInternal, {"", "BUG", {}}},
      {absl::StatusCode::kCancelled, {}},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.details.reason);
    const absl::Status refusal =
        WithDetails(absl::Status(row.code, "field = got, wanted"), row.details);
    for (const bool in_stream : {false, true}) {
      engine_->on_submit = [&](const engine::PrefillRequest&)
          -> absl::StatusOr<std::shared_ptr<engine::PrefillCall>> {
        if (!in_stream) return refusal;
        auto call = std::make_shared<FakeCall>();
        call->Push(engine::Accepted{});
        call->Push(engine::Progress{1, 2});
        std::thread([call, refusal] { call->Close(refusal); }).detach();
        return std::shared_ptr<engine::PrefillCall>(call);
      };
      const Reply reply = Prefill(Request());
      EXPECT_EQ(static_cast<int>(reply.status.error_code()), static_cast<int>(row.code));
      EXPECT_EQ(reply.status.error_message(), "field = got, wanted");
      for (const auto& event : reply.events) EXPECT_FALSE(event.has_result());
      const Details details = DetailsOf(reply.status);
      EXPECT_EQ(details.reason, row.details.reason);
      EXPECT_EQ(details.field, row.details.field);
      EXPECT_EQ(details.has_bad_request, !row.details.field.empty());
      EXPECT_EQ(details.retry_seconds,
                row.details.retry_after_ms ? double(*row.details.retry_after_ms) / 1000 : -1);
    }
  }
  EXPECT_EQ(Sample("sparsegdn_requests_total{code=\"RESOURCE_EXHAUSTED\",method=\"Prefill\"}"), 4);
}

TEST_F(ServiceTest, MalformedFieldsAreRefusedBeforeTheEngine) {
  struct Row {
    const char* field;
    std::function<void(v1::PrefillRequest&)> set;
  };
  const std::vector<Row> rows = {
      {"budget.mode", [](auto& r) { r.mutable_budget()->set_mode(v1::BudgetMode(4)); }},
      {"budget.mode", [](auto& r) { r.mutable_budget()->set_mode(v1::BudgetMode(-1)); }},
      {"budget.selector", [](auto& r) { r.mutable_budget()->set_selector(v1::Selector(3)); }},
      {"budget.solver", [](auto& r) { r.mutable_budget()->set_solver(v1::Solver(4)); }},
      {"budget.local", [](auto& r) { r.mutable_budget()->set_local(v1::LocalTerm(3)); }},
      {"snapshot_at", [](auto& r) { r.set_snapshot_at(v1::SnapshotAt(3)); }},
      {"outputs.state_dtype", [](auto& r) { r.mutable_outputs()->set_state_dtype(v1::DType(5)); }},
      {"outputs.kv_dtype", [](auto& r) { r.mutable_outputs()->set_kv_dtype(v1::DType(99)); }},
      {"outputs.state_layout",
       [](auto& r) { r.mutable_outputs()->set_state_layout(v1::StateLayout(3)); }},
      {"outputs.conv_layout",
       [](auto& r) { r.mutable_outputs()->set_conv_layout(v1::ConvLayout(3)); }},
      {"tenant", [](auto& r) { r.set_tenant(std::string(257, 't')); }},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.field);
    v1::PrefillRequest request = Request();
    row.set(request);
    const Reply reply = Prefill(request);
    EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_NE(reply.status.error_message().find(row.field), std::string::npos)
        << reply.status.error_message();
    EXPECT_EQ(DetailsOf(reply.status).field, row.field);
  }
  EXPECT_TRUE(engine_->requests().empty());
  EXPECT_TRUE(Prefill(Request()).status.ok());
}

TEST_F(ServiceTest, AnotherModelIsRefusedBeforeAnyWork) {
  const struct {
    const char* field;
    v1::WorkerIdentity worker;
  } rows[] = {
      {"worker.model_identity",
       [] {
         v1::WorkerIdentity w;
         w.set_model_identity("b");
         return w;
       }()},
      {"worker.vocab_size",
       [] {
         v1::WorkerIdentity w;
         w.set_vocab_size(513);
         return w;
       }()},
      {"worker.format_version",
       [] {
         v1::WorkerIdentity w;
         w.set_format_version(2);
         return w;
       }()},
  };
  for (const auto& row : rows) {
    v1::PrefillRequest request = Request();
    *request.mutable_worker() = row.worker;
    const Reply reply = Prefill(request);
    EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << row.field;
    EXPECT_EQ(DetailsOf(reply.status).field, row.field);
  }
  EXPECT_TRUE(engine_->requests().empty());
  v1::PrefillRequest request = Request();
  request.mutable_worker()->set_model_identity(std::string(64, 'a'));
  request.mutable_worker()->set_vocab_size(512);
  request.mutable_worker()->set_format_version(1);
  EXPECT_TRUE(Prefill(request).status.ok());
}

TEST_F(ServiceTest, BytesThatAreNoRequestAreInvalid) {
  grpc::GenericStub generic(channel_);
  grpc::CompletionQueue queue;
  const auto context = Context();
  auto call = generic.PrepareCall(context.get(), "/sparsegdn.v1.PrefillService/Prefill", &queue);
  call->StartCall(reinterpret_cast<void*>(1));
  void* tag = nullptr;
  bool ok = false;
  ASSERT_TRUE(queue.Next(&tag, &ok));
  const grpc::Slice slice(std::string("\x0a\xff\xff\xff\xff\x7f garbage"));
  call->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), reinterpret_cast<void*>(2));
  ASSERT_TRUE(queue.Next(&tag, &ok));
  grpc::Status status;
  call->Finish(&status, reinterpret_cast<void*>(3));
  ASSERT_TRUE(queue.Next(&tag, &ok));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_EQ(DetailsOf(status).reason, "MALFORMED_MESSAGE");
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
  EXPECT_TRUE(Prefill(Request()).status.ok());
}

TEST_F(ServiceTest, AMessageBeyondTheReceiveLimitIsRefusedAndHarmsNobody) {
  v1::PrefillRequest request;
  request.mutable_token_ids()->Resize((1 << 20) + (128 << 10), 1);
  EXPECT_EQ(Prefill(request).status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  request.mutable_token_ids()->Resize(1 << 20, 1);  // the documented maximum fits
  EXPECT_TRUE(Prefill(request).status.ok());
  EXPECT_EQ(engine_->requests().back().tokens.size(), 1u << 20);
}

TEST_F(ServiceTest, RequestFieldsReachTheEngine) {
  v1::PrefillRequest request = Request();
  request.clear_request_id();
  request.set_tenant("team-a");
  request.set_priority(-8);
  request.set_resume_from("snap");
  request.set_first_position(4);
  request.mutable_keep_snapshot()->set_ttl_seconds(9);
  request.set_snapshot_at(v1::SNAPSHOT_AT_AFTER_LAST);
  request.mutable_budget()->set_coverage(0.7);
  request.mutable_budget()->set_solver(v1::SOLVER_EXACT);
  request.mutable_outputs()->set_kv(false);
  request.mutable_outputs()->set_state_dtype(v1::DTYPE_BF16);
  request.mutable_outputs()->set_state_layout(v1::STATE_LAYOUT_VALUE_MAJOR);
  request.mutable_outputs()->set_prompt_logprobs_from(2);
  const int64_t before = engine::Clock::Real()->NowNs();
  const auto context = Context(3000);
  ASSERT_TRUE(Prefill(request, context.get()).status.ok());
  const engine::PrefillRequest got = engine_->requests().at(0);
  EXPECT_EQ(got.tokens.size(), 10u);
  EXPECT_EQ(got.request_id.size(), 16u);
  EXPECT_EQ(got.tenant, "team-a");
  EXPECT_EQ(got.priority, -8);
  EXPECT_EQ(got.resume_from, "snap");
  EXPECT_EQ(got.first_position, 4);
  EXPECT_TRUE(got.keep_snapshot);
  EXPECT_EQ(got.ttl_seconds, 9u);
  EXPECT_EQ(got.snapshot_at, engine::SnapshotAt::kAfterLast);
  EXPECT_EQ(got.budget.coverage, 0.7);
  EXPECT_FALSE(got.budget.mode.has_value());
  EXPECT_EQ(got.budget.solver, Solver::kExact);
  EXPECT_TRUE(got.outputs.state);
  EXPECT_FALSE(got.outputs.kv);
  EXPECT_EQ(got.outputs.state_dtype, engine::ExportDType::kBF16);
  EXPECT_EQ(got.outputs.state_layout, StateLayout::kValueMajor);
  EXPECT_EQ(got.outputs.logprobs_from, 2);
  ASSERT_TRUE(got.deadline_ns.has_value());
  EXPECT_NEAR(double(*got.deadline_ns - before) * 1e-9, 3.0, 0.5);
}

TEST_F(ServiceTest, CancelReachesTheEngineAtOnce) {
  auto call = std::make_shared<FakeCall>();
  call->Push(engine::Accepted{});
  engine_->on_submit = [&](const auto&) { return call; };
  const auto context = Context();
  auto reader = stub_->Prefill(context.get(), Request());
  v1::PrefillResponse event;
  ASSERT_TRUE(reader->Read(&event));
  const auto start = steady_clock::now();
  context->TryCancel();
  EXPECT_TRUE(call->WaitCancelled());
  EXPECT_LT(steady_clock::now() - start, milliseconds(1000));
  EXPECT_FALSE(call->cancelled_by_deadline());
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] {
    return Sample("sparsegdn_requests_total{code=\"CANCELLED\",method=\"Prefill\"}") == 1;
  }));
}

TEST_F(ServiceTest, ADeadlineIsToldApartFromACancel) {
  auto call = std::make_shared<FakeCall>();
  engine_->on_submit = [&](const auto&) { return call; };
  const auto context = Context(200);
  EXPECT_EQ(Prefill(Request(), context.get()).status.error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(call->WaitCancelled());
  EXPECT_TRUE(call->cancelled_by_deadline());
  EXPECT_TRUE(Eventually([&] {
    return Sample("sparsegdn_requests_total{code=\"DEADLINE_EXCEEDED\",method=\"Prefill\"}") == 1;
  }));
}

TEST_F(ServiceTest, AClientThatLeavesMidStreamIsForgotten) {
  auto call = WholeCall(64, 1 << 20);
  engine_->on_submit = [&](const auto&) { return call; };
  {
    const auto context = Context();
    auto reader = stub_->Prefill(context.get(), Request());
    v1::PrefillResponse event;
    for (int i = 0; i < 5; ++i) ASSERT_TRUE(reader->Read(&event));
    context->TryCancel();
    reader->Finish();
  }
  std::weak_ptr<FakeCall> weak = call;
  engine_->on_submit = [](const auto&) { return WholeCall(); };
  EXPECT_TRUE(call->WaitCancelled());
  call.reset();
  EXPECT_TRUE(Eventually([&] { return weak.expired(); })) << "the reactor leaked";
  EXPECT_TRUE(Prefill(Request()).status.ok());
}

TEST_F(ServiceTest, AnUnreadStreamStaysInTheEngine) {
  auto call = WholeCall(64, 1 << 20);
  engine_->on_submit = [&](const auto&) { return call; };
  const auto context = Context();
  auto reader = stub_->Prefill(context.get(), Request());
  v1::PrefillResponse event;
  ASSERT_TRUE(reader->Read(&event));
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_GT(call->unread(), 40u) << "frames pile up in the transport";
  int frames = 0;
  while (reader->Read(&event)) frames += event.has_chunk();
  EXPECT_EQ(frames, 64);
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(ServiceTest, AStalledReaderIsCut) {
  ServerConfig config = LoopbackConfig();
  config.slow_reader_timeout_seconds = 0.2;
  Start(config);
  auto call = WholeCall(64, 1 << 20);
  engine_->on_submit = [&](const auto&) { return call; };
  const auto context = Context();
  auto reader = stub_->Prefill(context.get(), Request());
  EXPECT_TRUE(call->WaitCancelled());
  EXPECT_TRUE(Eventually([&] {
    return Sample("sparsegdn_requests_total{code=\"RESOURCE_EXHAUSTED\",method=\"Prefill\"}") == 1;
  }));
  EXPECT_EQ(Sample("sparsegdn_slow_readers_total"), 1);
  engine_->on_submit = nullptr;
  const std::weak_ptr<FakeCall> weak = std::exchange(call, nullptr);
  EXPECT_TRUE(Eventually([&] { return weak.expired(); })) << "the stream is kept for nobody";
  v1::PrefillResponse event;
  bool result = false;
  while (reader->Read(&event)) result = result || event.has_result();
  EXPECT_FALSE(result);
  EXPECT_FALSE(reader->Finish().ok());
}

TEST_F(ServiceTest, AStalledReaderThatReadsOnIsToldWhy) {
  ServerConfig config = LoopbackConfig();
  config.slow_reader_timeout_seconds = 0.5;
  Start(config);
  auto call = WholeCall(64, 1 << 20);
  engine_->on_submit = [&](const auto&) { return call; };
  const auto context = Context();
  auto reader = stub_->Prefill(context.get(), Request());
  ASSERT_TRUE(call->WaitCancelled());
  v1::PrefillResponse event;
  int frames = 0;
  while (reader->Read(&event)) frames += event.has_chunk();
  EXPECT_LT(frames, 64);
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_EQ(status.error_message(), "the client took nothing for too long");
  EXPECT_EQ(DetailsOf(status).reason, "SLOW_READER");
  EXPECT_EQ(Sample("sparsegdn_slow_readers_total"), 1);
}

TEST_F(ServiceTest, ShutdownNeverHangs) {
  // One call that nobody reads, one that the engine never ends, even when cancelled.
  auto unread = WholeCall(64, 1 << 20);
  auto stuck = std::make_shared<FakeCall>();
  stuck->HoldCancel();
  std::vector<std::shared_ptr<FakeCall>> calls = {unread, stuck};
  size_t next = 0;
  engine_->on_submit = [&](const auto&) { return calls[next++]; };
  const auto first = Context(), second = Context();
  auto one = stub_->Prefill(first.get(), Request());
  ASSERT_TRUE(Eventually([&] { return engine_->requests().size() == 1; }));
  auto two = stub_->Prefill(second.get(), Request());
  ASSERT_TRUE(Eventually([&] { return engine_->requests().size() == 2; }));
  const auto start = steady_clock::now();
  server_->Shutdown(milliseconds(100));
  EXPECT_LT(steady_clock::now() - start, milliseconds(3000));
  first->TryCancel();
  second->TryCancel();
}

}  // namespace
}  // namespace sparsegdn::service
