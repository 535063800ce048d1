// Forward of attention.h: softmax(scale q k^T) v, a block of queries at a time. See attention.cuh.
#include "cuda/attention_forward.cuh"

namespace aura {
namespace cuda {
namespace {

constexpr int kTall = 2, kThreads = kThreadsOf<kTall>, kWarpRows = 16 * kTall;

// Columns of the queries for which accumulators leave registers; the others are read from shared memory for every
// product.
template <int kWidth>
constexpr int kHeld = kWidth < 64 ? kWidth : 64;
template <int kWidth>
using Queries = Left<kWidth, kTall, kHeld<kWidth>, 0, kHeld<kWidth> == kWidth ? kWidth : kWidth - kHeld<kWidth>>;
template <int kWidth>
constexpr int kKeys = kHeld<kWidth> == kWidth ? 64 : 32;  // in a tile

// In shared memory: two stages of keys and values, then the queries' columns that are not held. Those that are held
// pass through the second stage on their way to registers, and may take more room than it has.
template <int kWidth>
constexpr int kStage = 2 * tile_bytes<kWidth>(kKeys<kWidth>);
template <int kWidth>
constexpr int kOthersAt = kStage<kWidth> + std::max(kStage<kWidth>, tile_bytes<kHeld<kWidth>>(kRows));
template <int kWidth>
constexpr int kForwardShared = kOthersAt<kWidth> + tile_bytes<kWidth - kHeld<kWidth>>(kRows);

// Adds to `sums` the values of a tile of keys (from `begin` on), weighted for a warp's queries.
template <typename Type, int kWidth, bool kDrop>
__device__ __forceinline__ void attend(const Problem& problem, const Place& place, int query, int begin,
                                       const Queries<kWidth>& queries, const unsigned char* k,
                                       const unsigned char* v, Softmax<kTall>& softmax,
                                       float (&sums)[kTall][kWidth / 8][4]) {
  constexpr int kCount = kKeys<kWidth>;
  const float scale = problem.log2_scale;
  float weights[kTall][kCount / 8][4] = {}, shrink[2 * kTall];
  multiply_by_rows<Type, kCount>(weights, queries, k);
  hide_unseen<kCount, kTall>(problem, place, query, begin, weights);
  if (softmax.rise(weights, scale, shrink)) shrink_rows(sums, shrink);
  softmax.weigh(weights, scale);
  if constexpr (kDrop) {
#pragma unroll
    for (int t = 0; t < kTall; ++t) drop_weights<kCount>(problem, place, query + 16 * t, begin, weights[t]);
  }
  multiply_by_tile<Type, kCount, kWidth>(sums, weights, v);
}

template <typename Type, int kWidth, bool kDrop>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ Problem problem, uint16_t* out, float* lse) {
  constexpr int kCount = kKeys<kWidth>, kFirst = kHeld<kWidth>;
  const Place place = find_place(problem, problem.causal);
  if (place.begin >= place.queries) return;
  unsigned char* const memory = shared_memory();
  unsigned char* const first = memory + kStage<kWidth>;
  unsigned char* const others = kFirst < kWidth ? memory + kOthersAt<kWidth> : first;
  const int row = kWarpRows * (threadIdx.x / 32), query = place.begin + row;
  const int seen_by_any = query < place.queries ? keys_seen(problem, place, query + kWarpRows - 1) : 0;
  const int end = keys_seen(problem, place, place.begin + kRows - 1);
  Sources<kWidth, kThreads> sources(problem.k, problem.v, place, 0, problem.width);

  Source<kFirst, kThreads> held(problem.q, place, place.begin, problem.width);
  held.template copy<kRows>(first, place.begin, place.queries);
  if constexpr (kFirst < kWidth) {
    const View<const uint16_t> from{problem.q.data + kFirst, problem.q.strides};
    Source<kWidth - kFirst, kThreads> rest(from, place, place.begin, problem.width - kFirst);
    rest.template copy<kRows>(others, place.begin, place.queries);
  }
  copy_async_commit();
  if (end > 0) sources.template copy<kCount>(memory, 0, place.keys);
  copy_async_commit();
  copy_async_wait<1>();
  __syncthreads();
  const Queries<kWidth> queries(first, others, row);

  Softmax<kTall> softmax;
  float sums[kTall][kWidth / 8][4] = {};
  for (int begin = 0; begin < end; begin += kCount) {
    const int stage = begin / kCount % 2;
    const unsigned char *k = memory + stage * kStage<kWidth>, *v = k + tile_bytes<kWidth>(kCount);
    copy_async_wait<0>();
    __syncthreads();  // this tile is here, and nobody reads the one before any more
    if (begin + kCount < end) {
      sources.template copy<kCount>(memory + (stage ^ 1) * kStage<kWidth>, begin + kCount, place.keys);
      copy_async_commit();
    }
    if (begin < seen_by_any) {
      attend<Type, kWidth, kDrop>(problem, place, query, begin, queries, k, v, softmax, sums);
    }
  }
  softmax.finish();
  __syncthreads();  // the tiles are scratch memory now
  write_output<Type, kWidth>(problem, find_place(problem, problem.causal), softmax, sums,
                             memory + tile_bytes<kWidth>(row), query, out, lse);
}

bool takes(const AttentionInputs& in) {
  // Scores are scaled after the largest is found, which a scale below 0 would make the smallest.
  const float scale = static_cast<float>(in.scale);
  return in.width % 8 == 0 && in.width > 0 && in.width <= 128 && scale > 0 && scale < INFINITY &&
         can_be_read(in.q, in.q_strides) && can_be_read(in.k, in.k_strides) && can_be_read(in.v, in.v_strides);
}

const char* attention_forward(const AttentionForward& job, const AttentionShape& shape, int* counter, void* stream) {
  if (wgmma_takes(job.in, shape)) return wgmma_forward(job, shape, counter, stream);
  const int64_t tiles = tiles_of(job.in.queries, shape);
  const Problem problem = problem_of(job.in, shape, tiles);
  return with_types(job.in, shape, [&](auto type, auto width, auto drop) {
    constexpr int kWidth = decltype(width)::value;
    return launch_blocks<kThreads>(forward_kernel<decltype(type), kWidth, decltype(drop)::value>,
                                   tiles * job.in.heads * shape.batch, kForwardShared<kWidth>, stream, problem,
                                   static_cast<uint16_t*>(job.out), static_cast<float*>(job.lse));
  });
}

}  // namespace

AttentionKernels attention_kernels() { return {takes, attention_forward, attention_workspace, attention_backward}; }

}  // namespace cuda
}  // namespace aura
