// What the forward kernels share: the softmax over keys that come tile by tile, and how its results are written.
#pragma once

#include "cuda/attention.cuh"

namespace aura {
namespace cuda {

// Of a lane's two queries, over the keys so far: the largest score, and the lane's part of the sum of exponentials. The
// exponentials are powers of 2, and `scale` has a factor log2(e) for that.
struct Softmax {
  float largest[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};

  // Take these scores into account in `largest`. What weights so far were added up to is to shrink by `shrink`.
  template <int kScores>
  __device__ __forceinline__ void rise(const float (&scores)[kScores][4], float scale, float (&shrink)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float now = largest[r];
#pragma unroll
      for (int n = 0; n < kScores; ++n) now = fmaxf(now, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
      shrink[r] = exp2_fast(largest[r] * scale - base(now, scale));
      largest[r] = now;
      sum[r] *= shrink[r];
    }
  }

  // Scores become weights relative to the largest.
  template <int kScores>
  __device__ __forceinline__ void weigh(float (&scores)[kScores][4], float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float most = base(largest[r], scale);
#pragma unroll
      for (int n = 0; n < kScores; ++n) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          scores[n][i] = exp2_fast(fmaf(scores[n][i], scale, -most));
          sum[r] += scores[n][i];
        }
      }
    }
  }

  // Scores of -inf alone, so far: weights of 0, not of inf - inf.
  static __device__ __forceinline__ float base(float largest, float scale) {
    return largest == -INFINITY ? 0.0f : largest * scale;
  }

  // The sums over all four lanes of a query.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
  }
};

// Each of a lane's two rows times its factor.
template <int kCount>
__device__ __forceinline__ void scale_rows(float (&sums)[kCount][4], const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[n][i] *= factor[i / 2];
  }
}

// Dropout for the weights of a warp's 16 queries (from `query` on) and kKeys keys (from `key` on): zeros for those that
// are not kept.
template <int kKeys>
__device__ __forceinline__ void drop_weights(const Problem& problem, const Place& place, int query, int key,
                                             float (&weights)[kKeys / 8][4]) {
  constexpr int kPart = kKeys < 64 ? kKeys : 64;
#pragma unroll
  for (int done = 0; done < kKeys; done += kPart) {
    KeptByQuery<kPart> kept;
    kept.draw(problem, flat_row(problem, place, query), key + done, place.head);
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n) {
      const uint32_t columns = kept.columns(n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& weight = weights[done / 8 + n][i];
        weight = kept.kept(columns, i) ? weight : 0.0f;
      }
    }
  }
}

// The sum of exponentials and the output of a warp's 16 queries, once their weights are all added up.
template <typename Type, int kWidth>
__device__ __forceinline__ void write_output(const Problem& problem, const Place& place, const Softmax& softmax,
                                             const float (&sums)[kWidth / 8][4], unsigned char* memory, int query,
                                             uint16_t* out, float* lse) {
  const int lane = threadIdx.x % 32, rows = place.queries - query;
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = softmax.sum[r];
    factor[r] = sum == 0.0f ? 0.0f : problem.keep / sum;
    if (lane % 4 == 0 && lane / 4 + 8 * r < rows) {
      const float log2_sum = softmax.largest[r] * problem.scale * kLog2E + log2f(sum);
      lse[flat_row(problem, place, query + lane / 4 + 8 * r) * problem.heads + place.head] =
          sum == 0.0f ? -INFINITY : log2_sum * kLn2;
    }
  }
  const int64_t stride = int64_t{problem.heads} * kWidth;
  uint16_t* const to = out + flat_row(problem, place, query) * stride + place.head * kWidth;
  write_rows<Type, kWidth>(sums, factor, memory, to, stride, rows);
}

}  // namespace cuda
}  // namespace aura
