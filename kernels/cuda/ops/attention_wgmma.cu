// Causal attention with grouped heads over the paged cache on Hopper's matrix units.
//
//   S = q k^T, P = softmax(D^-1/2 S) over positions <= the query's, out = (P v) * sigmoid(gate)
// One block: 128 queries of one head against tiles of 64 keys, online softmax. Warpgroup 0 copies
// tiles from the cache's blocks to shared memory (two stages of K and of V); warpgroups 1 and 2
// hold 64 queries each: S by m64n64k16 from shared memory, P V by m64n128k16 with P in registers.
// The next S runs beside the current P V, the softmax of one warpgroup beside the products of the
// other.
//
// FLOPs: 4 D per visible (query, key) pair and head; K and V pass through L2 once per 128 queries,
// which is 64 FLOP a byte and head, shared by the heads of a group: bound by the matrix units.
#include <cmath>

#include "kernels/cuda/ops/ops_common.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace sparsegdn::cuda_ops {
namespace {

using cuda::BarrierArriveWarp;
using cuda::BarrierInit;
using cuda::BarrierWait;
using cuda::CopyAsync16;
using cuda::CopyCommit;
using cuda::CopyWait;
using cuda::Exp2;
using cuda::FenceRegisters;
using cuda::kStepK;
using cuda::kStepKTransposed;
using cuda::PanelDescriptor;
using cuda::PanelOffset;
using cuda::ProxyFence;
using cuda::SharedAddress;
using cuda::WgmmaCommit;
using cuda::WgmmaFence;
using cuda::WgmmaN128A;
using cuda::WgmmaN64;
using cuda::WgmmaWait;

constexpr int kQueries = 128, kKeys = 64;
constexpr int kStages = 2;
constexpr int kThreads = 384;

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

constexpr int kQueryPanel = kQueries * 128;  // bytes of 64 columns of the queries
constexpr int kKeyPanel = kKeys * 128;

// Heads vary fastest, so that blocks that run together share keys; the last queries, which see the
// most keys, go first.
__device__ Tile FindTile(const AttentionArgs& a) {
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

// Marks the copies of all but the last kPending groups as arrived.
template <int kPending>
__device__ __forceinline__ void Publish(uint64_t* barrier) {
  CopyWait<kPending>();
  ProxyFence();
  BarrierArriveWarp(barrier);
}

template <int kDim>
__device__ void CopyTiles(const AttentionArgs& a, const Tile& t, Shared<kDim>& s) {
  const int64_t width = int64_t{a.shape.num_kv_heads} * kDim;
  const int kv = t.head / (a.shape.num_q_heads / a.shape.num_kv_heads);
  const int32_t* table = a.cache.block_tables + t.seq * a.cache.max_blocks;
  CopyRows<kDim, kQueries>(s.q, RowOf(a.q, t.row) + int64_t{t.head} * kDim, a.q.stride, t.rows);
  Publish<0>(&s.full_q);
  for (int n = 0; n < t.tiles; ++n) {
    const int stage = n % kStages, parity = (n / kStages + 1) & 1;
    const int64_t first = int64_t{n} * kKeys;
    const bf16* rows = CacheRow(a.cache, table, 2 * width, first) + int64_t{kv} * kDim;
    // Positions that were never written may hold anything, and 0 * NaN is NaN: they become zeros.
    const int64_t valid = t.keys - first;
    if (n >= kStages) BarrierWait(&s.empty_k[stage], parity);
    CopyRows<kDim, kKeys>(s.k[stage], rows, 2 * width, valid);
    if (n > 0) Publish<1>(&s.full_v[(n - 1) % kStages]);
    if (n >= kStages) BarrierWait(&s.empty_v[stage], parity);
    CopyRows<kDim, kKeys>(s.v[stage], rows + width, 2 * width, valid);
    Publish<1>(&s.full_k[stage]);
  }
  Publish<0>(&s.full_v[(t.tiles - 1) % kStages]);
}

// What a thread holds of 64 queries: rows `row` and `row + 8` of its warpgroup.
template <int kDim>
struct Queries {
  float out[kDim / 128][64];
  float scores[32];
  uint32_t weights[4][4];
  float max[2], sum[2];
};

// scores = q k^T, left running.
template <int kDim>
__device__ __forceinline__ void StartScores(Queries<kDim>& x, uint32_t q, uint32_t k) {
  FenceRegisters(x.scores);
  WgmmaFence();
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
    const uint32_t q_at = q + i / 4 * kQueryPanel + i % 4 * kStepK;
    const uint32_t k_at = k + i / 4 * kKeyPanel + i % 4 * kStepK;
    WgmmaN64<bf16, 0, 0>(x.scores, PanelDescriptor(q_at), PanelDescriptor(k_at), i > 0);
  }
  WgmmaCommit();
}

// out += weights v, left running.
template <int kDim>
__device__ __forceinline__ void StartOutput(Queries<kDim>& x, uint32_t v) {
#pragma unroll
  for (int h = 0; h < kDim / 128; ++h) FenceRegisters(x.out[h]);
  WgmmaFence();
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i) {
#pragma unroll
    for (int h = 0; h < kDim / 128; ++h) {
      const uint32_t at = v + 2 * h * kKeyPanel + i * kStepKTransposed;
      WgmmaN128A<bf16, 1>(x.out[h], x.weights[i], PanelDescriptor(at, kKeyPanel), 1);
    }
  }
  WgmmaCommit();
}

