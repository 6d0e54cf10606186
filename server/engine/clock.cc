#include <chrono>

#include "server/engine/engine.h"

namespace sparsegdn::engine {
namespace {

class SteadyClock final : public Clock {
 public:
  int64_t NowNs() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

}  // namespace

Clock* Clock::Real() {
  static SteadyClock clock;
  return &clock;
}

}  // namespace sparsegdn::engine
