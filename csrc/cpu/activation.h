// Activation functions: what the kernels are given.
#pragma once

#include <cstdint>

namespace aura {

// Functions by element type: float, bfloat16, double. Everything is contiguous.
struct ActivationKernels {
  // y = GELU(x) in its tanh form, and dx from dy; `count` elements.
  void (*gelu_tanh[3])(const void* x, void* y, int64_t count);
  void (*gelu_tanh_backward[3])(const void* dy, const void* x, void* dx, int64_t count);
  // y [rows, width] = SiLU(gate) * up, where a row of x [rows, 2 width] holds gate, then up; dx is laid out as x.
  void (*swiglu[3])(const void* x, void* y, int64_t rows, int64_t width);
  void (*swiglu_backward[3])(const void* dy, const void* x, void* dx, int64_t rows, int64_t width);
  // y = sigmoid(gate) * x, and both gradients from dy; `count` elements.
  void (*sigmoid_gate[3])(const void* gate, const void* x, void* y, int64_t count);
  void (*sigmoid_gate_backward[3])(const void* dy, const void* gate, const void* x, void* dgate, void* dx,
                                   int64_t count);
};

}  // namespace aura