// Turns scores into weights relative to the new maximum; `shrink` is what earlier sums are
// multiplied by. `limit` is the last visible key of the tile for row 0 of this thread (row 8 sees
// eight more); from kKeys - 1 on the tile is not cut.
template <int kDim>
__device__ __forceinline__ void Softmax(Queries<kDim>& x, float scale_log2, int64_t limit,
                                        float (&shrink)[2]) {
  const int column = threadIdx.x % 4 * 2;
  if (limit < kKeys - 1) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int key = i / 4 * 8 + column + i % 2;
      if (key > limit + (i % 4 / 2) * 8) x.scores[i] = -INFINITY;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float max = x.max[r];
#pragma unroll
    for (int i = 0; i < 16; ++i) max = fmaxf(max, x.scores[i / 2 * 4 + 2 * r + i % 2]);
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
    shrink[r] = Exp2((x.max[r] - max) * scale_log2);  // the first time: e^-inf = 0
    x.max[r] = max;
    const float shift = max * scale_log2;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& s = x.scores[i / 2 * 4 + 2 * r + i % 2];
      s = Exp2(fmaf(s, scale_log2, -shift));
      sum += s;
    }
    x.sum[r] = x.sum[r] * shrink[r] + sum;
  }
}

// The weights as the register operand of the next product.
template <int kDim>
__device__ __forceinline__ void PackWeights(Queries<kDim>& x) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    x.weights[i / 4][i % 4] = PackPair(x.scores[2 * i], x.scores[2 * i + 1]);
  }
}

template <int kDim>
__device__ __forceinline__ void StoreOutput(const AttentionArgs& a, const Tile& t, Queries<kDim>& x,
                                            int row) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    x.sum[r] += __shfl_xor_sync(0xffffffffu, x.sum[r], 1);
    x.sum[r] += __shfl_xor_sync(0xffffffffu, x.sum[r], 2);
    if (row + 8 * r >= t.rows) continue;
    const float scale = 1.0f / x.sum[r];
    const bf16* gate =
        RowOf(a.q_gate, t.row + row + 8 * r) + (int64_t{2} * t.head + 1) * kDim + column;
    bf16* to = RowOf(a.out, t.row + row + 8 * r) + int64_t{t.head} * kDim + column;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      const float2 g = cuda::Unpack<bf16>(*reinterpret_cast<const uint32_t*>(gate + 8 * i));
      const float* out = &x.out[i / 16][i % 16 * 4 + 2 * r];
      *reinterpret_cast<uint32_t*>(to + 8 * i) =
          PackPair(out[0] * scale * Sigmoid(g.x), out[1] * scale * Sigmoid(g.y));
    }
  }
}

