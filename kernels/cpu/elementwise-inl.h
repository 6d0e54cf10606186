// The kernels of kernel_table.h that are not products, one Highway target per inclusion.
#if defined(SPARSEGDN_KERNELS_CPU_ELEMENTWISE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARSEGDN_KERNELS_CPU_ELEMENTWISE_INL_H_
#undef SPARSEGDN_KERNELS_CPU_ELEMENTWISE_INL_H_
#else
#define SPARSEGDN_KERNELS_CPU_ELEMENTWISE_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/common/float_convert.h"
#include "kernels/common/selection_math.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/product_f32-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparsegdn::cpu::HWY_NAMESPACE {

// kLanes elements from x + i, widened.
template <DType kType>
HWY_INLINE V32 LoadWide(const void* x, int64_t i) {
  const F32 d;
  if constexpr (kType == DType::kF32) {
    return hn::LoadU(d, static_cast<const float*>(x) + i);
  } else if constexpr (kType == DType::kBF16) {
    const hn::Rebind<uint16_t, F32> d16;
    const hn::Rebind<uint32_t, F32> d32;
    const auto bits = hn::LoadU(d16, static_cast<const uint16_t*>(x) + i);
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
  } else {
    // Exponent rebias by a multiplication, which also handles subnormals; Inf and NaN are patched.
    const hn::Rebind<uint16_t, F32> d16;
    const hn::Rebind<uint32_t, F32> d32;
    const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, static_cast<const uint16_t*>(x) + i));
    const auto magnitude = hn::ShiftLeft<13>(hn::And(bits, hn::Set(d32, 0x7fffu)));
    const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(d32, 0x8000u)));
    const V32 scaled = hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, 0x1p112f));
    const auto special = hn::Gt(magnitude, hn::Set(d32, (0x7bffu << 13)));
    const auto patched = hn::Or(magnitude, hn::Set(d32, 0x7f800000u));
    const auto value = hn::IfThenElse(special, patched, hn::BitCast(d32, scaled));
    return hn::BitCast(d, hn::Or(value, sign));
  }
}

HWY_INLINE void StoreBf16(V32 x, uint16_t* out) {
  const hn::Rebind<uint32_t, F32> d32;
  const hn::Rebind<uint16_t, F32> d16;
  const auto bits = hn::BitCast(d32, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, odd), hn::Set(d32, 0x7fffu)));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(d32, 0x40u));
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(x));
  const hn::Rebind<int32_t, F32> di32;
  const auto value = hn::BitCast(di32, hn::IfThenElse(is_nan, quiet, rounded));
  hn::StoreU(hn::DemoteTo(d16, value), d16, out);
}

// The library's exp gives 0 for NaN, which would read as full decay.
HWY_INLINE V32 ExpOrNan(V32 x) { return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(F32(), x)); }

inline void ExpInplace(float* x, int n) {
  const F32 d;
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) hn::StoreU(ExpOrNan(hn::LoadU(d, x + i)), d, x + i);
  if (i == n) return;
  HWY_ALIGN float tail[kLanes] = {};
  for (int j = i; j < n; ++j) tail[j - i] = x[j];
  hn::Store(ExpOrNan(hn::Load(d, tail)), d, tail);
  for (int j = i; j < n; ++j) x[j] = tail[j - i];
}

// One row of `dim` elements to fp32.
template <DType kType>
HWY_INLINE void WidenRow(const void* x, int dim, float* out) {
  int i = 0;
  for (; i + kLanes <= dim; i += kLanes) hn::StoreU(LoadWide<kType>(x, i), F32(), out + i);
  for (; i < dim; ++i) out[i] = LoadElement(x, kType, i);
}

// Calls f.template operator()<kType>() for the run-time dtype.
template <typename F>
HWY_INLINE void WithDType(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kF32:
      return f.template Run<DType::kF32>();
    case DType::kBF16:
      return f.template Run<DType::kBF16>();
    case DType::kF16:
      return f.template Run<DType::kF16>();
  }
}

inline const void* At(const void* x, DType dtype, int64_t index) {
  return static_cast<const char*>(x) + index * DTypeBytes(dtype);
}

struct LoadRowsBody {
  const void* x;
  int64_t stride;
  const int32_t* rows;
  int n, dim;
  float* out;
  int64_t ld;
  template <DType kType>
  void Run() const {
    for (int r = 0; r < n; ++r) WidenRow<kType>(At(x, kType, rows[r] * stride), dim, out + r * ld);
  }
};

