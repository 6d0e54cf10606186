// Launches that overlap: a kernel of a call may start while the one before it still runs, and waits
// for it only where it needs what that one wrote (programmatic dependent launch, Hopper).
//
// Every kernel launched so waits, on every path: then a kernel's end is also the end of all those
// before it in the call.
#ifndef SPARSEGDN_KERNELS_CUDA_LAUNCH_CUH_
#define SPARSEGDN_KERNELS_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

namespace sparsegdn::cuda {

// Until the kernels before this one have ended and their writes are visible.
__device__ __forceinline__ void WaitForPrevious() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel start once all blocks of this one have said so or ended.
__device__ __forceinline__ void AllowNext() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct LaunchShape {
  unsigned grid, block;
  int shared_bytes = 0;
  int cluster = 1;
};

// Enqueues `kernel`; with `overlap` it may start before the launch ahead of it has ended.
template <typename... Wanted, typename... Args>
cudaError_t LaunchKernel(void (*kernel)(Wanted...), const LaunchShape& shape, bool overlap,
                         cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.grid);
  config.blockDim = dim3(shape.block);
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (overlap) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs++].val.clusterDim.z = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, static_cast<Wanted>(args)...);
}

}  // namespace sparsegdn::cuda

#endif  // SPARSEGDN_KERNELS_CUDA_LAUNCH_CUH_
