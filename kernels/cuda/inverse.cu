// T = (I + L)^-1 of every group and value head, L = tril(beta_i e^{G_i - G_l} k_i . k_l, -1): all
// that the Delta solve needs besides the state, so it runs ahead of the serial chain, on all groups
// at once. In the scaled frame (fused_shared.cuh) L has no gates.
//
// A block takes two groups of a pair at a time: K K^T of each by the warpgroup, then each warp
// solves for one head by itself (inverse_solve.cuh). Bytes a group and pair: 16 KB of keys in, 8 KB
// of T out a head; 1 MFLOP of K K^T, 0.4 MFLOP of products a head (192 mma) among about 1,300
// instructions. At two heads a pair that binds about as much as the bytes.
#include "kernels/cuda/fused_segment.cuh"
#include "kernels/cuda/fused_shared.cuh"
#include "kernels/cuda/inverse_solve.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace sparsegdn::cuda {
namespace fused {
namespace {

constexpr int kInverseThreads = 128;
constexpr int kInverseWarps = kInverseThreads / 32;
constexpr int kGroupsAtOnce = 2;

// threadIdx.x read anew, so that no address made of it is kept in a register from round to round.
[[maybe_unused]] __device__ __forceinline__ int Thread() {
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}

struct InverseShared {
  union {
    uint8_t key[kGroupsAtOnce][2][kPanel];  // until K K^T
    uint8_t inverse[kInverseWarps][kPanel];
  };
  float products[kGroupsAtOnce][kLowerBlocks * kBlockFloats];
  float factor[kInverseWarps][kGroup];
  int token[kGroupsAtOnce][kGroup];
  float k_norm[kGroupsAtOnce][kGroup];
  int begin[kGroupsAtOnce + 1];  // first owned row of the groups and of the one after them
  Job job[kInverseWarps];        // of which the groups use the first
  Cursor cursor;
};

// Rows of the groups first, first + 1, ... (`count` of them); visible after the next barrier.
template <typename T>
__device__ __forceinline__ void LoadRows(const Params& p, int first_group, InverseShared& sm) {
  const Cursor& c = sm.cursor;
  const int t = Thread(), slot = t / kGroup, i = t % kGroup, group = first_group + slot;
  int row = kNoToken;
  if (group < c.groups) {
    const int e = FirstEvent(c, group) + i;
    if (e < FirstEvent(c, group + 1) && e < c.events) row = EventRow(sm.job[0], c, e);
  }
  float norm = row == kNoToken ? 0.0f : 1.0f;
  if (row != kNoToken && p.normalize_qk) {
    norm = p.ws.k_norm[sm.job[0].pair * p.num_tokens + row];
  }
  sm.token[slot][i] = row;
  sm.k_norm[slot][i] = norm;
  if (t <= kGroupsAtOnce) {
    sm.begin[t] = GroupBegin(sm.job[0], c, ::min(first_group + t, c.groups));
  }
}

template <typename T>
__device__ __forceinline__ void LoadKeys(const Params& p, int groups, InverseShared& sm) {
  const int t = Thread();
  const T* from = static_cast<const T*>(p.k.data) + sm.job[0].pair * p.k.head_stride + t % 16 * 8;
  for (int slot = 0; slot < groups; ++slot) {
    const uint32_t to = SharedAddress(sm.key[slot][t % 16 / 8]) + PanelOffset(t / 16, t % 8 * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = sm.token[slot][t / 16 + 8 * i];
      const bool live = row != kNoToken;
      CopyAsync16(to + i * 1024, from + (live ? row * p.k.token_stride : 0), live);
    }
  }
  CopyCommit();
}

// What a warp needs for its head of a group; returns whether the group is in the scaled frame.
template <typename T>
__device__ __forceinline__ bool LoadFactors(const Params& p, int head, int slot,
                                            InverseShared& sm) {
  const int t = Thread(), lane = t % 32, warp = t / 32;
  const float2* gate_sum = p.ws.gate_sum + head * p.num_tokens;
  const float* beta = p.ws.beta + head * p.num_tokens;
  const int row0 = sm.token[slot][lane], row1 = sm.token[slot][lane + 32];
  const int last = sm.begin[slot + lane % 2] - 1;
  const float bound = last < sm.cursor.row0 ? 0.0f : gate_sum[last].x;
  const float beta0 = row0 == kNoToken ? 0.0f : beta[row0];
  const float beta1 = row1 == kNoToken ? 0.0f : beta[row1];
  sm.factor[warp][lane] = -beta0;
  sm.factor[warp][lane + 32] = -beta1;
  const float before = __shfl_sync(0xffffffffu, bound, 0);
  const float after = __shfl_sync(0xffffffffu, bound, 1);
  __syncwarp();
  return before - after <= kScaledFrameLog2<T>;
}

template <typename T>
__device__ __forceinline__ void IssueProducts(uint32_t keys, float (&products)[32]) {
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const uint64_t at = PanelDescriptor(keys + k / 4 * kPanel + k % 4 * kStepK);
    WgmmaN64<T, 0, 0>(products, at, at, k > 0);
  }
}

// K K^T of a group, with keys of norm 1, to sm.products: the blocks on and below the diagonal.
template <typename T>
__device__ __forceinline__ void StoreProducts(const float (&products)[32], int slot,
                                              InverseShared& sm) {
  const int t = Thread(), warp = t / 32, g = t % 32 / 4, m = t % 4;
  const float* norm = sm.k_norm[slot];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = g + 8 * half;
    const float own = norm[16 * warp + row];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j / 2 > warp) continue;
      const int column = j % 2 * 8 + 2 * m;
      const float2 other = *reinterpret_cast<const float2*>(norm + j / 2 * 16 + column);
      float* to = sm.products[slot] + BlockAt(warp, j / 2) + CellAt(row, column);
      *reinterpret_cast<float2*>(to) = make_float2(own * other.x * products[4 * j + 2 * half],
                                                   own * other.y * products[4 * j + 2 * half + 1]);
    }
  }
}

