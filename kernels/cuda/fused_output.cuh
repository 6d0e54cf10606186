// The output side of the fused kernel: two warpgroups take tiles of 64 tokens in turn.
//
//   O = scale (e^{G_t} Q S_B + P U + self term),  P_ti = e^{G_t - G_i} q_t . k_i for events i <= t
// Q S_B and Q K^T need only the published state, so they run while the state side forms U. The next
// tile's q and k are fetched as soon as this tile's products have read theirs, its v once o is out.
#ifndef SPARSEGDN_KERNELS_CUDA_FUSED_OUTPUT_CUH_
#define SPARSEGDN_KERNELS_CUDA_FUSED_OUTPUT_CUH_

#include "kernels/cuda/fused_shared.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace sparsegdn::cuda::fused {

template <typename T>
class OutputSide {
 public:
  __device__ __forceinline__ OutputSide(const Params& p, Shared& sm)
      : p_(p), sm_(sm), job_(sm.job), tid_(threadIdx.x % 128), wg_(threadIdx.x / 128 - 2) {
    row_ = tid_ / 32 * 16 + tid_ % 32 / 4;
    column_ = 2 * (tid_ % 4);
    q_ = SharedAddress(sm.tile[wg_][0]);
  }

  __device__ __forceinline__ void Run() {
    int tiles = 0;  // of both warpgroups
    for (int n = job_.warm_groups; n < job_.groups; ++n) {
      const int parity = (n - job_.warm_groups) & 1;
      BarrierWait(&sm_.state_full, parity);
      const int begin = sm_.rows[n % 4].begin, end = sm_.rows[n % 4].end;
      bool u_seen = false;
      for (int row = begin; row < end; row += kTile, ++tiles) {
        if (tiles % 2 != wg_) continue;
        // The warpgroup's next tile: two on, or among the first two of the next group.
        int next = row + 2 * kTile;
        if (next >= end) {
          const int left = (end - row + kTile - 1) / kTile;
          next = (tiles + left) % 2 == wg_ ? end : end + kTile;
        }
        Tile(n, row, end, next, u_seen ? -1 : parity);
        u_seen = true;
      }
      BarrierArriveWarp(&sm_.group_done);
    }
    CopyWait<0>();
  }

 private:
  __device__ __forceinline__ void WarpgroupBarrier() {
    NamedBarrier(kBarrierGroup0 + 2 + wg_, 128);
  }

