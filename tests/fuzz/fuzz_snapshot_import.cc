// Input: a stream of SnapshotFrames (frames.h) as ImportSnapshot receives it; a chunk or an end
// with the flag gets its right checksum first. Promise: a refusal that frees everything, or a
// snapshot that holds exactly the uploaded bytes and can be resumed from.
#include <cmath>
#include <cstring>

#include "server/engine/frame_writer.h"
#include "server/engine/status_payload.h"
#include "server/service/convert_request.h"
#include "server/service/convert_response.h"
#include "tests/fuzz/frames.h"
#include "tests/fuzz/fuzz_engine.h"
#include "tests/fuzz/fuzz_target.h"

namespace sparsegdn::fuzz {
namespace {

using absl::StatusCode;
using service::FromProto;

constexpr char kTenant[] = "t";

// The frames' order as server/service/import_reactor.cc has it, and what a client knows of its own
// upload.
class Upload {
 public:
  // False when the stream is over, for good or bad.
  bool Take(const Frame& frame) {
    v1::SnapshotFrame message;
    if (!message.ParseFromString(frame.bytes)) return false;
    const bool mend = (frame.flags & kMendChecksum) != 0;
    if (message.has_header() && import_ == nullptr) return TakeHeader(message.header());
    if (message.has_chunk() && import_ != nullptr) return TakeChunk(*message.mutable_chunk(), mend);
    if (message.has_end() && import_ != nullptr) TakeEnd(message.end(), mend);
    return false;
  }
  const std::optional<engine::SnapshotRef>& ref() const { return ref_; }

 private:
  bool Refused(const absl::Status& status) {
    NoteOutcome(status);
    RequireRefusal(status,
                   {StatusCode::kInvalidArgument, StatusCode::kFailedPrecondition,
                    StatusCode::kDataLoss, StatusCode::kResourceExhausted},
                   1024);
    Require(!engine::DetailsOf(status).reason.empty(), "refused without a reason");
    return false;
  }
  bool TakeHeader(const v1::SnapshotHeader& header) {
    absl::StatusOr<engine::Manifest> manifest = FromProto(header.manifest());
    if (!manifest.ok()) return Refused(manifest.status());
    auto import =
        FuzzEngine::Get().engine().BeginImport(*manifest, header.keep().ttl_seconds(), kTenant);
    if (!import.ok()) return Refused(import.status());
    import_ = *std::move(import);
    manifest_ = *std::move(manifest);
    tensors_.resize(manifest_.tensors.size());
    return true;
  }
  bool TakeChunk(v1::TensorChunk& chunk, bool mend) {
    if (mend) chunk.set_xxh3_64(engine::Xxh3(chunk.data()));
    const absl::Status status =
        import_->Add(chunk.tensor(), chunk.byte_offset(), chunk.data(), chunk.xxh3_64());
    if (!status.ok()) {
      Require(import_->Finish(0).status().code() == status.code(), "a failed upload goes on");
      return Refused(status);
    }
    const uint64_t most = manifest_.tensors[chunk.tensor()].bytes;
    Require(chunk.byte_offset() <= most && chunk.data().size() <= most - chunk.byte_offset(),
            "a chunk beyond its tensor is accepted");
    std::string& bytes = tensors_[chunk.tensor()];
    bytes.resize(most);
    bytes.replace(chunk.byte_offset(), chunk.data().size(), chunk.data());
    received_ += chunk.data().size();
    return true;
  }
  void TakeEnd(const v1::SnapshotEnd& end, bool mend) {
    std::vector<uint64_t> hashes;
    for (const std::string& bytes : tensors_) hashes.push_back(engine::Xxh3(bytes));
    const uint64_t digest = engine::DigestOf(hashes);
    const absl::StatusOr<engine::SnapshotRef> ref = import_->Finish(mend ? digest : end.digest());
    if (!ref.ok()) {
      Refused(ref.status());
      return;
    }
    NoteOutcome(ref.status());
    Require(mend || end.digest() == digest, "a wrong digest is accepted");
    Require(received_ == manifest_.total_bytes, "an incomplete upload is accepted");
    Require(ref->position == manifest_.position, "position");
    ref_ = *ref;
  }

