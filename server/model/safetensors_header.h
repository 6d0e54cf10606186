// The header of a safetensors file: bytes in, checked entries out. Used on files from outside, so
// every byte is suspect: it allocates within fixed limits and never reads beyond what it is given.
//
// File: u64 little-endian N, N bytes of JSON (may be padded with spaces), then the data. An entry
// is "name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]} with offsets
// relative to the data; "__metadata__" is skipped.
#ifndef SPARSEGDN_SERVER_MODEL_SAFETENSORS_HEADER_H_
#define SPARSEGDN_SERVER_MODEL_SAFETENSORS_HEADER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace sparsegdn::model {

inline constexpr uint64_t kMaxHeaderBytes = uint64_t{16} << 20;
inline constexpr size_t kMaxHeaderTensors = 100'000;
inline constexpr size_t kMaxTensorNameBytes = 512;
inline constexpr size_t kMaxTensorRank = 8;

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // as written; only dtypes that are known have had their size checked
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // offsets into the file, not into the data
  uint64_t end = 0;
};

// Entries sorted by offset. `file` holds the first bytes of the file, at least 8 + N of them where
// the file is that long (a mapping holds all); `file_bytes` is the file's full size.
//
// INVALID_ARGUMENT names the tensor (or the header), got and wanted: a header that is truncated,
// larger than kMaxHeaderBytes or no JSON object of such entries; a duplicate name; a shape whose
// size is not end - begin; offsets that lie outside the data or overlap.
absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensorsHeader(std::span<const uint8_t> file,
                                                                     uint64_t file_bytes);

// Bytes per element of a safetensors dtype that stores whole bytes, 0 for any other text.
size_t SafetensorsDTypeBytes(const std::string& dtype);

// "[2, 3]"
std::string ShapeText(const std::vector<int64_t>& shape);

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_SAFETENSORS_HEADER_H_
