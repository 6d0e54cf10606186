// Goal: the assembler accepts exactly the streams that carry every byte once. Method: random cuts
// and orders of a sound snapshot must all give the same bytes; random single faults must all fail.
#include "src/assembler.h"

#include <gtest/gtest.h>

#include <algorithm>
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

}  // namespace
}  // namespace sparsegdn::client
