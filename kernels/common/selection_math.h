// The arithmetic of selection that every backend must share bit for bit.
//
// Everything here compiles for host and device. No expression may be contracted into an FMA: the
// host build uses -ffp-contract=off, device code goes through the _rn intrinsics, and fp64 is only
// ever multiplied or divided. docs/algorithm.md, "Budgets", is the text of these functions.
#ifndef SPARSEGDN_KERNELS_COMMON_SELECTION_MATH_H_
#define SPARSEGDN_KERNELS_COMMON_SELECTION_MATH_H_

#include <cmath>
#include <cstdint>

#include "sparsegdn/types.h"

#if defined(__CUDACC__)
#define SPARSEGDN_HD __host__ __device__ __forceinline__
#else
#define SPARSEGDN_HD inline
#endif

namespace sparsegdn::selection {

inline constexpr int kOffsetBits = 11;  // log2(kWindow)
static_assert((int64_t{1} << kOffsetBits) == kWindow);
inline constexpr int32_t kMaxFixedScore = 1 << 25;
inline constexpr int32_t kNeverSelected = -1;  // fixed-point score of a NaN
// Lanes of the sum of squares behind |v|.
inline constexpr int kNormLanes = 32;

SPARSEGDN_HD float MulRn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

SPARSEGDN_HD float AddRn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

SPARSEGDN_HD float SqrtRn(float a) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(a);
#else
  return std::sqrt(a);
#endif
}

// log_gate as the core uses it. NaN stays NaN.
SPARSEGDN_HD float ClampGate(float log_gate) {
  return log_gate < kMinLogGate ? kMinLogGate : log_gate;
}

// Max over the heads of a pair, in head order; NaN in either argument gives NaN.
SPARSEGDN_HD float CombineScores(float a, float b) {
  if (a != a) return a;
  if (b != b) return b;
  return a < b ? b : a;
}

// |v| of one row of `dim` floats: lane l sums v[i]^2 over i = l, l + 32, ... in ascending order
// (product rounded, then sum rounded), lanes are folded l += l + 16, 8, 4, 2, 1, then the root.
// `load(i)` returns element i widened to fp32. A device warp holds one lane per thread and folds
// with xor shuffles, which gives the same bits because fp addition commutes.
template <typename Load>
SPARSEGDN_HD float RowNorm(const Load& load, int dim) {
  float lane[kNormLanes];
  for (int l = 0; l < kNormLanes; ++l) lane[l] = 0.0f;
  for (int i = 0; i < dim; ++i) {
    const float x = load(i);
    lane[i % kNormLanes] = AddRn(lane[i % kNormLanes], MulRn(x, x));
  }
  for (int half = kNormLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lane[l] = AddRn(lane[l], lane[l + half]);
  }
  return SqrtRn(lane[0]);
}

// z = min(llrint(s * 2^16), 2^25), never below 0; kNeverSelected for NaN. s * 2^16 is exact unless
// it overflows, and +Inf then saturates like every large score.
SPARSEGDN_HD int32_t FixedScore(float s) {
  if (s != s) return kNeverSelected;
  const float x = MulRn(s, 65536.0f);
  if (x >= static_cast<float>(kMaxFixedScore)) return kMaxFixedScore;
  if (!(x > 0.0f)) return 0;
#if defined(__CUDA_ARCH__)
  return __float2int_rn(x);
#else
  return static_cast<int32_t>(std::llrint(x));
#endif
}

// z * (n / sum z) in fp64; 0 when the sum is 0. n counts the window's non-forced tokens.
SPARSEGDN_HD double NormalisedScore(int32_t z, int64_t n, int64_t sum) {
  if (sum == 0) return 0.0;
  return static_cast<double>(z) * (static_cast<double>(n) / static_cast<double>(sum));
}

// The kOffsetBits low bits of a window offset, reversed.
SPARSEGDN_HD uint32_t BitReverseOffset(uint32_t offset) {
#if defined(__CUDA_ARCH__)
  return __brev(offset) >> (32 - kOffsetBits);
#else
  uint32_t r = 0;
  for (int b = 0; b < kOffsetBits; ++b) r |= ((offset >> b) & 1u) << (kOffsetBits - 1 - b);
  return r;
#endif
}

