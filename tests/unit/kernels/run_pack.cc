// Moving a Pack to a device and back.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/common/float_convert.h"
#include "tests/unit/kernels/test_pack.h"

namespace sparsegdn::test {
namespace {

constexpr int64_t kRowsPastEnd = 3;
constexpr int64_t kGap = 5;  // elements between token rows
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// [rows, width] floats as dtype with kGap elements after each row and kRowsPastEnd more rows, all
// of them NaN.
class Rows {
 public:
  Rows(TestDevice* device, DType dtype, int64_t rows, int64_t width)
      : dtype_(dtype),
        rows_(rows),
        width_(width),
        buffer_(device, (rows + kRowsPastEnd) * (width + kGap) * DTypeBytes(dtype)) {}

  void Upload(const std::vector<float>& x) {
    std::vector<char> host(buffer_.bytes());
    const int64_t stride = width_ + kGap;
    for (int64_t i = 0; i < (rows_ + kRowsPastEnd) * stride; ++i) {
      const int64_t row = i / stride, col = i % stride;
      const bool inside = row < rows_ && col < width_;
      StoreElement(host.data(), dtype_, i, inside ? x[row * width_ + col] : kNan);
    }
    buffer_.Upload(host.data());
  }

  // Clears *intact if anything outside the rows was written.
  std::vector<float> Download(bool* intact) const {
    std::vector<unsigned char> host(buffer_.bytes());
    buffer_.Download(host.data());
    *intact = *intact && buffer_.GuardsIntact();
    std::vector<float> out(rows_ * width_);
    const int64_t stride = width_ + kGap, bytes = DTypeBytes(dtype_);
    for (int64_t i = 0; i < (rows_ + kRowsPastEnd) * stride; ++i) {
      const int64_t row = i / stride, col = i % stride;
      if (row < rows_ && col < width_) {
        out[row * width_ + col] = LoadElement(host.data(), dtype_, i);
        continue;
      }
      for (int64_t b = 0; b < bytes; ++b) *intact = *intact && host[i * bytes + b] == 0xff;
    }
    return out;
  }

  template <typename Ref>
  Ref Tensor(int64_t head_stride) const {
    return Ref{buffer_.data(), dtype_, width_ + kGap, head_stride};
  }

 private:
  DType dtype_;
  int64_t rows_, width_;
  DeviceBuffer buffer_;
};

// [n, Dk, Dv] matrices between key-major and the pool's layout.
std::vector<float> Relayout(const std::vector<float>& x, const GdnShape& s, StateLayout layout,
                            bool from_key_major) {
  if (layout == StateLayout::kKeyMajor) return x;
  std::vector<float> out(x.size());
  const int64_t dk = s.head_dim_k, dv = s.head_dim_v;
  for (int64_t m = 0; m * dk * dv < static_cast<int64_t>(x.size()); ++m) {
    for (int64_t i = 0; i < dk; ++i) {
      for (int64_t j = 0; j < dv; ++j) {
        const int64_t key = m * dk * dv + i * dv + j, value = m * dk * dv + j * dk + i;
        if (from_key_major) {
          out[value] = x[key];
        } else {
          out[key] = x[value];
        }
      }
    }
  }
  return out;
}

template <typename T>
std::vector<T> Fetch(const DeviceBuffer& buffer, int64_t n, bool* intact) {
  std::vector<T> out(buffer.bytes() / sizeof(T));
  buffer.Download(out.data());
  *intact = *intact && buffer.GuardsIntact();
  out.resize(n);
  return out;
}

struct Buffers {
  Rows q, k, v, gate, beta, o;
  DeviceBuffer cu, sequences, mask_in, mask_out, selected, nonfinite, status;
  DeviceBuffer initial, final_states, snapshots;

