#include "cli/decoder.h"

#include <utility>

namespace sparsegdn::cli {

Decoder::Decoder(client::Client* client, client::CallOptions call, v1::Keep keep,
                 std::string tenant)
    : client_(client), call_(std::move(call)), keep_(std::move(keep)), tenant_(std::move(tenant)) {}

Decoder::~Decoder() {
  if (snapshot_id_.empty() || !release_at_end_) return;
  client::CallOptions call = call_;
  // Released even after Ctrl-C; a server that is gone holds nothing either.
  call.cancellation = nullptr;
  call.timeout = absl::Seconds(2);
  client_->Release(snapshot_id_, tenant_, call).IgnoreError();
}

absl::StatusOr<v1::Result> Decoder::Prefill(v1::PrefillRequest request,
                                            const client::CallOptions& call) {
  *request.mutable_keep_snapshot() = keep_;
  request.set_resume_from(snapshot_id_);
  request.set_tenant(tenant_);
  request.mutable_outputs()->set_state(false);
  request.mutable_outputs()->set_conv_state(false);
  request.mutable_outputs()->set_kv(false);
  absl::StatusOr<client::PrefillOutcome> outcome = client_->Prefill(request, call);
  if (!outcome.ok()) return outcome.status();
  const std::string previous = std::exchange(snapshot_id_, outcome->result.snapshot_id());
  if (snapshot_id_.empty()) {
    snapshot_id_ = previous;
    return absl::InternalError("the server kept no snapshot although it was asked to");
  }
  if (!previous.empty()) client_->Release(previous, tenant_, call_).IgnoreError();
  return std::move(outcome->result);
}

absl::StatusOr<int32_t> Decoder::Step(int32_t token) {
  v1::PrefillRequest request;
  request.add_token_ids(token);
  request.mutable_budget()->set_mode(v1::BUDGET_MODE_DENSE);
  request.set_snapshot_at(v1::SNAPSHOT_AT_AFTER_LAST);
  absl::StatusOr<v1::Result> result = Prefill(std::move(request), call_);
  if (!result.ok()) return result.status();
  if (!result->has_next_token()) {
    return absl::InternalError("the server named no next token after AFTER_LAST");
  }
  return result->next_token();
}

}  // namespace sparsegdn::cli
