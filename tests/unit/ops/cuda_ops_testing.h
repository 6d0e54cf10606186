// Device copies of the tests' matrices: BF16, guarded, NaN where nothing was written.
#ifndef SPARSEGDN_TESTS_UNIT_OPS_CUDA_OPS_TESTING_H_
#define SPARSEGDN_TESTS_UNIT_OPS_CUDA_OPS_TESTING_H_

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "server/model/narrow.h"
#include "sparsegdn/cuda_ops.h"
#include "tests/unit/ops/ops_testing.h"

namespace sparsegdn::ops_testing {

// Null, with `why`, where there is no usable device.
inline CudaOps* DeviceOps(std::string* why) {
  static const absl::StatusOr<std::unique_ptr<CudaOps>> ops = CudaOps::Create(0, nullptr);
  if (!ops.ok()) *why = std::string(ops.status().message());
  return ops.ok() ? ops->get() : nullptr;
}

// Skips the test where there is no device.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    ops_ = DeviceOps(&why);
    if (ops_ == nullptr) GTEST_SKIP() << "no CUDA device for the operations: " << why;
  }
  void TearDown() override {
    if (ops_ == nullptr) return;
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  static void Expect(const absl::Status& status) { ASSERT_TRUE(status.ok()) << status; }

  CudaOps* ops_ = nullptr;
};

inline void RoundAll(Matrix& m) {
  for (int64_t r = 0; r < m.rows(); ++r) {
    for (int64_t c = 0; c < m.cols(); ++c) m.at(r, c) = model::RoundToBf16(m.at(r, c));
  }
}

// An array of the device; starts as 0xff bytes, NaN in every float type.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    EXPECT_EQ(cudaMalloc(&data_, count * sizeof(T) + 256), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, 0xff, count * sizeof(T) + 256), cudaSuccess);
  }
  explicit DeviceArray(const std::vector<T>& from) : DeviceArray(from.size()) {
    EXPECT_EQ(cudaMemcpy(data_, from.data(), count_ * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* data() const { return static_cast<T*>(data_); }
  std::vector<T> Read() const {
    std::vector<T> out(count_);
    EXPECT_EQ(cudaMemcpy(out.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return out;
  }

 private:
  size_t count_;
  void* data_ = nullptr;
};

// [rows, cols] BF16 in rows of cols + pad, with a guard row before and after.
class DeviceRows {
 public:
  DeviceRows(int64_t rows, int64_t cols, int64_t pad)
      : rows_(rows), cols_(cols), stride_(cols + pad), data_(Size()) {}
  DeviceRows(const Matrix& from, int64_t pad) : DeviceRows(from.rows(), from.cols(), pad) {
    std::vector<uint16_t> host(Size(), 0xffff);
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < cols_; ++c) host[At(r, c)] = model::NarrowBf16(from.at(r, c));
    }
    EXPECT_EQ(cudaMemcpy(data_.data(), host.data(), 2 * host.size(), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  operator Rows() const { return {data_.data() + At(0, 0), stride_}; }       // NOLINT
  operator ConstRows() const { return {data_.data() + At(0, 0), stride_}; }  // NOLINT
  uint16_t* column(int64_t c) const { return data_.data() + At(0, c); }
  int64_t stride() const { return stride_; }

  // The rows widened; everything else must still be the guard.
  Matrix Read() const {
    const std::vector<uint16_t> host = data_.Read();
    Matrix out(rows_, cols_);
    std::vector<bool> inside(host.size());
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < cols_; ++c) {
        out.at(r, c) = model::WidenBf16(host[At(r, c)]);
        inside[At(r, c)] = true;
      }
    }
    for (size_t i = 0; i < host.size(); ++i) {
      if (inside[i]) continue;
      EXPECT_EQ(host[i], 0xffff) << "guard at " << i;
    }
    return out;
  }

 private:
  size_t Size() const { return static_cast<size_t>((rows_ + 2) * stride_ + 16); }
  // The first row stays 16-byte aligned where the stride is.
  size_t At(int64_t r, int64_t c) const { return static_cast<size_t>((r + 1) * stride_ + c); }

  int64_t rows_, cols_, stride_;
  DeviceArray<uint16_t> data_;
};

// Index arrays of a pack on the device.
struct DevicePack {
  explicit DevicePack(const Pack& pack)
      : cu_seqlens(pack.cu_seqlens), slots(pack.slots), first_positions(pack.first_positions) {
    args = {static_cast<int32_t>(pack.slots.size()), pack.cu_seqlens.back(), cu_seqlens.data(),
            slots.data(), first_positions.data()};
  }
  DeviceArray<int32_t> cu_seqlens, slots;
  DeviceArray<int64_t> first_positions;
  PackArgs args;
};

// |got - wanted| <= relative |wanted| + absolute everywhere.
inline void ExpectClose(const Matrix& got, const Matrix& wanted, double relative, double absolute) {
  for (int64_t r = 0; r < wanted.rows(); ++r) {
    for (int64_t c = 0; c < wanted.cols(); ++c) {
      const double w = wanted.at(r, c);
      ASSERT_LE(std::abs(got.at(r, c) - w), relative * std::abs(w) + absolute)
          << "row " << r << ", column " << c << ": got " << got.at(r, c) << ", wanted " << w;
    }
  }
}

// Relative L2 error of each row.
inline void ExpectRowsClose(const Matrix& got, const Matrix& wanted, double tolerance) {
  for (int64_t r = 0; r < wanted.rows(); ++r) {
    double error = 0.0, norm = 0.0;
    for (int64_t c = 0; c < wanted.cols(); ++c) {
      error += std::pow(double{got.at(r, c)} - wanted.at(r, c), 2);
      norm += std::pow(double{wanted.at(r, c)}, 2);
    }
    ASSERT_LE(std::sqrt(error), tolerance * std::sqrt(norm) + 1e-6) << "row " << r;
  }
}

}  // namespace sparsegdn::ops_testing

#endif  // SPARSEGDN_TESTS_UNIT_OPS_CUDA_OPS_TESTING_H_
