// Cross-entropy of rows of logits, and its gradient in their place. Included by kernels.cpp alone.
//
// A row fits the L2 cache, so it is read three times: for its maximum, for the sum of exponentials, for the gradient.
// The exponential is taken twice; beside the products that make a logit it costs next to nothing, and what bfloat16
// rounds is then the gradient itself and nothing before it.
#pragma once

#include "cpu/vec.h"
#include "loss.h"

namespace aura {
namespace AURA_ISA {
namespace loss {

constexpr int64_t kChains = 4;     // of sums, side by side
constexpr int64_t kBlock = 16384;  // elements summed in float before the sum goes to double

template <typename C>
constexpr C kMinusInfinity = static_cast<C>(-__builtin_inf());

// The first `count` elements, then -inf, whose exponential is 0.
template <typename T>
AURA_INLINE Vec<Compute<T>> load_last(const T* from, int64_t count) {
  Vec<Compute<T>> v = load_some(from, count);
  for (int64_t i = count; i < kWidth<Compute<T>>; ++i) v[i] = kMinusInfinity<Compute<T>>;
  return v;
}

// NaNs may be lost here; they come back with the sum.
template <typename T>
Compute<T> maximum(const T* row, int64_t count) {
  using C = Compute<T>;
  constexpr int64_t W = kWidth<C>;
  Vec<C> best[kChains];
  for (Vec<C>& v : best) v = splat<Vec<C>>(kMinusInfinity<C>);
  int64_t i = 0;
  for (; i + kChains * W <= count; i += kChains * W) {
#pragma GCC unroll 4
    for (int64_t v = 0; v < kChains; ++v) best[v] = vmax(load_as(row + i + v * W), best[v]);
  }
  for (; i + W <= count; i += W) best[0] = vmax(load_as(row + i), best[0]);
  if (i < count) best[0] = vmax(load_last(row + i, count - i), best[0]);
  best[0] = vmax(vmax(best[0], best[1]), vmax(best[2], best[3]));
  C result = best[0][0];
  for (int64_t lane = 1; lane < W; ++lane) result = best[0][lane] > result ? best[0][lane] : result;
  return result;
}

// exp(x - shift)
template <typename C>
AURA_INLINE Vec<C> exponential(Vec<C> x, C shift) {
  return exp2((x - shift) * static_cast<C>(1.44269504088896340736));
}

template <typename T>
double sum_of_exponentials(const T* row, int64_t count, Compute<T> shift) {
  using C = Compute<T>;
  constexpr int64_t W = kWidth<C>;
  double total = 0;
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t end = count - first < kBlock ? count : first + kBlock;
    Vec<C> sum[kChains] = {};
    int64_t i = first;
    for (; i + kChains * W <= end; i += kChains * W) {
#pragma GCC unroll 4
      for (int64_t v = 0; v < kChains; ++v) sum[v] += exponential<C>(load_as(row + i + v * W), shift);
    }
    for (; i + W <= end; i += W) sum[0] += exponential<C>(load_as(row + i), shift);
    if (i < end) sum[0] += exponential<C>(load_last(row + i, end - i), shift);
    total += static_cast<double>(sum_lanes<C>((sum[0] + sum[1]) + (sum[2] + sum[3])));
  }
  return total;
}

AURA_INLINE void assign(float& to, float value) { to = value; }
AURA_INLINE void assign(double& to, double value) { to = value; }
AURA_INLINE void assign(bfloat16& to, float value) {
  bfloat16 lanes[kWidth<float>];
  store_as(lanes, splat<VecF>(value));
  to = lanes[0];
}

// row := softmax(row) - onehot(target)
template <typename T>
void gradient(T* row, int64_t count, int64_t target, Compute<T> shift, double sum) {
  using C = Compute<T>;
  constexpr int64_t W = kWidth<C>;
  const C scale = static_cast<C>(1 / sum);
  const Vec<C> at_target = exponential<C>(splat<Vec<C>>(to_float(row[target])), shift) * scale;
  int64_t i = 0;
  for (; i + W <= count; i += W) store_as(row + i, exponential<C>(load_as(row + i), shift) * scale);
  if (i < count) store_some(row + i, exponential<C>(load_some(row + i, count - i), shift) * scale, count - i);
  assign(row[target], at_target[0] - C{1});
}

template <typename T>
void cross_entropy(const CrossEntropyRows& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    T* row = static_cast<T*>(a.logits) + i * a.row_stride;
    const int64_t target = a.targets[i];
    if (target == a.ignore_index) {
      a.losses[i] = 0;
      if (a.gradient) std::memset(static_cast<void*>(row), 0, static_cast<size_t>(a.classes) * sizeof(T));
      continue;
    }
    const Compute<T> shift = maximum(row, a.classes);
    const double sum = sum_of_exponentials(row, a.classes, shift);
    a.losses[i] = __builtin_log(sum) + (static_cast<double>(shift) - static_cast<double>(to_float(row[target])));
    if (a.gradient) gradient(row, a.classes, target, shift, sum);
  }
}

}  // namespace loss

constexpr LossKernels kLoss = {
    {loss::cross_entropy<float>, loss::cross_entropy<bfloat16>, loss::cross_entropy<double>}};

}  // namespace AURA_ISA
}  // namespace aura
