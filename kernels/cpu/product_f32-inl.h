// fp32 panel products (kernel_table.h), one Highway target per inclusion.
#if defined(SPARSEGDN_KERNELS_CPU_PRODUCT_F32_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARSEGDN_KERNELS_CPU_PRODUCT_F32_INL_H_
#undef SPARSEGDN_KERNELS_CPU_PRODUCT_F32_INL_H_
#else
#define SPARSEGDN_KERNELS_CPU_PRODUCT_F32_INL_H_
#endif

#include <cstring>

#include "hwy/highway.h"
#include "kernels/cpu/kernel_table.h"

HWY_BEFORE_NAMESPACE();
namespace sparsegdn::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using V32 = hn::Vec<F32>;
inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()));
// A micro-tile is kTileRows x two vectors: 16 accumulators where there are 32 registers.
inline constexpr int kTileCols = 2 * kLanes <= kPanel ? 2 * kLanes : kPanel;
inline constexpr int kTileRows = kLanes >= 16 || HWY_ARCH_ARM ? 8 : 4;

template <int R>
struct Tile {
  V32 left[R];
  V32 right[R];
};

template <int R>
HWY_INLINE void ZeroTile(Tile<R>& t) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) t.left[r] = t.right[r] = hn::Zero(F32());
}

// t += sign * a[R][depth] b[depth][32] on the tile's columns.
template <int R, bool kSubtract = false>
HWY_INLINE void Accumulate(const float* a, int64_t lda, int depth, const float* b, Tile<R>& t) {
  const F32 d;
  for (int i = 0; i < depth; ++i) {
    const V32 b0 = hn::LoadU(d, b + i * kPanel);
    const V32 b1 = hn::LoadU(d, b + i * kPanel + kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const V32 x = hn::Set(d, a[r * lda + i]);
      t.left[r] = kSubtract ? hn::NegMulAdd(x, b0, t.left[r]) : hn::MulAdd(x, b0, t.left[r]);
      t.right[r] = kSubtract ? hn::NegMulAdd(x, b1, t.right[r]) : hn::MulAdd(x, b1, t.right[r]);
    }
  }
}

template <int R>
HWY_INLINE void LoadTile(const float* c, Tile<R>& t) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    t.left[r] = hn::LoadU(F32(), c + r * kPanel);
    t.right[r] = hn::LoadU(F32(), c + r * kPanel + kLanes);
  }
}

template <int R>
HWY_INLINE void StoreTile(const Tile<R>& t, float* c) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    hn::StoreU(t.left[r], F32(), c + r * kPanel);
    hn::StoreU(t.right[r], F32(), c + r * kPanel + kLanes);
  }
}

template <int R>
HWY_INLINE void ScaleRow(Tile<R>& t, int r, float factor) {
  const V32 f = hn::Set(F32(), factor);
  t.left[r] = hn::Mul(t.left[r], f);
  t.right[r] = hn::Mul(t.right[r], f);
}

// Calls body.template operator()<R>(first_row) over rows in tiles of kTileRows, 4, 2 and 1.
template <typename Body>
HWY_INLINE void ForRowTiles(int rows, const Body& body) {
  int m = 0;
  for (; m + kTileRows <= rows; m += kTileRows) body.template Run<kTileRows>(m);
  for (; m + 4 <= rows; m += 4) body.template Run<4>(m);
  for (; m + 2 <= rows; m += 2) body.template Run<2>(m);
  for (; m < rows; ++m) body.template Run<1>(m);
}

struct MultiplyBody {
  const float* a;
  int64_t lda;
  int depth;
  const float* b;
  float* c;
  template <int R>
  HWY_INLINE void Run(int m) const {
    for (int col = 0; col < kPanel; col += kTileCols) {
      Tile<R> t;
      ZeroTile(t);
      Accumulate(a + m * lda, lda, depth, b + col, t);
      StoreTile(t, c + m * kPanel + col);
    }
  }
};

inline void Multiply(const float* a, int64_t lda, int rows, int depth, const float* b, float* c) {
  ForRowTiles(rows, MultiplyBody{a, lda, depth, b, c});
}

