// Norms, activations, gates and the softmax, one row at a time, in FP32.
#include <cmath>
#include <limits>

#include "kernels/cpu/ops/ops_kernels.h"

#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/ops/row_kernels.cc"
// The order of these is required.
// clang-format off
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "hwy/contrib/math/math-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace sparsegdn::cpu_ops::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using V32 = hn::Vec<F32>;
inline constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(F32()));

// The library's exp is defined up to 104 only, beyond what FP32 holds, and gives 0 for NaN, which
// would hide it. e^88 is close enough to infinity for a sigmoid.
HWY_INLINE V32 ExpOf(V32 x) {
  const V32 clamped = hn::Min(x, hn::Set(F32(), 88.0f));
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(F32(), clamped));
}
HWY_INLINE V32 Sigmoid(V32 x) {
  const V32 one = hn::Set(F32(), 1.0f);
  return hn::Div(one, hn::Add(one, ExpOf(hn::Neg(x))));
}

// Calls body(offset, load, store) for whole vectors and once for the rest, which is padded with
// zeros on loads and cut on stores.
template <typename Body>
HWY_INLINE void ForEachVector(int64_t n, const Body& body) {
  const F32 d;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    body(
        i, [&](const float* p) { return hn::LoadU(d, p + i); },
        [&](V32 v, float* p) { hn::StoreU(v, d, p + i); });
  }
  if (i == n) return;
  const int64_t rest = n - i;
  body(
      i,
      [&](const float* p) {
        HWY_ALIGN float part[16] = {};
        for (int64_t j = 0; j < rest; ++j) part[j] = p[i + j];
        return hn::Load(d, part);
      },
      [&](V32 v, float* p) {
        HWY_ALIGN float part[16];
        hn::Store(v, d, part);
        for (int64_t j = 0; j < rest; ++j) p[i + j] = part[j];
      });
}

HWY_INLINE float InverseRms(const float* x, int64_t n, float eps) {
  const F32 d;
  V32 sum = hn::Zero(d);
  ForEachVector(n, [&](int64_t, auto load, auto) {
    const V32 v = load(x);
    sum = hn::MulAdd(v, v, sum);
  });
  const float mean = hn::GetLane(hn::SumOfLanes(d, sum)) / static_cast<float>(n);
  return 1.0f / std::sqrt(mean + eps);
}

void RmsNorm(const float* x, const float* weight, float eps, int64_t n, float* y) {
  const V32 scale = hn::Set(F32(), InverseRms(x, n, eps));
  const V32 one = hn::Set(F32(), 1.0f);
  ForEachVector(n, [&](int64_t, auto load, auto store) {
    store(hn::Mul(hn::Mul(load(x), scale), hn::Add(one, load(weight))), y);
  });
}

void GatedNorm(const float* o, const float* z, const float* weight, float eps, int64_t n,
               float* y) {
  const V32 scale = hn::Set(F32(), InverseRms(o, n, eps));
  ForEachVector(n, [&](int64_t, auto load, auto store) {
    const V32 gate = load(z);
    const V32 normed = hn::Mul(load(weight), hn::Mul(load(o), scale));
    store(hn::Mul(normed, hn::Mul(gate, Sigmoid(gate))), y);
  });
}

void SwiGlu(const float* gate, const float* up, int64_t n, float* y) {
  ForEachVector(n, [&](int64_t, auto load, auto store) {
    const V32 g = load(gate);
    store(hn::Mul(hn::Mul(g, Sigmoid(g)), load(up)), y);
  });
}

void SigmoidGate(const float* gate, float scale, int64_t n, float* x) {
  const V32 s = hn::Set(F32(), scale);
  ForEachVector(n, [&](int64_t, auto load, auto store) {
    store(hn::Mul(hn::Mul(load(x), s), Sigmoid(load(gate))), x);
  });
}

