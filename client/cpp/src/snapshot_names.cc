#include "src/snapshot_names.h"

#include <algorithm>
#include <cctype>

namespace sparsegdn::client {
namespace {

std::string Lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

std::string Upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return text;
}

// "TENSOR_KIND_KEY" without "TENSOR_KIND_", lower case; "" for UNSPECIFIED and unknown values.
std::string Short(const std::string& name, const std::string& prefix, int value) {
  return value == 0 || name.size() < prefix.size() ? "" : Lower(name.substr(prefix.size()));
}

}  // namespace

std::string KindName(v1::TensorKind kind) {
  return Short(v1::TensorKind_Name(kind), "TENSOR_KIND_", kind);
}

v1::TensorKind KindOf(const std::string& name) {
  v1::TensorKind kind = v1::TENSOR_KIND_UNSPECIFIED;
  v1::TensorKind_Parse("TENSOR_KIND_" + Upper(name), &kind);
  return kind;
}

std::string FileDType(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_FP32:
      return "F32";
    case v1::DTYPE_BF16:
      return "BF16";
    case v1::DTYPE_FP8_E4M3:
      return "F8_E4M3";
    case v1::DTYPE_INT32:
      return "I32";
    default:
      return "";
  }
}

v1::DType FileDTypeOf(const std::string& name) {
  for (v1::DType dtype : {v1::DTYPE_FP32, v1::DTYPE_BF16, v1::DTYPE_FP8_E4M3, v1::DTYPE_INT32}) {
    if (FileDType(dtype) == name) return dtype;
  }
  return v1::DTYPE_UNSPECIFIED;
}

std::string StateLayoutName(v1::StateLayout layout) {
  return Short(v1::StateLayout_Name(layout), "STATE_LAYOUT_", layout);
}

v1::StateLayout StateLayoutOf(const std::string& name) {
  v1::StateLayout layout = v1::STATE_LAYOUT_UNSPECIFIED;
  v1::StateLayout_Parse("STATE_LAYOUT_" + Upper(name), &layout);
  return layout;
}

std::string ConvLayoutName(v1::ConvLayout layout) {
  return Short(v1::ConvLayout_Name(layout), "CONV_LAYOUT_", layout);
}

v1::ConvLayout ConvLayoutOf(const std::string& name) {
  v1::ConvLayout layout = v1::CONV_LAYOUT_UNSPECIFIED;
  v1::ConvLayout_Parse("CONV_LAYOUT_" + Upper(name), &layout);
  return layout;
}

}  // namespace sparsegdn::client
