// Every error of gdn.h: code, and a message that names field, got and wanted.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "sparsegdn/gdn.h"
#include "tests/unit/kernels/test_pack.h"

namespace sparsegdn::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct BudgetRow {
  const char* name;
  std::function<void(Budget*)> modify;
  const char* message;  // part of it; empty: valid
};

std::vector<BudgetRow> BudgetRows() {
  const auto coverage = [](double tau) {
    return [tau](Budget* b) {
      b->mode = BudgetMode::kCoverage;
      b->coverage = tau;
    };
  };
  const auto retention = [](double rho, double min = -1, double max = -1) {
    return [=](Budget* b) {
      b->retention = rho;
      b->min_retention = min;
      b->max_retention = max;
    };
  };
  return {
      {"default", [](Budget*) {}, ""},
      {"dense_ignores_shares",
       [](Budget* b) {
         b->mode = BudgetMode::kDense;
         b->retention = kNan;
       },
       ""},
      {"retention_0", retention(0.0), "budget.retention = 0, must be in (0, 1]"},
      {"retention_1_5", retention(1.5), "budget.retention = 1.5, must be in (0, 1]"},
      {"retention_negative", retention(-0.1), "budget.retention = -0.1"},
      {"retention_nan", retention(kNan), "budget.retention = nan"},
      {"retention_1", retention(1.0), ""},
      {"coverage_0", coverage(0.0), "budget.coverage = 0, must be in (0, 1]"},
      {"coverage_1_5", coverage(1.5), "budget.coverage = 1.5"},
      {"coverage_nan", coverage(kNan), "budget.coverage = nan"},
      {"coverage_1", coverage(1.0), ""},
      {"below_min", retention(0.2, 0.3), "budget.retention = 0.2, must be in [0.3, 0.4]"},
      {"above_max", retention(0.5, -1, 0.4), "budget.retention = 0.5, must be in [0.125, 0.4]"},
      {"crossed", retention(0.5, 0.6, 0.4), "budget.max_retention = 0.4, must be >="},
      {"min_above_1", retention(0.5, 1.1), "budget.min_retention = 1.1"},
      {"max_above_1", retention(0.5, -1, 1.1), "budget.max_retention = 1.1"},
      {"min_nan", retention(0.5, kNan), "budget.min_retention = nan"},
      {"max_nan", retention(0.5, -1, kNan), "budget.max_retention = nan"},
      {"mode", [](Budget* b) { b->mode = static_cast<BudgetMode>(3); },
       "budget.mode = 3, must be in [0, 2]"},
      {"selector", [](Budget* b) { b->selector = static_cast<Selector>(-1); },
       "budget.selector = -1"},
      {"solver", [](Budget* b) { b->solver = static_cast<Solver>(9); }, "budget.solver = 9"},
      {"local", [](Budget* b) { b->local = static_cast<LocalTerm>(2); }, "budget.local = 2"},
      {"keep_first", [](Budget* b) { b->keep_first = -1; }, "budget.keep_first = -1"},
      {"keep_last", [](Budget* b) { b->keep_last = -5; }, "budget.keep_last = -5"},
  };
}

TEST(ValidateBudget, Table) {
  for (const BudgetRow& row : BudgetRows()) {
    Budget b;
    row.modify(&b);
    const absl::Status s = ValidateBudget(b);
    if (*row.message == '\0') {
      EXPECT_TRUE(s.ok()) << row.name << ": " << s.message();
      continue;
    }
    EXPECT_EQ(s.code(), absl::StatusCode::kInvalidArgument) << row.name;
    EXPECT_NE(s.ToString().find(row.message), std::string::npos) << row.name << ": " << s;
  }
}

TEST(ValidateBudget, ResolvedBounds) {
  EXPECT_DOUBLE_EQ(ResolveBounds(RetentionBudget(0.28)).min_retention, 0.07);
  EXPECT_DOUBLE_EQ(ResolveBounds(RetentionBudget(0.28)).max_retention, 0.56);
  EXPECT_DOUBLE_EQ(ResolveBounds(RetentionBudget(0.8)).max_retention, 1.0);
  Budget b;
  b.mode = BudgetMode::kCoverage;
  EXPECT_DOUBLE_EQ(ResolveBounds(b).min_retention, 0.02);
  EXPECT_DOUBLE_EQ(ResolveBounds(b).max_retention, 0.5);
}

