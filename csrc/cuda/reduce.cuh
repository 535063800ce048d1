// Sums and the like over the threads of a row.
#pragma once

#include <cuda_runtime.h>

#include "cuda/ptx.cuh"

namespace aura {
namespace cuda {

constexpr int kWarp = 32;

struct Sum {
  static constexpr float kNothing = 0.0f;
  static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};
struct Max {  // of numbers that are no NaNs
  static constexpr float kNothing = -INFINITY;
  static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

template <typename Operation, int kNumbers>
__device__ __forceinline__ void combine_lanes(float (&numbers)[kNumbers]) {
#pragma unroll
  for (int apart = kWarp / 2; apart > 0; apart /= 2) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      numbers[i] = Operation::of(numbers[i], __shfl_xor_sync(0xffffffffu, numbers[i], apart));
    }
  }
}

// Combines one or two numbers over the threads of a row, which are those of threadIdx.x; all of them get the same
// result, to the last bit.
//
// kApart: rows of a block, by threadIdx.y, may have more than one warp each and do not wait for one another. Each has a
// named barrier, numbered by threadIdx.y, which ptxas does not know: it sets aside all 16 for each block. A
// multiprocessor has two barriers for each block that it can hold, on some cards one (64 in all on Hopper, 16 on
// sm_86), so that it holds four such blocks at most, or one. Without kApart the barrier is __syncthreads, just one.
template <bool kApart = false>
struct RowReduce {
  static constexpr int kMostWarps = 32;
  static constexpr int kSize = 2 * kMostWarps * 2 * sizeof(float);  // bytes, for each row of more than one warp
  float* of_warps;
  // Successive results use the two halves of of_warps in turn, so that one barrier for each result is enough: a thread
  // that writes a half again has passed the other half's barrier, where nobody arrives before having read this half.
  int turn = 0;

  __device__ __forceinline__ explicit RowReduce(unsigned char* memory)
      : of_warps(reinterpret_cast<float*>(memory + threadIdx.y * kSize)) {}

  template <int kNumbers>
  __device__ __forceinline__ void sum(float (&numbers)[kNumbers]) {
    combine<Sum>(numbers);
  }
  template <int kNumbers>
  __device__ __forceinline__ void max(float (&numbers)[kNumbers]) {
    combine<Max>(numbers);
  }

  template <typename Operation, int kNumbers>
  __device__ __forceinline__ void combine(float (&numbers)[kNumbers]) {
    static_assert(kNumbers <= 2, "more than there is room for");
    combine_lanes<Operation>(numbers);
    const int warps = static_cast<int>(blockDim.x) / kWarp;
    if (warps == 1) return;
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    float* half = of_warps + turn * 2 * kMostWarps;
    turn ^= 1;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      if (lane == 0) half[2 * warp + i] = numbers[i];
    }
    if constexpr (kApart) {
      sync_threads(1 + static_cast<int>(threadIdx.y), static_cast<int>(blockDim.x));
    } else {
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) numbers[i] = lane < warps ? half[2 * lane + i] : Operation::kNothing;
    combine_lanes<Operation>(numbers);
  }
};

}  // namespace cuda
}  // namespace aura