// Sort key inside one pair: larger comes first. Score down, then reversed offset up. Equal to the
// order by NormalisedScore, which keeps distinct z <= 2^25 of one pair distinct in fp64.
SPARSEGDN_HD uint64_t PairKey(int32_t z, uint32_t offset) {
  const uint32_t tie = static_cast<uint32_t>(kWindow - 1) - BitReverseOffset(offset);
  return (static_cast<uint64_t>(static_cast<uint32_t>(z)) << kOffsetBits) | tie;
}
SPARSEGDN_HD int32_t KeyScore(uint64_t key) { return static_cast<int32_t>(key >> kOffsetBits); }
SPARSEGDN_HD uint32_t KeyOffset(uint64_t key) {
  const uint32_t tie = static_cast<uint32_t>(key) & static_cast<uint32_t>(kWindow - 1);
  return BitReverseOffset(static_cast<uint32_t>(kWindow - 1) - tie);
}

// Bounds with the mode's defaults filled in (a negative bound stands for the default).
struct Bounds {
  double min_retention;
  double max_retention;
};
SPARSEGDN_HD Bounds ResolveBudgetBounds(const Budget& b) {
  Bounds r{0.0, 1.0};
  if (b.mode == BudgetMode::kDense) return r;
  const bool coverage = b.mode == BudgetMode::kCoverage;
  const double twice = 2.0 * b.retention;
  r.min_retention = b.min_retention < 0 ? (coverage ? 0.02 : b.retention / 4) : b.min_retention;
  r.max_retention =
      b.max_retention < 0 ? (coverage ? 0.5 : (twice < 1.0 ? twice : 1.0)) : b.max_retention;
  return r;
}

// Per-window limits for n non-forced tokens: lo and hi events per pair, K over all pairs
// (kRetention). hi is raised to lo where rounding crosses them.
struct WindowLimits {
  int64_t lo;
  int64_t hi;
  int64_t total;
};
SPARSEGDN_HD WindowLimits ComputeWindowLimits(const Budget& b, int64_t n, int32_t num_k_heads) {
  const Bounds bounds = ResolveBudgetBounds(b);
  WindowLimits w;
  w.lo = static_cast<int64_t>(ceil(bounds.min_retention * static_cast<double>(n)));
  w.hi = static_cast<int64_t>(floor(bounds.max_retention * static_cast<double>(n)));
  if (w.hi < w.lo) w.hi = w.lo;
  w.total = static_cast<int64_t>(
      rint((b.retention * static_cast<double>(n)) * static_cast<double>(num_k_heads)));
  if (w.total < w.lo * num_k_heads) w.total = w.lo * num_k_heads;
  if (w.total > w.hi * num_k_heads) w.total = w.hi * num_k_heads;
  return w;
}

// Smallest sum of z^2 that covers tau of `total`, the pair's sum of z^2 over the window.
SPARSEGDN_HD uint64_t CoverageTarget(double tau, uint64_t total) {
  const double target = ceil(tau * static_cast<double>(total));
  if (target >= static_cast<double>(total)) return total;
  return static_cast<uint64_t>(target);
}

// A token that is an event of every pair, outside budget and normalisation (sparse modes only).
SPARSEGDN_HD bool IsForced(int64_t position, int64_t prompt_tokens, const Budget& b) {
  return position < b.keep_first || position >= prompt_tokens - b.keep_last;
}

// Rows [begin, end) of the tokens of [first, last) (absolute positions) that are not forced.
struct FreeRange {
  int64_t begin;
  int64_t end;  // >= begin
};
SPARSEGDN_HD FreeRange NonForced(int64_t first, int64_t last, int64_t prompt_tokens,
                                 const Budget& b) {
  FreeRange r{first, last};
  if (r.begin < b.keep_first) r.begin = b.keep_first < last ? b.keep_first : last;
  if (r.end > prompt_tokens - b.keep_last) r.end = prompt_tokens - b.keep_last;
  if (r.end < r.begin) r.end = r.begin;
  return r;
}

}  // namespace sparsegdn::selection

#endif  // SPARSEGDN_KERNELS_COMMON_SELECTION_MATH_H_
