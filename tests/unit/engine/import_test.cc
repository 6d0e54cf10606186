// Uploads: what a call returned comes back as a snapshot, in every dtype and layout; everything
// else is refused and leaves nothing behind.
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "absl/strings/str_cat.h"
#include "server/engine/frame_writer.h"
#include "server/engine/status_payload.h"
#include "tests/unit/engine/engine_test_util.h"

namespace sparsegdn::testing {
namespace {

using engine::ConvLayout;
using engine::ExportDType;
using engine::Manifest;
using engine::PrefillRequest;

struct Piece {
  uint32_t tensor;
  uint64_t offset;
  std::string data;
  uint64_t hash;
};

// A whole upload, to be spoiled by a row of a table.
struct Upload {
  Manifest manifest;
  std::vector<std::string> tensors;
  std::vector<Piece> pieces;
  uint64_t digest = 0;

  void Cut(size_t bytes) {
    pieces.clear();
    for (uint32_t t = 0; t < tensors.size(); ++t) {
      for (size_t at = 0; at < tensors[t].size(); at += bytes) {
        std::string data = tensors[t].substr(at, bytes);
        const uint64_t hash = engine::Xxh3(data);
        pieces.push_back({t, at, std::move(data), hash});
      }
    }
  }
  void Digest() {
    std::vector<uint64_t> hashes;
    for (const std::string& t : tensors) hashes.push_back(engine::Xxh3(t));
    digest = engine::DigestOf(hashes);
  }
  uint32_t IdOf(const std::string& name) const {
    for (uint32_t i = 0; i < manifest.tensors.size(); ++i) {
      if (manifest.tensors[i].name == name) return i;
    }
    ADD_FAILURE() << name;
    return 0;
  }
};

Upload UploadOf(const Collected& got) {
  Upload upload;
  upload.manifest = *got.manifest;
  upload.tensors = got.tensors;
  upload.Cut(300);
  upload.Digest();
  return upload;
}

absl::StatusOr<engine::SnapshotRef> Send(Harness& h, const Upload& upload) {
  auto import = h.engine().BeginImport(upload.manifest, 50, "t");
  if (!import.ok()) return import.status();
  for (const Piece& p : upload.pieces) {
    if (absl::Status s = (*import)->Add(p.tensor, p.offset, p.data, p.hash); !s.ok()) return s;
  }
  return (*import)->Finish(upload.digest);
}

PrefillRequest AfterLast(int64_t tokens) {
  PrefillRequest request = Harness::Prompt(tokens);
  request.snapshot_at = engine::SnapshotAt::kAfterLast;
  return request;
}

TEST(Import, EveryDTypeAndLayoutResumesAsTheOriginal) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    for (const StateLayout layout : {StateLayout::kKeyMajor, StateLayout::kValueMajor}) {
      for (const ExportDType kv : {ExportDType::kF32, ExportDType::kBF16}) {
        for (const ConvLayout conv : {ConvLayout::kFourColumns, ConvLayout::kThreeColumns}) {
          FakeRunnerOptions options;
          options.info = SmallHybridInfo(compute);
          Harness h(options);
          PrefillRequest request = AfterLast(300);
          request.outputs.state_layout = layout;
          request.outputs.kv_dtype = kv;
          request.outputs.conv_layout = conv;
          const auto ref = Send(h, UploadOf(h.Complete(request)));
          ASSERT_TRUE(ref.ok()) << ref.status();
          EXPECT_EQ(ref->position, 300);
          EXPECT_EQ(ref->ttl_seconds, 50u);
          EXPECT_EQ(ref->bytes, static_cast<uint64_t>(engine::Layout(h.info).kept_bytes(300)));
          EXPECT_EQ(h.engine().gauges().kept_snapshot_bytes, static_cast<int64_t>(ref->bytes));
          PrefillRequest next;
          next.tokens = {5, 6, 7, 8, 9};
          next.resume_from = ref->snapshot_id;
          next.tenant = "t";
          next.snapshot_at = engine::SnapshotAt::kAfterLast;
          const Collected got = h.Complete(next);
          ASSERT_TRUE(got.status->ok()) << *got.status;
          std::vector<int32_t> all = request.tokens;
          all.insert(all.end(), next.tokens.begin(), next.tokens.end());
          EXPECT_EQ(got.Floats("layers.3.recurrent_state"), FakeState(h.info, 3, all));
          EXPECT_EQ(got.Floats("layers.0.conv_state"), FakeConv(h.info, all));
          const std::vector<float> logits = FakeLogits(h.info, all);
          EXPECT_EQ(got.result->next_token,
                    std::max_element(logits.begin(), logits.end()) - logits.begin());
        }
      }
    }
  }
}

