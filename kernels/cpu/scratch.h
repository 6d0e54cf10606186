// Working memory of one thread, carved out of the caller's workspace.
#ifndef SPARSEGDN_KERNELS_CPU_SCRATCH_H_
#define SPARSEGDN_KERNELS_CPU_SCRATCH_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/kernel_table.h"
#include "sparsegdn/types.h"

namespace sparsegdn::cpu {

inline constexpr int kMaxRatio = 4;  // value heads of a head pair

// Hands out 64-byte aligned pieces; with a null base it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* Take(int64_t count) {
    const size_t at = bytes_;
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  size_t bytes() const { return bytes_; }

 private:
  char* base_;
  size_t bytes_ = 0;
};

// Sizes that the layout of a task depends on.
struct TaskDims {
  int dim_k;
  int dim_v;
  int depth;            // dim_k rounded up to even: rows of a packed state panel
  int panels;           // of dim_v
  int ratio;            // value heads per pair
  int64_t state_panel;  // elements of a state panel, fp32 or packed
  int64_t key_panel;    // elements of a packed K^T panel

  explicit TaskDims(const GdnShape& shape)
      : dim_k(shape.head_dim_k),
        dim_v(shape.head_dim_v),
        depth((shape.head_dim_k + 1) / 2 * 2),
        panels((shape.head_dim_v + kPanel - 1) / kPanel),
        ratio(shape.num_v_heads / shape.num_k_heads),
        state_panel(int64_t{depth} * kPanel),
        key_panel(int64_t{depth} * kPanel) {}
};

// Per value head of the pair.
template <typename E>
struct HeadScratch {
  float* state;      // [panels][depth][32], S_B of the current group
  E* state_packed;   // the same, packed; equals state for float
  float* updates;    // [panels][kRows][32], first K S, then u
  E* scaled;         // e^{G_end - G_i} u_i packed, rounded for bf16
  E* scaled_low;     // bf16: what that rounding took away
  double* gate_sum;  // [kWindow] log_gate summed from the segment's start through each token
  float* hi;         // [kWindow] the same from the group's start, as two floats
  float* lo;
  float* event_hi;  // [kRows]
  float* event_lo;
  float* event_beta;
  float* event_decay;  // e^{G_i}, times the key's normalisation
  float* event_tail;   // e^{G_end - G_i}, times the key's normalisation
};

template <typename E>
struct TaskScratch {
  HeadScratch<E> heads[kMaxRatio];
  int32_t* events;      // [kWindow] rows of the segment's events
  E* key_rows;          // [kRows][depth] gathered keys
  E* key_panels;        // 2 packed panels of K^T
  E* keys_t;            // [depth][kRows]
  E* query_rows;        // [kRows][depth], where q cannot be used in place
  float* kk;            // [2][kRows][32]
  float* qk;            // [2][kRows][32]
  float* probs;         // [kRows][kRows]
  float* system;        // [kRows][kRows]
  float* inverse;       // [4][16][16]
  float* c;             // [kRows][32]
  float* key_norm;      // [kRows] normalisation of the events' keys, 1 without
  float* query_factor;  // [kRows] scale, times the query's normalisation
  float* row_factor;    // [kRows] e^{G_t} query_factor
  float* self_product;  // [kRows] q . k, normalised and scaled
  float* self;          // [kRows]
  float* dots;          // [kRows]
  int32_t* row_events;  // [kRows]

  TaskScratch(Arena* arena, const TaskDims& dims);
};

template <typename E>
TaskScratch<E>::TaskScratch(Arena* arena, const TaskDims& dims) {
  constexpr bool kFloat = sizeof(E) == sizeof(float);
  const int64_t updates = int64_t{dims.panels} * kRows * kPanel;
  for (int h = 0; h < dims.ratio; ++h) {
    HeadScratch<E>& head = heads[h];
    head.state = arena->Take<float>(dims.panels * dims.state_panel);
    head.state_packed =
        kFloat ? reinterpret_cast<E*>(head.state) : arena->Take<E>(dims.panels * dims.state_panel);
    head.updates = arena->Take<float>(updates);
    head.scaled = arena->Take<E>(updates);
    head.scaled_low = kFloat ? nullptr : arena->Take<E>(updates);
    head.gate_sum = arena->Take<double>(kWindow);
    head.hi = arena->Take<float>(kWindow);
    head.lo = arena->Take<float>(kWindow);
    for (float** p :
         {&head.event_hi, &head.event_lo, &head.event_beta, &head.event_decay, &head.event_tail}) {
      *p = arena->Take<float>(kRows);
    }
  }
  events = arena->Take<int32_t>(kWindow);
  key_rows = arena->Take<E>(int64_t{kRows} * dims.depth);
  key_panels = arena->Take<E>(2 * dims.key_panel);
  keys_t = arena->Take<E>(int64_t{dims.depth} * kRows);
  query_rows = arena->Take<E>(int64_t{kRows} * dims.depth);
  kk = arena->Take<float>(2 * kRows * kPanel);
  qk = arena->Take<float>(2 * kRows * kPanel);
  probs = arena->Take<float>(kRows * kRows);
  system = arena->Take<float>(kRows * kRows);
  inverse = arena->Take<float>(kRows * kBlock);
  c = arena->Take<float>(kRows * kPanel);
  for (float** p : {&key_norm, &query_factor, &row_factor, &self_product, &self, &dots}) {
    *p = arena->Take<float>(kRows);
  }
  row_events = arena->Take<int32_t>(kRows);
}

}  // namespace sparsegdn::cpu

#endif  // SPARSEGDN_KERNELS_CPU_SCRATCH_H_
