// ImportSnapshot: order of frames, errors of the engine, clients that leave or stall.
#include <atomic>
#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "server/engine/status_payload.h"
#include "tests/unit/service/service_fixture.h"

namespace sparsegdn::service {
namespace {

class ImportTest : public ServiceTest {
 protected:
  static v1::SnapshotFrame Header() {
    v1::SnapshotFrame frame;
    v1::Manifest* manifest = frame.mutable_header()->mutable_manifest();
    manifest->set_model_identity(std::string(64, 'a'));
    manifest->set_format_version(1);
    manifest->set_position(17);
    v1::TensorInfo* tensor = manifest->add_tensors();
    tensor->set_name("layers.0.state");
    tensor->set_kind(v1::TENSOR_KIND_RECURRENT_STATE);
    tensor->set_dtype(v1::DTYPE_FP32);
    tensor->set_state_layout(v1::STATE_LAYOUT_VALUE_MAJOR);
    tensor->add_shape(4);
    tensor->set_bytes(2000);
    frame.mutable_header()->mutable_keep()->set_ttl_seconds(12);
    return frame;
  }
  static v1::SnapshotFrame Chunk(size_t bytes = 1000) {
    v1::SnapshotFrame frame;
    frame.mutable_chunk()->set_data(std::string(bytes, 'd'));
    return frame;
  }
  static v1::SnapshotFrame End() {
    v1::SnapshotFrame frame;
    frame.mutable_end()->set_digest(5);
    return frame;
  }
};

TEST_F(ImportTest, GoodUpload) {
  v1::SnapshotRef ref;
  const grpc::Status status = Import({Header(), Chunk(), Chunk(), End()}, &ref);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(ref.snapshot_id(), "imported-1");
  EXPECT_EQ(ref.position(), 17);
  EXPECT_EQ(ref.bytes(), 2000u);
  EXPECT_EQ(ref.ttl_seconds(), 12u);
  const engine::Manifest manifest = engine_->imports().at(0);
  EXPECT_EQ(manifest.tensors.at(0).name, "layers.0.state");
  EXPECT_EQ(manifest.tensors.at(0).state_layout, StateLayout::kValueMajor);
  EXPECT_EQ(Sample("sparsegdn_requests_total{code=\"OK\",method=\"ImportSnapshot\"}"), 1);
}

TEST_F(ImportTest, LargestFrameFits) {
  v1::SnapshotRef ref;
  EXPECT_TRUE(Import({Header(), Chunk(3 << 20), End()}, &ref).ok());
}

TEST_F(ImportTest, FramesOutOfOrderAreRefused) {
  const struct {
    const char* name;
    std::vector<v1::SnapshotFrame> frames;
    const char* reason;
  } rows[] = {
      {"nothing", {}, "SNAPSHOT_INCOMPLETE"},
      {"chunk first", {Chunk(), Header()}, "SNAPSHOT_OUT_OF_ORDER"},
      {"end first", {End()}, "SNAPSHOT_OUT_OF_ORDER"},
      {"two headers", {Header(), Header()}, "SNAPSHOT_OUT_OF_ORDER"},
      {"no end", {Header(), Chunk()}, "SNAPSHOT_INCOMPLETE"},
      {"empty frame", {Header(), v1::SnapshotFrame()}, "SNAPSHOT_EMPTY_FRAME"},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.name);
    v1::SnapshotRef ref;
    const grpc::Status status = Import(row.frames, &ref);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(DetailsOf(status).reason, row.reason);
    EXPECT_TRUE(ref.snapshot_id().empty());
  }
}

TEST_F(ImportTest, BadManifestsNameTheTensor) {
  const struct {
    const char* field;
    std::function<void(v1::TensorInfo*)> set;
  } rows[] = {
      {"manifest.tensors[0].kind", [](auto* t) { t->set_kind(v1::TensorKind(0)); }},
      {"manifest.tensors[0].kind", [](auto* t) { t->set_kind(v1::TensorKind(10)); }},
      {"manifest.tensors[0].dtype", [](auto* t) { t->set_dtype(v1::DType(0)); }},
      {"manifest.tensors[0].dtype", [](auto* t) { t->set_dtype(v1::DType(5)); }},
      {"manifest.tensors[0].state_layout",
       [](auto* t) { t->set_state_layout(v1::StateLayout(3)); }},
      {"manifest.tensors[0].conv_layout", [](auto* t) { t->set_conv_layout(v1::ConvLayout(3)); }},
      {"manifest.tensors[0].name", [](auto* t) { t->set_name(std::string(300, 'n')); }},
      {"manifest.tensors[0].name", [](auto* t) { t->clear_name(); }},
      {"manifest.tensors[0].shape",
       [](auto* t) {
         for (int i = 0; i < 9; ++i) t->add_shape(1);
       }},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.field);
    v1::SnapshotFrame header = Header();
    row.set(header.mutable_header()->mutable_manifest()->mutable_tensors(0));
    v1::SnapshotRef ref;
    const grpc::Status status = Import({header, Chunk(), End()}, &ref);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(DetailsOf(status).field, row.field);
  }
  EXPECT_TRUE(engine_->imports().empty());
}

TEST_F(ImportTest, EngineErrorsEndTheCall) {
  const auto error = [](const char* reason) {
    return engine::WithDetails(absl::FailedPreconditionError("no"), {"f", reason, {}});
  };
  absl::Status* const places[] = {&engine_->import_begin, &engine_->import_add,
                                  &engine_->import_finish};
  for (absl::Status* place : places) {
    *place = error("WHY");
    v1::SnapshotRef ref;
    const grpc::Status status = Import({Header(), Chunk(), End()}, &ref);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_EQ(DetailsOf(status).reason, "WHY");
    *place = absl::OkStatus();
  }
}

