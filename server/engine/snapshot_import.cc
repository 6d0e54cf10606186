#include "server/engine/snapshot_import.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/encode.h"
#include "server/engine/errors.h"
#include "server/engine/frame_writer.h"

namespace sparsegdn::engine {
namespace {

absl::Status Corrupt(const std::string& field, const std::string& message) {
  return Refuse(absl::StatusCode::kDataLoss, field, "CHECKSUM_MISMATCH", message);
}

// The caller's handle.
class ImportHandle final : public SnapshotImport {
 public:
  explicit ImportHandle(std::shared_ptr<ImportState> state) : state_(std::move(state)) {}
  ~ImportHandle() override { state_->End(absl::CancelledError("the upload was dropped")); }
  absl::Status Add(uint32_t tensor, uint64_t byte_offset, std::string_view data,
                   uint64_t xxh3_64) override {
    return state_->Add(tensor, byte_offset, data, xxh3_64);
  }
  absl::StatusOr<SnapshotRef> Finish(uint64_t digest) override { return state_->Finish(digest); }
  void Pin() override { state_->Pin(); }

 private:
  const std::shared_ptr<ImportState> state_;
};

}  // namespace

ImportState::ImportState(ImportPlan plan, const Layout& layout, SnapshotTable& table,
                         const Clock* clock, uint32_t ttl_seconds, std::string tenant)
    : plan_(std::move(plan)),
      layout_(layout),
      table_(table),
      clock_(clock),
      ttl_seconds_(ttl_seconds),
      tenant_(std::move(tenant)),
      tensors_(plan_.tensors.size()),
      last_ns_(clock->NowNs()) {}

void ImportState::EndLocked(absl::Status status) {
  if (!ended_.ok()) return;
  ended_ = std::move(status);
  tensors_.clear();
  tensors_.shrink_to_fit();
  reservation_.reset();
}

void ImportState::End(absl::Status status) {
  std::lock_guard lock(mutex_);
  EndLocked(std::move(status));
}

void ImportState::Pin() {
  std::lock_guard lock(mutex_);
  pin_ = true;
}

void ImportState::EndIfIdle(int64_t now_ns, double idle_seconds) {
  // Whoever holds the lock is busy with the upload: it is not idle, and a large Finish hashes and
  // converts for seconds, which the executor must not wait for.
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || static_cast<double>(now_ns - last_ns_) * 1e-9 <= idle_seconds) return;
  EndLocked(Refuse(absl::StatusCode::kDeadlineExceeded, "", "UPLOAD_IDLE",
                   absl::StrCat("no chunk came for ", idle_seconds, " s")));
}

absl::Status ImportState::Add(uint32_t tensor, uint64_t byte_offset, std::string_view data,
                              uint64_t hash) {
  std::lock_guard lock(mutex_);
  if (!ended_.ok()) return ended_;
  if (!data.empty()) last_ns_ = clock_->NowNs();
  absl::Status status = AddLocked(tensor, byte_offset, data, hash);
  if (!status.ok()) EndLocked(status);
  return status;
}

absl::Status ImportState::AddLocked(uint32_t id, uint64_t byte_offset, std::string_view data,
                                    uint64_t hash) {
  if (id >= tensors_.size()) {
    return Invalid("chunk.tensor",
                   absl::StrCat("got ", id, ", wanted less than ", tensors_.size()));
  }
  const TensorInfo& info = plan_.tensors[id];
  const std::string field = "chunk of " + info.name;
  if (byte_offset > info.bytes || data.size() > info.bytes - byte_offset) {
    return Invalid(field, absl::StrCat("got ", data.size(), " bytes at ", byte_offset,
                                       ", wanted within ", info.bytes));
  }
  if (Xxh3(data) != hash) {
    return Corrupt(field, absl::StrCat("the data at ", byte_offset, " does not match its hash"));
  }
  if (data.empty()) return absl::OkStatus();
  Tensor& tensor = tensors_[id];
  if (absl::Status s = Mark(tensor, field, byte_offset, byte_offset + data.size()); !s.ok()) {
    return s;
  }
  const int64_t extra = byte_offset == tensor.bytes.size() ? 0 : kImportPieceBytes;
  if (absl::Status s = Charge(static_cast<int64_t>(data.size()) + extra); !s.ok()) return s;
  Store(tensor, byte_offset, data, info.bytes);
  return absl::OkStatus();
}

