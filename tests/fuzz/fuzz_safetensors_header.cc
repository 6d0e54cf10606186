// Input: the first bytes of a safetensors file. Promise: entries that are sorted, disjoint and
// inside the file, or INVALID_ARGUMENT.
#include <memory>

#include "server/model/safetensors_header.h"
#include "tests/fuzz/fuzz_target.h"

namespace sparsegdn::fuzz {
namespace {

using model::SafetensorsEntry;

void CheckEntries(const std::vector<SafetensorsEntry>& entries, uint64_t file_bytes) {
  Require(entries.size() <= model::kMaxHeaderTensors, "too many tensors");
  uint64_t end = 8;
  for (const SafetensorsEntry& entry : entries) {
    Require(entry.begin >= end && entry.end >= entry.begin && entry.end <= file_bytes,
            "an entry overlaps or lies outside the file");
    end = entry.end;
    Require(entry.name.size() <= model::kMaxTensorNameBytes, "a long name");
    Require(entry.shape.size() <= model::kMaxTensorRank, "a long shape");
    uint64_t bytes = model::SafetensorsDTypeBytes(entry.dtype);
    if (bytes == 0) continue;
    for (const int64_t extent : entry.shape) {
      Require(extent >= 0, "a negative extent");
      Require(!__builtin_mul_overflow(bytes, static_cast<uint64_t>(extent), &bytes), "overflow");
    }
    Require(bytes == entry.end - entry.begin, "shape and offsets disagree");
  }
}

std::string File(const std::string& header, size_t data_bytes) {
  std::string out;
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(uint64_t{header.size()} >> (8 * i)));
  return out + header + std::string(data_bytes, 'd');
}

}  // namespace

int FuzzSafetensorsHeader(const uint8_t* data, size_t size) {
  // A copy of exactly this size, so that a read past the end is seen.
  const std::unique_ptr<uint8_t[]> bytes(new uint8_t[size]);
  std::copy_n(data, size, bytes.get());
  // As a whole file, and as the head of one whose data was not given.
  for (const uint64_t more : {uint64_t{0}, uint64_t{1} << 40}) {
    const auto entries = model::ParseSafetensorsHeader({bytes.get(), size}, size + more);
    NoteOutcome(entries.status());
    if (entries.ok()) {
      CheckEntries(*entries, size + more);
    } else {
      RequireRefusal(entries.status(), {absl::StatusCode::kInvalidArgument}, 4096);
    }
  }
  return 0;
}

std::vector<std::string> SafetensorsHeaderSeeds() {
  std::string many = "{";
  for (int i = 0; i < 40; ++i) {
    const std::string at = std::to_string(i * 4);
    many += (i > 0 ? ",\"t" : "\"t") + std::to_string(i) +
            R"(":{"dtype":"F32","shape":[1],"data_offsets":[)" + at + "," +
            std::to_string(i * 4 + 4) + "]}";
  }
  const std::string deep = Nested(kDeep);
  return {
      File(R"({"__metadata__": {"format": "pt"},)"
           R"( "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},)"
           R"( "a": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]},)"
           R"( "empty": {"dtype": "F16", "shape": [0, 3], "data_offsets": [16, 16]},)"
           R"( "scalar": {"dtype": "I64", "shape": [], "data_offsets": [16, 24]},)"
           R"( "odd": {"dtype": "F4", "shape": [3], "data_offsets": [24, 26]}}   )",
           26),
      File("{}", 0),
      File(many + "}", 160),
      File(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
           R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
           4),
      File(R"({"a":{"dtype":"F32","shape":)" + deep + R"(,"data_offsets":[0,4]}})", 4),
      File(R"({"__metadata__":)" + deep + "}", 0),
      File(std::string(100'000, '['), 0),
      std::string(8, '\xff'),
  };
}

}  // namespace sparsegdn::fuzz
