// Device helpers shared by the kernels: element access, windows, warp sums.
#ifndef SPARSEGDN_KERNELS_CUDA_DEVICE_COMMON_CUH_
#define SPARSEGDN_KERNELS_CUDA_DEVICE_COMMON_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/params.h"

namespace sparsegdn::cuda {

__device__ __forceinline__ float LoadAs(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kF32) return static_cast<const float*>(data)[index];
  if (dtype == DType::kBF16) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
  }
  return __half2float(static_cast<const __half*>(data)[index]);
}

__device__ __forceinline__ void StoreAs(void* data, DType dtype, int64_t index, float x) {
  if (dtype == DType::kF32) {
    static_cast<float*>(data)[index] = x;
  } else if (dtype == DType::kBF16) {
    static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(x);
  } else {
    static_cast<__half*>(data)[index] = __float2half_rn(x);
  }
}

__device__ __forceinline__ float LoadElement(const ConstTensorRef& t, int64_t token, int head,
                                             int i) {
  return LoadAs(t.data, t.dtype, token * t.token_stride + head * t.head_stride + i);
}

// Index of the sequence that owns `item`, from exclusive prefix offsets [num_seqs + 1].
__device__ __forceinline__ int FindOwner(const int32_t* offset, int num_seqs, int item) {
  int low = 0, high = num_seqs;  // offset[low] <= item < offset[high]
  while (high - low > 1) {
    const int mid = (low + high) / 2;
    if (offset[mid] <= item) {
      low = mid;
    } else {
      high = mid;
    }
  }
  return low;
}

// One selection window of one sequence.
struct Window {
  int seq;
  int64_t begin;     // first row of the pack
  int32_t length;    // rows
  int64_t position;  // absolute position of the first row
};

__device__ __forceinline__ int64_t WindowCount(int64_t first_position, int64_t length) {
  if (length <= 0) return 0;
  return (first_position + length - 1) / kWindow - first_position / kWindow + 1;
}

// Window `index` of sequence `seq`.
__device__ __forceinline__ Window GetWindow(const Params& p, int seq, int64_t index) {
  const int64_t row0 = p.cu_seqlens[seq];
  const int64_t length = p.cu_seqlens[seq + 1] - row0;
  const int64_t first = p.sequences[seq].first_position;
  const int64_t start = (first / kWindow + index) * kWindow;  // absolute
  const int64_t low = start > first ? start : first;
  const int64_t high = start + kWindow < first + length ? start + kWindow : first + length;
  return {seq, row0 + (low - first), static_cast<int32_t>(high - low), low};
}

template <typename T>
__device__ __forceinline__ T WarpSum(T x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Whether a sequence runs as dense: every token is an event and no event list exists.
__device__ __forceinline__ bool IsDense(const Params& p, int seq) {
  return p.mask == nullptr && p.sequences[seq].budget.mode == BudgetMode::kDense;
}

}  // namespace sparsegdn::cuda

#endif  // SPARSEGDN_KERNELS_CUDA_DEVICE_COMMON_CUH_
