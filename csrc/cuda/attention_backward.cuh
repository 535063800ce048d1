// What the backward kernels share: their arguments, the mask by key, and how dP becomes dS. With P the weights, dP =
// dout v^T and delta = sum over d of dout * out: dS = P (dP - delta); dv = P^T dout, dk = scale dS^T q, dq = scale dS k
// (Dao et al. 2022, arXiv:2205.14135, appendix B.2).
#pragma once

#include "cuda/attention.cuh"

namespace aura {
namespace cuda {

// Of a query: its LSE to base 2, or +inf where it sees no key, which makes all its weights 0; and its delta.
struct alignas(8) Statistics {
  float log2_sum, delta;
};

// What the kernels are given besides a Problem. dout and out: [B, T, H, D], contiguous.
struct Gradients {
  View<const uint16_t> dout;
  const uint16_t* out;
  const float* lse;
  Statistics* statistics;  // [B, H, T]
  View<uint16_t> dq, dk, dv;
};

__device__ __forceinline__ int64_t statistics_of(const Problem& problem, const Place& place, int query) {
  return (int64_t{place.batch} * problem.heads + place.head) * problem.queries + place.first + query;
}

__device__ __forceinline__ Statistics load_statistics(const Problem& problem, const Gradients& gradients,
                                                      const Place& place, int query) {
  if (query >= place.queries) return {INFINITY, 0.0f};
  return gradients.statistics[statistics_of(problem, place, query)];
}

// How many rows dk and dv have; those beyond the sequence's keys are zeros.
__device__ __forceinline__ int rows_of(const Problem& problem, const Place& place) {
  return problem.cu_seqlens != nullptr ? place.keys : problem.keys;
}

// Sets the weights of a warp's keys (from `key` on) to 0 for those queries (from `query` on) that do not see them.
// Scores of -inf would not do: a query whose LSE is NaN would spoil dv of keys that it does not see.
template <int kQueries, int kTall = 1>
__device__ __forceinline__ void clear_unseen(const Problem& problem, int key, int query,
                                             float (*weights)[kQueries / 8][4]) {
  if (!problem.causal || query >= key + 16 * kTall - 1) return;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2 * kTall; ++r) {
    const int unseen = key + lane / 4 + 8 * r - query - 2 * (lane % 4);  // queries before the key
#pragma unroll
    for (int n = 0; n < kQueries / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (8 * n + i < unseen) weights[r / 2][n][r % 2 * 2 + i] = 0.0f;
      }
    }
  }
}

// In `gradients`, dP becomes dS, for a lane's four elements of eight columns. kept: dropout's KeptByQuery or KeptByKey;
// columns: its bits of these columns. delta(i): that of element i.
template <bool kDrop, typename Kept, typename Delta>
__device__ __forceinline__ void score_gradients(const Kept& kept, uint32_t columns, float keep,
                                                const float (&weights)[4], Delta delta, float (&gradients)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float kept_gradient = !kDrop || kept.kept(columns, i) ? gradients[i] : 0.0f;
    gradients[i] = weights[i] * fmaf(kept_gradient, kDrop ? keep : 1.0f, -delta(i));
  }
}

// The factors of dk and dv of a lane's two keys, `key` and key + 8; 0 for keys beyond the sequence's.
struct KeyFactors {
  float k[2], v[2];

  __device__ __forceinline__ KeyFactors(const Problem& problem, const Place& place, int key) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool seen = key + 8 * r < place.keys;
      k[r] = seen ? problem.scale : 0.0f;
      v[r] = seen ? problem.keep : 0.0f;
    }
  }
};

// dq, dk and dv by the kernels for sm_90 only, from the statistics, where wgmma_takes() the problem. counters: as many
// ints on the device, all 0, one for each of the two kernels. The kernel that makes the statistics clears them: a
// cudaMemsetAsync before each of the two would take as long as a small kernel.
constexpr int kBackwardCounters = 2;
const char* wgmma_backward(const AttentionInputs& in, const AttentionShape& shape, const Gradients& gradients,
                           int* counters, void* stream);

}  // namespace cuda
}  // namespace aura
