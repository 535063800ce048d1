// Cross-entropy of rows of logits, and its gradient in their place.
//
// A block has a row and goes over it once for the largest logit and the sum of exponentials together: where a thread
// finds a larger logit, it rescales its sum (online softmax: Milakov and Gimelshein 2018). The gradient needs the row
// again: up to 65536 columns of 16 bits, or half as many of 32, are still in the block's registers, packed as they
// were. A longer row is read again, perhaps from the L2 cache: few blocks of many threads keep few rows under way.
//
// Rows are read in aligned pieces of 16 bytes wherever they begin: with a vocabulary of an odd number of words hardly
// any row begins at such an address. What lies before the first piece and after the last goes element by element.
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
constexpr int kHeld = 8;        // vectors of a row in the registers of a thread, at most
constexpr int kBatch = 4;       // vectors a thread has under way where the row does not fit the registers
constexpr double kLn2 = 0.69314718055994530942;

template <typename T>
constexpr int kCount = 16 / kBytes<T>;

// ---- A row in vectors ----------------------------------------------------------------------------------------------

// A row: `before` elements, `vectors` of 16 bytes at multiples of 16, and the rest. single: all that is in no vector.
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

// What a thread has of a row: vectors, some at a time, and at most one single element.
template <typename T>
struct Share {
  const void* row;
  Parts<T> parts;
  int thread = static_cast<int>(threadIdx.x);
  bool has_single;
  Vector<T, 1> single{};

  __device__ __forceinline__ Share(const void* row_, int classes)
      : row(row_), parts(row_, classes), has_single(thread < parts.single) {
    // Under way together with the first vectors: later, the block would wait for it alone.
    if (has_single) single = load<T, 1>(row, parts.single_column(thread), InOrder{});
  }
  // Loads the vectors first, first + step...
  template <int kVectors>
  __device__ __forceinline__ void bring(Vector<T, kCount<T>> (&x)[kVectors], int first, int step) const {
    const int column = parts.column(first);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (first + i * step < parts.vectors) x[i] = load<T, kCount<T>>(row, column + i * step * kCount<T>, InOrder{});
    }
  }
  // Calls body(column, vector) for these.
  template <int kVectors, typename Body>
  __device__ __forceinline__ void visit(const Vector<T, kCount<T>> (&x)[kVectors], int first, int step,
                                        const Body& body) const {
    const int column = parts.column(first);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (first + i * step < parts.vectors) body(column + i * step * kCount<T>, x[i]);
    }
  }
  template <typename Body>
  __device__ __forceinline__ void visit_single(const Body& body) const {
    if (has_single) body(parts.single_column(thread), single);
  }
};

// A Share of a row that fits the registers of the block. The vectors of kSide threads, a warp or the whole block, lie
// side by side, so that the distances between a thread's are constants and cost no registers. each() visits all.
template <typename T, int kSide>
struct HeldShare : Share<T> {
  Vector<T, kCount<T>> held[kHeld];

  __device__ __forceinline__ HeldShare(const void* row, int classes) : Share<T>(row, classes) {
    this->bring(held, first(), kSide);
  }
  __device__ __forceinline__ int first() const { return this->thread / kSide * (kSide * kHeld) + this->thread % kSide; }
  template <typename Body>
  __device__ __forceinline__ void each(const Body& body) const {
    this->visit(held, first(), kSide, body);
    this->visit_single(body);
  }
};

// A Share of a row that does not: each() reads it.
template <typename T>
struct ReadShare : Share<T> {
  using Share<T>::Share;

  template <typename Body>
  __device__ __forceinline__ void each(const Body& body) const {
    const int step = static_cast<int>(blockDim.x);
    for (int first = this->thread; first < this->parts.vectors; first += kBatch * step) {
      Vector<T, kCount<T>> x[kBatch];
      this->bring(x, first, step);
      this->visit(x, first, step, body);
    }
    this->visit_single(body);
  }
};

