// T = (I + L)^-1 of every group and value head, L = tril(beta_i e^{G_i - G_l} k_i . k_l, -1): all
// that the Delta solve needs besides the state, so it runs ahead of the serial chain, on all groups
// at once. In the scaled frame (fused_shared.cuh) L has no gates.
//
// A block takes a group of a pair: one K K^T for its value heads. Bytes: 16 KB of keys in, 8 KB of
// T out a head; about 0.3 MFLOP a head after the 1 MFLOP of K K^T: bound by latency, so several
// blocks share a multiprocessor.
#include "kernels/cuda/fused_segment.cuh"
#include "kernels/cuda/fused_shared.cuh"
#include "kernels/cuda/fused_solve.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace sparsegdn::cuda {
namespace fused {
namespace {

struct __align__(1024) InverseShared {
  union {
    uint8_t key[2][kPanel];  // until K K^T
    struct {
      float solve[kGroup * kSolveRow];
      float scratch[32 * kHalfRow];
    };
  };
  int token[kGroup];
  float k_norm[kGroup];
  float2 gate[2][kGroup];  // of two heads at a time
  float beta[2][kGroup];
  float2 before[2], after[2];
  Job job;
  Cursor cursor;
  int norms_bad;
};

template <typename T>
__device__ __forceinline__ void LoadKeys(const Params& p, InverseShared& sm) {
  const Cursor& c = sm.cursor;
  const int t = threadIdx.x, first = FirstEvent(c, c.group), last = FirstEvent(c, c.group + 1);
  if (t < 64) {
    const int e = first + t;
    const int row = e < last && e < c.events ? EventRow(sm.job, c, e) : kNoToken;
    sm.token[t] = row;
    sm.k_norm[t] = row == kNoToken ? 0.0f : 1.0f;
    if (row != kNoToken && p.normalize_qk) {
      sm.k_norm[t] = p.ws.k_norm[sm.job.pair * p.num_tokens + row];
    }
  }
  __syncthreads();
  const T* from = static_cast<const T*>(p.k.data) + sm.job.pair * p.k.head_stride + t % 16 * 8;
  const uint32_t to = SharedAddress(sm.key[t % 16 / 8]) + PanelOffset(t / 16, t % 8 * 8);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = sm.token[t / 16 + 8 * i];
    const bool live = row != kNoToken;
    CopyAsync16(to + i * 1024, from + (live ? row * p.k.token_stride : 0), live);
  }
  CopyCommit();
  CopyWait<0>();
  ProxyFence();
  __syncthreads();
}

// Gates and beta of `heads` (1 or 2) heads of the group; visible after the next barrier.
template <typename T>
__device__ __forceinline__ void LoadFactors(const Params& p, int head, int heads,
                                            InverseShared& sm) {
  const int slot = threadIdx.x / 64, i = threadIdx.x % 64;
  if (slot >= heads) return;
  const float2* gate_sum = p.ws.gate_sum + (head + slot) * p.num_tokens;
  const int row = sm.token[i];
  const bool live = row != kNoToken;
  sm.gate[slot][i] = live ? gate_sum[row] : make_float2(-1e30f, 0.0f);
  sm.beta[slot][i] = live ? p.ws.beta[(head + slot) * p.num_tokens + row] : 0.0f;
  if (i >= 2) return;
  const Cursor& c = sm.cursor;
  const int last = GroupBegin(sm.job, c, c.group + i) - 1;
  const bool none = i == 0 && last < c.row0;
  (i == 0 ? sm.before : sm.after)[slot] = none ? make_float2(0.0f, 0.0f) : gate_sum[last];
}

template <typename T>
__device__ __forceinline__ void FormL(const float (&products)[32], int slot, InverseShared& sm) {
  const int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4, column = 2 * (t % 4);
  const bool scaled = sm.before[slot].x - sm.after[slot].x <= kScaledFrameLog2<T>;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = row + 8 * half;
    const float2 gate = sm.gate[slot][i];
    const float beta = sm.beta[slot][i] * sm.k_norm[i];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int l = 8 * j + column;
      float x = beta * sm.k_norm[l] * products[4 * j + 2 * half];
      float y = beta * sm.k_norm[l + 1] * products[4 * j + 2 * half + 1];
      if (!scaled) {
        x *= Decay(gate.x, gate.y, sm.gate[slot][l].x, sm.gate[slot][l].y);
        y *= Decay(gate.x, gate.y, sm.gate[slot][l + 1].x, sm.gate[slot][l + 1].y);
      }
      *reinterpret_cast<float2*>(&sm.solve[i * kSolveRow + l]) =
          make_float2(l < i ? x : 0.0f, l + 1 < i ? y : 0.0f);
    }
  }
  __syncthreads();
}

