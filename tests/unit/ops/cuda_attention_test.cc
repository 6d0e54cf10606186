// Goal: norm, rope, paged cache and attention on the device equal the CPU's on the same BF16
// inputs, for packs with prefixes, whole and partial tiles, with and without matrix units; what
// lies in the cache beyond a sequence never matters. Tolerance: q, k, v and the weights are rounded
// to 8 bits (1.1e-3 rms each) and the result once more: 8e-3 relative L2 of a row.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "sparsegdn/cpu_ops.h"
#include "tests/unit/ops/cuda_ops_testing.h"

namespace sparsegdn::ops_testing {
namespace {

constexpr double kTolerance = 8e-3;

struct Layout {
  const char* name;
  AttentionShape shape;
  int32_t block_tokens;
  const char* kernel;        // on sm_90
  bool consecutive = false;  // blocks side by side, as cuDNN wants them
};

bool IsHopper() {
  int major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  return major == 9;
}

std::vector<float> Widened(const std::vector<uint16_t>& from) {
  std::vector<float> out(from.size());
  std::transform(from.begin(), from.end(), out.begin(), model::WidenBf16);
  return out;
}

class CudaAttentionTest : public CudaTest, public ::testing::WithParamInterface<Layout> {
 protected:
  void SetUp() override;
  // The cache of both backends and the projections of every token that a sequence ever sees.
  struct Side {
    std::vector<int32_t> tables;
    int64_t max_blocks = 0;
  };

  // Runs a pack on both backends: rows [first, first + count) of each sequence.
  void RunBoth(const std::vector<int64_t>& first, const std::vector<int32_t>& count);
  void MakeCaches(int64_t tokens, size_t sequences);

