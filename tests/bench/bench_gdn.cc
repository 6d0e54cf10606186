// sparsegdn-bench gdn: time and FLOP rate of the GDN core; on the CPU also the share of the same
// run's sgemm.
//
// FLOPs count the dense chunk form, 10.5 MFLOP per 64 tokens and value head at D 128, for every
// budget: the rate of a sparse row is that of the dense work it replaces.
#include "tests/bench/bench_gdn.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>

#include "kernels/common/float_convert.h"
#include "tests/bench/bench_command.h"
#if defined(SPARSEGDN_BENCH_CBLAS)
#include <cblas.h>
#endif

namespace sparsegdn::bench {
namespace {

using Clock = std::chrono::steady_clock;

double MillisSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// GFLOP/s of a square product, best of five; 0 without a BLAS in the build.
double SgemmGflops() {
#if defined(SPARSEGDN_BENCH_CBLAS)
  constexpr int n = 1536;
  const std::vector<float> a(n * n, 0.5f), b(n * n, 0.25f);
  std::vector<float> c(n * n);
  double best = 1e30;
  for (int i = 0; i < 5; ++i) {
    const auto start = Clock::now();
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0f, a.data(), n, b.data(), n,
                0.0f, c.data(), n);
    best = std::min(best, MillisSince(start));
  }
  return 2e-6 * n * n * n / best;
#else
  return 0.0;
#endif
}

void FillRows(std::vector<char>* out, DType dtype, int64_t rows, int dim, bool unit,
              std::mt19937* rng) {
  std::normal_distribution<float> normal;
  out->resize(rows * dim * DTypeBytes(dtype));
  std::vector<float> row(dim);
  for (int64_t r = 0; r < rows; ++r) {
    float sum = 0.0f;
    for (float& x : row) {
      x = normal(*rng);
      sum += x * x;
    }
    const float scale = unit ? 1.0f / std::sqrt(sum) : 1.0f;
    for (int i = 0; i < dim; ++i) StoreElement(out->data(), dtype, r * dim + i, scale * row[i]);
  }
}

void FillProblem(Problem* p) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  const GdnShape& s = p->shape;
  FillRows(&p->q, p->dtype, p->tokens * s.num_k_heads, s.head_dim_k, true, &rng);
  FillRows(&p->k, p->dtype, p->tokens * s.num_k_heads, s.head_dim_k, true, &rng);
  FillRows(&p->v, p->dtype, p->tokens * s.num_v_heads, s.head_dim_v, false, &rng);
  p->o.resize(p->v.size());
  p->state.resize(int64_t{s.num_v_heads} * s.head_dim_k * s.head_dim_v);
  p->mask.resize(p->tokens * s.num_k_heads);
  for (int64_t i = 0; i < p->tokens * s.num_v_heads; ++i) {
    p->log_gate.push_back(-std::log1p(std::exp(-normal(rng) - 3.0f)));
    p->beta.push_back(1.0f / (1.0f + std::exp(-normal(rng))));
  }
}

void SetArgs(Problem* p) {
  const GdnShape& s = p->shape;
  GdnForwardArgs& a = p->args;
  const int64_t key_row = int64_t{s.num_k_heads} * s.head_dim_k;
  const int64_t value_row = int64_t{s.num_v_heads} * s.head_dim_v;
  p->cu_seqlens = {0, static_cast<int32_t>(p->tokens)};
  p->sequence.prompt_tokens = p->tokens;
  p->sequence.final_slot = 0;
  a.shape = s;
  a.num_tokens = p->tokens;
  a.num_seqs = 1;
  a.cu_seqlens = p->cu_seqlens.data();
  a.sequences = &p->sequence;
  a.q = {p->q.data(), p->dtype, key_row, s.head_dim_k};
  a.k = {p->k.data(), p->dtype, key_row, s.head_dim_k};
  a.v = {p->v.data(), p->dtype, value_row, s.head_dim_v};
  a.log_gate = {p->log_gate.data(), DType::kF32, s.num_v_heads, 1};
  a.beta = {p->beta.data(), DType::kF32, s.num_v_heads, 1};
  a.o = {p->o.data(), p->dtype, value_row, s.head_dim_v};
  a.final_state = {p->state.data(), 1, StateLayout::kKeyMajor};
  a.mask_out = p->mask.data();
  a.timings = &p->timings;
}

absl::Status Measure(GdnBackend* backend, Problem* p, int repeats, std::vector<double>* times) {
  const auto bytes = backend->WorkspaceBytes({p->shape, p->tokens, 1, 1.0, p->dtype});
  if (!bytes.ok()) return bytes.status();
  p->workspace.resize(*bytes + 256);
  const auto base = reinterpret_cast<uintptr_t>(p->workspace.data());
  p->args.workspace = reinterpret_cast<void*>((base + 255) / 256 * 256);
  p->args.workspace_bytes = *bytes;
  for (int i = -1; i < repeats; ++i) {  // the first is a warm-up
    const auto start = Clock::now();
    if (auto s = backend->Forward(p->args, nullptr); !s.ok()) return s;
    if (i >= 0) times->push_back(MillisSince(start));
  }
  for (float x : p->state) {
    if (!std::isfinite(x)) return absl::InternalError("the state is not finite");
  }
  return absl::OkStatus();
}

int Fail(const std::string& message) {
  std::fprintf(stderr, "sparsegdn-bench gdn: %s\n", message.c_str());
  return 1;
}

