// Backward of attention.h in three kernels, without atomics, so that the bits are the same every time. The first
// prepares LSE and delta of each query; the second holds keys and walks over queries, for dk and dv; the third holds
// queries and walks over keys, for dq. So weights are computed from scores twice, but no sum ever crosses blocks. See
// attention.cuh.
//
// With P the weights, dP = dout v^T and delta = sum over d of dout * out: dS = P (dP - delta); dv = P^T dout, dk =
// scale dS^T q, dq = scale dS k. dS is rounded to 16 bits without the factor `scale`, with which its small values would
// underflow in fp16.
#include "cuda/attention_backward.cuh"

namespace aura {
namespace cuda {
namespace {

// Blocks of 16 rows that a warp holds: two where dk and dv leave registers for them.
template <int kWidth>
constexpr int kTallOf = kWidth <= 64 ? 2 : 1;
constexpr int kTile = 32;  // queries or keys in a tile: scores and dP of that many fit the registers left

constexpr int kStatisticsThreads = 256;

template <typename Type>
__device__ __forceinline__ float dot(uint32_t a, uint32_t b) {
  return low_half(Type{}, a) * low_half(Type{}, b) + high_half(Type{}, a) * high_half(Type{}, b);
}

// Lanes that share a row, 16 bytes each: a power of two.
template <int kWidth>
constexpr int kRowLanes = kWidth == 32 ? 4 : kWidth == 64 ? 8 : 16;

// counters: wgmma_backward()'s, which this sets to 0.
template <typename Type, int kWidth>
__global__ void __launch_bounds__(kStatisticsThreads)
    statistics_kernel(const __grid_constant__ Gradients gradients, int64_t rows, int queries, int heads, int width,
                      int* counters) {
  constexpr int kLanes = kRowLanes<kWidth>;
  if (blockIdx.x == 0 && threadIdx.x < kBackwardCounters) counters[threadIdx.x] = 0;
  const int64_t row = (int64_t{blockIdx.x} * kStatisticsThreads + threadIdx.x) / kLanes;  // of [B, T, H]
  const int eight = threadIdx.x % kLanes;
  float delta = 0.0f, lse = 0.0f;
  if (row < rows && eight == 0) lse = gradients.lse[row];  // under way together with the loads below
  if (row < rows && 8 * eight < width) {
    const uint4 a = *reinterpret_cast<const uint4*>(gradients.out + row * width + 8 * eight);
    const uint4 b = *reinterpret_cast<const uint4*>(gradients.dout.data + row * width + 8 * eight);
    delta = dot<Type>(a.x, b.x) + dot<Type>(a.y, b.y) + dot<Type>(a.z, b.z) + dot<Type>(a.w, b.w);
  }
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) delta += __shfl_xor_sync(~0u, delta, lanes);
  if (row < rows && eight == 0) {
    const int64_t head = row % heads, query = row / heads % queries, batch = row / heads / queries;
    const Statistics result{lse == -INFINITY ? INFINITY : lse, delta};
    gradients.statistics[(batch * heads + head) * queries + query] = result;
  }
}

// ---- dk and dv: keys as rows ----------------------------------------------------------------------------------------

// How many columns of its keys, and of their values, a warp holds in registers: with 16 rows what fits beside the
// accumulators, with 32 none. The others are read from shared memory again for every tile.
template <int kWidth>
constexpr int kHeldKeys = kTallOf<kWidth> == 1 ? kWidth : 0;
template <int kWidth>
constexpr int kHeldValues = kTallOf<kWidth> == 1 ? 96 : 0;

template <int kWidth>
constexpr int kKeysShared = 2 * tile_bytes<kWidth>(kRows) + 4 * tile_bytes<kWidth>(kTile) +
                            2 * kTile * static_cast<int>(sizeof(Statistics));

// Scores of a warp's keys with a tile of queries become weights.
template <int kTall>
__device__ __forceinline__ void weigh_by_key(float scale, const Statistics* statistics,
                                             float (&scores)[kTall][kTile / 8][4]) {
#pragma unroll
  for (int n = 0; n < kTile / 8; ++n) {
    const Statistics* const two = statistics + 8 * n + 2 * (threadIdx.x % 4);
    const float log2_sums[2] = {two[0].log2_sum, two[1].log2_sum};
#pragma unroll
    for (int t = 0; t < kTall; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[t][n][i] = exp2_fast(fmaf(scores[t][n][i], scale, -log2_sums[i % 2]));
    }
  }
}

// For a warp's 16 keys: dP becomes dS, and then dropped weights become 0, which leaves those that multiplied the values
// in forward, but for the factor `keep`.
template <bool kDrop>
__device__ __forceinline__ void score_gradients_by_key(const Problem& problem, const Place& place, int key, int query,
                                                       const Statistics* statistics, float (&weights)[kTile / 8][4],
                                                       float (&gradients)[kTile / 8][4]) {
  using Kept = KeptByKey<kTile>;
  [[maybe_unused]] Kept kept;
  if constexpr (kDrop) kept.draw(problem, flat_row(problem, place, query), key, place.head);
#pragma unroll
  for (int n = 0; n < kTile / 8; ++n) {
    const uint32_t columns = kDrop ? kept.columns(n) : 0;
    const Statistics* const two = statistics + 8 * n + 2 * (threadIdx.x % 4);
    const float deltas[2] = {two[0].delta, two[1].delta};
    score_gradients<kDrop>(kept, columns, problem.keep, weights[n], [&](int i) { return deltas[i % 2]; }, gradients[n]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kDrop && !Kept::kept(columns, i)) weights[n][i] = 0.0f;
    }
  }
}

// Start the copy of a tile of queries from `begin` on, with their dout and statistics. From `end` on all are zeros:
// such queries have weights of 1, but dout and q of 0, and add nothing to dv and dk.
template <int kWidth, int kBlockThreads>
__device__ __forceinline__ void copy_queries(Sources<kWidth, kBlockThreads>& sources, const Statistics* from,
                                             int begin, int end, unsigned char* tiles, Statistics* statistics) {
  sources.template copy<kTile>(tiles, begin, end);
  const int query = begin + threadIdx.x;
  if (threadIdx.x < kTile) copy_async_8(statistics + threadIdx.x, from + query, query < end ? sizeof(Statistics) : 0);
  copy_async_commit();
}

template <typename Type, int kWidth, bool kDrop>
__global__ void __launch_bounds__(kThreadsOf<kTallOf<kWidth>>, kTallOf<kWidth>)
    keys_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Gradients gradients) {
  constexpr int kTall = kTallOf<kWidth>, kThreads = kThreadsOf<kTall>;
  constexpr int kStage = 2 * tile_bytes<kWidth>(kTile);
  const Place place = find_place(problem, false);
  if (place.begin >= rows_of(problem, place)) return;
  unsigned char* const memory = shared_memory();
  unsigned char *const k = memory, *const v = k + tile_bytes<kWidth>(kRows), *const stages = v + (v - k);
  Statistics* const statistics = reinterpret_cast<Statistics*>(stages + 2 * kStage);
  const int lane = threadIdx.x % 32, row = 16 * kTall * (threadIdx.x / 32), key = place.begin + row;
  const int start = problem.causal ? place.begin : 0;
  const int end = place.begin < place.keys ? place.queries : 0;
  // Where the first tile begins in which some query sees one of the warp's keys.
  const int first_seeing = key >= place.keys ? end : problem.causal ? key / kTile * kTile : 0;
  Sources<kWidth, kThreads> sources(problem.q, gradients.dout, place, start, problem.width);
  const Statistics* const from = gradients.statistics + statistics_of(problem, place, 0);

  float dk[kTall][kWidth / 8][4] = {}, dv[kTall][kWidth / 8][4] = {};
  if (start < end) {
    Sources<kWidth, kThreads> own(problem.k, problem.v, place, place.begin, problem.width);
    own.template copy<kRows>(memory, place.begin, place.keys);
    copy_async_commit();
    copy_queries(sources, from, start, end, stages, statistics);
    copy_async_wait<1>();
  }
  __syncthreads();
  const Left<kWidth, kTall, kHeldKeys<kWidth>> keys(k, k, row);
  const Left<kWidth, kTall, kHeldValues<kWidth>, kRows> values(k, k, row);  // behind the keys, as rows of the same tile
  for (int begin = start; begin < end; begin += kTile) {
    const int stage = begin & kTile ? 1 : 0;  // kRows are an even number of tiles
    const unsigned char* const q = stages + stage * kStage;  // and behind it dout
    copy_async_wait<0>();
    __syncthreads();  // this tile is here, and nobody reads the one before any more
    if (begin + kTile < end) {
      copy_queries(sources, from, begin + kTile, end, stages + (stage ^ 1) * kStage, statistics + (stage ^ 1) * kTile);
    }
    if (begin >= first_seeing) {
      float weights[kTall][kTile / 8][4] = {}, dscores[kTall][kTile / 8][4] = {};
      multiply_by_rows<Type, kTile>(weights, keys, q);
      multiply_by_rows<Type, kTile, kTile>(dscores, values, q);
      weigh_by_key(problem.log2_scale, statistics + stage * kTile, weights);
      clear_unseen<kTile, kTall>(problem, key, begin, weights);
#pragma unroll
      for (int t = 0; t < kTall; ++t) {
        score_gradients_by_key<kDrop>(problem, place, key + 16 * t, begin, statistics + stage * kTile, weights[t],
                                      dscores[t]);
      }
      multiply_by_tile<Type, kTile, kWidth, kTile>(dv, weights, q);
      multiply_by_tile<Type, kTile, kWidth>(dk, dscores, q);
    }
  }

  const Place found = find_place(problem, false);
  const int count = rows_of(problem, found);
  __syncwarp();  // only this warp has read its rows of k and v, which are scratch memory now
#pragma unroll
  for (int t = 0; t < kTall; ++t) {
    const int first = key + 16 * t, mine = tile_bytes<kWidth>(row + 16 * t);
    const KeyFactors factors(problem, found, first + lane / 4);
    write_rows<Type, kWidth>(dk[t], factors.k, k + mine, row_of(gradients.dk, found, first), gradients.dk.strides.row,
                             count - first, problem.width);
    write_rows<Type, kWidth>(dv[t], factors.v, v + mine, row_of(gradients.dv, found, first), gradients.dv.strides.row,
                             count - first, problem.width);
  }
}

