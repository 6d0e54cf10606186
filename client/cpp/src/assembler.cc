#include "src/assembler.h"

#include <xxhash.h>

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/errors.h"

namespace sparsegdn::client {

absl::Status Assembler::SetManifest(v1::Manifest manifest) {
  if (failed_ || manifest_.has_value()) {
    failed_ = true;
    return DataLoss("MANIFEST_REPEATED", "manifest", "a second manifest came");
  }
  failed_ = true;  // until everything below has worked
  absl::Status status = ValidateManifest(manifest, max_bytes_);
  if (!status.ok()) return status;
  parts_.resize(manifest.tensors_size());
  for (int i = 0; i < manifest.tensors_size(); ++i) {
    absl::StatusOr<Buffer> buffer = Buffer::Allocate(manifest.tensors(i).bytes());
    if (!buffer.ok()) return buffer.status();
    parts_[i].data = *std::move(buffer);
    CompleteIfWhole(&parts_[i]);  // a tensor of zero bytes is whole from the start
  }
  manifest_ = std::move(manifest);
  failed_ = false;
  return absl::OkStatus();
}

absl::Status Assembler::Check(const v1::TensorChunk& chunk) const {
  if (!manifest_.has_value()) {
    return DataLoss("MANIFEST_MISSING", "chunk", "a chunk came before the manifest");
  }
  if (chunk.tensor() >= parts_.size()) {
    return DataLoss("CHUNK_TENSOR_UNKNOWN", "chunk.tensor",
                    absl::StrCat("chunk.tensor = ", chunk.tensor(), ", the manifest has ",
                                 parts_.size(), " tensors"));
  }
  const uint64_t bytes = parts_[chunk.tensor()].data.size();
  const std::string& name = manifest_->tensors(static_cast<int>(chunk.tensor())).name();
  if (chunk.byte_offset() > bytes || chunk.data().size() > bytes - chunk.byte_offset()) {
    return DataLoss("CHUNK_OUT_OF_BOUNDS", "chunk.byte_offset",
                    absl::StrCat("chunk of ", name, ": offset ", chunk.byte_offset(), " + ",
                                 chunk.data().size(), " bytes, the tensor has ", bytes));
  }
  const uint64_t hash = XXH3_64bits(chunk.data().data(), chunk.data().size());
  if (hash != chunk.xxh3_64()) {
    return DataLoss("CHUNK_HASH", "chunk.xxh3_64",
                    absl::StrCat("chunk of ", name, " at ", chunk.byte_offset(), ": XXH3-64 is ",
                                 absl::Hex(hash, absl::kZeroPad16), ", the server said ",
                                 absl::Hex(chunk.xxh3_64(), absl::kZeroPad16)));
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

void Assembler::CompleteIfWhole(Part* part) {
  const uint64_t size = part->data.size();
  const bool whole = size == 0 || (part->ranges.size() == 1 && part->ranges.begin()->first == 0 &&
                                   part->ranges.begin()->second == size);
  // Hashed as soon as it is whole: the work overlaps with the rest of the stream.
  if (whole) part->hash = XXH3_64bits(part->data.data(), size);
}

absl::Status Assembler::Add(const v1::TensorChunk& chunk) {
  if (failed_) return DataLoss("MANIFEST_INVALID", "chunk", "the stream has failed before");
  absl::Status status = Check(chunk);
  if (!status.ok()) {
    failed_ = true;
    return status;
  }
  if (chunk.data().empty()) return absl::OkStatus();
  Part& part = parts_[chunk.tensor()];
  if (!Insert(&part.ranges, chunk.byte_offset(), chunk.byte_offset() + chunk.data().size())) {
    failed_ = true;
    return DataLoss(
        "CHUNK_OVERLAP", "chunk.byte_offset",
        absl::StrCat("chunk of ", manifest_->tensors(static_cast<int>(chunk.tensor())).name(),
                     " at ", chunk.byte_offset(), " repeats bytes"));
  }
  std::memcpy(part.data.data() + chunk.byte_offset(), chunk.data().data(), chunk.data().size());
  bytes_done_ += chunk.data().size();
  CompleteIfWhole(&part);
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
