// Checks of a call that the host can make, shared by the backends and the C ABI.
//
// Every function returns INVALID_ARGUMENT with a message "field = got, must be wanted".
#ifndef SPARSEGDN_KERNELS_COMMON_VALIDATE_H_
#define SPARSEGDN_KERNELS_COMMON_VALIDATE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "sparsegdn/gdn.h"

namespace sparsegdn {

inline constexpr int64_t kMaxTokens = int64_t{1} << 21;
inline constexpr int32_t kMaxSeqs = 65536;
// Upper bound of positions, so that sums of positions never overflow.
inline constexpr int64_t kMaxPosition = int64_t{1} << 40;

enum class EntryPoint { kForward, kSelect };

absl::Status ValidateShape(const GdnShape& shape);
absl::Status ValidateLimits(const GdnLimits& limits);

// Everything in `args` that is not behind a pointer: shape, counts, dtypes, strides, and which
// pointers may be null. Valid for host and device pointers alike.
absl::Status ValidateArgs(const GdnForwardArgs& args, EntryPoint entry);

// cu_seqlens and sequences, read through the pointers (host memory). Sets *status (never null) to
// the kStatus* bits that describe the fault.
absl::Status ValidateSequences(const GdnForwardArgs& args, EntryPoint entry, uint32_t* status);

// Number of snapshots of a sequence of `length` tokens from `first_position` on.
int64_t CountSnapshots(int64_t first_position, int64_t length, int64_t snapshot_every);

}  // namespace sparsegdn

#endif  // SPARSEGDN_KERNELS_COMMON_VALIDATE_H_
