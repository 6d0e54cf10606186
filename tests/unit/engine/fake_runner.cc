#include "tests/unit/engine/fake_runner.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

namespace sparsegdn::testing {
namespace {

bool HasFullLayers(const model::ModelInfo& info) {
  return std::count(info.layers.begin(), info.layers.end(), model::LayerKind::kFull) > 0;
}

void AppendAs(DType dtype, float value, std::string& out) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (dtype == DType::kF32) {
    out.append(reinterpret_cast<const char*>(&bits), 4);
  } else {
    const uint16_t high = static_cast<uint16_t>(bits >> 16);  // the fake's values are exact
    out.append(reinterpret_cast<const char*>(&high), 2);
  }
}

float ReadAs(const model::BufferView& view, int64_t i) {
  const char* data = static_cast<const char*>(view.data);
  uint32_t bits = 0;
  if (view.dtype == DType::kF32) {
    std::memcpy(&bits, data + i * 4, 4);
  } else {
    uint16_t high;
    std::memcpy(&high, data + i * 2, 2);
    bits = uint32_t{high} << 16;
  }
  return std::bit_cast<float>(bits);
}

// The fake's own values are whole and small; an import may hold anything, NaN too, and becomes 0.
int64_t Whole(float value) {
  return std::abs(value) < float{1 << 20} ? static_cast<int64_t>(value) : 0;
}

}  // namespace

void FakeRunnerLog::Add(const std::function<void(Counts&)>& change) {
  std::lock_guard lock(mutex_);
  change(counts_);
}
void FakeRunnerLog::AddChunk(const ChunkRecord& record) {
  std::lock_guard lock(mutex_);
  chunks_.push_back(record);
}
FakeRunnerLog::Counts FakeRunnerLog::counts() const {
  std::lock_guard lock(mutex_);
  return counts_;
}
std::vector<FakeRunnerLog::ChunkRecord> FakeRunnerLog::chunks() const {
  std::lock_guard lock(mutex_);
  return chunks_;
}

struct FakeRunner::Slot {
  int64_t reserved_kv = 0;
  int64_t position = 0;
  uint64_t hash = kFakeEmptyHash;
  int64_t kv_sum = 0;
  std::vector<float> conv;              // [C, 4]
  std::vector<std::string> key, value;  // [layers] rows in compute dtype
};

struct FakeRunner::Point {
  int64_t position;
  uint64_t hash;
  std::vector<float> conv;
};

FakeRunner::FakeRunner(FakeRunnerOptions options, std::shared_ptr<FakeRunnerLog> log)
    : options_(std::move(options)),
      log_(std::move(log)),
      slots_(options_.limits.state_slots),
      free_kv_tokens_(options_.limits.kv_tokens) {}

FakeRunner::~FakeRunner() = default;

int32_t FakeRunner::free_slots() const {
  return static_cast<int32_t>(std::count(slots_.begin(), slots_.end(), nullptr));
}

absl::StatusOr<int32_t> FakeRunner::Acquire(int64_t max_tokens) {
  const auto it = std::find(slots_.begin(), slots_.end(), nullptr);
  if (it == slots_.end()) return absl::ResourceExhaustedError("no free slot");
  const int64_t block = options_.limits.kv_block_tokens;
  const int64_t reserved =
      HasFullLayers(options_.info) ? (max_tokens + block - 1) / block * block : 0;
  if (reserved > free_kv_tokens_) return absl::ResourceExhaustedError("no KV room");
  free_kv_tokens_ -= reserved;
  *it = std::make_unique<Slot>();
  (*it)->reserved_kv = reserved;
  (*it)->conv.assign(options_.info.conv_channels * 4, 0.0f);
  (*it)->key.resize(options_.info.layers.size());
  (*it)->value.resize(options_.info.layers.size());
  log_->Add([](auto& c) { ++c.acquires; });
  return static_cast<int32_t>(it - slots_.begin());
}

void FakeRunner::Release(int32_t slot) {
  free_kv_tokens_ += slots_.at(slot)->reserved_kv;
  slots_[slot].reset();
  log_->Add([](auto& c) { ++c.releases; });
}