// A small valid call on host memory, to be broken one field at a time.
struct HostCall {
  std::vector<float> x = std::vector<float>(4096, 0.5f);
  std::vector<float> out = std::vector<float>(4096);
  std::vector<int32_t> cu{0, 3, 5};
  std::vector<SequenceParams> sequences{2};
  std::vector<char> memory = std::vector<char>(4 << 20);
  uint32_t status = 77;
  GdnForwardArgs args;

  HostCall() {
    sequences[0].prompt_tokens = 3;
    sequences[1].prompt_tokens = 2;
    args.shape = {2, 4, 8, 8};
    args.num_tokens = 6;
    args.num_seqs = 2;
    args.cu_seqlens = cu.data();
    args.sequences = sequences.data();
    args.q = args.k = {x.data(), DType::kF32, 16, 8};
    args.v = {x.data(), DType::kF32, 32, 8};
    args.log_gate = args.beta = {x.data(), DType::kF32, 4, 1};
    args.o = {out.data(), DType::kF32, 32, 8};
    args.status = &status;
    const auto base = reinterpret_cast<uintptr_t>(memory.data());
    args.workspace = reinterpret_cast<void*>((base + 255) / 256 * 256);
    args.workspace_bytes = memory.size() - 256;
  }
};

struct CallRow {
  const char* name;
  std::function<void(HostCall*)> modify;
  const char* message;
  uint32_t status_bit = 77;  // what *status must hold: untouched for faults outside device data
};

std::vector<CallRow> ShapeRows() {
  return {
      {"num_k_heads", [](HostCall* c) { c->args.shape.num_k_heads = 0; }, "shape.num_k_heads = 0"},
      {"ratio_5", [](HostCall* c) { c->args.shape.num_v_heads = 10; },
       "shape.num_v_heads = 10, must be 1, 2, 3 or 4 times num_k_heads = 2"},
      {"ratio_fraction", [](HostCall* c) { c->args.shape.num_v_heads = 3; },
       "shape.num_v_heads = 3"},
      {"head_dim_k", [](HostCall* c) { c->args.shape.head_dim_k = 257; },
       "shape.head_dim_k = 257, must be in [1, 256]"},
      {"head_dim_v", [](HostCall* c) { c->args.shape.head_dim_v = 0; }, "shape.head_dim_v = 0"},
      {"num_tokens", [](HostCall* c) { c->args.num_tokens = (1 << 21) + 1; },
       "num_tokens = 2097153"},
      {"num_seqs", [](HostCall* c) { c->args.num_seqs = -1; }, "num_seqs = -1"},
      {"no_cu", [](HostCall* c) { c->args.cu_seqlens = nullptr; }, "cu_seqlens = null"},
      {"no_sequences", [](HostCall* c) { c->args.sequences = nullptr; }, "sequences = null"},
      {"no_q", [](HostCall* c) { c->args.q.data = nullptr; }, "q = null"},
      {"no_o", [](HostCall* c) { c->args.o.data = nullptr; }, "o = null"},
      {"q_dtype", [](HostCall* c) { c->args.q.dtype = static_cast<DType>(7); }, "q.dtype = 7"},
      {"mixed_dtypes", [](HostCall* c) { c->args.k.dtype = DType::kBF16; },
       "q, k, v dtypes = 0, 1, 0, must be equal"},
      {"gate_f16", [](HostCall* c) { c->args.log_gate.dtype = DType::kF16; },
       "log_gate = F16, must be F32 or BF16"},
      {"head_stride", [](HostCall* c) { c->args.v.head_stride = 7; }, "v.head_stride = 7"},
      {"token_stride", [](HostCall* c) { c->args.o.token_stride = 31; }, "o.token_stride = 31"},
      {"scale_nan", [](HostCall* c) { c->args.scale = NAN; }, "scale = nan"},
      {"scale_negative", [](HostCall* c) { c->args.scale = -1.0f; }, "scale = -1"},
      {"pool_without_data", [](HostCall* c) { c->args.final_state.slots = 2; },
       "final_state = null with slots > 0"},
      {"snapshots_without_data", [](HostCall* c) { c->args.snapshot_slots = 2; },
       "snapshots = null with snapshot_slots > 0"},
      {"layout", [](HostCall* c) { c->args.initial_state.layout = static_cast<StateLayout>(2); },
       "initial_state.layout = 2"},
  };
}