inline void LoadRows(const void* x, DType dtype, int64_t stride, const int32_t* rows, int n,
                     int dim, float* out, int64_t ld) {
  WithDType(dtype, LoadRowsBody{x, stride, rows, n, dim, out, ld});
}

struct RowDotsBody {
  const void* x;
  int64_t x_stride;
  const void* y;
  int64_t y_stride;
  int n, dim;
  float* out;
  template <DType kType>
  void Run() const {
    for (int r = 0; r < n; ++r) {
      const void* a = At(x, kType, r * x_stride);
      const void* b = At(y, kType, r * y_stride);
      V32 sum = hn::Zero(F32());
      int i = 0;
      for (; i + kLanes <= dim; i += kLanes) {
        sum = hn::MulAdd(LoadWide<kType>(a, i), LoadWide<kType>(b, i), sum);
      }
      float total = hn::GetLane(hn::SumOfLanes(F32(), sum));
      for (; i < dim; ++i) total += LoadElement(a, kType, i) * LoadElement(b, kType, i);
      out[r] = total;
    }
  }
};

inline void RowDots(const void* x, int64_t x_stride, const void* y, int64_t y_stride, DType dtype,
                    int n, int dim, float* out) {
  WithDType(dtype, RowDotsBody{x, x_stride, y, y_stride, n, dim, out});
}

struct RhsBody {
  const RhsArgs& args;
  template <DType kType>
  void Run() const {
    const F32 d;
    for (int i = 0; i < args.events; ++i) {
      HWY_ALIGN float wide[kPanel] = {};
      const void* v = At(args.v, kType, args.rows[i] * args.token_stride);
      float* c = args.c + i * kPanel;
      WidenRow<kType>(v, args.columns, wide);
      const V32 beta = hn::Set(d, args.beta[i]);
      const V32 decay = hn::Set(d, args.decay[i]);
      for (int col = 0; col < kPanel; col += kLanes) {
        const V32 read = hn::LoadU(d, c + col);
        const V32 rest = hn::NegMulAdd(decay, read, hn::Load(d, wide + col));
        hn::StoreU(hn::Mul(beta, rest), d, c + col);
      }
    }
  }
};

inline void Rhs(const RhsArgs& args) {
  WithDType(args.dtype, RhsBody{args});
  const int padded = (args.events + kBlock - 1) / kBlock * kBlock;
  std::fill(args.c + args.events * kPanel, args.c + padded * kPanel, 0.0f);
}

