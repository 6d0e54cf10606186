// Causal attention with grouped heads over the paged cache on Hopper's matrix units.
//
//   S = q k^T, P = softmax(D^-1/2 S) over positions <= the query's, out = (P v) * sigmoid(gate)
// One block: 128 queries of one head against tiles of 64 keys, online softmax. Warpgroup 0 has the
// copy engine bring tiles from the cache's blocks to shared memory (two stages of K and of V);
// warpgroups 1 and 2 hold 64 queries each: S by m64n64k16 from shared memory, P V by m64n128k16
// with P in registers. The next S runs beside the current P V, the softmax of one warpgroup beside
// the products of the other.
//
// FLOPs: 4 D per visible (query, key) pair and head. A block alone reads K and V once per 128
// queries, 128 FLOP a byte, which at 800 TFLOP/s is more than L2 delivers. So two heads of one key
// head form a cluster whose blocks fetch half of each tile and multicast it: 256 FLOP a byte.
#include <cmath>

#include "kernels/cuda/ops/attention_tiles.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace sparsegdn::cuda_ops {
namespace attention {
namespace {

using cuda::BarrierInit;
using cuda::Exp2;
using cuda::FenceRegisters;
using cuda::kStepK;
using cuda::kStepKTransposed;
using cuda::PanelDescriptor;
using cuda::WgmmaCommit;
using cuda::WgmmaFence;
using cuda::WgmmaN128A;
using cuda::WgmmaN64;
using cuda::WgmmaWait;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

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
  const uint32_t q = SharedAddress(s.q) + group * (64 * 128), blocks = ClusterSize();
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
  ArriveCluster(&s.empty_k[0], blocks);
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
    ArriveCluster(&s.empty_k[next], blocks);
    Softmax<kDim>(x, scale_log2, t.position + row - int64_t{n + 1} * kKeys, shrink);
    WgmmaWait<0>();
#pragma unroll
    for (int h = 0; h < kDim / 128; ++h) FenceRegisters(x.out[h]);
    ArriveCluster(&s.empty_v[stage], blocks);
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
__global__ void __launch_bounds__(kThreads, 1)
    AttentionWgmmaKernel(AttentionArgs a, const __grid_constant__ CUtensorMap map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared<kDim>& s = *reinterpret_cast<Shared<kDim>*>(memory);
  const Tile t = FindTile(a);
  if (t.seq < 0) return;  // the other blocks of the cluster return too
  if (threadIdx.x == 0) {
    const int readers = kQueryWarps * static_cast<int>(ClusterSize());
    BarrierInit(&s.full_q, kCopyWarps);
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(&s.full_k[i], kCopyWarps);
      BarrierInit(&s.full_v[i], kCopyWarps);
      BarrierInit(&s.empty_k[i], readers);
      BarrierInit(&s.empty_v[i], readers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  ClusterSync();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    CopyTiles<kDim>(a, &map, t, s);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Attend<kDim>(a, t, s);
  }
  ClusterSync();  // shared memory of a block that is gone must not be written
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

// The cache as rows [key, value][num_kv_heads][head_dim] in boxes of 64 rows and 64 elements. How
// many rows there are is the caller's business: no box beyond them is ever asked for.
bool EncodeMap(EncodeTiled encode, const AttentionArgs& a, CUtensorMap* map) {
  const cuuint64_t width = 2 * static_cast<cuuint64_t>(a.shape.num_kv_heads * a.shape.head_dim);
  const cuuint64_t dims[2] = {width, cuuint64_t{1} << 31};
  const cuuint64_t strides[1] = {2 * width};
  const cuuint32_t box[2] = {64, kKeys};
  const cuuint32_t steps[2] = {1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, a.cache.data, dims, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <int kDim>
cudaError_t Launch(const AttentionArgs& a, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared<kDim>);
  static const EncodeTiled encode = FindEncoder();
  CUtensorMap map;
  if (encode == nullptr || !EncodeMap(encode, a, &map)) return cudaErrorNotSupported;
  const cudaError_t error = cudaFuncSetAttribute(
      AttentionWgmmaKernel<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const int64_t tiles = a.pack.num_tokens / kQueries + a.pack.num_seqs;
  const bool paired = a.shape.num_q_heads / a.shape.num_kv_heads % 2 == 0;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {paired ? 2u : 1u, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(tiles * a.shape.num_q_heads));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, AttentionWgmmaKernel<kDim>, a, map);
}

}  // namespace
}  // namespace attention

bool AttentionWgmmaSupports(const AttentionArgs& a) {
  return (a.shape.head_dim == 128 || a.shape.head_dim == 256) && Aligned(a.q) &&
         Aligned(a.q_gate) && Aligned(ConstRows(a.out)) && Aligned(a.cache.data, 0) &&
         a.cache.block_tokens % attention::kKeys == 0;
}

cudaError_t LaunchAttentionWgmma(const AttentionArgs& a, cudaStream_t stream) {
  if (a.pack.num_tokens == 0) return cudaSuccess;
  return a.shape.head_dim == 256 ? attention::Launch<256>(a, stream)
                                 : attention::Launch<128>(a, stream);
}

}  // namespace sparsegdn::cuda_ops
