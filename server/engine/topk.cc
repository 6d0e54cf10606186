#include "server/engine/topk.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace sparsegdn::engine {
namespace {

struct Candidate {
  float value;
  int32_t id;
};

bool Better(const Candidate& a, const Candidate& b) {
  return a.value != b.value ? a.value > b.value : a.id < b.id;
}

}  // namespace

std::optional<int32_t> Greedy(std::span<const float> logits) {
  std::optional<int32_t> best;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) continue;
    if (!best || logits[i] > logits[*best]) best = static_cast<int32_t>(i);
  }
  return best;
}

void TopK(std::span<const float> logits, std::span<int32_t> ids, std::span<float> values) {
  const size_t k = std::min(ids.size(), logits.size());
  if (k == 0) return;
  std::vector<Candidate> heap;  // the worst of the best k on top
  heap.reserve(k);
  for (size_t i = 0; i < logits.size(); ++i) {
    const float value = std::isnan(logits[i]) ? -std::numeric_limits<float>::infinity() : logits[i];
    if (heap.size() < k) {
      heap.push_back({value, static_cast<int32_t>(i)});
      if (heap.size() == k) std::make_heap(heap.begin(), heap.end(), Better);
    } else if (value > heap.front().value) {
      // A tie with the worst loses, because ids ascend.
      std::pop_heap(heap.begin(), heap.end(), Better);
      heap.back() = {value, static_cast<int32_t>(i)};
      std::push_heap(heap.begin(), heap.end(), Better);
    }
  }
  std::sort(heap.begin(), heap.end(), Better);
  for (size_t i = 0; i < k; ++i) {
    ids[i] = heap[i].id;
    values[i] = heap[i].value;
  }
}

}  // namespace sparsegdn::engine
