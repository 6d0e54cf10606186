// Sizes that follow from the resident model, and the element types on the wire.
#ifndef SPARSEGDN_SERVER_ENGINE_LAYOUT_H_
#define SPARSEGDN_SERVER_ENGINE_LAYOUT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/engine/types.h"
#include "server/model/model_runner.h"

namespace sparsegdn::engine {

// Immutable bytes that frames, kept snapshots and running requests share.
using Blob = std::shared_ptr<const std::string>;

constexpr int64_t ElementBytes(ExportDType dtype) {
  switch (dtype) {
    case ExportDType::kBF16:
      return 2;
    case ExportDType::kF8E4M3:
      return 1;
    case ExportDType::kF32:
    case ExportDType::kI32:
      break;
  }
  return 4;
}

constexpr ExportDType ExportOf(DType dtype) {
  return dtype == DType::kBF16 ? ExportDType::kBF16 : ExportDType::kF32;
}

struct Layout {
  explicit Layout(const model::ModelInfo& info)
      : compute(ExportOf(info.compute_dtype)),
        heads(info.gdn.num_v_heads),
        dim_k(info.gdn.head_dim_k),
        dim_v(info.gdn.head_dim_v),
        pairs(info.gdn.num_k_heads),
        conv_channels(info.conv_channels),
        num_kv_heads(info.num_kv_heads),
        attention_head_dim(info.attention_head_dim) {
    for (size_t i = 0; i < info.layers.size(); ++i) {
      (info.layers[i] == model::LayerKind::kLinear ? linear_layers : full_layers)
          .push_back(static_cast<int32_t>(i));
    }
    num_layers = static_cast<int32_t>(info.layers.size());
  }

  int64_t head_elements() const { return dim_k * dim_v; }
  int64_t state_elements() const { return heads * head_elements(); }
  int64_t conv_elements() const { return conv_channels * 4; }
  int64_t kv_row_elements() const { return num_kv_heads * attention_head_dim; }
  // Bytes of one row of one layer's key (or value) in the compute dtype.
  int64_t kv_row_bytes() const { return kv_row_elements() * ElementBytes(compute); }
  // A kept snapshot: states FP32, conv and KV in the compute dtype.
  int64_t kept_bytes(int64_t position) const {
    const int64_t linear = static_cast<int64_t>(linear_layers.size());
    const int64_t full = static_cast<int64_t>(full_layers.size());
    return linear * (state_elements() * 4 + conv_elements() * ElementBytes(compute)) +
           full * 2 * kv_row_bytes() * position;
  }

  ExportDType compute;
  int64_t heads, dim_k, dim_v, pairs, conv_channels, num_kv_heads, attention_head_dim;
  int32_t num_layers = 0;
  std::vector<int32_t> linear_layers, full_layers;
};

}  // namespace sparsegdn::engine

#endif  // SPARSEGDN_SERVER_ENGINE_LAYOUT_H_