TEST_F(ImportTest, AClientThatLeavesIsForgotten) {
  const auto context = Context();
  v1::SnapshotRef ref;
  auto writer = stub_->ImportSnapshot(context.get(), &ref);
  ASSERT_TRUE(writer->Write(Header()));
  ASSERT_TRUE(Eventually([&] { return !engine_->imports().empty(); }));
  context->TryCancel();
  EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] {
    return Sample("sparsegdn_requests_total{code=\"CANCELLED\",method=\"ImportSnapshot\"}") == 1;
  }));
}

TEST_F(ImportTest, ADeadlineIsNotAClientThatLeft) {
  const auto context = Context(300);
  v1::SnapshotRef ref;
  auto writer = stub_->ImportSnapshot(context.get(), &ref);
  ASSERT_TRUE(writer->Write(Header()));
  EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Eventually([&] {
    return Sample(
               "sparsegdn_requests_total{code=\"DEADLINE_EXCEEDED\",method=\"ImportSnapshot\"}") ==
           1;
  }));
}

TEST_F(ImportTest, AStalledWriterIsCut) {
  ServerConfig config = LoopbackConfig();
  config.slow_reader_timeout_seconds = 0.2;
  Start(config);
  const auto context = Context();
  v1::SnapshotRef ref;
  auto writer = stub_->ImportSnapshot(context.get(), &ref);
  ASSERT_TRUE(writer->Write(Header()));
  EXPECT_TRUE(Eventually([&] {
    return Sample(
               "sparsegdn_requests_total{code=\"RESOURCE_EXHAUSTED\",method=\"ImportSnapshot\"}") ==
           1;
  }));
  EXPECT_FALSE(writer->Finish().ok());
}

TEST_F(ImportTest, ShutdownEndsAnOpenUpload) {
  const auto context = Context();
  v1::SnapshotRef ref;
  auto writer = stub_->ImportSnapshot(context.get(), &ref);
  ASSERT_TRUE(writer->Write(Header()));
  ASSERT_TRUE(Eventually([&] { return !engine_->imports().empty(); }));
  const auto start = std::chrono::steady_clock::now();
  server_->Shutdown(std::chrono::milliseconds(50));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(3));
  EXPECT_FALSE(writer->Finish().ok());
}

// Uploads whose end takes long: none of gRPC's threads may be inside one.
class SlowEndTest : public ImportTest {
 protected:
  void SetUp() override {
    ImportTest::SetUp();
    gate_ = release_.get_future().share();
    engine_->on_import_finish = [this] {
      ++inside_;
      gate_.wait();
    };
  }
  void TearDown() override {
    Release();
    ImportTest::TearDown();
  }
  void Release() {
    if (!released_.exchange(true)) release_.set_value();
  }
  std::future<grpc::Status> Upload() {
    return std::async(std::launch::async, [this] {
      v1::SnapshotRef ref;
      return Import({Header(), Chunk(), End()}, &ref);
    });
  }

  std::promise<void> release_;
  std::shared_future<void> gate_;
  std::atomic<bool> released_{false};
  std::atomic<int> inside_{0};
};

TEST_F(SlowEndTest, OtherCallsAreAnswered) {
  std::vector<std::future<grpc::Status>> uploads;
  for (int i = 0; i < 24; ++i) uploads.push_back(Upload());  // more than gRPC has threads here
  ASSERT_TRUE(Eventually([&] { return engine_->imports().size() == 24 && inside_ >= 2; }));
  for (int i = 0; i < 3; ++i) {
    const auto context = Context(2000);
    EXPECT_TRUE(Prefill(Request(), context.get()).status.ok());
  }
  EXPECT_LE(inside_, 2) << "at most the pool's threads";
  Release();
  for (auto& upload : uploads) {
    const grpc::Status status = upload.get();
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
}

TEST_F(SlowEndTest, AClientThatLeavesBeforeItsTurnKeepsNothing) {
  auto first = Upload(), second = Upload();
  ASSERT_TRUE(Eventually([&] { return inside_ == 2; }));
  const auto context = Context();
  v1::SnapshotRef ref;
  auto writer = stub_->ImportSnapshot(context.get(), &ref);
  ASSERT_TRUE(writer->Write(Header()) && writer->Write(Chunk()) && writer->Write(End()));
  ASSERT_TRUE(Eventually([&] { return engine_->imports().size() == 3; }));
  context->TryCancel();
  EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::CANCELLED);
  // The reset arrives on a connection of its own order: a call after it has passed it.
  EXPECT_TRUE(Prefill(Request()).status.ok());
  // Which thread of gRPC sees it first is not ours to say, and the upload waits where nobody looks.
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  Release();
  EXPECT_TRUE(first.get().ok() && second.get().ok());
  EXPECT_TRUE(Eventually([&] {
    return Sample("sparsegdn_requests_total{code=\"CANCELLED\",method=\"ImportSnapshot\"}") == 1;
  }));
  EXPECT_EQ(inside_, 2);
}

TEST_F(SlowEndTest, ShutdownWaitsForTheOneInside) {
  auto upload = Upload();
  ASSERT_TRUE(Eventually([&] { return inside_ == 1; }));
  auto stopped =
      std::async(std::launch::async, [&] { server_->Shutdown(std::chrono::milliseconds(20)); });
  EXPECT_EQ(stopped.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout);
  Release();
  EXPECT_EQ(stopped.wait_for(std::chrono::seconds(5)), std::future_status::ready);
  EXPECT_FALSE(upload.get().ok());
}

}  // namespace
}  // namespace sparsegdn::service
