#pragma once

#include <cstdint>

namespace aura {

// What a dropout mask depends on besides the place. An element is kept when its 16 bits are at or above `threshold`.
struct Dropout {
  uint32_t threshold = 0;  // round(probability * 65536); 0: no dropout
  uint64_t seed = 0;

  // 1 / P(kept), from the threshold itself, so that the expectation is exact.
  double scale() const { return 65536.0 / (65536.0 - threshold); }
};

}  // namespace aura