struct OutputBody {
  const OutputArgs<float>& args;
  template <int R>
  HWY_INLINE void Run(int m) const {
    const int visible = args.row_events[m + R - 1];
    for (int col = 0; col < kPanel; col += kTileCols) {
      Tile<R> t;
      ZeroTile(t);
      Accumulate(args.q + m * args.ldq, args.ldq, args.depth, args.state + col, t);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) ScaleRow(t, r, args.alpha[m + r]);
      Accumulate(args.probs + m * kRows, kRows, visible, args.updates + col, t);
      StoreTile(t, args.c + m * kPanel + col);
    }
  }
};

inline void Output(const OutputArgs<float>& args) { ForRowTiles(args.rows, OutputBody{args}); }

struct UpdateBody {
  const UpdateArgs<float>& args;
  template <int R>
  HWY_INLINE void Run(int m) const {
    for (int col = 0; col < kPanel; col += kTileCols) {
      Tile<R> t;
      float* state = args.state + m * kPanel + col;
      LoadTile(state, t);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) ScaleRow(t, r, args.decay);
      Accumulate(args.keys_t + m * kRows, kRows, args.events, args.updates + col, t);
      StoreTile(t, state);
    }
  }
};

inline void Update(const UpdateArgs<float>& args) { ForRowTiles(args.dim_k, UpdateBody{args}); }

inline void PackState(const float*, int, float*) {}  // the state is its own operand

inline void PackKeys(const float* rows, int64_t ld, int dim_k, int64_t panel_stride, float* panels,
                     float* keys_t) {
  for (int d = 0; d < dim_k; ++d) {
    float* left = panels + d * kPanel;
    float* right = left + panel_stride;
    for (int i = 0; i < kPanel; ++i) left[i] = rows[i * ld + d];
    for (int i = 0; i < kPanel; ++i) right[i] = rows[(i + kPanel) * ld + d];
    std::memcpy(keys_t + d * kRows, left, sizeof(float) * kPanel);
    std::memcpy(keys_t + d * kRows + kPanel, right, sizeof(float) * kPanel);
  }
}

inline void PackUpdates(const float* u, const float* factor, int events16, float* scaled, float*) {
  const F32 d;
  for (int i = 0; i < events16; ++i) {
    const V32 f = hn::Set(d, factor[i]);
    for (int col = 0; col < kPanel; col += kLanes) {
      hn::StoreU(hn::Mul(f, hn::LoadU(d, u + i * kPanel + col)), d, scaled + i * kPanel + col);
    }
  }
}

// W_b = rhs_b - sum_{l<b} A_bl U_l, then U_b = T_bb W_b.
struct SolveBody {
  const float* a;  // block row of the system
  int depth;       // 16 * blocks before this one
  const float* u;  // solved blocks
  const float* rhs;
  float* out;
  template <int R>
  HWY_INLINE void Run(int m) const {
    for (int col = 0; col < kPanel; col += kTileCols) {
      Tile<R> t;
      LoadTile(rhs + m * kPanel + col, t);
      Accumulate<R, true>(a + m * kRows, kRows, depth, u + col, t);
      StoreTile(t, out + m * kPanel + col);
    }
  }
};

inline void Solve(const float* system, const float* inverse, int blocks, bool adjacent,
                  float* panel) {
  HWY_ALIGN float w[kBlock * kPanel];
  HWY_ALIGN float y[2][kBlock * kPanel];  // T_bb rhs_b, for the adjacent form
  for (int b = 0; b < blocks; ++b) {
    const float* t = inverse + b * kBlock * kBlock;
    const float* a = system + b * kBlock * kRows;
    float* u = panel + b * kBlock * kPanel;
    if (!adjacent) {
      ForRowTiles(kBlock, SolveBody{a, b * kBlock, panel, u, w});
      ForRowTiles(kBlock, MultiplyBody{t, kBlock, kBlock, w, u});
      continue;
    }
    if (b + 1 < blocks) ForRowTiles(kBlock, MultiplyBody{t, kBlock, kBlock, u, y[b % 2]});
    if (b == 0) {
      std::memcpy(w, u, sizeof(w));
    } else {
      const int before = (b - 1) * kBlock;
      ForRowTiles(kBlock, SolveBody{a + before, kBlock, y[(b - 1) % 2], u, w});
    }
    ForRowTiles(kBlock, MultiplyBody{t, kBlock, kBlock, w, u});
  }
}

}  // namespace sparsegdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SPARSEGDN_KERNELS_CPU_PRODUCT_F32_INL_H_