absl::Status ImportState::Charge(int64_t bytes) {
  if (!reservation_) {
    absl::StatusOr<std::unique_ptr<SnapshotTable::Reservation>> reservation =
        table_.Reserve(0, nullptr, tenant_);
    if (!reservation.ok()) return reservation.status();
    reservation_ = *std::move(reservation);
  }
  if (absl::Status s = reservation_->Grow(bytes); !s.ok()) return s;
  charged_bytes_ += bytes;
  return absl::OkStatus();
}

void ImportState::Store(Tensor& tensor, uint64_t begin, std::string_view data,
                        uint64_t tensor_bytes) {
  if (begin != tensor.bytes.size()) {
    tensor.ahead.emplace(begin, data);
    return;
  }
  // Addresses for the whole tensor at once, so that nothing is copied again; the pages of a large
  // buffer become memory only as bytes come.
  if (tensor.bytes.empty()) tensor.bytes.reserve(tensor_bytes);
  tensor.bytes.append(data);
  while (!tensor.ahead.empty() && tensor.ahead.begin()->first == tensor.bytes.size()) {
    tensor.bytes.append(tensor.ahead.begin()->second);
    tensor.ahead.erase(tensor.ahead.begin());
  }
}

absl::Status ImportState::Mark(Tensor& tensor, const std::string& field, uint64_t begin,
                               uint64_t end) {
  auto next = tensor.have.lower_bound(begin);
  if (next != tensor.have.end() && next->first < end) {
    return Invalid(field, absl::StrCat("bytes from ", next->first, " came before"));
  }
  if (next != tensor.have.begin()) {
    const auto prev = std::prev(next);
    if (prev->second > begin) {
      return Invalid(field, absl::StrCat("bytes from ", begin, " came before"));
    }
    if (prev->second == begin) {
      begin = prev->first;
      tensor.have.erase(prev);
    }
  }
  if (next != tensor.have.end() && next->first == end) {
    end = next->second;
    tensor.have.erase(next);
  }
  tensor.have[begin] = end;
  if (tensor.have.size() > kMaxImportGaps) {
    return Invalid(field, absl::StrCat("the chunks leave more than ", kMaxImportGaps, " gaps"));
  }
  return absl::OkStatus();
}

absl::StatusOr<SnapshotRef> ImportState::Finish(uint64_t digest) {
  std::lock_guard lock(mutex_);
  if (!ended_.ok()) return ended_;
  absl::StatusOr<SnapshotRef> ref = FinishLocked(digest);
  EndLocked(ref.ok() ? absl::FailedPreconditionError("the upload is complete") : ref.status());
  return ref;
}

absl::StatusOr<SnapshotRef> ImportState::FinishLocked(uint64_t digest) {
  if (absl::Status s = CheckComplete(digest); !s.ok()) return s;
  const int64_t kept_bytes = layout_.kept_bytes(plan_.position);
  if (absl::Status s = Charge(std::max<int64_t>(0, kept_bytes - charged_bytes_)); !s.ok()) {
    return s;
  }
  if (pin_) {
    if (absl::Status s = reservation_->Pin(kept_bytes); !s.ok()) return s;
  }
  absl::StatusOr<std::shared_ptr<const Snapshot>> snapshot = MakeSnapshot();
  if (!snapshot.ok()) return snapshot.status();
  SnapshotRef ref;
  ref.position = plan_.position;
  ref.bytes = static_cast<uint64_t>(kept_bytes);
  ref.ttl_seconds = ttl_seconds_;
  absl::StatusOr<std::string> id =
      table_.Commit(std::move(reservation_), *std::move(snapshot), ttl_seconds_);
  if (!id.ok()) return id.status();
  table_.Seal(*id);
  ref.snapshot_id = *std::move(id);
  return ref;
}

