// Layer normalisation (Ba et al. 2016) and RMS normalisation (Zhang and Sennrich 2019), with the residual addition and
// its dropout before them; the formulas are those of csrc/cpu/norms.inl.
//
// All of this is bound by memory, so a row crosses the bus once: its threads load it with 16-byte accesses and keep it
// in registers, packed as it was. That allows statistics in two passes: where the mean is large, they lose no more than
// its own rounding takes (sum(x^2) - n mean^2 would). Where one warp holds a row, blocks have several rows and need no
// barrier; a longer row has a block to itself, except in backward, whose blocks have as many rows as they have threads
// for. Rows in registers and one partial sum of dweight per block are ideas of NVIDIA's Apex (fast layer norm) and of
// llm.c.
//
// Sums are the same in every run on a card: the order of additions depends only on rows, columns, element types, on
// whether tensors begin at multiples of 16 bytes and on the number of multiprocessors, and nothing is atomic.
#include "cuda/norms.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/partials.cuh"
#include "cuda/philox.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vectors.cuh"

namespace aura {
namespace cuda {
namespace {

constexpr int kThreads = 512;  // of a block, at most
constexpr int kElements = 32;  // of a row in the registers of a thread, at most
constexpr int kWarpRows = 4;   // of a block of the forward kernel where a warp has a row

// x, residual, weight, y and dy.
template <typename X_, typename R_, typename W_, typename Y_ = R_>
struct Types {
  using X = X_;
  using R = R_;
  using W = W_;
  using Y = Y_;
  static constexpr bool kTwice = !std::is_same_v<X, R> && std::is_same_v<Y, R>;  // y and dy may be there like x too
};

// ---- Pieces of the kernels. threadIdx.x counts the threads of a row, threadIdx.y the rows of a block. --------------

// Dropout of the elements [column, column + kCount) of a row, a vector, which lies within one counter's eight numbers.
template <int kCount>
__device__ __forceinline__ void drop(const Dropout& dropout, float scale, int64_t row, uint32_t column,
                                     float (&values)[kCount]) {
  if (dropout.threshold == 0) return;
  const uint4 bits = philox<1>(dropout.seed, static_cast<uint32_t>(row), column / 8, 0, 1);
  const int first = kCount == 8 ? 0 : static_cast<int>(column % 8);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = philox_number(bits, first + i) >= dropout.threshold ? values[i] * scale : 0.0f;
  }
}

// residual + dropout(x), rounded as it is stored: backward sees only that.
template <typename X, typename R, int kCount>
__device__ __forceinline__ Vector<R, kCount> add(const NormForward& a, float scale, int64_t row, uint32_t column,
                                                 const Vector<R, kCount>& residual, const Vector<X, kCount>& x) {
  float values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = x[i];
  drop(a.dropout, scale, row, column, values);
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] += residual[i];
  return to_vector<R>(values);
}

template <typename T, int kCount>
__device__ __forceinline__ void normalise(const NormForward& a, int64_t at, int64_t column,
                                          const Vector<typename T::R, kCount>& x, float mean, float rstd) {
  using W = typename T::W;
  const Vector<W, kCount> weight = load<W, kCount>(a.weight, column, InOrder{});
  float y[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) y[i] = (x[i] - mean) * rstd * weight[i];
  if (a.bias) {
    const Vector<W, kCount> bias = load<W, kCount>(a.bias, column, InOrder{});
#pragma unroll
    for (int i = 0; i < kCount; ++i) y[i] += bias[i];
  }
  store(a.y, at, to_vector<typename T::Y>(y));
  if constexpr (T::kTwice) {
    if (a.y_like_x) store(a.y_like_x, at, to_vector<typename T::X>(y));
  }
}

// dy and what came for y_like_x.
template <typename X, typename Y, int kCount>
__device__ __forceinline__ Vector<Y, kCount> together(const Vector<Y, kCount>& dy, const Vector<X, kCount>& like_x) {
  float sum[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] = dy[i] + like_x[i];
  return to_vector<Y>(sum);
}

template <typename R, int kCount>
__device__ __forceinline__ float sum_of(const Vector<R, kCount>& x) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += x[i];
  return sum;
}

