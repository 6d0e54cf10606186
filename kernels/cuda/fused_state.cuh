// The state side of the fused kernel: two warpgroups walk the groups of a segment in order.
//
// Warpgroup w keeps columns [64 w, 64 w + 64) of S in fp32 registers and, per group, forms
//   W = beta (V - e^G K S),  U = T W,  S = e^{G_end} S + K^T (e^{G_end - G} U)
// or the same in the scaled frame of fused_shared.cuh, where W = beta (e^{-G} V - K
// S) and S = e^{G_end} (S + K^T U). Operands have 16 bits, sums are fp32. T comes
// from InverseKernel, so that only K S -> T W -> K^T U is serial.
#ifndef SPARSEGDN_KERNELS_CUDA_FUSED_STATE_CUH_
#define SPARSEGDN_KERNELS_CUDA_FUSED_STATE_CUH_

#include "kernels/cuda/fused_pool.cuh"
#include "kernels/cuda/fused_shared.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace sparsegdn::cuda::fused {

template <typename T>
class StateSide {
 public:
  __device__ __forceinline__ StateSide(const Params& p, Shared& sm)
      : p_(p), sm_(sm), job_(sm.job), tid_(threadIdx.x), wg_(threadIdx.x / 128) {
    row_ = tid_ % 128 / 32 * 16 + tid_ % 32 / 4;
    column_ = 2 * (tid_ % 4);
    snapshots_ = p.sequences[job_.seq].snapshot_every > 0;
  }

  __device__ __forceinline__ void Run() {
    LoadState();
    if (job_.groups > 0) {
      Prologue();
      for (int n = -1; n < job_.groups; ++n) {
        if (n >= 0) Advance(n);
        if (n + 1 < job_.groups) Prepare(n + 1);
        if (n >= job_.warm_groups) BarrierWait(&sm_.group_done, (n - job_.warm_groups) & 1);
        if (n + 1 < job_.groups) PublishState();
      }
    }
    Finish();
  }

 private:
  __device__ __forceinline__ void WarpgroupBarrier() { NamedBarrier(kBarrierGroup0 + wg_, 128); }
  __device__ __forceinline__ bool Scaled(const Factors& f) const {
    return f.before.x - f.after.x <= kScaledFrameLog2<T>;
  }
  __device__ __forceinline__ void StateBarrier() { NamedBarrier(kBarrierState, kStateThreads); }

  __device__ __forceinline__ void LoadState() {
    ReadState(p_, job_, row_, 64 * wg_ + column_, s_);
    if (!p_.states_alias || job_.segments == 1) return;
    // The last segment may write the slot that this one reads: it waits for all readers.
    __threadfence();
    StateBarrier();
    if (tid_ == 0) atomicAdd(&p_.ws.state_readers[job_.reader_slot], 1);
  }

  __device__ __forceinline__ void StoreState(float* data, int64_t slot) {
    WriteState(p_, job_, row_, 64 * wg_ + column_, data, slot, s_);
  }

