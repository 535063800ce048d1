// The rotary positions of rotary.h on a GPU.
#pragma once

#include <cstdint>

#include "../rotary.h"  // not this file, which is what quotes alone would find
#include "cuda/element.h"

namespace aura {
namespace cuda {

struct RotaryKernels {
  // All rows; cosine and sine are float.
  const char* (*rotary)(const RotaryRows&, int64_t rows, Element, void* stream);
};

RotaryKernels rotary_kernels();

}  // namespace cuda
}  // namespace aura
