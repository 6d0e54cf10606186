#include "server/model/block_runs.h"

#include <algorithm>
#include <iterator>

namespace sparsegdn::model {

BlockRuns::BlockRuns(int64_t blocks) {
  if (blocks > 0) ReturnRun(0, blocks);
}

std::vector<int32_t> BlockRuns::Take(int64_t count) {
  std::vector<int32_t> blocks;
  blocks.reserve(static_cast<size_t>(count));
  const auto longer = [](const auto& a, const auto& b) { return a.second < b.second; };
  auto best = runs_.end();
  for (auto run = runs_.begin(); run != runs_.end(); ++run) {
    if (run->second >= count && (best == runs_.end() || run->second < best->second)) best = run;
  }
  if (best != runs_.end()) TakeFrom(best, count, blocks);
  while (std::ssize(blocks) < count) {
    const auto longest = std::max_element(runs_.begin(), runs_.end(), longer);
    TakeFrom(longest, std::min(longest->second, count - std::ssize(blocks)), blocks);
  }
  return blocks;
}

void BlockRuns::TakeFrom(std::map<int32_t, int64_t>::iterator run, int64_t count,
                         std::vector<int32_t>& blocks) {
  const auto [first, length] = *run;
  runs_.erase(run);
  for (int64_t i = 0; i < count; ++i) blocks.push_back(first + static_cast<int32_t>(i));
  if (length > count) runs_.emplace(first + static_cast<int32_t>(count), length - count);
  free_ -= count;
}

void BlockRuns::Return(const std::vector<int32_t>& blocks) {
  for (size_t i = 0; i < blocks.size();) {
    size_t end = i + 1;
    while (end < blocks.size() && blocks[end] == blocks[end - 1] + 1) ++end;
    ReturnRun(blocks[i], static_cast<int64_t>(end - i));
    i = end;
  }
}

void BlockRuns::ReturnRun(int32_t first, int64_t length) {
  free_ += length;
  auto next = runs_.upper_bound(first);
  if (next != runs_.end() && next->first == first + length) {
    length += next->second;
    next = runs_.erase(next);
  }
  if (next != runs_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == first) {
      previous->second += length;
      return;
    }
  }
  runs_.emplace(first, length);
}

bool AreConsecutive(const std::vector<int32_t>& blocks) {
  return std::adjacent_find(blocks.begin(), blocks.end(), [](int32_t a, int32_t b) {
           return b != a + 1;
         }) == blocks.end();
}

}  // namespace sparsegdn::model