  Buffers(TestDevice* d, const Pack& p)
      : q(d, p.dtype, p.tokens(), int64_t{p.shape.num_k_heads} * p.shape.head_dim_k),
        k(d, p.dtype, p.tokens(), int64_t{p.shape.num_k_heads} * p.shape.head_dim_k),
        v(d, p.dtype, p.tokens(), int64_t{p.shape.num_v_heads} * p.shape.head_dim_v),
        gate(d, p.gate_dtype, p.tokens(), p.shape.num_v_heads),
        beta(d, p.beta_dtype, p.tokens(), p.shape.num_v_heads),
        o(d, p.o_dtype, p.tokens(), int64_t{p.shape.num_v_heads} * p.shape.head_dim_v),
        cu(d, p.cu_seqlens.size() * sizeof(int32_t)),
        sequences(d, p.sequences.size() * sizeof(SequenceParams)),
        mask_in(d, p.mask.size()),
        mask_out(d, p.tokens() * p.shape.num_k_heads),
        selected(d, p.num_seqs() * p.shape.num_k_heads * sizeof(int32_t)),
        nonfinite(d, p.num_seqs() * sizeof(int32_t)),
        status(d, sizeof(uint32_t)),
        initial(d, p.initial.size() * sizeof(float)),
        final_states(d, (p.in_place ? 0 : p.num_seqs() * p.state_size()) * sizeof(float)),
        snapshots(d, p.snapshot_slots * p.state_size() * sizeof(float)) {
    q.Upload(p.q);
    k.Upload(p.k);
    v.Upload(p.v);
    gate.Upload(p.log_gate);
    beta.Upload(p.beta);
    cu.Upload(p.cu_seqlens.data());
    sequences.Upload(p.sequences.data());
    mask_in.Upload(p.mask.data());
    initial.Upload(Relayout(p.initial, p.shape, p.initial_layout, true).data());
  }

  GdnForwardArgs Args(const Pack& p) const {
    GdnForwardArgs a;
    a.shape = p.shape;
    a.num_tokens = p.tokens() + kRowsPastEnd;
    a.num_seqs = p.num_seqs();
    a.cu_seqlens = static_cast<const int32_t*>(cu.data());
    a.sequences = static_cast<const SequenceParams*>(sequences.data());
    a.q = q.Tensor<ConstTensorRef>(p.shape.head_dim_k);
    a.k = k.Tensor<ConstTensorRef>(p.shape.head_dim_k);
    a.v = v.Tensor<ConstTensorRef>(p.shape.head_dim_v);
    a.log_gate = gate.Tensor<ConstTensorRef>(1);
    a.beta = beta.Tensor<ConstTensorRef>(1);
    a.o = o.Tensor<TensorRef>(p.shape.head_dim_v);
    a.scale = p.scale;
    a.normalize_qk = p.normalize_qk;
    const auto slots = static_cast<int32_t>(p.initial.size() / p.state_size());
    if (slots > 0) a.initial_state = {static_cast<float*>(initial.data()), slots, p.initial_layout};
    a.final_state = {static_cast<float*>(final_states.data()), p.num_seqs(), p.final_layout};
    if (p.in_place) a.final_state = a.initial_state;
    if (!p.mask.empty()) a.mask = static_cast<const uint8_t*>(mask_in.data());
    a.mask_out = static_cast<uint8_t*>(mask_out.data());
    a.selected = static_cast<int32_t*>(selected.data());
    a.nonfinite = static_cast<int32_t*>(nonfinite.data());
    a.status = static_cast<uint32_t*>(status.data());
    a.snapshots = p.snapshot_slots > 0 ? static_cast<float*>(snapshots.data()) : nullptr;
    a.snapshot_slots = p.snapshot_slots;
    return a;
  }
};

}  // namespace

PackResult RunPack(TestDevice* device, GdnBackend* backend, const Pack& p) {
  Buffers b(device, p);
  GdnForwardArgs args = b.Args(p);
  GdnLimits limits;
  limits.shape = p.shape;
  limits.max_tokens = args.num_tokens;
  limits.max_seqs = p.num_seqs();
  limits.dtype = p.dtype;
  PackResult r;
  const auto bytes = backend->WorkspaceBytes(limits);
  if (!bytes.ok()) {
    r.status = bytes.status();
    return r;
  }
  DeviceBuffer workspace(device, *bytes);
  args.workspace = workspace.data();
  args.workspace_bytes = *bytes;
  r.status = backend->Forward(args, device->stream());
  r.status.Update(device->Synchronize());
  bool intact = workspace.GuardsIntact();
  r.status_word = Fetch<uint32_t>(b.status, 1, &intact)[0];
  if (!r.status.ok()) return r;
  r.o = b.o.Download(&intact);
  const DeviceBuffer& states = p.in_place ? b.initial : b.final_states;
  r.raw_states = Fetch<float>(states, states.bytes() / sizeof(float), &intact);
  r.states = Relayout(r.raw_states, p.shape, p.final_layout, false);
  r.snapshots = Relayout(Fetch<float>(b.snapshots, p.snapshot_slots * p.state_size(), &intact),
                         p.shape, p.final_layout, false);
  r.mask = Fetch<uint8_t>(b.mask_out, p.tokens() * p.shape.num_k_heads, &intact);
  r.selected = Fetch<int32_t>(b.selected, p.num_seqs() * p.shape.num_k_heads, &intact);
  r.nonfinite = Fetch<int32_t>(b.nonfinite, p.num_seqs(), &intact);
  r.guards_intact = intact;
  return r;
}

PackResult RunPack(TestDevice* device, const Pack& pack) {
  auto backend = device->CreateBackend();
  if (!backend.ok()) {
    PackResult r;
    r.status = backend.status();
    return r;
  }
  return RunPack(device, backend->get(), pack);
}

double WorstHeadError(const float* got, const double* want, int64_t rows, int64_t heads,
                      int64_t width) {
  double worst = 0.0;
  for (int64_t h = 0; h < heads; ++h) {
    double error = 0.0, norm = 0.0;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < width; ++i) {
        const int64_t at = (r * heads + h) * width + i;
        error += (got[at] - want[at]) * (got[at] - want[at]);
        norm += want[at] * want[at];
      }
    }
    if (std::isnan(error)) return std::numeric_limits<double>::infinity();
    if (error > 0.0) worst = std::max(worst, std::sqrt(error) / std::max(std::sqrt(norm), 1e-30));
  }
  return worst;
}

