#include "kernels/cpu/group_step.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/common/float_convert.h"
#include "kernels/common/selection_math.h"

namespace sparsegdn::cpu {
namespace {

constexpr bool kIsFloat(float) { return true; }
constexpr bool kIsFloat(uint16_t) { return false; }
constexpr float kNormEps = 1e-6f;
// AUTO drops the far blocks where decay leaves of their entries at most one rounding of the
// products they feed: beta / 512 with bf16 products, beta * 2^-24 with fp32 products. Dropping
// saves no time here, because blocks are substituted rather than inverted; it keeps AUTO one thing
// on every backend.
constexpr double kDropBelowBf16 = -6.238324625039508;  // -ln 512
constexpr double kDropBelowF32 = -16.635532333438686;  // -ln 2^24
// The bound on entries needs short keys: any |k|^2 above this and AUTO drops nothing in the group.
// Unit keys rounded to bf16 stay below.
constexpr float kMaxSquaredKey = 1.0625f;

int RoundUp(int x, int unit) { return (x + unit - 1) / unit * unit; }

}  // namespace

template <typename E>
GroupStep<E>::GroupStep(const CoreCall& call, const PairTask& task,
                        const ProductKernels<E>& product, const TaskDims& dims,
                        TaskScratch<E>* scratch)
    : call_(call),
      args_(*call.args),
      task_(task),
      product_(product),
      dims_(dims),
      scratch_(scratch) {
  const Budget& budget = args_.sequences[task.sequence].budget;
  const bool masked = call.mask_covers_dense || budget.mode != BudgetMode::kDense;
  mask_ = masked ? call.mask : nullptr;
  solver_ = budget.solver;
  self_term_ = budget.local == LocalTerm::kSelf && mask_ != nullptr;
  scale_ = args_.scale != 0.0f ? args_.scale : 1.0f / std::sqrt(static_cast<float>(dims.dim_k));
}

template <typename E>
const void* GroupStep<E>::Row(const ConstTensorRef& x, int64_t row, int head, int column) const {
  const int64_t at = row * x.token_stride + head * x.head_stride + column;
  return static_cast<const char*>(x.data) + at * DTypeBytes(x.dtype);
}

template <typename E>
int64_t GroupStep<E>::OpenSegment(int64_t begin, int64_t end) {
  segment_begin_ = begin;
  for (int h = task_.head_begin; h < task_.head_end; ++h) SumGates(h, begin, end);
  int32_t* out = scratch_->events;
  const int64_t pairs = args_.shape.num_k_heads;
  for (int64_t row = begin; row < end; ++row) {
    if (mask_ == nullptr || mask_[row * pairs + task_.pair] != 0) {
      *out++ = static_cast<int32_t>(row);
    }
  }
  return out - scratch_->events;
}

template <typename E>
void GroupStep<E>::SumGates(int h, int64_t begin, int64_t end) {
  double sum = 0.0;
  double* out = scratch_->heads[h].gate_sum;
  const ConstTensorRef& gate = args_.log_gate;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = row * gate.token_stride + value_head(h) * gate.head_stride;
    sum += selection::ClampGate(LoadElement(gate.data, gate.dtype, at));
    *out++ = sum;
  }
}

// Gates of the owned rows and events relative to the group's start, as pairs of floats.
template <typename E>
void GroupStep<E>::SetGroupGates(int h, int64_t begin, int64_t end) {
  HeadScratch<E>& head = scratch_->heads[h];
  const double* sum = head.gate_sum + (begin - segment_begin_);
  const double base = begin == segment_begin_ ? 0.0 : sum[-1];
  for (int64_t t = 0; t < end - begin; ++t) {
    const double gate = sum[t] - base;
    head.hi[t] = static_cast<float>(gate);
    head.lo[t] = static_cast<float>(gate - head.hi[t]);
  }
  const double last = sum[end - begin - 1];
  for (int i = 0; i < kRows; ++i) {
    const int64_t t = i < num_events_ ? events_[i] - begin : 0;
    head.event_hi[i] = head.hi[t];
    head.event_lo[i] = head.lo[t];
    head.event_decay[i] = head.hi[t];
    head.event_tail[i] = static_cast<float>(last - sum[t]);
    const int64_t at =
        (begin + t) * args_.beta.token_stride + value_head(h) * args_.beta.head_stride;
    head.event_beta[i] =
        i < num_events_ ? LoadElement(args_.beta.data, args_.beta.dtype, at) : 0.0f;
  }
  call_.vector->exp_inplace(head.event_decay, kRows);
  call_.vector->exp_inplace(head.event_tail, kRows);
  for (int i = 0; i < kRows; ++i) {
    head.event_decay[i] *= scratch_->key_norm[i];
    head.event_tail[i] *= scratch_->key_norm[i];
  }
}

