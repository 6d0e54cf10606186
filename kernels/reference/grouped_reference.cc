// The group form in fp64, one value head at a time, with the full 64 x 64 inverse.
#include <algorithm>
#include <cmath>

#include "kernels/reference/gdn_reference.h"

namespace sparsegdn::reference {
namespace {

constexpr int kBlock = 16;
using Matrix = std::vector<double>;  // [kGroup, kGroup] row-major

struct Head {
  const Sequence* in;
  int h, p, dim_k, dim_v;
  double scale;
  std::vector<double> s;  // [dim_k, dim_v], S_B of the current group

  double Gate(int64_t t) const {
    return std::max(in->log_gate[t * in->shape.num_v_heads + h], double{kMinLogGate});
  }
  double Beta(int64_t t) const { return in->beta[t * in->shape.num_v_heads + h]; }
  const double* V(int64_t t) const { return &in->v[(t * in->shape.num_v_heads + h) * dim_v]; }
  bool Event(int64_t t) const {
    return in->mask.empty() || in->mask[t * in->shape.num_k_heads + p] != 0;
  }
  std::vector<double> Row(const std::vector<double>& x, int64_t t) const {
    const double* r = &x[(t * in->shape.num_k_heads + p) * dim_k];
    std::vector<double> row(r, r + dim_k);
    if (!in->normalize_qk) return row;
    double sum = 0.0;
    for (double e : row) sum += e * e;
    for (double& e : row) e /= std::sqrt(sum + 1e-6);
    return row;
  }
};

double Dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// (I + A)^-1 restricted to the blocks the solver keeps: column by column, block row by block row,
// T_bj = -T_bb sum_{j <= l < b} A_bl T_lj; adjacent keeps b - j <= 1.
Matrix Invert(const Matrix& a, bool adjacent) {
  Matrix t(kGroup * kGroup, 0.0);
  for (int col = 0; col < kGroup; ++col) {
    t[col * kGroup + col] = 1.0;
    for (int row = col + 1; row < kGroup; ++row) {
      const int bc = col / kBlock, br = row / kBlock;
      if (adjacent && br - bc > 1) continue;
      double sum = 0.0;
      for (int l = col; l < row; ++l) sum += a[row * kGroup + l] * t[l * kGroup + col];
      t[row * kGroup + col] = -sum;
    }
  }
  return t;
}

bool DropFarBlocks(Solver solver, const std::vector<double>& gates,
                   const std::vector<std::vector<double>>& keys) {
  if (solver != Solver::kAuto) return solver == Solver::kBlockAdjacent;
  const size_t n = gates.size();
  for (const auto& k : keys) {
    if (Dot(k, k) > 1.0625) return false;
  }
  const double limit = -std::log(512.0);
  return (n <= 32 || gates[32] - gates[15] <= limit) && (n <= 48 || gates[48] - gates[31] <= limit);
}

// u = T (beta (v - e^G S_B^T k)), [events, dim_v].
std::vector<double> ApplyInverse(const Head& head, const Matrix& t_inverse,
                                 const std::vector<int64_t>& events,
                                 const std::vector<double>& gates,
                                 const std::vector<std::vector<double>>& keys) {
  const int n = static_cast<int>(events.size());
  const int dim_k = head.dim_k, dim_v = head.dim_v;
  std::vector<double> rhs(n * dim_v), u(n * dim_v, 0.0);
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < dim_v; ++j) {
      double read = 0.0;
      for (int d = 0; d < dim_k; ++d) read += head.s[d * dim_v + j] * keys[i][d];
      rhs[i * dim_v + j] =
          head.Beta(events[i]) * (head.V(events[i])[j] - std::exp(gates[i]) * read);
    }
  }
  for (int i = 0; i < n; ++i) {
    for (int l = 0; l <= i; ++l) {
      for (int j = 0; j < dim_v; ++j) {
        u[i * dim_v + j] += t_inverse[i * kGroup + l] * rhs[l * dim_v + j];
      }
    }
  }
  return u;
}

