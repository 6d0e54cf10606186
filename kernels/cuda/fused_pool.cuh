// States between the pool in device memory and the registers of the state side.
//
// A thread holds s[b][4 j + 2 half + e], rows 64 b + row + 8 half and columns 8 j + column + e.
#ifndef SPARSEGDN_KERNELS_CUDA_FUSED_POOL_CUH_
#define SPARSEGDN_KERNELS_CUDA_FUSED_POOL_CUH_

#include "kernels/cuda/fused_shared.cuh"

namespace sparsegdn::cuda::fused {

// The thread's first cell. The offset is hidden from the optimiser, which would otherwise keep the
// 64 addresses of ReadState in registers until WriteState.
__device__ __forceinline__ float* StateCell(const Params& p, const Job& job, float* data,
                                            int64_t slot, bool value_major, int row, int column) {
  int offset = value_major ? column * kDim + row : row * kDim + column;
  asm volatile("" : "+r"(offset));
  return data + (slot * p.shape.num_v_heads + job.head) * int64_t{kDim * kDim} + offset;
}
// Offset of s[b][i] from there; `across` and `down` are the strides of Dv and Dk.
__device__ constexpr int CellOffset(int b, int i, int across, int down) {
  return (64 * b + 8 * (i / 2 % 2)) * down + (8 * (i / 4) + i % 2) * across;
}
template <int kAcross, int kDown>
__device__ __forceinline__ void ReadCells(const float* at, float (&s)[2][32]) {
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll
    for (int i = 0; i < 32; ++i) s[b][i] = at[CellOffset(b, i, kAcross, kDown)];
  }
}

// The job's starting state: the sequence's initial one or zeros.
__device__ __forceinline__ void ReadState(const Params& p, const Job& job, int row, int column,
                                          float (&s)[2][32]) {
  const int32_t slot = p.sequences[job.seq].initial_slot;
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll
    for (int i = 0; i < 32; ++i) s[b][i] = 0.0f;
  }
  if (job.from_start == 0 || slot < 0) return;
  const bool value_major = p.initial_state.value_major;
  const float* at = StateCell(p, job, p.initial_state.data, slot, value_major, row, column);
  if (value_major) {
    ReadCells<kDim, 1>(at, s);
  } else {
    ReadCells<1, kDim>(at, s);
  }
}

// To entry `slot` of `data`, in the layout of the final states.
__device__ __forceinline__ void WriteState(const Params& p, const Job& job, int row, int column,
                                           float* data, int64_t slot, const float (&s)[2][32]) {
  const bool value_major = p.final_state.value_major;
  float* at = StateCell(p, job, data, slot, value_major, row, column);
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      if (value_major) {
        at[CellOffset(b, i, kDim, 1)] = s[b][i];
        at[CellOffset(b, i + 1, kDim, 1)] = s[b][i + 1];
      } else {
        *reinterpret_cast<float2*>(at + CellOffset(b, i, 1, kDim)) =
            make_float2(s[b][i], s[b][i + 1]);
      }
    }
  }
}

}  // namespace sparsegdn::cuda::fused

#endif  // SPARSEGDN_KERNELS_CUDA_FUSED_POOL_CUH_
