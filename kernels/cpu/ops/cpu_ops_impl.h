// What the functions of CpuOps share: the threads and a scratch buffer for each.
#ifndef SPARSEGDN_KERNELS_CPU_OPS_CPU_OPS_IMPL_H_
#define SPARSEGDN_KERNELS_CPU_OPS_CPU_OPS_IMPL_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/cpu/thread_pool.h"
#include "sparsegdn/cpu_ops.h"

namespace sparsegdn {

struct CpuOps::Impl {
  explicit Impl(int num_threads) : pool(num_threads), scratch(num_threads) {}

  // A buffer of this thread, valid until its next call; grows to the largest request and stays.
  float* Scratch(int thread, int64_t elements) {
    if (static_cast<int64_t>(scratch[thread].size()) < elements) scratch[thread].resize(elements);
    return scratch[thread].data();
  }

  // body(begin, end, thread) over [0, count) in pieces of at most `grain`.
  void ForRanges(int64_t count, int64_t grain,
                 const std::function<void(int64_t, int64_t, int)>& body) {
    pool.Run((count + grain - 1) / grain, [&](int64_t i, int thread) {
      body(i * grain, std::min(count, (i + 1) * grain), thread);
    });
  }

  cpu::ThreadPool pool;
  std::vector<std::vector<float>> scratch;
};

namespace cpu_ops {

inline const float* RowOf(const ConstRows& rows, int64_t i) {
  return static_cast<const float*>(rows.data) + i * rows.stride;
}
inline float* RowOf(const Rows& rows, int64_t i) {
  return static_cast<float*>(rows.data) + i * rows.stride;
}

// A run of consecutive tokens of one sequence.
struct Segment {
  int32_t seq;
  int64_t begin, end;  // within the sequence
};
std::vector<Segment> SegmentsOf(const PackArgs& pack, int64_t tokens);

}  // namespace cpu_ops
}  // namespace sparsegdn

#endif  // SPARSEGDN_KERNELS_CPU_OPS_CPU_OPS_IMPL_H_
