// model::LoadModel for sparsegdn-fake-server and the engine bench beside it: whatever the folder
// holds, the runner has no model and a step sleeps, so that the service and the scheduler are
// measured and not the cores. FAKE_NS_PER_TOKEN and FAKE_NS_PER_STEP say for how long.
#include <cstdlib>
#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/model/load_model.h"
#include "tests/unit/engine/fake_runner.h"

namespace sparsegdn::model {
namespace {

absl::StatusOr<int64_t> Nanoseconds(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  int64_t value = otherwise;
  if (text != nullptr && (!absl::SimpleAtoi(text, &value) || value < 0)) {
    return absl::InvalidArgumentError(absl::StrCat(name, " = \"", text, "\", wanted 0 or more"));
  }
  return value;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ModelRunner>> LoadModel(const LoadOptions& options) {
  const absl::StatusOr<int64_t> per_token = Nanoseconds("FAKE_NS_PER_TOKEN", 10'000);
  if (!per_token.ok()) return per_token.status();
  const absl::StatusOr<int64_t> per_step = Nanoseconds("FAKE_NS_PER_STEP", 1'000'000);
  if (!per_step.ok()) return per_step.status();
  testing::FakeRunnerOptions fake;
  fake.limits = options.limits;
  fake.info.name = "fake";
  fake.info.layers = {LayerKind::kLinear};  // no KV: the fake makes each row by hand
  fake.info.max_context_tokens = 262'144;
  fake.ns_per_token = *per_token;
  fake.ns_per_step = *per_step;
  fake.log_chunks = false;
  return std::make_unique<testing::FakeRunner>(std::move(fake),
                                               std::make_shared<testing::FakeRunnerLog>());
}

}  // namespace sparsegdn::model
