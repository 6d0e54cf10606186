// What each tenant has in the engine, so that one tenant's load is bounded and does not take every
// slot. Not thread-safe.
#ifndef SPARSEGDN_SERVER_ENGINE_TENANT_LEDGER_H_
#define SPARSEGDN_SERVER_ENGINE_TENANT_LEDGER_H_

#include <cstdint>
#include <string>
#include <unordered_map>

namespace sparsegdn::engine {

class TenantLedger {
 public:
  struct Use {
    int64_t requests = 0, tokens = 0;  // waiting and running
    int64_t running = 0;
  };

  Use Of(const std::string& tenant) const {
    const auto it = uses_.find(tenant);
    return it == uses_.end() ? Use() : it->second;
  }
  void Enter(const std::string& tenant, int64_t tokens) {
    Use& use = uses_[tenant];
    ++use.requests;
    use.tokens += tokens;
  }
  void Admit(const std::string& tenant) { ++uses_[tenant].running; }
  // `admitted`: whether Admit was called for the request that leaves.
  void Leave(const std::string& tenant, int64_t tokens, bool admitted) {
    const auto it = uses_.find(tenant);
    if (it == uses_.end()) return;
    it->second.running -= admitted;
    it->second.tokens -= tokens;
    // A tenant without requests costs nothing, however many names there have been.
    if (--it->second.requests == 0) uses_.erase(it);
  }

 private:
  std::unordered_map<std::string, Use> uses_;
};

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_TENANT_LEDGER_H_