HWY_INLINE void StoreRow(const float* x, DType dtype, int columns, void* o) {
  const F32 d;
  int i = 0;
  if (dtype == DType::kF32) {
    std::memcpy(o, x, sizeof(float) * columns);
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(o);
  if (dtype == DType::kBF16) {
    for (; i + kLanes <= columns; i += kLanes) StoreBf16(hn::LoadU(d, x + i), out + i);
  }
  for (; i < columns; ++i) StoreElement(o, dtype, i, x[i]);
}

struct AddSelfBody {
  const void* v;
  float factor;
  int columns;
  float* row;  // [kPanel]
  template <DType kType>
  void Run() const {
    HWY_ALIGN float wide[kPanel] = {};
    WidenRow<kType>(v, columns, wide);
    const F32 d;
    const V32 f = hn::Set(d, factor);
    for (int col = 0; col < kPanel; col += kLanes) {
      hn::StoreU(hn::MulAdd(f, hn::Load(d, wide + col), hn::LoadU(d, row + col)), d, row + col);
    }
  }
};

inline void Store(const StoreArgs& args) {
  const int64_t o_bytes = DTypeBytes(args.o_dtype);
  for (int r = 0; r < args.rows; ++r) {
    HWY_ALIGN float row[kPanel];
    std::memcpy(row, args.c + r * kPanel, sizeof(row));
    // A factor of 0 marks an event or a beta of 0: v need not be read.
    if (args.self != nullptr && args.self[r] != 0.0f) {
      const void* v = At(args.v, args.v_dtype, r * args.v_stride);
      WithDType(args.v_dtype, AddSelfBody{v, args.self[r], args.columns, row});
    }
    StoreRow(row, args.o_dtype, args.columns,
             static_cast<char*>(args.o) + r * args.o_stride * o_bytes);
  }
}

// exp(row - event gate) for kLanes events from `i` on.
HWY_INLINE V32 DecayBetween(V32 row_hi, V32 row_lo, const GateSums& event, int i) {
  const F32 d;
  const V32 hi = hn::Sub(row_hi, hn::LoadU(d, event.hi + i));
  const V32 lo = hn::Sub(row_lo, hn::LoadU(d, event.lo + i));
  return ExpOrNan(hn::Add(hi, lo));
}

// Writes row r's entries i < visible, exact zeros from there to a multiple of 16 past `upto`.
HWY_INLINE void DecayedRow(const float* products, V32 row_hi, V32 row_lo, V32 row_factor,
                           const GateSums& event, const float* event_factor, int visible, int upto,
                           float* out) {
  const F32 d;
  for (int i = 0; i < upto; i += kLanes) {
    const float* x = products + (i / kPanel) * kRows * kPanel + i % kPanel;
    const V32 scale = hn::Mul(row_factor, hn::LoadU(d, event_factor + i));
    const V32 value =
        hn::Mul(hn::Mul(DecayBetween(row_hi, row_lo, event, i), hn::LoadU(d, x)), scale);
    const auto keep = hn::FirstN(d, static_cast<size_t>(std::max(0, visible - i)));
    hn::StoreU(hn::IfThenElseZero(keep, value), d, out + i);
  }
}

inline int RoundUp16(int x) { return (x + 15) / 16 * 16; }

inline void Probs(const ProbsArgs& args) {
  const F32 d;
  // Rows are read by the products in tiles of up to 8, each as wide as its last row.
  for (int r = 0; r < args.rows; ++r) {
    const int widest = args.row_events[std::min(args.rows - 1, r | 7)];
    DecayedRow(args.qk + r * kPanel, hn::Set(d, args.row_gate.hi[r]),
               hn::Set(d, args.row_gate.lo[r]), hn::Set(d, args.row_factor[r]), args.event_gate,
               args.event_factor, args.row_events[r], RoundUp16(widest), args.probs + r * kRows);
  }
}

inline void System(const SystemArgs& args) {
  const F32 d;
  for (int i = 0; i < args.events; ++i) {
    const V32 factor = hn::Set(d, args.beta[i] * args.norm[i]);
    DecayedRow(args.kk + i * kPanel, hn::Set(d, args.gate.hi[i]), hn::Set(d, args.gate.lo[i]),
               factor, args.gate, args.norm, i, RoundUp16(i + 1), args.system + i * kRows);
  }
  for (int i = args.events; i < RoundUp16(args.events); ++i) {
    std::fill(args.system + i * kRows, args.system + i * kRows + RoundUp16(i + 1), 0.0f);
  }
}

// Forward substitution by rows; T_i = e_i - sum_{j<i} A_ij T_j.
inline void InvertBlocks(const float* system, int blocks, float* inverse) {
  const F32 d;
  for (int b = 0; b < blocks; ++b) {
    const float* a = system + b * kBlock * (kRows + 1);
    float* t = inverse + b * kBlock * kBlock;
    for (int i = 0; i < kBlock; ++i) {
      for (int col = 0; col < kBlock; col += kLanes) {
        HWY_ALIGN float unit[kBlock] = {};
        unit[i] = 1.0f;
        V32 row = hn::LoadU(d, unit + col);
        for (int j = 0; j < i; ++j) {
          row =
              hn::NegMulAdd(hn::Set(d, a[i * kRows + j]), hn::LoadU(d, t + j * kBlock + col), row);
        }
        hn::StoreU(row, d, t + i * kBlock + col);
      }
    }
  }
}

struct RowNormBody {
  const void* v;
  int dim;
  float* lanes;  // [kNormLanes]
  template <DType kType>
  void Run() const {
    const F32 d;
    int i = 0;
    for (; i + selection::kNormLanes <= dim; i += selection::kNormLanes) {
      for (int l = 0; l < selection::kNormLanes; l += kLanes) {
        const V32 x = LoadWide<kType>(v, i + l);
        hn::Store(hn::Add(hn::Load(d, lanes + l), hn::Mul(x, x)), d, lanes + l);
      }
    }
    for (int l = 0; i < dim; ++i, ++l) {
      const float x = LoadElement(v, kType, i);
      lanes[l] = lanes[l] + x * x;
    }
  }
};

inline float RowNorm(const void* v, DType dtype, int dim) {
  HWY_ALIGN float lane[selection::kNormLanes] = {};
  WithDType(dtype, RowNormBody{v, dim, lane});
  for (int half = selection::kNormLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lane[l] = lane[l] + lane[l + half];
  }
  return selection::SqrtRn(lane[0]);
}

}  // namespace sparsegdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SPARSEGDN_KERNELS_CPU_ELEMENTWISE_INL_H_
