// The state side of the fused kernel: two warpgroups walk the groups of a segment in order.
//
// Warpgroup w keeps S^T, rows [64 w, 64 w + 64) of Dv by 128 of Dk, in fp32 registers and, per
// group, forms
//   W = beta (V - e^G K S),  U = T W,  S = e^{G_end} S + K^T (e^{G_end - G} U)
// or the same in the scaled frame of fused_shared.cuh, where W = beta (e^{-G} V - K S) and
// S = e^{G_end} (S + K^T U), all of it transposed: a product's accumulators are then the next one's
// A operand as they stand, and the serial chain K S -> T W -> K^T U never leaves the registers but
// for S itself, which the output side reads too. Operands have 16 bits, sums are fp32. T comes from
// InverseKernel.
#ifndef SPARSEGDN_KERNELS_CUDA_FUSED_STATE_CUH_
#define SPARSEGDN_KERNELS_CUDA_FUSED_STATE_CUH_

#include "kernels/cuda/fused_feed.cuh"
#include "kernels/cuda/fused_pool.cuh"
#include "kernels/cuda/fused_shared.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace sparsegdn::cuda::fused {

template <typename T>
class StateSide : private StateFeed<T> {
  using Base = StateFeed<T>;
  using Base::CopyKeys;
  using Base::CopyValues;
  using Base::FetchFactors;
  using Base::FetchInverse;
  using Base::FetchRows;
  using Base::job_;
  using Base::MoveCursor;
  using Base::OwnPart;
  using Base::p_;
  using Base::PutFactors;
  using Base::PutRows;
  using Base::sm_;
  using Base::StateBarrier;
  using Base::Thread;
  using Base::ValueOffset;

 public:
  __device__ __forceinline__ StateSide(const Params& p, Shared& sm) : Base(p, sm) {}

  __device__ __forceinline__ void Run() {
    LoadState();
    if (job_.groups > 0) {
      Prologue();
      for (int n = -1; n < job_.groups; ++n) {
        if (n >= 0) Advance(n);
        if (n + 1 < job_.groups) Begin(n + 1);
      }
    }
    Finish();
  }

 private:
  // This thread's first cell of a 128-row, in 64-row halves: row of Dv, and column.
  static __device__ __forceinline__ int Row(int thread) {
    return thread / 32 * 16 + thread % 32 / 4;
  }
  static __device__ __forceinline__ int Column(int thread) { return 2 * (thread % 4); }

  __device__ __forceinline__ void LoadState() {
    ReadState(p_, job_, Row(Thread()), Column(Thread()), s_);
    if (!p_.states_alias || job_.segments == 1) return;
    // The last segment may write the slot that this one reads: it waits for all readers.
    __threadfence();
    StateBarrier();
    if (Thread() == 0) atomicAdd(&p_.ws.state_readers[job_.reader_slot], 1);
  }

  __device__ __forceinline__ void StoreState(float* data, int64_t slot) {
    WriteState(p_, job_, Row(Thread()), Column(Thread()), data, slot, s_);
  }

  __device__ __forceinline__ void Finish() {
    bool bad = false;
#pragma unroll
    for (int i = 0; i < 64; ++i) bad = bad || !isfinite(s_[i]);
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

  // Rows of the first two groups; keys, values and factors of the first.
  __device__ __forceinline__ void Prologue() {
    const int tid = Thread();
    if (tid == 0) {
      Cursor c;
      EnterWindow(job_, job_.start_window, &c);
      c.group = job_.start_group;
      sm_.cursor[0] = c;
    }
    StateBarrier();
    for (int n = 0; n < 2; ++n) {
      FetchRows(n, &fetched_);
      if (n < job_.groups) PutRows(n, fetched_);
      MoveCursor(n);
      StateBarrier();
    }
    CopyKeys(0);
    CopyCommit();
    CopyValues(0);
    CopyCommit();
    FetchFactors(0, &fetched_);
  }

  // S^T to shared memory in 16 bits.
  __device__ __forceinline__ void StoreStart(int n) {
    const int tid = Thread();
    const uint32_t base = CellBase(sm_.state[n % 2][0], Row(tid), Column(tid));
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
      StoreCell((base ^ (i % 32 / 4 << 4)) + i / 32 * kStatePanel + i / 2 % 2 * 1024,
                Pack<T>(s_[i], s_[i + 1]));
    }
  }

