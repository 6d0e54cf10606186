// The CUDA device of the kernel tests; absent where there is no usable GPU.
#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "tests/unit/kernels/test_device.h"

namespace sparsegdn::test {
namespace {

class CudaDevice final : public TestDevice {
 public:
  const char* name() const override { return "cuda"; }
  absl::StatusOr<std::unique_ptr<GdnBackend>> CreateBackend() override {
    return CreateCudaBackend({.device = 0});
  }
  void* Allocate(size_t bytes) override {
    void* p = nullptr;
    return cudaMalloc(&p, bytes > 0 ? bytes : 1) == cudaSuccess ? p : nullptr;
  }
  void Free(void* p) override { cudaFree(p); }
  void CopyIn(void* device, const void* host, size_t bytes) override {
    if (bytes > 0) cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice);
  }
  void CopyOut(void* host, const void* device, size_t bytes) override {
    if (bytes > 0) cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost);
  }
  void* stream() override { return nullptr; }
  absl::Status Synchronize() override {
    const cudaError_t error = cudaDeviceSynchronize();
    if (error == cudaSuccess) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("cuda: ", cudaGetErrorString(error)));
  }

  bool RoundsToBf16(DType dtype) const override { return dtype == DType::kBF16; }
  // bf16: S, T, W, U, P and o are each rounded to 8 bits, 1.1e-3 rms; o goes through all six, and
  // zero gates keep what earlier groups rounded: sqrt(6) * 1.1e-3 and as much again is 6e-3. fp16
  // has three bits more. fp32 takes the portable path: 1e-5 as on the CPU.
  double Tolerance(DType dtype) const override {
    if (dtype == DType::kF32) return 1e-5;
    return dtype == DType::kBF16 ? 6e-3 : 1e-3;
  }
  bool ReadsSequencesOnHost() const override { return false; }
};

}  // namespace

TestDevice* CudaTestDevice() {
  static CudaDevice device;
  static const bool usable = CreateCudaBackend({.device = 0}).ok();
  return usable ? &device : nullptr;
}

}  // namespace sparsegdn::test
