// Shared memory of the fused kernel and what one block works on.
#ifndef SPARSEGDN_KERNELS_CUDA_FUSED_SHARED_CUH_
#define SPARSEGDN_KERNELS_CUDA_FUSED_SHARED_CUH_

#include <cuda.h>

#include "kernels/cuda/device_common.cuh"
#include "kernels/cuda/panel.cuh"

namespace sparsegdn::cuda::fused {

inline constexpr int kDim = 128;            // Dk and Dv
inline constexpr int kStateThreads = 256;   // two warpgroups, 64 columns of the state each
inline constexpr int kOutputThreads = 256;  // two warpgroups, a tile of 64 tokens each
inline constexpr int kThreads = kStateThreads + kOutputThreads;
inline constexpr int kTile = 64;                // tokens
inline constexpr int kWarpRows = 16;            // of them a warp's share
inline constexpr int kPanel = 64 * 128;         // bytes of a panel of 64 rows
inline constexpr int kStatePanel = kDim * 128;  // bytes of a panel of 128 rows
inline constexpr int kNoToken = 0x7fffffff;
// A segment may start from zero where the decay since is 2^-kWarmupLog2 or less: then the state it
// drops, multiplied by factors of norm <= 1 (beta |k|^2 <= 2) and by that decay, is below 1/128 of
// the rounding step of its largest element in the 16-bit type, in which every group reads the
// state.
template <typename T>
inline constexpr double kWarmupLog2 = std::is_same_v<T, __half> ? 19.0 : 16.0;

// A group may run in the frame u'' = e^{-G} u (G from the group's start) while e^{-G} stays this
// far inside the range of the 16-bit type. Then no product of pairs of tokens needs an exponential:
//   u'' = beta (e^{-G} v - S_B^T k) - sum beta (k . k) u'',   S_next = e^{G_end} (S_B + K^T U''),
//   o_t = e^{G_t} (S_B^T q_t + sum (q_t . k_i) u''_i)
// Otherwise the factors e^{G_i - G_l} are applied pair by pair.
template <typename T>
inline constexpr float kScaledFrameLog2 = std::is_same_v<T, __half> ? 8.0f : 96.0f;

// Named barriers (0 is __syncthreads). One for the state side, one for each warpgroup.
inline constexpr int kBarrierState = 1;
inline constexpr int kBarrierGroup0 = 2;

// How the copy engine sees q, k, v and o: [2, num_tokens, heads, 64], the first dimension the
// halves of a head's elements, in boxes of one head and kTile (q, k) or kWarpRows (v, o) tokens.
struct TileMaps {
  CUtensorMap q, k, v, o, v_tile;  // v_tile: v in boxes of kTile tokens
};

// What both sides read of a group while it is current. Two slots. Gate sums are high + low parts in
// log2 units and run within the window. Past the last event: kNoToken, -1e30, 0, 0.
struct alignas(16) Factors {
  int token[kGroup];  // rows of the pack
  float2 gate[kGroup];
  float of_value[kGroup], of_state[kGroup];  // W = of_value V - of_state K S
  float k_norm[kGroup];
  float to_end[kGroup];  // decay from the event to the group's end
  float2 before, after;  // gate sums before the first and through the last owned token
  float decay;           // of the group
  int scaled;            // the group is in the scaled frame
  uint32_t writes[2];    // which of the events have beta != 0
};

static_assert(offsetof(Factors, gate) % 16 == 0, "gates are read two at a time");

// Gate sums and beta of a tile, from the 16-byte boundary before its first row on.
struct alignas(16) TileGates {
  float2 gate[kTile + 2];
  float beta[kTile + 4];
};

// Rows of a group; a ring of four, because keys are fetched one group ahead and rows two.
struct Rows {
  int token[kGroup];
  int begin, end;
  int first;  // the window's first group
  int slot;   // of T, among the head's
};

// One value head of one time segment of one sequence.
struct Job {
  int seq, head, pair;
  int row0, length;  // of the sequence in the pack
  int64_t first_position, snapshot_every;
  int window0;  // index of the sequence's first window among all windows
  int windows;
  int dense, self_term, adjacent, cut64;  // cut64: dense groups end at multiples of 64
  int segment, segments, reader_slot;
  int start_window, start_group;  // where the state side begins
  int warm_groups, groups;        // groups without output, and in all
  int first_own;                  // index of the first own group in the sequence
  int end_row;                    // after the last owned token
  int from_start;                 // begins with the sequence's own initial state
  int active;                     // there is such a segment
  const float2* gate_sum;         // of the head, by row of the pack
  const float* beta;
  const void *keys, *values;    // of the pair and of the head, from row 0 of the pack on
  const uint16_t* event_rows;   // of the pair, by row of the pack
  const int32_t* event_counts;  // of the pair, by window of the sequence
};

static_assert(sizeof(Job) % 4 == 0 && sizeof(Job) <= kJobBytes);

// Row `token` of a tensor of 16-bit elements, whose strides FusedSupports keeps below 2^31 bytes.
template <typename T>
__device__ __forceinline__ const T* RowOf(const T* row0, int token, const ConstTensorRef& x) {
  const uint64_t bytes = uint64_t{static_cast<uint32_t>(token)} *
                         static_cast<uint32_t>(static_cast<uint32_t>(x.token_stride) * 2);
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(row0) + bytes);
}

