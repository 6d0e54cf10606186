#include "src/running_hash.h"

#include "src/xxh.h"

namespace sparsegdn::client {

struct RunningHash::State {
  XXH3_state_t* xxh = XXH3_createState();
  State() { XXH3_64bits_reset(xxh); }
  ~State() { XXH3_freeState(xxh); }
};

RunningHash::RunningHash() = default;
RunningHash::~RunningHash() = default;
RunningHash::RunningHash(RunningHash&&) noexcept = default;
RunningHash& RunningHash::operator=(RunningHash&&) noexcept = default;

void RunningHash::Extend(const uint8_t* data, uint64_t end) {
  if (end <= done_) return;
  if (state_ == nullptr) state_ = std::make_unique<State>();
  XXH3_64bits_update(state_->xxh, data + done_, end - done_);
  done_ = end;
}

uint64_t RunningHash::Digest() const {
  return state_ == nullptr ? XXH3_64bits(nullptr, 0) : XXH3_64bits_digest(state_->xxh);
}

}  // namespace sparsegdn::client
