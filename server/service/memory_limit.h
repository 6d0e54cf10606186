// How much memory this process may use, in a container or not.
#ifndef SPARSEGDN_SERVER_SERVICE_MEMORY_LIMIT_H_
#define SPARSEGDN_SERVER_SERVICE_MEMORY_LIMIT_H_

#include <cstdint>
#include <string>

namespace sparsegdn::service {

int64_t PhysicalMemoryBytes();

// The least of `physical_bytes` and of the limits of this process's control group and of those
// above it that can be seen: memory.max of cgroup v2, memory.limit_in_bytes of v1. What is missing
// or no number is no limit. Reads `root`/proc/self/cgroup and below `root`/sys/fs/cgroup.
int64_t UsableMemoryBytes(int64_t physical_bytes, const std::string& root = "");

}  // namespace sparsegdn::service

#endif  // SPARSEGDN_SERVER_SERVICE_MEMORY_LIMIT_H_
