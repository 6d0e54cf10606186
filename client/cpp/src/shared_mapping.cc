#include "src/shared_mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "src/errors.h"

namespace sparsegdn::client {
namespace {

constexpr std::string_view kPrefix = "/sparsegdn-";
constexpr size_t kHexDigits = 32;
constexpr uint64_t kAlign = 64;
constexpr uint64_t kFaultAround = 64 << 10;  // of Linux

// A name from the wire opens nothing but a segment of this service.
bool IsSegmentName(std::string_view name) {
  return name.size() == kPrefix.size() + kHexDigits && name.substr(0, kPrefix.size()) == kPrefix &&
         name.find_first_not_of("0123456789abcdef", kPrefix.size()) == name.npos;
}

absl::Status Invalid(const std::string& what) {
  return DataLoss("MANIFEST_INVALID", "shared_memory",
                  absl::StrCat("manifest: shared_memory ", what));
}

absl::Status CheckPlaces(const v1::Manifest& manifest) {
  const v1::SharedMemory& shared = manifest.shared_memory();
  if (!IsSegmentName(shared.name())) return Invalid("names no segment of this service");
  if (shared.tensor_offsets_size() != manifest.tensors_size()) {
    return Invalid(absl::StrCat("has ", shared.tensor_offsets_size(), " offsets for ",
                                manifest.tensors_size(), " tensors"));
  }
  uint64_t end = 0;
  for (int i = 0; i < manifest.tensors_size(); ++i) {
    const uint64_t offset = shared.tensor_offsets(i), bytes = manifest.tensors(i).bytes();
    if (offset % kAlign != 0 || offset < end || offset > shared.bytes() ||
        bytes > shared.bytes() - offset) {
      return Invalid(absl::StrCat("puts tensors[", i, "] at ", offset, ", wanted a multiple of ",
                                  kAlign, " from ", end, " within ", shared.bytes()));
    }
    end = offset + bytes;
  }
  return absl::OkStatus();
}

absl::Status Unavailable(const std::string& name, const std::string& why) {
  return MakeError(absl::StatusCode::kFailedPrecondition, kSharedMemoryUnavailable, "",
                   absl::StrCat("cannot map the server's shared memory ", name, ": ", why,
                                "; client and server must share /dev/shm and the user"));
}

}  // namespace

absl::StatusOr<std::shared_ptr<SharedMapping>> SharedMapping::Open(const v1::Manifest& manifest) {
  if (absl::Status status = CheckPlaces(manifest); !status.ok()) return status;
  const v1::SharedMemory& shared = manifest.shared_memory();
  const int fd = shm_open(shared.name().c_str(), O_RDONLY | O_NOFOLLOW, 0);
  if (fd < 0) return Unavailable(shared.name(), std::strerror(errno));
  struct stat info {};
  const bool sized = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) &&
                     static_cast<uint64_t>(info.st_size) >= shared.bytes();
  if (!sized) {
    close(fd);
    return Invalid(absl::StrCat("claims ", shared.bytes(), " bytes, it has ", info.st_size));
  }
  const uint64_t size = shared.bytes() == 0 ? 1 : shared.bytes();
  void* data = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  const int error = errno;
  close(fd);
  if (data == MAP_FAILED) return Unavailable(shared.name(), std::strerror(error));
  return std::shared_ptr<SharedMapping>(new SharedMapping(static_cast<const uint8_t*>(data), size));
}

SharedMapping::~SharedMapping() {
  stop_ = true;
  populate_.join();
  munmap(const_cast<uint8_t*>(data_), size_);
}

// One read in each stretch of pages that the kernel enters at one fault, from the end: the
// verifying thread comes from the front and enters its pages itself. (MADV_POPULATE_READ takes half
// as long again: it goes page by page, and the two threads wait for each other.)
void SharedMapping::Populate() {
  volatile uint8_t sink = 0;
  for (uint64_t end = size_; end > 0 && !stop_;) {
    end = (end - 1) / kFaultAround * kFaultAround;
    sink = data_[end];
  }
  static_cast<void>(sink);
}

}  // namespace sparsegdn::client