std::vector<CallRow> SequenceRows() {
  const uint32_t cu = kStatusBadCuSeqlens, seq = kStatusBadSequence;
  return {
      {"cu_from_0", [](HostCall* c) { c->cu[0] = 1; }, "cu_seqlens[0] = 1, must be 0", cu},
      {"cu_decreasing", [](HostCall* c) { c->cu[2] = 2; },
       "cu_seqlens[2] = 2, must be >= cu_seqlens[1] = 3", cu},
      {"cu_beyond_rows", [](HostCall* c) { c->cu[2] = 7; },
       "cu_seqlens[2] = 7, must be <= num_tokens = 6", cu},
      {"first_position", [](HostCall* c) { c->sequences[1].first_position = -1; },
       "sequences[1].first_position = -1", seq},
      {"prompt_tokens", [](HostCall* c) { c->sequences[0].prompt_tokens = 2; },
       "sequences[0].prompt_tokens = 2, must be >= first_position + length = 3", seq},
      {"budget", [](HostCall* c) { c->sequences[1].budget.retention = 0; },
       "sequences[1].budget.retention = 0", seq},
      {"snapshot_not_window", [](HostCall* c) { c->sequences[0].snapshot_every = 64; },
       "sequences[0].snapshot_every = 64, must be 0 or a multiple of 2048", seq},
      {"snapshot_not_group",
       [](HostCall* c) {
         c->sequences[0].budget = DenseBudget();
         c->sequences[0].snapshot_every = 32;
       },
       "sequences[0].snapshot_every = 32, must be 0 or a multiple of 64", seq},
      {"snapshot_slots",
       [](HostCall* c) {
         c->sequences[0].first_position = 2046;
         c->sequences[0].prompt_tokens = 3000;
         c->sequences[0].snapshot_every = 2048;
       },
       "sequences[0].snapshot_index = 0", seq},
      {"initial_slot", [](HostCall* c) { c->sequences[1].initial_slot = 0; },
       "sequences[1].initial_slot = 0, must be below the pool's slots = 0", seq},
      {"final_slot", [](HostCall* c) { c->sequences[1].final_slot = 4; },
       "sequences[1].final_slot = 4", seq},
      {"shared_final_slot",
       [](HostCall* c) {
         c->args.final_state = {c->out.data() + 1024, 2, StateLayout::kKeyMajor};
         c->sequences[0].final_slot = c->sequences[1].final_slot = 1;
       },
       "sequences[1].final_slot = 1, must be unlike that of sequences[0]", seq},
      {"reads_what_another_writes",
       [](HostCall* c) {
         c->args.final_state = {c->out.data() + 1024, 2, StateLayout::kKeyMajor};
         c->args.initial_state = c->args.final_state;
         c->sequences[0].final_slot = 1;
         c->sequences[1].initial_slot = 1;
       },
       "sequences[1].initial_slot = 1, must be no slot that sequences[0] writes", seq},
  };
}

