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

template <typename T, bool kSelf, bool kNorm>
class OutputSide : private OutputTile<T, kSelf, kNorm> {
  using Base = OutputTile<T, kSelf, kNorm>;
  using Base::AwaitQueries;
  using Base::AwaitStore;
  using Base::AwaitValues;
  using Base::Direct;
  using Base::fetched_;
  using Base::FetchQueries;
  using Base::FetchValues;
  using Base::in_flight_;
  using Base::job_;
  using Base::LoadOwnKeys;
  using Base::own_;
  using Base::OwnColumn;
  using Base::OwnGate;
  using Base::OwnIndex;
  using Base::OwnPiece;
  using Base::OwnRow;
  using Base::OwnSelf;
  using Base::p_;
  using Base::RowScale;
  using Base::sm_;
  using Base::StoreBox;
  using Base::StoreDirect;
  using Base::StoreTile;
  using Base::Thread;
  using Base::TileAddress;
  using Base::WarpgroupBarrier;
  using Base::wg_;

 public:
  __device__ __forceinline__ OutputSide(const Params& p, const TileMaps& maps, Shared& sm)
      : Base(p, maps, sm) {}

  __device__ __forceinline__ void Run() {
    int tiles = 0;  // of both warpgroups
    for (int n = job_.warm_groups; n < job_.groups; ++n) {
      const int m = n - job_.warm_groups;
      BarrierWait(&sm_.state_full[m & 1], m / 2 & 1);
      const int begin = sm_.rows[n % 4].begin, end = sm_.rows[n % 4].end;
      for (int row = begin; row < end; row += kTile, ++tiles) {
        if (tiles % 2 != wg_) continue;
        // The warpgroup's next tile: two on, or among the first two of the next group.
        int next = row + 2 * kTile;
        if (next >= end) {
          const int left = (end - row + kTile - 1) / kTile;
          next = (tiles + left) % 2 == wg_ ? end : end + kTile;
        }
        Tile(n, row, end, next);
      }
      BarrierArriveWarp(&sm_.group_done[m & 1]);
    }
    if (in_flight_) AwaitQueries();
    AwaitStore();
  }

