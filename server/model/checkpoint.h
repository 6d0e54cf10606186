// A checkpoint folder opened for reading: shards mapped, every text tensor found and checked.
//
// What counts as text: everything but the vision tower ("model.visual.", "visual.") and the
// multi-token-prediction head ("mtp."), which are skipped. A text tensor that the configuration
// does not call for is an error, because a model with a weight that is not used computes something
// else; the one exception is lm_head.weight beside a tied embedding, which is skipped with a
// warning, as the reference does.
#ifndef SPARSEGDN_SERVER_MODEL_CHECKPOINT_H_
#define SPARSEGDN_SERVER_MODEL_CHECKPOINT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/config.h"
#include "server/model/files.h"
#include "server/model/weight_specs.h"
#include "sparsegdn/types.h"

namespace sparsegdn::model {

inline constexpr size_t kMaxIndexBytes = size_t{64} << 20;
inline constexpr size_t kMaxShards = 4096;

// A tensor's bytes in the mapped file, row-major, of any alignment.
struct HostTensor {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::span<const uint8_t> bytes;

  int64_t elements() const;
  // Element i widened to FP32.
  float At(int64_t i) const;
};

// The name in the header of a DType: "F32", "BF16", "F16".
const char* SafetensorsDTypeName(DType dtype);

class Checkpoint {
 public:
  // Reads `dir`/model.safetensors.index.json, or `dir`/model.safetensors when there is no index.
  // NOT_FOUND when neither is there. INVALID_ARGUMENT names file or tensor, got, wanted: a header
  // or index that does not parse, a tensor that is missing, unknown, in two places, of a wrong
  // shape or of a dtype other than F32, BF16, F16.
  static absl::StatusOr<Checkpoint> Open(const std::string& dir, const ModelConfig& config);

  // The tensor of a canonical name, handed out once. INTERNAL for a second time or a name that the
  // configuration does not call for: the graph and TextTensors disagree.
  absl::StatusOr<HostTensor> Take(const std::string& name);

  // INTERNAL naming a tensor that nobody took.
  absl::Status CheckAllTaken() const;

  // By canonical name, bytewise sorted.
  const std::map<std::string, HostTensor>& tensors() const { return tensors_; }
  // Shard file names, sorted, without the folder.
  const std::vector<std::string>& files() const { return files_; }
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  absl::Status AddShard(const std::string& dir, const std::string& file,
                        const std::map<std::string, std::string>* route);
  absl::Status Check(const ModelConfig& config);

  std::vector<std::unique_ptr<MappedFile>> shards_;
  std::map<std::string, HostTensor> tensors_;
  std::set<std::string> taken_;
  std::vector<std::string> files_;
  std::vector<std::string> warnings_;
};

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_CHECKPOINT_H_
