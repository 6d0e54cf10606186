// POSIX shared memory for same-host hand-off: a call's tensors are written into a segment that the
// client maps, instead of going through the socket.
//
// A segment is one file of mode 0600 in the shared-memory file system under a name nobody can
// guess. Its memory is taken when it is made: a full file system is found before a byte is
// promised.
//
// Most of what a hand-off costs is the kernel's work per page (304 MiB: 70 ms to take the pages,
// 16 ms to copy into them). So the pool keeps one spare: a segment of the largest size asked for
// lately, taken and mapped in the background and never seen by anyone. The first call, and one that
// comes before the spare is ready, pays for its own pages. The background waits until no hand-off
// runs, for a second at most, and gives way to everything else, for it takes a core for 150 ms.
#ifndef SPARSEGDN_SERVER_SERVICE_SHARED_SEGMENT_H_
#define SPARSEGDN_SERVER_SERVICE_SHARED_SEGMENT_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sparsegdn::service {

class SegmentPool;

// One live segment. Dropping it unlinks the name at once.
class SharedSegment {
 public:
  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  const std::string& name() const { return name_; }  // "/sparsegdn-...", for shm_open
  uint64_t bytes() const { return bytes_; }
  // INTERNAL outside the segment, UNAVAILABLE when the file system fails. Not from two threads.
  absl::Status Write(uint64_t offset, std::string_view data);

 private:
  friend class SegmentPool;
  SharedSegment(SegmentPool* pool, std::string name, int fd, uint64_t bytes)
      : pool_(pool), name_(std::move(name)), fd_(fd), bytes_(bytes) {}
  void Map();

  SegmentPool* const pool_;
  const std::string name_;
  int fd_;
  const uint64_t bytes_;
  char* map_ = nullptr;  // of a spare: its pages are there
  bool in_use_ = false;
};

// Makes segments, bounds the bytes of all that are live, and unlinks those whose call has ended
// after a delay. Thread-safe; outlives its segments.
class SegmentPool {
 public:
  // `max_bytes` 0: none is ever given. `linger`: how long the name of a call that ended well stays,
  // for a worker that maps it only then. `folder` is where shm_open keeps its files.
  SegmentPool(uint64_t max_bytes, std::chrono::milliseconds linger,
              std::string folder = "/dev/shm");
  ~SegmentPool();

  // At least `bytes` large. RESOURCE_EXHAUSTED when the pool's bytes or the file system's are used
  // up, UNAVAILABLE when the system has no shared memory. The caller then streams.
  absl::StatusOr<std::unique_ptr<SharedSegment>> Create(uint64_t bytes);
  // Unlinks those that linger; later ones are unlinked at once. Idempotent.
  void Close();
  // The call ended well: the name goes after the delay.
  void Linger(std::unique_ptr<SharedSegment> segment);
  // Names that servers which were killed left behind. Only files of this user and of our naming
  // whose lock nobody holds: a living server locks each of its segments. Returns how many it
  // unlinked.
  int RemoveLeftovers() const;

  uint64_t live_bytes() const;  // the spare's included
  bool has_spare() const;
  int64_t created() const;
  int64_t refused() const;

 private:
  friend class SharedSegment;
  using SteadyTime = std::chrono::steady_clock::time_point;
  struct Lingering {
    SteadyTime until;
    std::unique_ptr<SharedSegment> segment;
  };
  absl::Status ReserveLocked(uint64_t bytes);
  absl::StatusOr<std::unique_ptr<SharedSegment>> Make(uint64_t bytes);
  std::unique_ptr<SharedSegment> TakeSpareLocked(uint64_t bytes);
  void HandOutLocked(SharedSegment& segment);
  void MakeSpare(std::unique_lock<std::mutex>& lock);
  void Forget(uint64_t bytes, bool was_in_use);
  void Watch();
  std::string PathOf(const std::string& name) const { return folder_ + name; }

  const uint64_t max_bytes_;
  const std::chrono::milliseconds linger_;
  const std::string folder_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t live_bytes_ = 0;
  int64_t created_ = 0, refused_ = 0;
  std::deque<Lingering> lingering_;  // soonest first
  std::unique_ptr<SharedSegment> spare_;
  uint64_t spare_wanted_ = 0;  // bytes; 0: none
  SteadyTime spare_expires_, last_created_;
  int64_t in_use_ = 0;  // handed out, neither dropped nor lingering
  bool stop_ = false;
  std::thread thread_;
};

// Offsets of consecutive tensors of these sizes, each at a multiple of 64 bytes; the last element
// is the segment's size.
std::vector<uint64_t> SegmentOffsets(const std::vector<uint64_t>& tensor_bytes);

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_SHARED_SEGMENT_H_
