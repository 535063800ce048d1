// Rotary positions (Su et al. 2021, section 3.4.2), pairs made of the two halves of a head. Included by kernels.cpp alone.
#pragma once

#include "cpu/vec.h"
#include "rotary.h"

namespace aura {
namespace AURA_ISA {
namespace rotary {

// y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin.
template <typename T>
AURA_INLINE void turn_head(const T* x, T* y, int64_t half, const Compute<T>* cosine, const Compute<T>* sine,
                           Compute<T> sign) {
  using V = Vec<Compute<T>>;
  constexpr int64_t W = kWidth<Compute<T>>;
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    const V a = load_as(x + i), b = load_as(x + half + i), c = load_as(cosine + i), s = load_as(sine + i) * sign;
    store_as(y + i, a * c - b * s);
    store_as(y + half + i, b * c + a * s);
  }
  const int64_t left = half - i;
  if (left > 0) {
    const V a = load_some(x + i, left), b = load_some(x + half + i, left);
    const V c = load_some(cosine + i, left), s = load_some(sine + i, left) * sign;
    store_some(y + i, a * c - b * s, left);
    store_some(y + half + i, b * c + a * s, left);
  }
}

template <typename T>
void rows(const RotaryRows& job, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const int64_t width = 2 * job.half, part = job.heads * width;
  const C sign = job.back ? C{-1} : C{1};
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(job.x) + row * job.stride;
    T* y = static_cast<T*>(job.y) + row * 3 * part;
    const C* cosine = static_cast<const C*>(job.cosine) + row % job.length * job.half;
    const C* sine = static_cast<const C*>(job.sine) + row % job.length * job.half;
    for (int64_t head = 0; head < 2 * job.heads; ++head) {
      turn_head<T>(x + head * width, y + head * width, job.half, cosine, sine, sign);
    }
    std::memcpy(y + 2 * part, x + 2 * part, static_cast<size_t>(part) * sizeof(T));
  }
}

}  // namespace rotary

constexpr RotaryKernels kRotary = {{rotary::rows<float>, rotary::rows<bfloat16>, rotary::rows<double>}};

}  // namespace AURA_ISA
}  // namespace aura
