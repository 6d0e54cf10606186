// The hand-written frame encoding against protobuf's own, the status mapping, metadata, log lines.
#include <grpcpp/support/proto_buffer_reader.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "server/engine/status_payload.h"
#include "server/service/context.h"
#include "server/service/convert_response.h"
#include "server/service/log.h"
#include "server/service/status.h"
#include "tests/unit/service/fake_engine.h"

namespace sparsegdn::service {
namespace {

v1::PrefillResponse Decode(grpc::ByteBuffer buffer) {
  v1::PrefillResponse response;
  grpc::ProtoBufferReader reader(&buffer);
  EXPECT_TRUE(response.ParseFromZeroCopyStream(&reader));
  return response;
}

TEST(EncodeChunk, EqualsProtobuf) {
  const struct {
    const char* name;
    uint32_t tensor;
    uint64_t offset, hash;
    size_t bytes;
  } rows[] = {
      {"zeros", 0, 0, 0, 0},
      {"one byte", 1, 1, 1, 1},
      {"varint edges", 127, 128, 1, 127},
      {"two-byte length", 128, 16384, ~0ull, 128},
      {"a frame", 300, uint64_t{3} << 30, 0x8000000000000000u, 1 << 20},
      {"largest", 0xffffffffu, ~0ull, 42, 3 << 20},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.name);
    engine::TensorChunk chunk{row.tensor, row.offset,
                              std::make_shared<const std::string>(row.bytes, '\xfe'), row.hash};
    const v1::PrefillResponse got = Decode(EncodeEvent(chunk, ""));
    v1::PrefillResponse want;
    want.mutable_chunk()->set_tensor(row.tensor);
    want.mutable_chunk()->set_byte_offset(row.offset);
    want.mutable_chunk()->set_data(*chunk.data);
    want.mutable_chunk()->set_xxh3_64(row.hash);
    EXPECT_EQ(got.SerializeAsString(), want.SerializeAsString());
  }
}

TEST(EncodeChunk, SharesTheDataAndLetsGo) {
  auto data = std::make_shared<const std::string>(1 << 20, 'x');
  {
    const grpc::ByteBuffer buffer = EncodeEvent(engine::TensorChunk{0, 0, data, 1}, "");
    EXPECT_EQ(data.use_count(), 2);
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(buffer.Dump(&slices).ok());
    ASSERT_EQ(slices.size(), 2u);
    EXPECT_EQ(static_cast<const void*>(slices[1].begin()), static_cast<const void*>(data->data()));
  }
  EXPECT_EQ(data.use_count(), 1);
}

TEST(ToProto, BudgetsCanBeSentBack) {
  Budget budget;
  budget.mode = BudgetMode::kDense;
  v1::Budget out = ToProto(budget);
  EXPECT_FALSE(out.has_retention() || out.has_coverage() || out.has_min_retention() ||
               out.has_keep_last());
  budget.mode = BudgetMode::kRetention;
  out = ToProto(budget);
  EXPECT_EQ(out.retention(), 0.29);
  EXPECT_EQ(out.min_retention(), 0.29 / 4);
  EXPECT_EQ(out.max_retention(), 0.58);
  EXPECT_FALSE(out.has_coverage());
  EXPECT_EQ(out.keep_last(), 64);
  budget.mode = BudgetMode::kCoverage;
  out = ToProto(budget);
  EXPECT_EQ(out.coverage(), 0.9);
  EXPECT_FALSE(out.has_retention());
}

TEST(Status, LongAndBinaryTextsStayUnderTheLimit) {
  const absl::Status status = engine::WithDetails(
      absl::InvalidArgumentError(std::string(100000, '\xff')),
      {std::string(100000, '\x01'), std::string(100000, 'R'), int64_t{1} << 40});
  const grpc::Status out = ToGrpc(status);
  EXPECT_LE(out.error_message().size(), kMaxMessageBytes);
  EXPECT_EQ(out.error_message()[0], '?');
  EXPECT_LT(out.error_details().size(), kMaxDetailsBytes);
  EXPECT_GT(out.error_details().size(), 1000u);
}

TEST(Status, PlainErrorsCarryNoDetails) {
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).ok());
  const grpc::Status out = ToGrpc(absl::InternalError("x"));
  EXPECT_EQ(out.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_TRUE(out.error_details().empty());
}

TEST(Traceparent, OnlyTheStandardsForm) {
  const std::string good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
  EXPECT_TRUE(IsTraceparent(good));
  EXPECT_TRUE(IsTraceparent("01" + good.substr(2) + "-more"));
  for (const std::string& bad :
       {std::string(), good.substr(1), good + "0", good + "-x", "ff" + good.substr(2),
        "0G" + good.substr(2), "00-" + std::string(32, '0') + good.substr(35),
        good.substr(0, 36) + std::string(16, '0') + "-01", "01" + good.substr(2) + "-a\nb"}) {
    EXPECT_FALSE(IsTraceparent(bad)) << bad;
  }
}

TEST(Log, OneLineWhateverTheValue) {
  const std::string nasty = "a\"b\n\xff\x01";
  const std::string line =
      FormatLine(true, LogLevel::kWarning, "T", "event", {{"id", nasty}, {"n", int64_t{3}}});
  const auto parsed = nlohmann::json::parse(line);
  EXPECT_EQ(parsed["level"], "warning");
  EXPECT_EQ(parsed["event"], "event");
  EXPECT_EQ(parsed["n"], 3);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const std::string text = FormatLine(false, LogLevel::kInfo, "T", "event", {{"id", nasty}});
  EXPECT_EQ(text.find('\n'), std::string::npos);
  EXPECT_EQ(text.rfind("T info event id=\"a\\\"b", 0), 0u) << text;
}

}  // namespace
}  // namespace sparsegdn::service
