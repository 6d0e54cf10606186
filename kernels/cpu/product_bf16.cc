// bf16 panel products with AVX512-BF16 dot products (kernel_table.h), chosen at run time.
//
// Only functions with the target attribute use the instruction set, so that this file can be part
// of a build for any x86-64. vdpbf16ps multiplies pairs exactly and sums in fp32; denormal inputs
// count as zero.
#include "kernels/cpu/kernel_table.h"

#if defined(__x86_64__) && defined(__GNUC__)
// GCC 12 takes its own undefined-register idiom in these headers for a read of garbage.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

#include <cstring>

#define SPARSEGDN_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))
#define SPARSEGDN_BF16_INLINE SPARSEGDN_BF16 __attribute__((always_inline)) inline

namespace sparsegdn::cpu {
namespace {

using Bf16 = uint16_t;
constexpr int kPairRow = 2 * kPanel;  // elements of one packed pair of depths

template <int R>
struct Tile {
  __m512 left[R];
  __m512 right[R];
};

SPARSEGDN_BF16_INLINE __m512bh LoadPairs(const Bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }

SPARSEGDN_BF16_INLINE __m512bh BroadcastPair(const Bf16* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof(pair));
  return (__m512bh)_mm512_set1_epi32(pair);
}

template <int R>
SPARSEGDN_BF16_INLINE void ZeroTile(Tile<R>& t) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) t.left[r] = t.right[r] = _mm512_setzero_ps();
}

template <int R>
SPARSEGDN_BF16_INLINE void Accumulate(const Bf16* a, int64_t lda, int depth, const Bf16* b,
                                      Tile<R>& t) {
  for (int i = 0; i < depth; i += 2) {
    const __m512bh b0 = LoadPairs(b + i * kPanel);
    const __m512bh b1 = LoadPairs(b + i * kPanel + kPanel);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512bh x = BroadcastPair(a + r * lda + i);
      t.left[r] = _mm512_dpbf16_ps(t.left[r], x, b0);
      t.right[r] = _mm512_dpbf16_ps(t.right[r], x, b1);
    }
  }
}

// The same in fp32, a [R][kRows].
template <int R>
SPARSEGDN_BF16_INLINE void AccumulateF32(const float* a, int depth, const float* b, Tile<R>& t) {
  for (int i = 0; i < depth; ++i) {
    const __m512 b0 = _mm512_loadu_ps(b + i * kPanel);
    const __m512 b1 = _mm512_loadu_ps(b + i * kPanel + 16);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512 x = _mm512_set1_ps(a[r * kRows + i]);
      t.left[r] = _mm512_fmadd_ps(x, b0, t.left[r]);
      t.right[r] = _mm512_fmadd_ps(x, b1, t.right[r]);
    }
  }
}

template <int R>
SPARSEGDN_BF16_INLINE void StoreTile(const Tile<R>& t, float* c) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    _mm512_storeu_ps(c + r * kPanel, t.left[r]);
    _mm512_storeu_ps(c + r * kPanel + 16, t.right[r]);
  }
}

// 16 floats to the low halves of 32-bit lanes.
SPARSEGDN_BF16_INLINE __m512i RoundToLow(__m512 x) {
  return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x));
}

// Two rows of 16 floats interleaved as 32 bf16.
SPARSEGDN_BF16_INLINE void StorePair(__m512 even, __m512 odd, Bf16* out) {
  const __m512i high = _mm512_slli_epi32(RoundToLow(odd), 16);
  _mm512_storeu_si512(out, _mm512_or_si512(RoundToLow(even), high));
}

template <int R>
SPARSEGDN_BF16_INLINE void MultiplyRows(const Bf16* a, int64_t lda, int depth, const Bf16* b,
                                        float* c) {
  Tile<R> t;
  ZeroTile(t);
  Accumulate(a, lda, depth, b, t);
  StoreTile(t, c);
}

SPARSEGDN_BF16 void Multiply(const Bf16* a, int64_t lda, int rows, int depth, const Bf16* b,
                             float* c) {
  int m = 0;
  for (; m + 8 <= rows; m += 8) MultiplyRows<8>(a + m * lda, lda, depth, b, c + m * kPanel);
  for (; m + 4 <= rows; m += 4) MultiplyRows<4>(a + m * lda, lda, depth, b, c + m * kPanel);
  for (; m < rows; ++m) MultiplyRows<1>(a + m * lda, lda, depth, b, c + m * kPanel);
}

template <int R>
SPARSEGDN_BF16_INLINE void OutputRows(const OutputArgs<Bf16>& args, int m) {
  Tile<R> t;
  ZeroTile(t);
  Accumulate(args.q + m * args.ldq, args.ldq, args.depth, args.state, t);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const __m512 alpha = _mm512_set1_ps(args.alpha[m + r]);
    t.left[r] = _mm512_mul_ps(t.left[r], alpha);
    t.right[r] = _mm512_mul_ps(t.right[r], alpha);
  }
  AccumulateF32(args.probs + m * kRows, args.row_events[m + R - 1], args.updates, t);
  StoreTile(t, args.c + m * kPanel);
}

