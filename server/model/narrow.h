// Conversions between FP32 and the two half-width formats, round to nearest even, on the host.
#ifndef SPARSEGDN_SERVER_MODEL_NARROW_H_
#define SPARSEGDN_SERVER_MODEL_NARROW_H_

#include <bit>
#include <cstdint>

namespace sparsegdn::model {

inline float WidenBf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// NaN stays NaN (quiet), overflow goes to infinity as IEEE rounding does.
inline uint16_t NarrowBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float RoundToBf16(float value) { return WidenBf16(NarrowBf16(value)); }

inline float WidenF16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, NaN
    return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  // Shifted into place the exponent is 112 too small; the product repairs it, subnormals included.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(scaled));
}

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_NARROW_H_