absl::Status FakeRunner::Load(int32_t index, const model::SlotImage& image) {
  Slot& slot = *slots_.at(index);
  const model::ModelInfo& info = options_.info;
  log_->Add([](auto& c) { ++c.loads; });
  slot.position = image.position;
  for (size_t layer = 0; layer < info.layers.size(); ++layer) {
    const auto& in = image.layers.at(layer);
    if (info.layers[layer] == model::LayerKind::kLinear) {
      if (in.recurrent.elements != FakeStateElements(info) || in.recurrent.dtype != DType::kF32 ||
          in.conv.elements != info.conv_channels * 4) {
        return absl::InvalidArgumentError(absl::StrCat("state of layer ", layer));
      }
      uint64_t hash = 0;
      for (int i = 0; i < 8; ++i) {
        hash |= static_cast<uint64_t>(Whole(ReadAs(in.recurrent, i))) << (8 * i);
      }
      slot.hash = image.position == 0 ? kFakeEmptyHash : hash;
      for (size_t i = 0; i < slot.conv.size(); ++i) {
        slot.conv[i] = ReadAs(in.conv, static_cast<int64_t>(i));
      }
      continue;
    }
    for (const bool key : {true, false}) {
      std::string& rows = (key ? slot.key : slot.value)[layer];
      for (const model::BufferView& segment : key ? in.key_segments : in.value_segments) {
        for (int64_t i = 0; i < segment.elements; ++i) {
          const float value = ReadAs(segment, i);
          slot.kv_sum += Whole(value) * ((i % FakeRowElements(info)) % 5 + 1);
          AppendAs(info.compute_dtype, value, rows);
        }
      }
      const size_t element = info.compute_dtype == DType::kF32 ? 4 : 2;
      if (rows.size() != static_cast<size_t>(image.position * FakeRowElements(info)) * element) {
        return absl::InvalidArgumentError(absl::StrCat("KV of layer ", layer));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status FakeRunner::CheckStep(std::span<const model::Chunk> chunks) const {
  std::set<int32_t> seen;
  int64_t tokens = 0;
  for (const model::Chunk& chunk : chunks) {
    if (chunk.slot < 0 || chunk.slot >= options_.limits.state_slots || !slots_[chunk.slot]) {
      return absl::InternalError("chunk without a slot");
    }
    if (!seen.insert(chunk.slot).second) return absl::InternalError("a slot twice in one step");
    if (chunk.tokens.empty()) return absl::InternalError("empty chunk");
    if (slots_[chunk.slot]->position != chunk.first_position) {
      return absl::InternalError("chunk does not continue its slot");
    }
    for (const int64_t p : chunk.logits_positions) {
      if (p < chunk.first_position || p >= chunk.first_position + std::ssize(chunk.tokens)) {
        return absl::InternalError("logits position outside the chunk");
      }
    }
    tokens += std::ssize(chunk.tokens);
  }
  if (chunks.empty() || tokens > options_.limits.max_batch_tokens ||
      std::ssize(chunks) > options_.limits.max_batch_seqs) {
    return absl::InternalError("step outside its limits");
  }
  return absl::OkStatus();
}

absl::Status FakeRunner::Step(std::span<const model::Chunk> chunks, model::StepSink& sink,
                              model::StepStats& stats) {
  const auto begin = std::chrono::steady_clock::now();
  if (options_.on_step) options_.on_step(chunks);
  if (!healthy_) return absl::InternalError("the device is lost");
  if (absl::Status s = CheckStep(chunks); !s.ok()) return s;
  int64_t tokens = 0;
  for (const model::Chunk& chunk : chunks) {
    tokens += std::ssize(chunk.tokens);
    if (options_.log_chunks)
      log_->AddChunk({steps_, chunk.first_position, std::ssize(chunk.tokens), chunk.prompt_tokens,
                      chunk.slot, chunk.tokens[0], chunk.emit_state});
  }
  ++steps_;
  log_->Add([&](auto& c) {
    ++c.steps;
    c.tokens += tokens;
  });
  const auto holds = [&](int32_t token) {
    return std::any_of(chunks.begin(), chunks.end(), [&](const model::Chunk& chunk) {
      return std::find(chunk.tokens.begin(), chunk.tokens.end(), token) != chunk.tokens.end();
    });
  };
  if (holds(options_.fatal_token)) healthy_ = false;
  if (!healthy_ || holds(options_.error_token)) return absl::InternalError("injected fault");
  stats.chunks.resize(chunks.size());
  for (size_t i = 0; i < chunks.size(); ++i) RunChunk(i, chunks[i], sink, stats.chunks[i]);
  std::this_thread::sleep_until(
      begin + std::chrono::nanoseconds(options_.ns_per_step + options_.ns_per_token * tokens));
  stats.selection_ns = tokens;
  stats.gdn_core_ns = 10 * tokens;
  stats.total_ns = 20 * tokens;
  if (options_.after_step) options_.after_step();
  return absl::OkStatus();
}

void FakeRunner::PushConv(std::vector<float>& conv, std::span<const int32_t> tokens) const {
  for (const int32_t token : tokens.last(std::min<size_t>(4, tokens.size()))) {
    for (int64_t c = 0; c < options_.info.conv_channels; ++c) {
      std::copy_n(&conv[c * 4 + 1], 3, &conv[c * 4]);
      conv[c * 4 + 3] = FakeConvValue(token, c);
    }
  }
}

void FakeRunner::AppendKv(Slot& slot, int32_t layer, const model::Chunk& chunk) const {
  const int64_t row = FakeRowElements(options_.info);
  for (size_t t = 0; t < chunk.tokens.size(); ++t) {
    for (int64_t e = 0; e < row; ++e) {
      for (const bool key : {true, false}) {
        const float value = FakeKvValue(layer, key, chunk.first_position + static_cast<int64_t>(t),
                                        chunk.tokens[t], e);
        slot.kv_sum += static_cast<int64_t>(value) * (e % 5 + 1);
        AppendAs(options_.info.compute_dtype, value, (key ? slot.key : slot.value)[layer]);
      }
    }
  }
}

void FakeRunner::EmitState(size_t index, int32_t layer, const Point& point, bool nan,
                           model::StepSink& sink) {
  std::vector<float> state(FakeStateElements(options_.info));
  FakeFillState(point.hash, layer, state);
  if (nan) state[0] = std::numeric_limits<float>::quiet_NaN();
  std::string conv;
  for (const float value : point.conv) AppendAs(options_.info.compute_dtype, value, conv);
  sink.OnState(index, layer, point.position,
               {state.data(), DType::kF32, static_cast<int64_t>(state.size())},
               {conv.data(), options_.info.compute_dtype, static_cast<int64_t>(point.conv.size())});
}

void FakeRunner::EmitLogits(size_t index, int64_t position, const Slot& slot, bool nan,
                            model::StepSink& sink) {
  std::vector<float> logits(options_.info.vocab_size);
  FakeFillLogits(slot.hash, slot.kv_sum, logits);
  if (nan) logits[7] = std::numeric_limits<float>::quiet_NaN();
  sink.OnLogits(index, position, logits);
}

void FakeRunner::RunChunk(size_t index, const model::Chunk& chunk, model::StepSink& sink,
                          model::ChunkStats& stats) {
  const model::ModelInfo& info = options_.info;
  Slot& slot = *slots_[chunk.slot];
  const auto has = [&](int32_t token) {
    return std::find(chunk.tokens.begin(), chunk.tokens.end(), token) != chunk.tokens.end();
  };
  const bool nan = has(options_.nan_token);
  const int64_t end = chunk.first_position + std::ssize(chunk.tokens);
  std::vector<Point> points;
  std::vector<float> logprobs;
  const size_t element = info.compute_dtype == DType::kF32 ? 4 : 2;
  const size_t old_bytes = static_cast<size_t>(slot.position * FakeRowElements(info)) * element;
  for (int64_t p = chunk.first_position; p < end; ++p) {
    const std::span<const int32_t> one = chunk.tokens.subspan(p - chunk.first_position, 1);
    slot.hash = FakeAdvance(slot.hash, one[0]);
    PushConv(slot.conv, one);
    model::Chunk part = chunk;
    part.tokens = one;
    part.first_position = p;
    for (size_t layer = 0; layer < info.layers.size(); ++layer) {
      if (info.layers[layer] == model::LayerKind::kFull) {
        AppendKv(slot, static_cast<int32_t>(layer), part);
      }
    }
    if (std::binary_search(chunk.logits_positions.begin(), chunk.logits_positions.end(), p)) {
      EmitLogits(index, p, slot, nan, sink);
    }
    const int32_t next =
        p + 1 < end ? chunk.tokens[p + 1 - chunk.first_position] : chunk.next_token;
    if (chunk.logprobs_from >= 0 && p + 1 >= chunk.logprobs_from && next >= 0) {
      logprobs.push_back(FakeLogprob(slot.hash, next));
    }
    const bool checkpoint = chunk.checkpoint_every > 0 && (p + 1) % chunk.checkpoint_every == 0;
    if (checkpoint) points.push_back({p + 1, slot.hash, slot.conv});
  }
  if (chunk.emit_state) points.push_back({end, slot.hash, slot.conv});
  slot.position = end;
  for (int32_t layer = 0; layer < std::ssize(info.layers); ++layer) {
    if (info.layers[layer] == model::LayerKind::kLinear) {
      if (has(options_.silent_token)) continue;
      for (const Point& point : points) EmitState(index, layer, point, nan, sink);
    } else if (chunk.emit_kv) {
      const auto view = [&](const std::string& rows) {
        return model::BufferView{rows.data() + old_bytes, info.compute_dtype,
                                 static_cast<int64_t>((rows.size() - old_bytes) / element)};
      };
      sink.OnKv(index, layer, chunk.first_position, view(slot.key[layer]), view(slot.value[layer]));
    }
  }
  if (!logprobs.empty()) {
    sink.OnLogprobs(index, std::max(chunk.logprobs_from, chunk.first_position + 1), logprobs);
  }
  stats.nonfinite = nan;
  const bool dense = chunk.budget.mode == BudgetMode::kDense;
  const int64_t linear =
      std::count(info.layers.begin(), info.layers.end(), model::LayerKind::kLinear);
  stats.selected.assign(linear * info.gdn.num_k_heads,
                        dense ? static_cast<int32_t>(chunk.tokens.size())
                              : static_cast<int32_t>(static_cast<double>(chunk.tokens.size()) *
                                                     chunk.budget.retention));
}

}  // namespace sparsegdn::testing
