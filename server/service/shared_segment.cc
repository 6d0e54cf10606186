#include "server/service/shared_segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace sparsegdn::service {
namespace {

constexpr char kPrefix[] = "sparsegdn-";
constexpr size_t kNameBytes = sizeof(kPrefix) - 1 + 32;
constexpr uint64_t kAlign = 64;
// A spare that nobody took for so long gives its memory back.
constexpr auto kSpareLife = std::chrono::seconds(60);
// While hand-offs run, the next spare waits for so long after the last one began.
constexpr auto kSpareDelay = std::chrono::seconds(1);
// A call may be given a spare that is larger than it needs by its own size, or by this.
constexpr uint64_t kSpareSlack = uint64_t{64} << 20;
constexpr uint64_t kPopulateStep = uint64_t{8} << 20;

// 128 bits from the system's generator.
absl::StatusOr<std::string> RandomName() {
  unsigned char bytes[16];
  if (getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes)) {
    return absl::UnavailableError("getrandom gave no segment name");
  }
  std::string name = absl::StrCat("/", kPrefix);
  for (const unsigned char byte : bytes) absl::StrAppend(&name, absl::Hex(byte, absl::kZeroPad2));
  return name;
}

bool IsOurName(std::string_view name) {
  return name.size() == kNameBytes && name.substr(0, sizeof(kPrefix) - 1) == kPrefix &&
         name.find_first_not_of("0123456789abcdef", sizeof(kPrefix) - 1) == name.npos;
}

absl::Status FromErrno(const char* what, int error) {
  const std::string text = absl::StrCat("shared memory: ", what, ": ", std::strerror(error));
  return error == ENOSPC || error == ENOMEM || error == EDQUOT || error == EMFILE
             ? absl::ResourceExhaustedError(text)
             : absl::UnavailableError(text);
}

}  // namespace

std::vector<uint64_t> SegmentOffsets(const std::vector<uint64_t>& tensor_bytes) {
  std::vector<uint64_t> offsets{0};
  for (const uint64_t bytes : tensor_bytes) {
    offsets.push_back((offsets.back() + bytes + kAlign - 1) / kAlign * kAlign);
  }
  return offsets;
}

SharedSegment::~SharedSegment() {
  unlink(pool_->PathOf(name_).c_str());
  if (map_ != nullptr) munmap(map_, bytes_);
  close(fd_);  // after the name is gone, so that nobody finds it without a lock
  pool_->Forget(bytes_, in_use_);
}

absl::Status SharedSegment::Write(uint64_t offset, std::string_view data) {
  if (offset > bytes_ || data.size() > bytes_ - offset) {
    return absl::InternalError(absl::StrCat("a frame at ", offset, " + ", data.size(),
                                            " lies outside its segment of ", bytes_));
  }
  if (map_ != nullptr) {
    std::memcpy(map_ + offset, data.data(), data.size());
    return absl::OkStatus();
  }
  // Into pages that were never touched this is the cheaper way: they are not cleared first.
  while (!data.empty()) {
    const ssize_t n = pwrite(fd_, data.data(), data.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return FromErrno("write", n == 0 ? EIO : errno);
    data.remove_prefix(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
  return absl::OkStatus();
}

void SharedSegment::Map() {
  void* map = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (map == MAP_FAILED) return;
  for (uint64_t at = 0; at < bytes_; at += kPopulateStep) {
    // Without support in the kernel the pages come with the first copy.
    madvise(static_cast<char*>(map) + at, std::min(kPopulateStep, bytes_ - at),
            MADV_POPULATE_WRITE);
  }
  map_ = static_cast<char*>(map);
}

SegmentPool::SegmentPool(uint64_t max_bytes, std::chrono::milliseconds linger, std::string folder)
    : max_bytes_(max_bytes),
      linger_(linger),
      folder_(std::move(folder)),
      thread_([this] { Watch(); }) {}

SegmentPool::~SegmentPool() { Close(); }

void SegmentPool::Close() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  std::deque<Lingering> gone;
  {
    std::lock_guard lock(mutex_);
    gone.swap(lingering_);
    if (spare_ != nullptr) gone.push_back({SteadyTime(), std::move(spare_)});
  }
}

absl::Status SegmentPool::ReserveLocked(uint64_t bytes) {
  if (bytes > max_bytes_ || live_bytes_ > max_bytes_ - bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("shared memory: ", bytes, " bytes beside ",
                                                     live_bytes_, ", wanted at most ", max_bytes_));
  }
  live_bytes_ += bytes;
  return absl::OkStatus();
}

std::unique_ptr<SharedSegment> SegmentPool::TakeSpareLocked(uint64_t bytes) {
  if (spare_ == nullptr || spare_->bytes() < bytes ||
      spare_->bytes() - bytes > std::max(bytes, kSpareSlack)) {
    return nullptr;
  }
  return std::move(spare_);
}

absl::StatusOr<std::unique_ptr<SharedSegment>> SegmentPool::Create(uint64_t bytes) {
  std::unique_ptr<SharedSegment> useless;  // dropped outside the lock
  {
    std::lock_guard lock(mutex_);
    spare_wanted_ = std::max(spare_wanted_, bytes);
    last_created_ = std::chrono::steady_clock::now();
    spare_expires_ = last_created_ + kSpareLife;
    if (std::unique_ptr<SharedSegment> spare = TakeSpareLocked(bytes)) {
      HandOutLocked(*spare);
      return spare;
    }
    if (spare_ != nullptr && live_bytes_ + bytes > max_bytes_) useless = std::move(spare_);
  }
  useless.reset();
  {
    std::lock_guard lock(mutex_);
    if (absl::Status status = ReserveLocked(bytes); !status.ok()) {
      ++refused_;
      return status;
    }
  }
  absl::StatusOr<std::unique_ptr<SharedSegment>> segment = Make(bytes);
  std::lock_guard lock(mutex_);
  if (segment.ok()) {
    HandOutLocked(**segment);
  } else {
    ++refused_;
    live_bytes_ -= bytes;
  }
  return segment;
}

void SegmentPool::HandOutLocked(SharedSegment& segment) {
  ++created_;
  ++in_use_;
  segment.in_use_ = true;
}

// No spare while a call of its size would be refused for it, nor in a full file system: the next
// call wants it again.
void SegmentPool::MakeSpare(std::unique_lock<std::mutex>& lock) {
  const uint64_t bytes = spare_wanted_;
  const bool leaves_room = bytes <= max_bytes_ / 2 && live_bytes_ <= max_bytes_ - 2 * bytes;
  if (!leaves_room || !ReserveLocked(bytes).ok()) {
    spare_wanted_ = 0;
    return;
  }
  lock.unlock();
  absl::StatusOr<std::unique_ptr<SharedSegment>> segment = Make(bytes);
  if (segment.ok()) (*segment)->Map();
  lock.lock();
  if (segment.ok()) {
    spare_ = *std::move(segment);
  } else {
    live_bytes_ -= bytes;
    spare_wanted_ = 0;
  }
}

absl::StatusOr<std::unique_ptr<SharedSegment>> SegmentPool::Make(uint64_t bytes) {
  while (true) {
    absl::StatusOr<std::string> name = RandomName();
    if (!name.ok()) return name.status();
    const std::string path = PathOf(*name);
    const int fd =
        open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, S_IRUSR | S_IWUSR);
    if (fd < 0) return FromErrno("open", errno);
    // Another server that starts now may have taken the new file for a leftover: then it holds the
    // lock, or has unlinked the name.
    struct stat info {};
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 || fstat(fd, &info) != 0 || info.st_nlink == 0) {
      unlink(path.c_str());
      close(fd);
      continue;
    }
    const int error = posix_fallocate(fd, 0, static_cast<off_t>(std::max<uint64_t>(bytes, 1)));
    if (error != 0) {
      unlink(path.c_str());
      close(fd);
      return FromErrno("allocate", error);
    }
    return std::unique_ptr<SharedSegment>(new SharedSegment(this, *name, fd, bytes));
  }
}