  // acc = (K S)^T.
  __device__ __forceinline__ void ApplyState(int n, float (&acc)[32]) {
    const uint32_t keys = UniformAddress(sm_.key[n % 3]);
    const uint32_t state = UniformAddress(sm_.state[n % 2][0] + Thread() / 128 * (64 * 128));
    FenceRegisters(acc);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      WgmmaN64<T, 0, 0>(acc, PanelDescriptor(state + k / 4 * kStatePanel + k % 4 * kStepK),
                        PanelDescriptor(keys + k / 4 * kPanel + k % 4 * kStepK), k > 0);
    }
    WgmmaCommit();
    CopyWait<1>();  // V of this group; the keys of the next may still be under way
    __syncwarp();
    WgmmaWait<0>();
    FenceRegisters(acc);
  }

  // W^T as an A operand, from V and (K S)^T.
  __device__ __forceinline__ void FormW(int n, const float (&acc)[32], uint32_t (&w)[4][4]) {
    const int tid = Thread();
    const uint32_t of_values = HiddenAddress(sm_.factors[n % 2].of_value) + 4 * Column(tid);
    constexpr int kToState = offsetof(Factors, of_state) - offsetof(Factors, of_value);
    const int lane = tid % 32;
    const uint32_t values = OwnPart(n) + ValueOffset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t v[4];
      LoadTransposed(v, values + k * 16 * 32);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int j = 2 * k + part;
        const float2 of_value = LoadPair(of_values + 32 * j);
        const float2 of_state = LoadPair(of_values + 32 * j + kToState);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 x = Unpack<T>(v[2 * part + half]);
          w[k][2 * part + half] =
              Pack<T>(of_value.x * x.x - of_state.x * acc[4 * j + 2 * half],
                      of_value.y * x.y - of_state.y * acc[4 * j + 2 * half + 1]);
        }
      }
      PinOperand(w[k]);
    }
  }

  // 32 events of U^T = W^T T^T: T is lower triangular, so the first half of them needs half of W.
  template <int kPart>
  __device__ __forceinline__ void Solve(const uint32_t (&w)[4][4], float (&acc)[16]) {
    const uint32_t inverse = UniformAddress(sm_.inverse) + kPart * 32 * 128;
    FenceRegisters(acc);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 2 + 2 * kPart; ++k) {
      WgmmaN32A<T, 0>(acc, w[k], PanelDescriptor(inverse + k * kStepK), k > 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    FenceRegisters(acc);
  }

  // U^T to shared memory for the output side, and as an A operand for the update.
  template <int kPart>
  __device__ __forceinline__ void StoreU(int n, const float (&acc)[16], uint32_t (&u)[4][4]) {
    const int tid = Thread();
    const uint32_t base = CellBase(sm_.u[n % 2], Row(tid), Column(tid));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = 4 * kPart + i;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t word = Pack<T>(acc[4 * i + 2 * half], acc[4 * i + 2 * half + 1]);
        StoreCell((base ^ (j << 4)) + half * 1024, word);
        u[j / 2][j % 2 * 2 + half] = word;
      }
    }
  }
  // Out of the scaled frame the update takes U decayed to the group's end.
  __device__ __forceinline__ void DecayU(int n, uint32_t (&u)[4][4]) {
    const uint32_t to_end = HiddenAddress(sm_.factors[n % 2].to_end) + 4 * Column(Thread());
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 decay = LoadPair(to_end + 32 * j);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 x = Unpack<T>(u[j / 2][j % 2 * 2 + half]);
        u[j / 2][j % 2 * 2 + half] = Pack<T>(decay.x * x.x, decay.y * x.y);
      }
      if (j % 2 == 1) PinOperand(u[j / 2]);
    }
  }

  __device__ __forceinline__ void DecayState(float decay) {
#pragma unroll
    for (int i = 0; i < 64; ++i) s_[i] *= decay;
    FenceRegisters(s_);
  }
  __device__ __forceinline__ void UpdateState(int n, uint32_t (&u)[4][4]) {
    const Factors& f = sm_.factors[n % 2];
    const float decay = f.decay;
    const bool scaled = f.scaled != 0;
    const uint32_t keys = UniformAddress(sm_.key[n % 3]);
    if ((f.writes[0] | f.writes[1]) == 0) {  // nothing is written: -0 stays -0
      DecayState(decay);
      return;
    }
    if (!scaled) {
      DecayU(n, u);
      DecayState(decay);
    }
    FenceRegisters(s_);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      WgmmaN128A<T, 1>(s_, u[k], PanelDescriptor(keys + k * kStepKTransposed, kPanel), 1);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    FenceRegisters(s_);
    if (scaled) DecayState(decay);
  }

  __device__ __forceinline__ void TakeSnapshot(int n) {
    const SequenceParams& s = p_.sequences[job_.seq];
    if (s.snapshot_every <= 0) return;
    const int64_t position = job_.first_position + (sm_.rows[n % 4].end - job_.row0);
    if (position % s.snapshot_every != 0) return;
    const int64_t index = position / s.snapshot_every - job_.first_position / s.snapshot_every - 1;
    StoreState(p_.snapshots, s.snapshot_index + index);
  }

  // All outputs of group n are formed: its slots are free.
  __device__ __forceinline__ void AwaitOutputs(int n) {
    const int m = n - job_.warm_groups;
    if (m >= 0) BarrierWait(&sm_.group_done[m & 1], m / 2 & 1);
  }

  // The serial chain of group n, whose keys, factors and S_B are in place and whose values and T
  // are under way. Of the output side it needs to be past group n - 1 only before those of n + 1
  // take their place.
  __device__ __forceinline__ void Advance(int n) {
    const bool more = n + 1 < job_.groups;
    if (more) CopyKeys(n + 1);
    CopyCommit();
    uint32_t w[4][4], u[4][4];
    {
      float acc[32];
      ApplyState(n, acc);
      FormW(n, acc, w);
    }
    BarrierWait(&sm_.inverse_full, n & 1);
    {
      float acc[16];
      Solve<1>(w, acc);  // first, so that half of W is spent before U needs registers
      StoreU<1>(n, acc, u);
      Solve<0>(w, acc);
      StoreU<0>(n, acc, u);
    }
    ProxyFence();
    const int m = n - job_.warm_groups;
    if (m >= 0) BarrierArriveWarp(&sm_.u_full[m & 1]);
    fetched_ = {};  // defined on every path, or it would occupy registers all the time
    if (more) {
      FetchFactors(n + 1, &fetched_);
      if (n + 2 < job_.groups) {
        FetchRows(n, &fetched_);
        MoveCursor(n);
      }
      AwaitOutputs(n - 1);
      CopyValues(n + 1);
    }
    CopyCommit();
    UpdateState(n, u);
    if (m >= 0) TakeSnapshot(n);
  }

  // Publishes S_B, keys and factors of group n and starts the copy of its T.
  __device__ __forceinline__ void Begin(int n) {
    PutFactors(n, fetched_);
    if (n > 0 && n + 1 < job_.groups) PutRows(n + 1, fetched_);
    StoreStart(n);
    CopyWait<1>();  // the keys
    ProxyFence();
    StateBarrier();
    const int m = n - job_.warm_groups;
    if (m >= 0) BarrierArriveWarp(&sm_.state_full[m & 1]);
    FetchInverse(n);
  }

  typename Base::Fetched fetched_;
  float s_[64];
};

}  // namespace sparsegdn::cuda::fused

#endif  // SPARSEGDN_KERNELS_CUDA_FUSED_STATE_CUH_
