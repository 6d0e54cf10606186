// Goal: norm, rope, paged cache and causal attention with grouped heads and a prefix equal fp64;
// a row's bits do not depend on how its prompt was cut or what it was packed with; what lies in
// the cache beyond a sequence never matters. Tolerance: 1e-5 on outputs of order one: products of
// at most 256 terms, softmax over a few hundred.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "sparsegdn/cpu_ops.h"
#include "tests/unit/ops/ops_testing.h"

namespace sparsegdn::ops_testing {
namespace {

struct Layout {
  const char* name;
  AttentionShape shape;
  int32_t block_tokens;
};

// A request's raw projections and a cache whose blocks are handed out in a scrambled order.
class Attention {
 public:
  Attention(const Layout& layout, int64_t tokens, int64_t sequences, uint32_t seed)
      : shape(layout.shape),
        block_tokens(layout.block_tokens),
        max_blocks((tokens + block_tokens - 1) / block_tokens) {
    const int64_t dim = shape.head_dim;
    Random random(seed);
    for (int64_t s = 0; s < sequences; ++s) {
      fused.emplace_back(tokens, (2 * shape.num_q_heads + 2 * shape.num_kv_heads) * dim);
      random.Fill(fused.back());
    }
    q_norm = random.Vector(dim, 0.1f);
    k_norm = random.Vector(dim, 0.1f);
    for (int32_t i = 0; i < shape.rotary_dim; i += 2) {
      inv_freq.push_back(std::pow(1e7f, -static_cast<float>(i) / shape.rotary_dim));
    }
    const size_t blocks = static_cast<size_t>(sequences * max_blocks);
    cache.assign(blocks * CpuKvBlockBytes(shape, block_tokens) / sizeof(float), NAN);
    tables.resize(blocks);
    std::iota(tables.begin(), tables.end(), 0);
    std::shuffle(tables.begin(), tables.end(), std::mt19937(seed));
  }

  // Runs tokens [first[s], first[s] + count[s]) of the sequences as one pack; rows of `out` and
  // `keys` are in pack order.
  void Run(CpuOps& ops, const std::vector<int64_t>& first, const std::vector<int32_t>& count,
           Matrix& out, std::vector<float>& keys) {
    Pack pack;
    std::vector<int32_t> rows_of;
    for (size_t s = 0; s < first.size(); ++s) pack.Add(count[s], static_cast<int32_t>(s), first[s]);
    const int64_t rows = pack.cu_seqlens.back(), dim = shape.head_dim;
    const int64_t q_width = shape.num_q_heads * dim, kv_width = shape.num_kv_heads * dim;
    Matrix packed(rows, fused[0].cols()), q(rows, q_width);
    for (size_t s = 0; s < first.size(); ++s) {
      for (int32_t t = 0; t < count[s]; ++t) {
        std::copy_n(fused[s].row(first[s] + t), fused[s].cols(),
                    packed.row(pack.cu_seqlens[s] + t));
      }
    }
    const int32_t half = shape.rotary_dim / 2;
    std::vector<float> cos(static_cast<size_t>(rows * half), NAN), sin(cos), values;
    keys.assign(static_cast<size_t>(rows * kv_width), NAN);
    values = keys;
    const KvCacheRef ref{cache.data(), tables.data(), max_blocks, block_tokens};
    ops.RopeTable({pack.args(), inv_freq.data(), half, cos.data(), sin.data()});
    const int64_t stride = ConstRows(packed).stride;
    ops.AttentionFront({pack.args(), shape, packed, ConstRows(packed.row(0) + 2 * q_width, stride),
                        ConstRows(packed.row(0) + 2 * q_width + kv_width, stride), q_norm.data(),
                        k_norm.data(), 1e-6f, cos.data(), sin.data(), q, keys.data(), values.data(),
                        ref});
    EXPECT_TRUE(q.GuardsIntact());
    ops.Attention({pack.args(), shape, q, packed, ref, out});
    EXPECT_TRUE(out.GuardsIntact());
  }

