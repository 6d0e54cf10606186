// Several servers: static lists of addresses, and prefills that run again when their server is
// gone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "fake_service.h"
#include "src/targets.h"

namespace sparsegdn::client {
namespace {

using testing::FakeServer;
using testing::GoodEvents;
using testing::Send;

grpc::Status Gone() { return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server died"); }

// Answers the first `failures` calls with a beginning and then UNAVAILABLE.
void FailAfterTheFirstAnswer(FakeServer& server, std::atomic<int>& asked, int failures) {
  server.service.on_prefill = [&asked, failures](auto*, const auto&, auto* writer) {
    if (++asked <= failures) return Send({GoodEvents().front()}, writer, Gone());
    return Send(GoodEvents(), writer);
  };
}

TEST(Replicas, TargetRows) {
  const auto uri = [](const std::string& target) {
    const absl::StatusOr<std::string> result = TargetUri(target);
    return result.ok() ? *result : DetailsOf(result.status()).reason;
  };
  EXPECT_EQ(uri("prefill:50051"), "dns:///prefill:50051");
  EXPECT_EQ(uri("dns:///prefill:50051"), "dns:///prefill:50051");
  EXPECT_EQ(uri("unix:/run/s"), "unix:/run/s");
  EXPECT_EQ(uri("10.0.0.1:1,10.0.0.2:2"), "ipv4:10.0.0.1:1,10.0.0.2:2");
  EXPECT_EQ(uri("localhost:1,127.0.0.2:2"), "ipv4:127.0.0.1:1,127.0.0.2:2");
  EXPECT_EQ(uri("[::1]:1,[fe80::2]:2"), "ipv6:[::1]:1,[fe80::2]:2");
  EXPECT_EQ(uri("ipv4:10.0.0.1:1,10.0.0.2:2"), "ipv4:10.0.0.1:1,10.0.0.2:2");
  for (const char* bad : {"a:1,b:2", "10.0.0.1:1,", "10.0.0.1,10.0.0.2", "10.0.0.1:1,[::1]:2",
                          "10.0.0.1:1,::1", "10.0.0.1:,10.0.0.2:1"}) {
    EXPECT_EQ(uri(bad), "TARGET_LIST") << bad;
    EXPECT_FALSE(Client::Connect({.target = bad}).ok()) << bad;
  }
}

TEST(Replicas, ATokenStaysHereUnlessEveryServerOfAListIsHere) {
  const std::string token = ::testing::TempDir() + "/replicas_token";
  std::ofstream(token) << "secret\n";
  for (const auto& [target, good] : {std::pair<std::string, bool>{"127.0.0.1:1,127.0.0.2:2", true},
                                     {"localhost:1,10.0.0.2:2", false},
                                     {"ipv4:127.0.0.1:1,10.0.0.2:2", false}}) {
    ConnectOptions options;
    options.target = target;
    options.token_file = token;
    EXPECT_EQ(Client::Connect(options).ok(), good) << target;
  }
}

TEST(Replicas, CallsGoRoundAListAndPastADeadServer) {
  FakeServer a, b;
  std::atomic<int> asked_a{0}, asked_b{0};
  FailAfterTheFirstAnswer(a, asked_a, 0);
  FailAfterTheFirstAnswer(b, asked_b, 0);
  auto client = *Client::Connect({.target = a.target + "," + b.target + ",127.0.0.1:1"});
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(client->Prefill({}).ok());
  EXPECT_GE(asked_a, 5);
  EXPECT_GE(asked_b, 5);
}

TEST(Replicas, APrefillRunsAgainWhenItsServerIsGone) {
  FakeServer server;
  std::atomic<int> asked{0};
  FailAfterTheFirstAnswer(server, asked, 2);
  CallOptions options;
  options.restarts = 2;
  EXPECT_TRUE(server.Connect()->Prefill({}, options).ok());
  EXPECT_EQ(asked, 3);
}

TEST(Replicas, RestartsEndWithTheLastError) {
  FakeServer server;
  std::atomic<int> asked{0};
  FailAfterTheFirstAnswer(server, asked, 100);
  CallOptions options;
  options.restarts = 2;
  EXPECT_EQ(server.Connect()->Prefill({}, options).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(server.Connect()->Prefill({}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(asked, 4) << "none unless asked for";
}

// As a server does to streams that reach it while it shuts down.
TEST(Replicas, ACancelThatIsNotOursIsRestarted) {
  FakeServer server;
  std::atomic<int> asked{0};
  server.service.on_prefill = [&asked](grpc::ServerContext* context, const auto&, auto* writer) {
    if (++asked > 1) return Send(GoodEvents(), writer);
    context->TryCancel();
    return grpc::Status(grpc::StatusCode::CANCELLED, "shutting down");
  };
  CallOptions options;
  options.restarts = 1;
  EXPECT_TRUE(server.Connect()->Prefill({}, options).ok());
  EXPECT_EQ(asked, 2);
}

TEST(Replicas, OtherErrorsAreNotRestarted) {
  FakeServer server;
  std::atomic<int> asked{0};
  server.service.on_prefill = [&asked](auto*, const auto&, auto* writer) {
    ++asked;
    return Send({GoodEvents().front()}, writer, grpc::Status(grpc::StatusCode::INTERNAL, "a bug"));
  };
  CallOptions options;
  options.restarts = 5;
  EXPECT_EQ(server.Connect()->Prefill({}, options).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(asked, 1);
}

TEST(Replicas, TheTimeoutCoversAllRestarts) {
  FakeServer server;
  std::atomic<int> asked{0};
  FailAfterTheFirstAnswer(server, asked, 1000);
  CallOptions options;
  options.restarts = 1000;
  options.timeout = absl::Milliseconds(600);
  const absl::Time start = absl::Now();
  EXPECT_FALSE(server.Connect()->Prefill({}, options).ok());
  EXPECT_LT(absl::Now() - start, absl::Seconds(3));
  EXPECT_LE(asked, 5);
}

TEST(Replicas, ACancelEndsTheWait) {
  FakeServer server;
  std::atomic<int> asked{0};
  FailAfterTheFirstAnswer(server, asked, 1000);
  Cancellation cancellation;
  CallOptions options;
  options.restarts = 1000;
  options.cancellation = &cancellation;
  std::thread canceller([&] {
    while (asked < 2) absl::SleepFor(absl::Milliseconds(5));
    cancellation.Cancel();
  });
  EXPECT_EQ(server.Connect()->Prefill({}, options).status().code(), absl::StatusCode::kCancelled);
  canceller.join();
  EXPECT_LE(asked, 4);
}

}  // namespace
}  // namespace sparsegdn::client
