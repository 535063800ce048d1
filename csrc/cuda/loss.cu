// Cross-entropy of rows of logits, and its gradient in their place.
//
// A block has a row and reads it once for the largest logit and the sum of exponentials together: where a thread finds
// a larger one, what it has added up shrinks (Milakov and Gimelshein 2018). The gradient reads the row again, which the
// L2 cache then still holds: few blocks of many threads keep the rows that are under way few.
//
// Rows are read by 16 bytes wherever they begin: a vocabulary of an odd number of words leaves hardly any of them on
// such an address. What lies before the first one and after the last goes element by element.
#include "cuda/loss.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cassert>

#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vectors.cuh"

namespace aura {
namespace cuda {
namespace {

constexpr int kThreads = 1024;  // of a block, at most
constexpr int kBatch = 4;       // vectors a thread has under way
constexpr float kLog2E = 1.44269504f;
constexpr double kLn2 = 0.69314718055994530942;

template <typename T>
constexpr int kCount = 16 / kBytes<T>;

// ---- A row in vectors ----------------------------------------------------------------------------------------------

// `before` elements, `vectors` of 16 bytes from an address of so many on, and the rest.
template <typename T>
struct Parts {
  int before, vectors, single;

  __device__ __forceinline__ Parts(const void* row, int classes) {
    const int past = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / kBytes<T>);
    const int missing = (kCount<T> - past) % kCount<T>;
    before = missing < classes ? missing : classes;
    vectors = (classes - before) / kCount<T>;
    single = classes - vectors * kCount<T>;  // fewer than there are threads
  }
  __device__ __forceinline__ int column(int vector) const { return before + vector * kCount<T>; }
  __device__ __forceinline__ int single_column(int i) const { return i < before ? i : vectors * kCount<T> + i; }
};

// Calls body(column, vector) for all vectors and single elements of this thread.
template <typename T, typename Body>
__device__ __forceinline__ void sweep(const void* row, int classes, const Body& body) {
  const Parts<T> parts(row, classes);
  const int thread = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
  // Under way with the first vectors: the block would wait for it by itself.
  const bool has_single = thread < parts.single;
  Vector<T, 1> single{};
  if (has_single) single = load<T, 1>(row, parts.single_column(thread), InOrder{});
  for (int first = thread; first < parts.vectors; first += kBatch * step) {
    Vector<T, kCount<T>> x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * step < parts.vectors) x[i] = load<T, kCount<T>>(row, parts.column(first + i * step), InOrder{});
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * step < parts.vectors) body(parts.column(first + i * step), x[i]);
    }
  }
  if (has_single) body(parts.single_column(thread), single);
}

template <typename T>
__device__ __forceinline__ void clear(void* row, int classes) {
  const Parts<T> parts(row, classes);
  const int thread = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
  if (thread < parts.single) store(row, parts.single_column(thread), Vector<T, 1>{});
  for (int i = thread; i < parts.vectors; i += step) store(row, parts.column(i), Vector<T, kCount<T>>{});
}

// ---- Cross-entropy -------------------------------------------------------------------------------------------------

// exp(x) / 2^shift, in one multiplication and addition.
__device__ __forceinline__ float exponential(float x, float shift) { return exp2_fast(fmaf(x, kLog2E, -shift)); }

// The largest of some logits, times kLog2E, which is never a NaN, and the sum of exp(x) / 2^largest, which is one where
// a logit is.
struct Seen {
  float largest = -INFINITY, sum = 0;

  template <typename T, int kElements>
  __device__ __forceinline__ void add(const Vector<T, kElements>& x) {
    float most = x[0];
#pragma unroll
    for (int i = 1; i < kElements; ++i) most = fmaxf(most, x[i]);
    const float grown = fmaxf(largest, most * kLog2E);
    const float shift = grown == -INFINITY ? 0.0f : grown;  // nothing but -inf so far: each adds 0, and not a NaN
    float more = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) more += exponential(x[i], shift);
    sum = sum * exp2_fast(largest - shift) + more;
    largest = grown;
  }
};

// Calls body(i) where element i of a vector at `column` is the target's.
template <typename T, int kElements, typename Body>
__device__ __forceinline__ void at_target(const Vector<T, kElements>&, int column, int target, const Body& body) {
  if (target < column || target >= column + kElements) return;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    if (column + i == target) body(i);
  }
}

template <typename T, int kElements>
__device__ __forceinline__ void gradient(void* row, int column, int target, const Vector<T, kElements>& x, float shift,
                                         float scale) {
  float d[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) d[i] = exponential(x[i], shift) * scale;
  at_target(x, column, target, [&](int i) { d[i] -= 1.0f; });
  store(row, column, to_vector<T>(d));
}

template <typename T>
__global__ void __launch_bounds__(kThreads) cross_entropy_rows(const CrossEntropyRows a, int64_t rows) {
  RowReduce<> across(shared_memory());
  const int classes = static_cast<int>(a.classes);
  for (int64_t i = blockIdx.x; i < rows; i += gridDim.x) {
    void* row = static_cast<unsigned char*>(a.logits) + i * a.row_stride * kBytes<T>;
    const int64_t given = a.targets[i];
    if (given == a.ignore_index) {
      if (threadIdx.x == 0) a.losses[i] = 0;
      if (a.gradient) clear<T>(row, classes);
      continue;
    }
    // The host cannot look without waiting for the device.
    assert(given >= 0 && given < a.classes && "a target is neither a class nor ignored");
    const int target = static_cast<int>(given);

    Seen seen;
    bool mine = false;  // the target's logit, which is read before any thread writes its gradient
    float logit = 0;
    sweep<T>(row, classes, [&](int column, const auto& x) {
      seen.add(x);
      at_target(x, column, target, [&](int at) { mine = true, logit = x[at]; });
    });
    float largest[1] = {seen.largest};
    across.max(largest);
    float sum[1] = {seen.sum * exp2_fast(seen.largest - largest[0])};
    across.sum(sum);
    if (mine) a.losses[i] = logf(sum[0]) + kLn2 * (largest[0] - static_cast<double>(kLog2E) * logit);
    if (!a.gradient) continue;
    const float scale = 1.0f / sum[0];
    sweep<T>(row, classes, [&](int column, const auto& x) {
      gradient(row, column, target, x, largest[0], scale);
    });
  }
}

template <typename T>
const char* queue(const CrossEntropyRows& a, int64_t rows, void* stream) {
  const int64_t warps = ceil_div(a.classes, kWarp * kBatch * kCount<T>);
  const int threads = kWarp * static_cast<int>(std::clamp<int64_t>(warps, 1, kThreads / kWarp));
  return launch(cross_entropy_rows<T>, grid_of(rows), dim3(threads), RowReduce<>::kSize, stream, a, rows);
}

const char* cross_entropy(const CrossEntropyRows& a, int64_t rows, Element element, void* stream) {
  if (rows == 0) return nullptr;
  if (a.classes > INT_MAX / 2) return "more classes than a row may have";
  return with_element(element, [&](auto t) { return queue<decltype(t)>(a, rows, stream); });
}

}  // namespace

LossKernels loss_kernels() { return {cross_entropy}; }

}  // namespace cuda
}  // namespace aura
