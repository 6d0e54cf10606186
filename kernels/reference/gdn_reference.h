// The token-by-token recurrence in fp64: the oracle of every accuracy test.
#ifndef SPARSEGDN_KERNELS_REFERENCE_GDN_REFERENCE_H_
#define SPARSEGDN_KERNELS_REFERENCE_GDN_REFERENCE_H_

#include <cstdint>
#include <vector>

#include "sparsegdn/types.h"

namespace sparsegdn::reference {

// One sequence, widened to fp64 from whatever the kernel under test reads. Row-major, dense.
struct Sequence {
  GdnShape shape;
  int64_t num_tokens = 0;
  int64_t first_position = 0;
  std::vector<double> q, k;           // [num_tokens, Hk, Dk]
  std::vector<double> v;              // [num_tokens, Hv, Dv]
  std::vector<double> log_gate;       // [num_tokens, Hv]
  std::vector<double> beta;           // [num_tokens, Hv]
  std::vector<uint8_t> mask;          // [num_tokens, Hk]; empty: every token is an event
  std::vector<double> initial_state;  // [Hv, Dk, Dv]; empty: zeros
  double scale = 0.0;                 // 0 stands for Dk^-1/2
  bool normalize_qk = false;          // x / sqrt(sum x^2 + 1e-6)
  LocalTerm local = LocalTerm::kSelf;
  int64_t snapshot_every = 0;
};

struct Result {
  std::vector<double> o;          // [num_tokens, Hv, Dv]
  std::vector<double> state;      // [Hv, Dk, Dv] after the last token
  std::vector<double> snapshots;  // one [Hv, Dk, Dv] per multiple of snapshot_every passed
};

// Per value head h with key head p = h / (Hv / Hk):
//   S_t = e^{g_t} S_{t-1} + m_t beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T
//   o_t = scale (S_t^T q_t + (1 - m_t) beta_t (q_t . k_t) v_t)      (second term: LocalTerm::kSelf)
// log_gate is clamped at kMinLogGate from below. Takes sequences of any length, 0 included.
Result RunRecurrence(const Sequence& sequence);

// The same sums in the group form of docs/algorithm.md, in fp64, with the solver's block structure:
// what BLOCK_ADJACENT computes, and EXACT as a check of the identity with RunRecurrence. AUTO
// applies its drop condition.
Result RunGrouped(const Sequence& sequence, Solver solver);

}  // namespace sparsegdn::reference

#endif  // SPARSEGDN_KERNELS_REFERENCE_GDN_REFERENCE_H_
