// Bearer tokens on the wire: every method asks for one, the tenant is the token's, and nobody needs
// one to ask whether the server is well.
#include <grpcpp/generic/generic_stub.h>
#include <sys/stat.h>

#include <fstream>

#include "tests/unit/service/service_fixture.h"

namespace sparsegdn::service {
namespace {

constexpr char kAlice[] = "alice-0123456789abcdef";

class AuthTest : public ServiceTest {
 protected:
  void SetUp() override {
    std::ofstream(path_) << "alice " << kAlice << "\nbob bob-0123456789abcdef\n";
    ASSERT_EQ(chmod(path_.c_str(), 0600), 0);
    ServerConfig config = LoopbackConfig();
    config.auth_tokens = path_;
    Start(config);
  }
  static std::unique_ptr<grpc::ClientContext> With(const std::vector<std::string>& headers) {
    auto context = Context();
    for (const std::string& header : headers) context->AddMetadata("authorization", header);
    return context;
  }
  const std::string path_ = ::testing::TempDir() + "/auth-tokens";
};

TEST_F(AuthTest, EveryMethodRefusesWhoIsNotKnown) {
  const struct {
    const char* name;
    std::vector<std::string> headers;
    const char* reason;
  } rows[] = {
      {"none", {}, "TOKEN_MISSING"},
      {"another scheme", {"Basic " + std::string(kAlice)}, "TOKEN_MALFORMED"},
      {"no scheme", {kAlice}, "TOKEN_MALFORMED"},
      {"no token", {"Bearer "}, "TOKEN_MALFORMED"},
      {"twice",
       {"Bearer " + std::string(kAlice), "Bearer " + std::string(kAlice)},
       "TOKEN_MALFORMED"},
      {"unknown", {"Bearer alice-0123456789abcdeX"}, "TOKEN_UNKNOWN"},
      {"cut", {"Bearer alice-0123456789abcde"}, "TOKEN_UNKNOWN"},
      {"longer", {"Bearer " + std::string(kAlice) + "0"}, "TOKEN_UNKNOWN"},
      {"huge", {"Bearer " + std::string(4000, 'x')}, "TOKEN_UNKNOWN"},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.name);
    std::vector<grpc::Status> seen;
    seen.push_back(Prefill(Request(), With(row.headers).get()).status);
    v1::ModelInfo info;
    seen.push_back(stub_->GetModelInfo(With(row.headers).get(), {}, &info));
    v1::ReleaseSnapshotResponse released;
    seen.push_back(stub_->ReleaseSnapshot(With(row.headers).get(), {}, &released));
    v1::SnapshotRef ref;
    const auto context = With(row.headers);
    seen.push_back(stub_->ImportSnapshot(context.get(), &ref)->Finish());
    for (const grpc::Status& status : seen) {
      EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << status.error_message();
      EXPECT_EQ(DetailsOf(status).reason, row.reason);
      EXPECT_EQ(status.error_message().find("0123456789abc"), std::string::npos);
    }
  }
  EXPECT_TRUE(engine_->requests().empty());
  EXPECT_TRUE(engine_->imports().empty());
  EXPECT_TRUE(engine_->releases().empty());
}

TEST_F(AuthTest, TheTenantIsTheTokensWhateverTheFieldSays) {
  v1::PrefillRequest request = Request();
  request.set_tenant("bob");
  for (const char* scheme : {"Bearer ", "bearer ", "BEARER "}) {
    EXPECT_TRUE(Prefill(request, With({scheme + std::string(kAlice)}).get()).status.ok());
    EXPECT_EQ(engine_->requests().back().tenant, "alice");
  }
  v1::ReleaseSnapshotRequest release;
  release.set_snapshot_id("s");
  release.set_tenant("bob");
  v1::ReleaseSnapshotResponse released;
  EXPECT_TRUE(
      stub_->ReleaseSnapshot(With({std::string("Bearer ") + kAlice}).get(), release, &released)
          .ok());
  EXPECT_EQ(engine_->releases().back().second, "alice");
}

TEST_F(AuthTest, ARotatedFileIsTakenOnReload) {
  std::ofstream(path_) << "carol carol-0123456789abcdef\n";
  EXPECT_TRUE(server_->ReloadTokens().ok());
  EXPECT_EQ(Prefill(Request(), With({std::string("Bearer ") + kAlice}).get()).status.error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_TRUE(Prefill(Request(), With({"Bearer carol-0123456789abcdef"}).get()).status.ok());
  EXPECT_EQ(engine_->requests().back().tenant, "carol");
}

TEST_F(AuthTest, HealthNeedsNoToken) {
  grpc::GenericStub generic(channel_);
  const grpc::Slice nothing;
  grpc::ByteBuffer request(&nothing, 1), response;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  grpc::CompletionQueue queue;
  const auto call =
      generic.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", request, &queue);
  call->StartCall();
  grpc::Status status;
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  ASSERT_TRUE(queue.Next(&tag, &ok));
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_F(AuthTest, ATokenFileThatIsNoneEndsTheStart) {
  std::ofstream(path_) << "nothing\n";
  ServerConfig config = LoopbackConfig();
  config.auth_tokens = path_;
  const auto server = Server::Start(config);
  ASSERT_TRUE(absl::IsInvalidArgument(server.status())) << server.status();
  EXPECT_NE(server.status().ToString().find("--auth-tokens = "), std::string::npos);
}

}  // namespace
}  // namespace sparsegdn::service
