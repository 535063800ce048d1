// Sums of the columns of a matrix, in float: the gradient of a linear layer's bias. Memory limits it: each thread reads
// vectors of 16 bytes in a few rows, several under way together, and the rows of a block are added up in shared memory.
#include "cuda/columns.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/partials.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vectors.cuh"

namespace aura {
namespace cuda {
namespace {

constexpr int kRows = 16;   // of a block of kWarp x kRows threads
constexpr int kBlocks = 2;  // on a multiprocessor
constexpr int kBatch = 4;   // vectors of a thread under way together

template <typename T, int kCount>
__device__ __forceinline__ void add(const Vector<T, kCount>& x, float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] += x[i];
}

// blockIdx.x: which columns; blockIdx.y: which part of the rows.
template <typename T, int kCount>
__global__ void __launch_bounds__(kWarp* kRows, kBlocks)
    sum_columns(const void* x, int64_t rows, int64_t columns, float* partials) {
  constexpr int kColumns = kWarp * kCount;  // of a block
  float* const tile = reinterpret_cast<float*>(shared_memory());
  const int lane = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
  const int64_t block = begin_early(), first = block * kColumns, column = first + lane * kCount;
  let_next_begin();  // add_partials
  float sums[kCount] = {};
  if (column < columns) {
    const int64_t apart = int64_t{gridDim.y} * kRows;
    int64_t row = int64_t{blockIdx.y} * kRows + y;
    for (; row + (kBatch - 1) * apart < rows; row += kBatch * apart) {
      Vector<T, kCount> some[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) some[i] = load<T, kCount>(x, (row + i * apart) * columns + column);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) add(some[i], sums);
    }
    for (; row < rows; row += apart) add(load<T, kCount>(x, row * columns + column), sums);
  }
  store(tile, y * kColumns + lane * kCount, to_vector<float>(sums));
  __syncthreads();
  const int of_block = y * kWarp + lane;
  if (of_block >= kColumns || first + of_block >= columns) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i) sum += tile[i * kColumns + of_block];
  partials[blockIdx.y * columns + first + of_block] = sum;
}

// How many elements an access brings where it can be one of 16 bytes.
int64_t vector_of(Element element) { return element == Element::kFloat ? 4 : 8; }

// As many parts as there are places for blocks, but for each thread a batch of rows.
int64_t partials(int64_t rows, int64_t columns, Element element) {
  const int64_t across = ceil_div(columns, kWarp * vector_of(element));
  const int64_t places = int64_t{kBlocks} * std::max(1, device_attribute(cudaDevAttrMultiProcessorCount));
  return std::clamp<int64_t>(places / across, 1, std::max<int64_t>(1, ceil_div(rows, kRows * kBatch)));
}

template <typename T, int kCount>
const char* queue(const void* x, int64_t rows, int64_t columns, int64_t parts, float* partials, void* stream) {
  return launch_early(sum_columns<T, kCount>, grid_of(ceil_div(columns, kWarp * kCount), parts), dim3(kWarp, kRows),
                      kWarp * kCount * kRows * static_cast<int>(sizeof(float)), stream, x, rows, columns, partials);
}

const char* sum(const void* x, int64_t rows, int64_t columns, Element element, float* sums_of_parts, float* sums,
                void* stream) {
  const int64_t parts = partials(rows, columns, element);
  const bool whole = columns % vector_of(element) == 0 && aligned({x});
  const char* error = with_element(element, [&](auto t) {
    using T = decltype(t);
    constexpr int kCount = 16 / kBytes<T>;
    const auto queue_it = whole ? queue<T, kCount> : queue<T, 1>;
    return queue_it(x, rows, columns, parts, sums_of_parts, stream);
  });
  return error ? error : queue_add_partials<float>(sums_of_parts, parts, columns, columns, sums, nullptr, stream);
}

}  // namespace

ColumnKernels column_kernels() { return {partials, sum}; }

}  // namespace cuda
}  // namespace aura
