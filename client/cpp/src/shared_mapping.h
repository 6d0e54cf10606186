// The client's side of same-host hand-off: maps what Manifest.shared_memory names.
#ifndef SPARSEGDN_CLIENT_SRC_SHARED_MAPPING_H_
#define SPARSEGDN_CLIENT_SRC_SHARED_MAPPING_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sparsegdn/v1/prefill.pb.h"

namespace sparsegdn::client {

// The reason of the error that says that this process cannot see the segment (another mount of
// /dev/shm, another user). The same call without shared memory works.
inline constexpr char kSharedMemoryUnavailable[] = "SHARED_MEMORY_UNAVAILABLE";

// Read-only memory of one segment; its name may go meanwhile. A thread of its own enters the pages
// into the page table while the first ones are verified: it is most of the client's work.
class SharedMapping {
 public:
  // `manifest` is valid but for its shared_memory. DATA_LOSS (MANIFEST_INVALID) when the name is
  // not one of a server's, or an offset lies outside, overlaps or is not a multiple of 64;
  // FAILED_PRECONDITION (SHARED_MEMORY_UNAVAILABLE) when it cannot be opened. A segment that is
  // shorter than it claims is refused, because reading behind its end would be a signal.
  static absl::StatusOr<std::shared_ptr<SharedMapping>> Open(const v1::Manifest& manifest);
  ~SharedMapping();
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;

  const uint8_t* data() const { return data_; }

 private:
  SharedMapping(const uint8_t* data, uint64_t size)
      : data_(data), size_(size), populate_([this] { Populate(); }) {}
  void Populate();

  const uint8_t* const data_;
  const uint64_t size_;
  std::atomic<bool> stop_{false};
  std::thread populate_;
};

}  // namespace sparsegdn::client

#endif  // SPARSEGDN_CLIENT_SRC_SHARED_MAPPING_H_
