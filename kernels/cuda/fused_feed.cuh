// What the state side of the fused kernel brings in: rows, factors, keys, values and T of its
// groups.
//
// Keys come one group ahead and rows two, by cp.async; values within the group, each warp its own
// part; T by the copy engine.
#ifndef SPARSEGDN_KERNELS_CUDA_FUSED_FEED_CUH_
#define SPARSEGDN_KERNELS_CUDA_FUSED_FEED_CUH_

#include "kernels/cuda/fused_shared.cuh"

namespace sparsegdn::cuda::fused {

template <typename T>
class StateFeed {
 protected:
  __device__ __forceinline__ StateFeed(const Params& p, Shared& sm)
      : p_(p), sm_(sm), job_(sm.job) {}

  // Read anew where they are needed: what the optimiser derives from them would fill the registers.
  static __device__ __forceinline__ unsigned Thread() {
    unsigned x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
  }
  __device__ __forceinline__ void StateBarrier() { NamedBarrier(kBarrierState, kStateThreads); }

  // What is fetched for a later group and put into shared memory once that is free: rows of the
  // next group but one by threads 0..65, gates and factors of the next by threads 128..191.
  struct Fetched {
    int row, slot, first;
    float2 gate, before, after;
    float beta, norm;
  };

  __device__ __forceinline__ void FetchRows(int n, Fetched* f) const {
    const unsigned tid = Thread();
    if (tid > 65) return;
    const Cursor& c = sm_.cursor[n % 2];
    if (tid < 64) {
      const int e = FirstEvent(c, c.group) + tid;
      const bool live = e < FirstEvent(c, c.group + 1) && e < c.events;
      f->row = live ? EventRow(job_, c, e) : kNoToken;
    } else {
      f->row = GroupBegin(job_, c, c.group + tid - 64);
      f->first = f->row == c.row0;
      f->slot = InverseSlot(job_, c);
    }
  }
  __device__ __forceinline__ void PutRows(int n, const Fetched& f) {
    const unsigned tid = Thread();
    Rows& rows = sm_.rows[n % 4];
    if (tid < 64) rows.token[tid] = f.row;
    if (tid == 64) {
      rows.begin = f.row;
      rows.first = f.first;
      rows.slot = f.slot;
    }
    if (tid == 65) rows.end = f.row;
  }
  // The cursor of the group after the one in slot n % 2, in the other slot.
  __device__ __forceinline__ void MoveCursor(int n) {
    if (Thread() != kStateThreads - 32) return;  // its warp fetches neither rows nor factors
    Cursor c = sm_.cursor[n % 2];
    NextGroup(job_, &c);
    sm_.cursor[(n + 1) % 2] = c;
  }

  __device__ __forceinline__ void FetchFactors(int n, Fetched* f) const {
    const unsigned tid = Thread() - 128;  // not the warps of FetchRows
    if (tid >= 64) return;
    const Rows& rows = sm_.rows[n % 4];
    const int row = rows.token[tid];
    const bool none = row == kNoToken;
    f->before = rows.first != 0 ? make_float2(0.0f, 0.0f) : job_.gate_sum[rows.begin - 1];
    f->after = job_.gate_sum[rows.end - 1];
    f->gate = none ? make_float2(-1e30f, 0.0f) : job_.gate_sum[row];
    f->beta = none ? 0.0f : job_.beta[row];
    f->norm = none ? 0.0f : 1.0f;
    if (!none && p_.normalize_qk) f->norm = p_.ws.k_norm[job_.pair * p_.num_tokens + row];
  }
  __device__ __forceinline__ void PutFactors(int n, const Fetched& fetched) {
    const unsigned tid = Thread() - 128;
    if (tid >= 64) return;
    Factors& f = sm_.factors[n % 2];
    const int token = sm_.rows[n % 4].token[tid];
    const bool scaled = fetched.before.x - fetched.after.x <= kScaledFrameLog2<T>;
    // e^{-G} of an empty row would overflow.
    const bool live = token != kNoToken;
    const float2 before = fetched.before, after = fetched.after;
    const float2 gate = live ? fetched.gate : before;
    const float2 last = live ? fetched.gate : after;
    const float to_start = Decay(before.x, before.y, gate.x, gate.y);
    const float from_start = Decay(gate.x, gate.y, before.x, before.y);
    f.token[tid] = token;
    f.gate[tid] = fetched.gate;
    f.of_value[tid] = fetched.beta * (scaled ? to_start : 1.0f);
    f.of_state[tid] = fetched.beta * fetched.norm * (scaled ? 1.0f : from_start);
    f.k_norm[tid] = fetched.norm;
    f.to_end[tid] = Decay(after.x, after.y, last.x, last.y);
    const uint32_t writes = __ballot_sync(0xffffffffu, fetched.beta != 0.0f);
    if (tid % 32 == 0) f.writes[tid / 32] = writes;
    if (tid == 0) {
      f.before = before;
      f.after = after;
      f.scaled = scaled;
      f.decay = Decay(after.x, after.y, before.x, before.y);
    }
  }