template <typename R, int kCount>
__device__ __forceinline__ float squares_of(const Vector<R, kCount>& x, float mean) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += (x[i] - mean) * (x[i] - mean);
  return sum;
}

__device__ __forceinline__ float finish_statistics(const NormForward& a, int64_t row, bool rms, float mean,
                                                   float squares) {
  const float rstd = 1.0f / sqrtf(squares / static_cast<float>(a.columns) + static_cast<float>(a.eps));
  if (threadIdx.x == 0) {
    static_cast<float*>(a.rstd)[row] = rstd;
    if (!rms) static_cast<float*>(a.mean)[row] = mean;
  }
  return rstd;
}

// With n = x * rstd + shift, which is (x - mean) * rstd, and g = dy * weight: adds g and g * n to sums, and dy * n to
// dweight.
template <typename R, typename Y, typename W, int kCount>
__device__ __forceinline__ void accumulate(const Vector<R, kCount>& x, const Vector<Y, kCount>& dy,
                                           const Vector<W, kCount>& weight, float rstd, float shift, float (&sums)[2],
                                           float (&dweight)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float n = x[i] * rstd + shift, d = dy[i], g = d * weight[i];
    sums[0] += g;
    sums[1] += g * n;
    dweight[i] += d * n;
  }
}

template <typename Y, int kCount>
__device__ __forceinline__ void accumulate(const Vector<Y, kCount>& dy, float (&dbias)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) dbias[i] += dy[i];
}

// The gradient of what was normalised, rstd * (g - mean(g) - n * mean(g * n)), as rstd * g + of_x * x + rest.
struct RowGradient {
  float rstd, of_x, rest;

  // part: 1 / columns.
  __device__ __forceinline__ RowGradient(bool layer, float part, float rstd_, float shift, const float (&sums)[2])
      : rstd(rstd_) {
    const float mean_gn = sums[1] * part;
    of_x = -rstd * rstd * mean_gn;
    rest = -rstd * ((layer ? sums[0] * part : 0.0f) + shift * mean_gn);
  }
};

// Stores that gradient, plus the one that bypasses the norm (`past`), in dresidual, and the gradient of x in dx.
template <typename T, int kCount>
__device__ __forceinline__ void gradient(const NormBackward& a, const RowGradient& of_row, float scale, int64_t row,
                                         int64_t column, const Vector<typename T::R, kCount>& x,
                                         const Vector<typename T::Y, kCount>& dy,
                                         const Vector<typename T::W, kCount>& weight,
                                         const Vector<typename T::R, kCount>& past, void* dresidual, void* dx,
                                         int64_t at) {
  using X = typename T::X;
  using R = typename T::R;
  float d[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) d[i] = dy[i] * weight[i] * of_row.rstd + (x[i] * of_row.of_x + of_row.rest);
  if (a.d_new_residual) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) d[i] += past[i];
  }
  const Vector<R, kCount> rounded = to_vector<R>(d);
  store(dresidual, at, rounded);
  if (!a.dx) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) d[i] = rounded[i];
  drop(a.dropout, scale, row, static_cast<uint32_t>(column), d);
  store(dx, at, to_vector<X>(d));
}

// Where a thread's vectors lie in its row: those of a warp side by side, so that the distances between the vectors of
// a thread are constants and cost no registers.
template <int kCount, int kVectors>
__device__ __forceinline__ int first_column() {
  const int thread = static_cast<int>(threadIdx.x);
  return thread / kWarp * (kWarp * kCount * kVectors) + thread % kWarp * kCount;
}
template <int kCount>
constexpr int kStep = kWarp * kCount;

// Sums in shared memory, one for each element of the row that a thread holds; laid out so that the accesses of the
// threads of a warp touch each bank once.
template <int kCount, int kVectors>
struct Slots {
  static constexpr int kPart = kCount < 4 ? kCount : 4;  // floats of an access
  static constexpr int kParts = kCount / kPart;
  float* sums;  // of this thread's row of the block

