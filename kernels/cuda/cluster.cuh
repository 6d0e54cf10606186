// Blocks of a cluster (Hopper): their barrier, and reads of each other's shared memory.
#ifndef SPARSEGDN_KERNELS_CUDA_CLUSTER_CUH_
#define SPARSEGDN_KERNELS_CUDA_CLUSTER_CUH_

#include <cstdint>

namespace sparsegdn::cuda {

// All threads of all blocks; what a thread wrote to shared memory before it arrived is visible to
// every thread that has waited. Also a barrier of the block.
__device__ __forceinline__ void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void ClusterWait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void ClusterSync() {
  ClusterArrive();
  ClusterWait();
}

// *at as block `rank` of the cluster has it; `at` points to this block's shared memory.
template <typename T>
__device__ __forceinline__ T LoadRemote(const T* at, int rank) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(at));
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  T x;
  if constexpr (sizeof(T) == 4) {
    uint32_t bits;
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(bits) : "r"(address) : "memory");
    memcpy(&x, &bits, 4);
  } else {
    uint64_t bits;
    asm volatile("ld.shared::cluster.b64 %0, [%1];" : "=l"(bits) : "r"(address) : "memory");
    memcpy(&x, &bits, 8);
  }
  return x;
}

}  // namespace sparsegdn::cuda

#endif  // SPARSEGDN_KERNELS_CUDA_CLUSTER_CUH_