void Rotate(const float* cos, const float* sin, int64_t n, float* x) {
  ForEachVector(n, [&](int64_t, auto load, auto store) {
    const V32 c = load(cos), s = load(sin), low = load(x), high = load(x + n);
    store(hn::Sub(hn::Mul(low, c), hn::Mul(high, s)), x);
    store(hn::Add(hn::Mul(high, c), hn::Mul(low, s)), x + n);
  });
}

void ConvSilu(const ConvArgs& args) {
  ForEachVector(args.n, [&](int64_t, auto load, auto store) {
    V32 sum = hn::Mul(load(args.taps), load(args.rows[0]));
    sum = hn::MulAdd(load(args.taps + args.tap_stride), load(args.rows[1]), sum);
    sum = hn::MulAdd(load(args.taps + 2 * args.tap_stride), load(args.rows[2]), sum);
    sum = hn::MulAdd(load(args.taps + 3 * args.tap_stride), load(args.rows[3]), sum);
    store(hn::Mul(sum, Sigmoid(sum)), args.y);
  });
}

bool Finite(const float* x, int64_t n) {
  // x * 0 is 0 for a finite x and NaN for any other; NaN survives the sum.
  const F32 d;
  V32 sum = hn::Zero(d);
  ForEachVector(n, [&](int64_t, auto load, auto) { sum = hn::MulAdd(load(x), hn::Zero(d), sum); });
  return hn::GetLane(hn::SumOfLanes(d, sum)) == 0.0f;
}

void ExpSum(const float* x, int64_t n, float* max, double* sum) {
  const F32 d;
  const V32 lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  V32 top = lowest;
  // A NaN is not reliably a maximum, but its exponential below is NaN whatever the maximum.
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) top = hn::Max(top, hn::LoadU(d, x + i));
  float m = hn::GetLane(hn::MaxOfLanes(d, top));
  for (; i < n; ++i) m = x[i] > m ? x[i] : m;
  // FP32 lanes over at most 4,096 elements at a time, then FP64, so that a vocabulary of 250,000
  // loses nothing.
  constexpr int64_t kStretch = 4096;
  double total = 0.0;
  const V32 shift = hn::Set(d, m);
  for (int64_t begin = 0; begin < n; begin += kStretch) {
    const int64_t length = n - begin < kStretch ? n - begin : kStretch;
    V32 part = hn::Zero(d);
    int64_t j = 0;
    for (; j + kLanes <= length; j += kLanes) {
      part = hn::Add(part, ExpOf(hn::Sub(hn::LoadU(d, x + begin + j), shift)));
    }
    total += hn::GetLane(hn::SumOfLanes(d, part));
    for (; j < length; ++j) total += std::exp(x[begin + j] - m);
  }
  *max = m;
  *sum = total;
}

// One row of SoftmaxTile; `n` >= 1 columns take part.
HWY_INLINE void SoftmaxRow(float* scores, int64_t n, float* max, float* sum, float* out,
                           int64_t ld_out) {
  const F32 d;
  const V32 lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  V32 values[kKvTile / kLanes];
  V32 top = lowest;
#pragma GCC unroll 16
  for (int64_t i = 0; i < kKvTile / kLanes; ++i) {
    const auto inside = hn::FirstN(d, n > i * kLanes ? static_cast<size_t>(n - i * kLanes) : 0);
    values[i] = hn::IfThenElse(inside, hn::LoadU(d, scores + i * kLanes), lowest);
    top = hn::Max(top, values[i]);
  }
  const float tile_max = hn::GetLane(hn::MaxOfLanes(d, top));
  const float new_max = tile_max > *max ? tile_max : *max;
  // Before the first tile the maximum is -inf, and exp(-inf - new_max) = 0 as it should be. With
  // every score -inf the shift is 0, not NaN.
  const float shift = new_max == -std::numeric_limits<float>::infinity() ? 0.0f : new_max;
  V32 part = hn::Zero(d);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kKvTile / kLanes; ++i) {
    const V32 p = ExpOf(hn::Sub(values[i], hn::Set(d, shift)));
    part = hn::Add(part, p);
    hn::StoreU(p, d, scores + i * kLanes);
  }
  const float tile_sum = hn::GetLane(hn::SumOfLanes(d, part));
  if (new_max != *max) {
    const V32 factor = ExpOf(hn::Set(d, *max - shift));
    *sum = *sum * hn::GetLane(factor) + tile_sum;
    for (int64_t i = 0; i < ld_out; i += kLanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, out + i), factor), d, out + i);
    }
    *max = new_max;
  } else {
    *sum += tile_sum;
  }
}

