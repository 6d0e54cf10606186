// The output side of the fused kernel: two warpgroups take tiles of 64 tokens in turn.
//
//   O = scale (e^{G_t} Q S_B + P U + self term),  P_ti = e^{G_t - G_i} q_t . k_i for events i <= t
// Q K^T and Q S_B need only the published state, so they run while the state side forms U. The copy
// engine brings q and k one tile ahead, v within the tile, and takes full tiles of o away.
#ifndef SPARSEGDN_KERNELS_CUDA_FUSED_OUTPUT_CUH_
#define SPARSEGDN_KERNELS_CUDA_FUSED_OUTPUT_CUH_

#include "kernels/cuda/fused_shared.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace sparsegdn::cuda::fused {

template <typename T>
class OutputSide {
 public:
  __device__ __forceinline__ OutputSide(const Params& p, const TileMaps& maps, Shared& sm)
      : p_(p),
        maps_(maps),
        sm_(sm),
        job_(sm.job),
        tid_(threadIdx.x % 128),
        wg_(threadIdx.x / 128 - 2) {
    row_ = tid_ / 32 * 16 + tid_ % 32 / 4;
    column_ = 2 * (tid_ % 4);
    q_ = SharedAddress(sm.tile[wg_][0]);
    direct_ = p.o.dtype != p.q.dtype;
  }

  __device__ __forceinline__ void Run() {
    int tiles = 0;  // of both warpgroups
    for (int n = job_.warm_groups; n < job_.groups; ++n) {
      const int parity = (n - job_.warm_groups) & 1;
      BarrierWait(&sm_.state_full, parity);
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
      BarrierArriveWarp(&sm_.group_done);
    }
    if (in_flight_) AwaitQueries();
    AwaitStore();
  }

 private:
  __device__ __forceinline__ void WarpgroupBarrier() {
    NamedBarrier(kBarrierGroup0 + 2 + wg_, 128);
  }

  // Starts the copy of the tile at `row`, q (and k for the self term) or v. Rows past the group may
  // hold anything: a row of q, k or v only ever reaches the same row of o.
  __device__ __forceinline__ void FetchQueries(int row) {
    in_flight_ = row < job_.end_row;
    if (!in_flight_ || tid_ != 0) return;
    uint64_t* full = &sm_.queries_full[wg_];
    BarrierExpect(full, job_.self_term ? 4 * kPanel : 2 * kPanel);
    for (int half = 0; half < 2; ++half) {
      CopyBox(q_ + half * kPanel, &maps_.q, full, 64 * half, job_.pair, row);
      if (job_.self_term) {
        CopyBox(q_ + (2 + half) * kPanel, &maps_.k, full, 64 * half, job_.pair, row);
      }
    }
  }
  __device__ __forceinline__ void FetchValues(int row) {
    if (!job_.self_term || tid_ != 0) return;
    uint64_t* full = &sm_.values_full[wg_];
    BarrierExpect(full, 2 * kPanel);
    for (int half = 0; half < 2; ++half) {
      CopyBox(q_ + (4 + half) * kPanel, &maps_.v, full, 64 * half, job_.head, row);
    }
  }
  __device__ __forceinline__ void AwaitQueries() {
    BarrierWait(&sm_.queries_full[wg_], parities_ & 1);
    parities_ ^= 1;
  }
  __device__ __forceinline__ void AwaitValues() {
    if (!job_.self_term) return;
    BarrierWait(&sm_.values_full[wg_], parities_ >> 1);
    parities_ ^= 2;
  }
  // The copy engine has read the last tile of o out of the v panels.
  __device__ __forceinline__ void AwaitStore() {
    if (tid_ == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }

  // q_t . k_t of this thread's two rows: the diagonals of the warp's two 16 x 8 products.
  __device__ __forceinline__ float2 SelfDots() {
    const int lane = tid_ % 32;
    const uint32_t at = q_ + PanelOffset(tid_ / 32 * 16 + lane % 16, lane / 16 * 8);
    float low[4] = {}, high[4] = {};  // columns 0..7 and 8..15
    uint32_t a[2][4], b[2][4];
    LoadMatrices(a[0], at);
    LoadMatrices(b[0], at + 2 * kPanel);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int next = k + 1;
      if (next < 8) {
        const uint32_t from = (at ^ (next % 4 << 5)) + next / 4 * kPanel;
        LoadMatrices(a[next % 2], from);
        LoadMatrices(b[next % 2], from + 2 * kPanel);
      }
      MmaHalf<T>(low, a[k % 2], b[k % 2][0], b[k % 2][2]);
      MmaHalf<T>(high, a[k % 2], b[k % 2][1], b[k % 2][3]);
    }
    const int g = lane / 4;
    const float x = g % 2 == 0 ? low[0] : low[1], y = g % 2 == 0 ? high[2] : high[3];
    const int owner = (lane & ~3) + g / 2;
    return make_float2(__shfl_sync(0xffffffffu, x, owner), __shfl_sync(0xffffffffu, y, owner));
  }

