// Backward of attention.h, the same bits every time: three kernels and no atomics. The first takes what is needed of
// each query; the second holds keys and walks over queries, for dk and dv; the third holds queries and walks over
// keys, for dq. So weights are computed from scores twice, and no sum ever crosses blocks. See attention.cuh.
//
// With P the weights, dP = dout v^T and delta = sum over d of dout * out: dS = P (dP - delta); dv = P^T dout, dk =
// scale dS^T q, dq = scale dS k. dS is rounded to 16 bits before it has the factor `scale`, or the small ones would
// fall below what fp16 holds.
#include "cuda/attention_backward.cuh"

namespace aura {
namespace cuda {
namespace {

// Queries and keys of a tile: fewer where what a warp holds of wide heads leaves few registers for scores.
template <int kWidth>
constexpr int kQueryTile = kWidth <= 64 ? 64 : 32;
template <int kWidth>
constexpr int kKeyTile = kWidth <= 96 ? 64 : 32;

template <typename Type>
__device__ __forceinline__ float dot(uint32_t a, uint32_t b) {
  return low_half(Type{}, a) * low_half(Type{}, b) + high_half(Type{}, a) * high_half(Type{}, b);
}

// Lanes that share a row, 16 bytes each: a power of two.
template <int kWidth>
constexpr int kRowLanes = kWidth == 32 ? 4 : kWidth == 64 ? 8 : 16;

template <typename Type, int kWidth>
__global__ void __launch_bounds__(kThreads)
    statistics_kernel(const __grid_constant__ Gradients gradients, int64_t rows, int queries, int heads) {
  constexpr int kLanes = kRowLanes<kWidth>;
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;  // of [B, T, H]
  const int eight = threadIdx.x % kLanes;
  float delta = 0.0f;
  if (row < rows && 8 * eight < kWidth) {
    const uint4 a = *reinterpret_cast<const uint4*>(gradients.out + row * kWidth + 8 * eight);
    const uint4 b = *reinterpret_cast<const uint4*>(gradients.dout.data + row * kWidth + 8 * eight);
    delta = dot<Type>(a.x, b.x) + dot<Type>(a.y, b.y) + dot<Type>(a.z, b.z) + dot<Type>(a.w, b.w);
  }
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) delta += __shfl_xor_sync(~0u, delta, lanes);
  if (row < rows && eight == 0) {
    const int64_t head = row % heads, query = row / heads % queries, batch = row / heads / queries;
    const float lse = gradients.lse[row];
    const Statistics result{lse == -INFINITY ? INFINITY : lse * kLog2E, delta};
    gradients.statistics[(batch * heads + head) * queries + query] = result;
  }
}

// ---- dk and dv: keys as rows ----------------------------------------------------------------------------------------

template <int kWidth>
constexpr int kKeysShared = 2 * tile_bytes<kWidth>(kRows) + 4 * tile_bytes<kWidth>(kQueryTile<kWidth>) +
                            2 * kQueryTile<kWidth> * static_cast<int>(sizeof(Statistics));

// Scores and dP of a warp's 16 keys (from `key` on) with a tile of queries (from `query` on) become weights, as the
// values saw them but for the factor `keep`, and dS.
template <bool kDrop, int kQueries>
__device__ __forceinline__ void weigh_by_key(const Problem& problem, const Place& place, int key, int query,
                                             const Statistics* statistics, float (&weights)[kQueries / 8][4],
                                             float (&dscores)[kQueries / 8][4]) {
  const WeightsByKey by_key(problem, key, query);
  [[maybe_unused]] uint32_t columns = 0;
  using Kept = KeptByKey<kQueries>;
  [[maybe_unused]] Kept kept;
  if constexpr (kDrop) kept.draw(problem, flat_row(problem, place, query), key, place.head);
#pragma unroll
  for (int n = 0; n < kQueries / 8; ++n) {
    if constexpr (kDrop) columns = kept.columns(n);
    // {log2_sum, delta} of two queries, in one access.
    const float4 two = *reinterpret_cast<const float4*>(statistics + 8 * n + 2 * (threadIdx.x % 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float weight = by_key.weight(n, i, weights[n][i], i % 2 ? two.z : two.x);
      float gradient = dscores[n][i];
      if constexpr (kDrop) gradient = Kept::kept(columns, i) ? gradient * problem.keep : 0.0f;
      dscores[n][i] = weight * (gradient - (i % 2 ? two.w : two.y));
      weights[n][i] = !kDrop || Kept::kept(columns, i) ? weight : 0.0f;
    }
  }
}

template <typename Type, int kWidth, bool kDrop>
__global__ void __launch_bounds__(kThreads)
    keys_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Gradients gradients) {
  constexpr int kQueries = kQueryTile<kWidth>, kStage = 2 * tile_bytes<kWidth>(kQueries);
  const Place place = find_place(problem, false);
  const int rows = problem.cu_seqlens != nullptr ? place.keys : problem.keys;  // those beyond `keys` get zeros
  if (place.begin >= rows) return;
  unsigned char* const memory = shared_memory();
  unsigned char *const k = memory, *const v = k + tile_bytes<kWidth>(kRows), *const stages = v + (v - k);
  Statistics* const statistics = reinterpret_cast<Statistics*>(stages + 2 * kStage);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, key = place.begin + 16 * warp;
  const int start = problem.causal ? place.begin / kQueries * kQueries : 0;
  const int end = place.begin < place.keys ? place.queries : 0;

  float dk[kWidth / 8][4] = {}, dv[kWidth / 8][4] = {};
  if (start < end) {
    copy_tiles<kRows, kWidth>(memory, problem.k, problem.v, place, place.begin, place.keys);
    copy_tiles<kQueries, kWidth>(stages, problem.q, gradients.dout, place, start, place.queries);
    copy_async_commit();
    if (threadIdx.x < kQueries) {
      statistics[threadIdx.x] = load_statistics(problem, gradients, place, start + threadIdx.x);
    }
  }
  for (int begin = start, stage = 0; begin < end; begin += kQueries, stage ^= 1) {
    const unsigned char *q = stages + stage * kStage, *dout = q + tile_bytes<kWidth>(kQueries);
    copy_async_wait<0>();
    __syncthreads();  // this tile is here, and nobody reads the one before any more
    Statistics next;
    const bool more = begin + kQueries < end, brings = more && threadIdx.x < kQueries;
    if (more) {
      copy_tiles<kQueries, kWidth>(stages + (stage ^ 1) * kStage, problem.q, gradients.dout, place, begin + kQueries,
                                   place.queries);
      copy_async_commit();
    }
    if (brings) next = load_statistics(problem, gradients, place, begin + kQueries + threadIdx.x);
    if (key < place.keys && (!problem.causal || begin + kQueries > key)) {
      float weights[kQueries / 8][4] = {}, dscores[kQueries / 8][4] = {};
      multiply_by_rows<Type, kQueries, kWidth>(weights, k, 16 * warp, q);
      multiply_by_rows<Type, kQueries, kWidth>(dscores, v, 16 * warp, dout);
      weigh_by_key<kDrop, kQueries>(problem, place, key, begin, statistics + stage * kQueries, weights, dscores);
      multiply_by_tile<Type, kQueries, kWidth>(dv, weights, dout);
      multiply_by_tile<Type, kQueries, kWidth>(dk, dscores, q);
    }
    if (brings) statistics[(stage ^ 1) * kQueries + threadIdx.x] = next;  // its last readers are a barrier behind
  }

  const KeyFactors factors(problem, place, key + lane / 4);
  // Nobody but this warp has read its 16 rows of either tile.
  __syncwarp();
  const int mine = warp * tile_bytes<kWidth>(16);
  write_rows<Type, kWidth>(dk, factors.k, k + mine, row_of(gradients.dk, place, key), gradients.dk.strides.row,
                           rows - key);
  write_rows<Type, kWidth>(dv, factors.v, v + mine, row_of(gradients.dv, place, key), gradients.dv.strides.row,
                           rows - key);
}

// ---- dq: queries as rows --------------------------------------------------------------------------------------------

template <int kWidth>
constexpr int kQueriesShared = 2 * tile_bytes<kWidth>(kRows);  // what begins there; keys and values, twice, are no more

// Scores and dP of a warp's 16 queries (from `query` on) with a tile of keys (from `key` on) become dS, in `dscores`.
template <bool kDrop, int kKeys>
__device__ __forceinline__ void weigh_by_query(const Problem& problem, const Place& place, int query, int key,
                                               const Statistics (&statistics)[2],
                                               const float (&scores)[kKeys / 8][4], float (&dscores)[kKeys / 8][4]) {
  const float scale = problem.scale * kLog2E;
  using Kept = KeptByQuery<kKeys>;
  [[maybe_unused]] Kept kept;
  if constexpr (kDrop) kept.draw(problem, flat_row(problem, place, query), key, place.head);
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
    if constexpr (kDrop) drop_gradients(kept, n, problem.keep, dscores[n]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float weight = exp2_fast(fmaf(scores[n][i], scale, -statistics[i / 2].log2_sum));
      dscores[n][i] = weight * (dscores[n][i] - statistics[i / 2].delta);
    }
  }
}

template <typename Type, int kWidth, bool kDrop>
__global__ void __launch_bounds__(kThreads)
    queries_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Gradients gradients) {
  constexpr int kKeys = kKeyTile<kWidth>, kStage = 2 * tile_bytes<kWidth>(kKeys);
  const Place place = find_place(problem, problem.causal);
  if (place.begin >= place.queries) return;
  unsigned char* const memory = shared_memory();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, query = place.begin + 16 * warp;
  const int seen_by_any = query < place.queries ? keys_seen(problem, place, query + 15) : 0;
  const int end = keys_seen(problem, place, place.begin + kRows - 1);

  // The queries and their gradients fill the whole memory on their way to registers.
  copy_tiles<kRows, kWidth>(memory, problem.q, gradients.dout, place, place.begin, place.queries);
  copy_async_commit();
  const Statistics statistics[2] = {load_statistics(problem, gradients, place, query + lane / 4),
                                    load_statistics(problem, gradients, place, query + lane / 4 + 8)};
  copy_async_wait<0>();
  __syncthreads();
  uint32_t q[kWidth / 16][4], dout[kWidth / 16][4];
  load_operands<kWidth>(q, memory, 16 * warp);
  load_operands<kWidth>(dout, memory + tile_bytes<kWidth>(kRows), 16 * warp);
  __syncthreads();
  if (end > 0) copy_tiles<kKeys, kWidth>(memory, problem.k, problem.v, place, 0, place.keys);
  copy_async_commit();

  float dq[kWidth / 8][4] = {};
  for (int begin = 0, stage = 0; begin < end; begin += kKeys, stage ^= 1) {
    const unsigned char *k = memory + stage * kStage, *v = k + tile_bytes<kWidth>(kKeys);
    copy_async_wait<0>();
    __syncthreads();  // this tile is here, and nobody reads the one before any more
    if (begin + kKeys < end) {
      copy_tiles<kKeys, kWidth>(memory + (stage ^ 1) * kStage, problem.k, problem.v, place, begin + kKeys, place.keys);
      copy_async_commit();
    }
    if (begin >= seen_by_any) continue;
    float scores[kKeys / 8][4] = {}, dscores[kKeys / 8][4] = {};
    multiply_by_rows<Type, kKeys, kWidth>(scores, q, k);
    hide_unseen<kKeys>(problem, place, query, begin, scores);
    multiply_by_rows<Type, kKeys, kWidth>(dscores, dout, v);
    weigh_by_query<kDrop, kKeys>(problem, place, query, begin, statistics, scores, dscores);
    multiply_by_tile<Type, kKeys, kWidth>(dq, dscores, k);
  }
  __syncthreads();  // the tiles are scratch memory now
  const float factor[2] = {problem.scale, problem.scale};
  write_rows<Type, kWidth>(dq, factor, memory + warp * tile_bytes<kWidth>(16), row_of(gradients.dq, place, query),
                           gradients.dq.strides.row, place.queries - query);
}

