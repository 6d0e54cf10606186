// Buffers with guard bands, random values and comparisons for the tests of the CPU operations.
#ifndef SPARSEGDN_TESTS_UNIT_OPS_OPS_TESTING_H_
#define SPARSEGDN_TESTS_UNIT_OPS_OPS_TESTING_H_

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "sparsegdn/ops.h"

namespace sparsegdn::ops_testing {

inline constexpr int64_t kGuard = 16;
inline constexpr uint32_t kGuardBits = 0x7fc0beefu;  // a NaN of our own

// [rows, cols] floats inside rows of stride cols + pad; everything starts as the guard's NaN.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t cols, int64_t pad = 5)
      : rows_(rows),
        cols_(cols),
        stride_(cols + pad),
        data_(static_cast<size_t>(rows * stride_ + 2 * kGuard), std::bit_cast<float>(kGuardBits)) {}

  float& at(int64_t r, int64_t c) { return data_[static_cast<size_t>(kGuard + r * stride_ + c)]; }
  float at(int64_t r, int64_t c) const {
    return data_[static_cast<size_t>(kGuard + r * stride_ + c)];
  }
  float* row(int64_t r) { return &at(r, 0); }
  operator Rows() { return {row(0), stride_}; }       // NOLINT: a borrowed view
  operator ConstRows() { return {row(0), stride_}; }  // NOLINT
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }

  // Everything outside the rows still holds the guard's bits.
  bool GuardsIntact() const {
    for (size_t i = 0; i < data_.size(); ++i) {
      const int64_t at = static_cast<int64_t>(i) - kGuard;
      const bool inside = at >= 0 && at < rows_ * stride_ && at % stride_ < cols_;
      if (!inside && std::bit_cast<uint32_t>(data_[i]) != kGuardBits) return false;
    }
    return true;
  }

 private:
  int64_t rows_, cols_, stride_;
  std::vector<float> data_;
};

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  float Normal(float scale = 1.0f) { return scale * normal_(engine_); }
  void Fill(Matrix& m, float scale = 1.0f) {
    for (int64_t r = 0; r < m.rows(); ++r) {
      for (int64_t c = 0; c < m.cols(); ++c) m.at(r, c) = Normal(scale);
    }
  }
  std::vector<float> Vector(int64_t n, float scale = 1.0f) {
    std::vector<float> out(static_cast<size_t>(n));
    for (float& v : out) v = Normal(scale);
    return out;
  }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
};

inline bool SameBits(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

inline double Silu(double x) { return x / (1.0 + std::exp(-x)); }

// |got - wanted| <= relative * |wanted| + absolute; NaN never passes.
inline void ExpectNear(double got, double wanted, double relative, double absolute,
                       const char* what) {
  EXPECT_LE(std::abs(got - wanted), relative * std::abs(wanted) + absolute) << what;
}

// Index arrays of a pack.
struct Pack {
  std::vector<int32_t> cu_seqlens{0}, slots;
  std::vector<int64_t> first_positions;
  void Add(int32_t length, int32_t slot, int64_t first_position) {
    cu_seqlens.push_back(cu_seqlens.back() + length);
    slots.push_back(slot);
    first_positions.push_back(first_position);
  }
  PackArgs args() const {
    return {static_cast<int32_t>(slots.size()), cu_seqlens.back(), cu_seqlens.data(), slots.data(),
            first_positions.data()};
  }
};

}  // namespace sparsegdn::ops_testing

#endif  // SPARSEGDN_TESTS_UNIT_OPS_OPS_TESTING_H_
