// Uploads that are refused, each for its own reason, and leave nothing behind.
#include <cstring>
#include <functional>
#include <limits>
#include <span>

#include "absl/strings/str_cat.h"
#include "server/engine/status_payload.h"
#include "tests/unit/engine/upload_util.h"

namespace sparsegdn::testing {
namespace {

using engine::ConvLayout;
using engine::ExportDType;

struct Row {
  const char* name;
  std::function<void(Upload&)> spoil;
  const char* want;  // code and reason
};

void ExpectRefused(std::span<const Row> rows) {
  Harness h;
  engine::PrefillRequest request = AfterLast(100);
  const Upload whole = UploadOf(h.Complete(request));
  ASSERT_TRUE(Send(h, whole).ok());
  const engine::EngineGauges before = h.engine().gauges();
  for (const Row& row : rows) {
    Upload upload = whole;
    row.spoil(upload);
    const auto ref = Send(h, upload);
    ASSERT_FALSE(ref.ok()) << row.name;
    const engine::StatusDetails details = engine::DetailsOf(ref.status());
    EXPECT_EQ(absl::StrCat(absl::StatusCodeToString(ref.status().code()), " ", details.reason),
              row.want)
        << row.name << ": " << ref.status();
    EXPECT_FALSE(details.field.empty()) << row.name;
    EXPECT_EQ(h.engine().gauges().kept_snapshots, before.kept_snapshots) << row.name;
    EXPECT_EQ(h.engine().gauges().kept_snapshot_bytes, before.kept_snapshot_bytes) << row.name;
  }
}

TEST(Import, ManifestsThatAreNotOfThisModel) {
  const Row rows[] = {
      {"other model", [](Upload& u) { u.manifest.model_identity[5] = 'b'; },
       "FAILED_PRECONDITION MODEL_MISMATCH"},
      {"other format", [](Upload& u) { u.manifest.format_version = 2; },
       "FAILED_PRECONDITION FORMAT_MISMATCH"},
      {"negative position", [](Upload& u) { u.manifest.position = -1; },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"position past the context", [](Upload& u) { u.manifest.position = 1 << 20; },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"another position", [](Upload& u) { u.manifest.position = 99; },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"no tensors",
       [](Upload& u) {
         u.manifest.tensors.clear();
         u.manifest.total_bytes = 0;
       },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"tensor missing", [](Upload& u) { u.manifest.tensors.pop_back(); },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"tensor twice", [](Upload& u) { u.manifest.tensors.back() = u.manifest.tensors.front(); },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"too many tensors", [](Upload& u) { u.manifest.tensors.resize(100, u.manifest.tensors[0]); },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"layer out of range", [](Upload& u) { u.manifest.tensors[0].layer = 4; },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"layer -1", [](Upload& u) { u.manifest.tensors[0].layer = -1; },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"state on a full layer", [](Upload& u) { u.manifest.tensors[0].layer = 2; },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"another name", [](Upload& u) { u.manifest.tensors[0].name = "layers.0.state"; },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"logits", [](Upload& u) { u.manifest.tensors[0].kind = engine::TensorKind::kLogits; },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"shape transposed",
       [](Upload& u) { std::swap(u.manifest.tensors[0].shape[1], u.manifest.tensors[0].shape[2]); },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"layout flipped",
       [](Upload& u) { u.manifest.tensors[0].state_layout = StateLayout::kValueMajor; },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"shape of another rank", [](Upload& u) { u.manifest.tensors[0].shape.push_back(1); },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"negative extents",
       [](Upload& u) {
         u.manifest.tensors[0].shape = {-4, -8, 16};
       },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"dtype of conv",
       [](Upload& u) {
         u.manifest.tensors[u.IdOf("layers.0.conv_state")].dtype = ExportDType::kBF16;
       },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"conv columns",
       [](Upload& u) {
         u.manifest.tensors[u.IdOf("layers.0.conv_state")].conv_layout = ConvLayout::kThreeColumns;
       },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"FP8 without scale",
       [](Upload& u) {
         u.manifest.tensors[0].dtype = ExportDType::kF8E4M3;
         u.manifest.tensors[0].bytes /= 4;
       },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"FP8 keys",
       [](Upload& u) { u.manifest.tensors[u.IdOf("layers.2.key")].dtype = ExportDType::kF8E4M3; },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"KV of later rows",
       [](Upload& u) { u.manifest.tensors[u.IdOf("layers.2.key")].position = 10; },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"bytes", [](Upload& u) { u.manifest.tensors[0].bytes += 4; },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"total bytes", [](Upload& u) { ++u.manifest.total_bytes; },
       "INVALID_ARGUMENT INVALID_FIELD"},
  };
  ExpectRefused(rows);
}

TEST(Import, DataThatIsNotWholeOrNotSound) {
  const auto rehash = [](Upload& u) {
    u.Cut(300);
    u.Digest();
  };
  const Row rows[] = {
      {"truncated", [](Upload& u) { u.pieces.pop_back(); }, "INVALID_ARGUMENT INVALID_FIELD"},
      {"nothing sent", [](Upload& u) { u.pieces.clear(); }, "INVALID_ARGUMENT INVALID_FIELD"},
      {"duplicated", [](Upload& u) { u.pieces.push_back(u.pieces[3]); },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"overlap from the left", [](Upload& u) { u.pieces[1].offset -= 4; },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"overlap from the right",
       [](Upload& u) {
         std::swap(u.pieces[0], u.pieces[1]);
         u.pieces[1].offset += 4;
       },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"past the end", [](Upload& u) { u.pieces[0].offset = 2048 - 299; },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"offset that wraps", [](Upload& u) { u.pieces[0].offset = ~uint64_t{0} - 10; },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"no such tensor", [](Upload& u) { u.pieces[0].tensor = 1000; },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"empty piece in place of data",
       [](Upload& u) {
         u.pieces[0].data.clear();
         u.pieces[0].hash = engine::Xxh3("");
       },
       "INVALID_ARGUMENT INVALID_FIELD"},
      {"bit flipped", [](Upload& u) { u.pieces[2].data[7] ^= 1; }, "DATA_LOSS CHECKSUM_MISMATCH"},
      {"wrong hash", [](Upload& u) { u.pieces[2].hash ^= 1; }, "DATA_LOSS CHECKSUM_MISMATCH"},
      {"wrong digest", [](Upload& u) { u.digest ^= 1; }, "DATA_LOSS CHECKSUM_MISMATCH"},
      {"pieces swapped between layers",
       [](Upload& u) {
         const uint32_t other = u.IdOf("layers.1.recurrent_state");
         for (Piece& p : u.pieces) {
           if (p.tensor == 0) {
             p.tensor = other;
           } else if (p.tensor == other) {
             p.tensor = 0;
           }
         }
       },
       "DATA_LOSS CHECKSUM_MISMATCH"},
      {"NaN in a state",
       [&](Upload& u) {
         const float nan = std::numeric_limits<float>::quiet_NaN();
         std::memcpy(u.tensors[0].data() + 40, &nan, 4);
         rehash(u);
       },
       "INVALID_ARGUMENT NON_FINITE"},
      {"Inf in a key",
       [&](Upload& u) {
         const float inf = std::numeric_limits<float>::infinity();
         std::memcpy(u.tensors[u.IdOf("layers.2.key")].data(), &inf, 4);
         rehash(u);
       },
       "INVALID_ARGUMENT NON_FINITE"},
      {"a comb of gaps",
       [](Upload& u) {
         const uint32_t key = u.IdOf("layers.2.key");
         u.pieces.clear();
         for (uint64_t at = 0; at < 3000; at += 2) {
           u.pieces.push_back({key, at, std::string(1, 'x'), engine::Xxh3("x")});
         }
       },
       "INVALID_ARGUMENT INVALID_FIELD"},
  };
  ExpectRefused(rows);
}

void ExpectNonFinite(Harness& h, Upload upload, const std::string& name, size_t at, float value) {
  std::memcpy(upload.tensors[upload.IdOf(name)].data() + at, &value, 4);
  upload.Cut(300);
  upload.Digest();
  const auto ref = Send(h, upload);
  ASSERT_FALSE(ref.ok()) << name;
  EXPECT_EQ(engine::DetailsOf(ref.status()).reason, "NON_FINITE") << ref.status();
  EXPECT_EQ(h.engine().gauges().kept_snapshots, 0);
  EXPECT_EQ(h.engine().gauges().kept_snapshot_bytes, 0);
}

TEST(Import, FiniteBytesWhoseValuesOverflowWhenKept) {
  FakeRunnerOptions options;
  options.info = SmallHybridInfo(DType::kBF16);
  Harness h(options);
  engine::PrefillRequest request = AfterLast(100);
  request.outputs.state_dtype = ExportDType::kF8E4M3;
  request.outputs.kv_dtype = ExportDType::kF32;
  const Upload whole = UploadOf(h.Complete(request));
  // Each row's largest code is 448.
  ExpectNonFinite(h, whole, "layers.1.recurrent_state_scale", 8, 1e38f);
  // Halfway to the next power of two and more: to BF16 it rounds up to infinity.
  ExpectNonFinite(h, whole, "layers.2.value", 400, std::numeric_limits<float>::max());
  ASSERT_TRUE(Send(h, whole).ok());
}

}  // namespace
}  // namespace sparsegdn::testing