void ExpectMatchesReference(TestDevice* device, const Pack& p, const PackResult& result,
                            const std::string& what, double tolerance) {
  ASSERT_TRUE(result.status.ok()) << what << ": " << result.status.message();
  EXPECT_TRUE(result.guards_intact) << what;
  if (tolerance == 0.0) tolerance = device->Tolerance(p.dtype);
  const GdnShape& s = p.shape;
  const int64_t matrix = int64_t{s.head_dim_k} * s.head_dim_v;
  for (int32_t i = 0; i < p.num_seqs(); ++i) {
    const reference::Sequence in = ReferenceInput(p, i, result.mask);
    const reference::Result want = reference::RunRecurrence(in);
    const float* o = result.o.data() + int64_t{p.cu_seqlens[i]} * s.num_v_heads * s.head_dim_v;
    // Storing o in 16 bits adds half an ulp to every element.
    const double o_tolerance = p.o_dtype == DType::kF32 ? tolerance : std::hypot(tolerance, 0x1p-9);
    EXPECT_LE(WorstHeadError(o, want.o.data(), in.num_tokens, s.num_v_heads, s.head_dim_v),
              o_tolerance)
        << what << ": o of sequence " << i;
    const int64_t slot = p.sequences[i].final_slot;
    if (slot >= 0) {
      const float* state = result.states.data() + slot * p.state_size();
      EXPECT_LE(WorstHeadError(state, want.state.data(), 1, s.num_v_heads, matrix), tolerance)
          << what << ": state of sequence " << i;
    }
    const int64_t snapshots = want.snapshots.size() / p.state_size();
    for (int64_t n = 0; n < snapshots; ++n) {
      const int64_t at = p.sequences[i].snapshot_index + n;
      EXPECT_LE(
          WorstHeadError(result.snapshots.data() + at * p.state_size(),
                         want.snapshots.data() + n * p.state_size(), 1, s.num_v_heads, matrix),
          tolerance)
          << what << ": snapshot " << n << " of sequence " << i;
    }
  }
}

}  // namespace sparsegdn::test
