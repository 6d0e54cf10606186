// XXH3-64 over a growing prefix of a buffer.
#ifndef SPARSEGDN_CLIENT_SRC_RUNNING_HASH_H_
#define SPARSEGDN_CLIENT_SRC_RUNNING_HASH_H_

#include <cstdint>
#include <memory>

namespace sparsegdn::client {

class RunningHash {
 public:
  RunningHash();
  ~RunningHash();
  RunningHash(RunningHash&&) noexcept;
  RunningHash& operator=(RunningHash&&) noexcept;

  // Takes in data[done .. end); what came before is not read again.
  void Extend(const uint8_t* data, uint64_t end);
  uint64_t Digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;  // absent before the first byte
  uint64_t done_ = 0;
};

}  // namespace sparsegdn::client

#endif  // SPARSEGDN_CLIENT_SRC_RUNNING_HASH_H_