  CpuOps cpu_{2};
  Random random_{11};
  Side side_;
  std::vector<float> cpu_cache_;
  std::unique_ptr<DeviceArray<uint16_t>> cache_;
};

void CudaAttentionTest::MakeCaches(int64_t tokens, size_t sequences) {
  const Layout& l = GetParam();
  side_.max_blocks = (tokens + l.block_tokens - 1) / l.block_tokens;
  const size_t blocks = sequences * static_cast<size_t>(side_.max_blocks);
  side_.tables.resize(blocks);
  std::iota(side_.tables.begin(), side_.tables.end(), 0);
  if (l.consecutive) {
    // Sequences in descending order, each one's blocks ascending.
    for (size_t s = 0; s < sequences; ++s) {
      const auto first = side_.tables.begin() + static_cast<int64_t>(s) * side_.max_blocks;
      std::iota(first, first + side_.max_blocks,
                static_cast<int32_t>(sequences - 1 - s) * static_cast<int32_t>(side_.max_blocks));
    }
  } else {
    std::shuffle(side_.tables.begin(), side_.tables.end(), std::mt19937(3));
  }
  cpu_cache_.assign(blocks * CpuKvBlockBytes(l.shape, l.block_tokens) / sizeof(float), NAN);
  cache_ = std::make_unique<DeviceArray<uint16_t>>(blocks *
                                                   CudaKvBlockBytes(l.shape, l.block_tokens) / 2);
}

// Before any row is appended: what is read past a sequence's end is zeroed as it is appended.
void CudaAttentionTest::SetUp() {
  CudaTest::SetUp();
  if (IsSkipped() || !GetParam().consecutive) return;
  if (!IsHopper()) GTEST_SKIP() << "cuDNN is expected on sm_90 alone";
  const AttentionShape& s = GetParam().shape;
  const int64_t stride = int64_t{s.num_q_heads} * s.head_dim + 8;
  const std::string got = ops_->PrepareAttention({s, 2048, 12, int64_t{1} << 15,
                                                  GetParam().block_tokens, stride, stride});
  if (got.find("built without") != std::string::npos || got.find("libcudnn") != std::string::npos) {
    GTEST_SKIP() << got;
  }
  ASSERT_EQ(got.rfind("cudnn ", 0), 0) << got;
}

void CudaAttentionTest::RunBoth(const std::vector<int64_t>& first,
                                const std::vector<int32_t>& count) {
  const AttentionShape& s = GetParam().shape;
  const int64_t q = int64_t{s.num_q_heads} * s.head_dim, kv = int64_t{s.num_kv_heads} * s.head_dim;
  const int64_t half = s.rotary_dim / 2;
  Pack pack;
  for (size_t i = 0; i < first.size(); ++i) pack.Add(count[i], static_cast<int32_t>(i), first[i]);
  const int64_t rows = pack.cu_seqlens.back();
  const DevicePack device(pack);
  Matrix fused(rows, 2 * q + 2 * kv, 8), q_cpu(rows, q), wanted(rows, q);
  random_.Fill(fused);
  RoundAll(fused);
  const auto q_norm = random_.Vector(s.head_dim, 0.1f), k_norm = random_.Vector(s.head_dim, 0.1f);
  std::vector<float> inv_freq;
  for (int64_t i = 0; i < half; ++i) {
    inv_freq.push_back(std::pow(1e7f, -2.0f * static_cast<float>(i) / s.rotary_dim));
  }
  const size_t angles = static_cast<size_t>(rows * half), width = static_cast<size_t>(rows * kv);
  std::vector<float> cos(angles), sin(angles), keys(width), values(width);
  const KvCacheRef cpu_ref{cpu_cache_.data(), side_.tables.data(), side_.max_blocks,
                           GetParam().block_tokens, GetParam().consecutive};
  const auto column = [&](int64_t c) {
    return ConstRows(fused.row(0) + c, ConstRows(fused).stride);
  };
  cpu_.RopeTable(
      {pack.args(), inv_freq.data(), static_cast<int32_t>(half), cos.data(), sin.data()});
  cpu_.AttentionFront({pack.args(), s, fused, column(2 * q), column(2 * q + kv), q_norm.data(),
                       k_norm.data(), 1e-6f, cos.data(), sin.data(), q_cpu, keys.data(),
                       values.data(), cpu_ref});
  cpu_.Attention({pack.args(), s, q_cpu, fused, cpu_ref, wanted});

  const DeviceRows in(fused, 8), q_out(rows, q, 8), out(rows, q, 8);
  const DeviceArray<float> q_w(q_norm), k_w(k_norm), freq(inv_freq), c(angles), sn(angles);
  const DeviceArray<uint16_t> k_out(width), v_out(width);
  const DeviceArray<int32_t> tables(side_.tables);
  const KvCacheRef ref{cache_->data(), tables.data(), side_.max_blocks, GetParam().block_tokens,
                       GetParam().consecutive};
  const auto device_column = [&](int64_t at) { return ConstRows(in.column(at), in.stride()); };
  Expect(
      ops_->RopeTable({device.args, freq.data(), static_cast<int32_t>(half), c.data(), sn.data()}));
  Expect(ops_->AttentionFront({device.args, s, in, device_column(2 * q), device_column(2 * q + kv),
                               q_w.data(), k_w.data(), 1e-6f, c.data(), sn.data(), q_out,
                               k_out.data(), v_out.data(), ref}));
  const AttentionArgs args{device.args, s, q_out, in, ref, out};
  const std::string kernel = GetParam().kernel;
  ops_->set_portable(kernel == "portable");
  if (IsHopper()) {
    EXPECT_EQ(ops_->AttentionKernel(args), kernel);
  }
  const absl::Status status = ops_->Attention(args);
  ops_->set_portable(false);
  Expect(status);
  ExpectClose(q_out.Read(), q_cpu, 0x1p-7, 1e-2);  // rope adds two rounded products
  const std::vector<float> got_keys = Widened(k_out.Read());
  for (size_t i = 0; i < width; ++i)
    ASSERT_NEAR(got_keys[i], keys[i], 1e-2 + 0x1p-7 * std::abs(keys[i]));
  EXPECT_EQ(Widened(v_out.Read()), values);
  ExpectRowsClose(out.Read(), wanted, kTolerance);

  // As the last layer is finished: rows of later sequences alone, without the first of them and the
  // last, whose keys are there all the same.
  if (first.size() < 2) return;
  const int32_t skip = count[1] > 2 ? 1 : 0, cut = count.back() > 2 ? 1 : 0;
  const int64_t begin = pack.cu_seqlens[1] + skip, end = rows - cut;
  Pack stretch;
  for (size_t i = 1; i < first.size(); ++i) {
    const int32_t front = i == 1 ? skip : 0, back = i + 1 == first.size() ? cut : 0;
    stretch.Add(count[i] - front - back, static_cast<int32_t>(i), first[i] + front);
  }
  const DevicePack device_stretch(stretch);
  const auto row = [begin](const DeviceRows& x) { return x.column(0) + begin * x.stride(); };
  const DeviceRows part(rows, q, 8);
  KvCacheRef later = ref;
  later.block_tables += ref.max_blocks;
  ops_->set_portable(kernel == "portable");
  const absl::Status finished = ops_->Attention({device_stretch.args,
                                                 s,
                                                 {row(q_out), q_out.stride()},
                                                 {row(in), in.stride()},
                                                 later,
                                                 {row(part), part.stride()}});
  ops_->set_portable(false);
  Expect(finished);
  const Matrix read = part.Read();
  Matrix got_part(end - begin, q), wanted_part(end - begin, q);
  for (int64_t r = begin; r < end; ++r) {
    std::copy_n(wanted.row(r), q, wanted_part.row(r - begin));
    for (int64_t c = 0; c < q; ++c) got_part.at(r - begin, c) = read.at(r, c);
  }
  ExpectRowsClose(got_part, wanted_part, kTolerance);
  for (const int64_t outside : {begin - 1, end}) {
    if (outside == rows) continue;
    EXPECT_TRUE(std::isnan(read.at(outside, 0))) << outside;
  }
}

TEST_P(CudaAttentionTest, PacksAndPrefixesMatchTheCpu) {
  MakeCaches(700, 3);
  RunBoth({0, 0, 0}, {150, 1, 64});
  RunBoth({150, 1, 64}, {65, 300, 128});
  RunBoth({215, 301, 192}, {1, 130, 1});
  RunBoth({216, 431, 193}, {256, 257, 63});
}

TEST_P(CudaAttentionTest, ManySequencesMatchTheCpu) {
  MakeCaches(400, 9);
  RunBoth({0, 0, 0, 0, 0, 0, 0, 0, 0}, {127, 128, 129, 1, 2, 255, 256, 257, 64});
  RunBoth({127, 128, 129, 1, 2, 255, 256, 257, 64}, {1, 128, 127, 126, 140, 1, 128, 143, 64});
}

TEST_P(CudaAttentionTest, WhatCudnnCannotServeRunsElsewhere) {
  if (!GetParam().consecutive) GTEST_SKIP() << "not a layout of cuDNN's";
  const AttentionShape& s = GetParam().shape;
  const int64_t stride = int64_t{s.num_q_heads} * s.head_dim + 8;
  AttentionArgs args;
  args.shape = s;
  args.pack.num_seqs = 12;
  args.pack.num_tokens = 2048;
  args.q = {cache_.get(), stride};
  args.out = {nullptr, stride};
  args.cache = {nullptr, nullptr, 1, GetParam().block_tokens, true};
  EXPECT_STREQ(ops_->AttentionKernel(args), "cudnn");
  const auto expect_other = [&](const char* what, AttentionArgs changed) {
    EXPECT_STRNE(ops_->AttentionKernel(changed), "cudnn") << what;
  };
  AttentionArgs other = args;
  other.pack.num_tokens = 127;
  expect_other("few tokens", other);
  (other = args).pack.num_tokens = 2049;
  expect_other("more tokens than prepared", other);
  (other = args).pack.num_seqs = 17;
  expect_other("more sequences than prepared", other);
  (other = args).cache.consecutive = false;
  expect_other("scattered blocks", other);
  (other = args).q.stride += 8;
  expect_other("another stride", other);
  (other = args).cache.block_tokens *= 2;
  expect_other("other blocks", other);
}

TEST_P(CudaAttentionTest, LoadedRowsAreTheCache) {
  const AttentionShape& s = GetParam().shape;
  const size_t width = static_cast<size_t>(s.num_kv_heads * s.head_dim);
  MakeCaches(200, 1);
  const std::vector<uint16_t> zeros(100 * width, 0);
  std::vector<uint16_t> ones(100 * width, 0x3f80);
  const DeviceArray<uint16_t> k(zeros), v(ones);
  const DeviceArray<int32_t> tables(side_.tables);
  const KvCacheRef ref{cache_->data(), tables.data(), side_.max_blocks, GetParam().block_tokens,
                       GetParam().consecutive};
  Expect(ops_->KvLoad({s, 30, 0, k.data(), v.data(), ref}));
  Expect(ops_->KvLoad({s, 70, 30, k.data() + 30 * width, v.data() + 30 * width, ref}));
  // Equal keys and values of one: the attention of any query is one, times sigmoid(0) = 1/2.
  Pack pack;
  pack.Add(1, 0, 99);
  const DevicePack device(pack);
  Matrix q(1, s.num_q_heads * s.head_dim), gate(1, 2 * s.num_q_heads * s.head_dim);
  random_.Fill(q);
  for (int64_t i = 0; i < gate.cols(); ++i) gate.at(0, i) = 0.0f;
  const DeviceRows q_in(q, 8), gate_in(gate, 8), out(1, q.cols(), 8);
  Expect(ops_->Attention({device.args, s, q_in, gate_in, ref, out}));
  const Matrix got = out.Read();
  for (int64_t i = 0; i < q.cols(); ++i) ASSERT_NEAR(got.at(0, i), 0.5, 2e-3);
}

INSTANTIATE_TEST_SUITE_P(Layouts, CudaAttentionTest,
                         ::testing::Values(
                             Layout{"plain", {2, 2, 64, 64}, 64, "portable"},
                             Layout{"dim_128", {4, 2, 128, 32}, 128, "wgmma"},
                             Layout{"dim_256", {4, 1, 256, 64}, 64, "wgmma"},
                             Layout{"qwen35_4b", {16, 4, 256, 64}, 256, "wgmma"},
                             Layout{"portable_256", {4, 1, 256, 64}, 64, "portable"},
                             Layout{"odd_dim", {3, 1, 80, 20}, 192, "portable"},
                             Layout{"no_rope", {2, 1, 16, 0}, 64, "portable"},
                             Layout{"cudnn_128", {4, 2, 128, 32}, 128, "cudnn", true},
                             Layout{"cudnn_qwen35_4b", {16, 4, 256, 64}, 256, "cudnn", true}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace sparsegdn::ops_testing
