#include <algorithm>

#include "kernels/cuda/params.h"

namespace sparsegdn::cuda {
namespace {

// Bump allocator over the caller's workspace; only counts when there is none.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}
  template <typename T>
  T* Take(int64_t count) {
    char* at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return reinterpret_cast<T*>(at);
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace

size_t LayoutWorkspace(const GdnShape& shape, int64_t num_tokens, int32_t num_seqs, char* base,
                       Workspace* carve) {
  Workspace w{};
  Arena arena(base);
  const int64_t hk = shape.num_k_heads, hv = shape.num_v_heads;
  // A sequence of n tokens touches at most n / W + 2 windows; SegmentCount bounds its segments.
  w.windows = num_tokens / kWindow + 2 * int64_t{num_seqs};
  w.segments = std::min(num_tokens / kSegmentTokens + int64_t{num_seqs},
                        int64_t{num_seqs} * SegmentCount(num_tokens, shape.num_v_heads));
  w.window_offset = arena.Take<int32_t>(num_seqs + 1);
  w.segment_offset = arena.Take<int32_t>(num_seqs + 1);
  w.state_readers = arena.Take<int32_t>(w.segments * hv);
  w.keys = arena.Take<uint64_t>(hk * num_tokens);
  w.score_sum = arena.Take<int64_t>(hk * w.windows);
  w.candidates = arena.Take<int32_t>(hk * w.windows);
  w.quota = arena.Take<int32_t>(hk * w.windows);
  w.event_count = arena.Take<int32_t>(hk * w.windows);
  w.events = arena.Take<uint16_t>(hk * num_tokens);
  w.gate_sum = arena.Take<float2>(hv * num_tokens);
  w.beta = arena.Take<float>(hv * num_tokens);
  w.inverse_slots = num_tokens / kGroup + 2 * w.windows;
  w.inverses = arena.Take<uint16_t>(hv * w.inverse_slots * kGroup * kGroup);
  w.jobs = arena.Take<char>(w.segments * hv * kJobBytes);
  w.q_norm = arena.Take<float>(hk * num_tokens);
  w.k_norm = arena.Take<float>(hk * num_tokens);
  if (carve != nullptr) *carve = w;
  return arena.used();
}

}  // namespace sparsegdn::cuda
