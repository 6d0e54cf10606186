// Scalar conversions between fp32 and the 16-bit formats, round to nearest even.
#ifndef SPARSEGDN_KERNELS_COMMON_FLOAT_CONVERT_H_
#define SPARSEGDN_KERNELS_COMMON_FLOAT_CONVERT_H_

#include <bit>
#include <cmath>
#include <cstdint>

#include "sparsegdn/types.h"

namespace sparsegdn {

inline int64_t DTypeBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

inline float Bf16ToFloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t FloatToBf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float F16ToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

inline uint16_t FloatToF16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds past 65504
  if (magnitude < 0x38800000u) {  // subnormal or zero in fp16: units of 2^-24
    const float units = std::ldexp(std::bit_cast<float>(magnitude), 24);
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(units)));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// Element `index` of a tensor of `dtype`, widened.
inline float LoadElement(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kF32) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  return dtype == DType::kBF16 ? Bf16ToFloat(bits) : F16ToFloat(bits);
}

inline void StoreElement(void* data, DType dtype, int64_t index, float x) {
  if (dtype == DType::kF32) {
    static_cast<float*>(data)[index] = x;
  } else {
    static_cast<uint16_t*>(data)[index] = dtype == DType::kBF16 ? FloatToBf16(x) : FloatToF16(x);
  }
}

}  // namespace sparsegdn

#endif  // SPARSEGDN_KERNELS_COMMON_FLOAT_CONVERT_H_
