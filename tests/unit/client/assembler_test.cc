// Goal: the assembler accepts exactly the streams that carry every byte once. Method: random cuts
// and orders of a sound snapshot must all give the same bytes; random single faults must all fail.
// The same of bytes in shared memory, and whatever a manifest may claim about it.
#include "src/assembler.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>

#include "fake_service.h"
#include "sparsegdn/client/status.h"

namespace sparsegdn::client {
namespace {

using testing::GoodBytes;
using testing::GoodDigest;
using testing::GoodManifest;
using testing::SetData;

// Chunks of random sizes from 1 to 64 in random order, with some empty ones.
std::vector<v1::TensorChunk> RandomChunks(const v1::Manifest& manifest, std::mt19937* random) {
  std::vector<v1::TensorChunk> chunks;
  for (int i = 0; i < manifest.tensors_size(); ++i) {
    const std::string bytes = GoodBytes(manifest, i);
    for (size_t offset = 0; offset < bytes.size();) {
      const size_t size = std::min<size_t>(1 + (*random)() % 64, bytes.size() - offset);
      v1::TensorChunk chunk;
      chunk.set_tensor(i);
      chunk.set_byte_offset(offset);
      SetData(&chunk, bytes.substr(offset, size));
      chunks.push_back(chunk);
      offset += size;
    }
    v1::TensorChunk empty;
    empty.set_tensor(i);
    empty.set_byte_offset((*random)() % (bytes.size() + 1));
    SetData(&empty, "");
    chunks.push_back(empty);
  }
  std::shuffle(chunks.begin(), chunks.end(), *random);
  return chunks;
}

absl::StatusOr<Snapshot> Assemble(const v1::Manifest& manifest,
                                  const std::vector<v1::TensorChunk>& chunks) {
  Assembler assembler(1 << 20);
  absl::Status status = assembler.SetManifest(manifest);
  for (const v1::TensorChunk& chunk : chunks) {
    if (!status.ok()) return status;
    status = assembler.Add(chunk);
  }
  if (!status.ok()) return status;
  return assembler.Finish(GoodDigest(manifest));
}

// Memory that can be had without pushing others out; 0 where the system does not say.
uint64_t AvailableBytes() {
  std::ifstream info("/proc/meminfo");
  std::string line;
  while (std::getline(info, line)) {
    if (line.rfind("MemAvailable:", 0) == 0) return std::stoull(line.substr(13)) * 1024;
  }
  return 0;
}

TEST(AssemblerTest, EveryCutAndOrderGivesTheSameBytes) {
  const v1::Manifest manifest = GoodManifest();
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const auto snapshot = Assemble(manifest, RandomChunks(manifest, &random));
    ASSERT_TRUE(snapshot.ok()) << snapshot.status();
    for (int i = 0; i < snapshot->size(); ++i) {
      const auto data = snapshot->data(i);
      ASSERT_EQ(std::string(reinterpret_cast<const char*>(data.data()), data.size()),
                GoodBytes(manifest, i));
    }
  }
}

// One random fault of a random chunk that carries bytes.
void Break(std::vector<v1::TensorChunk>* chunks, std::mt19937* random) {
  size_t i = 0;
  do {
    i = (*random)() % chunks->size();
  } while ((*chunks)[i].data().empty());
  v1::TensorChunk& chunk = (*chunks)[i];
  switch ((*random)() % 6) {
    case 0:
      chunks->erase(chunks->begin() + static_cast<std::ptrdiff_t>(i));
      break;
    case 1:
      chunks->push_back(chunk);
      break;
    case 2: {
      std::string data = chunk.data();
      data[(*random)() % data.size()] ^= static_cast<char>(1 << ((*random)() % 8));
      if ((*random)() % 2 == 0) {
        SetData(&chunk, data);
      } else {
        chunk.set_data(data);
      }
      break;
    }
    case 3:
      chunk.set_byte_offset(chunk.byte_offset() + 1 + (*random)() % 7);
      break;
    case 4:
      SetData(&chunk, chunk.data().substr(0, chunk.data().size() - 1));
      break;
    default:
      SetData(&chunk, chunk.data() + "x");
      break;
  }
}

TEST(AssemblerTest, EverySingleFaultIsSeen) {
  const v1::Manifest manifest = GoodManifest();
  std::mt19937 random(2);
  for (int round = 0; round < 2000; ++round) {
    std::vector<v1::TensorChunk> chunks = RandomChunks(manifest, &random);
    Break(&chunks, &random);
    const auto snapshot = Assemble(manifest, chunks);
    ASSERT_FALSE(snapshot.ok()) << "round " << round;
    ASSERT_FALSE(DetailsOf(snapshot.status()).reason.empty());
  }
}

TEST(AssemblerTest, AfterAnErrorNothingComesOut) {
  const v1::Manifest manifest = GoodManifest();
  std::mt19937 random(3);
  Assembler assembler(1 << 20);
  ASSERT_TRUE(assembler.SetManifest(manifest).ok());
  v1::TensorChunk bad;
  bad.set_tensor(99);
  EXPECT_FALSE(assembler.Add(bad).ok());
  for (const v1::TensorChunk& chunk : RandomChunks(manifest, &random)) {
    EXPECT_FALSE(assembler.Add(chunk).ok());
  }
  EXPECT_FALSE(assembler.Finish(GoodDigest(manifest)).ok());
}

TEST(AssemblerTest, ASnapshotLeavesOnce) {
  v1::Manifest manifest;
  manifest.set_format_version(1);
  Assembler assembler(0);
  ASSERT_TRUE(assembler.SetManifest(manifest).ok());
  EXPECT_TRUE(assembler.Finish(DigestOf({})).ok());
  EXPECT_FALSE(assembler.Finish(DigestOf({})).ok());
}

// Beyond 2^32 bytes: every length, offset and hash has 64 bits. The last chunk comes first.
TEST(LongAssemblerTest, ATensorOfMoreThanFourGigabytes) {
  constexpr uint64_t kPiece = 64 << 20, kPieces = 65, kBytes = kPiece * kPieces;
  static_assert(kBytes == (uint64_t{1} << 32) + kPiece);
  const uint64_t available = AvailableBytes();
  if (available < kBytes + (uint64_t{1} << 30)) {
    GTEST_SKIP() << "needs 5.1 GiB of memory, available are " << (available >> 20) << " MiB";
  }
  v1::Manifest manifest;
  manifest.set_format_version(1);
  constexpr int64_t kTokens = kBytes / (2 * 64 * 4);
  manifest.set_position(kTokens);
  testing::AddTensor(&manifest, "layers.0.key", v1::TENSOR_KIND_KEY, v1::DTYPE_FP32,
                     {kTokens, 2, 64});
  Assembler assembler(kBytes);
  ASSERT_TRUE(assembler.SetManifest(manifest).ok());
  v1::TensorChunk chunk;
  std::string piece(kPiece, '\0');
  for (uint64_t i = 0; i < kPiece; ++i) piece[i] = static_cast<char>(i * 31 + (i >> 13));
  // No two pieces are equal, so that one in another's place shows.
  const auto mark = [&](uint64_t i) {
    for (const uint64_t at : {uint64_t{0}, kPiece - 1}) piece[at] = static_cast<char>(i + 1);
  };
  for (uint64_t i = 0; i < kPieces; ++i) {
    const uint64_t at = i == 0 ? kPieces - 1 : i - 1;
    mark(at);
    chunk.set_byte_offset(at * kPiece);
    SetData(&chunk, piece);
    ASSERT_TRUE(assembler.Add(chunk).ok()) << at;
  }
  EXPECT_EQ(assembler.bytes_done(), kBytes);
  XXH3_state_t* state = XXH3_createState();
  XXH3_64bits_reset(state);
  for (uint64_t i = 0; i < kPieces; ++i) {
    mark(i);
    XXH3_64bits_update(state, piece.data(), piece.size());
  }
  const uint64_t hash = XXH3_64bits_digest(state);
  XXH3_freeState(state);
  const absl::StatusOr<Snapshot> snapshot = assembler.Finish(DigestOf({hash}));
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  EXPECT_EQ(snapshot->hash(0), hash);
  const absl::Span<const uint8_t> data = snapshot->data(0);
  ASSERT_EQ(data.size(), kBytes);
  for (uint64_t i = 0; i < kPieces; ++i) {
    mark(i);
    ASSERT_EQ(0, std::memcmp(data.data() + i * kPiece, piece.data(), kPiece)) << i;
  }
}

// A segment as a server makes it, with the good bytes of every tensor, and its manifest.
class Segment {
 public:
  explicit Segment(bool is_long_enough = true) : manifest_(GoodManifest()) {
    v1::SharedMemory* shared = manifest_.mutable_shared_memory();
    std::string bytes;
    for (int i = 0; i < manifest_.tensors_size(); ++i) {
      bytes.resize((bytes.size() + 63) / 64 * 64);
      shared->add_tensor_offsets(bytes.size());
      bytes += GoodBytes(manifest_, i);
    }
    char name[64];
    std::snprintf(name, sizeof(name), "/sparsegdn-%032x", static_cast<unsigned>(getpid()));
    shared->set_name(name);
    shared->set_bytes(bytes.size());
    fd_ = shm_open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    flock(fd_, LOCK_EX | LOCK_NB);  // a server that starts meanwhile sees no leftover
    EXPECT_EQ(write(fd_, bytes.data(), bytes.size() - !is_long_enough),
              static_cast<ssize_t>(bytes.size()) - !is_long_enough);
  }
  ~Segment() {
    Unlink();
    close(fd_);
  }
  void Unlink() { shm_unlink(manifest_.shared_memory().name().c_str()); }
  void Flip(uint64_t at) {
    const int fd = shm_open(manifest_.shared_memory().name().c_str(), O_RDWR, 0);
    char byte = 0;
    EXPECT_EQ(pread(fd, &byte, 1, static_cast<off_t>(at)), 1);
    byte = static_cast<char>(byte ^ 4);
    EXPECT_EQ(pwrite(fd, &byte, 1, static_cast<off_t>(at)), 1);
    close(fd);
  }
  const v1::Manifest& manifest() const { return manifest_; }

