// The copying side of attention_wgmma.cu: what a block works on, its shared memory, and tiles of
// keys and values on their way into it.
#ifndef SPARSEGDN_KERNELS_CUDA_OPS_ATTENTION_TILES_CUH_
#define SPARSEGDN_KERNELS_CUDA_OPS_ATTENTION_TILES_CUH_

#include <cuda.h>

#include "kernels/cuda/ops/ops_common.cuh"
#include "kernels/cuda/panel.cuh"

namespace sparsegdn::cuda_ops::attention {

using cuda::BarrierArriveWarp;
using cuda::BarrierExpect;
using cuda::BarrierWait;
using cuda::CopyAsync16;
using cuda::CopyCommit;
using cuda::CopyWait;
using cuda::PanelOffset;
using cuda::ProxyFence;
using cuda::SharedAddress;

inline constexpr int kQueries = 128, kKeys = 64;
inline constexpr int kStages = 2;
inline constexpr int kThreads = 384;

template <int kDim>
struct Shared {
  unsigned char q[kQueries * kDim * 2];
  unsigned char k[kStages][kKeys * kDim * 2];
  unsigned char v[kStages][kKeys * kDim * 2];
  uint64_t full_q, full_k[kStages], full_v[kStages], empty_k[kStages], empty_v[kStages];
};

// The queries of one block.
struct Tile {
  int seq = -1;  // -1: no work
  int head = 0;
  int64_t row = 0;       // of the pack
  int rows = 0;          // real ones, at most kQueries
  int64_t position = 0;  // of the first
  int64_t keys = 0;      // positions that the sequence has, this pack included
  int tiles = 0;         // of keys that some query sees
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

inline constexpr int kCopyWarps = 4, kQueryWarps = 8;

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
  return x;
}
__device__ __forceinline__ uint32_t ClusterSize() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(x));
  return x;
}
__device__ __forceinline__ void ClusterSync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
// One arrival a warp on the barrier of every block of the cluster.
__device__ __forceinline__ void ArriveCluster(uint64_t* barrier, uint32_t blocks) {
  __syncwarp();
  if (threadIdx.x % 32 < blocks) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}\n" ::"r"(
            SharedAddress(barrier)),
        "r"(threadIdx.x % 32)
        : "memory");
  }
}
// A box of 64 rows of 64 elements to the same place in every block of the cluster, counted by the
// barrier of each (one thread).
__device__ __forceinline__ void CopyBoxToCluster(uint32_t to, const CUtensorMap* map,
                                                 uint64_t* barrier, int element, int row,
                                                 uint32_t blocks) {
  const uint16_t mask = static_cast<uint16_t>((1u << blocks) - 1);
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(SharedAddress(barrier)), "r"(element), "r"(row), "h"(mask)
      : "memory");
}

inline constexpr int kQueryPanel = kQueries * 128;  // bytes of 64 columns of the queries
inline constexpr int kKeyPanel = kKeys * 128;

// Heads vary fastest, so that blocks that run together share keys; the last queries, which see the
// most keys, go first.
__device__ inline Tile FindTile(const AttentionArgs& a) {
  Tile t;
  t.head = static_cast<int>(blockIdx.x % a.shape.num_q_heads);
  int64_t index = (gridDim.x - 1 - blockIdx.x) / a.shape.num_q_heads;
  for (int s = 0; s < a.pack.num_seqs; ++s) {
    const int64_t begin = a.pack.cu_seqlens[s], length = a.pack.cu_seqlens[s + 1] - begin;
    const int64_t tiles = (length + kQueries - 1) / kQueries;
    if (index >= tiles) {
      index -= tiles;
      continue;
    }
    const int64_t first = index * kQueries, rest = length - first;
    t.seq = s;
    t.row = begin + first;
    t.rows = static_cast<int>(rest < kQueries ? rest : kQueries);
    t.position = a.pack.first_positions[s] + first;
    t.keys = a.pack.first_positions[s] + length;
    t.tiles = static_cast<int>((t.position + t.rows - 1) / kKeys + 1);
    break;
  }
  return t;
}

