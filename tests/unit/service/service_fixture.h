// A real server on loopback with a fake engine, and a client of it. Every call has a deadline, so a
// test that fails still ends.
#ifndef SPARSEGDN_TESTS_UNIT_SERVICE_SERVICE_FIXTURE_H_
#define SPARSEGDN_TESTS_UNIT_SERVICE_SERVICE_FIXTURE_H_

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "server/service/server.h"
#include "sparsegdn/rpc/status.pb.h"
#include "sparsegdn/v1/prefill.grpc.pb.h"
#include "tests/unit/service/fake_engine.h"

namespace sparsegdn::service {

inline ServerConfig LoopbackConfig() {
  ServerConfig config;
  config.listen = "127.0.0.1:0";
  config.metrics_listen = "127.0.0.1:0";
  return config;
}

struct Details {
  std::string reason, field;
  bool has_bad_request = false;
  double retry_seconds = -1;
};
Details DetailsOf(const grpc::Status& status);

struct Reply {
  grpc::Status status;
  std::vector<v1::PrefillResponse> events;
};

class ServiceTest : public ::testing::Test {
 protected:
  void SetUp() override { Start(LoopbackConfig()); }
  void TearDown() override {
    if (server_) server_->Shutdown(std::chrono::nanoseconds(0));
  }
  void Start(const ServerConfig& config, bool serve = true);

  static std::unique_ptr<grpc::ClientContext> Context(int deadline_ms = 10000);
  static v1::PrefillRequest Request();
  Reply Prefill(const v1::PrefillRequest& request, grpc::ClientContext* context);
  Reply Prefill(const v1::PrefillRequest& request) {
    const auto context = Context();
    return Prefill(request, context.get());
  }
  // Sends the frames and half-closes.
  grpc::Status Import(const std::vector<v1::SnapshotFrame>& frames, v1::SnapshotRef* ref);
  std::string Scrape() { return server_->metrics().Scrape(engine_->gauges()); }
  // Value of the sample line that starts with `series`; -1 when absent.
  double Sample(const std::string& series);

  std::shared_ptr<FakeEngine> engine_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::PrefillService::Stub> stub_;
};

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_TESTS_UNIT_SERVICE_SERVICE_FIXTURE_H_