  __device__ __forceinline__ int index(int vector, int part) const {
    return first_column<kPart, kParts * kVectors>() + (vector * kParts + part) * kStep<kPart>;
  }
  __device__ __forceinline__ void get(int vector, float (&values)[kCount]) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const Vector<float, kPart> from = load<float, kPart>(sums, index(vector, part), InOrder{});
#pragma unroll
      for (int i = 0; i < kPart; ++i) values[part * kPart + i] = from[i];
    }
  }
  __device__ __forceinline__ void set(int vector, const float (&values)[kCount]) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float some[kPart];
#pragma unroll
      for (int i = 0; i < kPart; ++i) some[i] = values[part * kPart + i];
      store(sums, index(vector, part), to_vector<float>(some));
    }
  }
};

// Adds up the slots of the block's rows and writes them in the order of the columns.
template <int kCount, int kVectors>
__device__ __forceinline__ void write_slots(const Slots<kCount, kVectors>& slots, int columns, float* to) {
  const int rows = static_cast<int>(blockDim.y), of_row = static_cast<int>(blockDim.x) * kCount * kVectors;
  float* const all = slots.sums - static_cast<int>(threadIdx.y) * of_row;
  __syncthreads();
  for (int v = static_cast<int>(threadIdx.y); v < kVectors; v += rows) {  // each row's threads take some columns
    const int column = first_column<kCount, kVectors>() + v * kStep<kCount>;
    if (column >= columns) return;
    float sum[kCount] = {};
    for (int row = 0; row < rows; ++row) {
      float some[kCount];
      Slots<kCount, kVectors>{all + row * of_row}.get(v, some);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] += some[i];
    }
    store(to, column, to_vector<float>(sum));
  }
}

// ---- Rows in registers --------------------------------------------------------------------------------------------

// One row for its threads, without a loop: a loop over rows keeps so many addresses alive that two blocks of 512
// threads do not fit side by side, and one alone leaves memory idle while it computes. kWhole: the threads of a row
// have just as many elements as the row, and need no condition for each vector.
template <typename T, int kCount, int kVectors, bool kWhole>
__global__ void __launch_bounds__(kThreads, kVectors <= 4 ? 2 : 1)
    forward_rows(const NormForward a, int64_t rows, bool rms, float scale) {
  using X = typename T::X;
  using R = typename T::R;
  const int64_t block = begin_early();
  RowReduce<> across(shared_memory());
  const int columns = static_cast<int>(a.columns), first = first_column<kCount, kVectors>();
  const int64_t row = block * blockDim.y + threadIdx.y, start = row * columns + first;
  const auto in_row = [=](int v) { return kWhole || first + v * kStep<kCount> < columns; };
  if (row >= rows) return;
  // All loads before the first store: they are under way together.
  Vector<R, kCount> x[kVectors];
  Vector<X, kCount> added[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!in_row(v)) continue;
    x[v] = load<R, kCount>(a.residual ? a.residual : a.x, start + v * kStep<kCount>);
    if (a.residual) added[v] = load<X, kCount>(a.x, start + v * kStep<kCount>);
  }
  if (a.residual) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!in_row(v)) continue;
      x[v] = add(a, scale, row, first + v * kStep<kCount>, x[v], added[v]);
      store(a.new_residual, start + v * kStep<kCount>, x[v]);
    }
  }
  float mean = 0;
  if (!rms) {
    float sum[1] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (in_row(v)) sum[0] += sum_of(x[v]);
    }
    across.sum(sum);
    mean = sum[0] / static_cast<float>(columns);
  }
  float squares[1] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (in_row(v)) squares[0] += squares_of(x[v], mean);
  }
  across.sum(squares);
  const float rstd = finish_statistics(a, row, rms, mean, squares[0]);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!in_row(v)) continue;
    normalise<T>(a, start + v * kStep<kCount>, int64_t{first} + v * kStep<kCount>, x[v], mean, rstd);
  }
}

// Prefetches a row of a tensor to the L2 cache, one line by each thread: none has more of a row than 128 bytes. Threads
// beyond the last line fetch that once more, which costs less than a condition.
template <typename Element>
__device__ __forceinline__ void prefetch_row(const void* tensor, int64_t row, int columns) {
  constexpr int kLine = 128;
  const int bytes = columns * kBytes<Element>, at = min(static_cast<int>(threadIdx.x) * kLine, bytes - 1);
  prefetch(static_cast<const unsigned char*>(tensor) + (row * bytes + at));
}

