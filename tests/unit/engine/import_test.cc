// Uploads: what a call returned comes back as a snapshot, in every dtype and layout.
#include <cmath>
#include <random>

#include "absl/strings/str_cat.h"
#include "tests/unit/engine/upload_util.h"

namespace sparsegdn::testing {
namespace {

using engine::ConvLayout;
using engine::ExportDType;
using engine::PrefillRequest;

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
  EXPECT_EQ(Describe(import->Add(p.tensor, p.offset, p.data, p.hash)),
            "DEADLINE_EXCEEDED  UPLOAD_IDLE");
  EXPECT_EQ(Describe(import->Finish(0).status()), "DEADLINE_EXCEEDED  UPLOAD_IDLE");

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
