#include "tests/unit/service/service_fixture.h"

#include <sstream>

namespace sparsegdn::service {

Details DetailsOf(const grpc::Status& status) {
  Details out;
  rpc::Status proto;
  EXPECT_TRUE(proto.ParseFromString(status.error_details()));
  EXPECT_LT(status.error_details().size(), 7 * 1024u);
  for (const auto& any : proto.details()) {
    if (any.type_url() == "type.googleapis.com/google.rpc.ErrorInfo") {
      rpc::ErrorInfo info;
      EXPECT_TRUE(info.ParseFromString(any.value()));
      EXPECT_EQ(info.domain(), "sparsegdn");
      out.reason = info.reason();
    } else if (any.type_url() == "type.googleapis.com/google.rpc.BadRequest") {
      rpc::BadRequest bad;
      EXPECT_TRUE(bad.ParseFromString(any.value()));
      out.has_bad_request = true;
      out.field = bad.field_violations(0).field();
    } else if (any.type_url() == "type.googleapis.com/google.rpc.RetryInfo") {
      rpc::RetryInfo retry;
      EXPECT_TRUE(retry.ParseFromString(any.value()));
      out.retry_seconds =
          static_cast<double>(retry.retry_delay().seconds()) + retry.retry_delay().nanos() * 1e-9;
    } else {
      ADD_FAILURE() << any.type_url();
    }
  }
  return out;
}

void ServiceTest::Start(const ServerConfig& config, bool serve) {
  if (server_) server_->Shutdown(std::chrono::nanoseconds(0));
  engine_ = std::make_shared<FakeEngine>();
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(config);
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  if (serve) server_->Serve(engine_);
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(16 << 20);
  channel_ = grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(server_->port()),
                                       grpc::InsecureChannelCredentials(), arguments);
  // A first connection can fail for reasons of the machine; these tests are about the calls.
  ASSERT_TRUE(
      channel_->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(20)));
  stub_ = v1::PrefillService::NewStub(channel_);
}

std::unique_ptr<grpc::ClientContext> ServiceTest::Context(int deadline_ms) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(deadline_ms));
  return context;
}

v1::PrefillRequest ServiceTest::Request() {
  v1::PrefillRequest request;
  for (int i = 0; i < 10; ++i) request.add_token_ids(i);
  request.set_request_id("test-1");
  return request;
}

Reply ServiceTest::Prefill(const v1::PrefillRequest& request, grpc::ClientContext* context) {
  Reply reply;
  auto reader = stub_->Prefill(context, request);
  v1::PrefillResponse event;
  while (reader->Read(&event)) reply.events.push_back(event);
  reply.status = reader->Finish();
  return reply;
}

grpc::Status ServiceTest::Import(const std::vector<v1::SnapshotFrame>& frames,
                                 v1::SnapshotRef* ref) {
  const auto context = Context();
  auto writer = stub_->ImportSnapshot(context.get(), ref);
  for (const v1::SnapshotFrame& frame : frames) {
    if (!writer->Write(frame)) break;
  }
  writer->WritesDone();
  return writer->Finish();
}

double ServiceTest::Sample(const std::string& series) {
  std::istringstream text(Scrape());
  std::string line;
  while (std::getline(text, line)) {
    if (line.rfind(series + " ", 0) == 0) return std::stod(line.substr(series.size() + 1));
  }
  return -1;
}

}  // namespace sparsegdn::service
