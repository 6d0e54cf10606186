// Free blocks of the attention cache as runs of consecutive ones, so that a sequence's keys lie
// side by side wherever that is possible.
#ifndef SPARSEGDN_SERVER_MODEL_BLOCK_RUNS_H_
#define SPARSEGDN_SERVER_MODEL_BLOCK_RUNS_H_

#include <cstdint>
#include <map>
#include <vector>

namespace sparsegdn::model {

class BlockRuns {
 public:
  explicit BlockRuns(int64_t blocks = 0);

  int64_t free() const { return free_; }
  // `count` blocks, at most free(). Ascending and consecutive when a run is long enough, taken from
  // the shortest such run; else from the longest runs first.
  std::vector<int32_t> Take(int64_t count);
  // What an earlier Take returned.
  void Return(const std::vector<int32_t>& blocks);

 private:
  void TakeFrom(std::map<int32_t, int64_t>::iterator run, int64_t count,
                std::vector<int32_t>& blocks);
  void ReturnRun(int32_t first, int64_t length);

  std::map<int32_t, int64_t> runs_;  // first block to length; never adjacent
  int64_t free_ = 0;
};

// Whether each block is the one after its predecessor.
bool AreConsecutive(const std::vector<int32_t>& blocks);

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_BLOCK_RUNS_H_
