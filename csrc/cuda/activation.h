// Activation functions on a GPU.
#pragma once

#include <cstdint>

#include "cuda/element.h"

namespace aura {
namespace cuda {

// The tensors of each, inputs first. gelu_tanh: x, y; swiglu: gate, up, y; sigmoid_gate: gate, x, y. Their backwards:
// dy and the inputs, then the gradients of the inputs.
enum class Activation {
  kGeluTanh,
  kGeluTanhBackward,
  kSwiglu,
  kSwigluBackward,
  kSigmoidGate,
  kSigmoidGateBackward
};

// Rows of contiguous elements, each beginning `stride` elements after the one before.
struct Rows {
  const void* data;
  int64_t stride;
};

struct ActivationRows {
  int64_t rows, width;
  Rows tensors[5];
};

struct ActivationKernels {
  const char* (*run)(Activation, const ActivationRows&, Element, void* stream);
};

ActivationKernels activation_kernels();

}  // namespace cuda
}  // namespace aura
