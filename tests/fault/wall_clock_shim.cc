// Preloaded into a server under test: the wall clock jumps by CLOCK_JUMP_SECONDS as soon as the
// file CLOCK_JUMP_FILE exists. The monotonic clock is left alone.
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <ctime>

namespace {

int64_t Jump() {
  const char* file = std::getenv("CLOCK_JUMP_FILE");
  const char* seconds = std::getenv("CLOCK_JUMP_SECONDS");
  return file && seconds && access(file, F_OK) == 0 ? std::atol(seconds) : 0;
}

}  // namespace

extern "C" int clock_gettime(clockid_t clock, timespec* out) noexcept {
  const auto rc = static_cast<int>(syscall(SYS_clock_gettime, clock, out));
  if (rc == 0 && clock == CLOCK_REALTIME) out->tv_sec += Jump();
  return rc;
}

extern "C" int gettimeofday(timeval* out, void*) noexcept {
  timespec now;
  if (clock_gettime(CLOCK_REALTIME, &now) != 0) return -1;
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}
