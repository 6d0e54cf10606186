// Keeps callers away from a server that fails, and lets one through now and then to see.
#ifndef SPARSEGDN_SERVER_STORE_CIRCUIT_BREAKER_H_
#define SPARSEGDN_SERVER_STORE_CIRCUIT_BREAKER_H_

#include <algorithm>
#include <cstdint>
#include <mutex>

namespace sparsegdn::store {

// Opens after three failures in a row, for one second, doubled at each further failure up to half a
// minute; while open, one call at the end of each span goes through. Thread-safe.
class CircuitBreaker {
 public:
  bool Allow(int64_t now_ns) {
    std::lock_guard lock(mutex_);
    if (failures_ < kThreshold) return true;
    if (now_ns < open_until_ns_) return false;
    open_until_ns_ = now_ns + span_ns_;  // others wait for what this one finds
    return true;
  }
  void Success() {
    std::lock_guard lock(mutex_);
    failures_ = 0;
    span_ns_ = kFirstSpanNs;
  }
  void Failure(int64_t now_ns) {
    std::lock_guard lock(mutex_);
    if (++failures_ < kThreshold) return;
    if (failures_ > kThreshold) span_ns_ = std::min(2 * span_ns_, kLastSpanNs);
    open_until_ns_ = now_ns + span_ns_;
  }
  bool open() const {
    std::lock_guard lock(mutex_);
    return failures_ >= kThreshold;
  }

 private:
  static constexpr int64_t kThreshold = 3;
  static constexpr int64_t kFirstSpanNs = 1'000'000'000, kLastSpanNs = 30'000'000'000;
  mutable std::mutex mutex_;
  int64_t failures_ = 0;
  int64_t span_ns_ = kFirstSpanNs;
  int64_t open_until_ns_ = 0;
};

}  // namespace sparsegdn::store

#endif  // SPARSEGDN_SERVER_STORE_CIRCUIT_BREAKER_H_
