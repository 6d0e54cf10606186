// c = a b on one panel of 32 columns. A micro-tile keeps kTileRows x 2 vectors in registers; the
// widening of BF16 costs two instructions a vector and is shared by the tile's rows.
#include <cstring>

#include "kernels/cpu/ops/ops_kernels.h"

// Arrays of vectors need a size known at compile time.
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/ops/gemm_kernel.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sparsegdn::cpu_ops::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using V32 = hn::Vec<F32>;
inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()));
inline constexpr int kTileCols = 2 * kLanes <= kPanel ? 2 * kLanes : kPanel;
// x86 before AVX-512 has 16 registers, everything else 32. Better targets have smaller values.
inline constexpr bool kFewRegisters = HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3;
inline constexpr int kTileRows = kFewRegisters ? 6 : 12;

HWY_INLINE V32 LoadWide(const float* p) { return hn::LoadU(F32(), p); }
HWY_INLINE V32 LoadWide(const uint16_t* p) {
  const hn::Rebind<uint32_t, F32> d32;
  const hn::Rebind<uint16_t, F32> d16;
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, p))));
}

template <int R, typename T>
HWY_INLINE void MicroTile(const TileArgs& t, int64_t row, int col) {
  const F32 d;
  const T* b = static_cast<const T*>(t.b) + col;
  const float* a = t.a + row * t.lda;
  float* c = t.c + row * t.ldc + col;
  V32 left[R], right[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    left[r] = t.accumulate ? hn::LoadU(d, c + r * t.ldc) : hn::Zero(d);
    right[r] = t.accumulate ? hn::LoadU(d, c + r * t.ldc + kLanes) : hn::Zero(d);
  }
  for (int64_t i = 0; i < t.depth; ++i) {
    const V32 b0 = LoadWide(b + i * kPanel);
    const V32 b1 = LoadWide(b + i * kPanel + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const V32 x = hn::Set(d, a[r * t.lda + i]);
      left[r] = hn::MulAdd(x, b0, left[r]);
      right[r] = hn::MulAdd(x, b1, right[r]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    hn::StoreU(left[r], d, c + r * t.ldc);
    hn::StoreU(right[r], d, c + r * t.ldc + kLanes);
  }
}

// The last rows, fewer than a whole tile, in one tile of exactly their number.
template <int R, typename T>
HWY_INLINE void LastRows(const TileArgs& t, int64_t row, int64_t left) {
  if constexpr (R > 0) {
    if (left == R) {
      for (int col = 0; col < kPanel; col += kTileCols) MicroTile<R, T>(t, row, col);
    } else {
      LastRows<R - 1, T>(t, row, left);
    }
  }
}

template <typename T>
HWY_INLINE void GemmTile(const TileArgs& t) {
  int64_t row = 0;
  for (; row + kTileRows <= t.rows; row += kTileRows) {
    for (int col = 0; col < kPanel; col += kTileCols) MicroTile<kTileRows, T>(t, row, col);
  }
  LastRows<kTileRows - 1, T>(t, row, t.rows - row);
}

void GemmF32(const TileArgs& t) { GemmTile<float>(t); }
void GemmBf16(const TileArgs& t) { GemmTile<uint16_t>(t); }

}  // namespace sparsegdn::cpu_ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sparsegdn::cpu_ops {

HWY_EXPORT(GemmF32);
HWY_EXPORT(GemmBf16);
void GemmTileF32(const TileArgs& args) { HWY_DYNAMIC_DISPATCH(GemmF32)(args); }
void GemmTileBf16(const TileArgs& args) { HWY_DYNAMIC_DISPATCH(GemmBf16)(args); }

}  // namespace sparsegdn::cpu_ops
#endif
