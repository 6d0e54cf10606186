// Which groups a block works on: its share of the sequence's groups, and the warm-up before them.
#ifndef SPARSEGDN_KERNELS_CUDA_FUSED_SEGMENT_CUH_
#define SPARSEGDN_KERNELS_CUDA_FUSED_SEGMENT_CUH_

#include "kernels/cuda/fused_shared.cuh"

namespace sparsegdn::cuda::fused {

__device__ __forceinline__ int WindowGroups(const Job& job, int window) {
  if (window >= job.windows) return 0;
  Cursor c;
  EnterWindow(job, window, &c);
  return c.groups;
}

struct GroupPlace {
  int window, group;
};

// The window and in-window index of group `index` of the sequence; one warp, index < total.
__device__ inline GroupPlace LocateGroup(const Job& job, int index) {
  const int lane = threadIdx.x % 32;
  for (int base = 0;; base += 32) {
    const int own = WindowGroups(job, base + lane);
    int x = own;
    for (int d = 1; d < 32; d *= 2) {
      const int y = __shfl_up_sync(0xffffffffu, x, d);
      if (lane >= d) x += y;
    }
    const unsigned past = __ballot_sync(0xffffffffu, x > index);
    if (past != 0) {
      const int owner = __ffs(past) - 1;
      const int before = __shfl_sync(0xffffffffu, x - own, owner);
      return {base + owner, index - before};
    }
    index -= __shfl_sync(0xffffffffu, x, 31);
  }
}

__device__ __forceinline__ double GateSumBefore(const Job& job, const Cursor& c, int row) {
  if (row <= c.row0) return 0.0;
  const float2 g = job.gate_sum[row - 1];
  return static_cast<double>(g.x) + static_cast<double>(g.y);
}

// Sets where the state side begins: the latest group from whose start the decay to the first own
// group is at most 2^-kWarmupLog2, else, or if that saves less than half of the way, the sequence's
// start. A lane looks at one group of a window.
template <typename T>
__device__ inline void FindWarmup(GroupPlace own, Job* job) {
  const int lane = threadIdx.x % 32;
  Cursor c;
  EnterWindow(*job, own.window, &c);
  double sum = GateSumBefore(*job, c, GroupBegin(*job, c, own.group));
  int candidates = own.group, passed = 0;
  for (;;) {
    bool enough = false;
    if (lane < candidates) {
      const double before = GateSumBefore(*job, c, GroupBegin(*job, c, lane));
      enough = sum - before <= -kWarmupLog2<T>;
    }
    const unsigned found = __ballot_sync(0xffffffffu, enough);
    if (found != 0) {
      const int group = 31 - __clz(found);
      if (2 * (passed + candidates - group) > job->first_own) break;  // not worth its check
      job->start_window = c.window;
      job->start_group = group;
      job->warm_groups = passed + candidates - group;
      job->from_start = c.window == 0 && group == 0;
      return;
    }
    passed += candidates;
    if (c.window == 0) break;
    EnterWindow(*job, c.window - 1, &c);
    sum += GateSumBefore(*job, c, c.row0 + c.rows);
    candidates = c.groups;
  }
  job->start_window = job->start_group = 0;
  job->warm_groups = job->first_own;
  job->from_start = 1;
}

// Fills job `index`, segment by segment and head by head (one warp); false where there is none.
template <typename T>
__device__ inline bool PlanSegment(const Params& p, int64_t index, Job* job) {
  const int segment_index = static_cast<int>(index / p.shape.num_v_heads);
  if (segment_index >= p.ws.segment_offset[p.num_seqs]) return false;
  Job j{};
  const int seq = FindOwner(p.ws.segment_offset, p.num_seqs, segment_index);
  FillJob(p, seq, static_cast<int>(index % p.shape.num_v_heads), &j);
  const int first_segment = p.ws.segment_offset[seq];
  j.segment = segment_index - first_segment;
  j.segments = p.ws.segment_offset[seq + 1] - first_segment;
  j.reader_slot = first_segment * p.shape.num_v_heads + j.head;
  int total = 0;
  for (int base = 0; base < j.windows; base += 32) {
    total += WarpSum(WindowGroups(j, base + static_cast<int>(threadIdx.x % 32)));
  }
  j.first_own = static_cast<int>(int64_t{j.segment} * total / j.segments);
  const int end = static_cast<int>(int64_t{j.segment + 1} * total / j.segments);
  j.groups = end - j.first_own;
  j.end_row = j.row0 + j.length;
  j.from_start = 1;
  if (end < total) {
    const GroupPlace at = LocateGroup(j, end);
    Cursor c;
    EnterWindow(j, at.window, &c);
    j.end_row = GroupBegin(j, c, at.group);
  }
  if (j.groups > 0 && j.first_own > 0) FindWarmup<T>(LocateGroup(j, j.first_own), &j);
  j.groups += j.warm_groups;
  j.active = 1;
  *job = j;
  return true;
}

// Whether beta |k|^2 <= 2 for every event of the warm-up, which its bound needs; one warp.
template <typename T>
__device__ inline bool WarmupNormsHold(const Params& p, const Job& job) {
  if (job.from_start || p.normalize_qk) return true;
  const int lane = threadIdx.x % 32;
  Cursor c;
  EnterWindow(job, job.start_window, &c);
  c.group = job.start_group;
  const T* keys = static_cast<const T*>(p.k.data) + job.pair * p.k.head_stride + lane % 8 * 16;
  bool bad = false;
  for (int n = 0; n < job.warm_groups; ++n, NextGroup(job, &c)) {
    const int first = FirstEvent(c, c.group);
    const int end = ::min(FirstEvent(c, c.group + 1), c.events);
    int row[2];
    float beta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int e = first + 32 * half + lane;
      row[half] = e < end ? EventRow(job, c, e) : -1;
      beta[half] = e < end ? job.beta[row[half]] : 0.0f;
    }
#pragma unroll 8
    for (int i = 0; i < kGroup / 4; ++i) {  // eight lanes an event
      const int from = i % 8 * 4 + lane / 8;
      const int token = __shfl_sync(0xffffffffu, i < 8 ? row[0] : row[1], from);
      const float weight = __shfl_sync(0xffffffffu, i < 8 ? beta[0] : beta[1], from);
      float sum = 0.0f;
      if (token >= 0) {
        const uint4* x = reinterpret_cast<const uint4*>(keys + token * p.k.token_stride);
        for (int j = 0; j < 2; ++j) {
          const uint4 piece = x[j];
          for (uint32_t word : {piece.x, piece.y, piece.z, piece.w}) {
            const float2 f = Unpack<T>(word);
            sum += f.x * f.x + f.y * f.y;
          }
        }
      }
      for (int d = 1; d < 8; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
      bad = bad || !(sum * weight <= 2.0f);
    }
  }
  return __ballot_sync(0xffffffffu, bad) == 0;
}

// Plans job `index` in shared memory and leaves it in the workspace; one warp.
template <typename T>
__device__ inline void PlanJob(const Params& p, int64_t index, Job* job) {
  const int lane = threadIdx.x % 32;
  const bool work = PlanSegment<T>(p, index, job);
  if (!work && lane == 0) *job = Job{};
  __syncwarp();
  if (work && !WarmupNormsHold<T>(p, *job) && lane == 0) {  // no bound: from the sequence's start
    job->groups += job->first_own - job->warm_groups;
    job->warm_groups = job->first_own;
    job->start_window = job->start_group = 0;
    job->from_start = 1;
  }
  __syncwarp();
  int* to = reinterpret_cast<int*>(static_cast<char*>(p.ws.jobs) + index * kJobBytes);
  for (int i = lane; i < static_cast<int>(sizeof(Job) / 4); i += 32) {
    to[i] = reinterpret_cast<const int*>(job)[i];
  }
}

}  // namespace sparsegdn::cuda::fused

#endif  // SPARSEGDN_KERNELS_CUDA_FUSED_SEGMENT_CUH_