absl::Status ImportState::CheckComplete(uint64_t digest) const {
  std::vector<uint64_t> hashes;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Tensor& tensor = tensors_[i];
    const uint64_t bytes = plan_.tensors[i].bytes;
    uint64_t have = 0;
    for (const auto& [begin, end] : tensor.have) have += end - begin;
    if (have != bytes) {
      return Invalid("chunk of " + plan_.tensors[i].name,
                     absl::StrCat("got ", have, " bytes in all, wanted ", bytes));
    }
    hashes.push_back(Xxh3(tensor.bytes));
  }
  if (DigestOf(hashes) != digest) {
    return Corrupt("end.digest", "the tensors do not match the digest");
  }
  return absl::OkStatus();
}

// Finiteness is checked in the kept form: a finite FP8 scale may overflow with its codes, and a
// finite FP32 key rounds up to a BF16 infinity.
absl::StatusOr<std::shared_ptr<const Snapshot>> ImportState::MakeSnapshot() {
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->position = plan_.position;
  snapshot->layers.resize(plan_.layers.size());
  absl::Status status;
  const auto checked = [&](Blob blob, ExportDType dtype, int32_t id) {
    const int64_t n = static_cast<int64_t>(blob->size()) / ElementBytes(dtype);
    if (status.ok() && !AllFinite(blob->data(), dtype, n)) {
      status = Refuse(absl::StatusCode::kInvalidArgument, "chunk of " + plan_.tensors[id].name,
                      "NON_FINITE", "holds NaN or Inf, or a value that overflows when kept");
    }
    return blob;
  };
  for (size_t i = 0; status.ok() && i < plan_.layers.size(); ++i) {
    const LayerTensors& ids = plan_.layers[i];
    Snapshot::Layer& layer = snapshot->layers[i];
    if (ids.recurrent >= 0) {
      layer.recurrent = checked(TakeRecurrent(ids), ExportDType::kF32, ids.recurrent);
      layer.conv = checked(TakeConv(ids.conv), layout_.compute, ids.conv);
    } else if (plan_.position > 0) {
      layer.key.push_back(checked(TakeKv(ids.key), layout_.compute, ids.key));
      layer.value.push_back(checked(TakeKv(ids.value), layout_.compute, ids.value));
    }
  }
  if (!status.ok()) return status;
  return snapshot;
}

Blob ImportState::TakeRecurrent(const LayerTensors& ids) {
  const TensorInfo& info = plan_.tensors[ids.recurrent];
  std::string bytes = std::move(tensors_[ids.recurrent].bytes);
  const bool value_major = info.state_layout == StateLayout::kValueMajor;
  if (info.dtype == ExportDType::kF32 && !value_major) {
    return std::make_shared<const std::string>(std::move(bytes));
  }
  const int64_t n = layout_.head_elements();
  const int64_t columns = value_major ? layout_.dim_k : layout_.dim_v;
  std::string out(layout_.state_elements() * 4, '\0');
  std::vector<float> head(n);
  for (int64_t h = 0; h < layout_.heads; ++h) {
    float* const to = reinterpret_cast<float*>(out.data()) + h * n;
    float* const wide = value_major ? head.data() : to;
    const char* const from = bytes.data() + h * n * ElementBytes(info.dtype);
    if (info.dtype == ExportDType::kBF16) {
      Bf16ToF32(reinterpret_cast<const uint16_t*>(from), n, wide);
    } else if (info.dtype == ExportDType::kF8E4M3) {
      const int64_t rows = n / columns;
      const float* scales =
          reinterpret_cast<const float*>(tensors_[ids.scale].bytes.data()) + h * rows;
      for (int64_t r = 0; r < rows; ++r) {
        F8RowToF32(reinterpret_cast<const uint8_t*>(from) + r * columns, columns, scales[r],
                   wide + r * columns);
      }
    } else {
      std::copy_n(reinterpret_cast<const float*>(from), n, wide);
    }
    if (value_major) Transpose(wide, layout_.dim_v, layout_.dim_k, to);
  }
  return std::make_shared<const std::string>(std::move(out));
}