  // Q K^T in `scores`; returns q . k of the thread's rows.
  __device__ __forceinline__ float2 KeyProducts(int n, float (&scores)[32]) {
    const uint32_t keys = SharedAddress(sm_.key[n % 2]);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t step = k / 4 * kPanel + k % 4 * kStepK;
      WgmmaN64<T, 0, 0>(scores, PanelDescriptor(q_ + step), PanelDescriptor(keys + step), k > 0);
    }
    WgmmaCommit();
    float2 dots = make_float2(0.0f, 0.0f);
    if (job_.self_term) dots = SelfDots();
    WgmmaWait<0>();
    FenceRegisters(scores);
    return dots;
  }

  // Starts o = Q S_B.
  __device__ __forceinline__ void StartState(float (&o)[64]) {
    const uint32_t state = SharedAddress(sm_.state[0]);
    FenceRegisters(o);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      WgmmaN128<T, 0, 1>(o, PanelDescriptor(q_ + k / 4 * kPanel + k % 4 * kStepK),
                         PanelDescriptor(state + k * kStepKTransposed, kStatePanel), k > 0);
    }
    WgmmaCommit();
  }

  __device__ __forceinline__ float2 RowGate(int row, int end) const {
    return job_.gate_sum[row < end ? row : end - 1];
  }
  // What the self term needs besides q . k and v: beta, and 1 / |q| |k| where that is asked for.
  __device__ __forceinline__ float RowSelf(int row, int end) const {
    if (!job_.self_term) return 0.0f;
    const int at = row < end ? row : end - 1;
    float x = job_.beta[at];
    if (p_.normalize_qk) {
      x *= p_.ws.q_norm[job_.pair * p_.num_tokens + at] *
           p_.ws.k_norm[job_.pair * p_.num_tokens + at];
    }
    return x;
  }
  __device__ __forceinline__ float RowScale(int row, int end) const {
    if (!p_.normalize_qk) return p_.scale;
    return p_.scale * p_.ws.q_norm[job_.pair * p_.num_tokens + (row < end ? row : end - 1)];
  }

  // Out of the scaled frame: the decays of Q K^T, pair by pair.
  __device__ __forceinline__ void DecayScores(const Factors& e, const float2 (&gate)[2],
                                              float (&scores)[32]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 gates = *reinterpret_cast<const float4*>(&e.gate[8 * j + column_]);
        scores[4 * j + 2 * half] *= Decay(gate[half].x, gate[half].y, gates.x, gates.y);
        scores[4 * j + 2 * half + 1] *= Decay(gate[half].x, gate[half].y, gates.z, gates.w);
      }
    }
  }
  // The same for Q S_B, once it is there; the factors are spent.
  __device__ __forceinline__ void DecayOutput(float (&factor)[2], float (&o)[64]) {
    WgmmaWait<0>();
    FenceRegisters(o);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        o[4 * j + 2 * half] *= factor[half];
        o[4 * j + 2 * half + 1] *= factor[half];
      }
      factor[half] = 1.0f;
    }
  }

  // P from Q K^T as the A operand of P U; clears `self` of rows that are events.
  __device__ __forceinline__ void FormP(const Factors& e, int row, float (&self)[2],
                                        const float (&scores)[32], uint32_t (&a)[4][4]) {
    bool is_event[2] = {false, false};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int2 tokens = *reinterpret_cast<const int2*>(&e.token[8 * j + column_]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = row + row_ + 8 * half;
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

  // o += P U, and the next tile's q and k on their way as soon as Q S_B has read this one's.
  __device__ __forceinline__ void AddEvents(const uint32_t (&a)[4][4], int next, float (&o)[64]) {
    const uint32_t u = SharedAddress(sm_.u[0]);
    FenceRegisters(o);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      WgmmaN128A<T, 1>(o, a[k], PanelDescriptor(u + k * kStepKTransposed, kPanel), 1);
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
      if (job_.self_term) {
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = LoadCell(from ^ ((first % 8 + j) << 4));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& x = o[4 * (first + j) + 2 * half];
        float& y = o[4 * (first + j) + 2 * half + 1];
        x *= factor[half];
        y *= factor[half];
        if (job_.self_term) {
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
    const uint32_t base = CellBase(sm_.tile[wg_][2][0], row_, column_);
    AddSelf(base, factor, self, o);
    if (direct_) {
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
  __device__ __forceinline__ void StoreDirect(int row, int end, const float (&o)[64]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + row_ + 8 * half;
      const int64_t at = r * p_.o.token_stride + job_.head * p_.o.head_stride + column_;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        if (r >= end) break;
        StoreAs(p_.o.data, p_.o.dtype, at + 8 * j, o[4 * j + 2 * half]);
        StoreAs(p_.o.data, p_.o.dtype, at + 8 * j + 1, o[4 * j + 2 * half + 1]);
      }
    }
  }
  __device__ __forceinline__ void StoreTile(int row, int end) {
    if (direct_) return;
    const int piece = tid_ % 16, first = tid_ / 16;
    const uint32_t from =
        SharedAddress(sm_.tile[wg_][2][piece / 8]) + PanelOffset(first, piece % 8 * 8);
    uint16_t* to = static_cast<uint16_t*>(p_.o.data) + job_.head * p_.o.head_stride +
                   (row + first) * p_.o.token_stride + piece * 8;
    const int64_t step = 8 * p_.o.token_stride;
    const int rows = end - row - first;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint4 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = LoadPiece(from + (4 * part + i) * 1024);
#pragma unroll
      for (int i = 0; i < 4; ++i, to += step) {
        if (8 * (4 * part + i) < rows) *reinterpret_cast<uint4*>(to) = x[i];
      }
    }
  }

  // A full tile through the copy engine, which may still be reading when this returns.
  __device__ __forceinline__ void StoreBox(int row) {
    if (tid_ != 0) return;
    for (int half = 0; half < 2; ++half) {
      StoreBoxFrom(q_ + (4 + half) * kPanel, &maps_.o, 64 * half, job_.head, row);
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }

  // One tile; the warpgroup's next one is expected at row `next`.
  __device__ __forceinline__ void Tile(int n, int row, int end, int next) {
    if (fetched_ != row) {  // the first tile, or the next group turned out shorter
      if (in_flight_) AwaitQueries();
      WarpgroupBarrier();
      FetchQueries(row);
    }
    AwaitStore();
    FetchValues(row);
    const float2 gate[2] = {RowGate(row + row_, end), RowGate(row + row_ + 8, end)};
    float self[2] = {RowSelf(row + row_, end), RowSelf(row + row_ + 8, end)};
    AwaitQueries();
    const Factors& e = sm_.factors[n % 2];
    const bool scaled = e.before.x - e.after.x <= kScaledFrameLog2<T>;
    uint32_t a[4][4];
    {
      float scores[32];
      const float2 dots = KeyProducts(n, scores);
      self[0] *= p_.scale * dots.x;
      self[1] *= p_.scale * dots.y;
      if (!scaled) DecayScores(e, gate, scores);
      FormP(e, row, self, scores, a);
    }
    float o[64];
    StartState(o);
    float factor[2] = {Decay(gate[0].x, gate[0].y, e.before.x, e.before.y),
                       Decay(gate[1].x, gate[1].y, e.before.x, e.before.y)};
    if (!scaled) DecayOutput(factor, o);
    factor[0] *= RowScale(row + row_, end);
    factor[1] *= RowScale(row + row_ + 8, end);
    BarrierWait(&sm_.u_full, (n - job_.warm_groups) & 1);
    AddEvents(a, next, o);
    fetched_ = next;
    AwaitValues();
    Emit(row, end, factor, self, o);
    ProxyFence();
    WarpgroupBarrier();
    if (!direct_ && row + kTile <= end) {
      StoreBox(row);
    } else {
      StoreTile(row, end);
      ProxyFence();
      WarpgroupBarrier();
    }
  }

  const Params& p_;
  const TileMaps& maps_;
  Shared& sm_;
  const Job& job_;
  int tid_, wg_;
  int row_, column_;  // of this thread in a 64-row accumulator
  uint32_t q_;        // the warpgroup's tile in shared memory
  bool direct_;       // o is not of the inputs' dtype
  int fetched_ = -1;  // first row of the tile that is under way
  bool in_flight_ = false;
  int parities_ = 0;  // of the next waits: bit 0 for q and k, bit 1 for v
};

}  // namespace sparsegdn::cuda::fused

#endif  // SPARSEGDN_KERNELS_CUDA_FUSED_OUTPUT_CUH_