void Softmax(const SoftmaxArgs& t) {
  const F32 d;
  for (int64_t r = 0; r < t.rows; ++r) {
    float* scores = t.scores + r * kKvTile;
    if (t.visible[r] > 0) {
      SoftmaxRow(scores, t.visible[r] < kKvTile ? t.visible[r] : kKvTile, &t.max[r], &t.sum[r],
                 t.out + r * t.ld_out, t.ld_out);
    } else {
      for (int64_t i = 0; i < kKvTile; i += kLanes) hn::StoreU(hn::Zero(d), d, scores + i);
    }
  }
}

const char* Target() { return hwy::TargetName(HWY_TARGET); }

}  // namespace sparsegdn::cpu_ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sparsegdn::cpu_ops {

HWY_EXPORT(RmsNorm);
HWY_EXPORT(GatedNorm);
HWY_EXPORT(SwiGlu);
HWY_EXPORT(SigmoidGate);
HWY_EXPORT(Rotate);
HWY_EXPORT(ConvSilu);
HWY_EXPORT(Finite);
HWY_EXPORT(ExpSum);
HWY_EXPORT(Softmax);
HWY_EXPORT(Target);

void RmsNormRow(const float* x, const float* weight, float eps, int64_t n, float* y) {
  HWY_DYNAMIC_DISPATCH(RmsNorm)(x, weight, eps, n, y);
}
void GatedNormRow(const float* o, const float* z, const float* weight, float eps, int64_t n,
                  float* y) {
  HWY_DYNAMIC_DISPATCH(GatedNorm)(o, z, weight, eps, n, y);
}
void SwiGluRow(const float* gate, const float* up, int64_t n, float* y) {
  HWY_DYNAMIC_DISPATCH(SwiGlu)(gate, up, n, y);
}
void SigmoidGateRow(const float* gate, float scale, int64_t n, float* x) {
  HWY_DYNAMIC_DISPATCH(SigmoidGate)(gate, scale, n, x);
}
void RotateRow(const float* cos, const float* sin, int64_t n, float* x) {
  HWY_DYNAMIC_DISPATCH(Rotate)(cos, sin, n, x);
}
void ExpSumRow(const float* x, int64_t n, float* max, double* sum) {
  HWY_DYNAMIC_DISPATCH(ExpSum)(x, n, max, sum);
}
bool AllFinite(const float* x, int64_t n) { return HWY_DYNAMIC_DISPATCH(Finite)(x, n); }
void ConvSiluRow(const ConvArgs& args) { HWY_DYNAMIC_DISPATCH(ConvSilu)(args); }
void SoftmaxTile(const SoftmaxArgs& args) { HWY_DYNAMIC_DISPATCH(Softmax)(args); }
const char* TargetName() { return HWY_DYNAMIC_DISPATCH(Target)(); }

// A few values a token: the C library's functions do.
void GateRow(const GateArgs& g) {
  for (int64_t h = 0; h < g.n; ++h) {
    const float x = g.a[h] + g.dt_bias[h];
    const float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
    g.log_gate[h] = -std::exp(g.a_log[h]) * softplus;
    g.beta[h] = 1.0f / (1.0f + std::exp(-g.b[h]));
  }
}

}  // namespace sparsegdn::cpu_ops
#endif
