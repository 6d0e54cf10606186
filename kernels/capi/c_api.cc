// The C ABI over gdn.h: copies structs field by field, turns statuses into codes.
#include "sparsegdn/c_api.h"

#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "sparsegdn/gdn.h"

struct sparsegdn_backend {
  std::unique_ptr<sparsegdn::GdnBackend> impl;
};

namespace sparsegdn {
namespace {

// Arrays of sequences are read where they lie, so the two structs must be one layout.
static_assert(sizeof(sparsegdn_sequence) == sizeof(SequenceParams));
static_assert(offsetof(sparsegdn_sequence, mode) == offsetof(SequenceParams, budget));
static_assert(offsetof(sparsegdn_sequence, selector) ==
              offsetof(SequenceParams, budget) + offsetof(Budget, selector));
static_assert(offsetof(sparsegdn_sequence, solver) ==
              offsetof(SequenceParams, budget) + offsetof(Budget, solver));
static_assert(offsetof(sparsegdn_sequence, local) ==
              offsetof(SequenceParams, budget) + offsetof(Budget, local));
static_assert(offsetof(sparsegdn_sequence, retention) ==
              offsetof(SequenceParams, budget) + offsetof(Budget, retention));
static_assert(offsetof(sparsegdn_sequence, max_retention) ==
              offsetof(SequenceParams, budget) + offsetof(Budget, max_retention));
static_assert(offsetof(sparsegdn_sequence, keep_last) ==
              offsetof(SequenceParams, budget) + offsetof(Budget, keep_last));
static_assert(offsetof(sparsegdn_sequence, snapshot_every) ==
              offsetof(SequenceParams, snapshot_every));
static_assert(offsetof(sparsegdn_sequence, final_slot) == offsetof(SequenceParams, final_slot));

// Sizes of version 1 (LP64): no caller can be older.
constexpr size_t kFirstArgsSize = 368;
constexpr size_t kFirstLimitsSize = 48;
static_assert(sizeof(sparsegdn_forward_args) >= kFirstArgsSize);
static_assert(sizeof(sparsegdn_limits) >= kFirstLimitsSize);

thread_local std::string last_error;

sparsegdn_code Finish(const absl::Status& status) {
  last_error = std::string(status.message());
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return SPARSEGDN_OK;
    case absl::StatusCode::kInvalidArgument:
      return SPARSEGDN_INVALID_ARGUMENT;
    case absl::StatusCode::kResourceExhausted:
      return SPARSEGDN_RESOURCE_EXHAUSTED;
    case absl::StatusCode::kFailedPrecondition:
      return SPARSEGDN_FAILED_PRECONDITION;
    case absl::StatusCode::kUnimplemented:
      return SPARSEGDN_UNIMPLEMENTED;
    default:
      return SPARSEGDN_INTERNAL;
  }
}

// Nothing inside is meant to throw; running out of memory or threads still may.
template <typename F>
sparsegdn_code Guarded(const F& body) {
  try {
    return Finish(body());
  } catch (const std::bad_alloc&) {
    return Finish(absl::ResourceExhaustedError("out of memory"));
  } catch (const std::exception& e) {
    return Finish(absl::InternalError(e.what()));
  }
}

absl::Status Null(const char* field) {
  return absl::InvalidArgumentError(absl::StrCat(field, " = null, must be given"));
}

void Init(sparsegdn_forward_args* args) {
  std::memset(args, 0, sizeof(*args));
  args->struct_size = sizeof(*args);
}

void Init(sparsegdn_limits* limits) {
  std::memset(limits, 0, sizeof(*limits));
  limits->struct_size = sizeof(*limits);
  limits->dtype = SPARSEGDN_BF16;
  limits->max_retention = 1.0;
}

// The leading struct_size bytes of a default-initialised struct.
template <typename T>
void InitPrefix(T* out, size_t struct_size) {
  if (out == nullptr) return;
  T full;
  Init(&full);
  const size_t size = struct_size < sizeof(T) ? struct_size : sizeof(T);
  full.struct_size = size;
  std::memcpy(out, &full, size);
}

// A full struct from one of the caller's version.
template <typename T>
absl::Status ReadVersioned(const char* field, const T* in, size_t least, T* out) {
  if (in == nullptr) return Null(field);
  const size_t got = in->struct_size;
  if (got < least || got > sizeof(T)) {
    return absl::InvalidArgumentError(absl::StrCat(field, ".struct_size = ", got, ", must be in [",
                                                   least, ", ", sizeof(T), "]: ABI version ",
                                                   SPARSEGDN_ABI_VERSION));
  }
  Init(out);
  std::memcpy(out, in, got);
  return absl::OkStatus();
}

absl::Status CheckReserved(const sparsegdn_forward_args& c) {
  const struct {
    const char* field;
    int32_t value;
  } fields[] = {{"q.reserved", c.q.reserved},       {"k.reserved", c.k.reserved},
                {"v.reserved", c.v.reserved},       {"log_gate.reserved", c.log_gate.reserved},
                {"beta.reserved", c.beta.reserved}, {"o.reserved", c.o.reserved},
                {"reserved0", c.reserved0}};
  for (const auto& [field, value] : fields) {
    if (value == 0) continue;
    return absl::InvalidArgumentError(absl::StrCat("args.", field, " = ", value, ", must be 0"));
  }
  return absl::OkStatus();
}

GdnShape ToShape(const sparsegdn_shape& s) {
  return {s.num_k_heads, s.num_v_heads, s.head_dim_k, s.head_dim_v};
}

ConstTensorRef ToTensor(const sparsegdn_tensor& t) {
  return {t.data, static_cast<DType>(t.dtype), t.token_stride, t.head_stride};
}

GdnForwardArgs ToArgs(const sparsegdn_forward_args& c, GdnTimings* timings) {
  GdnForwardArgs a;
  a.shape = ToShape(c.shape);
  a.num_tokens = c.num_tokens;
  a.num_seqs = c.num_seqs;
  a.cu_seqlens = c.cu_seqlens;
  a.sequences = reinterpret_cast<const SequenceParams*>(c.sequences);
  a.q = ToTensor(c.q);
  a.k = ToTensor(c.k);
  a.v = ToTensor(c.v);
  a.log_gate = ToTensor(c.log_gate);
  a.beta = ToTensor(c.beta);
  a.o = {const_cast<void*>(c.o.data), static_cast<DType>(c.o.dtype), c.o.token_stride,
         c.o.head_stride};
  a.scale = c.scale;
  a.normalize_qk = c.normalize_qk != 0;
  a.initial_state = {const_cast<float*>(c.initial_state), c.initial_slots,
                     static_cast<StateLayout>(c.initial_layout)};
  a.final_state = {c.final_state, c.final_slots, static_cast<StateLayout>(c.final_layout)};
  a.mask = c.mask;
  a.mask_out = c.mask_out;
  a.selected = c.selected;
  a.snapshots = c.snapshots;
  a.snapshot_slots = c.snapshot_slots;
  a.nonfinite = c.nonfinite;
  a.status = c.status;
  a.workspace = c.workspace;
  a.workspace_bytes = c.workspace_bytes;
  a.timings = c.timings_ns != nullptr ? timings : nullptr;
  return a;
}

using Entry = absl::Status (GdnBackend::*)(const GdnForwardArgs&, void*);

absl::Status Call(sparsegdn_backend* backend, const sparsegdn_forward_args* args, void* stream,
                  Entry entry) {
  if (backend == nullptr) return Null("backend");
  sparsegdn_forward_args full;
  absl::Status s = ReadVersioned("args", args, kFirstArgsSize, &full);
  if (s.ok()) s = CheckReserved(full);
  if (!s.ok()) return s;
  GdnTimings timings;
  const GdnForwardArgs cpp = ToArgs(full, &timings);
  s = (backend->impl.get()->*entry)(cpp, stream);
  if (s.ok() && full.timings_ns != nullptr) {
    full.timings_ns[0] = timings.selection_ns;
    full.timings_ns[1] = timings.core_ns;
  }
  return s;
}

absl::Status Create(const char* name, int32_t device, sparsegdn_backend** backend) {
  if (backend == nullptr) return Null("backend");
  *backend = nullptr;
  if (name == nullptr) return Null("name");
  absl::StatusOr<std::unique_ptr<GdnBackend>> impl;
  if (std::strcmp(name, "cpu") == 0) {
    impl = CreateCpuBackend({.num_threads = device});
  } else if (std::strcmp(name, "cuda") == 0) {
    impl = CreateCudaBackend({.device = device});
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("name = \"", name, "\", must be \"cpu\" or \"cuda\""));
  }
  if (impl.ok()) *backend = new sparsegdn_backend{*std::move(impl)};
  return impl.status();
}

