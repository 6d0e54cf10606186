// T = (I + L)^-1 of a 64 x 64 unit lower triangular matrix in shared memory, by 128 threads.
//
// Blocks of 16 on the diagonal by forward substitution in fp32; then 16 -> 32 -> 64 by
// T_10 = -T_11 (L_10 T_00), products in split TF32 (three terms, about fp32). Substitution only:
// powers of L reach 1e15 for near-collinear keys.
#ifndef SPARSEGDN_KERNELS_CUDA_FUSED_SOLVE_CUH_
#define SPARSEGDN_KERNELS_CUDA_FUSED_SOLVE_CUH_

#include "kernels/cuda/fused_shared.cuh"

namespace sparsegdn::cuda::fused {

inline constexpr int kSolveThreads = 128;
inline constexpr int kSolveRow = 68;  // floats a row of the 64 x 64 matrix
inline constexpr int kHalfRow = 36;   // and of the 32 x 32 scratch

__device__ __forceinline__ void MmaTf32(float (&d)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// x as two TF32 numbers: its upper 19 bits, and the rest (of which the product reads 19 bits).
__device__ __forceinline__ void SplitTf32(float x, uint32_t* high, uint32_t* low) {
  *high = __float_as_uint(x) & 0xffffe000u;
  *low = __float_as_uint(x - __uint_as_float(*high));
}

// A lane's place in the fragments of m16n8k8.
struct Lane {
  int group, member;  // lane / 4, lane % 4
};

// d[16, 8] = a[16, 8 steps] b[8 steps, 8], row-major in shared memory, by one warp.
template <int kSteps>
__device__ __forceinline__ void WarpProduct(Lane at, const float* a, int a_row, const float* b,
                                            int b_row, float (&d)[4]) {
  d[0] = d[1] = d[2] = d[3] = 0.0f;
  a += at.group * a_row + at.member;
  b += at.member * b_row + at.group;
#pragma unroll
  for (int k = 0; k < 8 * kSteps; k += 8) {
    uint32_t x_high[4], x_low[4], y_high[2], y_low[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      SplitTf32(a[i % 2 * 8 * a_row + k + i / 2 * 4], &x_high[i], &x_low[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) SplitTf32(b[(k + 4 * i) * b_row], &y_high[i], &y_low[i]);
    MmaTf32(d, x_low, y_high);
    MmaTf32(d, x_high, y_low);
    MmaTf32(d, x_high, y_high);
  }
}

// Stores sign * d at to[16, 8].
__device__ __forceinline__ void WarpStore(Lane at, float* to, int row, const float (&d)[4],
                                          float sign) {
  to += at.group * row + 2 * at.member;
  *reinterpret_cast<float2*>(to) = make_float2(sign * d[0], sign * d[1]);
  *reinterpret_cast<float2*>(to + 8 * row) = make_float2(sign * d[2], sign * d[3]);
}

// Inverse of the 16 x 16 diagonal blocks in place; thread t < 64 owns column t.
__device__ __forceinline__ void InvertDiagonal(float* m, int t) {
  const int block = t / 16, j = t % 16;
  float* at = m + (block * 16) * kSolveRow + block * 16;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sum = i == j ? 1.0f : 0.0f;
#pragma unroll
    for (int l = 0; l < i; l += 4) {
      const float4 a = *reinterpret_cast<const float4*>(&at[i * kSolveRow + l]);
      sum -= a.x * x[l];
      if (l + 1 < i) sum -= a.y * x[l + 1];
      if (l + 2 < i) sum -= a.z * x[l + 2];
      if (l + 3 < i) sum -= a.w * x[l + 3];
    }
    x[i] = sum;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; ++i) at[i * kSolveRow + j] = x[i];
}

// T_10 = -T_11 (L_10 T_00) for the 16 x 16 block at rows `row` and columns row - 16; one warp.
__device__ __forceinline__ void MergeBlock(Lane at, float* m, float* scratch, int row) {
  float d[4];
  float* block = m + row * kSolveRow + row - 16;
  for (int half = 0; half < 16; half += 8) {
    WarpProduct<2>(at, block, kSolveRow, m + (row - 16) * kSolveRow + row - 16 + half, kSolveRow,
                   d);
    WarpStore(at, scratch + half, 20, d, 1.0f);
  }
  __syncwarp();
  for (int half = 0; half < 16; half += 8) {
    WarpProduct<2>(at, m + row * kSolveRow + row, kSolveRow, scratch + half, 20, d);
    WarpStore(at, block + half, kSolveRow, d, -1.0f);
  }
}

// m: strictly lower L, zero elsewhere; becomes T. `adjacent` keeps only the diagonal and the first
// sub-diagonal blocks. All 128 threads of the block.
__device__ __forceinline__ void SolveInPlace(float* m, float* scratch, bool adjacent) {
  const int t = threadIdx.x, warp = t / 32;
  const Lane at{t % 32 / 4, t % 4};
  if (t < 64) InvertDiagonal(m, t);
  __syncthreads();
  const int row = warp == 0 ? 16 : (warp == 1 ? 48 : 32);
  if (warp < (adjacent ? 3 : 2)) MergeBlock(at, m, scratch + warp * 16 * 20, row);
  __syncthreads();
  if (adjacent) {
    for (int i = t; i < 32 * 32; i += kSolveThreads) {
      const int r = i / 32, c = i % 32;
      if (!(r < 16 && c >= 16)) m[(32 + r) * kSolveRow + c] = 0.0f;
    }
    __syncthreads();
    return;
  }
  float d[4];
  const int c = warp * 8;
  for (int r = 0; r < 32; r += 16) {
    WarpProduct<4>(at, m + (32 + r) * kSolveRow, kSolveRow, m + c, kSolveRow, d);
    WarpStore(at, scratch + r * kHalfRow + c, kHalfRow, d, 1.0f);
  }
  __syncthreads();
  for (int r = 0; r < 32; r += 16) {
    WarpProduct<4>(at, m + (32 + r) * kSolveRow + 32, kSolveRow, scratch + c, kHalfRow, d);
    WarpStore(at, m + (32 + r) * kSolveRow + c, kSolveRow, d, -1.0f);
  }
  __syncthreads();
}

}  // namespace sparsegdn::cuda::fused

#endif  // SPARSEGDN_KERNELS_CUDA_FUSED_SOLVE_CUH_
