// The op table on host memory: FP32 activations over sparsegdn::CpuOps and a GdnBackend.
#ifndef SPARSEGDN_SERVER_MODEL_CPU_OP_TABLE_H_
#define SPARSEGDN_SERVER_MODEL_CPU_OP_TABLE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "server/model/op_table.h"
#include "sparsegdn/gdn.h"

namespace sparsegdn::model {

// `gdn` null stands for CreateCpuBackend with the same threads. num_threads 0: this process's
// cores.
absl::StatusOr<std::unique_ptr<OpTable>> CreateCpuOpTable(int num_threads,
                                                          std::unique_ptr<GdnBackend> gdn);

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_CPU_OP_TABLE_H_