void SegmentPool::Forget(uint64_t bytes, bool was_in_use) {
  {
    std::lock_guard lock(mutex_);
    live_bytes_ -= bytes;
    in_use_ -= was_in_use;
  }
  changed_.notify_all();
}

void SegmentPool::Linger(std::unique_ptr<SharedSegment> segment) {
  std::unique_ptr<SharedSegment> dropped;
  {
    std::lock_guard lock(mutex_);
    in_use_ -= std::exchange(segment->in_use_, false);
    if (stop_) {
      dropped = std::move(segment);
    } else {
      lingering_.push_back({std::chrono::steady_clock::now() + linger_, std::move(segment)});
    }
  }
  changed_.notify_all();
}

void SegmentPool::Watch() {
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), 10);  // of this thread alone
  std::unique_lock lock(mutex_);
  while (!stop_) {
    const SteadyTime now = std::chrono::steady_clock::now();
    std::unique_ptr<SharedSegment> gone;
    if (!lingering_.empty() && lingering_.front().until <= now) {
      gone = std::move(lingering_.front().segment);
      lingering_.pop_front();
    } else if (spare_wanted_ > 0 && spare_expires_ <= now) {
      gone = std::move(spare_);
      spare_wanted_ = 0;
    } else if (spare_wanted_ > 0 && spare_ == nullptr &&
               (in_use_ == 0 || now >= last_created_ + kSpareDelay)) {
      MakeSpare(lock);
      continue;
    } else {
      SteadyTime next = now + std::chrono::hours(1);
      if (!lingering_.empty()) next = std::min(next, lingering_.front().until);
      if (spare_wanted_ > 0) next = std::min(next, spare_expires_);
      if (spare_wanted_ > 0 && spare_ == nullptr)
        next = std::min(next, last_created_ + kSpareDelay);
      changed_.wait_until(lock, next);
      continue;
    }
    lock.unlock();  // its destructor takes the lock
    gone.reset();
    lock.lock();
  }
}

int SegmentPool::RemoveLeftovers() const {
  DIR* folder = opendir(folder_.c_str());
  if (folder == nullptr) return 0;
  int removed = 0;
  while (const dirent* entry = readdir(folder)) {
    if (!IsOurName(entry->d_name)) continue;
    const std::string path = absl::StrCat(folder_, "/", entry->d_name);
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) continue;
    struct stat info {};
    const bool ours = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_uid == geteuid() &&
                      (info.st_mode & 07777) == (S_IRUSR | S_IWUSR);
    // The lock of a dead process is gone with it, whatever its process id is now used for.
    if (ours && flock(fd, LOCK_EX | LOCK_NB) == 0 && unlink(path.c_str()) == 0) ++removed;
    close(fd);
  }
  closedir(folder);
  return removed;
}

uint64_t SegmentPool::live_bytes() const {
  std::lock_guard lock(mutex_);
  return live_bytes_;
}

bool SegmentPool::has_spare() const {
  std::lock_guard lock(mutex_);
  return spare_ != nullptr;
}

int64_t SegmentPool::created() const {
  std::lock_guard lock(mutex_);
  return created_;
}

int64_t SegmentPool::refused() const {
  std::lock_guard lock(mutex_);
  return refused_;
}

}  // namespace sparsegdn::service