// One block per multiprocessor goes over the rows, as many at a time as it has threads for: each block leaves partial
// sums of dweight and dbias, and the fewer blocks, the less is written and read again. The sums of dweight stay in
// registers and those of dbias in shared memory: there are not registers enough for both. The gradient that bypasses
// the norm is loaded with the row where registers allow it (kEarly): between the sums and the stores, each vector of it
// would be waited for alone. While a row is computed, the next one comes to the L2 cache.
template <typename T, int kCount, int kVectors>
__global__ void __launch_bounds__(kThreads, 1)
    backward_rows(const NormBackward a, int64_t rows, float scale, float part, float* partials) {
  using X = typename T::X;
  using R = typename T::R;
  using W = typename T::W;
  using Y = typename T::Y;
  constexpr bool kEarly = kVectors <= 4;
  const int64_t block = begin_early();
  let_next_begin();  // add_partials
  RowReduce<true> across(shared_memory());
  const Slots<kCount, kVectors> slots{reinterpret_cast<float*>(shared_memory() + blockDim.y * RowReduce<>::kSize) +
                                      threadIdx.y * blockDim.x * kCount * kVectors};
  const int columns = static_cast<int>(a.columns), first = first_column<kCount, kVectors>();
  float dweight[kVectors][kCount] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) slots.set(v, dweight[v]);

  const void* const weights = place<W>(a.weight, first);
  const int64_t apart = int64_t{gridDim.x} * blockDim.y;
  for (int64_t row = block * blockDim.y + threadIdx.y; row < rows; row += apart) {
    const int64_t start = row * columns + first;
    const void *const x_row = place<R>(a.x, start), *const dy_row = place<Y>(a.dy, start);
    Vector<R, kCount> x[kVectors], past[kEarly ? kVectors : 1];
    Vector<Y, kCount> dy[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first + v * kStep<kCount> >= columns) continue;
      x[v] = load<R, kCount>(x_row, v * kStep<kCount>);
      dy[v] = load<Y, kCount>(dy_row, v * kStep<kCount>);
    }
    const void* const past_row = place<R>(a.d_new_residual, start);
    if (kEarly && a.d_new_residual) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (first + v * kStep<kCount> < columns) past[v] = load<R, kCount>(past_row, v * kStep<kCount>);
      }
    }
    if constexpr (T::kTwice) {
      if (a.dy_like_x) {
        const void* const like_x_row = place<X>(a.dy_like_x, start);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (first + v * kStep<kCount> >= columns) continue;
          dy[v] = together(dy[v], load<X, kCount>(like_x_row, v * kStep<kCount>));
        }
      }
    }
    const float rstd = static_cast<const float*>(a.rstd)[row];
    const float shift = a.mean ? -static_cast<const float*>(a.mean)[row] * rstd : 0.0f;
    // At the end the row itself once more, which is on its way: if all took the last row of all, they would queue at
    // its lines.
    const int64_t next = row + apart < rows ? row + apart : row;
    prefetch_row<R>(a.x, next, columns);
    prefetch_row<Y>(a.dy, next, columns);
    if (a.d_new_residual) prefetch_row<R>(a.d_new_residual, next, columns);
    if (T::kTwice && a.dy_like_x) prefetch_row<X>(a.dy_like_x, next, columns);
    float sums[2] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = first + v * kStep<kCount>;
      if (column >= columns) continue;
      const Vector<W, kCount> weight = load<W, kCount>(weights, v * kStep<kCount>, InOrder{});
      accumulate(x[v], dy[v], weight, rstd, shift, sums, dweight[v]);
      if (!a.mean) continue;
      float dbias[kCount];
      slots.get(v, dbias);
      accumulate(dy[v], dbias);
      slots.set(v, dbias);
    }
    across.sum(sums);
    const RowGradient of_row(a.mean, part, rstd, shift, sums);
    void* const dresidual_row = const_cast<void*>(place<R>(a.dresidual, start));
    void* const dx_row = const_cast<void*>(place<X>(a.dx, start));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = first + v * kStep<kCount>;
      if (column >= columns) continue;
      if (!kEarly && a.d_new_residual) past[0] = load<R, kCount>(past_row, v * kStep<kCount>);
      const Vector<W, kCount> weight = load<W, kCount>(weights, v * kStep<kCount>, InOrder{});
      gradient<T>(a, of_row, scale, row, column, x[v], dy[v], weight, past[kEarly ? v : 0], dresidual_row, dx_row,
                  v * kStep<kCount>);
    }
  }

  float* partial = partials + block * (a.mean ? 2 : 1) * columns;
  if (a.mean) {
    write_slots(slots, columns, partial + columns);
    __syncthreads();
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) slots.set(v, dweight[v]);
  write_slots(slots, columns, partial);
}

