// SparseGDN on Hopper in one kernel: state recurrence and outputs of one value head and one time
// segment a block, without intermediates in device memory.
//
// Bytes a token at Hk 16, Hv 32, D 128, 16 bits: q, k, v in and o out 24.6 KB, and 0.5 KB of gates,
// the floor; q and k are read once more through L2 by the second head of a pair. Tensor work a
// group of 64 events and a head: 6.3 MFLOP for the state, 4.2 MFLOP for each tile of 64 tokens. At
// 29 % (about 220 tokens a group) 23 MFLOP a group and head, 3.4 MFLOP a token, so that bytes and
// arithmetic bind about equally. docs/kernels_cuda.md has the schedule and what was measured.
#include "kernels/cuda/fused_output.cuh"
#include "kernels/cuda/fused_state.cuh"
#include "kernels/cuda/launch.cuh"

namespace sparsegdn::cuda {
namespace fused {
namespace {

template <typename T, bool kNorm, bool kDirect>
__device__ __forceinline__ void RunOutputs(const Params& p, const TileMaps& maps, Shared& sm) {
  if (sm.job.self_term != 0) {
    OutputSide<T, true, kNorm, kDirect> side(p, maps, sm);
    side.Run();
  } else {
    OutputSide<T, false, kNorm, kDirect> side(p, maps, sm);
    side.Run();
  }
}

template <typename T, bool kNorm>
__global__ void __launch_bounds__(kThreads, 1)
    FusedKernel(const __grid_constant__ Params p, const __grid_constant__ TileMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& sm = *reinterpret_cast<Shared*>(raw);
  WaitForPrevious();
  const int* job =
      reinterpret_cast<const int*>(static_cast<const char*>(p.ws.jobs) + blockIdx.x * kJobBytes);
  if (threadIdx.x < sizeof(Job) / 4)
    reinterpret_cast<int*>(&sm.job)[threadIdx.x] = job[threadIdx.x];
  if (threadIdx.x == 0) {
    BarrierInit(&sm.inverse_full, 1);
    BarrierInit(&sm.inverse_read, kStateThreads / 32);
    for (int i = 0; i < 2; ++i) {
      BarrierInit(&sm.state_full[i], kStateThreads / 32);
      BarrierInit(&sm.u_full[i], kStateThreads / 32);
      BarrierInit(&sm.group_done[i], kOutputThreads / 32);
      BarrierInit(&sm.queries_full[i], 2);
      for (uint64_t& full : sm.values_full[i]) BarrierInit(&full, 1);
    }
    // The copy engine must see the barriers.
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (sm.job.active == 0) return;
  if (threadIdx.x < kStateThreads) {
    StateSide<T> side(p, sm);
    side.Run();
  } else if (p.o.dtype == p.q.dtype) {
    RunOutputs<T, kNorm, false>(p, maps, sm);
  } else {
    RunOutputs<T, kNorm, true>(p, maps, sm);
  }
#endif
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, found through the runtime so that nothing links libcuda.
EncodeTiled FindEncoder() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<EncodeTiled>(entry);
}

bool EncodeMap(EncodeTiled encode, const ConstTensorRef& x, int64_t tokens, int64_t heads,
               int box_tokens, CUtensorMap* map) {
  const cuuint64_t dims[4] = {kDim / 2, static_cast<cuuint64_t>(heads),
                              static_cast<cuuint64_t>(tokens), 2};
  // The stride of a dimension of one is never used, but must be legal.
  const cuuint64_t strides[3] = {
      heads > 1 ? static_cast<cuuint64_t>(x.head_stride) * 2 : kDim * 2,
      tokens > 1 ? static_cast<cuuint64_t>(x.token_stride) * 2 : kDim * 2, kDim};
  const cuuint32_t box[4] = {kDim / 2, 1, static_cast<cuuint32_t>(box_tokens), 2};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type =
      x.dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode(map, type, 4, const_cast<void*>(x.data), dims, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <typename T>
cudaError_t Launch(const Params& p, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(Shared));
  static const EncodeTiled encode = FindEncoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  TileMaps maps{};
  const int64_t tokens = p.num_tokens, hk = p.shape.num_k_heads, hv = p.shape.num_v_heads;
  if (tokens > 0 && !(EncodeMap(encode, p.q, tokens, hk, kTile, &maps.q) &&
                      EncodeMap(encode, p.k, tokens, hk, kTile, &maps.k) &&
                      EncodeMap(encode, p.v, tokens, hv, kWarpRows, &maps.v) &&
                      EncodeMap(encode, p.v, tokens, hv, kTile, &maps.v_tile))) {
    return cudaErrorInvalidValue;
  }
  const ConstTensorRef o{p.o.data, p.o.dtype, p.o.token_stride, p.o.head_stride};
  if (tokens > 0 && o.dtype == p.q.dtype && !EncodeMap(encode, o, tokens, hv, kWarpRows, &maps.o)) {
    return cudaErrorInvalidValue;
  }
  const auto kernel = p.normalize_qk ? FusedKernel<T, true> : FusedKernel<T, false>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const int64_t blocks = p.ws.segments * hv;
  return LaunchKernel(kernel, {static_cast<unsigned>(blocks), kThreads, kBytes}, true, stream, p,
                      maps);
}

bool Aligned16(const void* data, int64_t token_stride, int64_t head_stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && token_stride % 8 == 0 &&
         head_stride % 8 == 0 && token_stride >= 0 && token_stride < (int64_t{1} << 30);
}

}  // namespace
}  // namespace fused

bool FusedSupports(const Params& p, int compute_capability_major) {
  if (compute_capability_major != 9) return false;
  if (p.shape.head_dim_k != fused::kDim || p.shape.head_dim_v != fused::kDim) return false;
  if (p.q.dtype == DType::kF32) return false;
  // The groups of a given mask are cut at windows only, and a dense budget may ask for snapshots at
  // any multiple of kGroup.
  if (p.mask != nullptr && p.snapshot_slots > 0) return false;
  for (const ConstTensorRef& x : {p.q, p.k, p.v}) {
    if (!fused::Aligned16(x.data, x.token_stride, x.head_stride)) return false;
  }
  return p.o.dtype == DType::kF32 || fused::Aligned16(p.o.data, p.o.token_stride, p.o.head_stride);
}

cudaError_t LaunchFused(const Params& p, cudaStream_t stream) {
  if (const cudaError_t error = LaunchInverse(p, stream); error != cudaSuccess) return error;
  if (p.q.dtype == DType::kBF16) return fused::Launch<__nv_bfloat16>(p, stream);
  return fused::Launch<__half>(p, stream);
}

}  // namespace sparsegdn::cuda
