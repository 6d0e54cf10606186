// A pack of sequences as plain host vectors, and running it on a device.
#ifndef SPARSEGDN_TESTS_UNIT_KERNELS_TEST_PACK_H_
#define SPARSEGDN_TESTS_UNIT_KERNELS_TEST_PACK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/reference/gdn_reference.h"
#include "sparsegdn/gdn.h"
#include "tests/unit/kernels/test_device.h"

namespace sparsegdn::test {

// Full size normally; a quarter, at least `least`, in sanitizer builds, which are 10 to 50 times
// slower. Cases keep their names and every property.
int64_t Scaled(int64_t tokens, int64_t least = 1);

Budget DenseBudget();
Budget RetentionBudget(double retention);

struct Pack {
  GdnShape shape{2, 4, 32, 32};
  DType dtype = DType::kF32;  // q, k, v
  DType gate_dtype = DType::kF32;
  DType beta_dtype = DType::kF32;
  DType o_dtype = DType::kF32;
  std::vector<int32_t> cu_seqlens{0};
  std::vector<SequenceParams> sequences;
  // Values as fp32, exactly representable in the dtypes above after RoundInputs.
  std::vector<float> q, k;      // [tokens, Hk, Dk]
  std::vector<float> v;         // [tokens, Hv, Dv]
  std::vector<float> log_gate;  // [tokens, Hv]
  std::vector<float> beta;      // [tokens, Hv]
  std::vector<uint8_t> mask;    // [tokens, Hk]; empty: selection
  bool normalize_qk = false;
  float scale = 0.0f;
  std::vector<float> initial;  // [slots, Hv, Dk, Dv] whatever the layout
  StateLayout initial_layout = StateLayout::kKeyMajor;
  StateLayout final_layout = StateLayout::kKeyMajor;
  bool in_place = false;  // the final pool is the initial one
  int64_t snapshot_slots = 0;

  int64_t tokens() const { return cu_seqlens.back(); }
  int32_t num_seqs() const { return static_cast<int32_t>(sequences.size()); }
  int64_t state_size() const {
    return int64_t{shape.num_v_heads} * shape.head_dim_k * shape.head_dim_v;
  }
  // Appends a sequence at position 0 whose prompt ends with it; its final state goes to the slot
  // of its index.
  SequenceParams& Add(int64_t length, const Budget& budget);
  // Appends a slot to `initial` with N(0, 0.1^2) entries and makes the last sequence start there.
  void AddInitialState(uint32_t seed);
};

// Unit q and k rows (unless normalize_qk: N(0, 1)), v like N(0, 1), beta = sigmoid(N(0, 1)),
// log_gate by value head: logsigmoid(N(0, 1) + 3), exactly 0, near -10, in turn.
void FillRandom(Pack* pack, uint32_t seed);
// Rounds every input to its dtype.
void RoundInputs(Pack* pack);

// The pack of rows [begin, end) of sequence `index` alone, at the same absolute positions.
Pack Extract(const Pack& pack, int32_t index, int64_t begin, int64_t end);

struct PackResult {
  absl::Status status;
  std::vector<float> o;            // widened, [tokens, Hv, Dv]
  std::vector<float> states;       // [num_seqs slots, Hv, Dk, Dv] whatever the layout
  std::vector<float> raw_states;   // as the device wrote them
  std::vector<float> snapshots;    // [snapshot_slots, Hv, Dk, Dv] whatever the layout
  std::vector<uint8_t> mask;       // [tokens, Hk]
  std::vector<int32_t> selected;   // [num_seqs, Hk]
  std::vector<int32_t> nonfinite;  // [num_seqs]
  uint32_t status_word = 0;
  bool guards_intact = false;  // guard bands, rows past the end, gaps between rows of o
};

// Uploads with rows of NaN past the end and gaps of NaN between rows, runs, downloads.
PackResult RunPack(TestDevice* device, GdnBackend* backend, const Pack& pack);
PackResult RunPack(TestDevice* device, const Pack& pack);

// The fp64 view of one sequence under `mask` (its rows of the pack's mask).
reference::Sequence ReferenceInput(const Pack& pack, int32_t index,
                                   const std::vector<uint8_t>& pack_mask);

// Largest relative L2 error over value heads of two [rows, Hv, width] arrays.
double WorstHeadError(const float* got, const double* want, int64_t rows, int64_t heads,
                      int64_t width);

// Expects outputs, final states and snapshots of every sequence within the device's tolerance of
// the fp64 recurrence under the mask that the run used.
void ExpectMatchesReference(TestDevice* device, const Pack& pack, const PackResult& result,
                            const std::string& what, double tolerance = 0.0);

}  // namespace sparsegdn::test

#endif  // SPARSEGDN_TESTS_UNIT_KERNELS_TEST_PACK_H_