template <typename T>
__device__ __forceinline__ void clear(void* row, int classes) {
  const Parts<T> parts(row, classes);
  const int thread = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
  if (thread < parts.single) store(row, parts.single_column(thread), Vector<T, 1>{});
  for (int i = thread; i < parts.vectors; i += step) store(row, parts.column(i), Vector<T, kCount<T>>{});
}

// ---- Cross-entropy -------------------------------------------------------------------------------------------------

// exp(x) / 2^shift, with one fused multiply-add.
__device__ __forceinline__ float exponential(float x, float shift) { return exp2_fast(fmaf(x, kLog2E, -shift)); }

// The largest of some logits, times kLog2E, which is never NaN, and the sum of exp(x) / 2^largest, which is NaN where a
// logit is.
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

// A row for each block: a loop over rows would keep more addresses alive than there are registers for.
template <typename T, typename ShareOfRow>
__global__ void __launch_bounds__(kThreads) cross_entropy_rows(const CrossEntropyRows a) {
  const int64_t i = blockIdx.x;
  const int classes = static_cast<int>(a.classes);
  void* row = static_cast<unsigned char*>(a.logits) + i * a.row_stride * kBytes<T>;
  const int64_t given = a.targets[i];
  if (given == a.ignore_index) {
    if (threadIdx.x == 0) a.losses[i] = 0;
    if (a.gradient) clear<T>(row, classes);
    return;
  }
  // The host cannot look without waiting for the device.
  assert(given >= 0 && given < a.classes && "a target is neither a class nor ignored");
  const int target = static_cast<int>(given);

  const ShareOfRow share(row, classes);
  Seen seen;
  bool mine = false;  // whether `logit` is the target's, to be read before any thread writes its gradient
  float logit = 0;
  share.each([&](int column, const auto& x) {
    seen.add(x);
    at_target(x, column, target, [&](int at) { mine = true, logit = x[at]; });
  });
  RowReduce<> across(shared_memory());
  float largest[1] = {seen.largest};
  across.max(largest);
  float sum[1] = {seen.sum * exp2_fast(seen.largest - largest[0])};
  across.sum(sum);
  if (mine) a.losses[i] = logf(sum[0]) + kLn2 * (largest[0] - static_cast<double>(kLog2E) * logit);
  if (!a.gradient) return;
  const float scale = 1.0f / sum[0];
  share.each([&](int column, const auto& x) { gradient(row, column, target, x, largest[0], scale); });
}

// As many warps as hold a row. Up to half of what a block may have, a multiprocessor holds two blocks or more: while
// one computes, another reads. Beyond that a block is alone there, and has all threads.
template <typename T>
const char* queue(const CrossEntropyRows& a, int64_t rows, void* stream) {
  constexpr int kMostWarps = kThreads / kWarp;
  const int64_t warps = std::max<int64_t>(1, ceil_div(a.classes, kWarp * kHeld * kCount<T>));
  auto kernel = cross_entropy_rows<T, HeldShare<T, kWarp>>;
  if (warps > kMostWarps / 2) kernel = cross_entropy_rows<T, HeldShare<T, kThreads>>;
  if (warps > kMostWarps) kernel = cross_entropy_rows<T, ReadShare<T>>;
  const int threads = warps > kMostWarps / 2 ? kThreads : kWarp * static_cast<int>(warps);
  return launch(kernel, grid_of(rows), dim3(threads), RowReduce<>::kSize, stream, a);
}

const char* cross_entropy(const CrossEntropyRows& a, int64_t rows, Element element, void* stream) {
  if (rows == 0) return nullptr;
  if (rows > INT_MAX) return "more rows than a grid has blocks";
  if (a.classes > INT_MAX / 2) return "more classes than a row may have";
  return with_element(element, [&](auto t) { return queue<decltype(t)>(a, rows, stream); });
}

}  // namespace

LossKernels loss_kernels() { return {cross_entropy}; }

}  // namespace cuda
}  // namespace aura
