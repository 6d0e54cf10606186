#include "kernels/common/validate.h"

#include <cmath>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/common/selection_math.h"

namespace sparsegdn {
namespace {

template <typename Got>
absl::Status Bad(const char* field, Got got, const char* wanted) {
  return absl::InvalidArgumentError(absl::StrCat(field, " = ", got, ", must be ", wanted));
}

absl::Status CheckRange(const char* field, int64_t got, int64_t low, int64_t high) {
  if (got >= low && got <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " = ", got, ", must be in [", low, ", ", high, "]"));
}

template <typename Enum>
absl::Status CheckEnum(const char* field, Enum got, Enum last) {
  return CheckRange(field, static_cast<int64_t>(got), 0, static_cast<int64_t>(last));
}

// A share in (0, 1]; NaN fails every comparison.
absl::Status CheckShare(const char* field, double got) {
  if (got > 0.0 && got <= 1.0) return absl::OkStatus();
  return Bad(field, got, "in (0, 1]");
}

absl::Status CheckBounds(const Budget& budget) {
  if (!(budget.min_retention <= 1.0)) {
    return Bad("budget.min_retention", budget.min_retention, "in [0, 1], or < 0 for the default");
  }
  if (!(budget.max_retention <= 1.0)) {
    return Bad("budget.max_retention", budget.max_retention, "in [0, 1], or < 0 for the default");
  }
  const RetentionBounds bounds = ResolveBounds(budget);
  if (bounds.max_retention < bounds.min_retention) {
    return absl::InvalidArgumentError(
        absl::StrCat("budget.max_retention = ", bounds.max_retention,
                     ", must be >= budget.min_retention = ", bounds.min_retention));
  }
  if (budget.mode == BudgetMode::kRetention &&
      (budget.retention < bounds.min_retention || budget.retention > bounds.max_retention)) {
    return absl::InvalidArgumentError(absl::StrCat("budget.retention = ", budget.retention,
                                                   ", must be in [", bounds.min_retention, ", ",
                                                   bounds.max_retention, "]"));
  }
  return absl::OkStatus();
}

struct TensorRule {
  const char* name;
  const void* data;
  DType dtype;
  int64_t token_stride;
  int64_t head_stride;
  int64_t heads;
  int64_t dim;
};

template <typename Ref>
TensorRule Rule(const char* name, const Ref& ref, int64_t heads, int64_t dim) {
  return {name, ref.data, ref.dtype, ref.token_stride, ref.head_stride, heads, dim};
}

// Tensors end below this many elements, so that byte offsets fit int64_t.
constexpr int64_t kMaxExtent = std::numeric_limits<int64_t>::max() / 8;

// Elements from the first of `count` >= 1 blocks to the end of the last; kMaxExtent if that is
// more.
int64_t Extent(int64_t count, int64_t stride, int64_t block) {
  if (stride > (kMaxExtent - block) / count) return kMaxExtent;
  return (count - 1) * stride + block;
}

absl::Status CheckStride(const TensorRule& t, const char* field, int64_t got, int64_t least) {
  if (got >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(t.name, ".", field, " = ", got, ", must be >= ", least));
}

// Strides must not make rows of one tensor overlap: that would be a race for an output and is a
// mistake for an input. The smaller stride is the inner one: [tokens, heads, dim] or
// [heads, tokens, dim]. A stride over a single token or head is never used.
absl::Status CheckStrides(const TensorRule& t, int64_t num_tokens) {
  const bool both = t.heads > 1 && num_tokens > 1;
  const bool head_major = both && t.token_stride < t.head_stride;
  int64_t extent = t.dim;
  if (t.heads > 1 && !head_major) {
    if (auto s = CheckStride(t, "head_stride", t.head_stride, extent); !s.ok()) return s;
    extent = Extent(t.heads, t.head_stride, extent);
  }
  if (num_tokens > 1) {
    if (auto s = CheckStride(t, "token_stride", t.token_stride, extent); !s.ok()) return s;
    extent = Extent(num_tokens, t.token_stride, extent);
  }
  if (head_major) {
    if (auto s = CheckStride(t, "head_stride", t.head_stride, extent); !s.ok()) return s;
    extent = Extent(t.heads, t.head_stride, extent);
  }
  if (extent < kMaxExtent) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(t.name, ".token_stride = ", t.token_stride, ", ",
                                                 t.name, ".head_stride = ", t.head_stride,
                                                 ", must end below element ", kMaxExtent));
}

absl::Status CheckTensor(const TensorRule& t, int64_t num_tokens) {
  if (auto s = CheckEnum(absl::StrCat(t.name, ".dtype").c_str(), t.dtype, DType::kF16); !s.ok()) {
    return s;
  }
  if (num_tokens == 0) return absl::OkStatus();
  if (t.data == nullptr) return Bad(t.name, "null", "a pointer");
  return CheckStrides(t, num_tokens);
}

absl::Status CheckGateLike(const TensorRule& t, int64_t num_tokens) {
  if (auto s = CheckTensor(t, num_tokens); !s.ok()) return s;
  if (t.dtype == DType::kF16) return Bad(t.name, "F16", "F32 or BF16");
  return absl::OkStatus();
}