// ---- dq: queries as rows --------------------------------------------------------------------------------------------

// Keys come two tiles at a time, so that the warps wait for one another half as often. There is room: the queries and
// their dout, which come to this memory first, take as much as two stages of 64 keys and values.
template <int kWidth>
constexpr int kQueriesShared = 2 * tile_bytes<kWidth>(kRows);
constexpr int kPair = kRows / 2;

// Scores and dP of a warp's 16 queries (from `query` on) with a tile of keys (from `key` on) become dS, in `gradients`.
template <bool kDrop>
__device__ __forceinline__ void score_gradients_by_query(const Problem& problem, const Place& place, int query, int key,
                                                         const Statistics (&statistics)[2],
                                                         float (&scores)[kTile / 8][4],
                                                         float (&gradients)[kTile / 8][4]) {
  const float scale = problem.log2_scale;
  [[maybe_unused]] KeptByQuery<kTile> kept;
  if constexpr (kDrop) kept.draw(problem, flat_row(problem, place, query), key, place.head);
#pragma unroll
  for (int n = 0; n < kTile / 8; ++n) {
    const uint32_t columns = kDrop ? kept.columns(n) : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = exp2_fast(fmaf(scores[n][i], scale, -statistics[i / 2].log2_sum));
    score_gradients<kDrop>(kept, columns, problem.keep, scores[n], [&](int i) { return statistics[i / 2].delta; },
                           gradients[n]);
  }
}

