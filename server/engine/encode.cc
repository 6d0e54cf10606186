#include "server/engine/encode.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace sparsegdn::engine {
namespace {

inline uint16_t Bf16Bits(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (u >> 16) | 0x40u;
  return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

// A branch around floating-point work keeps the compiler from vectorising; a mask does not.
inline int32_t Select(bool condition, int32_t yes, int32_t no) {
  const int32_t mask = -static_cast<int32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

// |x| <= 448 up to rounding. Below 2^-6 E4M3 is the fixed-point grid of 2^-9; adding 2^14 to the
// magnitude leaves exactly that grid in the low mantissa bits, rounded to nearest even. Signed
// integers, because plain SSE2 compares no others and the loops must vectorise there too.
inline int32_t F8Bits(float x) {
  const int32_t u = std::bit_cast<int32_t>(x);
  const int32_t magnitude = u & 0x7fffffff;
  const int32_t small =
      std::bit_cast<int32_t>(std::bit_cast<float>(magnitude) + 16384.0f) - 0x46800000;
  const int32_t normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3);
  const int32_t capped = normal < 0x7e ? normal : 0x7e;
  return Select(magnitude < 0x3c800000, small, capped) | ((u >> 24) & 0x80);
}

inline float F8Value(uint8_t bits) {
  const int32_t magnitude = bits & 0x7f;
  const int32_t small = std::bit_cast<int32_t>(static_cast<float>(magnitude) * 0x1p-9f);
  const int32_t normal = (magnitude << 20) + ((127 - 7) << 23);
  const int32_t sign = static_cast<int32_t>(uint32_t{bits & 0x80u} << 24);
  return std::bit_cast<float>(Select(magnitude < 8, small, normal) | sign);
}

template <size_t kBytes>
void CopyColumns(const char* in, int64_t channels, char* out, bool drop) {
  for (int64_t c = 0; c < channels; ++c) {
    if (drop) {
      std::memcpy(out + c * 3 * kBytes, in + (c * 4 + 1) * kBytes, 3 * kBytes);
    } else {
      std::memset(out + c * 4 * kBytes, 0, kBytes);
      std::memcpy(out + (c * 4 + 1) * kBytes, in + c * 3 * kBytes, 3 * kBytes);
    }
  }
}

}  // namespace

void F32ToBf16(const float* in, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = Bf16Bits(in[i]);
}

void Bf16ToF32(const uint16_t* in, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = std::bit_cast<float>(uint32_t{in[i]} << 16);
}

void F32RowToF8(const float* in, int64_t n, uint8_t* out, float* scale) {
  int32_t max_bits = 0;  // of finite magnitudes, integer order is float order
  for (int64_t i = 0; i < n; ++i) {
    const int32_t magnitude = std::bit_cast<int32_t>(in[i]) & 0x7fffffff;
    max_bits = magnitude > max_bits ? magnitude : max_bits;
  }
  const float s = std::max(std::bit_cast<float>(max_bits) / kF8Max, 0x1p-126f);
  *scale = s;
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint8_t>(F8Bits(in[i] / s));
}

void F8RowToF32(const uint8_t* in, int64_t n, float scale, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = F8Value(in[i]) * scale;
}

void Transpose(const float* in, int64_t rows, int64_t cols, float* out) {
  constexpr int64_t kTile = 16;  // 1 KiB each way: both stay in L1
  for (int64_t r0 = 0; r0 < rows; r0 += kTile) {
    const int64_t r1 = std::min(rows, r0 + kTile);
    for (int64_t c0 = 0; c0 < cols; c0 += kTile) {
      const int64_t c1 = std::min(cols, c0 + kTile);
      for (int64_t c = c0; c < c1; ++c) {
        for (int64_t r = r0; r < r1; ++r) out[c * rows + r] = in[r * cols + c];
      }
    }
  }
}

void DropConvColumn(const char* in, int64_t channels, int64_t element_bytes, char* out) {
  if (element_bytes == 2) return CopyColumns<2>(in, channels, out, /*drop=*/true);
  CopyColumns<4>(in, channels, out, /*drop=*/true);
}

void RestoreConvColumn(const char* in, int64_t channels, int64_t element_bytes, char* out) {
  if (element_bytes == 2) return CopyColumns<2>(in, channels, out, /*drop=*/false);
  CopyColumns<4>(in, channels, out, /*drop=*/false);
}

bool AllFinite(const void* data, ExportDType dtype, int64_t n) {
  // Counting instead of returning early keeps the loops vectorised.
  int64_t bad = 0;
  if (dtype == ExportDType::kF32) {
    const char* p = static_cast<const char*>(data);
    for (int64_t i = 0; i < n; ++i) {
      uint32_t u;
      std::memcpy(&u, p + i * 4, 4);
      bad += (u & 0x7f800000u) == 0x7f800000u;
    }
  } else if (dtype == ExportDType::kBF16) {
    const char* p = static_cast<const char*>(data);
    for (int64_t i = 0; i < n; ++i) {
      uint16_t u;
      std::memcpy(&u, p + i * 2, 2);
      bad += (u & 0x7f80u) == 0x7f80u;
    }
  } else if (dtype == ExportDType::kF8E4M3) {
    const uint8_t* p = static_cast<const uint8_t*>(data);
    for (int64_t i = 0; i < n; ++i) bad += (p[i] & 0x7fu) == 0x7fu;
  }
  return bad == 0;
}

}  // namespace sparsegdn::engine
