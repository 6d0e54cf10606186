// T = (I + L)^-1 of a 64 x 64 unit lower triangular matrix by one warp, in registers.
//
// Blocks of 8 on the diagonal by forward substitution in fp32; then 8 -> 16 -> 32 -> 64 by
// T_10 = -T_11 (L_10 T_00), products in split TF32 (three terms, about fp32). Substitution only:
// powers of L reach 1e15 for near-collinear keys.
//
// The accumulators of m16n8k8, with k in the order 0, 2, 4, 6, 1, 3, 5, 7, are both its A operand
// and, of the transposed matrix, its B operand. So every product is written X Y^T, takes X and Y
// as accumulators and gives accumulators: nothing passes through shared memory. With N = -L,
//   P^T = T_00^T N_10^T,   T_10 = T_11 (P^T)^T   or   T_10^T = P^T T_11^T,
// which wants the upper left block of a pair transposed and the lower right one as it is.
#ifndef SPARSEGDN_KERNELS_CUDA_INVERSE_SOLVE_CUH_
#define SPARSEGDN_KERNELS_CUDA_INVERSE_SOLVE_CUH_

#include <cstdint>

#include "kernels/cuda/wgmma.cuh"

namespace sparsegdn::cuda::fused {

// Of a 16 x 16 block a lane holds rows (g, g + 8), columns (2 m, 2 m + 1) in x[0..3] and columns
// 8 + (2 m, 2 m + 1) in x[4..7], where g = lane / 4 and m = lane % 4.
struct Block {
  float x[8];
};
// The same as two TF32 numbers: the upper 19 bits, and the rest (of which the product reads 19).
struct SplitBlock {
  uint32_t high[8], low[8];
};

// K K^T in shared memory: its blocks (r, c), c <= r, each 16 x 16 floats, pieces of 8 columns
// swapped in every other pair of rows so that fragments are read without bank conflicts.
inline constexpr int kBlockFloats = 256;
inline constexpr int kLowerBlocks = 10;
__device__ __forceinline__ int BlockAt(int r, int c) {
  return (r * (r + 1) / 2 + c) * kBlockFloats;
}
__device__ __forceinline__ int CellAt(int row, int column) {
  return row * 16 + (column ^ ((row & 2) << 2));
}

// The diagonal blocks of 8, as N and then as T^T; the padding keeps four of them in different
// banks.
inline constexpr int kLeafFloats = 72;
inline constexpr int kLeaves = 8;

__device__ __forceinline__ void SplitTf32(float x, uint32_t* high, uint32_t* low) {
  *high = __float_as_uint(x) & 0xffffe000u;
  *low = __float_as_uint(x - __uint_as_float(*high));
}
__device__ __forceinline__ SplitBlock Split(const Block& b) {
  SplitBlock s;
#pragma unroll
  for (int i = 0; i < 8; ++i) SplitTf32(b.x[i], &s.high[i], &s.low[i]);
  return s;
}

// d += x y^T over columns [8 s, 8 s + 8) of x and y, for rows [8 h, 8 h + 8) of y.
__device__ __forceinline__ void MultiplyStep(const SplitBlock& x, const SplitBlock& y, int h, int s,
                                             Block* d) {
  const int a = 4 * s, b = 4 * s + 2 * h;
  float* to = d->x + 4 * h;
  MmaTf32(to, x.low[a], x.low[a + 2], x.low[a + 1], x.low[a + 3], y.high[b], y.high[b + 1]);
  MmaTf32(to, x.high[a], x.high[a + 2], x.high[a + 1], x.high[a + 3], y.low[b], y.low[b + 1]);
  MmaTf32(to, x.high[a], x.high[a + 2], x.high[a + 1], x.high[a + 3], y.high[b], y.high[b + 1]);
}
__device__ __forceinline__ void Multiply(const SplitBlock& x, const SplitBlock& y, Block* d) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int h = 0; h < 2; ++h) MultiplyStep(x, y, h, s, d);
  }
}
__device__ __forceinline__ Block Product(const SplitBlock& x, const SplitBlock& y) {
  Block d{};
  Multiply(x, y, &d);
  return d;
}

// What a warp solves: K K^T, and what turns it into N.
struct Problem {
  const float* products;  // [kLowerBlocks] blocks
  float* leaves;          // [kLeaves][kLeafFloats]
  const float* factor;    // [64] -beta
  const float2* gate;     // high + low, by row of the pack; only where not kScaled
  const int* row;         // [64], past the last event none
};

