#include "tests/unit/engine/engine_test_util.h"

#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/frame_writer.h"
#include "server/engine/status_payload.h"

namespace sparsegdn::testing {
namespace {

using engine::TensorChunk;

void TakeChunk(const TensorChunk& chunk, Collected& out) {
  ASSERT_TRUE(out.manifest) << "a frame before the manifest";
  ASSERT_FALSE(out.result) << "a frame after the result";
  ASSERT_LT(chunk.tensor, out.manifest->tensors.size());
  std::string& bytes = out.tensors[chunk.tensor];
  EXPECT_EQ(chunk.byte_offset, bytes.size()) << out.manifest->tensors[chunk.tensor].name;
  EXPECT_FALSE(chunk.data->empty());
  EXPECT_EQ(chunk.xxh3_64, engine::Xxh3(*chunk.data));
  bytes += *chunk.data;
  EXPECT_LE(bytes.size(), out.manifest->tensors[chunk.tensor].bytes);
  ++out.frames;
}

void CheckWhole(const Collected& out) {
  ASSERT_TRUE(out.result) << "OK without a result";
  uint64_t total = 0;
  std::vector<uint64_t> hashes;
  for (size_t i = 0; i < out.tensors.size(); ++i) {
    EXPECT_EQ(out.tensors[i].size(), out.manifest->tensors[i].bytes)
        << out.manifest->tensors[i].name;
    total += out.tensors[i].size();
    hashes.push_back(engine::Xxh3(out.tensors[i]));
  }
  EXPECT_EQ(total, out.manifest->total_bytes);
  EXPECT_EQ(engine::DigestOf(hashes), out.result->digest);
}

}  // namespace

bool Collected::Has(const std::string& name) const {
  for (const auto& tensor : manifest->tensors) {
    if (tensor.name == name) return true;
  }
  return false;
}

const engine::TensorInfo& Collected::Info(const std::string& name) const {
  for (const auto& tensor : manifest->tensors) {
    if (tensor.name == name) return tensor;
  }
  ADD_FAILURE() << "no tensor " << name;
  return manifest->tensors.at(0);
}

const std::string& Collected::Bytes(const std::string& name) const {
  return tensors.at(static_cast<size_t>(&Info(name) - manifest->tensors.data()));
}

std::vector<float> Collected::Floats(const std::string& name) const {
  const std::string& bytes = Bytes(name);
  std::vector<float> out;
  if (Info(name).dtype == engine::ExportDType::kBF16) {
    for (size_t i = 0; i < bytes.size(); i += 2) {
      uint16_t high;
      std::memcpy(&high, bytes.data() + i, 2);
      out.push_back(std::bit_cast<float>(uint32_t{high} << 16));
    }
    return out;
  }
  out.resize(bytes.size() / 4);
  if (!bytes.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

void ReadAvailable(engine::PrefillCall& call, Collected& out) {
  while (std::optional<engine::Event> event = call.TryPop()) {
    EXPECT_FALSE(out.status) << "an event after the end";
    if (auto* accepted = std::get_if<engine::Accepted>(&*event)) {
      EXPECT_FALSE(out.manifest);
      out.accepted = *accepted;
    } else if (auto* progress = std::get_if<engine::Progress>(&*event)) {
      if (!out.progress.empty()) {
        EXPECT_GE(progress->tokens_done, out.progress.back().tokens_done);
      }
      out.progress.push_back(*progress);
    } else if (auto* manifest = std::get_if<std::shared_ptr<const engine::Manifest>>(&*event)) {
      EXPECT_TRUE(out.accepted);
      out.manifest = *manifest;
      out.tensors.resize(out.manifest->tensors.size());
    } else if (auto* chunk = std::get_if<TensorChunk>(&*event)) {
      TakeChunk(*chunk, out);
    } else {
      out.result = std::get<engine::Result>(*event);
    }
  }
  out.status = call.status();
  if (out.status && out.status->ok()) CheckWhole(out);
}

engine::EngineConfig Harness::DenseConfig() {
  engine::EngineConfig config;
  config.default_budget.mode = BudgetMode::kDense;
  config.frame_bytes = 512;
  return config;
}

engine::PrefillRequest Harness::Prompt(int64_t tokens, int32_t seed) {
  engine::PrefillRequest request;
  for (int64_t i = 0; i < tokens; ++i) {
    // Below 900: tests inject faults through higher ids.
    request.tokens.push_back(
        static_cast<int32_t>((i * 37 + int64_t{seed} * 101 + i * i % 11) % 900));
  }
  return request;
}

Harness::Harness(FakeRunnerOptions options, engine::EngineConfig config)
    : info(options.info), limits(options.limits) {
  auto created =
      engine::EngineImpl::Create(config, std::make_unique<FakeRunner>(std::move(options), log),
                                 &observer, &clock, engine::EngineImpl::Mode::kInline);
  EXPECT_TRUE(created.ok()) << created.status().ToString();
  engine_ = *std::move(created);
}

std::shared_ptr<engine::PrefillCall> Harness::Submit(engine::PrefillRequest request) {
  auto call = engine_->Submit(std::move(request));
  EXPECT_TRUE(call.ok()) << call.status().ToString();
  return call.ok() ? *call : nullptr;
}

absl::Status Harness::SubmitError(engine::PrefillRequest request) {
  auto call = engine_->Submit(std::move(request));
  EXPECT_FALSE(call.ok());
  return call.status();
}

void Harness::RunRounds(int rounds) {
  for (int i = 0; i < rounds && engine_->RunOneRound(); ++i) {
  }
}

Collected Harness::Complete(engine::PrefillRequest request) {
  Collected out;
  const auto call = Submit(std::move(request));
  if (!call) return out;
  while (!out.status && engine_->RunOneRound()) ReadAvailable(*call, out);
  ReadAvailable(*call, out);
  RunRounds();
  return out;
}

void Harness::ExpectNoLeak() const {
  const engine::EngineGauges gauges = engine_->gauges();
  EXPECT_EQ(gauges.free_slots, limits.state_slots);
  EXPECT_EQ(gauges.free_kv_tokens, limits.kv_tokens);
  EXPECT_EQ(gauges.running_requests, 0);
  EXPECT_EQ(gauges.queue_requests, 0);
  EXPECT_EQ(gauges.queue_tokens, 0);
  EXPECT_EQ(gauges.queue_bytes, 0);
  EXPECT_EQ(gauges.buffered_bytes, 0);
  EXPECT_EQ(log->counts().acquires, log->counts().releases);
}

std::string Describe(const absl::Status& status) {
  const engine::StatusDetails details = engine::DetailsOf(status);
  return absl::StrCat(absl::StatusCodeToString(status.code()), " ", details.field, " ",
                      details.reason);
}

}  // namespace sparsegdn::testing
