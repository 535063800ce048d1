// Rotary positions: what the kernels are given.
#pragma once

#include <cstdint>

namespace aura {

// A row of x holds q, k and v, [3, heads, 2 * half], and begins `stride` elements after the one before; y is contiguous.
// Row r is at position r % length. cosine, sine [length, half]: float, double for double. back: turn the other way.
struct RotaryRows {
  const void* x;
  void* y;
  int64_t stride, length, heads, half;
  const void *cosine, *sine;
  bool back;
};

// Functions by element type: float, bfloat16, double. Rows begin ... end - 1: q and k are turned, v is copied.
struct RotaryKernels {
  void (*rotary[3])(const RotaryRows& job, int64_t begin, int64_t end);
};

}  // namespace aura