// Key rows, their packed forms, their Gram matrix and their normalisation.
template <typename E>
void GroupStep<E>::GatherKeys() {
  TaskScratch<E>& s = *scratch_;
  const ConstTensorRef& k = args_.k;
  const void* base = Row(k, 0, task_.pair);
  if constexpr (kIsFloat(E())) {
    call_.vector->load_rows(base, k.dtype, k.token_stride, events_, num_events_, dims_.dim_k,
                            s.key_rows, dims_.depth);
  } else {
    for (int i = 0; i < num_events_; ++i) {
      E* row = s.key_rows + i * dims_.depth;
      row[dims_.depth - 1] = 0;
      std::memcpy(row, static_cast<const E*>(base) + events_[i] * k.token_stride,
                  sizeof(E) * dims_.dim_k);
    }
  }
  std::fill(s.key_rows + num_events_ * dims_.depth, s.key_rows + kRows * dims_.depth, E{0});
  product_.pack_keys(s.key_rows, dims_.depth, dims_.dim_k, dims_.key_panel, s.key_panels, s.keys_t);
  const int depth = kIsFloat(E()) ? dims_.dim_k : dims_.depth;
  for (int panel = 0; panel * kPanel < num_events_; ++panel) {
    const int first = panel * kPanel;  // rows above see no event of this panel
    product_.multiply(s.key_rows + first * dims_.depth, dims_.depth, num_events_ - first, depth,
                      s.key_panels + panel * dims_.key_panel,
                      s.kk + (panel * kRows + first) * kPanel);
  }
  for (int i = 0; i < kRows; ++i) {
    if (!args_.normalize_qk || i >= num_events_) {
      s.key_norm[i] = 1.0f;
      continue;
    }
    const float square = s.kk[(i / kPanel * kRows + i) * kPanel + i % kPanel];
    s.key_norm[i] = 1.0f / std::sqrt(square + kNormEps);
  }
}

template <typename E>
bool GroupStep<E>::DropsFarBlocks(int h) const {
  if (solver_ != Solver::kAuto) return solver_ == Solver::kBlockAdjacent;
  const TaskScratch<E>& s = *scratch_;
  for (int i = 0; i < num_events_; ++i) {
    const float square = s.kk[(i / kPanel * kRows + i) * kPanel + i % kPanel];
    if (!(square * s.key_norm[i] * s.key_norm[i] <= kMaxSquaredKey)) return false;
  }
  const double* sum = s.heads[h].gate_sum;
  const double limit = kIsFloat(E()) ? kDropBelowF32 : kDropBelowBf16;
  const auto decayed = [&](int later, int earlier) {
    return num_events_ <= later ||
           sum[events_[later] - segment_begin_] - sum[events_[earlier] - segment_begin_] <= limit;
  };
  return decayed(32, 15) && decayed(48, 31);
}

template <typename E>
void GroupStep<E>::SolveHead(int h) {
  TaskScratch<E>& s = *scratch_;
  HeadScratch<E>& head = s.heads[h];
  const int blocks = (num_events_ + kBlock - 1) / kBlock;
  call_.vector->system(
      {s.kk, {head.event_hi, head.event_lo}, head.event_beta, s.key_norm, num_events_, s.system});
  call_.vector->invert_blocks(s.system, blocks, s.inverse);
  const bool adjacent = DropsFarBlocks(h);
  const int depth = kIsFloat(E()) ? dims_.dim_k : dims_.depth;
  for (int n = task_.panel_begin; n < task_.panel_end; ++n) {
    const int64_t at = int64_t{n} * kRows * kPanel;
    float* u = head.updates + at;
    product_.multiply(s.key_rows, dims_.depth, num_events_, depth,
                      head.state_packed + n * dims_.state_panel, u);
    call_.vector->rhs({Row(args_.v, 0, value_head(h), n * kPanel), args_.v.dtype,
                       args_.v.token_stride, events_, num_events_,
                       std::min(kPanel, dims_.dim_v - n * kPanel), head.event_beta,
                       head.event_decay, u});
    call_.vector->solve(s.system, s.inverse, blocks, adjacent, u);
    product_.pack_updates(u, head.event_tail, blocks * kBlock, head.scaled + at,
                          kIsFloat(E()) ? nullptr : head.scaled_low + at);
  }
}

