// Head ratios, head dims, lengths and output dtypes, and offsets beyond 2^31 elements.
#include <gtest/gtest.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cmath>
#include <cstring>
#include <ostream>

#include "kernels/common/float_convert.h"
#include "tests/unit/kernels/test_pack.h"

namespace sparsegdn::test {
namespace {

struct ShapeRow {
  const char* name;
  GdnShape shape;
};
void PrintTo(const ShapeRow& row, std::ostream* os) { *os << row.name; }

using Param = std::tuple<TestDevice*, ShapeRow, DType>;
class Shapes : public testing::TestWithParam<Param> {};

std::string Name(const testing::TestParamInfo<Param>& info) {
  const char* dtypes[] = {"_f32", "_bf16", "_f16"};
  return std::string(std::get<0>(info.param)->name()) + "_" + std::get<1>(info.param).name +
         dtypes[static_cast<int>(std::get<2>(info.param))];
}

TEST_P(Shapes, DenseAndSparseMatchReference) {
  const auto& [device, row, dtype] = GetParam();
  for (const bool dense : {true, false}) {
    Pack p;
    p.shape = row.shape;
    p.dtype = dtype;
    p.o_dtype = dtype;
    for (int64_t length : {300, 1, 64, 33}) {
      p.Add(length, dense ? DenseBudget() : RetentionBudget(0.29));
      p.AddInitialState(static_cast<uint32_t>(length));
    }
    FillRandom(&p, 31);
    ExpectMatchesReference(device, p, RunPack(device, p), row.name);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Shapes,
                         testing::Combine(testing::ValuesIn(TestDevices()),
                                          testing::Values(ShapeRow{"ratio1", {3, 3, 64, 64}},
                                                          ShapeRow{"ratio2", {2, 4, 128, 128}},
                                                          ShapeRow{"ratio3", {2, 6, 32, 64}},
                                                          ShapeRow{"ratio4", {1, 4, 64, 32}},
                                                          ShapeRow{"one_by_one", {1, 1, 1, 1}},
                                                          ShapeRow{"odd", {2, 2, 37, 77}},
                                                          ShapeRow{"even_not_16", {1, 2, 50, 30}},
                                                          ShapeRow{"largest", {1, 2, 256, 256}},
                                                          ShapeRow{"tall", {1, 1, 256, 8}},
                                                          ShapeRow{"wide", {1, 1, 8, 256}}),
                                          testing::Values(DType::kF32, DType::kBF16, DType::kF16)),
                         Name);

class Devices : public testing::TestWithParam<TestDevice*> {};

TEST_P(Devices, EveryLengthAroundAGroup) {
  for (const bool dense : {true, false}) {
    Pack p;
    p.shape = {1, 2, 32, 32};
    for (int64_t length = 0; length <= 130; ++length) {
      p.Add(length, dense ? DenseBudget() : RetentionBudget(0.5));
    }
    for (SequenceParams& s : p.sequences) s.budget.keep_last = 8;
    FillRandom(&p, 32);
    ExpectMatchesReference(GetParam(), p, RunPack(GetParam(), p), "lengths");
  }
}

TEST_P(Devices, ExplicitScale) {
  Pack p;
  p.Add(100, DenseBudget());
  p.scale = 0.7f;
  FillRandom(&p, 33);
  ExpectMatchesReference(GetParam(), p, RunPack(GetParam(), p), "scale");
}

// Heads of 128 in 16 bits are the Hopper kernel's: what else a call may ask for, all at once.
TEST_P(Devices, WideHeadsWithEveryOption) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const bool dense : {true, false}) {
      for (const bool value_major : {true, false}) {
        Pack p;
        p.shape = {1, 3, 128, 128};
        p.dtype = dtype;
        p.o_dtype = value_major ? DType::kF32 : dtype;
        p.normalize_qk = value_major;
        p.initial_layout = value_major ? StateLayout::kValueMajor : StateLayout::kKeyMajor;
        p.final_layout = p.initial_layout;
        p.snapshot_slots = 3;
        p.Add(70, dense ? DenseBudget() : RetentionBudget(0.29));
        p.AddInitialState(51);
        SequenceParams& s = p.Add(Scaled(2300), dense ? DenseBudget() : RetentionBudget(0.29));
        s.snapshot_every = kWindow;
        s.snapshot_index = 1;
        p.AddInitialState(52);
        FillRandom(&p, 50);
        ExpectMatchesReference(GetParam(), p, RunPack(GetParam(), p), "options");
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Devices, testing::ValuesIn(TestDevices()),
                         [](const auto& info) { return std::string(info.param->name()); });

#if defined(__linux__)
// The int32-overflow row: token strides put the last rows past 2^32 elements. The memory is
// reserved, not committed, so that only the pages of the rows themselves exist.
class Reserved {
 public:
  explicit Reserved(size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Reserved() { munmap(data_, bytes_); }
  float* data() const { return static_cast<float*>(data_); }
  bool ok() const { return data_ != MAP_FAILED; }

 private:
  size_t bytes_;
  void* data_;
};

TEST(Int32Overflow, OffsetsBeyondTwoToThe32) {
  constexpr int64_t kTokens = 70, kStride = (int64_t{1} << 26) + 16;
  constexpr int kDim = 16;
  Pack p;
  p.shape = {1, 1, kDim, kDim};
  p.Add(kTokens, RetentionBudget(0.5));
  p.sequences[0].budget.keep_last = 4;
  FillRandom(&p, 34);
  const PackResult near = RunPack(TestDevices()[0], p);
  ASSERT_TRUE(near.status.ok());

  const size_t bytes = static_cast<size_t>(kTokens * kStride) * sizeof(float);
  const Reserved q(bytes), k(bytes), v(bytes), o(bytes);
  ASSERT_TRUE(q.ok() && k.ok() && v.ok() && o.ok()) << "address space for 4 x " << bytes;
  for (int64_t t = 0; t < kTokens; ++t) {
    std::memcpy(q.data() + t * kStride, &p.q[t * kDim], kDim * sizeof(float));
    std::memcpy(k.data() + t * kStride, &p.k[t * kDim], kDim * sizeof(float));
    std::memcpy(v.data() + t * kStride, &p.v[t * kDim], kDim * sizeof(float));
  }
  GdnForwardArgs a;
  a.shape = p.shape;
  a.num_tokens = kTokens;
  a.num_seqs = 1;
  a.cu_seqlens = p.cu_seqlens.data();
  a.sequences = p.sequences.data();
  a.q = {q.data(), DType::kF32, kStride, kDim};
  a.k = {k.data(), DType::kF32, kStride, kDim};
  a.v = {v.data(), DType::kF32, kStride, kDim};
  a.o = {o.data(), DType::kF32, kStride, kDim};
  a.log_gate = {p.log_gate.data(), DType::kF32, 1, 1};
  a.beta = {p.beta.data(), DType::kF32, 1, 1};
  std::vector<float> state(kDim * kDim);
  a.final_state = {state.data(), 1, StateLayout::kKeyMajor};
  auto backend = CreateCpuBackend({.num_threads = 2});
  ASSERT_TRUE(backend.ok());
  const size_t workspace_bytes =
      *(*backend)->WorkspaceBytes({p.shape, kTokens, 1, 1.0, DType::kF32});
  DeviceBuffer workspace(TestDevices()[0], workspace_bytes);
  a.workspace = workspace.data();
  a.workspace_bytes = workspace_bytes;
  ASSERT_TRUE((*backend)->Forward(a, nullptr).ok());
  EXPECT_EQ(state, near.states);
  for (int64_t t = 0; t < kTokens; ++t) {
    EXPECT_EQ(0, std::memcmp(o.data() + t * kStride, &near.o[t * kDim], kDim * sizeof(float))) << t;
  }
}
#endif

// Results do not depend on how many threads share the work, nor on how pairs are split for them.
TEST(CpuThreads, AnyNumberGivesTheSameBits) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Pack p;
    p.shape = {1, 3, 64, 160};
    p.dtype = dtype;
    p.Add(500, RetentionBudget(0.29));
    p.Add(77, DenseBudget());
    FillRandom(&p, 35);
    PackResult one;
    for (int threads : {1, 2, 3, 5, 16}) {
      auto backend = CreateCpuBackend({.num_threads = threads});
      ASSERT_TRUE(backend.ok());
      const PackResult r = RunPack(TestDevices()[0], backend->get(), p);
      ASSERT_TRUE(r.status.ok()) << r.status.message();
      if (threads == 1) one = r;
      EXPECT_EQ(0, std::memcmp(r.o.data(), one.o.data(), r.o.size() * 4)) << threads;
      EXPECT_EQ(0, std::memcmp(r.states.data(), one.states.data(), r.states.size() * 4));
      EXPECT_EQ(r.mask, one.mask);
    }
  }
}

}  // namespace
}  // namespace sparsegdn::test
