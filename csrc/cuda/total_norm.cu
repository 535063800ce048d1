// The Euclidean norm of many tensors together, as of all gradients of a model before they are clipped: a launch for
// some hundred tensors and one for the sum, where torch makes a tensor of each one's norm, which is work for the CPU.
// Memory limits it: a block reads a chunk of a tensor once.
#include "cuda/total_norm.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vectors.cuh"

namespace aura {
namespace cuda {
namespace {

constexpr int kThreads = 256;        // of a block that reads
constexpr int kBatch = 4;            // vectors of a thread under way together
constexpr int64_t kChunk = 1 << 14;  // floats of a block
constexpr int kTensors = 160;        // of a launch: what it is given fits into the 4 KiB that every card takes
constexpr int kAddThreads = 1024;

// What a launch is given. first: the number of the first chunk of each tensor, and at the end of all chunks.
struct Tensors {
  const float* data[kTensors];
  int64_t size[kTensors];
  int first[kTensors + 1];
  int count = 0;
};
static_assert(sizeof(Tensors) + 8 <= 4096);

int64_t chunks_of(int64_t size) { return ceil_div(size, kChunk); }

template <int kCount>
__device__ __forceinline__ void add_squares(const Vector<float, kCount>& x, float& sum) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += x[i] * x[i];
}

// The squares that fall to this thread of the first `size` floats from x on, a multiple of kCount.
template <int kCount>
__device__ __forceinline__ float squares_of(const float* x, int size) {
  constexpr int kApart = kThreads * kCount;
  float sum = 0;
  int at = static_cast<int>(threadIdx.x) * kCount;
  for (; at + (kBatch - 1) * kApart < size; at += kBatch * kApart) {
    Vector<float, kCount> some[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) some[i] = load<float, kCount>(x, at + i * kApart);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) add_squares(some[i], sum);
  }
  for (; at < size; at += kApart) add_squares(load<float, kCount>(x, at), sum);
  return sum;
}

// A chunk for each block, the sum of its squares in sums.
__global__ void __launch_bounds__(kThreads) sum_squares(const Tensors tensors, float* sums) {
  const int block = begin_early();
  let_next_begin();  // those of the next tensors, or norm_of_sums
  RowReduce<> across(shared_memory());
  int low = 0, high = tensors.count;  // the tensor is one of [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (tensors.first[middle] <= block ? low : high) = middle;
  }
  const int64_t start = (block - tensors.first[low]) * kChunk;
  const float* const x = tensors.data[low] + start;
  const int size = static_cast<int>(min(tensors.size[low] - start, kChunk));
  constexpr int kCount = 4;
  const int whole = reinterpret_cast<uintptr_t>(x) % 16 == 0 ? size - size % kCount : 0;
  float sum[1] = {squares_of<kCount>(x, whole) + squares_of<1>(x + whole, size - whole)};
  across.sum(sum);
  if (threadIdx.x == 0) sums[block] = sum[0];
}

__global__ void __launch_bounds__(kAddThreads) norm_of_sums(const float* sums, int count, float* norm) {
  begin_early();
  RowReduce<> across(shared_memory());
  float sum[1] = {};
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kAddThreads) sum[0] += sums[i];
  across.sum(sum);
  if (threadIdx.x == 0) *norm = sqrtf(sum[0]);
}

int64_t partials(const int64_t* sizes, int64_t count) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < count; ++i) chunks += chunks_of(sizes[i]);
  return chunks;
}

const char* norm(const void* const* tensors, const int64_t* sizes, int64_t count, float* sums, float* to,
                 void* stream) {
  const int64_t chunks = partials(sizes, count);
  if (chunks > INT_MAX) return "more chunks than a grid has blocks";
  Tensors some;
  float* next = sums;
  const auto queue = [&] {
    const int blocks = some.first[some.count];
    const char* error = launch_early(sum_squares, grid_of(blocks), dim3(kThreads), RowReduce<>::kSize, stream, some,
                                     next);
    next += blocks;
    some.count = 0;
    return error;
  };
  some.first[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (sizes[i] == 0) continue;
    some.data[some.count] = static_cast<const float*>(tensors[i]);
    some.size[some.count] = sizes[i];
    some.first[some.count + 1] = some.first[some.count] + static_cast<int>(chunks_of(sizes[i]));
    if (++some.count < kTensors) continue;
    if (const char* error = queue()) return error;
  }
  if (some.count > 0) {
    if (const char* error = queue()) return error;
  }
  return launch_early(norm_of_sums, dim3(1), dim3(kAddThreads), RowReduce<>::kSize, stream,
                      static_cast<const float*>(sums), static_cast<int>(chunks), to);
}

}  // namespace

TotalNormKernels total_norm_kernels() { return {partials, norm}; }

}  // namespace cuda
}  // namespace aura
