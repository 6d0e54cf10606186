// A verified snapshot in memory: the manifest and the bytes of every tensor.
#ifndef SPARSEGDN_CLIENT_SNAPSHOT_H_
#define SPARSEGDN_CLIENT_SNAPSHOT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "sparsegdn/v1/prefill.pb.h"

namespace sparsegdn::client {

inline constexpr uint32_t kFormatVersion = 1;
inline constexpr int kMaxTensors = 1 << 20;
inline constexpr uint64_t kMaxTensorBytes = uint64_t{1} << 39;  // no allocator is asked for more

// Bytes of one element: 4, 2 or 1; 0 for an unknown dtype.
uint64_t DTypeBytes(v1::DType dtype);

// DATA_LOSS (MANIFEST_INVALID) names the field unless: format_version is 1, position >= 0, names
// are unique printable ASCII of 1..255 bytes, kinds, dtypes and layouts are known, at most 8
// dimensions, bytes = product(shape) * dtype bytes, total_bytes = their sum. RESOURCE_EXHAUSTED
// (SNAPSHOT_TOO_LARGE) when total_bytes > max_bytes.
absl::Status ValidateManifest(const v1::Manifest& manifest, uint64_t max_bytes);

class SharedMapping;

// Bytes of one tensor: uninitialised on the heap, or a part of a read-only shared mapping, which it
// keeps mapped. Move-only.
class Buffer {
 public:
  Buffer() = default;
  // RESOURCE_EXHAUSTED when the memory cannot be had, or size > kMaxTensorBytes.
  static absl::StatusOr<Buffer> Allocate(uint64_t size);

  static Buffer Of(std::shared_ptr<const SharedMapping> mapping, const uint8_t* data,
                   uint64_t size);

  // Null for a part of a mapping: nobody writes there.
  uint8_t* data() { return heap_.get(); }
  const uint8_t* data() const { return view_; }
  uint64_t size() const { return size_; }
  absl::Span<const uint8_t> span() const { return {view_, static_cast<size_t>(size_)}; }

 private:
  std::unique_ptr<uint8_t[]> heap_;
  std::shared_ptr<const SharedMapping> mapping_;
  const uint8_t* view_ = nullptr;
  uint64_t size_ = 0;
};

// Immutable and complete: whoever holds one has every byte of every tensor of the manifest, checked
// or computed. Move-only; tensors are indexed as in the manifest.
class Snapshot {
 public:
  // Takes buffers of exactly the manifest's sizes and computes all hashes. Errors: as
  // ValidateManifest; INVALID_ARGUMENT when a buffer's size differs.
  static absl::StatusOr<Snapshot> Create(v1::Manifest manifest, std::vector<Buffer> data);

  const v1::Manifest& manifest() const { return manifest_; }
  int size() const { return manifest_.tensors_size(); }
  const v1::TensorInfo& info(int tensor) const { return manifest_.tensors(tensor); }
  // Little-endian elements, row-major in info(tensor).shape.
  absl::Span<const uint8_t> data(int tensor) const { return data_[tensor].span(); }
  // XXH3-64 of data(tensor).
  uint64_t hash(int tensor) const { return hashes_[tensor]; }
  // XXH3-64 over the hashes, 8 bytes little endian each, in manifest order.
  uint64_t digest() const { return digest_; }
  // The tensor's index, or -1.
  int Find(const std::string& name) const;

 private:
  friend class Assembler;
  Snapshot() = default;

  v1::Manifest manifest_;
  std::vector<Buffer> data_;
  std::vector<uint64_t> hashes_;
  uint64_t digest_ = 0;
};

// Digest over whole-tensor hashes, as Result.digest and SnapshotEnd.digest.
uint64_t DigestOf(absl::Span<const uint64_t> tensor_hashes);

// Indices of the tensors that ImportSnapshot accepts: states, scales, conv states and KV at the
// snapshot's own position; logits, top-k, log-probabilities and checkpoints stay behind.
std::vector<int> ImportableTensors(const v1::Manifest& manifest);

}  // namespace sparsegdn::client

#endif  // SPARSEGDN_CLIENT_SNAPSHOT_H_