template <typename E>
typename GroupStep<E>::QueryRows GroupStep<E>::LoadQueries(int64_t row, int rows) {
  const ConstTensorRef& q = args_.q;
  const void* base = Row(q, row, task_.pair);
  const bool same_type = kIsFloat(E()) == (q.dtype == DType::kF32);
  const bool whole_pairs = kIsFloat(E()) || dims_.depth == dims_.dim_k;
  if (same_type && whole_pairs) return {static_cast<const E*>(base), q.token_stride};
  E* out = scratch_->query_rows;
  for (int r = 0; r < rows; ++r) {
    E* to = out + r * dims_.depth;
    if constexpr (kIsFloat(E())) {
      const int32_t index = r;
      call_.vector->load_rows(base, q.dtype, q.token_stride, &index, 1, dims_.dim_k, to,
                              dims_.depth);
    } else {
      to[dims_.depth - 1] = 0;
      std::memcpy(to, static_cast<const E*>(base) + r * q.token_stride, sizeof(E) * dims_.dim_k);
    }
  }
  return {out, dims_.depth};
}

// What the heads of a pair share for a tile: visible events, q's factor, q . k of skipped tokens.
template <typename E>
void GroupStep<E>::PrepareRows(int64_t row, int rows) {
  TaskScratch<E>& s = *scratch_;
  const VectorKernels& vec = *call_.vector;
  for (int r = 0; r < rows; ++r) {
    while (next_event_ < num_events_ && events_[next_event_] <= row + r) ++next_event_;
    s.row_events[r] = next_event_;
    s.query_factor[r] = scale_;
  }
  const void* q = Row(args_.q, row, task_.pair);
  const void* k = Row(args_.k, row, task_.pair);
  if (args_.normalize_qk) {
    vec.row_dots(q, args_.q.token_stride, q, args_.q.token_stride, args_.q.dtype, rows, dims_.dim_k,
                 s.dots);
    for (int r = 0; r < rows; ++r) s.query_factor[r] *= 1.0f / std::sqrt(s.dots[r] + kNormEps);
  }
  if (!self_term_) return;
  vec.row_dots(q, args_.q.token_stride, k, args_.k.token_stride, args_.q.dtype, rows, dims_.dim_k,
               s.self_product);
  for (int r = 0; r < rows; ++r) s.self_product[r] *= s.query_factor[r];
  if (!args_.normalize_qk) return;
  vec.row_dots(k, args_.k.token_stride, k, args_.k.token_stride, args_.k.dtype, rows, dims_.dim_k,
               s.dots);
  for (int r = 0; r < rows; ++r) s.self_product[r] *= 1.0f / std::sqrt(s.dots[r] + kNormEps);
}

template <typename E>
void GroupStep<E>::OutputTile(int64_t row, int rows) {
  TaskScratch<E>& s = *scratch_;
  PrepareRows(row, rows);
  const QueryRows q = LoadQueries(row, rows);
  const int depth = kIsFloat(E()) ? dims_.dim_k : dims_.depth;
  for (int panel = 0; panel * kPanel < s.row_events[rows - 1]; ++panel) {
    // Rows before the first that sees an event of this panel are skipped, by whole tiles of 8,
    // because the products read probabilities a tile at a time.
    int first = 0;
    while (s.row_events[first] <= panel * kPanel) ++first;
    first = first / 8 * 8;
    product_.multiply(q.data + first * q.ld, q.ld, rows - first, depth,
                      s.key_panels + panel * dims_.key_panel,
                      s.qk + (panel * kRows + first) * kPanel);
  }
  for (int h = task_.head_begin; h < task_.head_end; ++h) OutputHead(h, row, rows, q);
}

