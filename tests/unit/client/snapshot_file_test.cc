// Goal: a snapshot file reads back bit for bit or not at all, and a failed write leaves nothing.
// Method: round trips; every single-byte change of a file must be an error or change nothing.
#include "sparsegdn/client/snapshot_file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "absl/strings/str_cat.h"
#include "fake_service.h"
#include "sparsegdn/client/status.h"
#include "src/atomic_file.h"
#include "src/metadata_checksum.h"

namespace sparsegdn::client {
namespace {

namespace fs = std::filesystem;
using testing::GoodBytes;
using testing::GoodManifest;

Snapshot GoodSnapshot() {
  std::vector<Buffer> data;
  const v1::Manifest manifest = GoodManifest();
  for (int i = 0; i < manifest.tensors_size(); ++i) {
    const std::string bytes = GoodBytes(manifest, i);
    data.push_back(*Buffer::Allocate(bytes.size()));
    std::copy(bytes.begin(), bytes.end(), data.back().data());
  }
  return *Snapshot::Create(manifest, std::move(data));
}

v1::Result GoodResult() { return testing::GoodEvents().back().result(); }

std::string ReadBytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

void WriteBytes(const fs::path& path, const std::string& bytes) {
  fs::remove(path);  // some file systems flush a file that is truncated and written again
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<int64_t>(bytes.size()));
}

class SnapshotFileTest : public ::testing::Test {
 protected:
  SnapshotFileTest()
      : folder_(fs::path(::testing::TempDir()) / ("snapshot" + std::to_string(getpid()))) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~SnapshotFileTest() override { fs::remove_all(folder_); }

  std::string Path(const std::string& name) const { return (folder_ / name).string(); }
  int Files() const { return static_cast<int>(std::distance(fs::directory_iterator(folder_), {})); }

