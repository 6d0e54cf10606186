#include "server/service/memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string_view>

#include "absl/strings/numbers.h"

namespace sparsegdn::service {
namespace {

// The least limit named `file` in the group `path` and above it, below the mount point `mount`. The
// mount point comes last: in a container without a namespace of its own, `path` is the host's and
// not there, while the mount point is the container's group.
int64_t LeastLimit(const std::string& mount, std::string path, const char* file, int64_t least) {
  if (path.find("..") != std::string::npos) path.clear();  // above the namespace's root
  while (true) {
    std::string text;
    int64_t bytes = 0;
    if (std::ifstream in(mount + path + "/" + file);
        in >> text && absl::SimpleAtoi(text, &bytes) && bytes >= 0) {  // "max" is no number
      least = std::min(least, bytes);
    }
    if (path.empty()) return least;
    path.resize(path.rfind('/'));
  }
}

// Whether the comma-separated list has the word.
bool Has(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const size_t end = std::min(list.find(','), list.size());
    if (list.substr(0, end) == word) return true;
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return false;
}

}  // namespace

int64_t PhysicalMemoryBytes() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

int64_t UsableMemoryBytes(int64_t physical_bytes, const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup";
  int64_t least = physical_bytes;
  std::ifstream groups(root + "/proc/self/cgroup");
  // Lines of HIERARCHY:CONTROLLERS:PATH, 0::PATH in version 2.
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos || line.size() == second + 1 || line[second + 1] != '/')
      continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.size() == second + 2 ? "" : line.substr(second + 1);
    if (controllers.empty()) {
      least = LeastLimit(mount, path, "memory.max", least);
    } else if (Has(controllers, "memory")) {
      least = LeastLimit(mount + "/memory", path, "memory.limit_in_bytes", least);
    }
  }
  return least;
}

}  // namespace sparsegdn::service
