#include "tests/unit/kernels/test_device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kernels/cpu/kernel_table.h"

namespace sparsegdn::test {
namespace {

class CpuTestDevice final : public TestDevice {
 public:
  explicit CpuTestDevice(bool bf16_products) : bf16_products_(bf16_products) {}

  const char* name() const override { return bf16_products_ ? "cpu" : "cpu_widened"; }
  absl::StatusOr<std::unique_ptr<GdnBackend>> CreateBackend() override {
    return CreateCpuBackend({.num_threads = 2, .bf16_products = bf16_products_});
  }
  void* Allocate(size_t bytes) override {
    return std::aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
  }
  void Free(void* p) override { std::free(p); }
  void CopyIn(void* device, const void* host, size_t bytes) override {
    if (bytes > 0) std::memcpy(device, host, bytes);
  }
  void CopyOut(void* host, const void* device, size_t bytes) override {
    if (bytes > 0) std::memcpy(host, device, bytes);
  }
  void* stream() override { return nullptr; }
  absl::Status Synchronize() override { return absl::OkStatus(); }

  bool RoundsToBf16(DType dtype) const override {
    return bf16_products_ && dtype == DType::kBF16 && cpu::GetBf16Kernels() != nullptr;
  }
  // fp32: sums of at most 256 products and a chain of groups, each rounding 6e-8; 1e-5 leaves two
  // digits for cancellation. fp16 inputs, and bf16 where widened, are computed in fp32. bf16: q, k
  // and v are exact, but u, the probabilities and the state as an operand are rounded to 8 bits,
  // which is 2^-9 / sqrt(3) = 1.1e-3 each; their root sum of squares over two hops is about 3e-3.
  double Tolerance(DType dtype) const override { return RoundsToBf16(dtype) ? 4e-3 : 1e-5; }
  bool ReadsSequencesOnHost() const override { return true; }

 private:
  bool bf16_products_;
};

}  // namespace

#if !defined(SPARSEGDN_TEST_CUDA)
TestDevice* CudaTestDevice() { return nullptr; }
#endif

const std::vector<TestDevice*>& TestDevices() {
  static const std::vector<TestDevice*> devices = [] {
    static CpuTestDevice cpu(/*bf16_products=*/true);
    std::vector<TestDevice*> list = {&cpu};
    if (TestDevice* cuda = CudaTestDevice(); cuda != nullptr) list.push_back(cuda);
    return list;
  }();
  return devices;
}

TestDevice* WidenedCpuTestDevice() {
  static CpuTestDevice device(/*bf16_products=*/false);
  return &device;
}

DeviceBuffer::DeviceBuffer(TestDevice* device, size_t bytes)
    : device_(device), bytes_(bytes), base_(device->Allocate(bytes + 2 * kGuard)) {
  const std::vector<unsigned char> fill(bytes + 2 * kGuard, 0xff);
  device_->CopyIn(base_, fill.data(), fill.size());
}

DeviceBuffer::~DeviceBuffer() { device_->Free(base_); }

void DeviceBuffer::Upload(const void* host) { device_->CopyIn(data(), host, bytes_); }

void DeviceBuffer::Download(void* host) const { device_->CopyOut(host, data(), bytes_); }

bool DeviceBuffer::GuardsIntact() const {
  unsigned char guard[2][kGuard];
  device_->CopyOut(guard[0], base_, kGuard);
  device_->CopyOut(guard[1], static_cast<char*>(base_) + kGuard + bytes_, kGuard);
  return std::all_of(&guard[0][0], &guard[0][0] + 2 * kGuard,
                     [](unsigned char c) { return c == 0xff; });
}

}  // namespace sparsegdn::test
