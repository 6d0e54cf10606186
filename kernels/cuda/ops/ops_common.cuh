// Device helpers of the operations: BF16 pieces, sums over a block, the pack's rows.
#ifndef SPARSEGDN_KERNELS_CUDA_OPS_OPS_COMMON_CUH_
#define SPARSEGDN_KERNELS_CUDA_OPS_OPS_COMMON_CUH_

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/ops/launch.h"

namespace sparsegdn::cuda_ops {

using bf16 = __nv_bfloat16;

inline constexpr int kVector = 8;  // BF16 elements of a 16-byte access

__device__ __forceinline__ const bf16* RowOf(const ConstRows& x, int64_t row) {
  return static_cast<const bf16*>(x.data) + row * x.stride;
}
__device__ __forceinline__ bf16* RowOf(const Rows& x, int64_t row) {
  return static_cast<bf16*>(x.data) + row * x.stride;
}

// kN consecutive elements widened to FP32; kN is 8 (one aligned 16-byte access) or 1.
template <int kN>
__device__ __forceinline__ void Load(const bf16* from, float (&x)[kN]) {
  if constexpr (kN == kVector) {
    const uint4 raw = *reinterpret_cast<const uint4*>(from);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  } else {
    x[0] = __bfloat162float(from[0]);
  }
}

__device__ __forceinline__ uint32_t PackPair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <int kN>
__device__ __forceinline__ void Store(bf16* to, const float (&x)[kN]) {
  if constexpr (kN == kVector) {
    *reinterpret_cast<uint4*>(to) = make_uint4(PackPair(x[0], x[1]), PackPair(x[2], x[3]),
                                               PackPair(x[4], x[5]), PackPair(x[6], x[7]));
  } else {
    to[0] = __float2bfloat16_rn(x[0]);
  }
}

template <int kN>
__device__ __forceinline__ void LoadFloats(const float* from, float (&x)[kN]) {
  if constexpr (kN == kVector) {
    const float4 a = reinterpret_cast<const float4*>(from)[0];
    const float4 b = reinterpret_cast<const float4*>(from)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  } else {
    x[0] = from[0];
  }
}

// Within 2^-20 for the activations, which are rounded to 8 bits afterwards. The quotient of an
// argument whose exponential overflows is 0.
__device__ __forceinline__ float Sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float Silu(float x) { return x * Sigmoid(x); }

__device__ __forceinline__ float WarpSum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
__device__ __forceinline__ float WarpMax(float x) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

// Sum over the block, for every thread. `shared` holds one float a warp and is free afterwards.
__device__ __forceinline__ float BlockSum(float x, float* shared) {
  x = WarpSum(x);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0.0f;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) total += shared[w];
  __syncthreads();
  return total;
}

// The sequence that owns a row of the pack: the last one that starts at or before it.
__device__ __forceinline__ int SequenceOf(const PackArgs& pack, int64_t row) {
  int low = 0, high = pack.num_seqs;
  while (high - low > 1) {
    const int mid = (low + high) / 2;
    if (pack.cu_seqlens[mid] <= row) {
      low = mid;
    } else {
      high = mid;
    }
  }
  return low;
}
__device__ __forceinline__ int64_t PositionOf(const PackArgs& pack, int64_t row) {
  const int s = SequenceOf(pack, row);
  return pack.first_positions[s] + (row - pack.cu_seqlens[s]);
}

// First element of the cache row of position `p` given a sequence's block table:
// [key, value][num_kv_heads][head_dim].
__device__ __forceinline__ bf16* CacheRow(const KvCacheRef& cache, const int32_t* table,
                                          int64_t row_elements, int64_t p) {
  const int64_t block = table[p / cache.block_tokens];
  return static_cast<bf16*>(cache.data) +
         (block * cache.block_tokens + p % cache.block_tokens) * row_elements;
}

// Whether every row of a matrix starts on a 16-byte boundary.
inline bool Aligned(const void* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % kVector == 0;
}
inline bool Aligned(const ConstRows& x) { return Aligned(x.data, x.stride); }

inline unsigned Blocks(int64_t items, int64_t each) {
  return static_cast<unsigned>((items + each - 1) / each);
}

}  // namespace sparsegdn::cuda_ops

#endif  // SPARSEGDN_KERNELS_CUDA_OPS_OPS_COMMON_CUH_