template <typename Type, int kWidth, bool kDrop>
__global__ void __launch_bounds__(kThreadsOf<kTallOf<kWidth>>, kTallOf<kWidth>)
    queries_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Gradients gradients) {
  constexpr int kTall = kTallOf<kWidth>, kThreads = kThreadsOf<kTall>, kWarpRows = 16 * kTall;
  constexpr int kStage = 2 * tile_bytes<kWidth>(kPair);
  const Place place = find_place(problem, problem.causal);
  if (place.begin >= place.queries) return;
  unsigned char* const memory = shared_memory();
  const int lane = threadIdx.x % 32, row = kWarpRows * (threadIdx.x / 32), query = place.begin + row;
  const int seen_by_any = query < place.queries ? keys_seen(problem, place, query + kWarpRows - 1) : 0;
  const int end = keys_seen(problem, place, place.begin + kRows - 1);

  // The queries and their dout fill the whole memory on their way to registers.
  Sources<kWidth, kThreads> own(problem.q, gradients.dout, place, place.begin, problem.width);
  own.template copy<kRows>(memory, place.begin, place.queries);
  Sources<kWidth, kThreads> sources(problem.k, problem.v, place, 0, problem.width);
  copy_async_commit();
  Statistics statistics[kTall][2];
#pragma unroll
  for (int i = 0; i < 2 * kTall; ++i) {
    statistics[i / 2][i % 2] = load_statistics(problem, gradients, place, query + lane / 4 + 8 * i);
  }
  copy_async_wait<0>();
  __syncthreads();
  unsigned char* const douts = memory + tile_bytes<kWidth>(kRows);
  const Left<kWidth, kTall, kWidth> q(memory, memory, row), dout(douts, douts, row);
  __syncthreads();
  if (end > 0) sources.template copy<kPair>(memory, 0, place.keys);
  copy_async_commit();

  float dq[kTall][kWidth / 8][4] = {};
  for (int begin = 0; begin < end; begin += kPair) {
    const int stage = begin / kPair % 2;
    copy_async_wait<0>();
    __syncthreads();  // these keys are here, and nobody reads those before any more
    if (begin + kPair < end) {
      sources.template copy<kPair>(memory + (stage ^ 1) * kStage, begin + kPair, place.keys);
      copy_async_commit();
    }
    const int seen = min(begin + kPair, seen_by_any);
#pragma unroll 1
    for (int key = begin; key < seen; key += kTile) {
      const unsigned char* const k = memory + stage * kStage + tile_bytes<kWidth>(key - begin);  // v: kPair rows behind
      float scores[kTall][kTile / 8][4] = {}, dscores[kTall][kTile / 8][4] = {};
      multiply_by_rows<Type, kTile>(scores, q, k);
      multiply_by_rows<Type, kTile, kPair>(dscores, dout, k);
      hide_unseen<kTile, kTall>(problem, place, query, key, scores);
#pragma unroll
      for (int t = 0; t < kTall; ++t) {
        score_gradients_by_query<kDrop>(problem, place, query + 16 * t, key, statistics[t], scores[t], dscores[t]);
      }
      multiply_by_tile<Type, kTile, kWidth>(dq, dscores, k);
    }
  }
  __syncthreads();  // the tiles are scratch memory now
  const Place found = find_place(problem, problem.causal);
  const float factor[2] = {problem.scale, problem.scale};
#pragma unroll
  for (int t = 0; t < kTall; ++t) {
    const int first = query + 16 * t;
    write_rows<Type, kWidth>(dq[t], factor, memory + tile_bytes<kWidth>(row + 16 * t),
                             row_of(gradients.dq, found, first), gradients.dq.strides.row, found.queries - first,
                             problem.width);
  }
}

