// The streaming calls that are open: counted for the drain, and watched so that a client which is
// alive but neither reads nor writes cannot hold memory for ever.
#ifndef SPARSEGDN_SERVER_SERVICE_CALL_REGISTRY_H_
#define SPARSEGDN_SERVER_SERVICE_CALL_REGISTRY_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace sparsegdn::service {

class OpenCall {
 public:
  virtual ~OpenCall() = default;
  // Cuts the call when it has made no progress for `timeout`. Must not block.
  virtual void CutIfStalled(std::chrono::steady_clock::time_point now,
                            std::chrono::nanoseconds timeout) = 0;
};

// Thread-safe. Looks at every call twice per timeout, at most once a second and at least every
// 20 ms.
class CallRegistry {
 public:
  // `timeout` is read before every round, because limits may be reloaded.
  explicit CallRegistry(std::function<std::chrono::nanoseconds()> timeout);
  ~CallRegistry();  // stops watching; open calls may outlive the registry only by their own means

  void Add(std::shared_ptr<OpenCall> call);
  void Remove(const OpenCall* call);
  int64_t size() const;
  // True once no call is open; false when `deadline` came first.
  bool WaitIdle(std::chrono::steady_clock::time_point deadline) const;

 private:
  void Watch();

  const std::function<std::chrono::nanoseconds()> timeout_;
  mutable std::mutex mutex_;
  mutable std::condition_variable idle_, stop_changed_;
  std::unordered_map<const OpenCall*, std::shared_ptr<OpenCall>> calls_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_CALL_REGISTRY_H_
