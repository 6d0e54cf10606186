// Goal: a caller of Client holds a complete verified snapshot or an error, whatever a server does.
// Method: an in-process server that plays one good stream, broken in one way per named row; each
// row expects the reason that names the fault. Contents are compared byte for byte: no tolerance.
#include "sparsegdn/client/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <thread>

#include "fake_service.h"
#include "sparsegdn/rpc/status.pb.h"

namespace sparsegdn::client {
namespace {

using testing::Events;
using testing::FakeServer;
using testing::GoodBytes;
using testing::GoodEvents;
using testing::GoodManifest;
using testing::Send;
using testing::SetData;

std::string Text(absl::Span<const uint8_t> bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

absl::StatusOr<PrefillOutcome> Play(const Events& events, grpc::Status status = grpc::Status::OK,
                                    uint64_t max_bytes = 1 << 20) {
  FakeServer server;
  server.service.on_prefill = [&](grpc::ServerContext*, const v1::PrefillRequest&, auto* writer) {
    return Send(events, writer, status);
  };
  return server.Connect(max_bytes)->Prefill(v1::PrefillRequest());
}

TEST(ClientTest, GoodStreamGivesEveryByte) {
  absl::StatusOr<PrefillOutcome> outcome = Play(GoodEvents());
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  const v1::Manifest manifest = GoodManifest();
  ASSERT_EQ(outcome->snapshot.size(), manifest.tensors_size());
  for (int i = 0; i < manifest.tensors_size(); ++i) {
    EXPECT_EQ(Text(outcome->snapshot.data(i)), GoodBytes(manifest, i)) << i;
  }
  EXPECT_EQ(outcome->result.next_token(), 42);
  EXPECT_EQ(outcome->snapshot.digest(), outcome->result.digest());
  EXPECT_TRUE(outcome->first_chunk_seconds.has_value());
  EXPECT_EQ(outcome->snapshot.Find("layers.3.key"), 3);
  EXPECT_EQ(outcome->snapshot.Find("layers.4.key"), -1);
}

TEST(ClientTest, EmptyManifestIsLegal) {
  Events events(2);
  events[0].mutable_manifest()->set_format_version(1);
  events[1].mutable_result()->set_digest(DigestOf({}));
  absl::StatusOr<PrefillOutcome> outcome = Play(events);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->snapshot.size(), 0);
}

struct Fault {
  const char* name;
  const char* reason;
  void (*apply)(Events*);
};

void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.name; }

class FaultTest : public ::testing::TestWithParam<Fault> {};

TEST_P(FaultTest, IsAnError) {
  Events events = GoodEvents();
  GetParam().apply(&events);
  const absl::StatusOr<PrefillOutcome> outcome = Play(events);
  ASSERT_FALSE(outcome.ok());
  EXPECT_EQ(DetailsOf(outcome.status()).reason, GetParam().reason) << outcome.status();
  const bool too_large = std::string(GetParam().reason) == "SNAPSHOT_TOO_LARGE";
  EXPECT_EQ(outcome.status().code(),
            too_large ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kDataLoss);
}

v1::TensorChunk* Chunk(Events* events, size_t index) {
  return (*events)[3 + index].mutable_chunk();
}
v1::Manifest* ManifestOf(Events* events) { return (*events)[2].mutable_manifest(); }
v1::TensorInfo* Tensor(Events* events, int index) {
  return ManifestOf(events)->mutable_tensors(index);
}

const Fault kFaults[] = {
    {"hash_wrong", "CHUNK_HASH", [](Events* e) { Chunk(e, 0)->set_xxh3_64(1); }},
    {"byte_flipped", "CHUNK_HASH", [](Events* e) { (*Chunk(e, 1)->mutable_data())[3] ^= 1; }},
    {"byte_flipped_hash_fitting", "DIGEST",
     [](Events* e) {
       std::string data = Chunk(e, 1)->data();
       data[3] ^= 1;
       SetData(Chunk(e, 1), data);
     }},
    {"chunk_missing", "BYTES_MISSING", [](Events* e) { e->erase(e->begin() + 5); }},
    {"last_byte_missing", "BYTES_MISSING",
     [](Events* e) { SetData(Chunk(e, 0), Chunk(e, 0)->data().substr(0, 59)); }},
    {"chunk_twice", "CHUNK_OVERLAP", [](Events* e) { e->insert(e->begin() + 6, (*e)[4]); }},
    {"chunk_overlaps_before", "CHUNK_OVERLAP",
     [](Events* e) {
       v1::PrefillResponse extra = (*e)[4];
       extra.mutable_chunk()->set_byte_offset(extra.chunk().byte_offset() - 1);
       SetData(extra.mutable_chunk(), extra.chunk().data().substr(0, 2));
       e->insert(e->begin() + 5, extra);
     }},
    {"chunk_overlaps_after", "CHUNK_OVERLAP",
     [](Events* e) { Chunk(e, 3)->set_byte_offset(Chunk(e, 3)->byte_offset() + 1); }},
    {"chunk_past_end", "CHUNK_OUT_OF_BOUNDS", [](Events* e) { Chunk(e, 0)->set_byte_offset(1); }},
    {"chunk_offset_wraps", "CHUNK_OUT_OF_BOUNDS",
     [](Events* e) { Chunk(e, 0)->set_byte_offset(UINT64_MAX); }},
    {"chunk_of_unknown_tensor", "CHUNK_TENSOR_UNKNOWN",
     [](Events* e) { Chunk(e, 0)->set_tensor(6); }},
    {"chunk_before_manifest", "MANIFEST_MISSING", [](Events* e) { std::swap((*e)[2], (*e)[3]); }},
    {"manifest_absent", "MANIFEST_MISSING",
     [](Events* e) { e->erase(e->begin() + 2, e->end() - 1); }},
    {"manifest_twice", "MANIFEST_REPEATED", [](Events* e) { e->insert(e->begin() + 3, (*e)[2]); }},
    {"result_absent", "RESULT_MISSING", [](Events* e) { e->pop_back(); }},
    {"stream_empty", "RESULT_MISSING", [](Events* e) { e->clear(); }},
    {"result_twice", "EVENT_AFTER_RESULT", [](Events* e) { e->push_back(e->back()); }},
    {"chunk_after_result", "EVENT_AFTER_RESULT", [](Events* e) { e->push_back((*e)[3]); }},
    {"digest_wrong", "DIGEST",
     [](Events* e) { e->back().mutable_result()->set_digest(e->back().result().digest() ^ 1); }},
    {"tensors_swapped", "DIGEST",
     [](Events* e) {  // two tensors of one size, each with sound chunks, but the other's bytes
       Tensor(e, 4)->set_shape(0, 7);
       Tensor(e, 4)->set_bytes(7 * 2 * 64 * 4);
       ManifestOf(e)->set_total_bytes(ManifestOf(e)->total_bytes() + 7 * 2 * 64 * 4);
       Events copy = *e;
       for (size_t i = 3; i + 1 < copy.size(); ++i) {
         if (copy[i].chunk().tensor() != 3) continue;
         copy[i].mutable_chunk()->set_tensor(4);
         e->insert(e->begin() + 3, copy[i]);
       }
     }},
    {"format_version_unknown", "MANIFEST_INVALID",
     [](Events* e) { ManifestOf(e)->set_format_version(2); }},
    {"position_negative", "MANIFEST_INVALID", [](Events* e) { ManifestOf(e)->set_position(-1); }},
    {"total_bytes_wrong", "MANIFEST_INVALID",
     [](Events* e) { ManifestOf(e)->set_total_bytes(ManifestOf(e)->total_bytes() + 1); }},
    {"bytes_above_shape", "MANIFEST_INVALID",
     [](Events* e) { Tensor(e, 0)->set_bytes(Tensor(e, 0)->bytes() + 1); }},
    {"shape_negative", "MANIFEST_INVALID", [](Events* e) { Tensor(e, 0)->set_shape(0, -1); }},
    {"shape_overflows", "MANIFEST_INVALID",
     [](Events* e) {  // 2^62 * 4 * 4 wraps to 0 in 64 bits
       Tensor(e, 3)->set_shape(0, int64_t{1} << 62);
       Tensor(e, 3)->set_shape(1, 4);
       Tensor(e, 3)->set_shape(2, 1);
       Tensor(e, 3)->set_bytes(0);
     }},
    {"name_repeated", "MANIFEST_INVALID",
     [](Events* e) { Tensor(e, 3)->set_name("layers.3.value"); }},
    {"name_empty", "MANIFEST_INVALID", [](Events* e) { Tensor(e, 0)->clear_name(); }},
    {"name_reserved", "MANIFEST_INVALID",
     [](Events* e) { Tensor(e, 0)->set_name("__metadata__"); }},
    {"dtype_unknown", "MANIFEST_INVALID",
     [](Events* e) { Tensor(e, 0)->set_dtype(static_cast<v1::DType>(99)); }},
    {"kind_unknown", "MANIFEST_INVALID",
     [](Events* e) { Tensor(e, 0)->set_kind(static_cast<v1::TensorKind>(99)); }},
    {"state_layout_unset", "MANIFEST_INVALID",
     [](Events* e) { Tensor(e, 0)->clear_state_layout(); }},
    {"conv_layout_unset", "MANIFEST_INVALID", [](Events* e) { Tensor(e, 2)->clear_conv_layout(); }},
    {"claim_above_bound", "SNAPSHOT_TOO_LARGE",
     [](Events* e) {  // 1 TiB, consistent in itself: must be refused before memory is asked for
       Tensor(e, 3)->set_shape(0, int64_t{1} << 31);
       const uint64_t bytes = (uint64_t{1} << 31) * 2 * 64 * 4;
       ManifestOf(e)->set_total_bytes(ManifestOf(e)->total_bytes() - Tensor(e, 3)->bytes() + bytes);
       Tensor(e, 3)->set_bytes(bytes);
     }},
};

INSTANTIATE_TEST_SUITE_P(Stream, FaultTest, ::testing::ValuesIn(kFaults),
                         [](const auto& row) { return std::string(row.param.name); });

TEST(ClientTest, ClaimAboveMemoryIsRefusedEvenWithoutABound) {
  Events events = GoodEvents();
  v1::TensorInfo* tensor = Tensor(&events, 3);
  tensor->set_shape(0, int64_t{1} << 52);  // 2 EiB
  const uint64_t bytes = (uint64_t{1} << 52) * 2 * 64 * 4;
  ManifestOf(&events)->set_total_bytes(ManifestOf(&events)->total_bytes() - tensor->bytes() +
                                       bytes);
  tensor->set_bytes(bytes);
  const auto outcome = Play(events, grpc::Status::OK, UINT64_MAX);
  EXPECT_EQ(DetailsOf(outcome.status()).reason, "SNAPSHOT_TOO_LARGE") << outcome.status();
}

TEST(ClientTest, ResultThenErrorIsAnError) {
  const auto outcome =
      Play(GoodEvents(), grpc::Status(grpc::StatusCode::INTERNAL, "the end went wrong"));
  EXPECT_EQ(outcome.status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(outcome.status().message(), "the end went wrong");
}

TEST(ClientTest, DetailsOfARefusalAreDecoded) {
  rpc::Status wire;
  rpc::ErrorInfo info;
  info.set_reason("QUEUE_FULL");
  rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(2);
  retry.mutable_retry_delay()->set_nanos(500000000);
  rpc::BadRequest bad;
  bad.add_field_violations()->set_field("token_ids[17]");
  auto add = [&wire](const google::protobuf::Message& message, const char* name) {
    wire.add_details()->set_type_url(std::string("type.googleapis.com/google.rpc.") + name);
    wire.mutable_details(wire.details_size() - 1)->set_value(message.SerializeAsString());
  };
  add(info, "ErrorInfo");
  add(retry, "RetryInfo");
  add(bad, "BadRequest");
  const auto outcome = Play({}, grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "queue full",
                                             wire.SerializeAsString()));
  EXPECT_EQ(outcome.status().code(), absl::StatusCode::kResourceExhausted);
  const ErrorDetails details = DetailsOf(outcome.status());
  EXPECT_EQ(details.reason, "QUEUE_FULL");
  EXPECT_EQ(details.field, "token_ids[17]");
  EXPECT_EQ(details.retry_after, absl::Milliseconds(2500));
}

TEST(ClientTest, GarbageDetailsAreIgnored) {
  const auto outcome =
      Play({}, grpc::Status(grpc::StatusCode::NOT_FOUND, "no", std::string("\xff\xff\x01")));
  EXPECT_EQ(outcome.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(DetailsOf(outcome.status()).reason, "");
}

// Sends everything but the result, then waits until the client goes away.
grpc::Status Stall(grpc::ServerContext* context, testing::FakeService::Writer* writer,
                   std::atomic<bool>* saw_cancel) {
  Events events = GoodEvents();
  events.pop_back();
  Send(events, writer);
  for (int i = 0; i < 1000 && !context->IsCancelled(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  *saw_cancel = context->IsCancelled();
  return grpc::Status::CANCELLED;
}

TEST(ClientTest, DeadlineEndsTheCallAndReachesTheServer) {
  std::atomic<bool> saw_cancel{false};
  {
    FakeServer server;
    server.service.on_prefill = [&](auto* context, const auto&, auto* writer) {
      return Stall(context, writer, &saw_cancel);
    };
    CallOptions options;
    options.timeout = absl::Milliseconds(200);
    const auto outcome = server.Connect()->Prefill({}, options);
    EXPECT_EQ(outcome.status().code(), absl::StatusCode::kDeadlineExceeded) << outcome.status();
  }
  EXPECT_TRUE(saw_cancel);
}

TEST(ClientTest, AnInfiniteTimeoutIsNone) {
  FakeServer server;
  server.service.on_info = [](v1::ModelInfo*) { return grpc::Status::OK; };
  CallOptions options;
  options.timeout = absl::InfiniteDuration();
  const auto info = server.Connect()->Info(options);
  EXPECT_TRUE(info.ok()) << info.status();
}

TEST(ClientTest, ATokenInClearTextStaysOnThisMachine) {
  const std::string path = ::testing::TempDir() + "client_test_token";
  std::ofstream(path) << "secret";
  const auto connect = [&](const std::string& target) {
    ConnectOptions options;
    options.target = target;
    options.token_file = path;
    return Client::Connect(options).status();
  };
  for (const char* local : {"127.0.0.1:5", "127.8.9.1:5", "localhost:5", "localhost", "[::1]:5",
                            "dns:///127.0.0.1:5", "unix:/tmp/s", "127.0.0.1:5,127.0.0.2:5"}) {
    EXPECT_TRUE(connect(local).ok()) << local << connect(local);
  }
  for (const char* remote :
       {"127.0.0.1.example.com:5", "127.example.com", "localhost.example.com:5",
        "dns:///127.0.0.1.example.com:5", "127.0.0.1:5,10.0.0.1:5"}) {
    EXPECT_EQ(connect(remote).code(), absl::StatusCode::kInvalidArgument) << remote;
  }
  std::remove(path.c_str());
}

TEST(ClientTest, CancelFromTheProgressCallback) {
  std::atomic<bool> saw_cancel{false};
  {
    FakeServer server;
    server.service.on_prefill = [&](auto* context, const auto&, auto* writer) {
      return Stall(context, writer, &saw_cancel);
    };
    Cancellation cancellation;
    CallOptions options;
    options.cancellation = &cancellation;
    options.progress = [&cancellation](const PrefillProgress& progress) {
      if (progress.bytes_done > 0) cancellation.Cancel();
    };
    const auto outcome = server.Connect()->Prefill({}, options);
    EXPECT_EQ(outcome.status().code(), absl::StatusCode::kCancelled) << outcome.status();
  }
  EXPECT_TRUE(saw_cancel);
}

TEST(ClientTest, CancelFromAnotherThreadAndBeforeTheCall) {
  std::atomic<bool> saw_cancel{false};
  FakeServer server;
  server.service.on_prefill = [&](auto* context, const auto&, auto* writer) {
    return Stall(context, writer, &saw_cancel);
  };
  Cancellation cancellation;
  CallOptions options;
  options.cancellation = &cancellation;
  auto client = server.Connect();
  std::thread other([&cancellation] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    cancellation.Cancel();
  });
  EXPECT_EQ(client->Prefill({}, options).status().code(), absl::StatusCode::kCancelled);
  other.join();
  EXPECT_EQ(client->Prefill({}, options).status().code(), absl::StatusCode::kCancelled);
}

// A client that has seen a broken stream must not leave the server computing.
TEST(ClientTest, BrokenStreamCancelsTheServer) {
  std::atomic<bool> saw_cancel{false};
  {
    FakeServer server;
    server.service.on_prefill = [&](auto* context, const auto&, auto* writer) {
      Events events(1);
      events[0].mutable_chunk();
      Send(events, writer);
      return Stall(context, writer, &saw_cancel);
    };
    const auto outcome = server.Connect()->Prefill({});
    EXPECT_EQ(DetailsOf(outcome.status()).reason, "MANIFEST_MISSING");
  }
  EXPECT_TRUE(saw_cancel);
}

TEST(ClientTest, ProgressCountsGrowAndEndComplete) {
  FakeServer server;
  server.service.on_prefill = [](auto*, const auto&, auto* writer) {
    return Send(GoodEvents(), writer);
  };
  std::vector<PrefillProgress> seen;
  CallOptions options;
  options.progress = [&seen](const PrefillProgress& progress) { seen.push_back(progress); };
  ASSERT_TRUE(server.Connect()->Prefill({}, options).ok());
  ASSERT_EQ(seen.size(), GoodEvents().size());
  EXPECT_EQ(seen[0].stage, PrefillProgress::Stage::kQueued);
  EXPECT_EQ(seen[0].queue_position, 3u);
  EXPECT_EQ(seen[1].stage, PrefillProgress::Stage::kComputing);
  for (size_t i = 1; i < seen.size(); ++i) EXPECT_GE(seen[i].bytes_done, seen[i - 1].bytes_done);
  EXPECT_EQ(seen.back().bytes_done, GoodManifest().total_bytes());
}

TEST(ClientTest, LargeRequestPassesAndMetadataIsSent) {
  FakeServer server;
  int64_t tokens = 0;
  std::string traceparent;
  server.service.on_prefill = [&](grpc::ServerContext* context, const auto& request, auto* writer) {
    tokens = request.token_ids_size();
    auto found = context->client_metadata().find("traceparent");
    if (found != context->client_metadata().end()) {
      traceparent.assign(found->second.data(), found->second.size());
    }
    return Send(GoodEvents(), writer);
  };
  v1::PrefillRequest request;
  request.mutable_token_ids()->Resize(1 << 21, 1);  // 8 MiB, above gRPC's default limits
  CallOptions options;
  options.traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  ASSERT_TRUE(server.Connect()->Prefill(request, options).ok());
  EXPECT_EQ(tokens, 1 << 21);
  EXPECT_EQ(traceparent, options.traceparent);
}

TEST(ClientTest, UnreachableServerIsUnavailable) {
  auto client = *Client::Connect({.target = "127.0.0.1:1"});
  EXPECT_EQ(client->Info().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(client->Prefill({}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(client->WaitUntilReady(absl::Milliseconds(300)).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(Client::Connect({}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ClientTest, UnavailableBeforeTheFirstAnswerIsTriedAgain) {
  FakeServer server;
  std::atomic<int> asked{0};
  server.service.on_prefill = [&asked](grpc::ServerContext*, const v1::PrefillRequest&,
                                       auto* writer) {
    if (++asked < 3) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "draining");
    return Send(GoodEvents(), writer);
  };
  EXPECT_TRUE(server.Connect()->Prefill({}).ok());
  EXPECT_EQ(asked, 3);
  asked = 0;
  auto once = *Client::Connect({.target = server.target, .max_attempts = 1});
  EXPECT_EQ(once->Prefill({}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(asked, 1);
}

TEST(ClientTest, UnavailableAfterAnAnswerIsNotTriedAgain) {
  FakeServer server;
  std::atomic<int> asked{0};
  server.service.on_prefill = [&asked](grpc::ServerContext*, const v1::PrefillRequest&,
                                       auto* writer) {
    ++asked;
    return Send({GoodEvents().front()}, writer,
                grpc::Status(grpc::StatusCode::UNAVAILABLE, "device lost"));
  };
  EXPECT_EQ(server.Connect()->Prefill({}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(asked, 1);
}

TEST(ClientTest, AttemptsOutOfRange) {
  for (int attempts : {-1, 0, 6}) {
    const auto client = Client::Connect({.target = "127.0.0.1:1", .max_attempts = attempts});
    EXPECT_EQ(client.status().code(), absl::StatusCode::kInvalidArgument) << attempts;
  }
}

TEST(ClientTest, WaitUntilReadyOutlastsLoading) {
  FakeServer server;
  std::atomic<int> asked{0};
  server.service.on_info = [&asked](v1::ModelInfo* info) {
    if (++asked < 3) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "loading");
    info->set_model_name("tiny");
    return grpc::Status::OK;
  };
  const auto info = server.Connect()->WaitUntilReady(absl::Seconds(10));
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->model_name(), "tiny");
  EXPECT_EQ(asked, 3);
}

TEST(ClientTest, ReleaseTellsNotFound) {
  FakeServer server;
  server.service.on_release = [](const v1::ReleaseSnapshotRequest& request) {
    return request.snapshot_id() == "known" && request.tenant() == "t"
               ? grpc::Status::OK
               : grpc::Status(grpc::StatusCode::NOT_FOUND, "no such snapshot");
  };
  auto client = server.Connect();
  EXPECT_TRUE(client->Release("known", "t").ok());
  EXPECT_EQ(client->Release("other", "t").code(), absl::StatusCode::kNotFound);
}

Snapshot GoodSnapshot() { return std::move(Play(GoodEvents())->snapshot); }

TEST(ClientTest, ImportSendsTheImportableTensorsVerifiably) {
  FakeServer server;
  std::vector<v1::SnapshotFrame> frames;
  server.service.on_import = [&frames](const auto& received, v1::SnapshotRef* ref) {
    frames = received;
    ref->set_snapshot_id("id");
    return grpc::Status::OK;
  };
  const Snapshot snapshot = GoodSnapshot();
  v1::Keep keep;
  keep.set_ttl_seconds(60);
  const auto ref = server.Connect()->Import(snapshot, keep, "tenant");
  ASSERT_TRUE(ref.ok()) << ref.status();
  EXPECT_EQ(ref->snapshot_id(), "id");
  ASSERT_EQ(frames.size(), 6u);  // header, four tensors with bytes, end; the empty one has none
  const v1::SnapshotHeader& header = frames[0].header();
  EXPECT_EQ(header.keep().ttl_seconds(), 60u);
  EXPECT_EQ(header.tenant(), "tenant");
  EXPECT_EQ(header.manifest().tensors_size(), 5);  // without the checkpoint
  EXPECT_TRUE(ValidateManifest(header.manifest(), 1 << 20).ok());
  std::vector<uint64_t> hashes;
  for (int i = 0; i < 5; ++i) hashes.push_back(snapshot.hash(i));
  EXPECT_EQ(frames.back().end().digest(), DigestOf(hashes));
  for (size_t i = 1; i + 1 < frames.size(); ++i) {
    const v1::TensorChunk& chunk = frames[i].chunk();
    EXPECT_EQ(chunk.xxh3_64(), XXH3_64bits(chunk.data().data(), chunk.data().size()));
    EXPECT_EQ(chunk.data(), Text(snapshot.data(static_cast<int>(chunk.tensor()))));
  }
}

TEST(ClientTest, ImportTellsTheServersRefusal) {
  FakeServer server;
  server.service.on_import = [](const auto&, v1::SnapshotRef*) {
    return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "another model");
  };
  const auto ref = server.Connect()->Import(GoodSnapshot(), {});
  EXPECT_EQ(ref.status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace sparsegdn::client
