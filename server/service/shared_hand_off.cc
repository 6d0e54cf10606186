#include "server/service/shared_hand_off.h"

#include <grpcpp/support/slice.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/service/convert_response.h"

namespace sparsegdn::service {
namespace {

grpc::ByteBuffer Serialize(const v1::PrefillResponse& response) {
  const grpc::Slice slice(response.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedHandOff>> SharedHandOff::Begin(
    SegmentPool& pool, const engine::Manifest& manifest) {
  std::vector<uint64_t> sizes;
  sizes.reserve(manifest.tensors.size());
  for (const engine::TensorInfo& tensor : manifest.tensors) sizes.push_back(tensor.bytes);
  std::vector<uint64_t> offsets = SegmentOffsets(sizes);
  absl::StatusOr<std::unique_ptr<SharedSegment>> segment = pool.Create(offsets.back());
  if (!segment.ok()) return segment.status();
  return std::unique_ptr<SharedHandOff>(new SharedHandOff(*std::move(segment), std::move(offsets)));
}

grpc::ByteBuffer SharedHandOff::EncodeManifest(const engine::Manifest& manifest) const {
  v1::PrefillResponse response;
  *response.mutable_manifest() = ToProto(manifest);
  v1::SharedMemory* shared = response.mutable_manifest()->mutable_shared_memory();
  shared->set_name(segment_->name());
  shared->set_bytes(segment_->bytes());
  shared->mutable_tensor_offsets()->Add(offsets_.begin(), offsets_.end() - 1);
  return Serialize(response);
}

absl::Status SharedHandOff::Put(const engine::TensorChunk& chunk) {
  if (chunk.tensor + size_t{1} >= offsets_.size()) {
    return absl::InternalError(absl::StrCat("a frame of tensor ", chunk.tensor,
                                            ", the manifest has ", offsets_.size() - 1));
  }
  const uint64_t begin = offsets_[chunk.tensor] + chunk.byte_offset;
  absl::Status status = segment_->Write(begin, *chunk.data);
  if (!status.ok()) return status;
  v1::SharedChunk* out = untold_.mutable_shared_chunks()->add_chunks();
  out->set_tensor(chunk.tensor);
  out->set_byte_offset(chunk.byte_offset);
  out->set_bytes(chunk.data->size());
  out->set_xxh3_64(chunk.xxh3_64);
  untold_bytes_ += chunk.data->size();
  return absl::OkStatus();
}

grpc::ByteBuffer SharedHandOff::EncodeChunks() {
  grpc::ByteBuffer message = Serialize(untold_);
  untold_.Clear();
  untold_bytes_ = 0;
  return message;
}

void SharedHandOff::Finish(SegmentPool& pool, std::unique_ptr<SharedHandOff> done) {
  pool.Linger(std::move(done->segment_));
}

}  // namespace sparsegdn::service
