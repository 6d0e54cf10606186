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
  using Base::PrefetchInverse;
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
  static __device__ __forceinline__ int Row(unsigned thread) {
    return thread / 32 * 16 + thread % 32 / 4;
  }
  static __device__ __forceinline__ int Column(unsigned thread) { return 2 * (thread % 4); }

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
    const unsigned tid = Thread();
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
    FetchInverse(0);
  }

  // Where the warp's rows of a panel of 128 rows are stored from, four matrices of 8 x 8 at a time:
  // 16 columns, the next ones at ^ 32, ^ 64 and ^ 96.
  static __device__ __forceinline__ uint32_t MatrixBase(const void* panel) {
    const unsigned tid = Thread();
    return HiddenAddress(panel) + PanelOffset(tid / 32 * 16 + tid % 16, tid / 16 % 2 * 8);
  }
  // S^T to shared memory in 16 bits.
  __device__ __forceinline__ void StoreStart(int n) {
    const uint32_t base = MatrixBase(sm_.state[n % 2][0]);
#pragma unroll
    for (int i = 0; i < 64; i += 8) {
      const uint32_t words[4] = {Pack<T>(s_[i], s_[i + 1]), Pack<T>(s_[i + 2], s_[i + 3]),
                                 Pack<T>(s_[i + 4], s_[i + 5]), Pack<T>(s_[i + 6], s_[i + 7])};
      StoreMatrices((base ^ (i % 32 / 8 << 5)) + i / 32 * kStatePanel, words);
    }
  }

  // acc = (K S)^T; meanwhile the keys of the next group are called.
  __device__ __forceinline__ void ApplyState(int n, float (&acc)[32]) {
    const uint32_t keys = PanelOperand(UniformAddress(sm_.key[n % 3]));
    const uint32_t state =
        PanelOperand(UniformAddress(sm_.state[n % 2][0] + Thread() / 128 * (64 * 128)));
    FenceRegisters(acc);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      WgmmaN64<T, 0, 0>(acc, OperandAt(state, k / 4 * kStatePanel + k % 4 * kStepK),
                        OperandAt(keys, k / 4 * kPanel + k % 4 * kStepK), k > 0);
    }
    WgmmaCommit();
    if (n + 1 < job_.groups) CopyKeys(n + 1);
    CopyCommit();
    CopyWait<1>();  // V of this group; the keys of the next may still be under way
    __syncwarp();
    WgmmaWait<0>();
    FenceRegisters(acc);
  }

  // W^T as an A operand, from V and (K S)^T.
  __device__ __forceinline__ void FormW(int n, const float (&acc)[32], uint32_t (&w)[4][4]) {
    const unsigned tid = Thread();
    const uint32_t of_values = HiddenAddress(sm_.factors[n % 2].of_value) + 4 * Column(tid);
    constexpr int kToState = offsetof(Factors, of_state) - offsetof(Factors, of_value);
    const unsigned lane = tid % 32;
    const uint32_t values = OwnPart(n) + ValueOffset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int k = 3; k >= 0; --k) {  // in this order w may take the place of acc
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

  // Starts 32 events of U^T = W^T T^T: T is lower triangular, so the first half needs half of W.
  template <int kPart>
  __device__ __forceinline__ void Solve(uint32_t inverse, const uint32_t (&w)[4][4],
                                        float (&acc)[16]) {
#pragma unroll
    for (int k = 0; k < 2 + 2 * kPart; ++k) {
      WgmmaN32A<T, 0>(acc, w[k], OperandAt(inverse, kPart * 32 * 128 + k * kStepK), k > 0);
    }
    WgmmaCommit();
  }

  // U^T to shared memory for the output side, and as an A operand for the update.
  template <int kPart>
  __device__ __forceinline__ void StoreU(uint32_t base, const float (&acc)[16],
                                         uint32_t (&u)[4][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t(&words)[4] = u[2 * kPart + i];
#pragma unroll
      for (int cell = 0; cell < 4; ++cell) {
        words[cell] = Pack<T>(acc[8 * i + 2 * cell], acc[8 * i + 2 * cell + 1]);
      }
      StoreMatrices(base ^ ((2 * kPart + i) << 5), words);
    }
  }

  __device__ __forceinline__ void FormU(int n, const uint32_t (&w)[4][4], uint32_t (&u)[4][4]) {
    const uint32_t inverse = PanelOperand(UniformAddress(sm_.inverse));
    const uint32_t base = MatrixBase(sm_.u[n % 2]);
    BarrierWait(&sm_.inverse_full, n & 1);
    float acc[16];
    FenceRegisters(acc);
    WgmmaFence();
    Solve<1>(inverse, w, acc);  // first, so that half of W is spent before U needs registers
    WgmmaWait<0>();
    FenceRegisters(acc);
    StoreU<1>(base, acc, u);
    FenceRegisters(acc);
    WgmmaFence();
    Solve<0>(inverse, w, acc);
    WgmmaWait<0>();
    FenceRegisters(acc);
    BarrierArriveWarp(&sm_.inverse_read);
    StoreU<0>(base, acc, u);
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
  // The state after group n; meanwhile what the next groups need is called.
  __device__ __forceinline__ void UpdateState(int n, uint32_t (&u)[4][4]) {
    const Factors& f = sm_.factors[n % 2];
    const uint32_t keys = PanelOperand(UniformAddress(sm_.key[n % 3]), kPanel);
    if ((f.writes[0] | f.writes[1]) == 0) {  // nothing is written: -0 stays -0
      FetchNext(n);
      DecayState(f.decay);
      return;
    }
    if (f.scaled == 0) {
      DecayU(n, u);
      DecayState(f.decay);
    }
    FenceRegisters(s_);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      WgmmaN128A<T, 1>(s_, u[k], OperandAt(keys, k * kStepKTransposed), 1);
    }
    WgmmaCommit();
    FetchNext(n);
    WgmmaWait<0>();
    FenceRegisters(s_);
    if (f.scaled != 0) DecayState(f.decay);
  }

  __device__ __forceinline__ void TakeSnapshot(int n) {
    const int64_t every = job_.snapshot_every;
    if (every <= 0) return;
    const int64_t position = job_.first_position + (sm_.rows[n % 4].end - job_.row0);
    if (position % every != 0) return;
    const int64_t index = position / every - job_.first_position / every - 1;
    StoreState(p_.snapshots, p_.sequences[job_.seq].snapshot_index + index);
  }

  // All outputs of group n are formed: its slots are free.
  __device__ __forceinline__ void AwaitOutputs(int n) {
    const int m = n - job_.warm_groups;
    if (m >= 0) BarrierWait(&sm_.group_done[m & 1], m / 2 & 1);
  }

  // Starts the loads of group n + 1's factors and values and of group n + 2's rows.
  __device__ __forceinline__ void FetchNext(int n) {
    fetched_ = {};  // defined on every path, or it would occupy registers all the time
    if (n + 1 < job_.groups) {
      FetchFactors(n + 1, &fetched_);
      if (n + 2 < job_.groups) {
        FetchRows(n, &fetched_);
        MoveCursor(n);
      }
      FetchInverse(n + 1);
      AwaitOutputs(n - 1);
      CopyValues(n + 1);
    }
    CopyCommit();
  }

  // The serial chain of group n, whose keys, factors and S_B are in place and whose values and T
  // are under way. Of the output side it needs to be past group n - 1 only before those of n + 1
  // take their place.
  __device__ __forceinline__ void Advance(int n) {
    uint32_t w[4][4], u[4][4];
    {
      float acc[32];
      ApplyState(n, acc);
      FormW(n, acc, w);
    }
    FormU(n, w, u);
    ProxyFence();
    const int m = n - job_.warm_groups;
    if (m >= 0) BarrierArriveWarp(&sm_.u_full[m & 1]);
    UpdateState(n, u);
    if (m >= 0) TakeSnapshot(n);
  }

  // Publishes S_B, keys and factors of group n.
  __device__ __forceinline__ void Begin(int n) {
    PutFactors(n, fetched_);
    if (n > 0 && n + 1 < job_.groups) PutRows(n + 1, fetched_);
    StoreStart(n);
    CopyWait<1>();  // the keys
    ProxyFence();
    StateBarrier();
    const int m = n - job_.warm_groups;
    if (m >= 0) BarrierArriveWarp(&sm_.state_full[m & 1]);
    if (n + 1 < job_.groups) PrefetchInverse(n + 1);
  }

  typename Base::Fetched fetched_;
  float s_[64];
};

}  // namespace sparsegdn::cuda::fused

#endif  // SPARSEGDN_KERNELS_CUDA_FUSED_STATE_CUH_
