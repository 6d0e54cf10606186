// The stream of random weights of one tensor.
#ifndef SPARSEGDN_SERVER_MODEL_RANDOM_WEIGHTS_H_
#define SPARSEGDN_SERVER_MODEL_RANDOM_WEIGHTS_H_

#include <cstdint>
#include <span>

#include "server/model/weight_specs.h"

namespace sparsegdn::model {

// Fills spans in order. Only integer arithmetic and correctly rounded operations decide the drawn
// bits of the large tensors, so they do not depend on a mathematics library.
class WeightStream {
 public:
  WeightStream(const TensorSpec& spec, size_t num_layers, uint64_t seed);
  void Fill(std::span<float> out);

 private:
  uint64_t Next();   // splitmix64
  double Uniform();  // [0, 1)
  double Normal();   // mean 0, variance 1, bounded by 2 sqrt(3)

  WeightRole role_;
  double scale_ = 1.0;
  uint64_t state_;
};

}  // namespace sparsegdn::model

#endif  // SPARSEGDN_SERVER_MODEL_RANDOM_WEIGHTS_H_
