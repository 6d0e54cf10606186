// Prefix reuse in the life of a request: the lookup in the queue, the start from what it found, the
// replay of the stored KV to the client, and what each step leaves in the store.
#include <algorithm>
#include <numeric>
#include <utility>

#include "server/engine/engine_impl.h"
#include "server/engine/errors.h"
#include "server/engine/scheduler.h"

namespace sparsegdn::engine {
namespace {

// Borrowed view for ModelRunner::Load.
model::SlotImage ImageOf(const PrefixEntries& entries, const Layout& layout) {
  const auto view = [](const Blob& blob, ExportDType dtype) {
    return model::BufferView{blob->data(), dtype == ExportDType::kBF16 ? DType::kBF16 : DType::kF32,
                             std::ssize(*blob) / ElementBytes(dtype)};
  };
  model::SlotImage image;
  image.position = PositionOf(entries);
  image.layers.resize(static_cast<size_t>(layout.num_layers));
  for (size_t i = 0; i < layout.linear_layers.size(); ++i) {
    model::SlotImage::Layer& out = image.layers[layout.linear_layers[i]];
    out.recurrent = view(entries.back()->recurrent[i], ExportDType::kF32);
    out.conv = view(entries.back()->conv[i], layout.compute);
  }
  for (size_t i = 0; i < layout.full_layers.size(); ++i) {
    model::SlotImage::Layer& out = image.layers[layout.full_layers[i]];
    for (const PrefixEntryPtr& entry : entries) {
      out.key_segments.push_back(view(entry->key[i], layout.compute));
      out.value_segments.push_back(view(entry->value[i], layout.compute));
    }
  }
  return image;
}

}  // namespace

// Whether the request's lookup is over; then it knows where it starts.
bool EngineImpl::SettlePrefix(Request& request) {
  if (request.prefix == nullptr) return true;
  if (!prefix_cache_->Settled(*request.prefix)) return false;
  request.start_position = std::max(request.plan.first_position, request.prefix->position());
  return true;
}

// The state and KV of the prefix go into the slot. A prefix that the model does not take is
// evicted, and the request runs from its start.
absl::Status EngineImpl::LoadPrefix(Request& request) {
  if (request.prefix == nullptr) return absl::OkStatus();
  prefix_cache_->Count(*request.prefix);
  request.recorder = std::make_unique<PrefixRecorder>(layout_);
  const PrefixEntries& entries = request.prefix->entries();
  if (entries.empty()) return absl::OkStatus();
  if (request.tokens_to_run() > 0) {
    if (!runner_->Load(request.slot, ImageOf(entries, layout_)).ok()) {
      prefix_cache_->Evict(request.prefix->plan(), std::ssize(entries));
      request.prefix->Drop();
      request.start_position = 0;
      runner_->Release(std::exchange(request.slot, -1));
      absl::StatusOr<int32_t> slot = runner_->Acquire(request.plan.end_position);
      if (!slot.ok()) return slot.status();
      request.slot = *slot;
      return absl::OkStatus();
    }
  }
  request.position = request.start_position;
  return absl::OkStatus();
}

// Sends what the prefix already holds of the request's tensors, a window at a time while the reader
// keeps up. True when something was sent or a request ended.
bool EngineImpl::Replay(const EngineLimits& limits) {
  bool progress = false;
  for (RequestPtr& request : running_) {
    while (request->replaying()) {
      const int64_t unread = request->stream->buffered_bytes();
      const int64_t begin = request->replayed * kWindow;
      const int64_t bytes = request->plan.EmittedBytes(begin, begin + kWindow);
      if (unread >= limits.max_buffered_bytes_per_call ||
          !FramesFit(shared_->buffered_bytes, bytes, limits.max_buffered_bytes)) {
        if (unread > 0 && request->paused_ns < 0) {
          request->paused_ns = clock_->NowNs();
          request->stream->set_paused(true);
          observer_->OnSlowReader(unread);
        }
        break;
      }
      if (std::exchange(request->paused_ns, -1) >= 0) request->stream->set_paused(false);
      ReplayWindow(*request);
      progress = true;
    }
    if (request->replaying() || request->tokens_left() > 0) continue;
    observer_->OnQueueWait(static_cast<double>(request->admitted_ns - request->arrival_ns) * 1e-9);
    Finish(*request);
    request.reset();
    progress = true;
  }
  std::erase(running_, nullptr);
  return progress;
}

void EngineImpl::ReplayWindow(Request& request) {
  const PrefixEntries& entries = request.prefix->entries();
  const PrefixEntryPtr& entry = entries[static_cast<size_t>(request.replayed++)];
  const DType compute = layout_.compute == ExportDType::kBF16 ? DType::kBF16 : DType::kF32;
  const auto view = [&](const Blob& blob, DType dtype) {
    return model::BufferView{blob->data(), dtype,
                             std::ssize(*blob) / (dtype == DType::kF32 ? 4 : 2)};
  };
  for (size_t i = 0; entry != nullptr && i < layout_.full_layers.size(); ++i) {
    request.builder->AddKv(layout_.full_layers[i], entry->position - kWindow,
                           view(entry->key[i], compute), view(entry->value[i], compute));
  }
  if (!request.replaying()) {
    // Where a checkpoint or the snapshot itself stands there; else the builder passes it over.
    for (size_t i = 0; i < layout_.linear_layers.size(); ++i) {
      request.builder->AddState(layout_.linear_layers[i], entry->position,
                                view(entry->recurrent[i], DType::kF32),
                                view(entry->conv[i], compute));
    }
    request.prefix->Drop();  // the store may evict them
  }
  request.builder->EndStep();
}

// Asks the chunk for the states of the boundaries it crosses that the store lacks.
void EngineImpl::RecordChunk(Request& request, model::Chunk& chunk) {
  if (request.recorder == nullptr) return;
  const std::vector<PrefixKey>& keys = request.prefix->plan().keys;
  const int64_t begin = chunk.first_position;
  const int64_t end = begin + std::ssize(chunk.tokens);
  std::vector<int64_t> wanted;
  for (int64_t window = begin / kWindow; window < std::ssize(keys); ++window) {
    const int64_t position = (window + 1) * kWindow;
    if (position > end) break;
    if (!prefix_cache_->HasState(keys[static_cast<size_t>(window)])) wanted.push_back(position);
  }
  request.recorder->Begin(wanted);
  if (wanted.empty()) return;
  chunk.emit_kv |= !layout_.full_layers.empty();
  chunk.emit_state |= wanted.back() == end;
  if (wanted.front() < end) {
    chunk.checkpoint_every = std::gcd(chunk.checkpoint_every, kWindow);  // gcd(0, W) is W
  }
}

void EngineImpl::KeepRecorded(Request& request) {
  if (request.recorder == nullptr || !request.recorder->active()) return;
  const std::vector<PrefixKey>& keys = request.prefix->plan().keys;
  for (std::shared_ptr<PrefixEntry>& entry : request.recorder->Take()) {
    const auto end = keys.begin() + entry->position / kWindow;
    prefix_cache_->Put(std::vector<PrefixKey>(keys.begin(), end), std::move(entry));
  }
}

}  // namespace sparsegdn::engine
