// Gated Delta Network prefill with selected recurrent updates (SparseGDN), and its dense form.
//
// Per value head h with key head p = h / (Hv / Hk), mask m[t, p] in {0, 1}:
//   S_t = e^{g_t} S_{t-1} + m_t beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T
//   o_t = scale (S_t^T q_t + (1 - m_t) beta_t (q_t . k_t) v_t)        (second term: LocalTerm)
// with g = log_gate and S [Dk, Dv] in fp32. The mask comes from the budgets of SequenceParams or
// from the caller. docs/algorithm.md defines selection, grouping and the solvers exactly.
#ifndef SPARSEGDN_GDN_H_
#define SPARSEGDN_GDN_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sparsegdn/types.h"

namespace sparsegdn {

// A [tokens, heads, dim] tensor with unit stride in dim; strides are in elements. Borrowed.
// A token_stride below head_stride makes it [heads, tokens, dim]. Rows may not overlap.
struct TensorRef {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};
struct ConstTensorRef {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

// A pool of fp32 states [slots, Hv, Dk, Dv] (kKeyMajor) or [slots, Hv, Dv, Dk]. Borrowed.
struct StatePool {
  float* data = nullptr;  // null: no pool; then every slot index must be < 0
  int32_t slots = 0;
  StateLayout layout = StateLayout::kKeyMajor;
};

// Host wall time spent inside one CPU call, in nanoseconds. Checking the arguments, which reads
// every beta, counts as neither.
struct GdnTimings {
  int64_t selection_ns = 0;  // next to nothing where every budget is dense
  int64_t core_ns = 0;
};

// Bits of GdnForwardArgs::status.
inline constexpr uint32_t kStatusBadCuSeqlens = 1u << 0;  // not from 0, decreasing, or beyond rows
inline constexpr uint32_t kStatusBetaOutOfRange = 1u << 1;  // some beta is < 0, > 1 or NaN
inline constexpr uint32_t kStatusBadSequence = 1u << 2;     // a SequenceParams field out of range

// One pack. All pointers are in the backend's memory: host for CPU, device for CUDA (where nothing
// is read on the host, so that a call can be captured in a graph). Inputs and outputs must not
// overlap, except that the final state pool may be the initial one (then of one layout). No two
// sequences may share a final slot, nor may one start from a slot of that pool that another writes.
// Rows past cu_seqlens[num_seqs] are neither read nor written.
struct GdnForwardArgs {
  GdnShape shape;
  int64_t num_tokens = 0;  // rows of q, k, v, ...; cu_seqlens[num_seqs] <= num_tokens <= 2^21
  int32_t num_seqs = 0;    // 0 .. 65,536
  const int32_t* cu_seqlens = nullptr;        // [num_seqs + 1], from 0, non-decreasing
  const SequenceParams* sequences = nullptr;  // [num_seqs]

  ConstTensorRef q, k;       // [num_tokens, Hk, Dk], F32, BF16 or F16; q, k and v of one dtype
  ConstTensorRef v;          // [num_tokens, Hv, Dv]
  ConstTensorRef log_gate;   // [num_tokens, Hv], head_stride used, F32 or BF16 (widened first); <= 0
  ConstTensorRef beta;       // [num_tokens, Hv], F32 or BF16; in [0, 1]
  float scale = 0.0f;        // of the output; 0 stands for Dk^-1/2
  bool normalize_qk = false; // q, k <- x * rsqrt(sum x^2 + 1e-6) in fp32 before use

  StatePool initial_state, final_state;
  TensorRef o;               // [num_tokens, Hv, Dv], F32, BF16 or F16

  const uint8_t* mask = nullptr;       // [num_tokens, Hk] 0 or 1: given, no selection takes place
  uint8_t* mask_out = nullptr;         // [num_tokens, Hk] the mask used; may be null
  int32_t* selected = nullptr;         // [num_seqs, Hk] events selected, forced ones included
  float* snapshots = nullptr;          // [snapshot_slots, Hv, ...] in final_state.layout
  int64_t snapshot_slots = 0;
  int32_t* nonfinite = nullptr;        // [num_seqs] 1 where a final state holds NaN or Inf, else 0
  uint32_t* status = nullptr;          // one word of kStatus* bits, 0 when all is well; may be null

  void* workspace = nullptr;           // at least WorkspaceBytes, 256-byte aligned
  size_t workspace_bytes = 0;
  GdnTimings* timings = nullptr;       // CPU only, null otherwise
  void* selection_done = nullptr;      // CUDA only: a cudaEvent_t recorded after selection, or null
};

// Host-side upper bounds from which a workspace is sized once, before any call.
struct GdnLimits {
  GdnShape shape;
  int64_t max_tokens = 0;
  int32_t max_seqs = 0;
  double max_retention = 1.0;  // largest share of events any budget may select; 1 for dense
  DType dtype = DType::kBF16;
};

// The GDN core on one device. Thread-compatible: one call at a time on one instance.
class GdnBackend {
 public:
  virtual ~GdnBackend() = default;
  virtual const char* name() const = 0;

  // INVALID_ARGUMENT for a shape outside GdnShape's ranges.
  virtual absl::StatusOr<size_t> WorkspaceBytes(const GdnLimits& limits) const = 0;

  // Runs the whole pack: selection (unless args.mask), states, outputs. `stream` is a cudaStream_t
  // for CUDA and ignored by the CPU. INVALID_ARGUMENT names field, got and wanted for what the host
  // can see, which on the CPU includes cu_seqlens and sequences (their bits are set in *args.status
  // too, and nothing else is written); on CUDA, faults in device data set *args.status and leave the
  // outputs unspecified but in bounds. RESOURCE_EXHAUSTED when the workspace is too small.
  virtual absl::Status Forward(const GdnForwardArgs& args, void* stream) = 0;

  // Selection alone: reads beta, v (kWriteNorm only), writes mask_out and selected.
  virtual absl::Status Select(const GdnForwardArgs& args, void* stream) = 0;
};

// num_threads 0 stands for the cores this process may use. bf16_products false widens bf16 inputs to
// fp32 even where the CPU has bf16 dot products, as every call does where it has none.
struct CpuBackendOptions {
  int num_threads = 0;
  bool bf16_products = true;
};
absl::StatusOr<std::unique_ptr<GdnBackend>> CreateCpuBackend(const CpuBackendOptions& options);

// UNIMPLEMENTED in a build without CUDA, FAILED_PRECONDITION without a device of sm_80 or later.
struct CudaBackendOptions {
  int device = 0;
};
absl::StatusOr<std::unique_ptr<GdnBackend>> CreateCudaBackend(const CudaBackendOptions& options);

// Checks a budget alone. INVALID_ARGUMENT names field, got, wanted; NaN is never in range.
absl::Status ValidateBudget(const Budget& budget);

// The bounds a budget resolves to, defaults filled in.
struct RetentionBounds {
  double min_retention = 0.0;
  double max_retention = 1.0;
};
RetentionBounds ResolveBounds(const Budget& budget);

}  // namespace sparsegdn

#endif  // SPARSEGDN_GDN_H_
