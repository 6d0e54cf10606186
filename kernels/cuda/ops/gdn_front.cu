// The causal convolution (kernel 4) with SiLU, the gates of the GDN core, and the conv state.
//
//   y[t, c] = silu(sum_j taps[j][c] x[t - 3 + j][c]),  beta = sigmoid(b),
//   log_gate = -exp(a_log) softplus(a + dt_bias)
// One thread walks kRun tokens of kN channels with the last three raw rows in registers, so that x
// is read (kRun + 3) / kRun times and y written once: 4 C bytes a token, nothing else. The gates
// are a block row of their own in the same launch. The state is moved by a second, tiny launch,
// because the first tokens of every sequence still read the old one.
#include <cmath>

#include "kernels/cuda/ops/ops_common.cuh"

namespace sparsegdn::cuda_ops {
namespace {

constexpr int kThreads = 128;
constexpr int kRun = 32;  // tokens a thread
constexpr int kTaps = 4;

__device__ __forceinline__ float Softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

__device__ void Gates(const GdnFrontArgs& a, int64_t begin, int64_t end) {
  const int64_t items = (end - begin) * a.num_v_heads;
  for (int64_t i = threadIdx.x; i < items; i += kThreads) {
    const int64_t row = begin + i / a.num_v_heads;
    const int head = static_cast<int>(i % a.num_v_heads);
    const float x = __bfloat162float(RowOf(a.a, row)[head]) + a.dt_bias[head];
    const float b = __bfloat162float(RowOf(a.b, row)[head]);
    const int64_t at = row * a.num_v_heads + head;
    a.log_gate[at] = -expf(a.a_log[head]) * Softplus(x);
    a.beta[at] = 1.0f / (1.0f + expf(-b));
  }
}

// History at a row inside a sequence: rows before the sequence come from the state.
template <int kN>
__device__ __forceinline__ void StartHistory(const GdnFrontArgs& a, int seq, int64_t row,
                                             int64_t channel, float (&history)[kTaps - 1][kN]) {
  const int64_t first = a.pack.cu_seqlens[seq];
  const bf16* state =
      static_cast<const bf16*>(a.conv_state) + int64_t{a.pack.slots[seq]} * a.channels * kTaps;
#pragma unroll
  for (int j = 0; j < kTaps - 1; ++j) {
    const int64_t from = row - (kTaps - 1) + j;
    if (from >= first) {
      Load<kN>(RowOf(a.x, from) + channel, history[j]);
      continue;
    }
    // The state's last column is the row just before the sequence.
    const int column = static_cast<int>(kTaps - (first - from));
#pragma unroll
    for (int c = 0; c < kN; ++c) {
      history[j][c] = __bfloat162float(state[(channel + c) * kTaps + column]);
    }
  }
}

// y of one row; the row becomes the newest of the history.
template <int kN>
__device__ __forceinline__ void Step(const float (&taps)[kTaps][kN],
                                     float (&history)[kTaps - 1][kN], const float (&x)[kN],
                                     float (&y)[kN]) {
#pragma unroll
  for (int c = 0; c < kN; ++c) {
    const float sum = taps[0][c] * history[0][c] + taps[1][c] * history[1][c] +
                      taps[2][c] * history[2][c] + taps[3][c] * x[c];
    y[c] = Silu(sum);
    history[0][c] = history[1][c];
    history[1][c] = history[2][c];
    history[2][c] = x[c];
  }
}

// Rows [row, end) of one sequence, kBatch of them in flight at a time.
template <int kN>
__device__ __forceinline__ void ConvolveRows(const GdnFrontArgs& a, int64_t row, int64_t end,
                                             int64_t channel, const float (&taps)[kTaps][kN],
                                             float (&history)[kTaps - 1][kN]) {
  constexpr int kBatch = 4;
  float x[kBatch][kN], y[kN];
  for (; row + kBatch <= end; row += kBatch) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) Load<kN>(RowOf(a.x, row + i) + channel, x[i]);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      Step<kN>(taps, history, x[i], y);
      Store<kN>(RowOf(a.y, row + i) + channel, y);
    }
  }
  for (; row < end; ++row) {
    Load<kN>(RowOf(a.x, row) + channel, x[0]);
    Step<kN>(taps, history, x[0], y);
    Store<kN>(RowOf(a.y, row) + channel, y);
  }
}