  __device__ __forceinline__ void Finish() {
    bool bad = false;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int i = 0; i < 32; ++i) bad = bad || !isfinite(s_[b][i]);
    }
    // A state that is not finite at a segment's end stays so until the sequence's end.
    if (bad && p_.nonfinite != nullptr) atomicOr(&p_.nonfinite[job_.seq], 1);
    const int32_t slot = p_.sequences[job_.seq].final_slot;
    if (job_.segment + 1 != job_.segments || slot < 0) return;
    if (p_.states_alias && job_.segments > 1) {
      const volatile int* readers = &p_.ws.state_readers[job_.reader_slot];
      while (*readers < job_.segments) __nanosleep(100);
      __threadfence();
    }
    StoreState(p_.final_state.data, slot);
  }

  // Registers of the rows of the next group but one (threads 0..65), and of the next group's gates.
  __device__ __forceinline__ void FetchRows() {
    if (tid_ > 65) return;
    const Cursor& c = sm_.cursor;
    if (tid_ < 64) {
      const int e = FirstEvent(c, c.group) + tid_;
      const bool live = e < FirstEvent(c, c.group + 1) && e < c.events;
      fetched_row_ = live ? EventRow(job_, c, e) : kNoToken;
    } else {
      fetched_row_ = GroupBegin(job_, c, c.group + tid_ - 64);
    }
  }
  __device__ __forceinline__ void PutRows(int n) {
    Rows& rows = sm_.rows[n % 4];
    if (tid_ < 64) rows.token[tid_] = fetched_row_;
    if (tid_ == 64) {
      rows.begin = fetched_row_;
      rows.first = fetched_row_ == sm_.cursor.row0;
      rows.slot = InverseSlot(job_, sm_.cursor);
    }
    if (tid_ == 65) rows.end = fetched_row_;
  }
  __device__ __forceinline__ void FetchFactors(int n) {
    if (tid_ > 65) return;
    const Rows& rows = sm_.rows[n % 4];
    int row = tid_ == 64 ? rows.begin - 1 : rows.end - 1;
    if (tid_ < 64) row = rows.token[tid_];
    const bool none = row == kNoToken || (tid_ == 64 && rows.first != 0);
    fetched_gate_ = none ? make_float2(tid_ == 64 ? 0.0f : -1e30f, 0.0f) : job_.gate_sum[row];
    if (tid_ >= 64) return;
    fetched_beta_ = none ? 0.0f : job_.beta[row];
    fetched_norm_ = none ? 0.0f : 1.0f;
    if (!none && p_.normalize_qk) fetched_norm_ = p_.ws.k_norm[job_.pair * p_.num_tokens + row];
  }
  __device__ __forceinline__ void PutFactors(int n) {
    Factors& f = sm_.factors[n % 2];
    if (tid_ < 64) {
      f.token[tid_] = sm_.rows[n % 4].token[tid_];
      f.gate[tid_] = fetched_gate_;
      f.beta[tid_] = fetched_beta_;
      f.k_norm[tid_] = fetched_norm_;
      const uint32_t writes = __ballot_sync(0xffffffffu, fetched_beta_ != 0.0f);
      if (tid_ % 32 == 0) f.writes[tid_ / 32] = writes;
    }
    if (tid_ == 64) f.before = fetched_gate_;
    if (tid_ == 65) f.after = fetched_gate_;
  }

  __device__ __forceinline__ void CopyKeys(int n) {
    const Rows& rows = sm_.rows[n % 4];
    const T* from = static_cast<const T*>(p_.k.data) + job_.pair * p_.k.head_stride;
    const uint32_t to = SharedAddress(sm_.key[n % 2]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = tid_ / 16 + 16 * i, piece = tid_ % 16;
      const int token = rows.token[row];
      const bool live = token != kNoToken;
      CopyAsync16(to + piece / 8 * kPanel + PanelOffset(row, piece % 8 * 8),
                  from + (live ? token * p_.k.token_stride : 0) + piece * 8, live);
    }
  }
  __device__ __forceinline__ void CopyValues(int n) {
    const Rows& rows = sm_.rows[n % 4];
    const T* from = static_cast<const T*>(p_.v.data) + job_.head * p_.v.head_stride + 64 * wg_;
    const uint32_t to = SharedAddress(sm_.work[wg_]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = tid_ % 128 / 8 + 16 * i, piece = tid_ % 8;
      const int token = rows.token[row];
      const bool live = token != kNoToken;
      CopyAsync16(to + PanelOffset(row, piece * 8),
                  from + (live ? token * p_.v.token_stride : 0) + piece * 8, live);
    }
  }

  // Rows of the first two groups; keys, values and factors of the first.
  __device__ __forceinline__ void Prologue() {
    if (tid_ == 0) {
      EnterWindow(job_, job_.start_window, &sm_.cursor);
      sm_.cursor.group = job_.start_group;
    }
    for (int n = 0; n < 2; ++n) {
      StateBarrier();
      if (n < job_.groups) {
        FetchRows();
        PutRows(n);
      }
      StateBarrier();
      if (tid_ == 0) NextGroup(job_, &sm_.cursor);
    }
    StateBarrier();
    CopyKeys(0);
    CopyCommit();
    FetchFactors(0);
  }

  // S to shared memory in 16 bits; ends with all of the state side past the barrier.
  __device__ __forceinline__ void PublishState() {
    const uint32_t base = CellBase(sm_.state[wg_], row_, column_);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        StoreCell((base ^ (i / 4 << 4)) + (64 * b + 8 * (i / 2 % 2)) * 128,
                  Pack<T>(s_[b][i], s_[b][i + 1]));
      }
    }
    ProxyFence();
    StateBarrier();
  }

  // Starts the copy of group n's T; every warp of both warpgroups has read the one before.
  __device__ __forceinline__ void FetchInverse(int n) {
    if (tid_ != 0) return;
    const int64_t at = job_.head * p_.ws.inverse_slots + sm_.rows[n % 4].slot;
    BarrierExpect(&sm_.inverse_full, kPanel);
    CopyBytes(SharedAddress(sm_.inverse), static_cast<const uint8_t*>(p_.ws.inverses) + at * kPanel,
              kPanel, &sm_.inverse_full);
  }

  // W = beta (V - e^G K S) over V in shared memory.
  __device__ __forceinline__ void FormW(int n, float (&acc)[32]) {
    const uint32_t keys = SharedAddress(sm_.key[n % 2]), state = SharedAddress(sm_.state[wg_]);
    FenceRegisters(acc);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      WgmmaN64<T, 0, 1>(acc, PanelDescriptor(keys + k / 4 * kPanel + k % 4 * kStepK),
                        PanelDescriptor(state + k * kStepKTransposed), k > 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    FenceRegisters(acc);
    CopyWait<1>();  // V of this group; the keys of the next may still be under way
    WarpgroupBarrier();
    const Factors& f = sm_.factors[n % 2];
    const bool scaled = Scaled(f);
    const uint32_t base = CellBase(sm_.work[wg_], row_, column_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row_ + 8 * half;
      const float beta = f.beta[i];
      // e^{-G} of an empty row would overflow.
      const bool live = f.token[i] != kNoToken;
      const float2 gate = live ? f.gate[i] : f.before;
      float of_value = beta, of_state = beta * f.k_norm[i];
      if (scaled) {
        of_value *= Decay(f.before.x, f.before.y, gate.x, gate.y);
      } else {
        of_state *= Decay(gate.x, gate.y, f.before.x, f.before.y);
      }
      uint32_t values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = LoadCell((base ^ (j << 4)) + half * 1024);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 v = Unpack<T>(values[j]);
        StoreCell((base ^ (j << 4)) + half * 1024,
                  Pack<T>(of_value * v.x - of_state * acc[4 * j + 2 * half],
                          of_value * v.y - of_state * acc[4 * j + 2 * half + 1]));
      }
    }
    ProxyFence();
    WarpgroupBarrier();
  }

  // U = T W for the output side; out of the scaled frame, also with the decay to the group's end,
  // over W.
  __device__ __forceinline__ void FormU(int n, float (&acc)[32]) {
    const uint32_t inverse = SharedAddress(sm_.inverse), work = SharedAddress(sm_.work[wg_]);
    BarrierWait(&sm_.inverse_full, n & 1);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      WgmmaN64<T, 0, 1>(acc, PanelDescriptor(inverse + k * kStepK),
                        PanelDescriptor(work + k * kStepKTransposed), k > 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    FenceRegisters(acc);
    WarpgroupBarrier();  // all four warps have read W
    const Factors& f = sm_.factors[n % 2];
    const bool scaled = Scaled(f);
    const uint32_t base = CellBase(sm_.u[wg_], row_, column_);
    const uint32_t decayed = CellBase(sm_.work[wg_], row_, column_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row_ + 8 * half;
      const float norm = f.k_norm[i];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        acc[4 * j + 2 * half] *= norm;
        acc[4 * j + 2 * half + 1] *= norm;
        StoreCell((base ^ (j << 4)) + half * 1024,
                  Pack<T>(acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]));
      }
      if (scaled) continue;
      const bool live = f.token[i] != kNoToken;
      const float2 gate = live ? f.gate[i] : f.after;
      const float decay = Decay(f.after.x, f.after.y, gate.x, gate.y);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        StoreCell((decayed ^ (j << 4)) + half * 1024,
                  Pack<T>(decay * acc[4 * j + 2 * half], decay * acc[4 * j + 2 * half + 1]));
      }
    }
    ProxyFence();
    WarpgroupBarrier();
  }

  __device__ __forceinline__ void DecayState(float decay) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int i = 0; i < 32; ++i) s_[b][i] *= decay;
      FenceRegisters(s_[b]);
    }
  }
  __device__ __forceinline__ void UpdateState(int n) {
    const Factors& f = sm_.factors[n % 2];
    const float decay = Decay(f.after.x, f.after.y, f.before.x, f.before.y);
    const bool scaled = Scaled(f);
    const uint32_t keys = SharedAddress(sm_.key[n % 2]);
    const uint32_t u = SharedAddress(scaled ? sm_.u[wg_] : sm_.work[wg_]);
    if ((f.writes[0] | f.writes[1]) == 0) {  // nothing is written: -0 stays -0
      DecayState(decay);
      WarpgroupBarrier();
      return;
    }
    if (!scaled) DecayState(decay);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        WgmmaN64<T, 1, 1>(s_[b], PanelDescriptor(keys + b * kPanel + k * kStepKTransposed),
                          PanelDescriptor(u + k * kStepKTransposed), 1);
      }
    }
    WgmmaCommit();
    WgmmaWait<0>();
    FenceRegisters(s_[0]);
    FenceRegisters(s_[1]);
    if (scaled) DecayState(decay);
    WarpgroupBarrier();  // the work panel may be overwritten
  }

  __device__ __forceinline__ void TakeSnapshot(int n) {
    if (!snapshots_) return;
    const SequenceParams& s = p_.sequences[job_.seq];
    const int64_t position = job_.first_position + (sm_.rows[n % 4].end - job_.row0);
    if (position % s.snapshot_every != 0) return;
    const int64_t index = position / s.snapshot_every - job_.first_position / s.snapshot_every - 1;
    StoreState(p_.snapshots, s.snapshot_index + index);
  }

  // The serial chain of group n, whose keys, values, factors, T and published state are in place.
  __device__ __forceinline__ void Advance(int n) {
    const bool own = n >= job_.warm_groups;
    if (own) BarrierArriveWarp(&sm_.state_full);
    if (n + 1 < job_.groups) {
      CopyKeys(n + 1);
      FetchFactors(n + 1);
      if (n + 2 < job_.groups) FetchRows();
    }
    CopyCommit();
    float acc[32];
    FormW(n, acc);
    FormU(n, acc);
    if (own) BarrierArriveWarp(&sm_.u_full);
    UpdateState(n);
    if (own) TakeSnapshot(n);
    if (n + 2 < job_.groups) PutRows(n + 2);
  }

  // Values, factors and T of group n; its rows are known and its keys under way.
  __device__ __forceinline__ void Prepare(int n) {
    CopyValues(n);
    CopyCommit();
    PutFactors(n);
    CopyWait<1>();  // the keys
    ProxyFence();
    StateBarrier();
    FetchInverse(n);
    if (n > 0 && tid_ == 0) NextGroup(job_, &sm_.cursor);
  }

  const Params& p_;
  Shared& sm_;
  const Job& job_;
  int tid_, wg_;
  int row_, column_;  // of this thread in a 64-row accumulator
  bool snapshots_;
  int fetched_row_ = 0;
  float2 fetched_gate_;
  float fetched_beta_ = 0.0f, fetched_norm_ = 0.0f;
  float s_[2][32];
};

}  // namespace sparsegdn::cuda::fused

#endif  // SPARSEGDN_KERNELS_CUDA_FUSED_STATE_CUH_
