// Plain types shared by every entry point of the kernel library.
//
// Everything here is trivially copyable and has a fixed layout, because the CUDA backend reads
// SequenceParams from device memory and the C ABI (c_api.h) exposes the same structs.
#ifndef SPARSEGDN_TYPES_H_
#define SPARSEGDN_TYPES_H_

#include <cstdint>

namespace sparsegdn {

enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

// How a sequence's budget of recurrent updates is given (docs/algorithm.md, "Budgets").
enum class BudgetMode : int32_t { kDense = 0, kRetention = 1, kCoverage = 2 };

// Score of an event: kBeta is max over the head pair of beta, kWriteNorm max of beta * |v|_2.
enum class Selector : int32_t { kBeta = 0, kWriteNorm = 1 };

// kAuto drops the far 16 x 16 blocks only where decay bounds every dropped entry by one rounding of
// the products it feeds (bf16: beta / 512, fp32: beta * 2^-24) and every |k|^2 <= 1.0625; kExact
// never drops; kBlockAdjacent always drops and carries no accuracy promise.
enum class Solver : int32_t { kAuto = 0, kExact = 1, kBlockAdjacent = 2 };

// kSelf adds beta_t (q_t . k_t) v_t to the output of a skipped token; kNone does not.
enum class LocalTerm : int32_t { kSelf = 0, kNone = 1 };

// Order of the last two dimensions of a state: [head_dim_k, head_dim_v] or its transpose.
enum class StateLayout : int32_t { kKeyMajor = 0, kValueMajor = 1 };

// Tokens per selection window, in absolute positions, and events per group.
inline constexpr int64_t kWindow = 2048;
inline constexpr int64_t kGroup = 64;
inline constexpr int32_t kMaxHeadDim = 256;
// log_gate is clamped to this from below, so -inf is a legal gate.
inline constexpr float kMinLogGate = -1000.0f;

struct GdnShape {
  int32_t num_k_heads = 0;  // Hk; a head pair is the Hv / Hk value heads of one key head
  int32_t num_v_heads = 0;  // Hv, a multiple of Hk; Hv / Hk in {1, 2, 3, 4}
  int32_t head_dim_k = 0;   // Dk in [1, 256]
  int32_t head_dim_v = 0;   // Dv in [1, 256]
};

// Budget of one sequence. Bounds are shares of a window's non-forced tokens, per head pair.
// A negative bound stands for the default of the mode: retention rho / 4 and min(1, 2 rho),
// coverage 0.02 and 0.5.
struct Budget {
  BudgetMode mode = BudgetMode::kRetention;
  Selector selector = Selector::kBeta;
  Solver solver = Solver::kAuto;
  LocalTerm local = LocalTerm::kSelf;
  double retention = 0.29;       // (0, 1], kRetention only
  double coverage = 0.9;         // (0, 1], kCoverage only
  double min_retention = -1.0;   // [0, 1]
  double max_retention = -1.0;   // [0, 1], >= min_retention
  int64_t keep_first = 0;        // positions < keep_first are events of every pair
  int64_t keep_last = 64;        // positions >= prompt_tokens - keep_last likewise
};

// One sequence of a pack. A call may hold any part of a request: its tokens stand at absolute
// positions first_position .. first_position + length - 1 of a request of prompt_tokens.
struct SequenceParams {
  int64_t first_position = 0;
  int64_t prompt_tokens = 0;  // full length of the request, >= first_position + length
  Budget budget;
  // Snapshots: the state after each absolute position that is a multiple of snapshot_every
  // (0: none) in (first_position, first_position + length] is written to consecutive entries of
  // GdnForwardArgs::snapshots from snapshot_index on. Must be a multiple of kWindow, or of kGroup
  // when the budget is dense.
  int64_t snapshot_every = 0;
  int64_t snapshot_index = 0;
  // Slots in the initial and final state pools; initial_slot < 0 starts from zeros, final_slot < 0
  // drops the final state.
  int32_t initial_slot = -1;
  int32_t final_slot = -1;
};

}  // namespace sparsegdn

#endif  // SPARSEGDN_TYPES_H_
