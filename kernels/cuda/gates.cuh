// Gate sums of one window of 4 value heads: log_gate becomes running fp64 sums, kept as a pair of
// floats in log2 units (48 bits), and beta is transposed. 12 bytes a token and value head.
#ifndef SPARSEGDN_KERNELS_CUDA_GATES_CUH_
#define SPARSEGDN_KERNELS_CUDA_GATES_CUH_

#include "kernels/common/selection_math.h"
#include "kernels/cuda/device_common.cuh"
#include "kernels/cuda/plan.cuh"

namespace sparsegdn::cuda {

inline constexpr int kGateThreads = 512;
inline constexpr int kGateHeads = 4;  // of a gate block
inline constexpr int kGateEach = kWindow / kGateThreads;
inline constexpr int kGateWarps = kGateThreads / 32;
inline constexpr int kGateRun = 16;              // tokens in a row that a lane sums
inline constexpr int kGateWarp = 32 * kGateRun;  // and a warp
inline constexpr double kLog2E = 1.4426950408889634;
static_assert(kGateHeads * kWindow / kGateWarp == kGateWarps);

// Of a warp: gates, then sums, each with padding after a lane's tokens against bank conflicts.
union GateSlice {
  float gate[kGateWarp + kGateWarp / kGateRun * 4];
  float2 sum[kGateWarp + kGateWarp / kGateRun];
};
struct GateShared {
  GateSlice slice[kGateWarps];
  double total[kGateWarps];
  WindowPlace place;
  SequenceParams sequence;
};

// x as high + low, to 48 bits.
__device__ __forceinline__ float2 SplitDouble(double x) {
  const float high = static_cast<float>(x);
  return make_float2(high, static_cast<float>(x - static_cast<double>(high)));
}

// Four heads of one token, in one access where the layout allows it.
template <bool kVector>
__device__ __forceinline__ float4 LoadHeads(const ConstTensorRef& x, int64_t token, int head,
                                            int heads) {
  if constexpr (kVector) {
    return *reinterpret_cast<const float4*>(static_cast<const float*>(x.data) +
                                            token * x.token_stride + head);
  } else {
    float f[kGateHeads];
#pragma unroll
    for (int i = 0; i < kGateHeads; ++i) {
      f[i] = head + i < heads ? LoadElement(x, token, head + i, 0) : 0.0f;
    }
    return make_float4(f[0], f[1], f[2], f[3]);
  }
}

// The window's gates to shared memory, its beta to [Hv, num_tokens].
template <bool kVector>
__device__ __forceinline__ void StageGates(const Params& p, const Window& w, int head0,
                                           GateShared* sm) {
  float4 gate[kGateEach], beta[kGateEach];
#pragma unroll
  for (int i = 0; i < kGateEach; ++i) {
    const int t = threadIdx.x + i * kGateThreads;
    gate[i] = beta[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (t >= w.length) continue;
    gate[i] = LoadHeads<kVector>(p.log_gate, w.begin + t, head0, p.shape.num_v_heads);
    beta[i] = LoadHeads<kVector>(p.beta, w.begin + t, head0, p.shape.num_v_heads);
  }
  bool bad = false;
#pragma unroll
  for (int i = 0; i < kGateEach; ++i) {
    const int t = threadIdx.x + i * kGateThreads;
    const float g[kGateHeads] = {gate[i].x, gate[i].y, gate[i].z, gate[i].w};
    const float b[kGateHeads] = {beta[i].x, beta[i].y, beta[i].z, beta[i].w};
#pragma unroll
    for (int h = 0; h < kGateHeads; ++h) {
      const int in_slice = t % kGateWarp;
      sm->slice[h * 4 + t / kGateWarp].gate[in_slice + in_slice / kGateRun * 4] =
          selection::ClampGate(g[h]);
      if (t < w.length && head0 + h < p.shape.num_v_heads) {
        p.ws.beta[(head0 + h) * p.num_tokens + w.begin + t] = b[h];
        bad = bad || !(b[h] >= 0.0f && b[h] <= 1.0f);  // NaN too
      }
    }
  }
  if (bad && p.status != nullptr) {
    WaitForPrevious();  // the plan sets the word
    atomicOr(p.status, kStatusBetaOutOfRange);
  }
}

// A warp sums a quarter of one head's window, a lane 16 tokens in a row.
__device__ __forceinline__ void SumGates(const Params& p, const Window& w, int head0,
                                         GateShared* sm) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int local = warp / 4, quarter = warp % 4;
  GateSlice& slice = sm->slice[warp];
  float gate[kGateRun];
#pragma unroll
  for (int i = 0; i < kGateRun; i += 4) {
    const float4 x = *reinterpret_cast<const float4*>(&slice.gate[lane * (kGateRun + 4) + i]);
    gate[i] = x.x;
    gate[i + 1] = x.y;
    gate[i + 2] = x.z;
    gate[i + 3] = x.w;
  }
  double own = 0.0;
#pragma unroll
  for (int i = 0; i < kGateRun; ++i) own += static_cast<double>(gate[i]);
  double end = own;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const double y = __shfl_up_sync(0xffffffffu, end, d);
    if (lane >= d) end += y;
  }
  if (lane == 31) sm->total[warp] = end;
  double sum = __shfl_up_sync(0xffffffffu, end, 1);
  if (lane == 0) sum = 0.0;
  __syncthreads();
  for (int i = 0; i < quarter; ++i) sum += sm->total[local * 4 + i];
#pragma unroll
  for (int i = 0; i < kGateRun; ++i) {
    sum += static_cast<double>(gate[i]);
    slice.sum[lane * (kGateRun + 1) + i] = SplitDouble(sum * kLog2E);
  }
  __syncwarp();
  if (head0 + local >= p.shape.num_v_heads) return;
  float2* out = p.ws.gate_sum + (head0 + local) * p.num_tokens + w.begin;
#pragma unroll
  for (int i = 0; i < kGateRun; ++i) {
    const int in_slice = 32 * i + lane, t = quarter * kGateWarp + in_slice;
    if (t < w.length) out[t] = slice.sum[in_slice + in_slice / kGateRun];
  }
}

__device__ __forceinline__ bool IsVector(const ConstTensorRef& x) {
  return x.dtype == DType::kF32 && x.head_stride == 1 && x.token_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

template <typename = void>
__device__ __noinline__ void StageGatesAnyhow(const Params& p, Window w, int head0,
                                              GateShared* sm) {
  StageGates<false>(p, w, head0, sm);
}

// All kGateThreads threads; heads [head0, head0 + kGateHeads).
__device__ __forceinline__ void GateBlock(const Params& p, const Window& w, int head0,
                                          GateShared* sm) {
  if (head0 + kGateHeads <= p.shape.num_v_heads && IsVector(p.log_gate) && IsVector(p.beta)) {
    StageGates<true>(p, w, head0, sm);
  } else {
    StageGatesAnyhow(p, w, head0, sm);
  }
  __syncthreads();
  SumGates(p, w, head0, sm);
}

}  // namespace sparsegdn::cuda

#endif  // SPARSEGDN_KERNELS_CUDA_GATES_CUH_