  std::unique_ptr<engine::SnapshotImport> import_;
  engine::Manifest manifest_;
  std::vector<std::string> tensors_;
  uint64_t received_ = 0;
  std::optional<engine::SnapshotRef> ref_;
};

void RequireFinite(const Answer& answer) {
  for (const auto& [tensor, bytes] : answer.tensors) {
    Require(answer.manifest->tensors[tensor].dtype == engine::ExportDType::kF32, "dtype");
    for (size_t at = 0; at < bytes.size(); at += sizeof(float)) {
      float value;
      std::memcpy(&value, bytes.data() + at, sizeof(value));
      Require(std::isfinite(value), "a snapshot that is not finite is kept");
    }
  }
}

// One token more: before it the states are the uploaded ones, after it they are computed from them.
void Resume(const engine::SnapshotRef& ref) {
  engine::PrefillRequest request;
  request.tokens = {5};
  request.resume_from = ref.snapshot_id;
  request.tenant = std::string(kTenant);
  for (const auto at : {engine::SnapshotAt::kBeforeLast, engine::SnapshotAt::kAfterLast}) {
    request.snapshot_at = at;
    const Answer answer = FuzzEngine::Get().Complete(request);
    if (answer.status.ok()) {
      RequireFinite(answer);
    } else {
      RequireRefusal(answer.status, {StatusCode::kOutOfRange}, 1024);
    }
  }
}

std::string FrameOf(const v1::SnapshotFrame& message, uint8_t flags = kMendChecksum) {
  return JoinFrames({{flags, message.SerializeAsString()}});
}

// What the engine itself returns for a prompt, sent back in pieces; with `scale`, that in place of
// the first scale of each FP8 state.
std::string UploadOf(engine::PrefillRequest request, size_t piece_bytes, float scale = 0) {
  Answer answer = FuzzEngine::Get().Complete(std::move(request));
  Require(answer.status.ok(), answer.status.ToString());
  for (auto& [tensor, bytes] : answer.tensors) {
    const bool is_scale =
        answer.manifest->tensors[tensor].kind == engine::TensorKind::kRecurrentStateScale;
    if (scale != 0 && is_scale) std::memcpy(bytes.data(), &scale, sizeof(scale));
  }
  v1::SnapshotFrame header;
  *header.mutable_header()->mutable_manifest() = service::ToProto(*answer.manifest);
  header.mutable_header()->mutable_keep()->set_ttl_seconds(50);
  std::string out = FrameOf(header, 0);
  for (const auto& [tensor, bytes] : answer.tensors) {
    for (size_t at = 0; at < bytes.size(); at += piece_bytes) {
      v1::SnapshotFrame chunk;
      chunk.mutable_chunk()->set_tensor(tensor);
      chunk.mutable_chunk()->set_byte_offset(at);
      chunk.mutable_chunk()->set_data(bytes.substr(at, piece_bytes));
      chunk.mutable_chunk()->set_xxh3_64(engine::Xxh3(chunk.chunk().data()));
      out += FrameOf(chunk);
    }
  }
  v1::SnapshotFrame end;
  end.mutable_end()->set_digest(answer.result->digest);
  return out + FrameOf(end);
}

engine::PrefillRequest Prompt(int tokens) {
  engine::PrefillRequest request;
  for (int i = 0; i < tokens; ++i) request.tokens.push_back(i * 7 % 1000);
  return request;
}

}  // namespace

int FuzzSnapshotImport(const uint8_t* data, size_t size) {
  FuzzEngine& fuzz = FuzzEngine::Get();
  {
    Upload upload;
    for (const Frame& frame : SplitFrames({reinterpret_cast<const char*>(data), size})) {
      if (!upload.Take(frame)) break;
    }
    if (upload.ref().has_value()) {
      Resume(*upload.ref());
      Require(fuzz.engine().ReleaseSnapshot(upload.ref()->snapshot_id, kTenant).ok(), "release");
    }
  }
  const engine::EngineGauges gauges = fuzz.engine().gauges();
  Require(gauges.kept_snapshots == 0 && gauges.kept_snapshot_bytes == 0, "bytes are left behind");
  fuzz.RequireIdle();
  return 0;
}

std::vector<std::string> SnapshotImportSeeds() {
  engine::PrefillRequest narrow = Prompt(21);
  narrow.outputs.state_dtype = engine::ExportDType::kF8E4M3;
  narrow.outputs.state_layout = StateLayout::kValueMajor;
  narrow.outputs.kv_dtype = engine::ExportDType::kBF16;
  narrow.outputs.conv_layout = engine::ConvLayout::kThreeColumns;
  engine::PrefillRequest bf16 = Prompt(4);
  bf16.outputs.state_dtype = engine::ExportDType::kBF16;
  const std::string whole = UploadOf(Prompt(10), 4096);
  return {whole,
          UploadOf(narrow, 1000),
          UploadOf(narrow, 1000, 3e38f),  // finite in itself, not times the state
          UploadOf(bf16, 300),
          UploadOf(Prompt(1), 4096),
          whole.substr(0, whole.size() / 2),
          ""};
}

}  // namespace sparsegdn::fuzz