  fs::path folder_;
};

void ExpectSame(const Snapshot& a, const Snapshot& b) {
  ASSERT_EQ(a.manifest().SerializeAsString(), b.manifest().SerializeAsString());
  EXPECT_EQ(a.digest(), b.digest());
  for (int i = 0; i < a.size(); ++i) EXPECT_EQ(a.data(i), b.data(i)) << i;
}

TEST_F(SnapshotFileTest, RoundTrip) {
  const Snapshot snapshot = GoodSnapshot();
  const v1::Result result = GoodResult();
  ASSERT_TRUE(WriteSnapshotFile(Path("s"), snapshot, &result).ok());
  const auto file = ReadSnapshotFile(Path("s"));
  ASSERT_TRUE(file.ok()) << file.status();
  ExpectSame(snapshot, file->snapshot);
  ASSERT_TRUE(file->result.has_value());
  EXPECT_EQ(file->result->SerializeAsString(), result.SerializeAsString());
  EXPECT_EQ(Files(), 1);
}

TEST_F(SnapshotFileTest, TensorsAreAlignedToTheirElements) {
  ASSERT_TRUE(WriteSnapshotFile(Path("s"), GoodSnapshot()).ok());
  const std::string bytes = ReadBytes(Path("s"));
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(bytes[i]);
  EXPECT_EQ(length % 8, 0u);
  // The fp8 state comes first in the manifest and last in the data section.
  const std::string fp8 = GoodBytes(GoodManifest(), 0);
  EXPECT_EQ(bytes.substr(bytes.size() - fp8.size()), fp8);
}

// Written over by a rename, a device or a pipe would be gone: /dev/null, for root.
TEST_F(SnapshotFileTest, WhatIsNoRegularFileIsNeitherReplacedNorWaitedFor) {
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  fs::create_symlink(Path("pipe"), Path("link"));
  for (const char* name : {"pipe", "link"}) {
    const absl::Status written = WriteSnapshotFile(Path(name), GoodSnapshot());
    ASSERT_FALSE(written.ok()) << name;
    EXPECT_NE(written.message().find("no regular file"), std::string::npos) << written;
    EXPECT_TRUE(fs::is_fifo(Path(name))) << name;
    const absl::Status read = ReadSnapshotFile(Path(name)).status();
    EXPECT_NE(read.message().find("not a regular file"), std::string::npos) << read;
  }
  EXPECT_TRUE(fs::is_symlink(Path("link")));
  EXPECT_EQ(Files(), 2);
}

// docs/snapshot_format.md, "Worked example".
TEST_F(SnapshotFileTest, WorkedExampleOfTheDocument) {
  v1::Manifest manifest;
  manifest.set_format_version(1);
  manifest.set_position(2);
  manifest.set_model_identity(std::string(64, '0'));
  v1::TensorInfo* info =
      testing::AddTensor(&manifest, "layers.0.recurrent_state", v1::TENSOR_KIND_RECURRENT_STATE,
                         v1::DTYPE_FP32, {1, 2, 3});
  info->set_state_layout(v1::STATE_LAYOUT_KEY_MAJOR);
  info->set_position(2);
  info = testing::AddTensor(&manifest, "layers.0.conv_state", v1::TENSOR_KIND_CONV_STATE,
                            v1::DTYPE_BF16, {7, 4});
  info->set_conv_layout(v1::CONV_LAYOUT_FOUR_COLUMNS);
  info->set_position(2);
  std::vector<Buffer> data;
  data.push_back(*Buffer::Allocate(24));
  data.push_back(*Buffer::Allocate(56));
  const float state[] = {1, 2, 3, 4, 5, 6};
  std::memcpy(data[0].data(), state, sizeof(state));
  for (int row = 0; row < 7; ++row) {
    const uint16_t bf16[] = {0, 0, 0x3f80, 0x4000};
    std::memcpy(data[1].data() + row * 8, bf16, sizeof(bf16));
  }
  const Snapshot snapshot = *Snapshot::Create(manifest, std::move(data));
  EXPECT_EQ(snapshot.hash(0), 0xa6e707ccf7703447u);
  EXPECT_EQ(snapshot.hash(1), 0xb972fe5745eff1ceu);
  EXPECT_EQ(snapshot.digest(), 0xe0db5f17a23a9cd0u);
  ASSERT_TRUE(WriteSnapshotFile(Path("s"), snapshot).ok());
  const std::string bytes = ReadBytes(Path("s"));
  EXPECT_EQ(bytes.size(), 912u);
  EXPECT_NE(bytes.find("f04368b871c2c588"), std::string::npos);
}

TEST_F(SnapshotFileTest, ReplacesAnOlderFile) {
  WriteBytes(Path("s"), "old");
  ASSERT_TRUE(WriteSnapshotFile(Path("s"), GoodSnapshot()).ok());
  EXPECT_TRUE(ReadSnapshotFile(Path("s")).ok());
  EXPECT_EQ(Files(), 1);
}

TEST_F(SnapshotFileTest, EveryByteChangeIsSeenOrHarmless) {
  const Snapshot snapshot = GoodSnapshot();
  const v1::Result result = GoodResult();
  ASSERT_TRUE(WriteSnapshotFile(Path("s"), snapshot, &result).ok());
  const std::string good = ReadBytes(Path("s"));
  std::mt19937 random(1);
  int seen = 0;
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] ^= static_cast<char>(1 + random() % 255);
    WriteBytes(Path("bad"), bad);
    const auto file = ReadSnapshotFile(Path("bad"));
    if (!file.ok()) {
      ++seen;
      EXPECT_EQ(DetailsOf(file.status()).reason.rfind("FILE_", 0), 0u) << file.status();
      continue;
    }
    ExpectSame(snapshot, file->snapshot);
    ASSERT_TRUE(file->result.has_value()) << i;
    EXPECT_EQ(file->result->SerializeAsString(), result.SerializeAsString()) << i;
  }
  EXPECT_GT(seen, static_cast<int>(good.size() * 9 / 10));
}

TEST_F(SnapshotFileTest, EveryTruncationIsSeen) {
  ASSERT_TRUE(WriteSnapshotFile(Path("s"), GoodSnapshot()).ok());
  const std::string good = ReadBytes(Path("s"));
  for (size_t size = 0; size < good.size(); size += 7) {
    WriteBytes(Path("bad"), good.substr(0, size));
    EXPECT_FALSE(ReadSnapshotFile(Path("bad")).ok()) << size;
  }
  WriteBytes(Path("bad"), good + "x");
  EXPECT_EQ(DetailsOf(ReadSnapshotFile(Path("bad")).status()).reason, "FILE_CORRUPT");
}