// ---- Rows too wide for that: read again in every pass, the partial sums in device memory ---------------------------

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) forward_wide(const NormForward a, int64_t rows, bool rms, float scale) {
  using X = typename T::X;
  using R = typename T::R;
  const int64_t block = begin_early();
  RowReduce<> across(shared_memory());
  const int64_t first = int64_t{threadIdx.x} * kCount, step = int64_t{blockDim.x} * kCount;
  for (int64_t row = block; row < rows; row += gridDim.x) {
    const int64_t start = row * a.columns;
    const void* from = a.x;
    if (a.residual) {  // a thread reads again what it wrote itself, and nothing else
      from = a.new_residual;
      for (int64_t column = first; column < a.columns; column += step) {
        const Vector<R, kCount> residual = load<R, kCount>(a.residual, start + column);
        const Vector<X, kCount> x = load<X, kCount>(a.x, start + column);
        store(a.new_residual, start + column, add(a, scale, row, static_cast<uint32_t>(column), residual, x));
      }
    }
    float mean = 0;
    if (!rms) {
      float sum[1] = {};
      for (int64_t column = first; column < a.columns; column += step) {
        sum[0] += sum_of(load<R, kCount>(from, start + column, InOrder{}));
      }
      across.sum(sum);
      mean = sum[0] / static_cast<float>(a.columns);
    }
    float squares[1] = {};
    for (int64_t column = first; column < a.columns; column += step) {
      squares[0] += squares_of(load<R, kCount>(from, start + column, InOrder{}), mean);
    }
    across.sum(squares);
    const float rstd = finish_statistics(a, row, rms, mean, squares[0]);
    for (int64_t column = first; column < a.columns; column += step) {
      normalise<T>(a, start + column, column, load<R, kCount>(from, start + column, InOrder{}), mean, rstd);
    }
  }
}

template <typename T, int kCount>
__device__ __forceinline__ Vector<typename T::Y, kCount> load_dy(const NormBackward& a, int64_t at) {
  const Vector<typename T::Y, kCount> dy = load<typename T::Y, kCount>(a.dy, at);
  if constexpr (T::kTwice) {
    if (a.dy_like_x) return together(dy, load<typename T::X, kCount>(a.dy_like_x, at));
  }
  return dy;
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) backward_wide(const NormBackward a, int64_t rows, float scale,
                                                          float part, float* partials) {
  using R = typename T::R;
  using W = typename T::W;
  const int64_t block = begin_early();
  let_next_begin();  // add_partials
  RowReduce<> across(shared_memory());
  const int64_t first = int64_t{threadIdx.x} * kCount, step = int64_t{blockDim.x} * kCount;
  float* partial = partials + block * (a.mean ? 2 : 1) * a.columns;
  for (int64_t row = block; row < rows; row += gridDim.x) {
    const int64_t start = row * a.columns;
    const float rstd = static_cast<const float*>(a.rstd)[row];
    const float shift = a.mean ? -static_cast<const float*>(a.mean)[row] * rstd : 0.0f;
    float sums[2] = {};
    for (int64_t column = first; column < a.columns; column += step) {
      float dweight[kCount] = {}, dbias[kCount] = {};
      if (row >= gridDim.x) {  // not the block's first
        const Vector<float, kCount> so_far = load<float, kCount>(partial, column, InOrder{});
#pragma unroll
        for (int i = 0; i < kCount; ++i) dweight[i] = so_far[i];
        if (a.mean) {
          const Vector<float, kCount> bias_so_far = load<float, kCount>(partial, a.columns + column, InOrder{});
#pragma unroll
          for (int i = 0; i < kCount; ++i) dbias[i] = bias_so_far[i];
        }
      }
      const Vector<typename T::Y, kCount> dy = load_dy<T, kCount>(a, start + column);
      accumulate(load<R, kCount>(a.x, start + column), dy, load<W, kCount>(a.weight, column, InOrder{}), rstd, shift,
                 sums, dweight);
      accumulate(dy, dbias);
      store(partial, column, to_vector<float>(dweight));
      if (a.mean) store(partial, a.columns + column, to_vector<float>(dbias));
    }
    across.sum(sums);
    const RowGradient of_row(a.mean, part, rstd, shift, sums);
    for (int64_t column = first; column < a.columns; column += step) {
      Vector<R, kCount> past;
      if (a.d_new_residual) past = load<R, kCount>(a.d_new_residual, start + column);
      gradient<T>(a, of_row, scale, row, column, load<R, kCount>(a.x, start + column),
                  load_dy<T, kCount>(a, start + column), load<W, kCount>(a.weight, column, InOrder{}), past,
                  a.dresidual, a.dx, start + column);
    }
  }
}