  // Rows [row, row + 64) of one of q, k, v (tensor 0, 1, 2) to its panels; zeros past the segment.
  __device__ __forceinline__ void CopyTile(int tensor, const ConstTensorRef& x, int head, int row) {
    const uint32_t to = q_ + tensor * 2 * kPanel;
    const T* from = static_cast<const T*>(x.data) + head * x.head_stride + tid_ % 16 * 8;
    const int piece = tid_ % 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = tid_ / 16 + 8 * i;
      const bool live = row + r < job_.end_row;
      CopyAsync16(to + piece / 8 * kPanel + PanelOffset(r, piece % 8 * 8),
                  from + (live ? (row + r) * x.token_stride : 0), live);
    }
  }
  __device__ __forceinline__ void FetchQueries(int row) {
    if (row < job_.end_row) {
      CopyTile(0, p_.q, job_.pair, row);
      if (job_.self_term) CopyTile(1, p_.k, job_.pair, row);
    }
    CopyCommit();
  }
  __device__ __forceinline__ void FetchValues(int row) {
    if (row < job_.end_row && job_.self_term) CopyTile(2, p_.v, job_.head, row);
    CopyCommit();
  }

  // q_t . k_t of this thread's two rows: the diagonals of the warp's two 16 x 8 products.
  __device__ __forceinline__ float2 SelfDots() {
    const int lane = tid_ % 32;
    uint32_t at = q_ + PanelOffset(tid_ / 32 * 16 + lane % 16, lane / 16 * 8);
    float low[4] = {}, high[4] = {};  // columns 0..7 and 8..15
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t from = (at ^ (k % 4 << 5)) + k / 4 * kPanel;
      uint32_t a[4], b[4];
      LoadMatrices(a, from);
      LoadMatrices(b, from + 2 * kPanel);
      MmaHalf<T>(low, a, b[0], b[2]);
      MmaHalf<T>(high, a, b[1], b[3]);
    }
    const int g = lane / 4;
    const float x = g % 2 == 0 ? low[0] : low[1], y = g % 2 == 0 ? high[2] : high[3];
    const int owner = (lane & ~3) + g / 2;
    return make_float2(__shfl_sync(0xffffffffu, x, owner), __shfl_sync(0xffffffffu, y, owner));
  }

  // Q K^T in `scores` and Q S_B in `o`; returns q . k of the thread's rows.
  __device__ __forceinline__ float2 StateProducts(int n, float (&scores)[32], float (&o)[64]) {
    const uint32_t keys = SharedAddress(sm_.key[n % 2]), state = SharedAddress(sm_.state[0]);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t step = k / 4 * kPanel + k % 4 * kStepK;
      WgmmaN64<T, 0, 0>(scores, PanelDescriptor(q_ + step), PanelDescriptor(keys + step), k > 0);
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      WgmmaN128<T, 0, 1>(o, PanelDescriptor(q_ + k / 4 * kPanel + k % 4 * kStepK),
                         PanelDescriptor(state + k * kStepKTransposed, kStatePanel), k > 0);
    }
    WgmmaCommit();
    float2 dots = make_float2(0.0f, 0.0f);
    if (job_.self_term) dots = SelfDots();
    WgmmaWait<0>();
    FenceRegisters(scores);
    FenceRegisters(o);
    return dots;
  }

  // Per-row values of this thread's two rows.
  struct RowFactors {
    float high, low;  // gate sum through the token
    float norm;       // of q
    float self;       // beta, and the norm of k where it is asked for
  };
  __device__ __forceinline__ RowFactors LoadRow(int row, int end) const {
    const int64_t at = row < end ? row : end - 1;
    const float2 g = job_.gate_sum[at];
    RowFactors f{g.x, g.y, 1.0f, 0.0f};
    if (job_.self_term) f.self = job_.beta[at];
    if (p_.normalize_qk) {
      f.norm = p_.ws.q_norm[job_.pair * p_.num_tokens + at];
      f.self *= f.norm * p_.ws.k_norm[job_.pair * p_.num_tokens + at];
    }
    return f;
  }

  // P from Q K^T as the A operand of P U; clears `self` of rows that are events.
  __device__ __forceinline__ void FormP(const Factors& e, bool scaled, int row, RowFactors (&f)[2],
                                        float (&scores)[32], uint32_t (&a)[4][4]) {
    if (!scaled) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 gates = *reinterpret_cast<const float4*>(&e.gate[8 * j + column_]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          scores[4 * j + 2 * half] *= Decay(f[half].high, f[half].low, gates.x, gates.y);
          scores[4 * j + 2 * half + 1] *= Decay(f[half].high, f[half].low, gates.z, gates.w);
        }
      }
    }
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
      if (hit != 0) f[half].self = 0.0f;
    }
  }

  __device__ __forceinline__ void AddEvents(const uint32_t (&a)[4][4], float (&o)[64]) {
    const uint32_t u = SharedAddress(sm_.u[0]);
    FenceRegisters(o);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      WgmmaN128A<T, 1>(o, a[k], PanelDescriptor(u + k * kStepKTransposed, kPanel), 1);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    FenceRegisters(o);
  }

  // factor * o + self * v, in this thread's places of the v panels where o has 16 bits.
  __device__ __forceinline__ void Emit(int row, int end, const float (&factor)[2],
                                       const float (&self)[2], float (&o)[64]) {
    const uint32_t base = CellBase(sm_.tile[wg_][2][0], row_, column_);
    const bool bf16 = p_.o.dtype == DType::kBF16, wide = p_.o.dtype == DType::kF32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const uint32_t cell = (base ^ (j % 8 << 4)) + half * 1024 + j / 8 * kPanel;
        float& x = o[4 * j + 2 * half];
        float& y = o[4 * j + 2 * half + 1];
        x *= factor[half];
        y *= factor[half];
        if (job_.self_term) {
          const float2 v = Unpack<T>(LoadCell(cell));
          x += self[half] * v.x;
          y += self[half] * v.y;
        }
        if (!wide) {
          const uint32_t as_bf16 = Pack<__nv_bfloat16>(x, y), as_half = Pack<__half>(x, y);
          StoreCell(cell, bf16 ? as_bf16 : as_half);
        }
      }
    }
    if (!wide) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + row_ + 8 * half;
      float* to = static_cast<float*>(p_.o.data) + r * p_.o.token_stride +
                  job_.head * p_.o.head_stride + column_;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        if (r >= end) break;
        to[8 * j] = o[4 * j + 2 * half];
        to[8 * j + 1] = o[4 * j + 2 * half + 1];
      }
    }
  }
  __device__ __forceinline__ void StoreTile(int row, int end) {
    if (p_.o.dtype == DType::kF32) return;
    uint16_t* to = static_cast<uint16_t*>(p_.o.data) + job_.head * p_.o.head_stride;
    const int piece = tid_ % 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = tid_ / 16 + 8 * i;
      if (row + r >= end) break;
      *reinterpret_cast<uint4*>(to + (row + r) * p_.o.token_stride + piece * 8) =
          *reinterpret_cast<const uint4*>(sm_.tile[wg_][2][piece / 8] +
                                          PanelOffset(r, piece % 8 * 8));
    }
  }

  // One tile; `u_parity` >= 0: U is not known to be there yet.
  __device__ __forceinline__ void Tile(int n, int row, int end, int next, int u_parity) {
    if (fetched_ != row) {
      CopyWait<0>();
      WarpgroupBarrier();
      FetchQueries(row);
      FetchValues(row);
    }
    RowFactors f[2] = {LoadRow(row + row_, end), LoadRow(row + row_ + 8, end)};
    CopyWait<1>();  // q and k
    ProxyFence();
    WarpgroupBarrier();
    float scores[32], o[64];
    const float2 dots = StateProducts(n, scores, o);
    WarpgroupBarrier();  // q and k are read
    FetchQueries(next);
    const Factors& e = sm_.factors[n % 2];
    const bool scaled = e.before.x - e.after.x <= kScaledFrameLog2<T>;
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[half] = Decay(f[half].high, f[half].low, e.before.x, e.before.y);
      f[half].self *= half == 0 ? dots.x : dots.y;
      if (scaled) continue;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        o[4 * j + 2 * half] *= factor[half];
        o[4 * j + 2 * half + 1] *= factor[half];
      }
      factor[half] = 1.0f;
    }
    uint32_t a[4][4];
    FormP(e, scaled, row, f, scores, a);
    if (u_parity >= 0) BarrierWait(&sm_.u_full, u_parity);
    AddEvents(a, o);
    factor[0] *= f[0].norm * p_.scale;
    factor[1] *= f[1].norm * p_.scale;
    const float self[2] = {f[0].self * p_.scale, f[1].self * p_.scale};
    CopyWait<1>();  // v
    WarpgroupBarrier();
    Emit(row, end, factor, self, o);
    WarpgroupBarrier();
    StoreTile(row, end);
    WarpgroupBarrier();
    FetchValues(next);
    fetched_ = next;
  }

  const Params& p_;
  Shared& sm_;
  const Job& job_;
  int tid_, wg_;
  int row_, column_;  // of this thread in a 64-row accumulator
  uint32_t q_;        // the warpgroup's tile in shared memory
  int fetched_ = -1;  // first row of the tile that is under way
};

}  // namespace sparsegdn::cuda::fused

#endif  // SPARSEGDN_KERNELS_CUDA_FUSED_OUTPUT_CUH_