// FLOPs of the dense chunk form.
double DenseFlops(const Problem& p) {
  const GdnShape& s = p.shape;
  return static_cast<double>(p.tokens) * s.num_v_heads *
         (6.0 * s.head_dim_k * s.head_dim_v + 128.0 * (s.head_dim_k + s.head_dim_v));
}

int RunOnCuda(const Problem& p, int device, int repeats, const std::string& json) {
  const absl::StatusOr<CudaTimes> times = TimeOnCuda(p, device, repeats);
  if (!times.ok()) return Fail(std::string(times.status().message()));
  const Summary eager = Summarize(times->eager_ms), graph = Summarize(times->graph_ms);
  const double tflops = 1e-9 * DenseFlops(p) / graph.median_ms;
  std::printf(
      "eager median %.3f ms, p90 %.3f ms; graph median %.3f ms, p90 %.3f ms; kept %.3f; "
      "%.0f TFLOP/s of dense work\n",
      eager.median_ms, eager.p90_ms, graph.median_ms, graph.p90_ms, times->kept, tflops);
  if (json.empty()) return 0;
  std::ofstream(json) << "{\"benchmark\": \"gdn\", \"backend\": \"cuda\", \"commit\": \""
                      << SPARSEGDN_COMMIT_TEXT << "\", \"tokens\": " << p.tokens
                      << ", \"num_k_heads\": " << p.shape.num_k_heads
                      << ", \"num_v_heads\": " << p.shape.num_v_heads
                      << ", \"retained\": " << times->kept
                      << ", \"eager_median_ms\": " << eager.median_ms
                      << ", \"graph_median_ms\": " << graph.median_ms
                      << ", \"graph_p90_ms\": " << graph.p90_ms << ", \"dense_tflops\": " << tflops
                      << "}\n";
  return 0;
}

void Report(const Problem& p, const Summary& time, double sgemm, const std::string& json) {
  const GdnShape& s = p.shape;
  const double kept = [&] {
    int64_t n = 0;
    for (uint8_t m : p.mask) n += m;
    return static_cast<double>(n) / static_cast<double>(p.mask.size());
  }();
  const double gflops = 1e-6 * DenseFlops(p) / time.median_ms;
  std::printf("median %.2f ms, p90 %.2f ms, selection %.2f ms, kept %.3f, workspace %.2f MiB\n",
              time.median_ms, time.p90_ms, p.timings.selection_ns * 1e-6, kept,
              p.args.workspace_bytes / 1048576.0);
  std::printf("%.0f GFLOP/s of dense work", gflops);
  if (sgemm > 0.0) std::printf(" = %.0f%% of sgemm (%.0f)", 100.0 * gflops / sgemm, sgemm);
  std::printf("\n");
  if (json.empty()) return;
  std::ofstream(json) << "{\"benchmark\": \"gdn\", \"backend\": \"cpu\", \"commit\": \""
                      << SPARSEGDN_COMMIT_TEXT << "\", \"tokens\": " << p.tokens
                      << ", \"num_k_heads\": " << s.num_k_heads
                      << ", \"num_v_heads\": " << s.num_v_heads
                      << ", \"head_dim_k\": " << s.head_dim_k
                      << ", \"head_dim_v\": " << s.head_dim_v << ", \"retained\": " << kept
                      << ", \"median_ms\": " << time.median_ms << ", \"p90_ms\": " << time.p90_ms
                      << ", \"dense_gflops\": " << gflops << ", \"sgemm_gflops\": " << sgemm
                      << "}\n";
}

}  // namespace

int RunGdn(Flags* flags) {
  const std::string backend_name = flags->Get("backend", "cpu");
  const std::string dtype = flags->Get("dtype", "bf16");
  const std::string json = flags->Get("json", "");
  const int dim = static_cast<int>(flags->GetInt("dim", 128));
  const double retention = flags->GetDouble("retention", 0.29);
  const int repeats = static_cast<int>(flags->GetInt("repeats", 9));
  Problem p;
  p.shape = {static_cast<int32_t>(flags->GetInt("k-heads", 16)),
             static_cast<int32_t>(flags->GetInt("v-heads", 32)), dim, dim};
  p.tokens = flags->GetInt("tokens", 4096);
  p.dtype = dtype == "f32" ? DType::kF32 : DType::kBF16;
  const int threads = static_cast<int>(flags->GetInt("threads", 0));
  const int device = static_cast<int>(flags->GetInt("device", 0));
  for (const std::string& name : flags->Unknown()) return Fail("unknown flag --" + name);
  if (backend_name != "cpu" && backend_name != "cuda") {
    return Fail("backend = " + backend_name + ", must be cpu or cuda");
  }
  if (dtype != "f32" && dtype != "bf16") return Fail("dtype = " + dtype + ", must be f32 or bf16");

  p.sequence.budget.retention = retention;
  if (retention == 1.0) p.sequence.budget.mode = BudgetMode::kDense;
  FillProblem(&p);
  SetArgs(&p);
  if (backend_name == "cuda") return RunOnCuda(p, device, repeats, json);
  auto backend = CreateCpuBackend({.num_threads = threads});
  if (!backend.ok()) return Fail(std::string(backend.status().message()));
  std::vector<double> times;
  const absl::Status s = Measure(backend->get(), &p, repeats, &times);
  if (!s.ok()) return Fail(std::string(s.message()));
  Report(p, Summarize(times), SgemmGflops(), json);
  return 0;
}

}  // namespace sparsegdn::bench