SPARSEGDN_BF16 void Output(const OutputArgs<Bf16>& args) {
  int m = 0;
  for (; m + 8 <= args.rows; m += 8) OutputRows<8>(args, m);
  for (; m + 4 <= args.rows; m += 4) OutputRows<4>(args, m);
  for (; m < args.rows; ++m) OutputRows<1>(args, m);
}

// State rows m .. m + R - 1, R even, or the last row alone paired with zeros.
template <int R>
SPARSEGDN_BF16_INLINE void UpdateRows(const UpdateArgs<Bf16>& args, int m) {
  Tile<R> t;
  float* state = args.state + m * kPanel;
  const __m512 decay = _mm512_set1_ps(args.decay);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    t.left[r] = _mm512_mul_ps(decay, _mm512_loadu_ps(state + r * kPanel));
    t.right[r] = _mm512_mul_ps(decay, _mm512_loadu_ps(state + r * kPanel + 16));
  }
  Accumulate(args.keys_t + m * kRows, kRows, args.events, args.updates, t);
  Accumulate(args.keys_t + m * kRows, kRows, args.events, args.updates_low, t);
  StoreTile(t, state);
  Bf16* packed = args.state_packed + m * kPanel;
  const __m512 zero = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int r = 0; r < R; r += 2) {
    StorePair(t.left[r], r + 1 < R ? t.left[(r + 1) % R] : zero, packed + r * kPanel);
    StorePair(t.right[r], r + 1 < R ? t.right[(r + 1) % R] : zero, packed + r * kPanel + kPanel);
  }
}

SPARSEGDN_BF16 void Update(const UpdateArgs<Bf16>& args) {
  int m = 0;
  for (; m + 8 <= args.dim_k; m += 8) UpdateRows<8>(args, m);
  for (; m + 2 <= args.dim_k; m += 2) UpdateRows<2>(args, m);
  if (m < args.dim_k) UpdateRows<1>(args, m);
}

SPARSEGDN_BF16 void PackState(const float* state, int dim_k, Bf16* packed) {
  for (int d = 0; d < dim_k; d += 2) {
    for (int col = 0; col < kPanel; col += 16) {
      const float* row = state + d * kPanel + col;
      const __m512 odd = d + 1 < dim_k ? _mm512_loadu_ps(row + kPanel) : _mm512_setzero_ps();
      StorePair(_mm512_loadu_ps(row), odd, packed + d * kPanel + 2 * col);
    }
  }
}

// x minus its bf16 rounding; 0 where x is not finite, so that Inf stays Inf.
SPARSEGDN_BF16_INLINE __m512 RoundingError(__m512 x) {
  const __m512 rounded = _mm512_castsi512_ps(_mm512_slli_epi32(RoundToLow(x), 16));
  const __m512 error = _mm512_sub_ps(x, rounded);
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(error, error, _CMP_ORD_Q), error);
}

SPARSEGDN_BF16 void PackUpdates(const float* u, const float* factor, int events16, Bf16* scaled,
                                Bf16* low) {
  for (int i = 0; i < events16; i += 2) {
    const __m512 f0 = _mm512_set1_ps(factor[i]);
    const __m512 f1 = _mm512_set1_ps(factor[i + 1]);
    for (int col = 0; col < kPanel; col += 16) {
      const float* row = u + i * kPanel + col;
      const __m512 even = _mm512_mul_ps(f0, _mm512_loadu_ps(row));
      const __m512 odd = _mm512_mul_ps(f1, _mm512_loadu_ps(row + kPanel));
      StorePair(even, odd, scaled + i * kPanel + 2 * col);
      StorePair(RoundingError(even), RoundingError(odd), low + i * kPanel + 2 * col);
    }
  }
}

// keys_t rows d and d + 1 are the low and high halves of the packed pairs.
SPARSEGDN_BF16 void PackKeys(const Bf16* rows, int64_t ld, int dim_k, int64_t panel_stride,
                             Bf16* panels, Bf16* keys_t) {
  const __m512i index =
      _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                         _mm512_set1_epi32(static_cast<int>(ld / 2)));
  for (int d = 0; d < dim_k; d += 2) {
    for (int i = 0; i < kRows; i += 16) {
      const __m512i pairs = _mm512_i32gather_epi32(index, rows + i * ld + d, 4);
      Bf16* panel = panels + (i / kPanel) * panel_stride + d * kPanel + 2 * (i % kPanel);
      _mm512_storeu_si512(panel, pairs);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(keys_t + d * kRows + i),
                          _mm512_cvtepi32_epi16(pairs));
      if (d + 1 == dim_k) continue;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(keys_t + (d + 1) * kRows + i),
                          _mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
    }
  }
}

constexpr ProductKernels<Bf16> kTable = {"avx512_bf16", Multiply, Output,     Update,
                                         PackState,     PackKeys, PackUpdates};

}  // namespace

const ProductKernels<uint16_t>* GetBf16Kernels() {
  static const bool supported =
      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return supported ? &kTable : nullptr;
}

}  // namespace sparsegdn::cpu

#else

namespace sparsegdn::cpu {

const ProductKernels<uint16_t>* GetBf16Kernels() { return nullptr; }

}  // namespace sparsegdn::cpu

#endif