template <typename E>
void GroupStep<E>::OutputHead(int h, int64_t row, int rows, const QueryRows& q) {
  TaskScratch<E>& s = *scratch_;
  HeadScratch<E>& head = s.heads[h];
  const int64_t at = row - group_begin_;
  call_.vector->probs({s.qk,
                       {head.hi + at, head.lo + at},
                       {head.event_hi, head.event_lo},
                       s.query_factor,
                       s.key_norm,
                       s.row_events,
                       rows,
                       s.probs});
  std::copy(head.hi + at, head.hi + at + rows, s.row_factor);
  call_.vector->exp_inplace(s.row_factor, rows);
  for (int r = 0; r < rows; ++r) s.row_factor[r] *= s.query_factor[r];
  if (self_term_) {
    const ConstTensorRef& beta = args_.beta;
    for (int r = 0; r < rows; ++r) {
      const bool event = mask_[(row + r) * args_.shape.num_k_heads + task_.pair] != 0;
      const int64_t index = (row + r) * beta.token_stride + value_head(h) * beta.head_stride;
      s.self[r] = event ? 0.0f : s.self_product[r] * LoadElement(beta.data, beta.dtype, index);
    }
  }
  const int depth = kIsFloat(E()) ? dims_.dim_k : dims_.depth;
  for (int n = task_.panel_begin; n < task_.panel_end; ++n) {
    product_.output({q.data, q.ld, rows, depth, head.state_packed + n * dims_.state_panel,
                     s.row_factor, s.probs, s.row_events,
                     head.updates + int64_t{n} * kRows * kPanel, s.c});
    const int64_t o_at =
        row * args_.o.token_stride + value_head(h) * args_.o.head_stride + int64_t{n} * kPanel;
    call_.vector->store(
        {s.c, rows, std::min(kPanel, dims_.dim_v - n * kPanel), self_term_ ? s.self : nullptr,
         Row(args_.v, row, value_head(h), n * kPanel), args_.v.dtype, args_.v.token_stride,
         static_cast<char*>(args_.o.data) + o_at * DTypeBytes(args_.o.dtype), args_.o.dtype,
         args_.o.token_stride});
  }
}

template <typename E>
bool GroupStep<E>::AllUpdatesZero(const HeadScratch<E>& head) const {
  for (int i = 0; i < num_events_; ++i) {
    if (head.event_beta[i] != 0.0f) return false;
  }
  for (int n = task_.panel_begin; n < task_.panel_end; ++n) {
    const float* u = head.updates + int64_t{n} * kRows * kPanel;
    for (int i = 0; i < num_events_ * kPanel; ++i) {
      if (u[i] != 0.0f) return false;
    }
  }
  return true;
}

template <typename E>
void GroupStep<E>::UpdateHead(int h, int64_t end) {
  TaskScratch<E>& s = *scratch_;
  HeadScratch<E>& head = s.heads[h];
  const double* sum = head.gate_sum + (end - 1 - segment_begin_);
  const double base =
      group_begin_ == segment_begin_ ? 0.0 : head.gate_sum[group_begin_ - 1 - segment_begin_];
  const float decay = std::exp(static_cast<float>(*sum - base));
  // Adding zeros would turn -0 into +0: writes of beta 0 must leave the state's bits alone.
  const int events = AllUpdatesZero(head) ? 0 : RoundUp(num_events_, kIsFloat(E()) ? 1 : 2);
  for (int n = task_.panel_begin; n < task_.panel_end; ++n) {
    const int64_t at = int64_t{n} * kRows * kPanel;
    product_.update({s.keys_t, dims_.dim_k, events, head.scaled + at,
                     kIsFloat(E()) ? nullptr : head.scaled_low + at, decay,
                     head.state + n * dims_.state_panel,
                     head.state_packed + n * dims_.state_panel});
  }
}

template <typename E>
void GroupStep<E>::Run(int64_t first, int64_t last, int64_t begin, int64_t end) {
  group_begin_ = begin;
  events_ = scratch_->events + first;
  num_events_ = static_cast<int>(last - first);
  next_event_ = 0;
  GatherKeys();
  for (int h = task_.head_begin; h < task_.head_end; ++h) {
    SetGroupGates(h, begin, end);
    if (num_events_ > 0) SolveHead(h);
  }
  for (int64_t row = begin; row < end; row += kRows) {
    OutputTile(row, static_cast<int>(std::min<int64_t>(kRows, end - row)));
  }
  for (int h = task_.head_begin; h < task_.head_end; ++h) UpdateHead(h, end);
}

template class GroupStep<float>;
template class GroupStep<uint16_t>;

}  // namespace sparsegdn::cpu
