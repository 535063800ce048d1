// Rotary positions (Su et al. 2021, section 3.4.2), pairs made of the two halves of a head.
//
// All of this is bound by memory: q, k and v are read once and written once. A thread has the same pairs of one head
// after another, so that it reads their angles once per row; the caches hold a position's angles for all heads.
#include "cuda/rotary.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/vectors.cuh"

namespace aura {
namespace cuda {
namespace {

constexpr int kThreads = 256;  // of a block, at most

// y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin.
template <typename T, int kCount>
__device__ __forceinline__ void turn(Vector<T, kCount>& first, Vector<T, kCount>& second,
                                     const Vector<float, kCount>& cosine, const Vector<float, kCount>& sine,
                                     float sign) {
  float y1[kCount], y2[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float s = sine[i] * sign;
    y1[i] = first[i] * cosine[i] - second[i] * s;
    y2[i] = second[i] * cosine[i] + first[i] * s;
  }
  first = to_vector<T>(y1);
  second = to_vector<T>(y2);
}

// A block has a row; threadIdx.x counts vectors of pairs, threadIdx.y heads of q, k and v.
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) turn_rows(const RotaryRows a, int64_t rows) {
  const int64_t width = 2 * a.half;
  const float sign = a.back ? -1.0f : 1.0f;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t angles = row % a.length * a.half;
    for (int64_t pair = int64_t{threadIdx.x} * kCount; pair < a.half; pair += int64_t{blockDim.x} * kCount) {
      const Vector<float, kCount> cosine = load<float, kCount>(a.cosine, angles + pair);
      const Vector<float, kCount> sine = load<float, kCount>(a.sine, angles + pair);
      for (int64_t head = threadIdx.y; head < 3 * a.heads; head += blockDim.y) {
        const int64_t from = row * a.stride + head * width + pair, to = (row * 3 * a.heads + head) * width + pair;
        Vector<T, kCount> first = load<T, kCount>(a.x, from), second = load<T, kCount>(a.x, from + a.half);
        if (head < 2 * a.heads) turn(first, second, cosine, sine, sign);
        store(a.y, to, first);
        store(a.y, to + a.half, second);
      }
    }
  }
}

// As many heads at a time as need the fewest turns, and about as many in each.
dim3 block_of(int64_t vectors, int64_t heads) {
  const int64_t x = std::min<int64_t>(vectors, kThreads), most = kThreads / x;
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(ceil_div(heads, ceil_div(heads, most))));
}

template <typename T>
const char* queue(const RotaryRows& a, int64_t rows, void* stream) {
  constexpr int kCount = 16 / kBytes<T>;
  const bool wide = a.half % kCount == 0 && a.stride % kCount == 0 && aligned({a.x, a.y, a.cosine, a.sine});
  return launch(wide ? turn_rows<T, kCount> : turn_rows<T, 1>, grid_of(rows),
                block_of(wide ? a.half / kCount : a.half, 3 * a.heads), 0, stream, a, rows);
}

const char* rotary(const RotaryRows& a, int64_t rows, Element element, void* stream) {
  if (rows == 0 || a.heads == 0 || a.half == 0) return nullptr;
  return with_element(element, [&](auto t) { return queue<decltype(t)>(a, rows, stream); });
}

}  // namespace

RotaryKernels rotary_kernels() { return {rotary}; }

}  // namespace cuda
}  // namespace aura
