// Portable path: the masked recurrence token by token in fp32, any shape, dtype and device.
//
// One block owns 32 columns of one value head's state, eight threads a column; columns are
// independent, so any split of Dv gives the same bits. BLOCK_ADJACENT runs as a recurrence too.
// With y_b = T_bb r_b (block b of 16 events alone) and u_b = T_bb (r_b - A_{b,b-1} y_{b-1}), u is
// predicted from a state that holds S_B and the y of the block before, y from S_B alone, so that
// three more states are kept: S_B decayed, S_B plus this block's y, and the predictor of u. 3 Dk Dv
// FMA a token and head against 2 (Dk + Dv) inputs: bound by the latency of one token's chain.
#include "kernels/cuda/device_common.cuh"

namespace sparsegdn::cuda {
namespace {

constexpr int kColumns = 32;
constexpr int kSplit = 8;  // threads a column
constexpr int kThreads = kColumns * kSplit;
constexpr int kChunk = 16;  // tokens staged at once
constexpr int kBlockEvents = 16;

struct Stage {
  float q[kChunk][kMaxHeadDim];
  float k[kChunk][kMaxHeadDim];
  float v[kChunk][kColumns];
  float decay[kChunk];
  float beta[kChunk];
  int event[kChunk];
};

template <int kRows>
struct States {
  float s[kRows];                                    // all u: the state
  float predict[kRows], with_y[kRows], base[kRows];  // BLOCK_ADJACENT only
};

struct Place {
  int seq, head, pair, column;  // column of Dv
  int sub;                      // rows sub, sub + 8, ...
  bool live;                    // column < Dv
};

__device__ int64_t StateIndex(const Params& p, int64_t slot, int head, int row, int column,
                              bool value_major) {
  const int64_t base =
      (slot * p.shape.num_v_heads + head) * int64_t{p.shape.head_dim_k} * p.shape.head_dim_v;
  return base + (value_major ? int64_t{column} * p.shape.head_dim_k + row
                             : int64_t{row} * p.shape.head_dim_v + column);
}

template <int kRows>
__device__ void StoreState(const Params& p, const Place& at, const float (&s)[kRows], float* data,
                           int64_t slot) {
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const int row = at.sub + j * kSplit;
    if (at.live && row < p.shape.head_dim_k) {
      data[StateIndex(p, slot, at.head, row, at.column, p.final_state.value_major)] = s[j];
    }
  }
}

// Marks the events among rows [base, base + n) of window `w`; `cursor` walks its event list.
__device__ void StageEvents(const Params& p, const Window& w, const Place& at, int window, int base,
                            int n, int* cursor, Stage* stage) {
  if (IsDense(p, w.seq)) {
    if (threadIdx.x < kChunk) stage->event[threadIdx.x] = 1;
    return;
  }
  if (threadIdx.x < kChunk) stage->event[threadIdx.x] = 0;
  __syncthreads();
  const int count = p.ws.event_count[at.pair * p.ws.windows + window];
  const uint16_t* list = p.ws.events + at.pair * p.num_tokens + w.begin;
  const int lane = threadIdx.x % 32;
  const int index = *cursor + lane;
  const int row = index < count ? list[index] : 1 << 30;
  const bool inside = lane < kChunk && row < base + n;
  if (threadIdx.x < 32 && inside) stage->event[row - base] = 1;
  *cursor += __popc(__ballot_sync(0xffffffffu, inside));
}

__device__ void StageTokens(const Params& p, const Place& at, int64_t token0, int n, Stage* stage) {
  const int dim = p.shape.head_dim_k;
  for (int i = threadIdx.x; i < n * dim; i += kThreads) {
    const int t = i / dim, d = i % dim;
    const int64_t norm = at.pair * p.num_tokens + token0 + t;
    const float q_scale = p.normalize_qk ? p.ws.q_norm[norm] : 1.0f;
    const float k_scale = p.normalize_qk ? p.ws.k_norm[norm] : 1.0f;
    stage->q[t][d] = LoadElement(p.q, token0 + t, at.pair, d) * q_scale;
    stage->k[t][d] = LoadElement(p.k, token0 + t, at.pair, d) * k_scale;
  }
  const int column0 = at.column / kColumns * kColumns;
  for (int i = threadIdx.x; i < n * kColumns; i += kThreads) {
    const int t = i / kColumns, c = column0 + i % kColumns;
    stage->v[t][i % kColumns] =
        c < p.shape.head_dim_v ? LoadElement(p.v, token0 + t, at.head, c) : 0.0f;
  }
  if (threadIdx.x < n) {
    const float gate = LoadElement(p.log_gate, token0 + threadIdx.x, at.head, 0);
    stage->decay[threadIdx.x] = expf(gate < kMinLogGate ? kMinLogGate : gate);
    stage->beta[threadIdx.x] = LoadElement(p.beta, token0 + threadIdx.x, at.head, 0);
  }
}

__device__ __forceinline__ float ColumnSum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  x += __shfl_xor_sync(0xffffffffu, x, 2);
  return x + __shfl_xor_sync(0xffffffffu, x, 4);
}

