// What the CUDA library hands to the operators: one table of functions. No header of torch and none of CUDA, so that
// any compiler reads it.
//
// Every function queues its work on `stream` (a cudaStream_t) of the current device and returns at once: null when it
// is queued, else why it is not, a string that is never freed. Pointers are to the device's memory.
#pragma once

#include <cstdint>

#include "cuda/activation.h"
#include "cuda/attention.h"
#include "cuda/columns.h"
#include "cuda/loss.h"
#include "cuda/norms.h"
#include "cuda/rotary.h"
#include "cuda/total_norm.h"

namespace aura {
namespace cuda {

struct Kernels {
  // The current stream of a device, and whether these kernels also take tensors in host memory (tests only).
  void* (*stream)(int device);
  bool emulated;
  NormKernels norms;
  AttentionKernels attention;
  ActivationKernels activation;
  RotaryKernels rotary;
  LossKernels loss;
  ColumnKernels columns;
  TotalNormKernels total_norm;
};

// The table of the kernels that the caller is linked with: the GPU's, or emulated ones.
inline Kernels all_kernels(void* (*stream)(int device), bool emulated) {
  return {stream,           emulated,       norm_kernels(),   attention_kernels(), activation_kernels(),
          rotary_kernels(), loss_kernels(), column_kernels(), total_norm_kernels()};
}

}  // namespace cuda
}  // namespace aura