// ---- Launches -----------------------------------------------------------------------------------------------------

// How many elements of a row a thread keeps in registers, in vectors of `count`; 0: the row does not fit. As many as
// the registers hold well: four vectors of 16 bytes, eight only where there are not threads enough otherwise.
int elements_of(int64_t columns, int count) {
  if (count == 1) return columns <= kThreads * 16 ? 16 : 0;
  if (columns <= kWarp * 8) return 8;
  if (columns <= (count == 4 ? kThreads : kWarp) * 16) return 16;
  return columns <= kThreads * kElements ? kElements : 0;
}

// The threads of a row.
unsigned threads_of(int64_t columns, int elements) {
  return elements == 0 ? kThreads : static_cast<unsigned>(ceil_div(columns, kWarp * elements)) * kWarp;
}

// The threads of a row (x) and the rows of a block (y).
dim3 forward_block(int64_t columns, int elements) {
  const unsigned threads = threads_of(columns, elements);
  return dim3(threads, threads == kWarp ? kWarpRows : 1);
}
dim3 backward_block(int64_t columns, int elements) {
  const unsigned threads = threads_of(columns, elements);
  return dim3(threads, kThreads / threads);
}

// One block for each multiprocessor, whose registers hold no more: all begin and end together. Fewer where each would
// have so few rows that its partial sums would not be little beside them. Computed as for aligned rows, whatever they
// are.
int64_t partials(int64_t rows, int64_t columns, NormTypes types) {
  constexpr int64_t kFewestTurns = 4;
  const bool wide = types == NormTypes::kFloat || types == NormTypes::kBFloat16FloatFloat ||
                    types == NormTypes::kHalfFloatFloat;
  const dim3 block = backward_block(columns, elements_of(columns, wide ? 4 : 8));
  const int64_t most = std::max(1, device_attribute(cudaDevAttrMultiProcessorCount));
  const int64_t turns = std::max(kFewestTurns, ceil_div(rows, most * block.y));
  return ceil_div(rows, turns * block.y);
}

// How many elements an access brings: `count` where it divides a row and every tensor begins on 16 bytes, else 1.
int access(int64_t columns, int count, std::initializer_list<const void*> tensors) {
  return aligned(tensors) && columns % count == 0 ? count : 1;
}

// Calls call(Types<...>{}) for the element types of that name. narrow: as of cuda/norms.h.
template <typename Call>
const char* with_types(NormTypes types, bool narrow, const Call& call) {
  if (narrow) {
    if (types == NormTypes::kBFloat16FloatFloat) return call(Types<BFloat, float, float, BFloat>{});
    if (types == NormTypes::kHalfFloatFloat) return call(Types<Half, float, float, Half>{});
    return "y of another type than the residual's is for x of 16 bits with a residual in float32";
  }
  switch (types) {
    case NormTypes::kFloat: return call(Types<float, float, float>{});
    case NormTypes::kBFloat16: return call(Types<BFloat, BFloat, BFloat>{});
    case NormTypes::kBFloat16Float: return call(Types<BFloat, BFloat, float>{});
    case NormTypes::kBFloat16FloatFloat: return call(Types<BFloat, float, float>{});
    case NormTypes::kHalf: return call(Types<Half, Half, Half>{});
    case NormTypes::kHalfFloat: return call(Types<Half, Half, float>{});
    case NormTypes::kHalfFloatFloat: return call(Types<Half, float, float>{});
    case NormTypes::kDouble: break;
  }
  return "the norms have kernels for float32, bfloat16 and float16 on a GPU";
}

