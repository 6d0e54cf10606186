#include "sparsegdn/client/snapshot.h"

#include <new>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/errors.h"
#include "src/xxh.h"

namespace sparsegdn::client {
namespace {

absl::Status Invalid(const std::string& field, const std::string& message) {
  return DataLoss("MANIFEST_INVALID", field, absl::StrCat("manifest: ", field, " ", message));
}

bool IsName(const std::string& name) {
  if (name.empty() || name.size() > 255 || name == "__metadata__") return false;
  for (unsigned char c : name) {
    if (c <= 0x20 || c >= 0x7f || c == '"' || c == '\\') return false;
  }
  return true;
}

// Product of the shape times the element size, or nothing on a bad dimension or overflow.
bool CountBytes(const v1::TensorInfo& info, uint64_t* bytes) {
  uint64_t product = DTypeBytes(info.dtype());
  if (product == 0 || info.shape_size() > 8) return false;
  for (int64_t dim : info.shape()) {
    if (dim < 0) return false;
    if (__builtin_mul_overflow(product, static_cast<uint64_t>(dim), &product)) return false;
  }
  *bytes = product;
  return true;
}

absl::Status ValidateTensor(const v1::TensorInfo& info, const std::string& field) {
  if (!IsName(info.name())) return Invalid(field + ".name", "must be 1..255 printable characters");
  if (info.kind() < v1::TENSOR_KIND_RECURRENT_STATE || !v1::TensorKind_IsValid(info.kind())) {
    return Invalid(field + ".kind", absl::StrCat("= ", info.kind(), " is unknown"));
  }
  if (info.kind() == v1::TENSOR_KIND_RECURRENT_STATE &&
      info.state_layout() != v1::STATE_LAYOUT_KEY_MAJOR &&
      info.state_layout() != v1::STATE_LAYOUT_VALUE_MAJOR) {
    return Invalid(field + ".state_layout", absl::StrCat("= ", info.state_layout(), " is unknown"));
  }
  if (info.kind() == v1::TENSOR_KIND_CONV_STATE &&
      info.conv_layout() != v1::CONV_LAYOUT_FOUR_COLUMNS &&
      info.conv_layout() != v1::CONV_LAYOUT_THREE_COLUMNS) {
    return Invalid(field + ".conv_layout", absl::StrCat("= ", info.conv_layout(), " is unknown"));
  }
  if (info.position() < 0) return Invalid(field + ".position", "must be >= 0");
  uint64_t bytes = 0;
  if (!CountBytes(info, &bytes)) return Invalid(field, "has an unknown dtype or an absurd shape");
  if (bytes != info.bytes()) {
    return Invalid(field + ".bytes", absl::StrCat("= ", info.bytes(), ", must be ", bytes,
                                                  " as shape and dtype say"));
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t DTypeBytes(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_FP32:
    case v1::DTYPE_INT32:
      return 4;
    case v1::DTYPE_BF16:
      return 2;
    case v1::DTYPE_FP8_E4M3:
      return 1;
    default:
      return 0;
  }
}

absl::Status ValidateManifest(const v1::Manifest& manifest, uint64_t max_bytes) {
  if (manifest.format_version() != kFormatVersion) {
    return Invalid("format_version",
                   absl::StrCat("= ", manifest.format_version(), ", must be ", kFormatVersion));
  }
  if (manifest.position() < 0) return Invalid("position", "must be >= 0");
  if (manifest.tensors_size() > kMaxTensors) {
    return Invalid("tensors", absl::StrCat("has ", manifest.tensors_size(), " entries, at most ",
                                           kMaxTensors));
  }
  std::unordered_set<std::string> names;
  uint64_t total = 0;
  for (int i = 0; i < manifest.tensors_size(); ++i) {
    const v1::TensorInfo& info = manifest.tensors(i);
    const std::string field = absl::StrCat("tensors[", i, "]");
    absl::Status status = ValidateTensor(info, field);
    if (!status.ok()) return status;
    if (!names.insert(info.name()).second) {
      return Invalid(field + ".name", absl::StrCat("repeats \"", info.name(), "\""));
    }
    if (__builtin_add_overflow(total, info.bytes(), &total)) {
      return Invalid("total_bytes", "overflows");
    }
  }
  if (total != manifest.total_bytes()) {
    return Invalid("total_bytes",
                   absl::StrCat("= ", manifest.total_bytes(), ", the tensors have ", total));
  }
  if (total > max_bytes) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "SNAPSHOT_TOO_LARGE", "total_bytes",
        absl::StrCat("manifest: total_bytes = ", total, ", this client takes at most ", max_bytes));
  }
  return absl::OkStatus();
}

absl::StatusOr<Buffer> Buffer::Allocate(uint64_t size) {
  Buffer buffer;
  buffer.size_ = size;
  if (size > kMaxTensorBytes) {
    return MakeError(absl::StatusCode::kResourceExhausted, "SNAPSHOT_TOO_LARGE", "bytes",
                     absl::StrCat("a tensor of ", size, " bytes cannot be held in memory"));
  }
  // At least one byte, so that data() is never null.
  buffer.heap_.reset(new (std::nothrow) uint8_t[size == 0 ? 1 : size]);
  buffer.view_ = buffer.heap_.get();
  if (buffer.heap_ == nullptr) {
    return MakeError(absl::StatusCode::kResourceExhausted, "SNAPSHOT_TOO_LARGE", "bytes",
                     absl::StrCat("out of memory for a tensor of ", size, " bytes"));
  }
  return buffer;
}

Buffer Buffer::Of(std::shared_ptr<const SharedMapping> mapping, const uint8_t* data,
                  uint64_t size) {
  Buffer buffer;
  buffer.mapping_ = std::move(mapping);
  buffer.view_ = data;
  buffer.size_ = size;
  return buffer;
}

absl::StatusOr<Snapshot> Snapshot::Create(v1::Manifest manifest, std::vector<Buffer> data) {
  absl::Status status = ValidateManifest(manifest, UINT64_MAX);
  if (!status.ok()) return status;
  if (data.size() != static_cast<size_t>(manifest.tensors_size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("data has ", data.size(), " buffers, must have ", manifest.tensors_size()));
  }
  Snapshot snapshot;
  for (size_t i = 0; i < data.size(); ++i) {
    const v1::TensorInfo& info = manifest.tensors(static_cast<int>(i));
    if (data[i].size() != info.bytes()) {
      return absl::InvalidArgumentError(
          absl::StrCat("data[", i, "] has ", data[i].size(), " bytes, must have ", info.bytes()));
    }
    snapshot.hashes_.push_back(XXH3_64bits(data[i].data(), data[i].size()));
  }
  snapshot.digest_ = DigestOf(snapshot.hashes_);
  snapshot.manifest_ = std::move(manifest);
  snapshot.data_ = std::move(data);
  return snapshot;
}

int Snapshot::Find(const std::string& name) const {
  for (int i = 0; i < manifest_.tensors_size(); ++i) {
    if (manifest_.tensors(i).name() == name) return i;
  }
  return -1;
}

uint64_t DigestOf(absl::Span<const uint64_t> tensor_hashes) {
  std::string bytes;
  bytes.reserve(tensor_hashes.size() * 8);
  for (uint64_t hash : tensor_hashes) {
    for (int shift = 0; shift < 64; shift += 8) bytes.push_back(static_cast<char>(hash >> shift));
  }
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::vector<int> ImportableTensors(const v1::Manifest& manifest) {
  std::vector<int> out;
  for (int i = 0; i < manifest.tensors_size(); ++i) {
    const v1::TensorInfo& info = manifest.tensors(i);
    if (info.kind() > v1::TENSOR_KIND_VALUE) continue;
    if (info.name().rfind("checkpoints.", 0) == 0) continue;
    out.push_back(i);
  }
  return out;
}

}  // namespace sparsegdn::client
