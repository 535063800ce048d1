// GELU in its tanh form, SwiGLU and a sigmoid gate, forward and backward. Included by kernels.cpp alone.
//
// The first two are x * sigmoid(something): tanh(u) = 2 sigmoid(2u) - 1 turns x/2 (1 + tanh u) into x sigmoid(2u), which keeps
// its relative precision where 1 + tanh u cancels. What goes into the exponential is bounded by bounding x, where the
// functions are as good as 0 or x: infinities need no case of their own, and NaNs pass through the comparisons.
#pragma once

#include "cpu/activation.h"
#include "cpu/vec.h"

namespace aura {
namespace AURA_ISA {
namespace activation {

// exp(-x) stays under 2^100 for both. GELU(-9) is -1e-28 and GELU'(9) is 1; SiLU(-64) is -1e-26.
constexpr float kGeluBound = 9.0f;
constexpr float kSiluBound = 64.0f;

template <typename V>
AURA_INLINE V at_least(V x, float low) {
  return x < low ? V{} + low : x;
}
template <typename V>
AURA_INLINE V bounded(V x, float bound) {
  x = at_least(x, -bound);
  return x > bound ? V{} + bound : x;
}

// sigmoid(x) and 1 - sigmoid(x), neither by subtraction.
template <typename C>
struct Sigmoid {
  Vec<C> value, rest;
};
template <typename C>
AURA_INLINE Sigmoid<C> sigmoid(Vec<C> x) {
  const Vec<C> e = exp2(x * static_cast<C>(-1.44269504088896340736));
  const Vec<C> value = C{1} / (e + C{1});
  return {value, e * value};
}

// 2u = 2 sqrt(2/pi) (x + 0.044715 x^3) and its derivative (Hendrycks and Gimpel 2016).
constexpr double kLinear = 1.59576912160573071176;
constexpr double kCubic = 0.044715 * kLinear;
template <typename C>
AURA_INLINE Vec<C> twice_u(Vec<C> x) {
  return x * (x * x * static_cast<C>(kCubic) + static_cast<C>(kLinear));
}
template <typename C>
AURA_INLINE Vec<C> twice_u_slope(Vec<C> x) {
  return x * x * static_cast<C>(3 * kCubic) + static_cast<C>(kLinear);
}

template <typename C>
AURA_INLINE Vec<C> gelu_tanh(Vec<C> x) {
  x = at_least(x, -kGeluBound);
  return x * sigmoid<C>(twice_u<C>(x)).value;
}
template <typename C>
AURA_INLINE Vec<C> gelu_tanh_slope(Vec<C> x) {
  x = bounded(x, kGeluBound);
  const Sigmoid<C> s = sigmoid<C>(twice_u<C>(x));
  return s.value + x * s.rest * s.value * twice_u_slope<C>(x);
}

template <typename C>
AURA_INLINE Vec<C> silu(Vec<C> x) {
  x = at_least(x, -kSiluBound);
  return x * sigmoid<C>(x).value;
}
template <typename C>
AURA_INLINE Vec<C> silu_slope(Vec<C> x) {
  x = bounded(x, kSiluBound);
  const Sigmoid<C> s = sigmoid<C>(x);
  return s.value + x * s.rest * s.value;
}

// Calls body(i, load, store) for each vector of `count` elements; the last one may be a part of a vector.
template <typename T, typename Body>
AURA_INLINE void sweep(int64_t count, const Body& body) {
  constexpr int64_t W = kWidth<Compute<T>>;
  int64_t i = 0;
  for (; i + W <= count; i += W) {
    body([=](const T* from) __attribute__((always_inline)) { return load_as(from + i); },
         [=](T* to, Vec<Compute<T>> v) __attribute__((always_inline)) { store_as(to + i, v); });
  }
  const int64_t left = count - i;
  if (left > 0) {
    body([=](const T* from) __attribute__((always_inline)) { return load_some(from + i, left); },
         [=](T* to, Vec<Compute<T>> v) __attribute__((always_inline)) { store_some(to + i, v, left); });
  }
}

template <typename T>
void gelu_tanh_all(const void* x, void* y, int64_t count) {
  const T* from = static_cast<const T*>(x);
  T* to = static_cast<T*>(y);
  sweep<T>(count, [=](auto get, auto put) __attribute__((always_inline)) {
    put(to, gelu_tanh<Compute<T>>(get(from)));
  });
}

template <typename T>
void gelu_tanh_backward_all(const void* dy, const void* x, void* dx, int64_t count) {
  const T *gradient = static_cast<const T*>(dy), *from = static_cast<const T*>(x);
  T* to = static_cast<T*>(dx);
  sweep<T>(count, [=](auto get, auto put) __attribute__((always_inline)) {
    put(to, get(gradient) * gelu_tanh_slope<Compute<T>>(get(from)));
  });
}

template <typename T>
void swiglu(const void* x, void* y, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row) {
    const T *gate = static_cast<const T*>(x) + row * 2 * width, *up = gate + width;
    T* to = static_cast<T*>(y) + row * width;
    sweep<T>(width, [=](auto get, auto put) __attribute__((always_inline)) {
      put(to, silu<Compute<T>>(get(gate)) * get(up));
    });
  }
}

template <typename T>
void swiglu_backward(const void* dy, const void* x, void* dx, int64_t rows, int64_t width) {
  using C = Compute<T>;
  for (int64_t row = 0; row < rows; ++row) {
    const T* gradient = static_cast<const T*>(dy) + row * width;
    const T *gate = static_cast<const T*>(x) + row * 2 * width, *up = gate + width;
    T *dgate = static_cast<T*>(dx) + row * 2 * width, *dup = dgate + width;
    sweep<T>(width, [=](auto get, auto put) __attribute__((always_inline)) {
      const Vec<C> d = get(gradient), g = get(gate);
      put(dup, d * silu<C>(g));
      put(dgate, d * get(up) * silu_slope<C>(g));
    });
  }
}

// The bound keeps the exponential finite where the sigmoid is 0 or 1 already; beyond it 1 - sigmoid is under 1e-27.
template <typename C>
AURA_INLINE Sigmoid<C> gate_of(Vec<C> x) {
  return sigmoid<C>(bounded(x, kSiluBound));
}

template <typename T>
void sigmoid_gate(const void* gate, const void* x, void* y, int64_t count) {
  const T *opening = static_cast<const T*>(gate), *from = static_cast<const T*>(x);
  T* to = static_cast<T*>(y);
  sweep<T>(count, [=](auto get, auto put) __attribute__((always_inline)) {
    put(to, gate_of<Compute<T>>(get(opening)).value * get(from));
  });
}

template <typename T>
void sigmoid_gate_backward(const void* dy, const void* gate, const void* x, void* dgate, void* dx, int64_t count) {
  using C = Compute<T>;
  const T *gradient = static_cast<const T*>(dy), *opening = static_cast<const T*>(gate);
  const T* from = static_cast<const T*>(x);
  T *to_gate = static_cast<T*>(dgate), *to = static_cast<T*>(dx);
  sweep<T>(count, [=](auto get, auto put) __attribute__((always_inline)) {
    const Sigmoid<C> s = gate_of<C>(get(opening));
    const Vec<C> d = get(gradient) * s.value;
    put(to, d);
    put(to_gate, d * s.rest * get(from));
  });
}

}  // namespace activation

#define AURA_TYPES(function) {activation::function<float>, activation::function<bfloat16>, activation::function<double>}
constexpr ActivationKernels kActivation = {AURA_TYPES(gelu_tanh_all), AURA_TYPES(gelu_tanh_backward_all),
                                           AURA_TYPES(swiglu), AURA_TYPES(swiglu_backward),
                                           AURA_TYPES(sigmoid_gate), AURA_TYPES(sigmoid_gate_backward)};
#undef AURA_TYPES

}  // namespace AURA_ISA
}  // namespace aura