TEST(Import, NarrowStatesComeBackAsTheirValues) {
  for (const StateLayout layout : {StateLayout::kKeyMajor, StateLayout::kValueMajor}) {
    for (const ExportDType dtype : {ExportDType::kBF16, ExportDType::kF8E4M3}) {
      Harness h;
      PrefillRequest request = AfterLast(100);
      request.outputs.state_dtype = dtype;
      request.outputs.state_layout = layout;
      const Collected narrow = h.Complete(request);
      const auto ref = Send(h, UploadOf(narrow));
      ASSERT_TRUE(ref.ok()) << ref.status();
      PrefillRequest same = Harness::Prompt(1);  // the snapshot itself, FP32, key-major
      same.resume_from = ref->snapshot_id;
      same.tenant = "t";
      const Collected wide = h.Complete(same);
      const std::vector<float> got = wide.Floats("layers.1.recurrent_state");
      const std::vector<float> want = FakeState(h.info, 1, request.tokens);
      float amax = 0;
      for (const float x : want) amax = std::max(amax, std::fabs(x));
      // BF16: half an ulp. FP8: 2^-4 of the value or 2^-10 of the row's scale amax / 448.
      const bool bf16 = dtype == ExportDType::kBF16;
      for (size_t i = 0; i < want.size(); ++i) {
        const float bound = bf16 ? std::fabs(want[i]) * 0x1p-8f
                                 : std::fabs(want[i]) * 0x1.01p-4f + amax / 448 * 0x1p-10f;
        EXPECT_LE(std::fabs(got[i] - want[i]), bound);
      }
    }
  }
}

TEST(Import, PiecesInAnyOrderAndAnySize) {
  Harness h;
  Upload upload = UploadOf(h.Complete(AfterLast(100)));
  std::mt19937 rng(5);
  for (const size_t bytes : {1000000, 64, 7}) {
    upload.Cut(bytes);
    std::shuffle(upload.pieces.begin(), upload.pieces.end(), rng);
    EXPECT_TRUE(Send(h, upload).ok()) << bytes;
  }
}

TEST(Import, AnEmptyPieceCarriesNothing) {
  Harness h;
  Upload upload = UploadOf(h.Complete(AfterLast(100)));
  upload.pieces.insert(upload.pieces.begin(), {0, 7, "", engine::Xxh3("")});
  EXPECT_TRUE(Send(h, upload).ok());
}

TEST(Import, PositionZeroIsTheZeroState) {
  Harness h;
  const auto ref = Send(h, UploadOf(h.Complete(Harness::Prompt(1))));
  ASSERT_TRUE(ref.ok()) << ref.status();
  PrefillRequest next = AfterLast(50);
  next.resume_from = ref->snapshot_id;
  next.tenant = "t";
  const Collected got = h.Complete(next);
  ASSERT_TRUE(got.status->ok());
  EXPECT_EQ(got.Floats("layers.0.recurrent_state"), FakeState(h.info, 0, next.tokens));
}

struct Row {
  const char* name;
  std::function<void(Upload&)> spoil;
  const char* want;  // code and reason
};

