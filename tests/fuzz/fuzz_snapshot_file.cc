// Input: a snapshot file for the C++ client, read as it is and once more with the right checksum
// over its metadata, so that changed metadata comes past that check. Promise: a snapshot that
// writes and reads back as itself, or an error with its reason.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "sparsegdn/client/snapshot_file.h"
#include "sparsegdn/client/status.h"
#include "src/metadata_checksum.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/unit/client/fake_service.h"

namespace sparsegdn::fuzz {
namespace {

using absl::StatusCode;
using nlohmann::json;

constexpr uint64_t kMaxSnapshotBytes = 1 << 20;

// A file in memory with a path.
class MemoryFile {
 public:
  MemoryFile() : fd_(memfd_create("snapshot", 0)) { Require(fd_ >= 0, "memfd_create"); }
  ~MemoryFile() { close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string path() const { return absl::StrCat("/proc/self/fd/", fd_); }
  void Write(const std::string& bytes) const {
    Require(ftruncate(fd_, 0) == 0, "ftruncate");
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t n = pwrite(fd_, bytes.data() + at, bytes.size() - at, static_cast<off_t>(at));
      Require(n > 0, "pwrite");
      at += static_cast<size_t>(n);
    }
  }

 private:
  const int fd_;
};

struct Split {
  std::string header, data;
};

Split SplitFile(const std::string& file) {
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(file[i]);
  length = std::min<uint64_t>(length, file.size() - 8);
  return {file.substr(8, length), file.substr(8 + length)};
}

std::string JoinFile(const std::string& header, const std::string& data) {
  std::string out;
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(uint64_t{header.size()} >> (8 * i)));
  return out + header + data;
}

// The file with the right checksum in its metadata, or nothing when it has none to mend. The
// checksum is replaced in the text, so that the header keeps its oddities.
std::string Signed(const std::string& file) {
  if (file.size() < 8) return "";
  Split split = SplitFile(file);
  const json header = json::parse(split.header, nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) return "";
  const auto metadata = header.find("__metadata__");
  if (metadata == header.end() || !metadata->is_object()) return "";
  std::vector<std::string> values;
  for (const char* key : client::kChecksummedKeys) {
    const auto value = metadata->find(key);
    const bool is_text = value != metadata->end() && value->is_string();
    values.push_back(is_text ? value->get<std::string>() : "");
  }
  const std::string key = "\"sparsegdn.metadata_xxh3_64\":\"";
  const size_t at = split.header.find(key);
  if (at == std::string::npos || split.header.size() < at + key.size() + 16) return "";
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016llx",
                static_cast<unsigned long long>(client::MetadataChecksum(values)));
  return JoinFile(split.header.replace(at + key.size(), 16, digits), split.data);
}

void CheckAccepted(const client::SnapshotFile& file, uint64_t data_bytes) {
  const client::Snapshot& snapshot = file.snapshot;
  Require(client::ValidateManifest(snapshot.manifest(), kMaxSnapshotBytes).ok(), "manifest");
  uint64_t bytes = 0;
  for (int i = 0; i < snapshot.size(); ++i) bytes += snapshot.data(i).size();
  Require(bytes == snapshot.manifest().total_bytes(), "bytes");
  Require(bytes == data_bytes, "bytes of the file belong to no tensor, or to two");
}

void Read(const std::string& bytes) {
  static const MemoryFile file;
  file.Write(bytes);
  const auto read = client::ReadSnapshotFile(file.path(), kMaxSnapshotBytes);
  NoteOutcome(read.status());
  if (read.ok()) return CheckAccepted(*read, SplitFile(bytes).data.size());
  RequireRefusal(
      read.status(),
      {StatusCode::kInvalidArgument, StatusCode::kDataLoss, StatusCode::kResourceExhausted}, 2048);
  Require(!client::DetailsOf(read.status()).reason.empty(), "refused without a reason");
}

std::string FileOf(const v1::Manifest& manifest, const v1::Result* result) {
  std::vector<client::Buffer> data;
  for (int i = 0; i < manifest.tensors_size(); ++i) {
    const std::string bytes = client::testing::GoodBytes(manifest, i);
    data.push_back(client::Buffer::Allocate(bytes.size()).value());
    std::copy(bytes.begin(), bytes.end(), data.back().data());
  }
  const auto snapshot = client::Snapshot::Create(manifest, std::move(data));
  Require(snapshot.ok(), snapshot.status().ToString());
  const std::filesystem::path path = std::filesystem::temp_directory_path() /
                                     absl::StrCat("sparsegdn-fuzz-", getpid(), ".safetensors");
  const absl::Status written = client::WriteSnapshotFile(path.string(), *snapshot, result);
  Require(written.ok(), written.ToString());
  std::ifstream file(path, std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(file), {});
  std::filesystem::remove(path);
  return bytes;
}

// With eight bytes of nobody's before the last tensor.
std::string WithGap(const std::string& file) {
  Split split = SplitFile(file);
  const std::string key = "\"data_offsets\":[";
  const size_t at = split.header.rfind(key) + key.size();
  const uint64_t begin = std::strtoull(split.header.c_str() + at, nullptr, 10);
  const std::string offsets = absl::StrCat(begin + 8, ",", split.data.size() + 8);
  split.header.replace(at, split.header.find(']', at) - at, offsets);
  return JoinFile(split.header, split.data.insert(begin, 8, 'g'));
}

// With `depth` nested lists as the first tensor's shape, in the metadata and in its own entry.
std::string WithDeepShape(const std::string& file, size_t depth) {
  Split split = SplitFile(file);
  size_t at = 0;
  for (const char* before : {R"(\"shape\":)", R"("layers.0.recurrent_state":)", R"("shape":)"}) {
    at = split.header.find(before, at);
    Require(at != std::string::npos, "the file is not as it was");
    at += std::string(before).size();
    if (split.header[at] != '[') continue;
    split.header.replace(at, split.header.find(']', at) + 1 - at, Nested(depth));
  }
  return JoinFile(split.header, split.data);
}

}  // namespace

int FuzzSnapshotFile(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  Read(bytes);
  const std::string mended = Signed(bytes);
  if (!mended.empty() && mended != bytes) Read(mended);
  return 0;
}

std::vector<std::string> SnapshotFileSeeds() {
  const v1::Manifest manifest = client::testing::GoodManifest();
  v1::Manifest empty = manifest;
  empty.clear_tensors();
  empty.set_total_bytes(0);
  v1::Result result;
  result.set_digest(7);
  result.mutable_usage()->set_prompt_tokens(8);
  result.set_snapshot_id("id");
  const std::string plain = FileOf(manifest, nullptr);
  return {plain,
          FileOf(manifest, &result),
          FileOf(empty, nullptr),
          WithGap(plain),
          WithDeepShape(plain, 3),
          WithDeepShape(plain, kDeep),
          plain.substr(0, plain.size() - 1),
          JoinFile(std::string(100'000, '['), ""),
          ""};
}

}  // namespace sparsegdn::fuzz