 private:
  __device__ __forceinline__ float2 SelfDots() const {
    const int tid = Thread();
    float low[4] = {}, high[4] = {};  // columns 0..7 and 8..15
    const uint32_t queries = TileAddress() + PanelOffset(OwnRow(tid), 8 * OwnPiece(tid));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t at = (queries ^ (i % 2 << 6)) + i / 2 * kPanel;
      const uint4 x = LoadPiece(at), y = LoadPiece(at + 1024);
      const uint4 &k = own_[0][i], &l = own_[1][i];
      const uint32_t first[4] = {x.x, y.x, x.y, y.y}, second[4] = {x.z, y.z, x.w, y.w};
      MmaHalf<T>(low, first, k.x, k.y);
      MmaHalf<T>(high, first, l.x, l.y);
      MmaHalf<T>(low, second, k.z, k.w);
      MmaHalf<T>(high, second, l.z, l.w);
    }
    const int lane = tid % 32, g = lane / 4;
    const float x = g % 2 == 0 ? low[0] : low[1], y = g % 2 == 0 ? high[2] : high[3];
    const int owner = (lane & ~3) + g / 2;
    return make_float2(__shfl_sync(0xffffffffu, x, owner), __shfl_sync(0xffffffffu, y, owner));
  }

  // Q K^T in `scores`; returns q . k of the thread's rows. Meanwhile v is called.
  __device__ __forceinline__ float2 KeyProducts(int n, int row, float (&scores)[32]) {
    const uint32_t keys = UniformAddress(sm_.key[n % 3]);
    const uint32_t queries = UniformAddress(sm_.tile[wg_][0]);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t step = k / 4 * kPanel + k % 4 * kStepK;
      WgmmaN64<T, 0, 0>(scores, PanelDescriptor(queries + step), PanelDescriptor(keys + step),
                        k > 0);
    }
    WgmmaCommit();
    AwaitStore();
    FetchValues(row);
    float2 dots = make_float2(0.0f, 0.0f);
    if constexpr (kSelf) dots = SelfDots();
    WgmmaWait<0>();
    FenceRegisters(scores);
    return dots;
  }

  // Starts o = Q S_B.
  __device__ __forceinline__ void StartState(int n, float (&o)[64]) {
    const uint32_t state = UniformAddress(sm_.state[n % 2][0]);
    const uint32_t queries = UniformAddress(sm_.tile[wg_][0]);
    FenceRegisters(o);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      WgmmaN128<T, 0, 0>(o, PanelDescriptor(queries + k / 4 * kPanel + k % 4 * kStepK),
                         PanelDescriptor(state + k / 4 * kStatePanel + k % 4 * kStepK), k > 0);
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

  // P from Q K^T as the A operand of P U; clears `self` of rows that are events.
  __device__ __forceinline__ void FormP(const Factors& e, int row, float (&self)[2],
                                        const float (&scores)[32], uint32_t (&a)[4][4]) {
    const int tid = Thread();
    const int own_row = OwnRow(tid);
    const int column = OwnColumn(tid);
    bool is_event[2] = {false, false};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int2 tokens = *reinterpret_cast<const int2*>(&e.token[8 * j + column]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = row + own_row + 8 * half;
        a[j / 2][j % 2 * 2 + half] =
            Pack<T>(tokens.x <= token ? scores[4 * j + 2 * half] : 0.0f,
                    tokens.y <= token ? scores[4 * j + 2 * half + 1] : 0.0f);
        is_event[half] = is_event[half] || tokens.x == token || tokens.y == token;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int hit = is_event[half] ? 1 : 0;
      hit |= __shfl_xor_sync(0xffffffffu, hit, 1);
      hit |= __shfl_xor_sync(0xffffffffu, hit, 2);
      if (hit != 0) self[half] = 0.0f;
    }
  }

  // o += P U, and the next tile's q on its way as soon as Q S_B has read this one's.
  __device__ __forceinline__ void AddEvents(int n, const uint32_t (&a)[4][4], int next,
                                            float (&o)[64]) {
    const uint32_t u = UniformAddress(sm_.u[n % 2]);
    FenceRegisters(o);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      WgmmaN128A<T, 0>(o, a[k], PanelDescriptor(u + k * kStepK), 1);
    }
    WgmmaCommit();
    WgmmaWait<1>();
    WarpgroupBarrier();
    FetchQueries(next);
    WgmmaWait<0>();
    FenceRegisters(o);
  }

  // o <- factor * o + self * v; v is read four cells at a time, so that the loads overlap.
  __device__ __forceinline__ void AddSelf(uint32_t base, const float (&factor)[2],
                                          const float (&self)[2], float (&o)[64]) {
#pragma unroll
    for (int part = 0; part < 8; ++part) {
      const int half = part / 4, first = part % 4 * 4;
      const uint32_t from = base + half * 1024 + first / 8 * kPanel;
      uint32_t v[4];
      if (kSelf) {
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = LoadCell(from ^ ((first % 8 + j) << 4));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& x = o[4 * (first + j) + 2 * half];
        float& y = o[4 * (first + j) + 2 * half + 1];
        x *= factor[half];
        y *= factor[half];
        if (kSelf) {
          const float2 f = Unpack<T>(v[j]);
          x += self[half] * f.x;
          y += self[half] * f.y;
        }
      }
    }
  }

  // o to device memory: through this thread's cells of the v panels, or element by element where o
  // is not of the inputs' dtype.
  __device__ __forceinline__ void Emit(int row, int end, const float (&factor)[2],
                                       const float (&self)[2], float (&o)[64]) {
    const int tid = Thread();
    const int own_row = OwnRow(tid);
    const int column = OwnColumn(tid);
    const uint32_t base = CellBase(sm_.tile[wg_][1][0], own_row, column);
    AddSelf(base, factor, self, o);
    if (Direct()) {
      StoreDirect(row, end, o);
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        StoreCell((base ^ (j % 8 << 4)) + half * 1024 + j / 8 * kPanel,
                  Pack<T>(o[4 * j + 2 * half], o[4 * j + 2 * half + 1]));
      }
    }
  }

  // One tile; the warpgroup's next one is expected at row `next`.
  __device__ __forceinline__ void Tile(int n, int row, int end, int next) {
    if (fetched_ != row) {  // the first tile, or the next group turned out shorter
      if (in_flight_) AwaitQueries();
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
      const float2 dots = KeyProducts(n, row, scores);
      self[0] = dots.x;
      self[1] = dots.y;
      if (!scaled) DecayScores(e, row, end, scores);
      FormP(e, row, self, scores, a);
    }
    float o[64];
    StartState(n, o);
    if (!scaled) DecayOutput(e, row, end, o);
    const int m = n - job_.warm_groups;
    BarrierWait(&sm_.u_full[m & 1], m / 2 & 1);
    AddEvents(n, a, next, o);
    fetched_ = next;
    AwaitValues();
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[half] = RowScale(row + OwnIndex(row, end, half));
      if (scaled) factor[half] *= OutputDecay(e, row, end, half);
      if constexpr (kSelf) self[half] *= OwnSelf(row, end, half);
    }
    Emit(row, end, factor, self, o);
    LoadOwnKeys(next);
    ProxyFence();
    WarpgroupBarrier();
    if (!Direct() && row + kTile <= end) {
      StoreBox(row);
    } else {
      StoreTile(row, end);
      ProxyFence();
      WarpgroupBarrier();
    }
  }
};

}  // namespace sparsegdn::cuda::fused

#endif  // SPARSEGDN_KERNELS_CUDA_FUSED_OUTPUT_CUH_
