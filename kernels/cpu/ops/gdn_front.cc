// The causal convolution in front of the GDN core, its state, and the gates.
#include <cstring>

#include "kernels/cpu/ops/cpu_ops_impl.h"
#include "kernels/cpu/ops/ops_kernels.h"

namespace sparsegdn {

using cpu_ops::RowOf;
using cpu_ops::Segment;

namespace {

constexpr int64_t kTaps = 4;
constexpr int64_t kSegmentTokens = 64;

// The state after `rows` rows of x: its last four rows, preceded by the old state where there are
// fewer. `out` may be `state`.
void ShiftState(ConstRows x, int64_t rows, int64_t channels, const float* state, float* out) {
  const int64_t old = std::max<int64_t>(0, kTaps - rows);
  for (int64_t c = 0; c < channels; ++c) {
    float column[kTaps];
    for (int64_t j = 0; j < old; ++j) column[j] = state[c * kTaps + rows + j];
    for (int64_t j = old; j < kTaps; ++j) column[j] = RowOf(x, rows - kTaps + j)[c];
    std::memcpy(out + c * kTaps, column, sizeof(column));
  }
}

}  // namespace

std::vector<Segment> cpu_ops::SegmentsOf(const PackArgs& pack, int64_t tokens) {
  std::vector<Segment> segments;
  for (int32_t s = 0; s < pack.num_seqs; ++s) {
    const int64_t length = pack.cu_seqlens[s + 1] - pack.cu_seqlens[s];
    for (int64_t t = 0; t < length; t += tokens) {
      segments.push_back({s, t, std::min(length, t + tokens)});
    }
  }
  return segments;
}

void CpuOps::GdnFront(const GdnFrontArgs& a) {
  const int64_t channels = a.channels;
  const std::vector<Segment> segments = cpu_ops::SegmentsOf(a.pack, kSegmentTokens);
  const auto state_of = [&](int32_t seq) {
    return static_cast<float*>(a.conv_state) + a.pack.slots[seq] * channels * kTaps;
  };
  impl_->pool.Run(segments.size(), [&](int64_t i, int thread) {
    const Segment& segment = segments[i];
    const int64_t first_row = a.pack.cu_seqlens[segment.seq];
    // history[j] is the row of token j - 3 of the sequence.
    float* history = impl_->Scratch(thread, (kTaps - 1) * channels);
    if (segment.begin == 0) {
      const float* state = state_of(segment.seq);
      for (int64_t j = 0; j < kTaps - 1; ++j) {
        for (int64_t c = 0; c < channels; ++c) history[j * channels + c] = state[c * kTaps + j + 1];
      }
    }
    for (int64_t t = segment.begin; t < segment.end; ++t) {
      cpu_ops::ConvArgs conv{{}, a.taps, channels, channels, RowOf(a.y, first_row + t)};
      for (int64_t j = 0; j < kTaps; ++j) {
        const int64_t source = t - (kTaps - 1) + j;
        conv.rows[j] =
            source < 0 ? history + (source + kTaps - 1) * channels : RowOf(a.x, first_row + source);
      }
      cpu_ops::ConvSiluRow(conv);
      const int64_t at = (first_row + t) * a.num_v_heads;
      cpu_ops::GateRow({RowOf(a.a, first_row + t), RowOf(a.b, first_row + t), a.a_log, a.dt_bias,
                        a.num_v_heads, a.log_gate + at, a.beta + at});
    }
  });
  // Only now has every segment read the old states.
  impl_->pool.Run(a.pack.num_seqs, [&](int64_t s, int) {
    const int64_t first_row = a.pack.cu_seqlens[s];
    const int64_t length = a.pack.cu_seqlens[s + 1] - first_row;
    float* state = state_of(static_cast<int32_t>(s));
    ShiftState({RowOf(a.x, first_row), a.x.stride}, length, channels, state, state);
  });
}

void CpuOps::ConvStateAt(const ConvStateAtArgs& a) {
  ShiftState(a.x, a.rows, a.channels, static_cast<const float*>(a.state),
             static_cast<float*>(a.out));
}

}  // namespace sparsegdn