absl::Status WorkspaceBytes(const sparsegdn_backend* backend, const sparsegdn_limits* limits,
                            size_t* bytes) {
  if (backend == nullptr) return Null("backend");
  if (bytes == nullptr) return Null("bytes");
  sparsegdn_limits full;
  absl::Status s = ReadVersioned("limits", limits, kFirstLimitsSize, &full);
  if (!s.ok()) return s;
  GdnLimits l;
  l.shape = ToShape(full.shape);
  l.max_tokens = full.max_tokens;
  l.max_seqs = full.max_seqs;
  l.max_retention = full.max_retention;
  l.dtype = static_cast<DType>(full.dtype);
  const auto need = backend->impl->WorkspaceBytes(l);
  if (need.ok()) *bytes = *need;
  return need.status();
}

}  // namespace
}  // namespace sparsegdn

extern "C" {

int32_t sparsegdn_abi_version(void) { return SPARSEGDN_ABI_VERSION; }

const char* sparsegdn_version(void) { return SPARSEGDN_VERSION_TEXT; }

const char* sparsegdn_last_error(void) { return sparsegdn::last_error.c_str(); }

void sparsegdn_sequence_init(sparsegdn_sequence* sequence) {
  if (sequence == nullptr) return;
  const sparsegdn::SequenceParams defaults;
  std::memcpy(sequence, &defaults, sizeof(defaults));
}

void sparsegdn_forward_args_init(sparsegdn_forward_args* args, size_t struct_size) {
  sparsegdn::InitPrefix(args, struct_size);
}

void sparsegdn_limits_init(sparsegdn_limits* limits, size_t struct_size) {
  sparsegdn::InitPrefix(limits, struct_size);
}

sparsegdn_code sparsegdn_create(const char* name, int32_t device, sparsegdn_backend** backend) {
  return sparsegdn::Guarded([&] { return sparsegdn::Create(name, device, backend); });
}

void sparsegdn_destroy(sparsegdn_backend* backend) { delete backend; }

sparsegdn_code sparsegdn_workspace_bytes(const sparsegdn_backend* backend,
                                         const sparsegdn_limits* limits, size_t* bytes) {
  return sparsegdn::Guarded([&] { return sparsegdn::WorkspaceBytes(backend, limits, bytes); });
}

sparsegdn_code sparsegdn_forward(sparsegdn_backend* backend, const sparsegdn_forward_args* args,
                                 void* stream) {
  return sparsegdn::Guarded(
      [&] { return sparsegdn::Call(backend, args, stream, &sparsegdn::GdnBackend::Forward); });
}

sparsegdn_code sparsegdn_select(sparsegdn_backend* backend, const sparsegdn_forward_args* args,
                                void* stream) {
  return sparsegdn::Guarded(
      [&] { return sparsegdn::Call(backend, args, stream, &sparsegdn::GdnBackend::Select); });
}

}  // extern "C"
