// Sums over rows that several blocks have each a part of: the parts added up, in the same order always.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vectors.cuh"

namespace aura {
namespace cuda {

// A block of 32 x 32 threads adds up 32 columns: each row of threads every 32nd partial sum, then the rows together.
// blockIdx.y: 0 the first `columns` of each partial sum, 1 those after them.
template <typename W>
__global__ void __launch_bounds__(kWarp* kWarp)
    add_partials(const float* partials, int count, int64_t columns, int64_t stride, void* first, void* second) {
  constexpr int kBatch = 5;  // loads under way together: 160 partial sums, as many as most cards have multiprocessors
  constexpr int kPitch = kWarp + 1;  // rows are written and columns read, both over all banks
  float* tile = reinterpret_cast<float*>(shared_memory());
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
  const int64_t column = int64_t{blockIdx.x} * kWarp + x, turned = int64_t{blockIdx.x} * kWarp + y;
  float sum[1] = {};
  begin_early();
  if (column < columns) {
    const float* const from = partials + blockIdx.y * columns + column + y * stride;
    const int64_t apart = kWarp * stride;
    float some[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) some[i] = y + i * kWarp < count ? from[i * apart] : 0.0f;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) sum[0] += some[i];
#pragma unroll 1
    for (int i = kBatch; y + i * kWarp < count; ++i) sum[0] += from[i * apart];
  }
  tile[y * kPitch + x] = sum[0];
  __syncthreads();
  sum[0] = tile[x * kPitch + y];
  combine_lanes<Sum>(sum);
  if (x == 0 && turned < columns) store(blockIdx.y ? second : first, turned, to_vector<W>(sum));
}

// Queues it behind the kernel that makes `count` partial sums of `stride` floats: W [columns] in `first` and, unless it
// is null, in `second`. Null, or why not.
template <typename W>
const char* queue_add_partials(const float* partials, int64_t count, int64_t columns, int64_t stride, void* first,
                               void* second, void* stream) {
  return launch_early(add_partials<W>, grid_of(ceil_div(columns, kWarp), second ? 2 : 1), dim3(kWarp, kWarp),
                      kWarp * (kWarp + 1) * static_cast<int>(sizeof(float)), stream, partials, static_cast<int>(count),
                      columns, stride, first, second);
}

}  // namespace cuda
}  // namespace aura
