// The state side of the fused kernel: two warpgroups walk the groups of a segment in order.
//
// Warpgroup w keeps columns [64 w, 64 w + 64) of S in fp32 registers and, per group, forms
//   L = tril(beta_i e^{G_i - G_l} k_i . k_l, -1), T = (I + L)^-1     (columns of L are shared out)
//   W = beta (V - e^G K S),  U = T W,  S = e^{G_end} S + K^T (e^{G_end - G} U)
// with the operands in 16 bits and sums in fp32. L and T of the next group are formed before the
// output side is waited for, so that only K S -> T W -> K^T U is serial.
#ifndef SPARSEGDN_KERNELS_CUDA_FUSED_STATE_CUH_
#define SPARSEGDN_KERNELS_CUDA_FUSED_STATE_CUH_

#include "kernels/cuda/fused_solve.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace sparsegdn::cuda::fused {

template <typename T>
class StateSide {
 public:
  __device__ __forceinline__ StateSide(const Params& p, Shared& sm)
      : p_(p), sm_(sm), job_(sm.job), tid_(threadIdx.x), wg_(threadIdx.x / 128) {
    row_ = tid_ % 128 / 32 * 16 + tid_ % 32 / 4;
    column_ = 2 * (tid_ % 4);
  }

  __device__ __forceinline__ void Run() {
    LoadState();
    if (job_.groups > 0) {
      Prologue();
      for (int n = 0; n < job_.groups; ++n) Group(n);
    }
    Finish();
  }

 private:
  __device__ __forceinline__ void WarpgroupBarrier() { NamedBarrier(kBarrierGroup0 + wg_, 128); }
  __device__ __forceinline__ void StateBarrier() { NamedBarrier(kBarrierState, kStateThreads); }

  // Element offsets of s_[b][4 j + 2 half + e] in a state [128, 128].
  __device__ __forceinline__ int64_t StateOffset(int b, int j, int half, bool value_major) const {
    const int row = 64 * b + row_ + 8 * half, column = 64 * wg_ + 8 * j + column_;
    return value_major ? column * kDim + row : row * kDim + column;
  }
  __device__ __forceinline__ float* StateBase(float* data, int64_t slot) const {
    return data + (slot * p_.shape.num_v_heads + job_.head) * int64_t{kDim * kDim};
  }