TEST_F(SnapshotFileTest, AtomicFileWithAndWithoutUnnamedFiles) {
  for (bool unnamed : {true, false}) {
    WriteBytes(Path("s"), "old");
    {
      auto dropped = *AtomicFile::Create(Path("s"), unnamed);
      ASSERT_TRUE(dropped->Write("half", 4).ok());
      EXPECT_EQ(Files(), unnamed ? 1 : 2);
    }
    EXPECT_EQ(ReadBytes(Path("s")), "old");
    EXPECT_EQ(Files(), 1);
    auto kept = *AtomicFile::Create(Path("s"), unnamed);
    ASSERT_TRUE(kept->Write("new", 3).ok());
    ASSERT_TRUE(kept->Commit().ok());
    EXPECT_EQ(ReadBytes(Path("s")), "new");
    EXPECT_EQ(Files(), 1);
  }
}

TEST_F(SnapshotFileTest, OtherFilesAreRefused) {
  EXPECT_EQ(ReadSnapshotFile(Path("none")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(DetailsOf(ReadSnapshotFile(folder_.string()).status()).reason, "FILE_FORMAT");
  const std::string header = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  std::string plain(8, '\0');
  plain[0] = static_cast<char>(header.size());
  WriteBytes(Path("plain"), plain + header + "abcd");
  EXPECT_EQ(DetailsOf(ReadSnapshotFile(Path("plain")).status()).reason, "FILE_FORMAT");
}

// Under a right checksum, and so deep that to copy or compare it runs out of stack.
TEST_F(SnapshotFileTest, DeeplyNestedShapeIsRefused) {
  const std::string shape = std::string(500'000, '[') + std::string(500'000, ']');
  const std::vector<std::string> values = {
      "1",
      "",
      "0",
      "0",
      R"([{"name":"a","layer":0,"position":0,"dtype":"F32","xxh3_64":"0","shape":)" + shape + "}]",
      ""};
  nlohmann::json header;
  for (size_t i = 0; i < values.size(); ++i) {
    header["__metadata__"][kChecksummedKeys[i]] = values[i];
  }
  header["__metadata__"]["sparsegdn.metadata_xxh3_64"] =
      absl::StrCat(absl::Hex(MetadataChecksum(values)));
  std::string text = header.dump();
  text.back() = ',';
  text += R"("a":{"dtype":"F32","data_offsets":[0,0],"shape":)" + shape + "}}";
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(uint64_t{text.size()} >> (8 * i));
  WriteBytes(Path("s"), bytes + text);
  const absl::Status status = ReadSnapshotFile(Path("s")).status();
  EXPECT_EQ(DetailsOf(status).reason, "FILE_FORMAT") << status;
  EXPECT_NE(status.message().find("entry 0 of sparsegdn.tensors"), std::string::npos) << status;
}

TEST_F(SnapshotFileTest, LargerThanAllowedIsRefused) {
  ASSERT_TRUE(WriteSnapshotFile(Path("s"), GoodSnapshot()).ok());
  EXPECT_EQ(DetailsOf(ReadSnapshotFile(Path("s"), 100).status()).reason, "SNAPSHOT_TOO_LARGE");
}

TEST_F(SnapshotFileTest, MissingFolderAndFolderAsTarget) {
  const auto missing = WriteSnapshotFile(Path("no/such/s"), GoodSnapshot());
  EXPECT_EQ(DetailsOf(missing).reason, "FILE_IO");
  const auto folder = WriteSnapshotFile(folder_.string(), GoodSnapshot());
  EXPECT_EQ(DetailsOf(folder).reason, "FILE_IO") << folder;
  EXPECT_EQ(Files(), 0);
}

// A write that fails half-way, as on a full disk: the limit makes the kernel refuse after 2,048
// bytes. In a child, because the limit cannot be raised again by an ordinary user.
TEST_F(SnapshotFileTest, FailedWriteLeavesTheOldFile) {
  WriteBytes(Path("s"), "old");
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{2048, 2048};
    setrlimit(RLIMIT_FSIZE, &limit);
    const absl::Status status = WriteSnapshotFile(Path("s"), GoodSnapshot());
    _exit(status.code() == absl::StatusCode::kResourceExhausted &&
                  DetailsOf(status).reason == "FILE_IO"
              ? 0
              : 1);
  }
  int exit_status = -1;
  waitpid(child, &exit_status, 0);
  EXPECT_EQ(exit_status, 0);
  EXPECT_EQ(ReadBytes(Path("s")), "old");
  EXPECT_EQ(Files(), 1);
}

}  // namespace
}  // namespace sparsegdn::client
