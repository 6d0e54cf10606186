// GdnBackend on the CPU: validation, selection, then one task per (part of a) head pair.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/common/float_convert.h"
#include "kernels/common/validate.h"
#include "kernels/cpu/pair_task.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/selection.h"
#include "kernels/cpu/task_list.h"
#include "kernels/cpu/thread_pool.h"
#include "sparsegdn/gdn.h"

namespace sparsegdn {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxThreads = 1024;
constexpr int64_t kCheckRows = 4096;
constexpr size_t kWorkspaceAlignment = 256;

int64_t NanosSince(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

// Pieces of the workspace. The mask is only carved out when the caller gives nowhere to put it.
struct Workspace {
  uint64_t* keys;
  uint8_t* mask;
  char* threads;
  size_t thread_bytes;
  size_t bytes;

  Workspace(void* base, const GdnShape& shape, int64_t num_tokens, bool bf16, int num_threads) {
    cpu::Arena arena(base);
    keys = arena.Take<uint64_t>(cpu::SelectionKeyCount(num_tokens, shape));
    mask = arena.Take<uint8_t>(num_tokens * shape.num_k_heads);
    // A page more keeps threads from sharing lines that the prefetcher pulls in.
    thread_bytes = (cpu::TaskScratchBytes(shape, bf16) + 8191) / 4096 * 4096;
    threads = arena.Take<char>(static_cast<int64_t>(thread_bytes) * num_threads);
    bytes = arena.bytes();
  }
};

class CpuBackend final : public GdnBackend {
 public:
  CpuBackend(int num_threads, bool bf16_products)
      : pool_(num_threads),
        vector_(cpu::GetVectorKernels()),
        bf16_(bf16_products ? cpu::GetBf16Kernels() : nullptr) {}

  const char* name() const override { return "cpu"; }
  absl::StatusOr<size_t> WorkspaceBytes(const GdnLimits& limits) const override;
  absl::Status Forward(const GdnForwardArgs& args, void* stream) override;
  absl::Status Select(const GdnForwardArgs& args, void* stream) override;

 private:
  absl::Status Prepare(const GdnForwardArgs& args, EntryPoint entry, Workspace* workspace);
  bool UsesBf16(DType dtype) const { return bf16_ != nullptr && dtype == DType::kBF16; }
  uint32_t CheckBeta(const GdnForwardArgs& args);
  // Returns the mask the core reads, null where every sequence is all events.
  const uint8_t* FindMask(const GdnForwardArgs& args, const Workspace& workspace);
  void RunCore(const GdnForwardArgs& args, const uint8_t* mask, const Workspace& workspace);

  cpu::ThreadPool pool_;
  const cpu::VectorKernels& vector_;
  const cpu::ProductKernels<uint16_t>* bf16_;
};

absl::StatusOr<size_t> CpuBackend::WorkspaceBytes(const GdnLimits& limits) const {
  if (auto s = ValidateLimits(limits); !s.ok()) return s;
  const Workspace w(nullptr, limits.shape, limits.max_tokens, UsesBf16(limits.dtype),
                    pool_.num_threads());
  return w.bytes;
}

// Validates, sets *args.status, and lays out the workspace.
absl::Status CpuBackend::Prepare(const GdnForwardArgs& args, EntryPoint entry,
                                 Workspace* workspace) {
  if (auto s = ValidateArgs(args, entry); !s.ok()) return s;
  uint32_t status = 0;
  absl::Status s = ValidateSequences(args, entry, &status);
  if (s.ok()) status |= CheckBeta(args);
  if (args.status != nullptr) *args.status = status;
  if (!s.ok()) return s;
  const bool bf16 = entry == EntryPoint::kForward && UsesBf16(args.q.dtype);
  *workspace = Workspace(args.workspace, args.shape, args.num_tokens, bf16, pool_.num_threads());
  if (args.workspace == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("workspace = null, must be given, of >= ", workspace->bytes, " bytes"));
  }
  if (args.workspace_bytes < workspace->bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("workspace_bytes = ", args.workspace_bytes,
                                                     ", must be >= ", workspace->bytes));
  }
  if (reinterpret_cast<uintptr_t>(args.workspace) % kWorkspaceAlignment != 0) {
    return absl::InvalidArgumentError("workspace is unaligned, must be aligned to 256 bytes");
  }
  return absl::OkStatus();
}

