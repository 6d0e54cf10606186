// Input: what a server streams to the C++ client, as PrefillResponses (frames.h): manifests and
// chunks go to the assembler, a result ends it. A chunk or result with the flag gets its right
// checksum first. Promise: exactly the bytes that were sent, or an error that names its reason, and
// nothing after an error. A manifest may put its tensors into shared memory: its name is replaced
// by that of a real segment of this process, so that every other claim about it is tried.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdio>

#include "sparsegdn/client/status.h"
#include "src/assembler.h"
#include "tests/fuzz/frames.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/unit/client/fake_service.h"

namespace sparsegdn::fuzz {
namespace {

constexpr uint64_t kMaxSnapshotBytes = 1 << 20;

void Refused(const absl::Status& status) {
  NoteOutcome(status);
  RequireRefusal(status,
                 {absl::StatusCode::kDataLoss, absl::StatusCode::kResourceExhausted,
                  absl::StatusCode::kFailedPrecondition},
                 2048);
  Require(!client::DetailsOf(status).reason.empty(), "refused without a reason");
}

constexpr char kSeedName[] = "/sparsegdn-00000000000000000000000000000000";

// A segment for as long as the process lives, of bytes that are known.
class Segment {
 public:
  static constexpr size_t kBytes = 1 << 16;
  Segment() : bytes_(kBytes, '\0') {
    for (size_t i = 0; i < kBytes; ++i) bytes_[i] = static_cast<char>(i * 7 >> 2);
    char name[64];
    std::snprintf(name, sizeof(name), "/sparsegdn-%032x", static_cast<unsigned>(getpid()));
    name_ = name;
    const int fd = shm_open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    flock(fd, LOCK_EX);  // for good: a server that starts meanwhile sees no leftover
    Require(fd >= 0 && write(fd, bytes_.data(), kBytes) == static_cast<ssize_t>(kBytes),
            "no shared memory to test with");
  }
  ~Segment() { shm_unlink(name_.c_str()); }
  const std::string& name() const { return name_; }
  std::string Bytes(uint64_t offset, uint64_t size) const {
    return offset < kBytes ? bytes_.substr(offset, size) : "";
  }

 private:
  std::string bytes_, name_;
};

const Segment& TheSegment() {
  static const Segment segment;
  return segment;
}

class Stream {
 public:
  // False when the stream is over.
  bool Take(const Frame& frame) {
    v1::PrefillResponse message;
    if (!message.ParseFromString(frame.bytes)) return false;
    const bool mend = (frame.flags & kMendChecksum) != 0;
    if (message.has_manifest()) return TakeManifest(*message.mutable_manifest());
    if (message.has_shared_chunks()) {
      for (v1::SharedChunk& chunk : *message.mutable_shared_chunks()->mutable_chunks()) {
        if (!TakeShared(chunk, mend)) return false;
      }
    }
    if (message.has_chunk()) return TakeChunk(*message.mutable_chunk(), mend);
    if (!message.has_result()) return true;
    TakeResult(message.result(), mend);
    return false;
  }

 private:
  bool Check(const absl::Status& status) {
    if (!status.ok()) {
      Refused(status);
      Require(!assembler_.Finish(0).ok(), "a failed stream goes on");
    }
    return status.ok();
  }
  bool TakeManifest(v1::Manifest& manifest) {
    if (manifest.shared_memory().name() == kSeedName) {
      manifest.mutable_shared_memory()->set_name(TheSegment().name());
    }
    if (!Check(assembler_.SetManifest(manifest, /*allow_shared=*/true))) return false;
    places_.assign(manifest.shared_memory().tensor_offsets().begin(),
                   manifest.shared_memory().tensor_offsets().end());
    for (const v1::TensorInfo& info : manifest.tensors()) tensors_.emplace_back(info.bytes(), '\0');
    return true;
  }
  bool TakeChunk(v1::TensorChunk& chunk, bool mend) {
    if (mend) chunk.set_xxh3_64(XXH3_64bits(chunk.data().data(), chunk.data().size()));
    if (!Check(assembler_.Add(chunk))) return false;
    tensors_[chunk.tensor()].replace(chunk.byte_offset(), chunk.data().size(), chunk.data());
    return true;
  }
  bool TakeShared(v1::SharedChunk& chunk, bool mend) {
    const bool known = chunk.tensor() < places_.size() && chunk.byte_offset() < Segment::kBytes &&
                       chunk.bytes() <= Segment::kBytes;
    const std::string bytes =
        known ? TheSegment().Bytes(places_[chunk.tensor()] + chunk.byte_offset(), chunk.bytes())
              : "";
    if (mend) chunk.set_xxh3_64(XXH3_64bits(bytes.data(), bytes.size()));
    if (!Check(assembler_.Add(chunk))) return false;
    Require(known || chunk.bytes() == 0, "a chunk outside the segment is accepted");
    if (known) tensors_[chunk.tensor()].replace(chunk.byte_offset(), bytes.size(), bytes);
    return true;
  }
  void TakeResult(const v1::Result& result, bool mend) {
    std::vector<uint64_t> hashes;
    for (const std::string& t : tensors_) hashes.push_back(XXH3_64bits(t.data(), t.size()));
    const uint64_t digest = client::DigestOf(hashes);
    const bool whole = assembler_.bytes_done() == assembler_.bytes_total();
    const auto snapshot = assembler_.Finish(mend ? digest : result.digest());
    if (!snapshot.ok()) return Refused(snapshot.status());
    NoteOutcome(snapshot.status());
    Require(snapshot->digest() == digest, "a wrong digest is accepted");
    Require(whole, "an incomplete stream is accepted");
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const absl::Span<const uint8_t> data = snapshot->data(static_cast<int>(i));
      Require(std::equal(data.begin(), data.end(), tensors_[i].begin(), tensors_[i].end(),
                         [](uint8_t a, char b) { return a == static_cast<uint8_t>(b); }),
              "other bytes than were sent");
    }
  }