  // fp64 norm and rope of a head of the raw rows.
  std::vector<double> Rotated(size_t s, int64_t t, int64_t column,
                              const std::vector<float>& weight) const {
    const int64_t dim = shape.head_dim, half = shape.rotary_dim / 2;
    double sum = 0.0;
    std::vector<double> x(static_cast<size_t>(dim));
    for (int64_t d = 0; d < dim; ++d) {
      x[static_cast<size_t>(d)] = fused[s].at(t, column + d);
      sum += x[static_cast<size_t>(d)] * x[static_cast<size_t>(d)];
    }
    const double scale = 1.0 / std::sqrt(sum / static_cast<double>(dim) + 1e-6);
    for (size_t d = 0; d < x.size(); ++d) x[d] *= scale * (1.0 + weight[d]);
    for (int64_t i = 0; i < half; ++i) {
      const float theta = static_cast<float>(t) * inv_freq[static_cast<size_t>(i)];
      const double low = x[static_cast<size_t>(i)], high = x[static_cast<size_t>(i + half)];
      x[static_cast<size_t>(i)] = low * std::cos(double{theta}) - high * std::sin(double{theta});
      x[static_cast<size_t>(i + half)] =
          high * std::cos(double{theta}) + low * std::sin(double{theta});
    }
    return x;
  }

  // fp64 output of one token and query head.
  std::vector<double> Expected(size_t s, int64_t t, int64_t head) const {
    const int64_t dim = shape.head_dim, q_width = shape.num_q_heads * dim;
    const int64_t kv = head / (shape.num_q_heads / shape.num_kv_heads);
    const int64_t k_column = 2 * q_width + kv * dim;
    const int64_t v_column = k_column + shape.num_kv_heads * dim;
    const std::vector<double> q = Rotated(s, t, 2 * head * dim, q_norm);
    std::vector<double> scores, out(static_cast<size_t>(dim), 0.0);
    double max = -1e300, total = 0.0;
    for (int64_t p = 0; p <= t; ++p) {
      const std::vector<double> k = Rotated(s, p, k_column, k_norm);
      scores.push_back(std::inner_product(q.begin(), q.end(), k.begin(), 0.0) /
                       std::sqrt(static_cast<double>(dim)));
      max = std::max(max, scores.back());
    }
    for (int64_t p = 0; p <= t; ++p) {
      const double weight = std::exp(scores[static_cast<size_t>(p)] - max);
      total += weight;
      for (int64_t d = 0; d < dim; ++d) {
        out[static_cast<size_t>(d)] += weight * fused[s].at(p, v_column + d);
      }
    }
    for (int64_t d = 0; d < dim; ++d) {
      const double gate = fused[s].at(t, (2 * head + 1) * dim + d);
      out[static_cast<size_t>(d)] /= total * (1.0 + std::exp(-gate));
    }
    return out;
  }

  AttentionShape shape;
  int32_t block_tokens;
  int64_t max_blocks;
  std::vector<Matrix> fused;  // per sequence: q and gate per head | k | v
  std::vector<float> q_norm, k_norm, inv_freq, cache;
  std::vector<int32_t> tables;
};

class AttentionTest : public ::testing::TestWithParam<Layout> {};

TEST_P(AttentionTest, MatchesFp64) {
  const int64_t tokens = 150;
  Attention attention(GetParam(), tokens, 1, 11);
  CpuOps ops(2);
  Matrix out(tokens, attention.shape.num_q_heads * attention.shape.head_dim);
  std::vector<float> keys;
  attention.Run(ops, {0}, {tokens}, out, keys);
  const int64_t dim = attention.shape.head_dim;
  for (const int64_t t : {0, 1, 31, 32, 63, 64, 65, 127, 128, 149}) {
    for (int64_t h = 0; h < attention.shape.num_q_heads; ++h) {
      const std::vector<double> wanted = attention.Expected(0, t, h);
      for (int64_t d = 0; d < dim; ++d) {
        ASSERT_NEAR(out.at(t, h * dim + d), wanted[static_cast<size_t>(d)], 1e-5) << t << " " << h;
      }
    }
    const std::vector<double> key =
        attention.Rotated(0, t, 2 * attention.shape.num_q_heads * dim, attention.k_norm);
    for (int64_t d = 0; d < dim; ++d) {
      ASSERT_NEAR(keys[static_cast<size_t>(t * attention.shape.num_kv_heads * dim + d)],
                  key[static_cast<size_t>(d)], 1e-5);
    }
  }
}

TEST_P(AttentionTest, ChunksAndPacksEqualTheWholeBitwise) {
  const int64_t tokens = 140;
  const int64_t width = int64_t{GetParam().shape.num_q_heads} * GetParam().shape.head_dim;
  CpuOps ops(2);
  std::vector<float> keys;
  Attention whole(GetParam(), tokens, 1, 12);
  Matrix reference(tokens, width);
  whole.Run(ops, {0}, {tokens}, reference, keys);
  for (const int32_t cut : {1, 63, 64, 65, 139}) {
    Attention parts(GetParam(), tokens, 3, 12);
    parts.fused[0] = whole.fused[0];
    parts.q_norm = whole.q_norm;
    parts.k_norm = whole.k_norm;
    // The second and third sequences run beside the first, at other positions.
    Matrix first(cut + 40 + 7, width), second(tokens - cut + 1 + 7, width);
    parts.Run(ops, {0, 0, 0}, {cut, 40, 7}, first, keys);
    parts.Run(ops, {cut, 40, 7}, {static_cast<int32_t>(tokens - cut), 1, 7}, second, keys);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t c = 0; c < width; ++c) {
        const float got = t < cut ? first.at(t, c) : second.at(t - cut, c);
        ASSERT_TRUE(SameBits(got, reference.at(t, c))) << cut << " " << t << " " << c;
      }
    }
  }
}

