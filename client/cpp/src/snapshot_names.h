// Spellings of the wire's enums in files and on the command line.
#ifndef SPARSEGDN_CLIENT_SRC_SNAPSHOT_NAMES_H_
#define SPARSEGDN_CLIENT_SRC_SNAPSHOT_NAMES_H_

#include <string>

#include "sparsegdn/v1/prefill.pb.h"

namespace sparsegdn::client {

// "recurrent_state", "key", ...: the enum's name without its prefix, lower case.
std::string KindName(v1::TensorKind kind);
v1::TensorKind KindOf(const std::string& name);  // UNSPECIFIED when unknown

// "F32", "BF16", "F8_E4M3", "I32": as safetensors spells them.
std::string FileDType(v1::DType dtype);
v1::DType FileDTypeOf(const std::string& name);

// "key_major", "value_major"; "" for UNSPECIFIED.
std::string StateLayoutName(v1::StateLayout layout);
v1::StateLayout StateLayoutOf(const std::string& name);

// "four_columns", "three_columns"; "" for UNSPECIFIED.
std::string ConvLayoutName(v1::ConvLayout layout);
v1::ConvLayout ConvLayoutOf(const std::string& name);

}  // namespace sparsegdn::client

#endif  // SPARSEGDN_CLIENT_SRC_SNAPSHOT_NAMES_H_
