// Conversions between the engine's states (FP32, [Hv, Dk, Dv]) and the wire's dtypes and layouts.
// Plain loops that compilers vectorise; no allocation.
#ifndef SPARSEGDN_SERVER_ENGINE_ENCODE_H_
#define SPARSEGDN_SERVER_ENGINE_ENCODE_H_

#include <cstdint>

#include "server/engine/types.h"

namespace sparsegdn::engine {

// Largest finite E4M3 value (OCP FP8 "FN": no infinity, NaN is 0x7f and 0xff).
inline constexpr float kF8Max = 448.0f;

// Round to nearest, ties to even; a NaN stays a (quiet) NaN.
void F32ToBf16(const float* in, int64_t n, uint16_t* out);
void Bf16ToF32(const uint16_t* in, int64_t n, float* out);

// One row with its scale s = max(amax / 448, 2^-126): out = E4M3(x / s), nearest even, saturating
// at +-448; x is about out * s, off by at most s * 2^-10 or |x| * 2^-4. The row must be finite.
void F32RowToF8(const float* in, int64_t n, uint8_t* out, float* scale);
void F8RowToF32(const uint8_t* in, int64_t n, float scale, float* out);

// out [cols, rows] = transpose of in [rows, cols].
void Transpose(const float* in, int64_t rows, int64_t cols, float* out);

// Columns 1 to 3 of conv [channels, 4], elements of `element_bytes`; and back, column 0 zero.
void DropConvColumn(const char* in, int64_t channels, int64_t element_bytes, char* out);
void RestoreConvColumn(const char* in, int64_t channels, int64_t element_bytes, char* out);

// Whether all n elements are finite. kI32 always is.
bool AllFinite(const void* data, ExportDType dtype, int64_t n);

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_ENCODE_H_