// Tokens [begin, end) with at most kGroup events; advances head->s.
void RunGroup(Head* head, Solver solver, int64_t begin, int64_t end, Result* out) {
  std::vector<int64_t> events;
  std::vector<double> prefix, gates;
  std::vector<std::vector<double>> keys;
  double sum = 0.0;
  for (int64_t t = begin; t < end; ++t) {
    prefix.push_back(sum += head->Gate(t));
    if (!head->Event(t)) continue;
    events.push_back(t);
    gates.push_back(sum);
    keys.push_back(head->Row(head->in->k, t));
  }
  const int n = static_cast<int>(events.size());
  const int dim_k = head->dim_k, dim_v = head->dim_v;
  Matrix a(kGroup * kGroup, 0.0);
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < i; ++j) {
      a[i * kGroup + j] =
          head->Beta(events[i]) * std::exp(gates[i] - gates[j]) * Dot(keys[i], keys[j]);
    }
  }
  const Matrix t_inverse = Invert(a, DropFarBlocks(solver, gates, keys));
  const std::vector<double> u = ApplyInverse(*head, t_inverse, events, gates, keys);
  for (int64_t t = begin; t < end; ++t) {
    const auto q = head->Row(head->in->q, t);
    const double g = prefix[t - begin];
    double* o = &out->o[(t * head->in->shape.num_v_heads + head->h) * dim_v];
    for (int j = 0; j < dim_v; ++j) {
      double value = 0.0;
      for (int d = 0; d < dim_k; ++d) value += std::exp(g) * q[d] * head->s[d * dim_v + j];
      for (int i = 0; i < n && events[i] <= t; ++i) {
        value += std::exp(g - gates[i]) * Dot(q, keys[i]) * u[i * dim_v + j];
      }
      if (!head->Event(t) && head->in->local == LocalTerm::kSelf) {
        value += head->Beta(t) * Dot(q, head->Row(head->in->k, t)) * head->V(t)[j];
      }
      o[j] = head->scale * value;
    }
  }
  for (int d = 0; d < dim_k; ++d) {
    for (int j = 0; j < dim_v; ++j) {
      double value = std::exp(sum) * head->s[d * dim_v + j];
      for (int i = 0; i < n; ++i) {
        value += std::exp(sum - gates[i]) * keys[i][d] * u[i * dim_v + j];
      }
      head->s[d * dim_v + j] = value;
    }
  }
}

bool Boundary(const Sequence& in, int64_t position) {
  return position % kWindow == 0 || (in.snapshot_every > 0 && position % in.snapshot_every == 0);
}

}  // namespace

Result RunGrouped(const Sequence& in, Solver solver) {
  const GdnShape& d = in.shape;
  const int64_t state_size = int64_t{d.head_dim_k} * d.head_dim_v;
  Result out;
  out.o.assign(in.num_tokens * d.num_v_heads * d.head_dim_v, 0.0);
  out.state = in.initial_state;
  out.state.resize(d.num_v_heads * state_size, 0.0);
  for (int h = 0; h < d.num_v_heads; ++h) {
    const double scale = in.scale != 0.0 ? in.scale : 1.0 / std::sqrt(double(d.head_dim_k));
    Head head{&in, h, h / (d.num_v_heads / d.num_k_heads), d.head_dim_k, d.head_dim_v, scale, {}};
    head.s.assign(&out.state[h * state_size], &out.state[h * state_size] + state_size);
    int64_t begin = 0;
    int events = 0;
    for (int64_t t = 0; t < in.num_tokens; ++t) {
      const bool boundary = t > 0 && Boundary(in, in.first_position + t);
      if (boundary || (head.Event(t) && events == kGroup)) {
        RunGroup(&head, solver, begin, t, &out);
        begin = t;
        events = 0;
      }
      events += head.Event(t) ? 1 : 0;
    }
    if (begin < in.num_tokens) RunGroup(&head, solver, begin, in.num_tokens, &out);
    std::copy(head.s.begin(), head.s.end(), &out.state[h * state_size]);
  }
  return out;
}

}  // namespace sparsegdn::reference
