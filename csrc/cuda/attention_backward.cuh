// What the backward kernels share: what they are told, and how scores become weights again. With P the weights, dP =
// dout v^T and delta = sum over d of dout * out: dS = P (dP - delta); dv = P^T dout, dk = scale dS^T q, dq = scale dS k
// (Dao et al. 2022, arXiv:2205.14135, appendix B.2).
#pragma once

#include "cuda/attention.cuh"

namespace aura {
namespace cuda {

// Of a query: log2 of its sum of exponentials, +inf where it sees no key, which makes all its weights 0; and its delta.
struct alignas(8) Statistics {
  float log2_sum, delta;
};

// What the kernels are told beside a Problem. dout and out: [B, T, H, D], contiguous.
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

// How the scores of a warp's 16 keys (from `key` on) with a tile of queries (from `query` on) become weights: element
// [n][i] of the accumulators.
struct WeightsByKey {
  float scale;
  int hidden;  // queries of the tile before the lane's first key, from the lane's first query on

  __device__ __forceinline__ WeightsByKey(const Problem& problem, int key, int query) : scale(problem.scale * kLog2E) {
    const int lane = threadIdx.x % 32;
    hidden = problem.causal ? key + lane / 4 - query - 2 * (lane % 4) : -8;  // -8: none, of the second key neither
  }
  __device__ __forceinline__ float weight(int n, int i, float score, float log2_sum) const {
    return 8 * n + i % 2 < hidden + i / 2 * 8 ? 0.0f : exp2_fast(fmaf(score, scale, -log2_sum));
  }
};

// Dropout for dP, columns [8 n, 8 n + 8) of a lane's two rows. kept: KeptByQuery or KeptByKey.
template <typename Kept>
__device__ __forceinline__ void drop_gradients(const Kept& kept, int n, float keep, float (&gradients)[4]) {
  const uint32_t columns = kept.columns(n);
#pragma unroll
  for (int i = 0; i < 4; ++i) gradients[i] = kept.kept(columns, i) ? gradients[i] * keep : 0.0f;
}

// What dk and dv of a lane's two keys, the first of them `key`, are multiplied by; 0 for keys that nobody sees.
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

// dq, dk and dv by the kernels of sm_90 alone, from the statistics, where wgmma_takes() the problem.
const char* wgmma_backward(const AttentionInputs& in, const AttentionShape& shape, const Gradients& gradients,
                           void* stream);

}  // namespace cuda
}  // namespace aura
