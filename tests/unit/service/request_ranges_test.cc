// Values that the service passes on as they are, and the real engine refuses.
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "tests/unit/engine/fake_runner.h"
#include "tests/unit/service/service_fixture.h"

namespace sparsegdn::service {
namespace {

class RequestRangesTest : public ServiceTest {
 protected:
  void SetUp() override {
    Start(LoopbackConfig(), /*serve=*/false);
    auto config = ToEngineConfig(LoopbackConfig());
    ASSERT_TRUE(config.ok()) << config.status();
    auto engine = engine::Engine::Create(
        *config,
        std::make_unique<testing::FakeRunner>(testing::FakeRunnerOptions{},
                                              std::make_shared<testing::FakeRunnerLog>()),
        &server_->metrics(), engine::Clock::Real());
    ASSERT_TRUE(engine.ok()) << engine.status();
    server_->Serve(*std::move(engine));
  }
};

// The ranges are the engine's; the answer on the wire still names the field.
TEST_F(RequestRangesTest, ValuesOutOfRangeNameTheField) {
  const struct {
    const char* field;
    std::function<void(v1::PrefillRequest&)> set;
  } rows[] = {
      {"outputs.kv_dtype", [](auto& r) { r.mutable_outputs()->set_kv_dtype(v1::DTYPE_FP8_E4M3); }},
      {"outputs.state_dtype",
       [](auto& r) { r.mutable_outputs()->set_state_dtype(v1::DTYPE_INT32); }},
      {"outputs.logits.positions",
       [](auto& r) {
         for (int i = 0; i < 4097; ++i) r.mutable_outputs()->mutable_logits()->add_positions(i);
       }},
      {"outputs.logits.top_k",
       [](auto& r) {
         r.mutable_outputs()->mutable_logits()->add_positions(0);
         r.mutable_outputs()->mutable_logits()->set_top_k(1025);
       }},
      {"outputs.logits.top_k",
       [](auto& r) { r.mutable_outputs()->mutable_logits()->set_top_k(4); }},
      {"priority", [](auto& r) { r.set_priority(9); }},
      {"priority", [](auto& r) { r.set_priority(-9); }},
      {"first_position", [](auto& r) { r.set_first_position(-1); }},
      {"request_id", [](auto& r) { r.set_request_id(std::string(129, 'x')); }},
      {"request_id", [](auto& r) { r.set_request_id("a\nb"); }},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.field);
    v1::PrefillRequest request = Request();
    row.set(request);
    const Reply reply = Prefill(request);
    EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(DetailsOf(reply.status).field, row.field);
  }
  EXPECT_TRUE(Prefill(Request()).status.ok());
}

}  // namespace
}  // namespace sparsegdn::service
