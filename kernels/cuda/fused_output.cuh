// The output side of the fused kernel: two warpgroups take tiles of 64 tokens in turn.
//
//   O = scale (e^{G_t} Q S_B + P U + self term),  P_ti = e^{G_t - G_i} q_t . k_i for events i <= t
// Q K^T and Q S_B need only the published state, so they run while the state side forms U. How a
// tile comes in and leaves: fused_tile.cuh.
#ifndef SPARSEGDN_KERNELS_CUDA_FUSED_OUTPUT_CUH_
#define SPARSEGDN_KERNELS_CUDA_FUSED_OUTPUT_CUH_

#include "kernels/cuda/fused_shared.cuh"
#include "kernels/cuda/fused_tile.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace sparsegdn::cuda::fused {

template <typename T, bool kSelf, bool kNorm, bool kDirect>
class OutputSide : private OutputTile<T, kSelf, kNorm, kDirect> {
  using Base = OutputTile<T, kSelf, kNorm, kDirect>;
  using Base::AwaitQueries;
  using Base::AwaitStore;
  using Base::AwaitValues;
  using Base::fetched_;
  using Base::FetchQueries;
  using Base::FetchValues;
  using Base::InFlight;
  using Base::job_;
  using Base::LoadOwnKeys;
  using Base::own_;
  using Base::OwnColumn;
  using Base::OwnGate;
  using Base::OwnIndex;
  using Base::OwnPiece;
  using Base::OwnRow;
  using Base::OwnRows;
  using Base::OwnSelf;
  using Base::OwnWarp;
  using Base::p_;
  using Base::RowScale;
  using Base::sm_;
  using Base::Store;
  using Base::StoreDirect;
  using Base::Thread;
  using Base::TileAddress;
  using Base::Warpgroup;
  using Base::WarpgroupBarrier;

 public:
  __device__ __forceinline__ OutputSide(const Params& p, const TileMaps& maps, Shared& sm)
      : Base(p, maps, sm) {}

  __device__ __forceinline__ void Run() {
    bool first = Warpgroup() == 0;  // this warpgroup takes the group's first tile
    for (int n = job_.warm_groups; n < job_.groups; ++n) {
      const int m = n - job_.warm_groups;
      BarrierWait(&sm_.state_full[m & 1], m / 2 & 1);
      const int begin = sm_.rows[n % 4].begin;
      const int end = sm_.rows[n % 4].end;
      const bool odd = ((end - begin + kTile - 1) / kTile & 1) != 0;
      int row = first ? begin : begin + kTile;
      first = first != odd;
      for (; row < end; row += 2 * kTile) Tile(n, m, row, end);
      BarrierArriveWarp(&sm_.group_done[m & 1]);
    }
    if (InFlight()) AwaitQueries();
    AwaitStore();
  }