absl::Status CheckInputs(const GdnForwardArgs& args, EntryPoint entry) {
  const GdnShape& s = args.shape;
  const auto beta = Rule("beta", args.beta, s.num_v_heads, 1);
  const auto v = Rule("v", args.v, s.num_v_heads, s.head_dim_v);
  if (auto r = CheckGateLike(beta, args.num_tokens); !r.ok()) return r;
  if (entry == EntryPoint::kSelect) {
    return args.v.data == nullptr ? absl::OkStatus() : CheckTensor(v, args.num_tokens);
  }
  const TensorRule rules[] = {Rule("q", args.q, s.num_k_heads, s.head_dim_k),
                              Rule("k", args.k, s.num_k_heads, s.head_dim_k), v,
                              Rule("o", args.o, s.num_v_heads, s.head_dim_v)};
  for (const TensorRule& rule : rules) {
    if (auto r = CheckTensor(rule, args.num_tokens); !r.ok()) return r;
  }
  if (args.q.dtype != args.k.dtype || args.k.dtype != args.v.dtype) {
    return absl::InvalidArgumentError(absl::StrCat(
        "q, k, v dtypes = ", static_cast<int>(args.q.dtype), ", ", static_cast<int>(args.k.dtype),
        ", ", static_cast<int>(args.v.dtype), ", must be equal"));
  }
  return CheckGateLike(Rule("log_gate", args.log_gate, s.num_v_heads, 1), args.num_tokens);
}

absl::Status CheckPool(const char* name, const StatePool& pool) {
  if (auto s =
          CheckEnum(absl::StrCat(name, ".layout").c_str(), pool.layout, StateLayout::kValueMajor);
      !s.ok()) {
    return s;
  }
  if (pool.slots < 0) return Bad(absl::StrCat(name, ".slots").c_str(), pool.slots, ">= 0");
  if (pool.slots > 0 && pool.data == nullptr) return Bad(name, "null with slots > 0", "a pointer");
  return absl::OkStatus();
}

}  // namespace

RetentionBounds ResolveBounds(const Budget& budget) {
  const selection::Bounds bounds = selection::ResolveBudgetBounds(budget);
  return {bounds.min_retention, bounds.max_retention};
}

absl::Status ValidateBudget(const Budget& budget) {
  absl::Status s = CheckEnum("budget.mode", budget.mode, BudgetMode::kCoverage);
  s.Update(CheckEnum("budget.selector", budget.selector, Selector::kWriteNorm));
  s.Update(CheckEnum("budget.solver", budget.solver, Solver::kBlockAdjacent));
  s.Update(CheckEnum("budget.local", budget.local, LocalTerm::kNone));
  if (!s.ok() || budget.mode == BudgetMode::kDense) return s;
  s.Update(CheckRange("budget.keep_first", budget.keep_first, 0, kMaxPosition));
  s.Update(CheckRange("budget.keep_last", budget.keep_last, 0, kMaxPosition));
  if (budget.mode == BudgetMode::kRetention) {
    s.Update(CheckShare("budget.retention", budget.retention));
  } else {
    s.Update(CheckShare("budget.coverage", budget.coverage));
  }
  if (!s.ok()) return s;
  return CheckBounds(budget);
}

absl::Status ValidateShape(const GdnShape& shape) {
  absl::Status s = CheckRange("shape.num_k_heads", shape.num_k_heads, 1, 4096);
  s.Update(CheckRange("shape.head_dim_k", shape.head_dim_k, 1, kMaxHeadDim));
  s.Update(CheckRange("shape.head_dim_v", shape.head_dim_v, 1, kMaxHeadDim));
  if (!s.ok()) return s;
  if (shape.num_v_heads < shape.num_k_heads || shape.num_v_heads % shape.num_k_heads != 0 ||
      shape.num_v_heads / shape.num_k_heads > 4) {
    return absl::InvalidArgumentError(
        absl::StrCat("shape.num_v_heads = ", shape.num_v_heads,
                     ", must be 1, 2, 3 or 4 times num_k_heads = ", shape.num_k_heads));
  }
  return absl::OkStatus();
}

absl::Status ValidateLimits(const GdnLimits& limits) {
  absl::Status s = ValidateShape(limits.shape);
  s.Update(CheckRange("limits.max_tokens", limits.max_tokens, 0, kMaxTokens));
  s.Update(CheckRange("limits.max_seqs", limits.max_seqs, 0, kMaxSeqs));
  s.Update(CheckEnum("limits.dtype", limits.dtype, DType::kF16));
  s.Update(CheckShare("limits.max_retention", limits.max_retention));
  return s;
}

absl::Status ValidateArgs(const GdnForwardArgs& args, EntryPoint entry) {
  absl::Status s = ValidateShape(args.shape);
  s.Update(CheckRange("num_tokens", args.num_tokens, 0, kMaxTokens));
  s.Update(CheckRange("num_seqs", args.num_seqs, 0, kMaxSeqs));
  if (!s.ok()) return s;
  if (args.num_seqs > 0 && args.cu_seqlens == nullptr) return Bad("cu_seqlens", "null", "given");
  if (args.num_seqs > 0 && args.sequences == nullptr) return Bad("sequences", "null", "given");
  s = CheckInputs(args, entry);
  if (!s.ok()) return s;
  if (entry == EntryPoint::kSelect) {
    return args.mask == nullptr ? s : Bad("mask", "given", "null in Select");
  }
  s.Update(CheckPool("initial_state", args.initial_state));
  s.Update(CheckPool("final_state", args.final_state));
  s.Update(CheckRange("snapshot_slots", args.snapshot_slots, 0, kMaxPosition));
  if (!s.ok()) return s;
  if (args.snapshot_slots > 0 && args.snapshots == nullptr) {
    return Bad("snapshots", "null with snapshot_slots > 0", "a pointer");
  }
  if (args.initial_state.data != nullptr && args.initial_state.data == args.final_state.data &&
      args.initial_state.layout != args.final_state.layout) {
    return absl::InvalidArgumentError(
        "final_state.layout differs from initial_state.layout, must be equal in one pool");
  }
  if (!(std::isfinite(args.scale) && args.scale >= 0.0f)) {
    return Bad("scale", args.scale, "finite and >= 0");
  }
  return absl::OkStatus();
}

}  // namespace sparsegdn