template <int kRows>
__device__ __forceinline__ float ColumnDot(const float (&s)[kRows], const float* x, int sub,
                                           int dim) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const int row = sub + j * kSplit;
    if (row < dim) sum += s[j] * x[row];
  }
  return ColumnSum(sum);
}

template <int kRows>
__device__ __forceinline__ void Scale(float (&s)[kRows], float x) {
#pragma unroll
  for (int j = 0; j < kRows; ++j) s[j] *= x;
}

template <int kRows>
__device__ __forceinline__ void Add(float (&s)[kRows], const float* k, int sub, int dim, float u) {
  if (u == 0.0f) return;  // nothing is written: -0 stays -0
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const int row = sub + j * kSplit;
    if (row < dim) s[j] += k[row] * u;
  }
}

template <int kRows>
__device__ __forceinline__ void Copy(float (&to)[kRows], const float (&from)[kRows]) {
#pragma unroll
  for (int j = 0; j < kRows; ++j) to[j] = from[j];
}

// One token; returns the output before `scale`. `events` counts the group's events so far.
template <int kRows, bool kAdjacent>
__device__ __forceinline__ float Step(const Params& p, const Place& at, const Stage& stage, int t,
                                      bool self_term, int* events, States<kRows>* st) {
  const int dim = p.shape.head_dim_k;
  const float *q = stage.q[t], *k = stage.k[t];
  const float v = stage.v[t][at.column % kColumns], beta = stage.beta[t];
  if (kAdjacent && stage.event[t] != 0) {
    if (*events % kGroup == 0) {
      Copy(st->base, st->s);
      Copy(st->with_y, st->s);
      Copy(st->predict, st->s);
    } else if (*events % kBlockEvents == 0) {
      Copy(st->predict, st->with_y);
      Copy(st->with_y, st->base);
    }
  }
  Scale(st->s, stage.decay[t]);
  if (kAdjacent) {
    Scale(st->base, stage.decay[t]);
    Scale(st->with_y, stage.decay[t]);
    Scale(st->predict, stage.decay[t]);
  }
  if (stage.event[t] != 0) {
    if (kAdjacent) {
      const float u = beta * (v - ColumnDot(st->predict, k, at.sub, dim));
      const float y = beta * (v - ColumnDot(st->with_y, k, at.sub, dim));
      Add(st->predict, k, at.sub, dim, u);
      Add(st->with_y, k, at.sub, dim, y);
      Add(st->s, k, at.sub, dim, u);
    } else {
      Add(st->s, k, at.sub, dim, beta * (v - ColumnDot(st->s, k, at.sub, dim)));
    }
    ++*events;
  }
  float o = ColumnDot(st->s, q, at.sub, dim);
  if (stage.event[t] == 0 && self_term) {
    float qk = 0.0f;
    for (int row = at.sub; row < dim; row += kSplit) qk += q[row] * k[row];
    o += beta * ColumnSum(qk) * v;
  }
  return o;
}