// ---- Launching ------------------------------------------------------------------------------------------------------

View<uint16_t> gradient_of(void* data, const Strides& strides) { return {static_cast<uint16_t*>(data), strides}; }

}  // namespace

int64_t attention_workspace(const AttentionInputs& in, const AttentionShape& shape) {
  return shape.batch * in.heads * in.queries * static_cast<int64_t>(sizeof(Statistics));
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
    constexpr int kRowsPerBlock = kThreads / kRowLanes<kWidth>;
    const int64_t heads = in.heads * shape.batch;
    const char* error =
        launch_blocks(statistics_kernel<Type, kWidth>, (rows + kRowsPerBlock - 1) / kRowsPerBlock, 0, stream,
                      gradients, rows, by_query.queries, by_query.heads);
    if (error == nullptr && wgmma) return wgmma_backward(in, shape, gradients, stream);
    if (error == nullptr) {
      error = launch_blocks(keys_kernel<Type, kWidth, kDrop>, key_tiles * heads, kKeysShared<kWidth>, stream, by_key,
                            gradients);
    }
    if (error == nullptr) {
      error = launch_blocks(queries_kernel<Type, kWidth, kDrop>, query_tiles * heads, kQueriesShared<kWidth>, stream,
                            by_query, gradients);
    }
    return error;
  });
}

}  // namespace cuda
}  // namespace aura
