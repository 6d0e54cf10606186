// An engine without a thread over the fake model, for the targets whose input goes that far. It
// lives as long as the process; every run must leave it as it was found.
#ifndef SPARSEGDN_TESTS_FUZZ_FUZZ_ENGINE_H_
#define SPARSEGDN_TESTS_FUZZ_FUZZ_ENGINE_H_

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "server/engine/engine_impl.h"

namespace sparsegdn::fuzz {

// What a call gave, its frames put together.
struct Answer {
  absl::Status status;
  std::shared_ptr<const engine::Manifest> manifest;
  std::map<uint32_t, std::string> tensors;
  std::optional<engine::Result> result;
};

class FuzzEngine {
 public:
  static FuzzEngine& Get();

  engine::EngineImpl& engine() { return *engine_; }
  // Submits, runs and reads to the end. A call that is accepted must end; with OK it must have
  // given every byte of its manifest.
  Answer Complete(engine::PrefillRequest request);
  // Requires that no request, slot or KV block is in use and no frame waits.
  void RequireIdle();

 private:
  FuzzEngine();
  std::unique_ptr<engine::EngineImpl> engine_;
  engine::EngineGauges idle_;
};

}  // namespace sparsegdn::fuzz

#endif  // SPARSEGDN_TESTS_FUZZ_FUZZ_ENGINE_H_