// Rows of one tensor that overlap, in either order of its dimensions, or that no int64 can index.
// The call's v and o are [6 tokens, 4 heads, 8].
std::vector<CallRow> StrideRows() {
  const auto o = [](int64_t token_stride, int64_t head_stride) {
    return [=](HostCall* c) {
      c->args.o.token_stride = token_stride;
      c->args.o.head_stride = head_stride;
    };
  };
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  return {
      {"token_major_rows", o(31, 8), "o.token_stride = 31, must be >= 32"},
      {"token_major_negative", o(-32, 8), "o.token_stride = -32"},
      {"head_major_tokens", o(7, 48), "o.token_stride = 7, must be >= 8"},
      {"head_major_heads", o(8, 47), "o.head_stride = 47, must be >= 48"},
      {"head_major_heads_by_far", o(8, 9), "o.head_stride = 9, must be >= 48"},
      {"head_major_padded_tokens", o(10, 57), "o.head_stride = 57, must be >= 58"},
      {"huge_token_stride", o(kHuge, 8), "o.token_stride = 9223372036854775807"},
      {"huge_head_stride", o(8, kHuge), "o.head_stride = 9223372036854775807"},
      // (heads - 1) * 2^62 + 8 wraps to a negative number below any token stride.
      {"wrapping_head_stride", o(kHuge, int64_t{1} << 62), "o.token_stride = 9223372036854775807"},
      // (tokens - 1) * 2^62 + 8 likewise.
      {"wrapping_token_stride", o(int64_t{1} << 62, kHuge), "o.head_stride = 9223372036854775807"},
      {"wrapping_bytes", o(int64_t{1} << 59, 8), "o.token_stride = 576460752303423488"},
  };
}

void ExpectErrors(const std::vector<CallRow>& rows) {
  auto backend = CreateCpuBackend({.num_threads = 1});
  ASSERT_TRUE(backend.ok());
  for (const CallRow& row : rows) {
    HostCall call;
    row.modify(&call);
    const absl::Status s = (*backend)->Forward(call.args, nullptr);
    EXPECT_EQ(s.code(), absl::StatusCode::kInvalidArgument) << row.name;
    EXPECT_NE(s.ToString().find(row.message), std::string::npos) << row.name << ": " << s;
    EXPECT_EQ(call.status, row.status_bit) << row.name;
  }
}

TEST(ValidateCall, TheUnbrokenCallIsValid) {
  auto backend = CreateCpuBackend({.num_threads = 1});
  ASSERT_TRUE(backend.ok());
  HostCall call;
  const absl::Status s = (*backend)->Forward(call.args, nullptr);
  EXPECT_TRUE(s.ok()) << s;
  EXPECT_EQ(call.status, 0u);
}

// The tightest [heads, tokens, dim] order gives what the tightest [tokens, heads, dim] order gives.
TEST(ValidateCall, HeadMajorOutputIsValid) {
  auto backend = CreateCpuBackend({.num_threads = 1});
  ASSERT_TRUE(backend.ok());
  HostCall token_major, head_major;
  head_major.args.o.token_stride = 8;
  head_major.args.o.head_stride = 48;
  ASSERT_TRUE((*backend)->Forward(token_major.args, nullptr).ok());
  const absl::Status s = (*backend)->Forward(head_major.args, nullptr);
  ASSERT_TRUE(s.ok()) << s;
  for (int t = 0; t < 5; ++t) {
    for (int i = 0; i < 32; ++i) {
      EXPECT_EQ(head_major.out[i / 8 * 48 + t * 8 + i % 8], token_major.out[t * 32 + i]) << t << i;
    }
  }
}

TEST(ValidateCall, WhatTheHostSees) { ExpectErrors(ShapeRows()); }
TEST(ValidateCall, Strides) { ExpectErrors(StrideRows()); }
TEST(ValidateCall, WhatSequencesSay) { ExpectErrors(SequenceRows()); }

TEST(ValidateCall, SelectNeedsVForWriteNormAndTakesNoMask) {
  auto backend = CreateCpuBackend({.num_threads = 1});
  ASSERT_TRUE(backend.ok());
  HostCall call;
  call.args.v.data = nullptr;
  EXPECT_TRUE((*backend)->Select(call.args, nullptr).ok());
  call.sequences[0].budget.selector = Selector::kWriteNorm;
  EXPECT_EQ((*backend)->Select(call.args, nullptr).code(), absl::StatusCode::kInvalidArgument);
  const uint8_t mask[12] = {};
  HostCall masked;
  masked.args.mask = mask;
  EXPECT_EQ((*backend)->Select(masked.args, nullptr).code(), absl::StatusCode::kInvalidArgument);
}