// ---- Launching ------------------------------------------------------------------------------------------------------

View<uint16_t> gradient_of(void* data, const Strides& strides) { return {static_cast<uint16_t*>(data), strides}; }

}  // namespace

int64_t attention_workspace(const AttentionInputs& in, const AttentionShape& shape) {
  return shape.batch * in.heads * in.queries * static_cast<int64_t>(sizeof(Statistics)) +
         kBackwardCounters * static_cast<int64_t>(sizeof(int));
}

const char* attention_backward(const AttentionBackward& job, const AttentionShape& shape, void* workspace,
                               void* stream) {
  const AttentionInputs& in = job.in;
  const Strides rows_of_heads{in.queries * in.heads * in.width, in.heads * in.width, in.width};
  if (!can_be_read(job.dout, rows_of_heads) || !can_be_read(job.out, rows_of_heads) ||
      !can_be_read(job.dq, job.dq_strides) || !can_be_read(job.dk, job.dk_strides) ||
      !can_be_read(job.dv, job.dv_strides)) {
    return "attention: the gradients do not lie at multiples of 16 bytes";
  }
  Gradients gradients{};
  gradients.dout = view_of(job.dout, rows_of_heads);
  gradients.out = static_cast<const uint16_t*>(job.out);
  gradients.lse = static_cast<const float*>(job.lse);
  gradients.statistics = static_cast<Statistics*>(workspace);
  gradients.dq = gradient_of(job.dq, job.dq_strides);
  gradients.dk = gradient_of(job.dk, job.dk_strides);
  gradients.dv = gradient_of(job.dv, job.dv_strides);
  const int64_t rows = shape.batch * in.queries * in.heads;
  const bool wgmma = wgmma_takes(in, shape);
  const int64_t query_tiles = tiles_of(in.queries, shape), key_tiles = tiles_of(shape.keys, shape);
  const Problem by_query = problem_of(in, shape, query_tiles), by_key = problem_of(in, shape, key_tiles);
  return with_types(in, shape, [&](auto type, auto width, auto drop) {
    using Type = decltype(type);
    constexpr int kWidth = decltype(width)::value;
    constexpr bool kDrop = decltype(drop)::value;
    constexpr int kRowsPerBlock = kStatisticsThreads / kRowLanes<kWidth>, kBlock = kThreadsOf<kTallOf<kWidth>>;
    const int64_t heads = in.heads * shape.batch;
    int* const counters = reinterpret_cast<int*>(gradients.statistics + rows);
    const char* error = launch_blocks<kStatisticsThreads>(statistics_kernel<Type, kWidth>,
                                                (rows + kRowsPerBlock - 1) / kRowsPerBlock, 0, stream, gradients, rows,
                                                by_query.queries, by_query.heads, by_query.width, counters);
    if (error == nullptr && wgmma) return wgmma_backward(in, shape, gradients, counters, stream);
    if (error == nullptr) {
      error = launch_blocks<kBlock>(keys_kernel<Type, kWidth, kDrop>, key_tiles * heads, kKeysShared<kWidth>, stream,
                                    by_key, gradients);
    }
    if (error == nullptr) {
      error = launch_blocks<kBlock>(queries_kernel<Type, kWidth, kDrop>, query_tiles * heads, kQueriesShared<kWidth>,
                                    stream, by_query, gradients);
    }
    return error;
  });
}

}  // namespace cuda
}  // namespace aura