TEST_P(AttentionTest, LoadedRowsContinueBitwise) {
  const int64_t tokens = 100;
  const AttentionShape& shape = GetParam().shape;
  const int64_t width = int64_t{shape.num_q_heads} * shape.head_dim;
  const int64_t kv_width = int64_t{shape.num_kv_heads} * shape.head_dim;
  CpuOps ops(2);
  std::vector<float> keys, last;
  Attention whole(GetParam(), tokens, 1, 13);
  Matrix reference(tokens, width);
  whole.Run(ops, {0}, {tokens}, reference, keys);
  std::vector<float> values;
  for (int64_t t = 0; t < tokens; ++t) {
    const float* v = whole.fused[0].row(t) + 2 * width + kv_width;
    values.insert(values.end(), v, v + kv_width);
  }
  Attention resumed(GetParam(), tokens, 1, 13);
  const KvCacheRef ref{resumed.cache.data(), resumed.tables.data(), resumed.max_blocks,
                       resumed.block_tokens};
  ops.KvLoad({shape, 30, 0, keys.data(), values.data(), ref});
  ops.KvLoad({shape, 69, 30, keys.data() + 30 * kv_width, values.data() + 30 * kv_width, ref});
  Matrix out(1, width);
  resumed.Run(ops, {99}, {1}, out, last);
  for (int64_t c = 0; c < width; ++c) ASSERT_TRUE(SameBits(out.at(0, c), reference.at(99, c)));
}

INSTANTIATE_TEST_SUITE_P(Layouts, AttentionTest,
                         ::testing::Values(Layout{"plain", {2, 2, 64, 64}, 64},
                                           Layout{"grouped", {4, 2, 64, 16}, 128},
                                           Layout{"ratio_6", {6, 1, 256, 64}, 64},
                                           Layout{"odd_dim", {3, 1, 80, 20}, 192},
                                           Layout{"no_rope", {2, 1, 16, 0}, 64},
                                           Layout{"widest_group", {64, 1, 8, 4}, 64}),
                         [](const auto& info) { return info.param.name; });

TEST(RopeTableTest, FarPositionsRoundTheProductToFp32) {
  CpuOps ops(2);
  Pack pack;
  pack.Add(2, 0, 262'142);
  pack.Add(20, 1, 4'090);
  const std::vector<float> inv_freq = {1.0f, 0.13335214f, 1e-4f};
  std::vector<float> cos(22 * 3, NAN), sin(22 * 3, NAN);
  ops.RopeTable({pack.args(), inv_freq.data(), 3, cos.data(), sin.data()});
  for (int64_t row = 0; row < 22; ++row) {
    const float position = static_cast<float>(row < 2 ? 262'142 + row : 4'090 + row - 2);
    for (size_t f = 0; f < 3; ++f) {
      const float theta = position * inv_freq[f];
      EXPECT_EQ(cos[static_cast<size_t>(row) * 3 + f], static_cast<float>(std::cos(double{theta})));
      EXPECT_EQ(sin[static_cast<size_t>(row) * 3 + f], static_cast<float>(std::sin(double{theta})));
    }
  }
}

}  // namespace
}  // namespace sparsegdn::ops_testing