template <int kDim>
__device__ void Attend(const AttentionArgs& a, const Tile& t, Shared<kDim>& s) {
  const int group = threadIdx.x / 128 - 1;
  const int row = group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const float scale_log2 = 1.44269504f * rsqrtf(static_cast<float>(kDim));
  const uint32_t q = SharedAddress(s.q) + group * (64 * 128);
  Queries<kDim> x;
  float shrink[2];
#pragma unroll
  for (int h = 0; h < kDim / 128; ++h) {
#pragma unroll
    for (int i = 0; i < 64; ++i) x.out[h][i] = 0.0f;
  }
  x.max[0] = x.max[1] = -INFINITY;
  x.sum[0] = x.sum[1] = 0.0f;
  BarrierWait(&s.full_q, 0);
  BarrierWait(&s.full_k[0], 0);
  StartScores<kDim>(x, q, SharedAddress(s.k[0]));
  WgmmaWait<0>();
  FenceRegisters(x.scores);
  BarrierArriveWarp(&s.empty_k[0]);
  Softmax<kDim>(x, scale_log2, t.position + row, shrink);
  PackWeights<kDim>(x);
  // The last tile stands outside the loop: the compiler keeps products asynchronous only where
  // every path through the body has the same ones in flight.
  for (int n = 0; n + 1 < t.tiles; ++n) {
    const int stage = n % kStages, next = (n + 1) % kStages;
    BarrierWait(&s.full_k[next], (n + 1) / kStages & 1);
    StartScores<kDim>(x, q, SharedAddress(s.k[next]));
    BarrierWait(&s.full_v[stage], n / kStages & 1);
    StartOutput<kDim>(x, SharedAddress(s.v[stage]));
    WgmmaWait<1>();
    FenceRegisters(x.scores);
    BarrierArriveWarp(&s.empty_k[next]);
    Softmax<kDim>(x, scale_log2, t.position + row - int64_t{n + 1} * kKeys, shrink);
    WgmmaWait<0>();
#pragma unroll
    for (int h = 0; h < kDim / 128; ++h) FenceRegisters(x.out[h]);
    BarrierArriveWarp(&s.empty_v[stage]);
    PackWeights<kDim>(x);
    // Once the maxima have settled nothing shrinks any more.
    if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) x.out[i / 64][i % 64] *= shrink[i % 4 / 2];
    }
  }
  const int last = t.tiles - 1;
  BarrierWait(&s.full_v[last % kStages], last / kStages & 1);
  StartOutput<kDim>(x, SharedAddress(s.v[last % kStages]));
  WgmmaWait<0>();
#pragma unroll
  for (int h = 0; h < kDim / 128; ++h) FenceRegisters(x.out[h]);
  StoreOutput<kDim>(a, t, x, row);
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <int kDim>
__global__ void __launch_bounds__(kThreads, 1) AttentionWgmmaKernel(AttentionArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared<kDim>& s = *reinterpret_cast<Shared<kDim>*>(memory);
  const Tile t = FindTile(a);
  if (t.seq < 0) return;
  if (threadIdx.x == 0) {
    BarrierInit(&s.full_q, 4);
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(&s.full_k[i], 4);
      BarrierInit(&s.full_v[i], 4);
      BarrierInit(&s.empty_k[i], 8);
      BarrierInit(&s.empty_v[i], 8);
    }
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    CopyTiles<kDim>(a, t, s);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Attend<kDim>(a, t, s);
  }
#endif
}

template <int kDim>
cudaError_t Launch(const AttentionArgs& a, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared<kDim>);
  const cudaError_t error = cudaFuncSetAttribute(
      AttentionWgmmaKernel<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const int64_t tiles = a.pack.num_tokens / kQueries + a.pack.num_seqs;
  AttentionWgmmaKernel<kDim>
      <<<static_cast<unsigned>(tiles * a.shape.num_q_heads), kThreads, kBytes, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

bool AttentionWgmmaSupports(const AttentionArgs& a) {
  return (a.shape.head_dim == 128 || a.shape.head_dim == 256) && Aligned(a.q) &&
         Aligned(a.q_gate) && Aligned(ConstRows(a.out)) && Aligned(a.cache.data, 0) &&
         a.cache.block_tokens % kKeys == 0;
}

cudaError_t LaunchAttentionWgmma(const AttentionArgs& a, cudaStream_t stream) {
  if (a.pack.num_tokens == 0) return cudaSuccess;
  return a.shape.head_dim == 256 ? Launch<256>(a, stream) : Launch<128>(a, stream);
}

}  // namespace sparsegdn::cuda_ops