 private:
  // Products of 16 x 8 whose diagonals are q_t . k_t of eight rows t. A thread's 16 bytes of q are
  // two steps of both halves of the A operand, which have the same rows but alternate pieces of
  // them: the diagonal of the upper half of `even`, of the lower half of `odd`.
  __device__ __forceinline__ float2 SelfDots() const {
    const unsigned tid = Thread();
    float even[2][4] = {}, odd[2][4] = {};  // of rows 0..7 and 8..15
    const uint32_t queries = TileAddress() + PanelOffset(OwnRow(tid), 8 * OwnPiece(tid));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 q = LoadPiece((queries ^ (i % 2 << 6)) + i / 2 * kPanel + half * 1024);
        const uint4& k = own_[half][i];
        MmaQuarter<T>(even[half], q.x, q.y, k.x);
        MmaQuarter<T>(odd[half], q.x, q.y, k.y);
        MmaQuarter<T>(even[half], q.z, q.w, k.z);
        MmaQuarter<T>(odd[half], q.z, q.w, k.w);
      }
    }
    const unsigned lane = tid % 32, g = lane / 4;
    const int owner = static_cast<int>((lane & ~3u) + g / 2);
    float2 dots;
    dots.x = g % 2 == 0 ? even[0][0] + odd[0][2] : even[0][1] + odd[0][3];
    dots.y = g % 2 == 0 ? even[1][0] + odd[1][2] : even[1][1] + odd[1][3];
    return make_float2(__shfl_sync(0xffffffffu, dots.x, owner),
                       __shfl_sync(0xffffffffu, dots.y, owner));
  }

  // Which events of the group are at or before the thread's rows: the first count[half], because
  // they are in token order. self[half] is cleared where the row is an event itself.
  __device__ __forceinline__ void CountEvents(const Factors& e, int row, int (&count)[2],
                                              float (&self)[2]) const {
    const unsigned tid = Thread(), lane = tid % 32;
    const int first = row + OwnWarp() * kWarpRows;  // of the warp
    const int2 token = *reinterpret_cast<const int2*>(&e.token[2 * lane]);
    const int before = __popc(__ballot_sync(0xffffffffu, token.x < first)) +
                       __popc(__ballot_sync(0xffffffffu, token.y < first));
    const unsigned x = token.x - first, y = token.y - first;
    const unsigned own = (x < kWarpRows ? 1u << x : 0u) | (y < kWarpRows ? 1u << y : 0u);
    const unsigned events = __reduce_or_sync(0xffffffffu, own);  // by row of the warp
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = lane / 4 + 8 * half;
      count[half] = before + __popc(events & ((2u << i) - 1));
      if ((events >> i & 1) != 0) self[half] = 0.0f;
    }
  }

  // Q K^T in `scores`; returns q . k of the thread's rows in `self`, and in `count` what
  // CountEvents finds. Meanwhile v is called.
  __device__ __forceinline__ void KeyProducts(int n, int row, int end, float (&scores)[32],
                                              int (&count)[2], float (&self)[2]) {
    const uint32_t keys = PanelOperand(UniformAddress(sm_.key[n % 3]));
    const uint32_t queries = PanelOperand(UniformAddress(sm_.tile[Warpgroup()][0]));
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t step = k / 4 * kPanel + k % 4 * kStepK;
      WgmmaN64<T, 0, 0>(scores, OperandAt(queries, step), OperandAt(keys, step), k > 0);
    }
    WgmmaCommit();
    FetchValues(row, end);
    float2 dots = make_float2(0.0f, 0.0f);
    if constexpr (kSelf) dots = SelfDots();
    self[0] = dots.x;
    self[1] = dots.y;
    CountEvents(sm_.factors[n % 2], row, count, self);
    WgmmaWait<0>();
    FenceRegisters(scores);
  }

  // Starts o = Q S_B.
  __device__ __forceinline__ void StartState(int n, float (&o)[64]) {
    const uint32_t state = PanelOperand(UniformAddress(sm_.state[n % 2][0]));
    const uint32_t queries = PanelOperand(UniformAddress(sm_.tile[Warpgroup()][0]));
    FenceRegisters(o);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      WgmmaN128<T, 0, 0>(o, OperandAt(queries, k / 4 * kPanel + k % 4 * kStepK),
                         OperandAt(state, k / 4 * kStatePanel + k % 4 * kStepK), k > 0);
    }
    WgmmaCommit();
  }
  __device__ __forceinline__ float OutputDecay(const Factors& e, int row, int end, int half) const {
    const float2 gate = OwnGate(row, end, half);
    return Decay(gate.x, gate.y, e.before.x, e.before.y);
  }

  // Out of the scaled frame: the decays of Q K^T, pair by pair.
  __device__ __forceinline__ void DecayScores(const Factors& e, int row, int end,
                                              float (&scores)[32]) {
    const int column = OwnColumn(Thread());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 gate = OwnGate(row, end, half);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 gates = *reinterpret_cast<const float4*>(&e.gate[8 * j + column]);
        scores[4 * j + 2 * half] *= Decay(gate.x, gate.y, gates.x, gates.y);
        scores[4 * j + 2 * half + 1] *= Decay(gate.x, gate.y, gates.z, gates.w);
      }
    }
  }
  // The same for Q S_B, once it is there.
  __device__ __forceinline__ void DecayOutput(const Factors& e, int row, int end, float (&o)[64]) {
    WgmmaWait<0>();
    FenceRegisters(o);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = OutputDecay(e, row, end, half);
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        o[4 * j + 2 * half] *= factor;
        o[4 * j + 2 * half + 1] *= factor;
      }
    }
  }

  // P from Q K^T as the A operand of P U: columns of later events are zero.
  __device__ __forceinline__ void FormP(const int (&count)[2], const float (&scores)[32],
                                        uint32_t (&a)[4][4]) {
    const int column = OwnColumn(Thread());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int left = count[half] - column;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        a[j / 2][j % 2 * 2 + half] =
            Pack<T>(8 * j < left ? scores[4 * j + 2 * half] : 0.0f,
                    8 * j + 1 < left ? scores[4 * j + 2 * half + 1] : 0.0f);
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) PinOperand(a[k]);
  }

  // o += P U, and the next tile's q on its way as soon as Q S_B has read this one's.
  __device__ __forceinline__ void AddEvents(int n, int row, int end, const uint32_t (&a)[4][4],
                                            float (&o)[64]) {
    const uint32_t u = PanelOperand(UniformAddress(sm_.u[n % 2]));
    FenceRegisters(o);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      WgmmaN128A<T, 0>(o, a[k], OperandAt(u, k * kStepK), 1);
    }
    WgmmaCommit();
    WgmmaWait<1>();
    // Only the warps that call q and the gates wait for the others.
    if (OwnWarp() < 2) {
      WarpgroupBarrier();
    } else {
      NamedBarrierArrive(kBarrierGroup0 + 2 + Warpgroup(), 128);
    }
    FetchQueries(Next(row, end));
    WgmmaWait<0>();
    FenceRegisters(o);
  }

  // factor * o + self * v of the eight cells from o[first] on, whose v are LoadMatrices's.
  static __device__ __forceinline__ void AddSelf(const float (&factor)[2], const float (&self)[2],
                                                 const uint32_t (&v)[4], int first,
                                                 float (&o)[64]) {
#pragma unroll
    for (int cell = 0; cell < 4; ++cell) {
      const int half = cell % 2;
      float& x = o[first + 2 * cell];
      float& y = o[first + 2 * cell + 1];
      x *= factor[half];
      y *= factor[half];
      if constexpr (kSelf) {
        const float2 f = Unpack<T>(v[cell]);
        x += self[half] * f.x;
        y += self[half] * f.y;
      }
    }
  }

  // This warp's rows of o, scaled and with the self term, to device memory: in the inputs' type
  // over its rows of v, else element by element.
  __device__ __forceinline__ void Emit(int row, int end, const float (&factor)[2],
                                       const float (&self)[2], float (&o)[64]) {
    const unsigned tid = Thread(), lane = tid % 32;
    const uint32_t base = OwnRows() + PanelOffset(lane % 16, lane / 16 * 8);
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      uint32_t v[4][4];
      if constexpr (kSelf) {
#pragma unroll
        for (int i = 0; i < 4; ++i) LoadMatrices(v[i], (base ^ (i << 5)) + panel * Base::kHalf);
        __syncwarp();
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = 32 * panel + 8 * i;
        AddSelf(factor, self, v[i], first, o);
        if constexpr (kDirect) {
          StoreDirect(row, end, first, o);
          continue;
        }
        const uint32_t words[4] = {
            Pack<T>(o[first], o[first + 1]), Pack<T>(o[first + 2], o[first + 3]),
            Pack<T>(o[first + 4], o[first + 5]), Pack<T>(o[first + 6], o[first + 7])};
        StoreMatrices((base ^ (i << 5)) + panel * Base::kHalf, words);
      }
    }
  }
  // Where the warpgroup's next tile is expected: two on, or among the first two of the next group.
  static __device__ __forceinline__ int Next(int row, int end) {
    const int next = row + 2 * kTile;
    return next < end ? next : row + kTile < end ? end : end + kTile;
  }

  __device__ __forceinline__ void Tile(int n, int m, int row, int end) {
    asm volatile(""
                 : "+r"(n),
                   "+r"(m));  // what is derived from it would fill the registers across tiles

    if (fetched_ != row) {  // the first tile, or the next group turned out shorter
      if (InFlight()) AwaitQueries();
      WarpgroupBarrier();
      FetchQueries(row);
      LoadOwnKeys(row);
    }
    AwaitQueries();
    const Factors& e = sm_.factors[n % 2];
    const bool scaled = e.scaled != 0;
    uint32_t a[4][4];
    float self[2];
    {
      float scores[32];
      int count[2];
      KeyProducts(n, row, end, scores, count, self);
      if (!scaled) DecayScores(e, row, end, scores);
      FormP(count, scores, a);
    }
    float o[64];
    StartState(n, o);
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[half] = RowScale(row + OwnIndex(row, end, half));
      if (scaled) factor[half] *= OutputDecay(e, row, end, half);
      if constexpr (kSelf) self[half] *= OwnSelf(row, end, half);
    }
    if (!scaled) DecayOutput(e, row, end, o);
    BarrierWait(&sm_.u_full[m & 1], m / 2 & 1);
    AddEvents(n, row, end, a, o);
    if (row + OwnWarp() * kWarpRows < end) {  // else the warp has no rows
      AwaitValues();
      Emit(row, end, factor, self, o);
      Store(row + OwnWarp() * kWarpRows, end);
    }
    LoadOwnKeys(Next(row, end));
  }
};

}  // namespace sparsegdn::cuda::fused

#endif  // SPARSEGDN_KERNELS_CUDA_FUSED_OUTPUT_CUH_
