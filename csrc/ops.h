// What the operators of every family share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>

#include "cpu/dropout.h"

namespace aura {

// The number of the tensor's element type in the tables of kernels.
inline int kernel_type(const at::Tensor& t, const char* op) {
  switch (t.scalar_type()) {
    case at::kFloat: return 0;
    case at::kBFloat16: return 1;
    case at::kDouble: return 2;
    default: TORCH_CHECK(false, op, ": dtype ", t.scalar_type(), " is not float32, bfloat16 or float64");
  }
}

// `seed`: int64, one element, on the CPU; needed when probability > 0.
inline Dropout dropout_of(double probability, const std::optional<at::Tensor>& seed) {
  TORCH_CHECK(probability >= 0.0 && probability < 1.0, "dropout ", probability, " is not in [0, 1)");
  Dropout dropout;
  dropout.threshold = static_cast<uint32_t>(std::lround(probability * 65536));
  TORCH_CHECK(dropout.threshold < 65536, "dropout ", probability, " leaves nothing");
  if (dropout.threshold == 0) return dropout;
  TORCH_CHECK(seed.has_value() && seed->scalar_type() == at::kLong && seed->numel() == 1 && seed->device().is_cpu(),
              "dropout needs a seed: an int64 tensor of one element on the CPU");
  dropout.seed = static_cast<uint64_t>(*seed->const_data_ptr<int64_t>());
  return dropout;
}

}  // namespace aura