// Of all groups at once; one that is not there gives products of old keys, which nobody reads.
template <typename T>
__device__ __forceinline__ void KeyProducts(InverseShared& sm) {
  float first[32], second[32];
  FenceRegisters(first);
  FenceRegisters(second);
  WgmmaFence();
  IssueProducts<T>(SharedAddress(sm.key[0]), first);
  WgmmaCommit();
  IssueProducts<T>(SharedAddress(sm.key[1]), second);
  WgmmaCommit();
  WgmmaWait<1>();
  FenceRegisters(first);
  StoreProducts<T>(first, 0, sm);
  WgmmaWait<0>();
  FenceRegisters(second);
  StoreProducts<T>(second, 1, sm);
}

// Rows of T by `norm`, because u is wanted for keys of norm 1.
template <typename T>
__device__ __forceinline__ void ScaleRows(const float* norm, bool transposed, Block* b) {
  const int t = Thread(), g = t % 32 / 4, m = t % 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    b->x[i] *= norm[transposed ? 2 * m + i % 2 + i / 4 * 8 : g + i / 2 % 2 * 8];
  }
}

// Sets the blocks above the diagonal, which no solve writes, to zero.
template <typename T>
__device__ __forceinline__ void ClearUpper(uint32_t panel) {
  const int lane = Thread() % 32;
  const uint32_t zeros[4] = {};
#pragma unroll
  for (int r = 0; r < 3; ++r) {
#pragma unroll
    for (int c = r + 1; c < 4; ++c) {
      const uint32_t at = PanelOffset(16 * r + lane % 16, 16 * c + lane / 16 * 8);
      StoreMatrices<false>(panel + at, zeros);
    }
  }
}