Blob ImportState::TakeConv(int32_t id) {
  std::string bytes = std::move(tensors_[id].bytes);
  if (plan_.tensors[id].conv_layout == ConvLayout::kFourColumns) {
    return std::make_shared<const std::string>(std::move(bytes));
  }
  const int64_t element = ElementBytes(layout_.compute);
  std::string out(layout_.conv_elements() * element, '\0');
  RestoreConvColumn(bytes.data(), layout_.conv_channels, element, out.data());
  return std::make_shared<const std::string>(std::move(out));
}

Blob ImportState::TakeKv(int32_t id) {
  std::string bytes = std::move(tensors_[id].bytes);
  const ExportDType dtype = plan_.tensors[id].dtype;
  if (dtype == layout_.compute) return std::make_shared<const std::string>(std::move(bytes));
  const int64_t n = static_cast<int64_t>(bytes.size()) / ElementBytes(dtype);
  std::string out(n * ElementBytes(layout_.compute), '\0');
  if (layout_.compute == ExportDType::kF32) {
    Bf16ToF32(reinterpret_cast<const uint16_t*>(bytes.data()), n,
              reinterpret_cast<float*>(out.data()));
  } else {
    F32ToBf16(reinterpret_cast<const float*>(bytes.data()), n,
              reinterpret_cast<uint16_t*>(out.data()));
  }
  return std::make_shared<const std::string>(std::move(out));
}

ImportRegistry::~ImportRegistry() {
  for (const auto& weak : states_) {
    if (const auto state = weak.lock()) {
      state->End(Refuse(absl::StatusCode::kUnavailable, "", "SHUTTING_DOWN", "the server stopped",
                        kReplicaRetryMs));
    }
  }
}

absl::StatusOr<std::unique_ptr<SnapshotImport>> ImportRegistry::Begin(
    const Manifest& manifest, const model::ModelInfo& model, const Layout& layout,
    SnapshotTable& table, const Clock* clock, uint32_t ttl_seconds, std::string tenant) {
  absl::StatusOr<ImportPlan> plan = PlanImport(manifest, model, layout);
  if (!plan.ok()) return plan.status();
  if (absl::Status s = table.CheckSize("manifest.total_bytes", plan->total_held_bytes); !s.ok()) {
    return s;
  }
  auto state = std::make_shared<ImportState>(*std::move(plan), layout, table, clock, ttl_seconds,
                                             std::move(tenant));
  std::lock_guard lock(mutex_);
  std::erase_if(states_, [](const auto& weak) { return weak.expired(); });
  states_.push_back(state);
  return std::make_unique<ImportHandle>(std::move(state));
}

void ImportRegistry::Sweep(int64_t now_ns, double idle_seconds) {
  std::vector<std::shared_ptr<ImportState>> live;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(states_, [](const auto& weak) { return weak.expired(); });
    for (const auto& weak : states_) {
      if (auto state = weak.lock()) live.push_back(std::move(state));
    }
  }
  // Outside the lock: freeing an upload takes a while, and Begin must not wait for it.
  for (const auto& state : live) state->EndIfIdle(now_ns, idle_seconds);
}

size_t ImportRegistry::size() const {
  std::lock_guard lock(mutex_);
  return states_.size();
}

}  // namespace sparsegdn::engine