__device__ __forceinline__ const void* HeadStart(const ConstTensorRef& x, int head) {
  return static_cast<const uint16_t*>(x.data) + head * x.head_stride;
}

// What both kernels know of a sequence: everything of the job but its segment.
__device__ __forceinline__ void FillJob(const Params& p, int seq, int head, Job* j) {
  const SequenceParams& s = p.sequences[seq];
  j->seq = seq;
  j->head = head;
  j->pair = head / p.ratio;
  j->row0 = p.cu_seqlens[seq];
  j->length = p.cu_seqlens[seq + 1] - j->row0;
  j->first_position = s.first_position;
  j->window0 = p.ws.window_offset[seq];
  j->windows = p.ws.window_offset[seq + 1] - j->window0;
  j->dense = IsDense(p, seq);
  j->snapshot_every = s.snapshot_every;
  j->cut64 = j->dense && s.snapshot_every > 0;
  j->self_term = !j->dense && s.budget.local == LocalTerm::kSelf;
  j->adjacent = s.budget.solver == Solver::kBlockAdjacent;
  j->gate_sum = p.ws.gate_sum + head * p.num_tokens;
  j->beta = p.ws.beta + head * p.num_tokens;
  j->keys = HeadStart(p.k, j->pair);
  j->values = HeadStart(p.v, head);
  j->event_rows = p.ws.events + j->pair * p.num_tokens;
  j->event_counts = p.ws.event_count + j->pair * p.ws.windows + j->window0;
}

// A walk over the groups of one head pair.
struct Cursor {
  int window, group, groups;  // position, and groups of this window
  int row0, rows, events, shift;
};

struct __align__(1024) Shared {
  // Group n is in slot n % 2 (keys: n % 3), so that the state side may be a group ahead.
  uint8_t state[2][2][kStatePanel];  // S_B^T, [half of Dk], rows are Dv
  uint8_t key[3][2][kPanel];         // [half of Dk], rows are events
  uint8_t u[2][kStatePanel];         // V by parts (fused_state.cuh), then U^T: rows are Dv
  uint8_t inverse[kPanel];           // T
  uint8_t tile[2][2][2][kPanel];     // [output warpgroup][q, v or o][half]
  TileGates gates[2][2];             // [output warpgroup][parity of its tile]
  Factors factors[2];
  Rows rows[4];
  Job job;
  Cursor cursor[2];  // of the state side, two groups ahead of group n in slot n % 2
  // Of the own group m in slot m % 2: S_B, keys and factors are there; U is; all outputs are
  // formed.
  uint64_t state_full[2], u_full[2], group_done[2];
  uint64_t inverse_full, inverse_read;  // T is there; every warp has read it
  uint64_t queries_full[2];             // of an output warpgroup's tile
  uint64_t values_full[2][4];           // of a warp's rows of it
};
static_assert(sizeof(Shared) <= 232448, "one block of Hopper's shared memory");

__device__ __forceinline__ void EnterWindow(const Job& job, int window, Cursor* c) {
  const int64_t first = job.first_position;
  const int64_t start = (first / kWindow + window) * kWindow;
  const int64_t low = start > first ? start : first;
  const int64_t last = first + job.length;
  const int64_t high = start + kWindow < last ? start + kWindow : last;
  c->window = window;
  c->group = 0;
  c->row0 = job.row0 + static_cast<int>(low - first);
  c->rows = static_cast<int>(high - low);
  c->shift = job.cut64 ? static_cast<int>(low % kGroup) : 0;
  c->events = job.dense ? c->rows : job.event_counts[window];
  const int groups = (c->events + c->shift + 63) / 64;
  c->groups = groups > 0 ? groups : 1;
}

__device__ __forceinline__ void NextGroup(const Job& job, Cursor* c) {
  if (++c->group == c->groups && c->window + 1 < job.windows) {
    EnterWindow(job, c->window + 1, c);
  }
}

// Place of the group's T among those of its head: a window of n rows has at most n / 64 + 2 groups.
__device__ __forceinline__ int InverseSlot(const Job& job, const Cursor& c) {
  return c.row0 / kTile + 2 * (job.window0 + c.window) + c.group;
}

__device__ __forceinline__ int EventRow(const Job& job, const Cursor& c, int e) {
  return c.row0 + (job.dense ? e : job.event_rows[c.row0 + e]);
}
__device__ __forceinline__ int FirstEvent(const Cursor& c, int group) {
  const int e = 64 * group - c.shift;
  return e > 0 ? e : 0;
}
// First owned row of group `group` of the cursor's window; its end for group == groups.
__device__ __forceinline__ int GroupBegin(const Job& job, const Cursor& c, int group) {
  if (group == 0) return c.row0;
  if (group >= c.groups) return c.row0 + c.rows;
  return EventRow(job, c, FirstEvent(c, group));
}

}  // namespace sparsegdn::cuda::fused

#endif  // SPARSEGDN_KERNELS_CUDA_FUSED_SHARED_CUH_
