// Input: the bytes of a PrefillRequest as the service receives them. Promise: a refusal whose
// details name field and reason, or a call that runs to its end; nothing is left behind.
#include <grpcpp/support/byte_buffer.h>

#include <algorithm>

#include "server/engine/status_payload.h"
#include "server/service/convert_request.h"
#include "tests/fuzz/fuzz_engine.h"
#include "tests/fuzz/fuzz_target.h"

namespace sparsegdn::fuzz {
namespace {

using absl::StatusCode;

// In two slices, as messages that came in several packets are.
grpc::ByteBuffer Received(const uint8_t* data, size_t size) {
  const grpc::Slice slices[] = {grpc::Slice(data, size / 2),
                                grpc::Slice(data + size / 2, size - size / 2)};
  return grpc::ByteBuffer(slices, 2);
}

void Refused(const absl::Status& status) {
  NoteOutcome(status);
  RequireRefusal(status,
                 {StatusCode::kInvalidArgument, StatusCode::kOutOfRange, StatusCode::kNotFound,
                  StatusCode::kFailedPrecondition, StatusCode::kResourceExhausted},
                 1024);
  Require(!engine::DetailsOf(status).reason.empty(), "refused without a reason");
}

// What the service does before the engine.
absl::StatusOr<engine::PrefillRequest> Convert(const uint8_t* data, size_t size) {
  v1::PrefillRequest wire;
  absl::Status status = service::ParseMessage(Received(data, size), &wire);
  if (!status.ok()) return status;
  status = service::CheckWorker(wire.worker(), FuzzEngine::Get().engine().model_info());
  if (!status.ok()) return status;
  absl::StatusOr<engine::PrefillRequest> request = service::FromProto(wire);
  if (request.ok()) request->tenant = wire.tenant();
  return request;
}

v1::PrefillRequest Prompt(int tokens) {
  v1::PrefillRequest request;
  for (int i = 0; i < tokens; ++i) request.add_token_ids(static_cast<uint32_t>(i * 7 % 1000));
  return request;
}

v1::PrefillRequest WithEverything() {
  v1::PrefillRequest request = Prompt(200);
  v1::Budget& budget = *request.mutable_budget();
  budget.set_mode(v1::BUDGET_MODE_RETENTION);
  budget.set_selector(v1::SELECTOR_BETA);
  budget.set_solver(v1::SOLVER_EXACT);
  budget.set_local(v1::LOCAL_TERM_SELF);
  budget.set_retention(0.5);
  budget.set_min_retention(0.1);
  budget.set_max_retention(0.9);
  budget.set_keep_first(4);
  budget.set_keep_last(8);
  request.set_snapshot_at(v1::SNAPSHOT_AT_AFTER_LAST);
  v1::Outputs& outputs = *request.mutable_outputs();
  outputs.set_state(true);
  outputs.set_conv_state(true);
  outputs.set_kv(true);
  outputs.set_state_dtype(v1::DTYPE_FP8_E4M3);
  outputs.set_kv_dtype(v1::DTYPE_BF16);
  outputs.set_state_layout(v1::STATE_LAYOUT_VALUE_MAJOR);
  outputs.set_conv_layout(v1::CONV_LAYOUT_THREE_COLUMNS);
  outputs.set_checkpoint_every(2048);
  outputs.mutable_logits()->add_positions(3);
  outputs.mutable_logits()->add_positions(199);
  outputs.mutable_logits()->set_top_k(5);
  outputs.set_prompt_logprobs_from(1);
  request.set_first_position(0);
  request.mutable_keep_snapshot()->set_ttl_seconds(60);
  request.set_priority(-3);
  request.set_request_id("id-1");
  request.mutable_worker()->set_vocab_size(1000);
  request.mutable_worker()->set_format_version(1);
  request.set_tenant("tenant");
  return request;
}

}  // namespace

int FuzzPrefillRequest(const uint8_t* data, size_t size) {
  FuzzEngine& fuzz = FuzzEngine::Get();
  absl::StatusOr<engine::PrefillRequest> request = Convert(data, size);
  if (!request.ok()) {
    Refused(request.status());
    return 0;
  }
  const size_t tokens = request->tokens.size();
  const Answer answer = fuzz.Complete(*std::move(request));
  if (answer.status.ok()) {
    NoteOutcome(answer.status);
    Require(answer.result->usage.computed_tokens <= static_cast<int64_t>(tokens), "usage");
    Require(answer.result->snapshot_position <= static_cast<int64_t>(tokens), "position");
  } else {
    Refused(answer.status);
  }
  fuzz.RequireIdle();
  return 0;
}

std::vector<std::string> PrefillRequestSeeds() {
  std::vector<v1::PrefillRequest> requests = {Prompt(1), Prompt(40), WithEverything(), Prompt(0)};
  requests.push_back(Prompt(3000));
  requests.back().mutable_budget()->set_coverage(0.8);
  requests.back().mutable_outputs()->set_checkpoint_every(2048);
  requests.push_back(Prompt(300));
  requests.back().mutable_budget()->set_mode(v1::BUDGET_MODE_DENSE);
  requests.back().mutable_outputs()->set_checkpoint_every(64);
  requests.push_back(Prompt(5));
  requests.back().set_resume_from("0123456789abcdef0123456789abcdef");
  requests.push_back(Prompt(5));
  requests.back().add_token_ids(1000);
  std::vector<std::string> seeds;
  for (const v1::PrefillRequest& request : requests) seeds.push_back(request.SerializeAsString());
  // token_ids not packed, which a parser must take too.
  seeds.push_back(std::string("\x0d\1\0\0\0\x0d\2\0\0\0", 10));
  return seeds;
}

}  // namespace sparsegdn::fuzz