 private:
  v1::Manifest manifest_;
  int fd_ = -1;
};

v1::SharedChunk Shared(const v1::TensorChunk& chunk) {
  v1::SharedChunk shared;
  shared.set_tensor(chunk.tensor());
  shared.set_byte_offset(chunk.byte_offset());
  shared.set_bytes(chunk.data().size());
  shared.set_xxh3_64(chunk.xxh3_64());
  return shared;
}

TEST(SharedMemoryTest, EveryCutAndOrderGivesTheSameBytes) {
  Segment segment;
  std::mt19937 random(4);
  for (int round = 0; round < 50; ++round) {
    Assembler assembler(1 << 20);
    ASSERT_TRUE(assembler.SetManifest(segment.manifest(), true).ok());
    for (const v1::TensorChunk& chunk : RandomChunks(segment.manifest(), &random)) {
      ASSERT_TRUE(assembler.Add(Shared(chunk)).ok());
    }
    if (round == 49) segment.Unlink();  // what is mapped stays
    const auto snapshot = assembler.Finish(GoodDigest(segment.manifest()));
    ASSERT_TRUE(snapshot.ok()) << snapshot.status();
    for (int i = 0; i < snapshot->size(); ++i) {
      const auto data = snapshot->data(i);
      ASSERT_EQ(std::string(data.begin(), data.end()), GoodBytes(segment.manifest(), i));
      ASSERT_EQ(reinterpret_cast<uintptr_t>(data.data()) % 64, 0u);
    }
  }
}

TEST(SharedMemoryTest, AFlippedByteIsSeen) {
  Segment segment;
  std::mt19937 random(5);
  for (int i = 0; i < segment.manifest().tensors_size(); ++i) {
    if (segment.manifest().tensors(i).bytes() == 0) continue;
    const uint64_t at = segment.manifest().shared_memory().tensor_offsets(i);
    segment.Flip(at);
    Assembler assembler(1 << 20);
    absl::Status status = assembler.SetManifest(segment.manifest(), true);
    for (const v1::TensorChunk& chunk : RandomChunks(segment.manifest(), &random)) {
      if (status.ok()) status = assembler.Add(Shared(chunk));
    }
    EXPECT_EQ(DetailsOf(status).reason, "CHUNK_HASH") << status;
    segment.Flip(at);
  }
}

TEST(SharedMemoryTest, WhatASegmentMayNotBe) {
  Segment segment;
  const auto refused = [&](const char* what, auto change, bool allow = true) {
    v1::Manifest manifest = segment.manifest();
    change(*manifest.mutable_shared_memory());
    Assembler assembler(1 << 20);
    const absl::Status status = assembler.SetManifest(manifest, allow);
    EXPECT_TRUE(absl::IsDataLoss(status)) << what << ": " << status;
    EXPECT_EQ(DetailsOf(status).reason, "MANIFEST_INVALID") << what;
  };
  using S = v1::SharedMemory;
  refused(
      "not asked for", [](S&) {}, false);
  refused("no name", [](S& s) { s.clear_name(); });
  refused("another name", [](S& s) { s.set_name("/etc-passwd"); });
  refused("a path", [](S& s) { s.set_name("/sparsegdn-../../etc/passwd0000000000000"); });
  refused("an offset too few", [](S& s) { s.mutable_tensor_offsets()->RemoveLast(); });
  refused("an offset too many", [](S& s) { s.add_tensor_offsets(0); });
  refused("not aligned", [](S& s) { s.set_tensor_offsets(0, 4); });
  refused("overlap", [](S& s) { s.set_tensor_offsets(1, 0); });
  refused("outside", [](S& s) { s.set_tensor_offsets(0, uint64_t{1} << 40); });
  refused("overflow", [](S& s) { s.set_tensor_offsets(0, UINT64_MAX - 63); });
  refused("smaller than its tensors", [](S& s) { s.set_bytes(1); });
  refused("larger than the file", [](S& s) { s.set_bytes(s.bytes() + 4096); });
  Segment cut(/*is_long_enough=*/false);
  Assembler assembler(1 << 20);
  EXPECT_TRUE(absl::IsDataLoss(assembler.SetManifest(cut.manifest(), true)));
  cut.Unlink();
  Assembler gone(1 << 20);
  EXPECT_EQ(DetailsOf(gone.SetManifest(cut.manifest(), true)).reason, "SHARED_MEMORY_UNAVAILABLE");
}

TEST(SharedMemoryTest, ChunksComeTheWayTheManifestSays) {
  std::mt19937 random(6);
  Segment segment;
  const v1::Manifest plain = GoodManifest();
  const v1::TensorChunk chunk = RandomChunks(plain, &random).front();
  Assembler streamed(1 << 20), shared(1 << 20);
  ASSERT_TRUE(streamed.SetManifest(plain, true).ok());
  EXPECT_EQ(DetailsOf(streamed.Add(Shared(chunk))).reason, "CHUNK_NOT_SHARED");
  ASSERT_TRUE(shared.SetManifest(segment.manifest(), true).ok());
  EXPECT_EQ(DetailsOf(shared.Add(chunk)).reason, "CHUNK_NOT_SHARED");
}

}  // namespace
}  // namespace sparsegdn::client
