// What the CUDA kernels read: the caller's pointers and the carved workspace, passed by value.
#ifndef SPARSEGDN_KERNELS_CUDA_PARAMS_H_
#define SPARSEGDN_KERNELS_CUDA_PARAMS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "sparsegdn/gdn.h"

namespace sparsegdn::cuda {

// A StatePool with what the kernels need of it.
struct DeviceStates {
  float* data;
  int32_t slots;
  bool value_major;
};

// Workspace arrays. `windows` and `segments` are upper bounds known to the host; the true numbers
// stand in window_offset[num_seqs] and segment_offset[num_seqs].
struct Workspace {
  int32_t* window_offset;   // [num_seqs + 1] windows of the sequences before this one
  int32_t* segment_offset;  // [num_seqs + 1] time segments of the sequences before this one
  int32_t* state_readers;   // [segments * Hv] segments that have read their initial state
  uint64_t* keys;           // [Hk, num_tokens] sorted PairKey + 1 per window; 0: NaN
  int64_t* score_sum;       // [Hk, windows] sum of z over the window
  int32_t* candidates;      // [Hk, windows] keys that are not NaN
  int32_t* quota;           // [Hk, windows] keys to take
  int32_t* event_count;     // [Hk, windows] events, forced ones included
  uint16_t* events;         // [Hk, num_tokens] event rows relative to the window's first row
  float2* gate_sum;         // [Hv, num_tokens] log2 decay since the window's start, high + low part
  float* beta;              // [Hv, num_tokens]
  void* inverses;           // [Hv, inverse_slots, 64, 64] T per group, as panels (panel.cuh)
  int64_t inverse_slots;
  void* jobs;     // [segments, Hv] of kJobBytes: what each block of the fused kernel works on
  float* q_norm;  // [Hk, num_tokens] 1 / |q|, only with normalize_qk
  float* k_norm;  // [Hk, num_tokens]
  int64_t windows;
  int64_t segments;
};

struct Params {
  GdnShape shape;
  int32_t ratio;  // Hv / Hk
  int64_t num_tokens;
  int32_t num_seqs;
  const int32_t* cu_seqlens;
  const SequenceParams* sequences;
  ConstTensorRef q, k, v, log_gate, beta;
  float scale;
  bool normalize_qk;
  bool select_only;
  bool hopper;        // sm_90a: launches overlap, selection in clusters
  bool states_alias;  // final states may overwrite initial ones
  DeviceStates initial_state, final_state;
  TensorRef o;
  const uint8_t* mask;
  uint8_t* mask_out;
  int32_t* selected;
  float* snapshots;
  int64_t snapshot_slots;
  int32_t* nonfinite;
  uint32_t* status;
  Workspace ws;
};

inline constexpr int64_t kJobBytes = 256;

// A sequence is split into at most ceil(length / kSegmentTokens) time segments.
inline constexpr int64_t kSegmentTokens = 1024;

#if defined(__CUDACC__)
#define SPARSEGDN_CUDA_HD __host__ __device__
#else
#define SPARSEGDN_CUDA_HD
#endif

// Time segments of a sequence: a function of its own length and of the head count alone, so that
// the result of a sequence never depends on the pack or on the device. Never falls with length.
// One sequence makes one round of blocks on 132 multiprocessors, or more rounds where one would
// leave a tenth of them idle or where it is long enough for uneven segments to cost more than
// warm-ups.
SPARSEGDN_CUDA_HD inline int64_t SegmentCount(int64_t length, int32_t num_v_heads) {
  const int64_t by_length = (length + kSegmentTokens - 1) / kSegmentTokens;
  int64_t blocks = length >= 65536 ? 264 : 132;
  while (blocks < 528 && 10 * (blocks / num_v_heads) * num_v_heads < 9 * blocks) blocks *= 2;
  const int64_t cap = blocks / num_v_heads;
  const int64_t n = by_length < cap ? by_length : cap;
  return n < 1 ? 1 : n;
}

// Bytes of the workspace for these bounds; `carve` (may be null) receives pointers into `base`.
size_t LayoutWorkspace(const GdnShape& shape, int64_t num_tokens, int32_t num_seqs, char* base,
                       Workspace* carve);

// Each enqueues its kernels on `stream` and returns the launch error.
cudaError_t LaunchPlan(const Params& p, cudaStream_t stream);
cudaError_t LaunchScores(const Params& p, cudaStream_t stream);
cudaError_t LaunchSelect(const Params& p, cudaStream_t stream);  // scores to events at once, Hopper
cudaError_t LaunchQuota(const Params& p, cudaStream_t stream);
cudaError_t LaunchCompact(const Params& p, cudaStream_t stream);
cudaError_t LaunchNorms(const Params& p, cudaStream_t stream);
cudaError_t LaunchRecurrent(const Params& p, cudaStream_t stream);
cudaError_t LaunchInverse(const Params& p, cudaStream_t stream);
cudaError_t LaunchFused(const Params& p, cudaStream_t stream);

// True where LaunchSelect takes this call (LaunchScores, Quota and Compact take every call), and
// LaunchFused (LaunchRecurrent takes every call).
bool SelectSupports(const Params& p);
bool FusedSupports(const Params& p, int compute_capability_major);

}  // namespace sparsegdn::cuda

#endif  // SPARSEGDN_KERNELS_CUDA_PARAMS_H_