// A pool's slots are what the caller says: a check must not take memory by them.
TEST(ValidateCall, AClaimOfManySlotsCostsNothing) {
  auto backend = CreateCpuBackend({.num_threads = 1});
  ASSERT_TRUE(backend.ok());
  HostCall call;
  std::vector<float> state(2 * 4 * 8 * 8);
  call.args.final_state = {state.data(), std::numeric_limits<int32_t>::max(),
                           StateLayout::kKeyMajor};
  call.sequences[0].final_slot = 1;
  call.sequences[1].final_slot = 0;
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  EXPECT_TRUE((*backend)->Forward(call.args, nullptr).ok());
  getrusage(RUSAGE_SELF, &after);
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 64 << 10);  // KiB; one word a slot would be 8 GiB
}

TEST(ValidateCall, WorkspaceTooSmall) {
  auto backend = CreateCpuBackend({.num_threads = 1});
  ASSERT_TRUE(backend.ok());
  HostCall call;
  const size_t need = *(*backend)->WorkspaceBytes({call.args.shape, 6, 2, 1.0, DType::kF32});
  call.args.workspace_bytes = need;
  EXPECT_TRUE((*backend)->Forward(call.args, nullptr).ok());
  call.args.workspace_bytes = need - 1;
  EXPECT_EQ((*backend)->Forward(call.args, nullptr).code(), absl::StatusCode::kResourceExhausted);
  call.args.workspace_bytes = need;
  call.args.workspace = static_cast<char*>(call.args.workspace) + 8;
  EXPECT_EQ((*backend)->Forward(call.args, nullptr).code(), absl::StatusCode::kInvalidArgument);
  call.args.workspace = nullptr;
  const absl::Status none = (*backend)->Forward(call.args, nullptr);
  EXPECT_EQ(none.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(none.message().find("workspace = null"), std::string::npos) << none;
}

TEST(ValidateCall, Limits) {
  auto backend = CreateCpuBackend({.num_threads = 1});
  ASSERT_TRUE(backend.ok());
  const GdnLimits good{{2, 4, 8, 8}, 100, 4, 1.0, DType::kF32};
  EXPECT_TRUE((*backend)->WorkspaceBytes(good).ok());
  for (int broken = 0; broken < 4; ++broken) {
    GdnLimits l = good;
    if (broken == 0) l.shape.head_dim_v = 300;
    if (broken == 1) l.max_tokens = -1;
    if (broken == 2) l.max_seqs = 65537;
    if (broken == 3) l.max_retention = 0.0;
    EXPECT_EQ((*backend)->WorkspaceBytes(l).status().code(), absl::StatusCode::kInvalidArgument)
        << broken;
  }
}

// Intermediates stay below a quarter of the inputs' bytes beyond 16K tokens, whatever the threads.
TEST(ValidateCall, WorkspaceIsASmallShareOfTheInputs) {
  const GdnShape shape{16, 32, 128, 128};
  for (int threads : {1, 2, 64}) {
    auto backend = CreateCpuBackend({.num_threads = threads});
    ASSERT_TRUE(backend.ok());
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      const int64_t row = (2 * 16 * 128 + 32 * 128) * (dtype == DType::kF32 ? 4 : 2) + 2 * 32 * 4;
      for (const int64_t tokens : {16384, 131072}) {
        const auto bytes = (*backend)->WorkspaceBytes({shape, tokens, 1, 1.0, dtype});
        ASSERT_TRUE(bytes.ok());
        EXPECT_LE(static_cast<double>(*bytes), 0.25 * static_cast<double>(tokens * row))
            << threads << " threads, " << tokens << " tokens";
      }
    }
  }
}

TEST(CreateBackend, Errors) {
  EXPECT_EQ(CreateCpuBackend({.num_threads = -1}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CreateCpuBackend({.num_threads = 100000}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_STREQ((*CreateCpuBackend({}))->name(), "cpu");
}

}  // namespace
}  // namespace sparsegdn::test
