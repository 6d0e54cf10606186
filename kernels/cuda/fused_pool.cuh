// States between the pool in device memory and the registers of the state side.
//
// A thread holds s[i], Dv = dv + 8 (i / 2 % 2) and Dk = dk + 64 (i / 32) + 8 (i % 32 / 4) + i % 2.
#ifndef SPARSEGDN_KERNELS_CUDA_FUSED_POOL_CUH_
#define SPARSEGDN_KERNELS_CUDA_FUSED_POOL_CUH_

#include "kernels/cuda/fused_shared.cuh"

namespace sparsegdn::cuda::fused {

// The thread's first cell. The offset is hidden from the optimiser, which would otherwise keep the
// 64 addresses of ReadState in registers until WriteState.
__device__ __forceinline__ float* StateCell(const Params& p, const Job& job, float* data,
                                            int64_t slot, bool value_major, int dv, int dk) {
  int offset = value_major ? dv * kDim + dk : dk * kDim + dv;
  asm volatile("" : "+r"(offset));
  return data + (slot * p.shape.num_v_heads + job.head) * int64_t{kDim * kDim} + offset;
}
// Offset of s[i] from there; `across` and `down` are the strides of Dk and Dv.
__device__ constexpr int CellOffset(int i, int across, int down) {
  return 8 * (i / 2 % 2) * down + (64 * (i / 32) + 8 * (i % 32 / 4) + i % 2) * across;
}
template <int kAcross, int kDown>
__device__ __forceinline__ void ReadCells(const float* at, float (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) s[i] = at[CellOffset(i, kAcross, kDown)];
}

// The job's starting state: the sequence's initial one or zeros.
__device__ __forceinline__ void ReadState(const Params& p, const Job& job, int dv, int dk,
                                          float (&s)[64]) {
  const int32_t slot = p.sequences[job.seq].initial_slot;
#pragma unroll
  for (int i = 0; i < 64; ++i) s[i] = 0.0f;
  if (job.from_start == 0 || slot < 0) return;
  const bool value_major = p.initial_state.value_major;
  const float* at = StateCell(p, job, p.initial_state.data, slot, value_major, dv, dk);
  if (value_major) {
    ReadCells<1, kDim>(at, s);
  } else {
    ReadCells<kDim, 1>(at, s);
  }
}

// To entry `slot` of `data`, in the layout of the final states.
__device__ __forceinline__ void WriteState(const Params& p, const Job& job, int dv, int dk,
                                           float* data, int64_t slot, const float (&s)[64]) {
  const bool value_major = p.final_state.value_major;
  float* at = StateCell(p, job, data, slot, value_major, dv, dk);
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    if (value_major) {
      *reinterpret_cast<float2*>(at + CellOffset(i, 1, kDim)) = make_float2(s[i], s[i + 1]);
    } else {
      at[CellOffset(i, kDim, 1)] = s[i];
      at[CellOffset(i + 1, kDim, 1)] = s[i + 1];
    }
  }
}

}  // namespace sparsegdn::cuda::fused

#endif  // SPARSEGDN_KERNELS_CUDA_FUSED_POOL_CUH_
