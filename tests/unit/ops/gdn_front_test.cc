// Goal: convolution, gates and conv state in front of the GDN core, for packs of sequences shorter
// and longer than the kernel, starting from any state. Reference: fp64 on the concatenation of the
// state's columns and the rows. Tolerance: 2e-6 relative, a few roundings.
#include <gtest/gtest.h>

#include <algorithm>

#include "sparsegdn/cpu_ops.h"
#include "tests/unit/ops/ops_testing.h"

namespace sparsegdn::ops_testing {
namespace {

constexpr int64_t kChannels = 45;  // not a multiple of any vector
constexpr int32_t kHeads = 3;

struct Front {
  explicit Front(const Pack& pack, uint32_t seed = 1)
      : x(pack.cu_seqlens.back(), kChannels),
        gates(pack.cu_seqlens.back(), 2 * kHeads),
        y(pack.cu_seqlens.back(), kChannels) {
    Random random(seed);
    random.Fill(x);
    random.Fill(gates, 4.0f);
    taps = random.Vector(4 * kChannels);
    a_log = random.Vector(kHeads);
    dt_bias = random.Vector(kHeads, 3.0f);
    state = random.Vector(8 * kChannels * 4);
    log_gate.assign(static_cast<size_t>(x.rows() * kHeads), NAN);
    beta = log_gate;
  }
  void Run(CpuOps& ops, const Pack& pack) {
    ops.GdnFront({pack.args(), kChannels, kHeads, x,
                  ConstRows(gates.row(0) + kHeads, ConstRows(gates).stride), gates, taps.data(),
                  a_log.data(), dt_bias.data(), state.data(), y, log_gate.data(), beta.data()});
  }
  // Column c of the row at token t of a sequence, reaching back into a state.
  double Raw(const std::vector<float>& from, const Pack& pack, size_t s, int64_t t,
             int64_t c) const {
    if (t >= 0) return x.at(pack.cu_seqlens[s] + t, c);
    return from[static_cast<size_t>((pack.slots[s] * kChannels + c) * 4 + 4 + t)];
  }

  Matrix x, gates, y;  // gates: b | a
  std::vector<float> taps, a_log, dt_bias, state, log_gate, beta;
};

Pack MixedPack() {
  Pack pack;
  pack.Add(1, 6, 10);
  pack.Add(200, 0, 0);  // several segments
  pack.Add(3, 2, 5);
  pack.Add(4, 1, 0);
  pack.Add(0, 5, 9);  // untouched
  pack.Add(64, 3, 0);
  return pack;
}

TEST(GdnFrontTest, ConvolutionGatesAndStateMatchFp64) {
  const Pack pack = MixedPack();
  Front front(pack);
  const std::vector<float> before = front.state;
  CpuOps ops(2);
  front.Run(ops, pack);
  EXPECT_TRUE(front.y.GuardsIntact());
  for (size_t s = 0; s < pack.slots.size(); ++s) {
    const int64_t length = pack.cu_seqlens[s + 1] - pack.cu_seqlens[s];
    for (int64_t t = 0; t < length; ++t) {
      const int64_t row = pack.cu_seqlens[s] + t;
      for (int64_t c = 0; c < kChannels; ++c) {
        double sum = 0.0, magnitude = 0.0;
        for (int64_t j = 0; j < 4; ++j) {
          const double term = front.taps[static_cast<size_t>(j * kChannels + c)] *
                              front.Raw(before, pack, s, t - 3 + j, c);
          sum += term;
          magnitude += std::abs(term);
        }
        ASSERT_NEAR(front.y.at(row, c), Silu(sum), 2e-6 * (magnitude + 1e-3)) << s << " " << t;
      }
      for (int64_t h = 0; h < kHeads; ++h) {
        const size_t at = static_cast<size_t>(row * kHeads + h);
        const double x =
            double{front.gates.at(row, kHeads + h)} + front.dt_bias[static_cast<size_t>(h)];
        const double softplus = x > 20.0 ? x : std::log1p(std::exp(x));
        ExpectNear(front.log_gate[at],
                   -std::exp(double{front.a_log[static_cast<size_t>(h)]}) * softplus, 2e-6, 1e-9,
                   "log_gate");
        ExpectNear(front.beta[at], 1.0 / (1.0 + std::exp(-double{front.gates.at(row, h)})), 2e-6,
                   1e-9, "beta");
      }
    }
    for (int64_t c = 0; c < kChannels; ++c) {
      for (int64_t j = 0; j < 4; ++j) {
        EXPECT_EQ(front.state[static_cast<size_t>((pack.slots[s] * kChannels + c) * 4 + j)],
                  front.Raw(before, pack, s, length - 4 + j, c));
      }
    }
  }
  // Slots of no sequence keep every bit.
  for (const int64_t slot : {4, 7}) {
    EXPECT_TRUE(std::equal(front.state.begin() + slot * kChannels * 4,
                           front.state.begin() + (slot + 1) * kChannels * 4,
                           before.begin() + slot * kChannels * 4));
  }
}

TEST(GdnFrontTest, ChunksEqualTheWholeBitwise) {
  Pack whole;
  whole.Add(100, 0, 0);
  Front reference(whole);
  const std::vector<float> before = reference.state;
  CpuOps ops(2);
  reference.Run(ops, whole);
  for (const int32_t cut : {1, 2, 3, 4, 63, 64, 65, 99}) {
    Front parts(whole);
    parts.state = before;
    Matrix y(100, kChannels);
    for (const auto& [first, last] : {std::pair{0, cut}, std::pair{cut, 100}}) {
      Pack pack;
      pack.Add(last - first, 0, first);
      ops.GdnFront({pack.args(), kChannels, kHeads,
                    ConstRows(parts.x.row(first), ConstRows(parts.x).stride),
                    ConstRows(parts.gates.row(first) + kHeads, ConstRows(parts.gates).stride),
                    ConstRows(parts.gates.row(first), ConstRows(parts.gates).stride),
                    parts.taps.data(), parts.a_log.data(), parts.dt_bias.data(), parts.state.data(),
                    Rows{y.row(first), ConstRows(y).stride}, parts.log_gate.data() + first * kHeads,
                    parts.beta.data() + first * kHeads});
    }
    EXPECT_EQ(parts.state, reference.state) << cut;
    EXPECT_EQ(parts.log_gate, reference.log_gate) << cut;
    for (int64_t t = 0; t < 100; ++t) {
      for (int64_t c = 0; c < kChannels; ++c) {
        ASSERT_TRUE(SameBits(y.at(t, c), reference.y.at(t, c))) << cut << " " << t;
      }
    }
  }
}

TEST(GdnFrontTest, ConvStateAtIsTheStateOfThePrefix) {
  for (const int32_t rows : {1, 2, 3, 4, 5, 64}) {
    Pack whole, prefix;
    whole.Add(80, 2, 0);
    prefix.Add(rows, 2, 0);
    Front all(whole), part(whole);
    std::vector<float> out(kChannels * 4, NAN);
    CpuOps ops(1);
    ops.ConvStateAt({kChannels, all.x, rows, all.state.data() + 2 * kChannels * 4, out.data()});
    part.Run(ops, prefix);
    EXPECT_TRUE(std::equal(out.begin(), out.end(), part.state.begin() + 2 * kChannels * 4)) << rows;
  }
}

}  // namespace
}  // namespace sparsegdn::ops_testing
