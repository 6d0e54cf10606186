#include "server/engine/frame_writer.h"

#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace sparsegdn::engine {

uint64_t Xxh3(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

struct RunningHash::State {
  XXH3_state_t* xxh = XXH3_createState();
  State() { XXH3_64bits_reset(xxh); }
  ~State() { XXH3_freeState(xxh); }
};

RunningHash::RunningHash() : state_(std::make_unique<State>()) {}
RunningHash::~RunningHash() = default;
RunningHash::RunningHash(RunningHash&&) noexcept = default;
RunningHash& RunningHash::operator=(RunningHash&&) noexcept = default;
void RunningHash::Update(std::string_view bytes) {
  XXH3_64bits_update(state_->xxh, bytes.data(), bytes.size());
}
uint64_t RunningHash::Digest() const { return XXH3_64bits_digest(state_->xxh); }

uint64_t DigestOf(const std::vector<uint64_t>& tensor_hashes) {
  std::string bytes;
  bytes.reserve(tensor_hashes.size() * 8);
  for (const uint64_t hash : tensor_hashes) {
    for (int shift = 0; shift < 64; shift += 8) {
      bytes.push_back(static_cast<char>((hash >> shift) & 0xff));
    }
  }
  return Xxh3(bytes);
}

FrameWriter::FrameWriter(const Manifest& manifest, int64_t frame_bytes, Emit emit)
    : manifest_(manifest),
      frame_bytes_(static_cast<size_t>(frame_bytes)),
      emit_(std::move(emit)),
      tensors_(manifest.tensors.size()) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i].bytes = manifest.tensors[i].bytes;
    if (tensors_[i].bytes == 0) tensors_[i].hash = Xxh3({});
  }
}

void FrameWriter::Append(int32_t id, std::string_view bytes) {
  Tensor& tensor = tensors_[id];
  while (!bytes.empty()) {
    if (tensor.pending.empty()) {
      const uint64_t left = tensor.bytes - std::min(tensor.bytes, tensor.sent);
      tensor.pending.reserve(std::max(bytes.size() < left ? std::min<uint64_t>(left, frame_bytes_)
                                                          : std::min(bytes.size(), frame_bytes_),
                                      size_t{1}));
      open_.push_back(id);
    }
    const size_t n = std::min(bytes.size(), frame_bytes_ - tensor.pending.size());
    tensor.pending.append(bytes.substr(0, n));
    bytes.remove_prefix(n);
    if (tensor.pending.size() == frame_bytes_ ||
        tensor.sent + tensor.pending.size() >= tensor.bytes) {
      open_.erase(std::find(open_.begin(), open_.end(), id));
      Send(id, std::make_shared<const std::string>(std::exchange(tensor.pending, {})));
    }
  }
}

void FrameWriter::AppendBlob(int32_t id, Blob blob) {
  if (!blob->empty()) Send(id, std::move(blob));
}

void FrameWriter::Flush() {
  for (const int32_t id : std::exchange(open_, {})) {
    Send(id, std::make_shared<const std::string>(std::exchange(tensors_[id].pending, {})));
  }
}

void FrameWriter::Send(int32_t id, Blob blob) {
  Tensor& tensor = tensors_[id];
  if (tensor.sent + blob->size() > tensor.bytes) {
    tensor.overflow = true;
    return;
  }
  TensorChunk chunk;
  chunk.tensor = static_cast<uint32_t>(id);
  chunk.byte_offset = tensor.sent;
  chunk.xxh3_64 = Xxh3(*blob);
  tensor.sent += blob->size();
  if (blob->size() == tensor.bytes) {
    tensor.hash = chunk.xxh3_64;
  } else {
    if (!tensor.running) tensor.running = std::make_unique<RunningHash>();
    tensor.running->Update(*blob);
    if (tensor.sent == tensor.bytes) {
      tensor.hash = tensor.running->Digest();
      tensor.running.reset();
    }
  }
  chunk.data = std::move(blob);
  emit_(std::move(chunk));
}

absl::StatusOr<uint64_t> FrameWriter::Digest() {
  Flush();
  std::vector<uint64_t> hashes;
  hashes.reserve(tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Tensor& tensor = tensors_[i];
    if (tensor.sent != tensor.bytes || tensor.overflow) {
      return absl::InternalError(absl::StrCat("tensor ", manifest_.tensors[i].name, " has ",
                                              tensor.sent, " bytes", tensor.overflow ? "+" : "",
                                              ", wanted ", tensor.bytes));
    }
    hashes.push_back(tensor.hash);
  }
  return DigestOf(hashes);
}

}  // namespace sparsegdn::engine