  __device__ __forceinline__ void CopyKeys(int n) {
    const unsigned tid = Thread(), piece = tid % 16;
    const int* tokens = sm_.rows[n % 4].token + tid / 16;
    const T* from = static_cast<const T*>(job_.keys) + piece * 8;
    const uint32_t to =
        HiddenAddress(sm_.key[n % 3]) + piece / 8 * kPanel + PanelOffset(tid / 16, piece % 8 * 8);
    int token[4];  // all of them first: a copy would hold the next load back
#pragma unroll
    for (int i = 0; i < 4; ++i) token[i] = tokens[16 * i];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool live = token[i] != kNoToken;
      CopyAsync16(to + i * (16 * 128), RowOf(from, live ? token[i] : 0, p_.k), live);
    }
  }

  // A warp's part of V, [64 tokens, 16 of Dv], stands in the 2 KB that its rows of U^T take later.
  __device__ __forceinline__ uint32_t OwnPart(int n) const {
    const unsigned tid = Thread();
    return HiddenAddress(sm_.u[n % 2]) + tid / 32 * (16 * 128);
  }
  // Of 32 bytes a token, 16 for each half; the swizzle keeps ldmatrix free of bank conflicts.
  static __device__ __forceinline__ uint32_t ValueOffset(int token, int half) {
    return token * 32 + ((half ^ (token >> 2 & 1)) << 4);
  }
  __device__ __forceinline__ void CopyValues(int n) {
    const unsigned tid = Thread();
    const unsigned lane = tid % 32;
    const int* tokens = sm_.rows[n % 4].token + lane / 2;
    const T* from = static_cast<const T*>(job_.values) + tid / 32 * 16 + lane % 2 * 8;
    const uint32_t to = OwnPart(n) + ValueOffset(lane / 2, lane % 2);
    int token[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) token[i] = tokens[16 * i];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool live = token[i] != kNoToken;
      CopyAsync16(to + i * (16 * 32), RowOf(from, live ? token[i] : 0, p_.v), live);
    }
  }

  __device__ __forceinline__ const uint8_t* Inverse(int n) const {
    const int64_t at = job_.head * p_.ws.inverse_slots + sm_.rows[n % 4].slot;
    return static_cast<const uint8_t*>(p_.ws.inverses) + at * kPanel;
  }
  // Starts the copy of group n's T once all warps have read the one before (thread 0 alone).
  __device__ __forceinline__ void FetchInverse(int n) {
    if (Thread() != 0) return;
    if (n > 0) BarrierWait(&sm_.inverse_read, (n - 1) & 1);
    BarrierExpect(&sm_.inverse_full, kPanel);
    CopyBytes(SharedAddress(sm_.inverse), Inverse(n), kPanel, &sm_.inverse_full);
  }
  __device__ __forceinline__ void PrefetchInverse(int n) const {
    if (Thread() == 0) PrefetchBytes(Inverse(n), kPanel);
  }

  const Params& p_;
  Shared& sm_;
  const Job& job_;
};

}  // namespace sparsegdn::cuda::fused

#endif  // SPARSEGDN_KERNELS_CUDA_FUSED_FEED_CUH_
