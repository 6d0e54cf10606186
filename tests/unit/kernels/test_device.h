// Where a kernel test runs: memory, copies and a backend. One instance per device, so that the same
// rows run on every backend of the build.
#ifndef SPARSEGDN_TESTS_UNIT_KERNELS_TEST_DEVICE_H_
#define SPARSEGDN_TESTS_UNIT_KERNELS_TEST_DEVICE_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "sparsegdn/gdn.h"

namespace sparsegdn::test {

class TestDevice {
 public:
  virtual ~TestDevice() = default;
  virtual const char* name() const = 0;
  virtual absl::StatusOr<std::unique_ptr<GdnBackend>> CreateBackend() = 0;

  // 256-byte aligned device memory.
  virtual void* Allocate(size_t bytes) = 0;
  virtual void Free(void* p) = 0;
  virtual void CopyIn(void* device, const void* host, size_t bytes) = 0;
  virtual void CopyOut(void* host, const void* device, size_t bytes) = 0;
  virtual void* stream() = 0;
  virtual absl::Status Synchronize() = 0;

  // Whether inputs of this dtype meet products of operands rounded to bf16.
  virtual bool RoundsToBf16(DType dtype) const = 0;
  // Relative L2 error of o and of states, per sequence and value head, that inputs of this dtype
  // allow on every family of the case table.
  virtual double Tolerance(DType dtype) const = 0;
  // Faults in cu_seqlens and sequences come back as INVALID_ARGUMENT (else only as status bits).
  virtual bool ReadsSequencesOnHost() const = 0;
};

// Every device of this build and machine, the CPU first. Never empty.
const std::vector<TestDevice*>& TestDevices();

// The CPU with bf16 inputs widened to fp32, as on a CPU without bf16 dot products. Not of
// TestDevices(): for other inputs it is the same as the CPU there.
TestDevice* WidenedCpuTestDevice();

// Defined by the CUDA build: null where no usable GPU is present.
TestDevice* CudaTestDevice();

// A buffer of the device with guard bands that must survive: filled with 0xff bytes, which is NaN
// in every float type, so that an element left unwritten shows.
class DeviceBuffer {
 public:
  DeviceBuffer(TestDevice* device, size_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* data() const { return static_cast<char*>(base_) + kGuard; }
  size_t bytes() const { return bytes_; }
  void Upload(const void* host);
  void Download(void* host) const;
  bool GuardsIntact() const;

 private:
  static constexpr size_t kGuard = 1024;
  TestDevice* device_;
  size_t bytes_;
  void* base_;
};

}  // namespace sparsegdn::test

#endif  // SPARSEGDN_TESTS_UNIT_KERNELS_TEST_DEVICE_H_