// A block by e^{G_i - G_l}: rows i = own and own + 8, columns l = other + {0, 1, 8, 9}.
template <typename = void>
__device__ __noinline__ Block ApplyGates(const float2* gate, const int* row, int own, int other,
                                         Block b) {
  const auto at = [&](int i) {
    return row[i] == 0x7fffffff ? make_float2(-1e30f, 0.0f) : gate[row[i]];
  };
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 to = at(own + 8 * (i / 2 % 2)), from = at(other + i % 2 + 8 * (i / 4));
    b.x[i] *= Decay(to.x, to.y, from.x, from.y);
  }
  return b;
}

// Block (r, c) of N.
template <bool kScaled>
__device__ __forceinline__ Block LoadBlock(const Problem& q, int r, int c) {
  const int g = threadIdx.x % 32 / 4, m = threadIdx.x % 4;
  const float* from = q.products + BlockAt(r, c);
  Block b;
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // columns i / 2, rows i % 2
    const int row = g + 8 * (i % 2), column = 2 * m + 8 * (i / 2);
    const float2 x = *reinterpret_cast<const float2*>(from + CellAt(row, column));
    const float factor = q.factor[16 * r + row];
    b.x[2 * i] = factor * x.x;
    b.x[2 * i + 1] = factor * x.y;
  }
  if constexpr (!kScaled) b = ApplyGates(q.gate, q.row, 16 * r + g, 16 * c + 2 * m, b);
  return b;
}

// Inverts the diagonal blocks of 8: a lane takes two columns of T, which become rows of T^T.
__device__ __forceinline__ void InvertLeaves(float* leaves) {
  const int lane = threadIdx.x % 32, j = lane % 8;
  float* const at[2] = {leaves + lane / 8 * kLeafFloats, leaves + (lane / 8 + 4) * kLeafFloats};
  float x[2][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float sum = i == j ? 1.0f : 0.0f;
#pragma unroll
      for (int l = 0; l < i; l += 4) {
        const float4 a = *reinterpret_cast<const float4*>(at[n] + i * 8 + l);
        sum += a.x * x[n][l];
        if (l + 1 < i) sum += a.y * x[n][l + 1];
        if (l + 2 < i) sum += a.z * x[n][l + 2];
        if (l + 3 < i) sum += a.w * x[n][l + 3];
      }
      x[n][i] = sum;
    }
  }
  __syncwarp();
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float4* to = reinterpret_cast<float4*>(at[n] + j * 8);
    to[0] = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
    to[1] = make_float4(x[n][4], x[n][5], x[n][6], x[n][7]);
  }
  __syncwarp();
}

// A diagonal block of T: as it is, and transposed.
struct Diagonal {
  Block straight, transposed;
};

// Diagonal block `d` of 16 from its two leaves and the block of N between them (rows 8 to 15,
// columns 0 to 7: `n` as x[2], x[3]).
__device__ __forceinline__ Diagonal JoinLeaves(const float* leaves, int d, const float (&n)[2]) {
  const int g = threadIdx.x % 32 / 4, m = threadIdx.x % 4;
  const float* upper = leaves + 2 * d * kLeafFloats;
  const float* lower = upper + kLeafFloats;
  Diagonal t{};
  const float2 first = *reinterpret_cast<const float2*>(upper + g * 8 + 2 * m);
  const float2 second = *reinterpret_cast<const float2*>(lower + g * 8 + 2 * m);
  t.transposed.x[0] = first.x;
  t.transposed.x[1] = first.y;
  t.transposed.x[6] = second.x;
  t.transposed.x[7] = second.y;
  t.straight.x[0] = upper[2 * m * 8 + g];
  t.straight.x[1] = upper[(2 * m + 1) * 8 + g];
  t.straight.x[6] = lower[2 * m * 8 + g];
  t.straight.x[7] = lower[(2 * m + 1) * 8 + g];
  Block between{};
  between.x[2] = n[0];
  between.x[3] = n[1];
  Block p{};
  MultiplyStep(Split(t.transposed), Split(between), 1, 0, &p);  // P^T: rows 0..7, columns 8..15
  const SplitBlock pt = Split(p), own = Split(t.straight);
  MultiplyStep(own, pt, 0, 1, &t.straight);    // rows 8..15, columns 0..7
  MultiplyStep(pt, own, 1, 1, &t.transposed);  // rows 0..7, columns 8..15
  return t;
}

