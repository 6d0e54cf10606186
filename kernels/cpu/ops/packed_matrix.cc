#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kernels/common/float_convert.h"
#include "kernels/cpu/ops/ops_kernels.h"
#include "sparsegdn/cpu_ops.h"

namespace sparsegdn {
namespace {

using cpu_ops::kPanel;
constexpr size_t kAlign = 64;

// Element `index` of bytes of any alignment.
float Widen(const uint8_t* elements, DType dtype, int64_t index) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, elements + 4 * index, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, elements + 2 * index, sizeof(bits));
  return dtype == DType::kBF16 ? Bf16ToFloat(bits) : F16ToFloat(bits);
}

}  // namespace

void PackedMatrix::Free::operator()(void* data) const { std::free(data); }

PackedMatrix::PackedMatrix(DType source, int64_t out, int64_t in)
    : out_(out), in_(in), dtype_(source == DType::kBF16 ? DType::kBF16 : DType::kF32) {
  const size_t rounded = (bytes() + kAlign - 1) / kAlign * kAlign;
  data_.reset(std::aligned_alloc(kAlign, std::max(rounded, kAlign)));
  // The last panel's missing outputs must read as zero; nobody writes them.
  const int64_t panels = (out_ + kPanel - 1) / kPanel;
  if (allocated() && out_ % kPanel != 0) {
    std::memset(const_cast<void*>(panel(panels - 1)), 0, bytes() / panels);
  }
}

size_t PackedMatrix::bytes() const {
  const int64_t panels = (out_ + kPanel - 1) / kPanel;
  return static_cast<size_t>(panels * in_ * kPanel) * (dtype_ == DType::kBF16 ? 2 : 4);
}

const void* PackedMatrix::panel(int64_t index) const {
  const int64_t elements = index * in_ * kPanel;
  return static_cast<const uint8_t*>(data_.get()) + elements * (dtype_ == DType::kBF16 ? 2 : 4);
}

void PackedMatrix::SetRows(int64_t first, int64_t rows, const uint8_t* elements, DType source) {
  const int64_t width = source == DType::kF32 ? 4 : 2;
  for (int64_t r = first; r < first + rows; ++r) {
    const uint8_t* row = elements + (r - first) * in_ * width;
    void* target = const_cast<void*>(panel(r / kPanel));
    const int64_t column = r % kPanel;
    if (dtype_ == DType::kBF16) {  // only from BF16: the constructor saw to it
      auto* out = static_cast<uint16_t*>(target) + column;
      for (int64_t i = 0; i < in_; ++i) std::memcpy(out + i * kPanel, row + 2 * i, 2);
    } else {
      auto* out = static_cast<float*>(target) + column;
      for (int64_t i = 0; i < in_; ++i) out[i * kPanel] = Widen(row, source, i);
    }
  }
}

void PackedMatrix::GetRow(int64_t row, float* out) const {
  const int64_t column = row % kPanel;
  if (dtype_ == DType::kBF16) {
    const auto* from = static_cast<const uint16_t*>(panel(row / kPanel)) + column;
    for (int64_t i = 0; i < in_; ++i) {
      out[i] = Bf16ToFloat(from[i * kPanel]);
    }
  } else {
    const auto* from = static_cast<const float*>(panel(row / kPanel)) + column;
    for (int64_t i = 0; i < in_; ++i) out[i] = from[i * kPanel];
  }
}

}  // namespace sparsegdn