template <typename T, int kCount, int kVectors>
auto forward_rows_of(bool whole) {
  return whole ? forward_rows<T, kCount, kVectors, true> : forward_rows<T, kCount, kVectors, false>;
}

template <typename T>
const char* forward_as(const NormForward& a, int64_t rows, bool rms, void* stream) {
  constexpr int kCount = 16 / kBytes<typename T::R>;
  const int count = access(a.columns, kCount, {a.x, a.residual, a.new_residual, a.y, a.y_like_x, a.weight, a.bias});
  const int elements = elements_of(a.columns, count);
  const dim3 block = forward_block(a.columns, elements);
  const bool whole = int64_t{block.x} * elements == a.columns;
  auto kernel = count == 1 ? forward_wide<T, 1> : forward_wide<T, kCount>;
  if (elements == 8) kernel = forward_rows_of<T, kCount, 8 / kCount>(whole);
  if (elements == 16) {
    kernel = count == 1 ? forward_rows_of<T, 1, 16>(whole) : forward_rows_of<T, kCount, 16 / kCount>(whole);
  }
  if (elements == 32) kernel = forward_rows_of<T, kCount, 32 / kCount>(whole);
  const int64_t blocks = ceil_div(rows, block.y);
  if (blocks > INT_MAX) return "more rows than a grid has blocks";
  return launch_early(kernel, grid_of(blocks), block, RowReduce<>::kSize, stream, a, rows, rms,
                      static_cast<float>(a.dropout.scale()));
}

template <typename T>
const char* backward_as(const NormBackward& a, int64_t rows, int64_t blocks, float* sums, void* stream) {
  constexpr int kCount = 16 / kBytes<typename T::R>;
  const int count =
      access(a.columns, kCount, {a.dy, a.dy_like_x, a.weight, a.x, a.d_new_residual, a.dresidual, a.dx, sums});
  const int elements = elements_of(a.columns, count);
  auto kernel = count == 1 ? backward_wide<T, 1> : backward_wide<T, kCount>;
  if (elements == 8) kernel = backward_rows<T, kCount, 8 / kCount>;
  if (elements == 16) kernel = count == 1 ? backward_rows<T, 1, 16> : backward_rows<T, kCount, 16 / kCount>;
  if (elements == 32) kernel = backward_rows<T, kCount, 32 / kCount>;
  const dim3 block = backward_block(a.columns, elements);
  const int of_row = RowReduce<>::kSize + static_cast<int>(block.x * sizeof(float)) * elements;
  return launch_early(kernel, grid_of(blocks), block, static_cast<int>(block.y) * of_row, stream, a, rows,
                      static_cast<float>(a.dropout.scale()), 1.0f / static_cast<float>(a.columns), sums);
}

const char* forward(const NormForward& a, int64_t rows, bool rms, NormTypes types, bool narrow, void* stream) {
  return with_types(types, narrow, [&](auto t) -> const char* {
    if (rows == 0) return nullptr;
    return forward_as<decltype(t)>(a, rows, rms, stream);
  });
}

const char* backward(const NormBackward& a, int64_t rows, NormTypes types, bool narrow, void* partial_sums,
                     void* dweight, void* dbias, void* stream) {
  return with_types(types, narrow, [&](auto t) -> const char* {
    float* sums = static_cast<float*>(partial_sums);
    const int64_t blocks = partials(rows, a.columns, types);
    if (rows > 0) {
      const char* error = backward_as<decltype(t)>(a, rows, blocks, sums, stream);
      if (error) return error;
    }
    return queue_add_partials<typename decltype(t)::W>(sums, blocks, a.columns, (a.mean ? 2 : 1) * a.columns, dweight,
                                                       dbias, stream);
  });
}

}  // namespace

NormKernels norm_kernels() { return {forward, partials, backward}; }

}  // namespace cuda
}  // namespace aura
