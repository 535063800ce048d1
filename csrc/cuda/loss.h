// The cross-entropy of loss.h on a GPU.
#pragma once

#include <cstdint>

#include "../loss.h"  // not this file, which is what quotes alone would find
#include "cuda/element.h"

namespace aura {
namespace cuda {

struct LossKernels {
  // All rows. A target that is neither in [0, classes) nor ignore_index fails an assertion on the device.
  const char* (*cross_entropy)(const CrossEntropyRows&, int64_t rows, Element, void* stream);
};

LossKernels loss_kernels();

}  // namespace cuda
}  // namespace aura