template <typename T, bool kScaled>
__device__ __forceinline__ void SolveHead(const Params& p, int head, int group, int slot,
                                          InverseShared& sm) {
  const int t = Thread(), lane = t % 32, warp = t / 32;
  const uint32_t panel = SharedAddress(sm.inverse[warp]);
  // The leaves stand in the panel until it is written.
  const Problem problem{sm.products[slot], reinterpret_cast<float*>(sm.inverse[warp]),
                        sm.factor[warp], p.ws.gate_sum + head * p.num_tokens, sm.token[slot]};
  Solve<kScaled>(problem, sm.job[0].adjacent != 0, [&](int r, int c, Block b, bool transposed) {
    if (p.normalize_qk) ScaleRows<T>(sm.k_norm[slot] + 16 * r, transposed, &b);
    const uint32_t at = panel + PanelOffset(16 * r + lane % 16, 16 * c + lane / 16 * 8);
    const uint32_t first = Pack<T>(b.x[0], b.x[1]), last = Pack<T>(b.x[6], b.x[7]);
    const uint32_t below = Pack<T>(b.x[2], b.x[3]), right = Pack<T>(b.x[4], b.x[5]);
    if (transposed) {
      StoreMatrices<true>(at, {first, right, below, last});
    } else {
      StoreMatrices<false>(at, {first, below, right, last});
    }
  });
  ClearUpper<T>(panel);
  ProxyFence();
  __syncwarp();
  if (lane == 0) {
    Cursor c = sm.cursor;
    c.group = group;
    const int64_t at = head * p.ws.inverse_slots + InverseSlot(sm.job[0], c);
    StoreBytes(static_cast<uint8_t*>(p.ws.inverses) + at * kPanel, panel, kPanel);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}

// All heads of groups [first_group, first_group + groups) of the block's window and pair.
template <typename T>
__device__ __forceinline__ void SolveGroups(const Params& p, int first_group, int groups,
                                            InverseShared& sm) {
  const int warp = Thread() / 32;
  const int tasks = groups * p.ratio, head0 = sm.job[0].pair * p.ratio;
  LoadRows<T>(p, first_group, sm);
  __syncthreads();
  LoadKeys<T>(p, groups, sm);
  bool scaled = true;
  if (warp < tasks) {
    const int slot = warp / p.ratio;
    scaled = LoadFactors<T>(p, head0 + warp % p.ratio, slot, sm);
  }
  CopyWait<0>();
  ProxyFence();
  __syncthreads();
  KeyProducts<T>(sm);
  __syncthreads();  // the products are there, and the keys read
  for (int task = warp; task < tasks; task += kInverseWarps) {
    const int slot = task / p.ratio, head = head0 + task % p.ratio, group = first_group + slot;
    if (task != warp) {
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the panel is free
      __syncwarp();
      scaled = LoadFactors<T>(p, head, slot, sm);
    }
    if (scaled) {
      SolveHead<T, true>(p, head, group, slot, sm);
    } else {
      SolveHead<T, false>(p, head, group, slot, sm);
    }
  }
}

// Grid: blocks of jobs, then [windows, Hk, parts]; a warp plans one job of the fused kernel, or a
// block takes every parts-th couple of groups of its window and pair.
template <typename T>
__global__ void __launch_bounds__(kInverseThreads, 4)
    InverseKernel(const __grid_constant__ Params p, int jobs, int parts) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t raw[];
  InverseShared& sm = *reinterpret_cast<InverseShared*>(raw);
  WaitForPrevious();
  AllowNext();
  const int job_blocks = (jobs + kInverseWarps - 1) / kInverseWarps;
  if (static_cast<int>(blockIdx.x) < job_blocks) {
    const int warp = threadIdx.x / 32, job = static_cast<int>(blockIdx.x) * kInverseWarps + warp;
    if (job >= jobs) return;
    if (threadIdx.x % 32 == 0 && p.states_alias) p.ws.state_readers[job] = 0;
    PlanJob<T>(p, job, &sm.job[warp]);
    return;
  }
  const int part = static_cast<int>((blockIdx.x - job_blocks) % parts);
  const int64_t rest = (blockIdx.x - job_blocks) / parts;
  const int pair = static_cast<int>(rest % p.shape.num_k_heads);
  const int window = static_cast<int>(rest / p.shape.num_k_heads);
  if (window >= p.ws.window_offset[p.num_seqs]) return;
  if (threadIdx.x == 0) {
    Job job{};
    FillJob(p, FindOwner(p.ws.window_offset, p.num_seqs, window), pair * p.ratio, &job);
    Cursor cursor;
    EnterWindow(job, window - job.window0, &cursor);
    sm.job[0] = job;
    sm.cursor = cursor;
  }
  __syncthreads();
  const int all = sm.cursor.groups;
  for (int group = part * kGroupsAtOnce; group < all; group += parts * kGroupsAtOnce) {
    if (group != part * kGroupsAtOnce) {
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      __syncthreads();  // the panels are free
    }
    SolveGroups<T>(p, group, ::min(kGroupsAtOnce, all - group), sm);
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

template <typename T>
cudaError_t Launch(const Params& p, unsigned grid, int jobs, int parts, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(InverseShared));
  static_assert(4 * (kBytes + 1024) <= 233472, "four blocks of Hopper's shared memory");
  const cudaError_t error =
      cudaFuncSetAttribute(InverseKernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  return LaunchKernel(InverseKernel<T>, {grid, kInverseThreads, kBytes}, true, stream, p, jobs,
                      parts);
}

}  // namespace
}  // namespace fused

cudaError_t LaunchInverse(const Params& p, cudaStream_t stream) {
  // About three rounds of blocks; small calls take all groups of a window at once.
  const int64_t windows = p.ws.windows * p.shape.num_k_heads;
  const int64_t jobs = p.ws.segments * p.shape.num_v_heads;
  constexpr int64_t kBlocks = 1280, kMost = kWindow / kGroup / fused::kGroupsAtOnce;
  const int64_t wanted = windows == 0 ? 1 : (kBlocks + windows - 1) / windows;
  const int parts = static_cast<int>(wanted < kMost ? wanted : kMost);
  const int64_t blocks = (jobs + fused::kInverseWarps - 1) / fused::kInverseWarps + windows * parts;
  if (blocks == 0) return cudaSuccess;
  const unsigned grid = static_cast<unsigned>(blocks);
  const int job_count = static_cast<int>(jobs);
  if (p.q.dtype == DType::kBF16) {
    return fused::Launch<__nv_bfloat16>(p, grid, job_count, parts, stream);
  }
  return fused::Launch<__half>(p, grid, job_count, parts, stream);
}

}  // namespace sparsegdn::cuda
