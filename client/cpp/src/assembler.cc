#include "src/assembler.h"

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/errors.h"
#include "src/shared_mapping.h"
#include "src/xxh.h"

namespace sparsegdn::client {

absl::Status Assembler::SetManifest(v1::Manifest manifest, bool allow_shared) {
  if (failed_ || manifest_.has_value()) {
    failed_ = true;
    return DataLoss("MANIFEST_REPEATED", "manifest", "a second manifest came");
  }
  failed_ = true;  // until everything below has worked
  absl::Status status = ValidateManifest(manifest, max_bytes_);
  if (!status.ok()) return status;
  std::shared_ptr<SharedMapping> mapping;
  if (manifest.has_shared_memory()) {
    if (!allow_shared) {
      return DataLoss("MANIFEST_INVALID", "shared_memory",
                      "manifest: shared_memory is there, but was not asked for");
    }
    absl::StatusOr<std::shared_ptr<SharedMapping>> opened = SharedMapping::Open(manifest);
    if (!opened.ok()) return opened.status();
    mapping = *std::move(opened);
    shared_ = true;
  }
  parts_.resize(manifest.tensors_size());
  for (int i = 0; i < manifest.tensors_size(); ++i) {
    const uint64_t bytes = manifest.tensors(i).bytes();
    if (shared_) {
      const uint64_t offset = manifest.shared_memory().tensor_offsets(i);
      parts_[i].data = Buffer::Of(mapping, mapping->data() + offset, bytes);
    } else {
      absl::StatusOr<Buffer> buffer = Buffer::Allocate(bytes);
      if (!buffer.ok()) return buffer.status();
      parts_[i].data = *std::move(buffer);
    }
    CompleteIfWhole(&parts_[i]);  // a tensor of zero bytes is whole from the start
  }
  manifest.clear_shared_memory();  // says nothing about the snapshot
  manifest_ = std::move(manifest);
  failed_ = false;
  return absl::OkStatus();
}

absl::Status Assembler::Check(const Piece& piece) const {
  if (!manifest_.has_value()) {
    return DataLoss("MANIFEST_MISSING", "chunk", "a chunk came before the manifest");
  }
  if (piece.tensor >= parts_.size()) {
    return DataLoss("CHUNK_TENSOR_UNKNOWN", "chunk.tensor",
                    absl::StrCat("chunk.tensor = ", piece.tensor, ", the manifest has ",
                                 parts_.size(), " tensors"));
  }
  const uint64_t bytes = parts_[piece.tensor].data.size();
  const std::string& name = manifest_->tensors(static_cast<int>(piece.tensor)).name();
  if (shared_ != (piece.data == nullptr)) {
    return DataLoss("CHUNK_NOT_SHARED", "chunk.data",
                    absl::StrCat("chunk of ", name, ": its bytes must be in ",
                                 shared_ ? "shared memory" : "the message"));
  }
  if (piece.begin > bytes || piece.size > bytes - piece.begin) {
    return DataLoss("CHUNK_OUT_OF_BOUNDS", "chunk.byte_offset",
                    absl::StrCat("chunk of ", name, ": offset ", piece.begin, " + ", piece.size,
                                 " bytes, the tensor has ", bytes));
  }
  const uint8_t* data =
      shared_ ? parts_[piece.tensor].data.span().data() + piece.begin : piece.data;
  const uint64_t hash = XXH3_64bits(data, piece.size);
  if (hash != piece.xxh3_64) {
    return DataLoss("CHUNK_HASH", "chunk.xxh3_64",
                    absl::StrCat("chunk of ", name, " at ", piece.begin, ": XXH3-64 is ",
                                 absl::Hex(hash, absl::kZeroPad16), ", the server said ",
                                 absl::Hex(piece.xxh3_64, absl::kZeroPad16)));
  }
  return absl::OkStatus();
}

bool Assembler::Insert(std::map<uint64_t, uint64_t>* ranges, uint64_t begin, uint64_t end) {
  auto next = ranges->lower_bound(begin);
  if (next != ranges->end() && next->first < end) return false;
  if (next != ranges->end() && next->first == end) {
    end = next->second;
    next = ranges->erase(next);
  }
  if (next != ranges->begin()) {
    auto previous = std::prev(next);
    if (previous->second > begin) return false;
    if (previous->second == begin) {
      previous->second = end;
      return true;
    }
  }
  ranges->emplace_hint(next, begin, end);
  return true;
}

// Hashed as it comes: the work overlaps with the rest of the stream, and in order, as servers send,
// each byte is still in the cache.
void Assembler::CompleteIfWhole(Part* part) {
  const uint64_t size = part->data.size();
  const uint8_t* data = std::as_const(part->data).data();
  const auto first = part->ranges.begin();
  const bool begun = first != part->ranges.end() && first->first == 0;
  if (begun) part->running.Extend(data, first->second);
  if (size == 0 || (begun && first->second == size)) part->hash = part->running.Digest();
}

absl::Status Assembler::Add(const v1::TensorChunk& chunk) {
  return Take({chunk.tensor(), chunk.byte_offset(), chunk.data().size(), chunk.xxh3_64(),
               reinterpret_cast<const uint8_t*>(chunk.data().data())});
}

absl::Status Assembler::Add(const v1::SharedChunk& chunk) {
  return Take({chunk.tensor(), chunk.byte_offset(), chunk.bytes(), chunk.xxh3_64(), nullptr});
}

absl::Status Assembler::Take(const Piece& piece) {
  if (failed_) return DataLoss("MANIFEST_INVALID", "chunk", "the stream has failed before");
  failed_ = true;  // until everything below has worked
  absl::Status status = Check(piece);
  if (!status.ok()) return status;
  if (piece.size != 0) {
    Part& part = parts_[piece.tensor];
    if (!Insert(&part.ranges, piece.begin, piece.begin + piece.size)) {
      return DataLoss(
          "CHUNK_OVERLAP", "chunk.byte_offset",
          absl::StrCat("chunk of ", manifest_->tensors(static_cast<int>(piece.tensor)).name(),
                       " at ", piece.begin, " repeats bytes"));
    }
    if (!shared_) std::memcpy(part.data.data() + piece.begin, piece.data, piece.size);
    bytes_done_ += piece.size;
    CompleteIfWhole(&part);
  }
  failed_ = false;
  return absl::OkStatus();
}

absl::StatusOr<Snapshot> Assembler::Finish(uint64_t digest) {
  if (failed_) return DataLoss("MANIFEST_INVALID", "result", "the stream has failed before");
  failed_ = true;  // a snapshot leaves once
  if (!manifest_.has_value()) {
    return DataLoss("MANIFEST_MISSING", "manifest", "the result came without a manifest");
  }
  Snapshot snapshot;
  for (int i = 0; i < manifest_->tensors_size(); ++i) {
    if (!parts_[i].hash.has_value()) {
      return DataLoss("BYTES_MISSING", absl::StrCat("tensors[", i, "]"),
                      absl::StrCat("tensor ", manifest_->tensors(i).name(),
                                   " is incomplete: the stream ended before all of its ",
                                   manifest_->tensors(i).bytes(), " bytes came"));
    }
    snapshot.hashes_.push_back(*parts_[i].hash);
  }
  snapshot.digest_ = DigestOf(snapshot.hashes_);
  if (snapshot.digest_ != digest) {
    return DataLoss("DIGEST", "result.digest",
                    absl::StrCat("digest is ", absl::Hex(snapshot.digest_, absl::kZeroPad16),
                                 ", the server said ", absl::Hex(digest, absl::kZeroPad16)));
  }
  for (Part& part : parts_) snapshot.data_.push_back(std::move(part.data));
  snapshot.manifest_ = *std::move(manifest_);
  return snapshot;
}

}  // namespace sparsegdn::client