uint32_t CpuBackend::CheckBeta(const GdnForwardArgs& args) {
  const int64_t rows = args.num_seqs == 0 ? 0 : args.cu_seqlens[args.num_seqs];
  std::atomic<bool> bad{false};
  pool_.Run((rows + kCheckRows - 1) / kCheckRows, [&](int64_t block, int) {
    const ConstTensorRef& b = args.beta;
    const int64_t end = std::min(rows, (block + 1) * kCheckRows);
    for (int64_t row = block * kCheckRows; row < end; ++row) {
      for (int h = 0; h < args.shape.num_v_heads; ++h) {
        const float x = LoadElement(b.data, b.dtype, row * b.token_stride + h * b.head_stride);
        if (!(x >= 0.0f && x <= 1.0f)) bad.store(true, std::memory_order_relaxed);
      }
    }
  });
  return bad.load() ? kStatusBetaOutOfRange : 0;
}

const uint8_t* CpuBackend::FindMask(const GdnForwardArgs& args, const Workspace& workspace) {
  const int64_t rows = args.num_seqs == 0 ? 0 : args.cu_seqlens[args.num_seqs];
  const bool given = args.mask != nullptr;
  const uint8_t* mask = args.mask;
  if (given && args.mask_out != nullptr) {
    const int64_t size = rows * args.shape.num_k_heads;
    for (int64_t i = 0; i < size; ++i) args.mask_out[i] = args.mask[i] != 0 ? 1 : 0;
  }
  if (!given) {
    uint8_t* out = args.mask_out != nullptr ? args.mask_out : workspace.mask;
    cpu::SelectEvents(args, vector_, args.mask_out != nullptr, &pool_, workspace.keys, out);
    mask = out;
  }
  if (args.selected != nullptr) cpu::CountSelected(args, mask, given);
  return mask;
}

void CpuBackend::RunCore(const GdnForwardArgs& args, const uint8_t* mask,
                         const Workspace& workspace) {
  const cpu::CoreCall call{&args, mask, args.mask != nullptr, &vector_, bf16_};
  const std::vector<cpu::PairTask> tasks = cpu::MakeTasks(args, pool_.num_threads());
  std::vector<std::atomic<bool>> nonfinite(args.num_seqs);
  pool_.Run(static_cast<int64_t>(tasks.size()), [&](int64_t index, int thread) {
    char* scratch = workspace.threads + workspace.thread_bytes * thread;
    if (cpu::RunPairTask(call, tasks[index], scratch)) return;
    nonfinite[tasks[index].sequence].store(true, std::memory_order_relaxed);
  });
  if (args.nonfinite == nullptr) return;
  for (int32_t i = 0; i < args.num_seqs; ++i) args.nonfinite[i] = nonfinite[i].load() ? 1 : 0;
}

absl::Status CpuBackend::Forward(const GdnForwardArgs& args, void*) {
  Workspace workspace(nullptr, GdnShape{1, 1, 1, 1}, 0, false, 0);
  if (auto s = Prepare(args, EntryPoint::kForward, &workspace); !s.ok()) return s;
  const Clock::time_point start = Clock::now();
  const uint8_t* mask = FindMask(args, workspace);
  const int64_t selection_ns = NanosSince(start);
  RunCore(args, mask, workspace);
  if (args.timings != nullptr) *args.timings = {selection_ns, NanosSince(start) - selection_ns};
  return absl::OkStatus();
}

absl::Status CpuBackend::Select(const GdnForwardArgs& args, void*) {
  Workspace workspace(nullptr, GdnShape{1, 1, 1, 1}, 0, false, 0);
  if (auto s = Prepare(args, EntryPoint::kSelect, &workspace); !s.ok()) return s;
  const Clock::time_point start = Clock::now();
  FindMask(args, workspace);
  if (args.timings != nullptr) *args.timings = {NanosSince(start), 0};
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<GdnBackend>> CreateCpuBackend(const CpuBackendOptions& options) {
  if (options.num_threads < 0 || options.num_threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_threads = ", options.num_threads, ", must be in [0, ", kMaxThreads, "]"));
  }
  const int threads = options.num_threads == 0 ? cpu::UsableCores() : options.num_threads;
  return std::make_unique<CpuBackend>(threads, options.bf16_products);
}

}  // namespace sparsegdn