template <typename T>
__device__ __forceinline__ void KeyProducts(InverseShared& sm, float (&products)[32]) {
  const uint32_t keys = SharedAddress(sm.key);
  FenceRegisters(products);
  WgmmaFence();
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const uint64_t at = PanelDescriptor(keys + k / 4 * kPanel + k % 4 * kStepK);
    WgmmaN64<T, 0, 0>(products, at, at, k > 0);
  }
  WgmmaCommit();
  WgmmaWait<0>();
  FenceRegisters(products);
}

template <typename T>
__device__ __forceinline__ void StoreInverse(const Params& p, int head, InverseShared& sm) {
  const int64_t slot = head * p.ws.inverse_slots + InverseSlot(sm.job, sm.cursor);
  uint8_t* to = static_cast<uint8_t*>(p.ws.inverses) + slot * kPanel;
#pragma unroll
  for (int i = threadIdx.x; i < 64 * 16; i += kSolveThreads) {
    const int row = i / 16, column = i % 16 * 4;
    const float4 x = *reinterpret_cast<const float4*>(&sm.solve[row * kSolveRow + column]);
    const float norm = sm.k_norm[row];  // u is wanted for keys of norm 1
    *reinterpret_cast<uint2*>(to + PanelOffset(row, column)) =
        make_uint2(Pack<T>(norm * x.x, norm * x.y), Pack<T>(norm * x.z, norm * x.w));
  }
  __syncthreads();
}

// Grid: jobs, then [windows, Hk, parts]; a block plans one job of the fused kernel, or takes the
// groups part, part + parts, ... of its window and pair.
template <typename T>
__global__ void __launch_bounds__(kSolveThreads, 6)
    InverseKernel(const __grid_constant__ Params p, int jobs, int parts) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ InverseShared sm;
  if (static_cast<int>(blockIdx.x) < jobs) {
    PlanJob<T, kSolveThreads>(p, blockIdx.x, &sm.job, &sm.norms_bad);
    return;
  }
  const int part = static_cast<int>((blockIdx.x - jobs) % parts);
  const int64_t rest = (blockIdx.x - jobs) / parts;
  const int pair = static_cast<int>(rest % p.shape.num_k_heads);
  const int window = static_cast<int>(rest / p.shape.num_k_heads);
  if (window >= p.ws.window_offset[p.num_seqs]) return;
  if (threadIdx.x == 0) {
    FillJob(p, FindOwner(p.ws.window_offset, p.num_seqs, window), pair * p.ratio, &sm.job);
    EnterWindow(sm.job, window - sm.job.window0, &sm.cursor);
  }
  __syncthreads();
  for (int group = part; group < sm.cursor.groups; group += parts) {
    if (threadIdx.x == 0) sm.cursor.group = group;
    __syncthreads();
    LoadKeys<T>(p, sm);
    const int first = pair * p.ratio, last = first + p.ratio;
    LoadFactors<T>(p, first, p.ratio < 2 ? 1 : 2, sm);
    float products[32];
    KeyProducts<T>(sm, products);
    __syncthreads();  // the keys are read, the factors there
    for (int h = first; h < last; ++h) {
      const int slot = (h - first) % 2;
      if (h > first && slot == 0) {
        LoadFactors<T>(p, h, last - h < 2 ? 1 : 2, sm);
        __syncthreads();
      }
      FormL<T>(products, slot, sm);
      SolveInPlace(sm.solve, sm.scratch, sm.job.adjacent != 0);
      StoreInverse<T>(p, h, sm);
    }
  }
#endif
}

}  // namespace
}  // namespace fused

cudaError_t LaunchInverse(const Params& p, cudaStream_t stream) {
  // About two rounds of blocks; small calls take all groups of a window at once.
  const int64_t windows = p.ws.windows * p.shape.num_k_heads;
  const int64_t jobs = p.ws.segments * p.shape.num_v_heads;
  constexpr int64_t kBlocks = 1584, kMost = kWindow / kGroup;
  const int64_t wanted = windows == 0 ? 1 : (kBlocks + windows - 1) / windows;
  const int parts = static_cast<int>(wanted < kMost ? wanted : kMost);
  const int64_t blocks = jobs + windows * parts;
  if (blocks == 0) return cudaSuccess;
  const unsigned grid = static_cast<unsigned>(blocks);
  const int job_blocks = static_cast<int>(jobs);
  if (p.q.dtype == DType::kBF16) {
    fused::InverseKernel<__nv_bfloat16>
        <<<grid, fused::kSolveThreads, 0, stream>>>(p, job_blocks, parts);
  } else {
    fused::InverseKernel<__half><<<grid, fused::kSolveThreads, 0, stream>>>(p, job_blocks, parts);
  }
  return cudaGetLastError();
}

}  // namespace sparsegdn::cuda
