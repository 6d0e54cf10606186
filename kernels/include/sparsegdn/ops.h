// The operations of a Qwen3.5 layer around the GDN core, on bare tensors, and their CPU backend.
//
// Arguments are backend-neutral: pointers are in the backend's memory and activations are of the
// backend's activation dtype (CPU: FP32). A matrix is row-major with unit stride inside a row;
// strides are in elements. All tensors are borrowed; outputs must not overlap inputs except where
// a function says so. Rows past the given counts are neither read nor written.
//
// On the CPU each result row is a function of its own inputs alone, bit for bit: products
// accumulate over depth in ascending order, attention walks the cache in tiles at fixed absolute
// positions. So a sequence packed with others equals the same sequence alone, and a prompt cut
// into chunks equals the whole.
#ifndef SPARSEGDN_OPS_H_
#define SPARSEGDN_OPS_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "sparsegdn/types.h"

namespace sparsegdn {

struct Rows {
  void* data = nullptr;
  int64_t stride = 0;
};
struct ConstRows {
  const void* data = nullptr;
  int64_t stride = 0;
  ConstRows() = default;
  ConstRows(const void* d, int64_t s) : data(d), stride(s) {}
  ConstRows(const Rows& rows)
      : data(rows.data), stride(rows.stride) {}  // NOLINT: as T* to const T*
};

// y = x * rsqrt(mean(x^2) + eps) * (1 + weight), per row.
struct RmsNormArgs {
  int64_t rows = 0, cols = 0;
  ConstRows x;
  const float* weight = nullptr;  // [cols]
  float eps = 1e-6f;
  Rows y;
};

// Per head: n = o * rsqrt(mean(o^2) + eps); y = weight * n * silu(z). y may be o.
struct GatedNormArgs {
  int64_t rows = 0;
  int32_t heads = 0, dim = 0;
  ConstRows o, z;                 // [rows, heads * dim]
  const float* weight = nullptr;  // [dim]
  float eps = 1e-6f;
  Rows y;
};

// One step's packed sequences. Index arrays are in the backend's memory.
struct PackArgs {
  int32_t num_seqs = 0;
  int64_t num_tokens = 0;
  const int32_t* cu_seqlens = nullptr;       // [num_seqs + 1]
  const int32_t* slots = nullptr;            // [num_seqs]
  const int64_t* first_positions = nullptr;  // [num_seqs]
};

// y[c, t] = silu(sum_j taps[j][c] x[t - 3 + j][c]) with rows before the sequence from its conv
// state; then the gates: beta = sigmoid(b), log_gate = -exp(a_log) softplus(a + dt_bias), softplus
// linear beyond 20. Afterwards the state holds the last four raw rows, oldest first.
struct GdnFrontArgs {
  PackArgs pack;
  int64_t channels = 0;
  int32_t num_v_heads = 0;
  ConstRows x;                     // [num_tokens, channels], raw projections
  ConstRows a, b;                  // [num_tokens, num_v_heads]
  const float* taps = nullptr;     // [4, channels]
  const float* a_log = nullptr;    // [num_v_heads]
  const float* dt_bias = nullptr;  // [num_v_heads]
  void* conv_state = nullptr;      // [slots, channels, 4], activation dtype; read and written
  Rows y;                          // [num_tokens, channels]: q | k | v
  float* log_gate = nullptr;       // [num_tokens, num_v_heads]
  float* beta = nullptr;           // [num_tokens, num_v_heads]
};

// The conv state of one sequence after `rows` of its rows in this pack, for checkpoints. Must run
// before GdnFront overwrites the state.
struct ConvStateAtArgs {
  int64_t channels = 0;
  ConstRows x;                  // the sequence's first row in the pack
  int64_t rows = 0;             // rows consumed, >= 1
  const void* state = nullptr;  // [channels, 4] before the pack
  void* out = nullptr;          // [channels, 4]
};

// Attention cache: blocks of block_tokens positions, a multiple of kKvTile, in a layout private to
// the backend. Sequence s finds position p in block block_tables[s][p / block_tokens].
inline constexpr int32_t kKvTile = 64;
struct KvCacheRef {
  void* data = nullptr;                   // [blocks][KvBlockBytes]
  const int32_t* block_tables = nullptr;  // [num_seqs, max_blocks]
  int64_t max_blocks = 0;
  int32_t block_tokens = 0;
  // Whether each sequence's blocks follow one another, so that its first entry tells where all its
  // positions lie. The same for every call on a sequence. A backend may compute such sequences by
  // another kernel, equal within its rounding.
  bool consecutive = false;
};
inline constexpr int32_t kMaxQueryGroup = 64;
struct AttentionShape {
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;  // num_q_heads / num_kv_heads is an integer, at most kMaxQueryGroup
  int32_t head_dim = 0;
  int32_t rotary_dim = 0;  // even, <= head_dim
};

// q and k <- rope(rmsnorm(., 1 + weight)), pairs (i, i + rotary_dim / 2); then k and v are
// written to their rows and appended to the cache.
struct AttentionFrontArgs {
  PackArgs pack;
  AttentionShape shape;
  ConstRows q_gate;  // [num_tokens, num_q_heads, 2, head_dim]: per head query, then gate
  ConstRows k, v;    // [num_tokens, num_kv_heads, head_dim]
  const float* q_norm = nullptr;  // [head_dim]
  const float* k_norm = nullptr;
  float eps = 1e-6f;
  const float* cos = nullptr;  // [num_tokens, rotary_dim / 2]
  const float* sin = nullptr;
  Rows q_out;             // [num_tokens, num_q_heads * head_dim]
  void* k_out = nullptr;  // [num_tokens, num_kv_heads, head_dim], contiguous
  void* v_out = nullptr;
  KvCacheRef cache;
};

// cos and sin of position * inv_freq, the product in FP32 as the reference has it.
struct RopeTableArgs {
  PackArgs pack;
  const float* inv_freq = nullptr;  // [half]
  int32_t half = 0;
  float* cos = nullptr;  // [num_tokens, half]
  float* sin = nullptr;
};

// Appends rows of one sequence from an earlier run to its cache: k after norm and rope.
struct KvLoadArgs {
  AttentionShape shape;
  int64_t rows = 0, first_position = 0;
  const void* k = nullptr;  // [rows, num_kv_heads, head_dim], activation dtype, contiguous
  const void* v = nullptr;
  KvCacheRef cache;  // block_tables of this sequence alone
};

// What the Attention calls of one model have in common.
struct AttentionLimits {
  AttentionShape shape;
  int64_t max_tokens = 0;  // of a pack
  int32_t max_seqs = 0;
  int64_t kv_tokens = 0;  // of the whole cache
  int32_t block_tokens = 0;
  int64_t q_stride = 0;  // of AttentionArgs::q, in elements
  int64_t out_stride = 0;
};

// Causal attention with grouped heads: token at position p sees cache positions 0 .. p, which
// must all have been appended. scores = q . k * head_dim^-1/2, softmax in FP32.
// out <- attention * sigmoid(gate), the gate from q_gate as in AttentionFrontArgs.
struct AttentionArgs {
  PackArgs pack;
  AttentionShape shape;
  ConstRows q;  // [num_tokens, num_q_heads * head_dim]
  ConstRows q_gate;
  KvCacheRef cache;
  Rows out;  // [num_tokens, num_q_heads * head_dim]
};

// y = silu(gate) * up with gate | up side by side in a row.
struct SwiGluArgs {
  int64_t rows = 0, inner = 0;
  ConstRows gate_up;  // [rows, 2 * inner]
  Rows y;             // [rows, inner]
};

// out[i] = logits[i][target[i]] - logsumexp(logits[i]).
struct LogProbArgs {
  int64_t rows = 0, vocab = 0;
  const float* logits = nullptr;     // [rows, vocab]
  const int32_t* targets = nullptr;  // [rows]
  float* out = nullptr;              // [rows]
};

}  // namespace sparsegdn

#endif  // SPARSEGDN_OPS_H_