  client::Assembler assembler_{kMaxSnapshotBytes};
  std::vector<std::string> tensors_;
  std::vector<uint64_t> places_;  // in shared memory
};

std::string FrameOf(const v1::PrefillResponse& message) {
  return JoinFrames({{kMendChecksum, message.SerializeAsString()}});
}

std::string StreamOf(const v1::Manifest& manifest, size_t piece_bytes) {
  v1::PrefillResponse message;
  message.mutable_accepted()->set_queue_position(1);
  std::string out = FrameOf(message);
  *message.mutable_manifest() = manifest;
  out += FrameOf(message);
  for (int i = 0; i < manifest.tensors_size(); ++i) {
    const std::string bytes = client::testing::GoodBytes(manifest, i);
    for (size_t at = 0; at < bytes.size(); at += piece_bytes) {
      message.mutable_chunk()->set_tensor(static_cast<uint32_t>(i));
      message.mutable_chunk()->set_byte_offset(at);
      client::testing::SetData(message.mutable_chunk(), bytes.substr(at, piece_bytes));
      out += FrameOf(message);
    }
  }
  message.mutable_result()->set_digest(client::testing::GoodDigest(manifest));
  return out + FrameOf(message);
}

// The same snapshot in the segment, each tensor in two chunks.
std::string SharedStreamOf(v1::Manifest manifest, uint64_t segment_bytes) {
  v1::SharedMemory& shared = *manifest.mutable_shared_memory();
  shared.set_name(kSeedName);
  shared.set_bytes(segment_bytes);
  uint64_t end = 0;
  for (const v1::TensorInfo& info : manifest.tensors()) {
    shared.add_tensor_offsets(end);
    end = (end + info.bytes() + 63) / 64 * 64;
  }
  v1::PrefillResponse message;
  *message.mutable_manifest() = manifest;
  std::string out = FrameOf(message);
  for (int i = 0; i < manifest.tensors_size(); ++i) {
    const uint64_t bytes = manifest.tensors(i).bytes(), half = bytes / 2;
    message.clear_shared_chunks();
    for (const auto& [begin, size] :
         {std::pair{half, bytes - half}, std::pair{uint64_t{0}, half}}) {
      v1::SharedChunk& chunk = *message.mutable_shared_chunks()->add_chunks();
      chunk.set_tensor(static_cast<uint32_t>(i));
      chunk.set_byte_offset(begin);
      chunk.set_bytes(size);
    }
    out += FrameOf(message);
  }
  message.mutable_result();
  return out + FrameOf(message);
}

}  // namespace

int FuzzResponseStream(const uint8_t* data, size_t size) {
  Stream stream;
  for (const Frame& frame : SplitFrames({reinterpret_cast<const char*>(data), size})) {
    if (!stream.Take(frame)) break;
  }
  return 0;
}

std::vector<std::string> ResponseStreamSeeds() {
  const v1::Manifest good = client::testing::GoodManifest();
  v1::Manifest empty = good;
  empty.clear_tensors();
  empty.set_total_bytes(0);
  v1::Manifest huge = good;
  huge.mutable_tensors(3)->set_shape(0, int64_t{1} << 40);
  return {StreamOf(good, 1000),
          StreamOf(good, 64),
          StreamOf(empty, 1),
          StreamOf(huge, 5000),
          SharedStreamOf(good, Segment::kBytes),
          SharedStreamOf(good, 64)};
}

}  // namespace sparsegdn::fuzz