template <int kN>
__device__ void Convolve(const GdnFrontArgs& a, int64_t begin, int64_t end, int64_t channel) {
  float taps[kTaps][kN], history[kTaps - 1][kN];
#pragma unroll
  for (int j = 0; j < kTaps; ++j) LoadFloats<kN>(a.taps + j * a.channels + channel, taps[j]);
  int seq = SequenceOf(a.pack, begin);
  for (int64_t row = begin; row < end; ++seq) {
    const int64_t next = a.pack.cu_seqlens[seq + 1];
    const int64_t stop = next < end ? next : end;
    if (stop <= row) continue;  // an empty sequence
    StartHistory<kN>(a, seq, row, channel, history);
    ConvolveRows<kN>(a, row, stop, channel, taps, history);
    row = stop;
  }
}

template <int kN>
__global__ void __launch_bounds__(kThreads) GdnFrontKernel(GdnFrontArgs a) {
  const int64_t begin = int64_t{blockIdx.x} * kRun;
  const int64_t rest = a.pack.num_tokens - begin;
  const int64_t end = begin + (rest < kRun ? rest : kRun);
  if (blockIdx.y == gridDim.y - 1) {
    Gates(a, begin, end);
    return;
  }
  const int64_t channel = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kN;
  if (channel < a.channels) Convolve<kN>(a, begin, end, channel);
}

// The state after `rows` rows from `first` on: the last four, preceded by the old state.
__device__ void ShiftState(ConstRows x, int64_t first, int64_t rows, int64_t channel,
                           const bf16* state, bf16* out) {
  bf16 column[kTaps];
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    const int64_t from = rows - kTaps + j;
    column[j] = from < 0 ? state[channel * kTaps + rows + j] : RowOf(x, first + from)[channel];
  }
#pragma unroll
  for (int j = 0; j < kTaps; ++j) out[channel * kTaps + j] = column[j];
}

__global__ void __launch_bounds__(kThreads) MoveStatesKernel(GdnFrontArgs a) {
  const int64_t channel = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (channel >= a.channels) return;
  for (int seq = blockIdx.y; seq < a.pack.num_seqs; seq += gridDim.y) {
    const int64_t first = a.pack.cu_seqlens[seq];
    bf16* state =
        static_cast<bf16*>(a.conv_state) + int64_t{a.pack.slots[seq]} * a.channels * kTaps;
    ShiftState(a.x, first, a.pack.cu_seqlens[seq + 1] - first, channel, state, state);
  }
}

__global__ void __launch_bounds__(kThreads) ConvStateAtKernel(ConvStateAtArgs a) {
  const int64_t channel = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (channel >= a.channels) return;
  ShiftState(a.x, 0, a.rows, channel, static_cast<const bf16*>(a.state), static_cast<bf16*>(a.out));
}

}  // namespace

cudaError_t LaunchGdnFront(const GdnFrontArgs& a, cudaStream_t stream) {
  if (a.pack.num_tokens == 0 || a.pack.num_seqs == 0) return cudaSuccess;
  const unsigned runs = Blocks(a.pack.num_tokens, kRun);
  if (Aligned(a.x) && Aligned(ConstRows(a.y)) && Aligned(a.taps, 0) && a.channels % kVector == 0) {
    const dim3 grid(runs, Blocks(a.channels, kThreads * kVector) + 1);
    GdnFrontKernel<kVector><<<grid, kThreads, 0, stream>>>(a);
  } else {
    const dim3 grid(runs, Blocks(a.channels, kThreads) + 1);
    GdnFrontKernel<1><<<grid, kThreads, 0, stream>>>(a);
  }
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  const dim3 grid(Blocks(a.channels, kThreads),
                  static_cast<unsigned>(a.pack.num_seqs < 1024 ? a.pack.num_seqs : 1024));
  MoveStatesKernel<<<grid, kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

cudaError_t LaunchConvStateAt(const ConvStateAtArgs& a, cudaStream_t stream) {
  if (a.channels == 0) return cudaSuccess;
  ConvStateAtKernel<<<Blocks(a.channels, kThreads), kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace sparsegdn::cuda_ops