void ExpectRefused(std::span<const Row> rows) {
  Harness h;
  PrefillRequest request = AfterLast(100);
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

TEST(Import, AFailedUploadStaysFailed) {
  Harness h;
  const Upload upload = UploadOf(h.Complete(AfterLast(100)));
  auto import = *h.engine().BeginImport(upload.manifest, 0, "");
  const Piece& p = upload.pieces[0];
  EXPECT_FALSE(import->Add(p.tensor, p.offset, p.data, p.hash ^ 1).ok());
  EXPECT_EQ(h.engine().gauges().kept_snapshot_bytes, 0);
  EXPECT_EQ(import->Add(p.tensor, p.offset, p.data, p.hash).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(import->Finish(upload.digest).status().code(), absl::StatusCode::kDataLoss);
}

TEST(Import, AHeaderAloneCostsNothingAndIdleUploadsAreFreed) {
  Harness h;
  const Upload upload = UploadOf(h.Complete(AfterLast(100)));
  auto import = *h.engine().BeginImport(upload.manifest, 0, "");
  EXPECT_EQ(h.engine().gauges().kept_snapshot_bytes, 0);
  const Piece& p = upload.pieces[0];
  ASSERT_TRUE(import->Add(p.tensor, p.offset, p.data, p.hash).ok());
  EXPECT_GT(h.engine().gauges().kept_snapshot_bytes, 0);
  h.clock.AdvanceSeconds(29);
  h.RunRounds(1);
  EXPECT_GT(h.engine().gauges().kept_snapshot_bytes, 0);
  h.clock.AdvanceSeconds(2);
  h.RunRounds(1);
  EXPECT_EQ(h.engine().gauges().kept_snapshot_bytes, 0);
  EXPECT_EQ(import->Finish(0).status().code(), absl::StatusCode::kDeadlineExceeded);

  auto dropped = *h.engine().BeginImport(upload.manifest, 0, "");
  ASSERT_TRUE(dropped->Add(p.tensor, p.offset, p.data, p.hash).ok());
  dropped.reset();
  EXPECT_EQ(h.engine().gauges().kept_snapshot_bytes, 0);
}

TEST(Import, LargerThanTheTableNeverFits) {
  engine::EngineConfig config = Harness::DenseConfig();
  config.kept_snapshot_bytes = 8000;
  Harness h({}, config);
  const absl::Status status = Send(h, UploadOf(h.Complete(AfterLast(100)))).status();
  EXPECT_EQ(Describe(status), "RESOURCE_EXHAUSTED manifest.total_bytes NEVER_FITS");
}

TEST(Import, RandomlySpoiledUploadsAreNeverKept) {
  Harness h;
  const Upload whole = UploadOf(h.Complete(AfterLast(60)));
  std::mt19937 rng(17);
  for (int trial = 0; trial < 500; ++trial) {
    Upload u = whole;
    Piece& p = u.pieces[rng() % u.pieces.size()];
    switch (rng() % 5) {
      case 0:
        p.data[rng() % p.data.size()] ^= static_cast<char>(1 << rng() % 8);
        break;
      case 1:
        p.offset += 1 + rng() % 100;
        break;
      case 2:
        p.tensor = (p.tensor + 1 + rng() % 10) % (2 * u.tensors.size() + 1);
        break;
      case 3:
        p.data.resize(rng() % p.data.size());
        p.hash = engine::Xxh3(p.data);
        break;
      case 4:
        u.pieces.erase(u.pieces.begin() + static_cast<std::ptrdiff_t>(rng() % u.pieces.size()));
        break;
    }
    EXPECT_FALSE(Send(h, u).ok()) << trial;
  }
  EXPECT_EQ(h.engine().gauges().kept_snapshots, 0);
  EXPECT_EQ(h.engine().gauges().kept_snapshot_bytes, 0);
}

}  // namespace
}  // namespace sparsegdn::testing