// The diagonal of N: its blocks of 8 to q.leaves, and what stands between two of them.
template <bool kScaled>
__device__ __forceinline__ void LoadLeaves(const Problem& q, float (&between)[4][2]) {
  const int g = threadIdx.x % 32 / 4, m = threadIdx.x % 4;
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    const Block b = LoadBlock<kScaled>(q, d, d);
    float* leaf = q.leaves + 2 * d * kLeafFloats + g * 8 + 2 * m;
    *reinterpret_cast<float2*>(leaf) = make_float2(b.x[0], b.x[1]);
    *reinterpret_cast<float2*>(leaf + kLeafFloats) = make_float2(b.x[6], b.x[7]);
    between[d][0] = b.x[2];
    between[d][1] = b.x[3];
  }
  __syncwarp();
}

// The lower left 32 x 32 of T, a column of blocks at a time. t0, t10 and t1: T_00^T.
template <bool kScaled, typename Store>
__device__ __forceinline__ void SolveCorner(const Problem& q, const SplitBlock& t0,
                                            const Block& t10, const Block& t1, const Block& t2,
                                            const Block& t3, const Block& t32, const Store& store) {
#pragma unroll
  for (int column = 1; column >= 0; --column) {
    Block p[2];  // P^T: rows of this column, columns of the last 32 rows
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const SplitBlock right = Split(LoadBlock<kScaled>(q, 2 + j, 1));
      if (column == 1) {
        p[j] = Product(Split(t1), right);
      } else {
        p[j] = Product(t0, Split(LoadBlock<kScaled>(q, 2 + j, 0)));
        Multiply(Split(t10), right, &p[j]);
      }
    }
    const SplitBlock upper = Split(p[0]);
    store(2, column, Product(Split(t2), upper), false);
    Block low = Product(Split(t3), Split(p[1]));
    Multiply(Split(t32), upper, &low);
    store(3, column, low, false);
  }
}

// T of a problem, block by block: store(r, c, block, transposed) for every block with c <= r.
// No store comes before the leaves have been read. `adjacent` keeps only the diagonal and the first
// sub-diagonal blocks; the others come as zeros. All lanes of a warp.
template <bool kScaled, typename Store>
__device__ __forceinline__ void Solve(const Problem& q, bool adjacent, const Store& store) {
  float between[4][2];
  LoadLeaves<kScaled>(q, between);
  InvertLeaves(q.leaves);

  const Diagonal d0 = JoinLeaves(q.leaves, 0, between[0]);
  const Diagonal d1 = JoinLeaves(q.leaves, 1, between[1]);
  const Diagonal d2 = JoinLeaves(q.leaves, 2, between[2]);
  const Diagonal d3 = JoinLeaves(q.leaves, 3, between[3]);
  __syncwarp();  // the leaves are read
  store(0, 0, d0.transposed, true);
  store(1, 1, d1.straight, false);
  store(2, 2, d2.straight, false);
  store(3, 3, d3.straight, false);

  const SplitBlock t0 = Split(d0.transposed);
  const Block p10 = Product(t0, Split(LoadBlock<kScaled>(q, 1, 0)));
  const Block t10 = Product(Split(p10), Split(d1.straight));  // transposed
  store(1, 0, t10, true);
  const Block p32 = Product(Split(d2.transposed), Split(LoadBlock<kScaled>(q, 3, 2)));
  const Block t32 = Product(Split(d3.straight), Split(p32));
  store(3, 2, t32, false);
  if (adjacent) {
    const Block p21 = Product(Split(d1.transposed), Split(LoadBlock<kScaled>(q, 2, 1)));
    store(2, 1, Product(Split(d2.straight), Split(p21)), false);
    const Block none{};
    store(2, 0, none, false);
    store(3, 0, none, false);
    store(3, 1, none, false);
    return;
  }
  SolveCorner<kScaled>(q, t0, t10, d1.transposed, d2.straight, d3.straight, t32, store);
}

}  // namespace sparsegdn::cuda::fused

#endif  // SPARSEGDN_KERNELS_CUDA_INVERSE_SOLVE_CUH_
