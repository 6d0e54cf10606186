#include "server/model/random_weights.h"

#include <cmath>

namespace sparsegdn::model {
namespace {

// FNV-1a, so that every tensor has a stream of its own.
uint64_t HashName(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3u;
  return hash;
}

// Standard deviation of a tensor. Inputs of a projection have unit variance after their norm, so
// 1 / sqrt(fan_in) keeps outputs at unit variance; what is added to the residual stream is scaled
// down by its 2 L summands. Logits get a spread of about 2, as trained models have.
double ScaleOf(const TensorSpec& spec, size_t num_layers) {
  const double fan_in = static_cast<double>(spec.shape.back());
  switch (spec.role) {
    case WeightRole::kEmbedding:
      return 2.0 / std::sqrt(fan_in);
    case WeightRole::kZeroCentredNorm:
    case WeightRole::kGateNorm:
      return 0.1;
    case WeightRole::kProjection:
      return 1.0 / std::sqrt(fan_in);
    case WeightRole::kResidualOut:
      return 1.0 / std::sqrt(fan_in * 2.0 * static_cast<double>(num_layers));
    case WeightRole::kConv:
      return 0.5;  // four taps
    case WeightRole::kALog:
    case WeightRole::kDtBias:
      break;
  }
  return 1.0;
}

}  // namespace

WeightStream::WeightStream(const TensorSpec& spec, size_t num_layers, uint64_t seed)
    : role_(spec.role), scale_(ScaleOf(spec, num_layers)), state_(HashName(spec.name) ^ seed) {
  state_ = Next() ^ (seed * 0x9e3779b97f4a7c15u);
}

uint64_t WeightStream::Next() {
  state_ += 0x9e3779b97f4a7c15u;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

double WeightStream::Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }

double WeightStream::Normal() {
  // The sum of four uniform 16-bit numbers: near enough to a normal one, and exact.
  const uint64_t bits = Next();
  const int64_t sum = static_cast<int64_t>((bits & 0xffff) + ((bits >> 16) & 0xffff) +
                                           ((bits >> 32) & 0xffff) + (bits >> 48));
  constexpr double kSqrt3 = 1.7320508075688772;
  return (static_cast<double>(sum) - 2.0 * 65535.0) * (kSqrt3 / 65536.0);
}

void WeightStream::Fill(std::span<float> out) {
  for (float& value : out) {
    double drawn = 0.0;
    switch (role_) {
      case WeightRole::kALog:
        drawn = std::log(0.01 + Uniform() * (16.0 - 0.01));
        break;
      case WeightRole::kDtBias: {
        // softplus(dt_bias) = dt
        const double dt = std::exp(std::log(0.001) + Uniform() * std::log(0.1 / 0.001));
        drawn = dt + std::log(-std::expm1(-dt));
        break;
      }
      case WeightRole::kGateNorm:
        drawn = 1.0 + Normal() * scale_;
        break;
      default:
        drawn = Normal() * scale_;
    }
    value = static_cast<float>(drawn);
  }
}

}  // namespace sparsegdn::model