// Pieces of 16 bytes of `rows` rows, spread over the 128 threads of the copying warpgroup.
template <int kDim, int kRows>
__device__ __forceinline__ void CopyRows(unsigned char* to, const bf16* from, int64_t stride,
                                         int64_t valid) {
  constexpr int kPieces = kDim / kVector;
  const int piece = threadIdx.x % kPieces;
  const uint32_t base = SharedAddress(to) + static_cast<uint32_t>(piece / 8 * (kRows * 128));
#pragma unroll 8
  for (int row = threadIdx.x / kPieces; row < kRows; row += 128 / kPieces) {
    const bool ok = row < valid;
    CopyAsync16(base + PanelOffset(row, piece % 8 * kVector),
                from + (ok ? row : 0) * stride + piece * kVector, ok);
  }
  CopyCommit();
}

__device__ __forceinline__ void BarrierArriveOne(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

// Marks the copies of all but the last kPending groups as arrived.
template <int kPending>
__device__ __forceinline__ void Publish(uint64_t* barrier) {
  CopyWait<kPending>();
  ProxyFence();
  BarrierArriveWarp(barrier);
}

// This block's share of a tile, to all blocks; every warp arrives, one with the bytes that all of
// them send here.
template <int kDim>
__device__ __forceinline__ void FetchTile(unsigned char* to, uint64_t* barrier,
                                          const CUtensorMap* map, int element, int row) {
  constexpr int kPanels = kDim / 64;
  const uint32_t blocks = ClusterSize(), rank = ClusterRank();
  if (threadIdx.x != 0) {
    if (threadIdx.x % 32 == 0) BarrierArriveOne(barrier);
    return;
  }
  BarrierExpect(barrier, kPanels * kKeyPanel);
  const int first = static_cast<int>(rank * kPanels / blocks);
  const int last = static_cast<int>((rank + 1) * kPanels / blocks);
  for (int p = first; p < last; ++p) {
    CopyBoxToCluster(SharedAddress(to) + p * kKeyPanel, map, barrier, element + 64 * p, row,
                     blocks);
  }
}

// The blocks of a cluster hold heads of one key head and the same queries, so all of them walk the
// same tiles in step.
template <int kDim>
__device__ void CopyTiles(const AttentionArgs& a, const CUtensorMap* map, const Tile& t,
                          Shared<kDim>& s) {
  const int64_t width = int64_t{a.shape.num_kv_heads} * kDim;
  const int kv = t.head / (a.shape.num_q_heads / a.shape.num_kv_heads);
  const int32_t* table = a.cache.block_tables + t.seq * a.cache.max_blocks;
  CopyRows<kDim, kQueries>(s.q, RowOf(a.q, t.row) + int64_t{t.head} * kDim, a.q.stride, t.rows);
  Publish<0>(&s.full_q);
  for (int n = 0; n < t.tiles; ++n) {
    const int stage = n % kStages, parity = (n / kStages + 1) & 1;
    const int64_t first = int64_t{n} * kKeys, valid = t.keys - first;
    const int64_t block = table[first / a.cache.block_tokens];
    const int64_t row = block * a.cache.block_tokens + first % a.cache.block_tokens;
    const int key = kv * kDim, value = static_cast<int>(width) + key;
    if (n >= kStages) BarrierWait(&s.empty_k[stage], parity);
    if (valid >= kKeys) {
      FetchTile<kDim>(s.k[stage], &s.full_k[stage], map, key, static_cast<int>(row));
      if (n >= kStages) BarrierWait(&s.empty_v[stage], parity);
      FetchTile<kDim>(s.v[stage], &s.full_v[stage], map, value, static_cast<int>(row));
      continue;
    }
    // Positions that were never written may hold anything, and 0 * NaN is NaN: they become zeros,
    // which the copy engine cannot do, so each block copies this tile, the last, for itself.
    const bf16* rows = static_cast<const bf16*>(a.cache.data) + row * 2 * width;
    CopyRows<kDim, kKeys>(s.k[stage], rows + key, 2 * width, valid);
    Publish<0>(&s.full_k[stage]);
    if (n >= kStages) BarrierWait(&s.empty_v[stage], parity);
    CopyRows<kDim, kKeys>(s.v[stage], rows + value, 2 * width, valid);
    Publish<0>(&s.full_v[stage]);
  }
  __syncwarp();  // one thread a block did the asking
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sparsegdn::cuda_ops::attention

#endif  // SPARSEGDN_KERNELS_CUDA_OPS_ATTENTION_TILES_CUH_
