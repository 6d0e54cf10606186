#include "kernels/cpu/task_list.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/scratch.h"

namespace sparsegdn::cpu {
namespace {

struct Split {
  int head_parts = 1;
  int panel_parts = 1;
};

// Shared work of a pair (the two Gram matrices) in units of one value head's work.
constexpr double kSharedWork = 0.25;

double Makespan(double pairs, const TaskDims& dims, Split s, int threads) {
  const int heads = (dims.ratio + s.head_parts - 1) / s.head_parts;
  const int panels = (dims.panels + s.panel_parts - 1) / s.panel_parts;
  const double task = kSharedWork + heads * static_cast<double>(panels) / dims.panels;
  return std::ceil(pairs * s.head_parts * s.panel_parts / threads) * task;
}

Split ChooseSplit(double pairs, const TaskDims& dims, int threads) {
  Split best;
  double least = Makespan(pairs, dims, best, threads);
  const auto consider = [&](Split s) {
    const double makespan = Makespan(pairs, dims, s, threads);
    if (makespan < 0.95 * least) {
      best = s;
      least = makespan;
    }
  };
  for (int parts = 2; parts <= dims.ratio; ++parts) consider({parts, 1});
  for (int parts = 2; parts <= dims.panels; ++parts) consider({dims.ratio, parts});
  return best;
}

}  // namespace

std::vector<PairTask> MakeTasks(const GdnForwardArgs& args, int num_threads) {
  const TaskDims dims(args.shape);
  std::vector<int32_t> order(args.num_seqs);
  int64_t longest = 1, total = 0;
  for (int32_t i = 0; i < args.num_seqs; ++i) {
    order[i] = i;
    const int64_t length = args.cu_seqlens[i + 1] - args.cu_seqlens[i];
    longest = std::max(longest, length);
    total += length;
  }
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return args.cu_seqlens[a + 1] - args.cu_seqlens[a] >
           args.cu_seqlens[b + 1] - args.cu_seqlens[b];
  });
  const double pairs = args.shape.num_k_heads * std::max(1.0, static_cast<double>(total) / longest);
  const Split split = ChooseSplit(pairs, dims, num_threads);
  const int heads = (dims.ratio + split.head_parts - 1) / split.head_parts;
  const int panels = (dims.panels + split.panel_parts - 1) / split.panel_parts;
  std::vector<PairTask> tasks;
  for (int32_t i : order) {
    for (int32_t p = 0; p < args.shape.num_k_heads; ++p) {
      for (int h = 0; h < dims.ratio; h += heads) {
        for (int n = 0; n < dims.panels; n += panels) {
          tasks.push_back(
              {i, p, h, std::min(h + heads, dims.ratio), n, std::min(n + panels, dims.panels)});
        }
      }
    }
  }
  return tasks;
}

}  // namespace sparsegdn::cpu