  __device__ __forceinline__ void LoadState() {
    const int32_t slot = p_.sequences[job_.seq].initial_slot;
    const bool read = job_.from_start && slot >= 0;
    const bool value_major = p_.initial_state.value_major;
    const float* from = read ? StateBase(p_.initial_state.data, slot) : nullptr;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int64_t at =
            StateOffset(b, i / 4, i / 2 % 2, value_major) + (i % 2) * (value_major ? kDim : 1);
        s_[b][i] = read ? from[at] : 0.0f;
      }
    }
    if (!p_.states_alias || job_.segments == 1) return;
    // The last segment may write the slot that this one reads: it waits for all readers.
    __threadfence();
    StateBarrier();
    if (tid_ == 0) atomicAdd(&p_.ws.state_readers[job_.reader_slot], 1);
  }

  __device__ __forceinline__ void StoreState(float* data, int64_t slot) {
    float* to = StateBase(data, slot);
    const bool value_major = p_.final_state.value_major;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        float* at = to + StateOffset(b, i / 4, i / 2 % 2, value_major);
        if (value_major) {
          at[0] = s_[b][i];
          at[kDim] = s_[b][i + 1];
        } else {
          *reinterpret_cast<float2*>(at) = make_float2(s_[b][i], s_[b][i + 1]);
        }
      }
    }
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
    if (tid_ < 64) {
      const int e = FirstEvent(cursor_, cursor_.group) + tid_;
      const bool live = e < FirstEvent(cursor_, cursor_.group + 1) && e < cursor_.events;
      fetched_row_ = live ? EventRow(p_, job_, cursor_, e) : kNoToken;
    } else {
      fetched_row_ = GroupBegin(p_, job_, cursor_, cursor_.group + tid_ - 64);
    }
  }
  __device__ __forceinline__ void PutRows(int n) {
    Rows& rows = sm_.rows[n % 4];
    if (tid_ < 64) rows.token[tid_] = fetched_row_;
    if (tid_ == 64) {
      rows.begin = fetched_row_;
      rows.first = fetched_row_ == cursor_.row0;
    }
    if (tid_ == 65) rows.end = fetched_row_;
  }
  __device__ __forceinline__ void FetchFactors(int n) {
    if (tid_ > 65) return;
    const Rows& rows = sm_.rows[n % 4];
    int row = tid_ == 64 ? rows.begin - 1 : rows.end - 1;
    if (tid_ < 64) row = rows.token[tid_];
    const bool none = row == kNoToken || (tid_ == 64 && rows.first != 0);
    const int64_t at = job_.head * p_.num_tokens + row;
    fetched_gate_ = none ? make_float2(tid_ == 64 ? 0.0f : -1e30f, 0.0f) : p_.ws.gate_sum[at];
    if (tid_ >= 64) return;
    fetched_beta_ = none ? 0.0f : p_.ws.beta[at];
    fetched_norm_ = none ? 0.0f : 1.0f;
    if (!none && p_.normalize_qk) fetched_norm_ = p_.ws.k_norm[job_.pair * p_.num_tokens + row];
  }
  __device__ __forceinline__ void PutFactors(int n) {
    Factors& f = sm_.factors[n % 2];
    if (tid_ < 64) {
      f.event[tid_] = {fetched_gate_.x, fetched_gate_.y, sm_.rows[n % 4].token[tid_],
                       fetched_norm_};
      f.beta[tid_] = fetched_beta_;
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

  __device__ __forceinline__ void Prologue() {
    EnterWindow(p_, job_, job_.start_window, &cursor_);
    cursor_.group = job_.start_group;
    for (int n = 0; n < 2; ++n) {
      if (n < job_.groups) {
        FetchRows();
        PutRows(n);
      }
      NextGroup(p_, job_, &cursor_);
    }
    StateBarrier();
    CopyKeys(0);
    CopyCommit();
    CopyValues(0);
    CopyCommit();
    FetchFactors(0);
    PutFactors(0);
    CopyWait<1>();
    ProxyFence();
    StateBarrier();
    FormInverse(0);
    PublishState();
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

  // T of group n, from keys and factors that every thread can see. Ends without a barrier.
  __device__ __forceinline__ void FormInverse(int n) {
    float products[16];
    const uint32_t keys = SharedAddress(sm_.key[n % 2]);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t at = keys + k / 4 * kPanel + k % 4 * kStepK;
      WgmmaN32<T, 0, 0>(products, PanelDescriptor(at), PanelDescriptor(at + wg_ * 32 * 128), k > 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    FenceRegisters(products);
    const Factors& f = sm_.factors[n % 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row_ + 8 * half;
      const Event at = f.event[i];
      const float beta = f.beta[i] * at.k_norm;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int l = 32 * wg_ + 8 * j + column_ + e;
          const Event from = f.event[l];
          const float decay = Decay(at.gate_high, at.gate_low, from.gate_high, from.gate_low);
          x[e] = l < i ? beta * from.k_norm * decay * products[4 * j + 2 * half + e] : 0.0f;
        }
        *reinterpret_cast<float2*>(&sm_.solve[i * kSolveRow + 32 * wg_ + 8 * j + column_]) =
            make_float2(x[0], x[1]);
      }
    }
    StateBarrier();
    SolveInPlace(sm_.solve, sm_.scratch, job_.adjacent, tid_);
#pragma unroll
    for (int i = tid_; i < 64 * 16; i += kStateThreads) {
      const int row = i / 16, column = i % 16 * 4;
      const float4 x = *reinterpret_cast<const float4*>(&sm_.solve[row * kSolveRow + column]);
      *reinterpret_cast<uint2*>(sm_.inverse + PanelOffset(row, column)) =
          make_uint2(Pack<T>(x.x, x.y), Pack<T>(x.z, x.w));
    }
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
    const uint32_t base = CellBase(sm_.work[wg_], row_, column_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row_ + 8 * half;
      const Event at = f.event[i];
      const float beta = f.beta[i];
      const float decay = at.k_norm * Decay(at.gate_high, at.gate_low, f.before.x, f.before.y);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t cell = (base ^ (j << 4)) + half * 1024;
        const float2 v = Unpack<T>(LoadCell(cell));
        StoreCell(cell, Pack<T>(beta * (v.x - decay * acc[4 * j + 2 * half]),
                                beta * (v.y - decay * acc[4 * j + 2 * half + 1])));
      }
    }
    ProxyFence();
    WarpgroupBarrier();
  }

  // U = T W, to the output side as it is and over W with the decay to the group's end.
  __device__ __forceinline__ void FormU(int n, float (&acc)[32]) {
    const uint32_t inverse = SharedAddress(sm_.inverse), work = SharedAddress(sm_.work[wg_]);
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
    const uint32_t u = SharedAddress(sm_.u[wg_]);
    uint32_t base = PanelOffset(row_, column_);
    asm volatile("" : "+r"(base));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row_ + 8 * half;
      const Event at = f.event[i];
      const float decay = at.token == kNoToken
                              ? 0.0f
                              : at.k_norm * Decay(f.after.x, f.after.y, at.gate_high, at.gate_low);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float x = acc[4 * j + 2 * half], y = acc[4 * j + 2 * half + 1];
        const uint32_t offset = (base ^ (j << 4)) + half * 1024;
        StoreCell(u + offset, Pack<T>(x, y));
        StoreCell(work + offset, Pack<T>(decay * x, decay * y));
      }
    }
    ProxyFence();
    WarpgroupBarrier();
  }

  __device__ __forceinline__ void UpdateState(int n) {
    const Factors& f = sm_.factors[n % 2];
    const float decay = Decay(f.after.x, f.after.y, f.before.x, f.before.y);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int i = 0; i < 32; ++i) s_[b][i] *= decay;
      FenceRegisters(s_[b]);
    }
    const uint32_t keys = SharedAddress(sm_.key[n % 2]), work = SharedAddress(sm_.work[wg_]);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        WgmmaN64<T, 1, 1>(s_[b], PanelDescriptor(keys + b * kPanel + k * kStepKTransposed),
                          PanelDescriptor(work + k * kStepKTransposed), 1);
      }
    }
    WgmmaCommit();
    WgmmaWait<0>();
    FenceRegisters(s_[0]);
    FenceRegisters(s_[1]);
    WarpgroupBarrier();  // the work panel may be overwritten
  }

  __device__ __forceinline__ void TakeSnapshot(int n) {
    const SequenceParams& s = p_.sequences[job_.seq];
    if (s.snapshot_every <= 0) return;
    const int64_t position = job_.first_position + (sm_.rows[n % 4].end - job_.row0);
    if (position % s.snapshot_every != 0) return;
    const int64_t index = position / s.snapshot_every - job_.first_position / s.snapshot_every - 1;
    StoreState(p_.snapshots, s.snapshot_index + index);
  }

  // Keys, values, factors, T and the published state of group n are in place.
  __device__ __forceinline__ void Group(int n) {
    const bool own = n >= job_.warm_groups, more = n + 1 < job_.groups;
    if (own) BarrierArriveWarp(&sm_.state_full);
    if (more) {
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
    if (more) {
      CopyValues(n + 1);
      PutFactors(n + 1);
      if (n + 2 < job_.groups) PutRows(n + 2);
    }
    NextGroup(p_, job_, &cursor_);
    CopyCommit();
    if (more) {
      CopyWait<1>();  // the keys of the next group
      ProxyFence();
      StateBarrier();
      FormInverse(n + 1);
    }
    if (own) BarrierWait(&sm_.group_done, (n - job_.warm_groups) & 1);
    if (more) PublishState();
  }

  const Params& p_;
  Shared& sm_;
  const Job& job_;
  int tid_, wg_;
  int row_, column_;  // of this thread in a 64-row accumulator
  Cursor cursor_;     // two groups ahead
  int fetched_row_ = 0;
  float2 fetched_gate_;
  float fetched_beta_ = 0.0f, fetched_norm_ = 0.0f;
  float s_[2][32];
};

}  // namespace sparsegdn::cuda::fused

#endif  // SPARSEGDN_KERNELS_CUDA_FUSED_STATE_CUH_
