// What the forward kernels share: the online softmax over tiles of keys, and how results are written.
#pragma once

#include <cfloat>

#include "cuda/attention.cuh"

namespace aura {
namespace cuda {

// The online softmax of a lane's queries, two of every 16 of its warp's, over the keys so far: `base`, which no scaled
// score exceeds by more than kSlack, and the lane's part of the sum of exponentials relative to it. Exponentials are
// powers of 2: `scale`, by which scores are multiplied first, includes the factor log2(e).
template <int kTall>
struct Softmax {
  // A larger score replaces `base` only if it exceeds it by more than this, as in FlashAttention-4 (Dao-AILab,
  // flash_attn/cute/softmax.py): weights up to 2^8 are rounded no worse than those up to 1, and the accumulators seldom
  // have to be rescaled.
  static constexpr float kSlack = 8.0f;
  float base[2 * kTall], sum[2 * kTall] = {};

  // Below every score, but finite: scores of -inf then give weights of 0, where inf - inf would give NaN.
  __device__ __forceinline__ Softmax() {
#pragma unroll
    for (int r = 0; r < 2 * kTall; ++r) base[r] = -FLT_MAX;
  }

  // Takes these scores into account in `base`. Returns whether it changed for any of the warp's queries: then the
  // caller has to multiply what it has accumulated so far by `shrink`.
  template <int kScores>
  __device__ __forceinline__ bool rise(float (*scores)[kScores][4], float scale, float (&shrink)[2 * kTall]) {
    // The largest of the lane's own scores; only if some lane finds one too large do the four lanes of a query compare.
    float largest[2 * kTall];
    bool rises = false;
#pragma unroll
    for (int r = 0; r < 2 * kTall; ++r) {
      largest[r] = -INFINITY;
#pragma unroll
      for (int n = 0; n < kScores; ++n) {
        const float* const two = &scores[r / 2][n][r % 2 * 2];
        largest[r] = fmaxf(largest[r], fmaxf(two[0], two[1]));
      }
      rises |= fmaf(largest[r], scale, -base[r]) > kSlack;
    }
    if (!__any_sync(~0u, rises)) return false;
#pragma unroll
    for (int r = 0; r < 2 * kTall; ++r) {
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 1));
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 2)) * scale;
      const float above = largest[r] - base[r];
      const bool mine = above > kSlack;
      shrink[r] = mine ? exp2_fast(-above) : 1.0f;
      if (mine) base[r] = largest[r];
      sum[r] *= shrink[r];
    }
    return true;
  }

  // Scores become weights.
  template <int kScores>
  __device__ __forceinline__ void weigh(float (*scores)[kScores][4], float scale) {
#pragma unroll
    for (int r = 0; r < 2 * kTall; ++r) {
#pragma unroll
      for (int n = 0; n < kScores; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[r / 2][n][r % 2 * 2 + i];
          score = exp2_fast(fmaf(score, scale, -base[r]));
          sum[r] += score;
        }
      }
    }
  }

  // The sums over all four lanes of a query.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2 * kTall; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
  }
};

// Multiplies each of a lane's rows by its factor.
template <int kCount, int kFactors>
__device__ __forceinline__ void shrink_rows(float (*sums)[kCount][4], const float (&factor)[kFactors]) {
#pragma unroll
  for (int r = 0; r < kFactors; ++r) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) sums[r / 2][n][r % 2 * 2 + i] *= factor[r];
    }
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

// Writes the LSE and the output of a warp's queries, after Softmax::finish(). memory: as write_rows() takes it, for
// each of the kTall blocks of 16 rows.
template <typename Type, int kWidth, int kTall>
__device__ __forceinline__ void write_output(const Problem& problem, const Place& place, const Softmax<kTall>& softmax,
                                             float (*sums)[kWidth / 8][4], unsigned char* memory, int query,
                                             uint16_t* out, float* lse) {
  const int lane = threadIdx.x % 32;
  const int64_t stride = int64_t{problem.heads} * problem.width;
#pragma unroll
  for (int t = 0; t < kTall; ++t) {
    const int first = query + 16 * t, rows = place.queries - first;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = softmax.sum[2 * t + r];
      factor[r] = sum == 0.0f ? 0.0f : problem.keep / sum;
      if (lane % 4 == 0 && lane / 4 + 8 * r < rows) {
        const float log2_sum = softmax.base[2 * t + r] + log2f(sum);
        lse[flat_row(problem, place, first + lane / 4 + 8 * r) * problem.heads + place.head] =
            sum == 0.0f ? -INFINITY : log2_sum;
      }
    }
    uint16_t* const to = out + flat_row(problem, place, first) * stride + place.head * problem.width;
    write_rows<Type, kWidth>(sums[t], factor, memory + tile_bytes<kWidth>(16 * t), to, stride, rows,
                             problem.width);
  }
}

}  // namespace cuda
}  // namespace aura
