// Cuts the tensors of one manifest into hashed frames. Every tensor is written front to back, in
// any interleaving with others; frames leave as soon as they are full.
#ifndef SPARSEGDN_SERVER_ENGINE_FRAME_WRITER_H_
#define SPARSEGDN_SERVER_ENGINE_FRAME_WRITER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/layout.h"
#include "server/engine/types.h"

namespace sparsegdn::engine {

uint64_t Xxh3(std::string_view bytes);

// XXH3-64 over bytes that arrive in pieces.
class RunningHash {
 public:
  RunningHash();
  ~RunningHash();
  RunningHash(RunningHash&&) noexcept;
  RunningHash& operator=(RunningHash&&) noexcept;
  void Update(std::string_view bytes);
  uint64_t Digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// XXH3-64 over the tensors' hashes, 8 bytes little endian each, in manifest order.
uint64_t DigestOf(const std::vector<uint64_t>& tensor_hashes);

class FrameWriter {
 public:
  using Emit = std::function<void(TensorChunk)>;
  FrameWriter(const Manifest& manifest, int64_t frame_bytes, Emit emit);

  // Copies bytes behind what the tensor has; a full frame, or the tensor's last one, leaves at
  // once.
  void Append(int32_t tensor, std::string_view bytes);
  // The same as one frame of its own, without a copy. Nothing may be pending in the tensor.
  void AppendBlob(int32_t tensor, Blob blob);
  // Sends what is pending in all tensors.
  void Flush();

  // INTERNAL names the first tensor that is not complete, or got too many bytes.
  absl::StatusOr<uint64_t> Digest();

 private:
  struct Tensor {
    uint64_t bytes = 0;
    uint64_t sent = 0;
    std::string pending;
    std::unique_ptr<RunningHash> running;  // only with more than one frame
    uint64_t hash = 0;
    bool overflow = false;
  };
  void Send(int32_t id, Blob blob);

  const Manifest& manifest_;
  const size_t frame_bytes_;
  const Emit emit_;
  std::vector<Tensor> tensors_;
  std::vector<int32_t> open_;  // tensors with pending bytes, each once
};

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_FRAME_WRITER_H_