template <int kRows, bool kAdjacent>
__device__ void RunSequence(const Params& p, const Place& at, Stage* stage) {
  const SequenceParams& s = p.sequences[at.seq];
  States<kRows> st;
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const int row = at.sub + j * kSplit;
    const bool read = s.initial_slot >= 0 && at.live && row < p.shape.head_dim_k;
    st.s[j] = read ? p.initial_state.data[StateIndex(p, s.initial_slot, at.head, row, at.column,
                                                     p.initial_state.value_major)]
                   : 0.0f;
    st.base[j] = st.with_y[j] = st.predict[j] = st.s[j];
  }
  const bool self_term = s.budget.local == LocalTerm::kSelf;
  const int window0 = p.ws.window_offset[at.seq];
  const int windows = p.ws.window_offset[at.seq + 1] - window0;
  int64_t snapshot = s.snapshot_index;
  for (int i = 0; i < windows; ++i) {
    const Window w = GetWindow(p, at.seq, i);
    int cursor = 0, events = 0;
    for (int base = 0; base < w.length; base += kChunk) {
      const int n = min(kChunk, w.length - base);
      __syncthreads();
      StageEvents(p, w, at, window0 + i, base, n, &cursor, stage);
      StageTokens(p, at, w.begin + base, n, stage);
      __syncthreads();
      for (int t = 0; t < n; ++t) {
        const float o = Step<kRows, kAdjacent>(p, at, *stage, t, self_term, &events, &st);
        const int64_t token = w.begin + base + t;
        if (at.live && at.sub == 0) {
          StoreAs(p.o.data, p.o.dtype,
                  token * p.o.token_stride + at.head * p.o.head_stride + at.column, p.scale * o);
        }
        if (s.snapshot_every > 0 && (w.position + base + t + 1) % s.snapshot_every == 0) {
          StoreState(p, at, st.s, p.snapshots, snapshot++);
          events = 0;
        }
      }
    }
  }
  bool bad = false;
#pragma unroll
  for (int j = 0; j < kRows; ++j) bad = bad || !isfinite(st.s[j]);
  if (bad && p.nonfinite != nullptr) atomicOr(&p.nonfinite[at.seq], 1);
  if (s.final_slot >= 0) StoreState(p, at, st.s, p.final_state.data, s.final_slot);
}

template <int kRows>
__global__ void __launch_bounds__(kThreads) RecurrentKernel(Params p) {
  __shared__ Stage stage;
  const int column_blocks = (p.shape.head_dim_v + kColumns - 1) / kColumns;
  Place at;
  const int column_block = blockIdx.x % column_blocks;
  const int64_t rest = blockIdx.x / column_blocks;
  at.head = static_cast<int>(rest % p.shape.num_v_heads);
  at.seq = static_cast<int>(rest / p.shape.num_v_heads);
  if (p.ws.segment_offset[p.num_seqs] == 0) return;  // the plan found a fault
  at.pair = at.head / p.ratio;
  at.column = column_block * kColumns + threadIdx.x / kSplit;
  at.sub = threadIdx.x % kSplit;
  at.live = at.column < p.shape.head_dim_v;
  if (p.sequences[at.seq].budget.solver == Solver::kBlockAdjacent) {
    RunSequence<kRows, true>(p, at, &stage);
  } else {
    RunSequence<kRows, false>(p, at, &stage);
  }
}

}  // namespace

cudaError_t LaunchRecurrent(const Params& p, cudaStream_t stream) {
  const int64_t blocks =
      int64_t{p.num_seqs} * p.shape.num_v_heads * ((p.shape.head_dim_v + kColumns - 1) / kColumns);
  const unsigned grid = static_cast<unsigned>(blocks);
  if (p.shape.head_dim_k <= 64) {
    RecurrentKernel<8><<<grid, kThreads, 0, stream>>>(p);
  } else if (p.shape.head_dim_k <= 128) {
    RecurrentKernel<16><<<grid, kThreads, 0, stream>>>(p);
  } else {
    RecurrentKernel<32><<<grid, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace sparsegdn::cuda
