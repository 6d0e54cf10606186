#include "kernels/reference/gdn_reference.h"

#include <algorithm>
#include <cmath>

namespace sparsegdn::reference {
namespace {

std::vector<double> NormalizedRow(const double* x, int dim, bool normalize) {
  std::vector<double> row(x, x + dim);
  if (!normalize) return row;
  double sum = 0.0;
  for (double e : row) sum += e * e;
  for (double& e : row) e /= std::sqrt(sum + 1e-6);
  return row;
}

// One token of one value head. S is [Dk, Dv].
void Step(const std::vector<double>& k, const double* v, double log_gate, double beta, bool event,
          int dim_v, double* s) {
  const int dim_k = static_cast<int>(k.size());
  const double decay = std::exp(log_gate < kMinLogGate ? double{kMinLogGate} : log_gate);
  for (int64_t i = 0; i < int64_t{dim_k} * dim_v; ++i) s[i] *= decay;
  if (!event) return;
  std::vector<double> u(dim_v, 0.0);  // first S^T k
  for (int i = 0; i < dim_k; ++i) {
    for (int j = 0; j < dim_v; ++j) u[j] += s[int64_t{i} * dim_v + j] * k[i];
  }
  for (int j = 0; j < dim_v; ++j) u[j] = beta * (v[j] - u[j]);
  for (int i = 0; i < dim_k; ++i) {
    for (int j = 0; j < dim_v; ++j) s[int64_t{i} * dim_v + j] += k[i] * u[j];
  }
}

}  // namespace

Result RunRecurrence(const Sequence& in) {
  const GdnShape& d = in.shape;
  const int ratio = d.num_v_heads / d.num_k_heads;
  const int64_t state_size = int64_t{d.head_dim_k} * d.head_dim_v;
  const double scale = in.scale != 0.0 ? in.scale : 1.0 / std::sqrt(double(d.head_dim_k));
  Result out;
  out.o.assign(in.num_tokens * d.num_v_heads * d.head_dim_v, 0.0);
  out.state = in.initial_state;
  out.state.resize(d.num_v_heads * state_size, 0.0);
  for (int64_t t = 0; t < in.num_tokens; ++t) {
    for (int p = 0; p < d.num_k_heads; ++p) {
      const int64_t row = (t * d.num_k_heads + p) * d.head_dim_k;
      const auto q = NormalizedRow(&in.q[row], d.head_dim_k, in.normalize_qk);
      const auto k = NormalizedRow(&in.k[row], d.head_dim_k, in.normalize_qk);
      const bool event = in.mask.empty() || in.mask[t * d.num_k_heads + p] != 0;
      double qk = 0.0;
      for (int i = 0; i < d.head_dim_k; ++i) qk += q[i] * k[i];
      for (int h = p * ratio; h < (p + 1) * ratio; ++h) {
        const int64_t th = t * d.num_v_heads + h;
        const double* v = &in.v[th * d.head_dim_v];
        double* s = &out.state[h * state_size];
        Step(k, v, in.log_gate[th], in.beta[th], event, d.head_dim_v, s);
        const bool self = !event && in.local == LocalTerm::kSelf;
        double* o = &out.o[th * d.head_dim_v];
        for (int i = 0; i < d.head_dim_k; ++i) {
          for (int j = 0; j < d.head_dim_v; ++j) o[j] += s[int64_t{i} * d.head_dim_v + j] * q[i];
        }
        for (int j = 0; j < d.head_dim_v; ++j) {
          if (self) o[j] += in.beta[th] * qk * v[j];
          o[j] *= scale;
        }
      }
    }
    if (in.snapshot_every > 0 && (in.first_position + t + 1) % in.snapshot_every == 0) {
      out.snapshots.insert(out.snapshots.end(), out.state.begin(), out.state.end());
    }
  }
  return out;
}

}  // namespace sparsegdn::reference
