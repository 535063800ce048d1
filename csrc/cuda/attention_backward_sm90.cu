// Backward of attention.h on Hopper, the kernels by key and by query of attention_backward.cu with wgmma and TMA. See
// attention_backward.cuh, attention_sm90.cuh.
#include "cuda/attention_backward.cuh"
#include "cuda/attention_sm90.cuh"

namespace aura {
namespace cuda {
namespace sm90 {

inline constexpr int kTileRows = 64, kStages = 3;

// In shared memory: 128 rows of two tensors that a block holds (keys and values, or queries and their gradients), and
// tiles of the other two as they come.
template <int kWidth>
struct BackwardMemory {
  static constexpr int kHeldTile = tile_bytes<kWidth>(kRows), kTile = tile_bytes<kWidth>(kTileRows);
  unsigned char first[kHeldTile], second[kHeldTile];
  unsigned char firsts[kStages][kTile], seconds[kStages][kTile];
  alignas(16) float log2_sums[kStages][kTileRows], deltas[kStages][kTileRows];  // where the tiles are queries
  Barrier held_here;
  Ring<kStages> ring;

  // As Ring::init().
  __device__ __forceinline__ void init(int arrivals, const Maps& maps) {
    if (threadIdx.x == 0) {
      for (const CUtensorMap* map : {&maps.q, &maps.k, &maps.v, &maps.dout}) prefetch_map(*map);
      init_barrier(&held_here, 1);
      ring.init(arrivals);
      publish_barriers();
    }
    __syncthreads();
  }
};
static_assert(sizeof(BackwardMemory<128>) <= 227 << 10, "more shared memory than a block may have");

template <int kWidth>
__device__ __forceinline__ void bring_held(const CUtensorMap& first, const CUtensorMap& second, const Place& place,
                                           BackwardMemory<kWidth>& memory) {
  arrive_expecting(&memory.held_here, 2 * BackwardMemory<kWidth>::kHeldTile);
  bring<kRows, kWidth>(memory.first, first, &memory.held_here, place, place.begin);
  bring<kRows, kWidth>(memory.second, second, &memory.held_here, place, place.begin);
}

template <int kWidth>
__device__ __forceinline__ void bring_tile(const CUtensorMap& first, const CUtensorMap& second, const Place& place,
                                           int tile, int row, BackwardMemory<kWidth>& memory) {
  const int stage = Ring<kStages>::stage_of(tile);
  Barrier* const here = &memory.ring.here[stage];
  arrive_expecting(here, 2 * BackwardMemory<kWidth>::kTile);
  bring<kTileRows, kWidth>(memory.firsts[stage], first, here, place, row);
  bring<kTileRows, kWidth>(memory.seconds[stage], second, here, place, row);
}

// Zeros for what lies beyond the first `rows` rows of both tiles of a stage, once they are here.
template <int kWidth>
__device__ __forceinline__ void clear_beyond(BackwardMemory<kWidth>& memory, int stage, int rows) {
  if (rows >= kTileRows) return;
  clear_rows<kTileRows, kWidth>(memory.firsts[stage], rows);
  clear_rows<kTileRows, kWidth>(memory.seconds[stage], rows);
  publish_cleared();
}

inline __device__ int tiles_between(int start, int end) { return max(0, end - start + kTileRows - 1) / kTileRows; }

// ---- dk and dv: keys as rows ----------------------------------------------------------------------------------------

template <int kWidth>
__device__ __forceinline__ void bring_queries(const Problem& problem, const Gradients& gradients, const Maps& maps,
                                              const Place& place, int start, int tiles,
                                              BackwardMemory<kWidth>& memory) {
  const int lane = threadIdx.x;
  const bool elected = elect_one();
  if (elected && tiles > 0) bring_held(maps.k, maps.v, place, memory);
  for (int tile = 0, row = start; tile < tiles; ++tile, row += kTileRows) {
    const int stage = Ring<kStages>::stage_of(tile);
    memory.ring.wait_free(tile);
    if (elected) bring_tile(maps.q, maps.dout, place, tile, row, memory);
    Statistics mine[kTileRows / 32];
#pragma unroll
    for (int i = 0; i < kTileRows / 32; ++i) {
      mine[i] = load_statistics(problem, gradients, place, row + 32 * i + lane);
    }
#pragma unroll
    for (int i = 0; i < kTileRows / 32; ++i) {
      memory.log2_sums[stage][32 * i + lane] = mine[i].log2_sum;
      memory.deltas[stage][32 * i + lane] = mine[i].delta;
    }
    __syncwarp();  // whoever sees the elected lane arrive sees what all have written
    if (elected) arrive(&memory.ring.here[stage]);
  }
}

// Of a tile's queries those of the lane, two of every eight. In one access each, and apart from one another, so that
// both can be had before the products that they wait for.
__device__ __forceinline__ void load_pairs(float2 (&pairs)[kTileRows / 8], const float (&of_tile)[kTileRows]) {
#pragma unroll
  for (int n = 0; n < kTileRows / 8; ++n) {
    pairs[n] = *reinterpret_cast<const float2*>(&of_tile[8 * n + 2 * (threadIdx.x % 4)]);
  }
}

template <typename Type, int kWidth, bool kDrop>
__device__ __forceinline__ void add_queries(const Problem& problem, const Gradients& gradients, const Place& place,
                                            int start, int tiles, BackwardMemory<kWidth>& memory, int group) {
  const int lane = threadIdx.x % 32, key = place.begin + kGroupRows * group + threadIdx.x / 32 % 4 * 16;
  unsigned char *const k = rows_of_group(memory.first, group), *const v = rows_of_group(memory.second, group);
  float dk[kWidth / 8][4] = {}, dv[kWidth / 8][4] = {};
  if (tiles > 0) wait(&memory.held_here, 0);
  // Under the causal mask the block's first queries see none of the second group's keys.
  const int unseen = problem.causal ? min(group * kGroupRows / kTileRows, tiles) : 0;
  for (int tile = 0; tile < unseen; ++tile) {
    memory.ring.wait_here(tile);
    clear_beyond(memory, Ring<kStages>::stage_of(tile), place.queries - start - tile * kTileRows);
    memory.ring.release(tile);
  }
  for (int tile = unseen; tile < tiles; ++tile) {
    const int stage = Ring<kStages>::stage_of(tile), query = start + tile * kTileRows;
    const unsigned char *q = memory.firsts[stage], *dout = memory.seconds[stage];
    float scores[kTileRows / 8][4], dscores[kTileRows / 8][4];
    uint32_t weights[kTileRows / 16][4], differences[kTileRows / 16][4];
    memory.ring.wait_here(tile);
    clear_beyond(memory, stage, place.queries - query);
    queue_by_rows<Type, kTileRows, kWidth>(scores, k, q);
    queue_by_rows<Type, kTileRows, kWidth>(dscores, v, dout);
    float2 log2_sums[kTileRows / 8], deltas[kTileRows / 8];
    load_pairs(log2_sums, memory.log2_sums[stage]);
    [[maybe_unused]] KeptByKey<kTileRows> kept;
    if constexpr (kDrop) {
      kept.draw(problem, flat_row(problem, place, query), key, place.head);
      end_block(&memory.held_here);
    }
    multiply_wait<1>();
    hold(scores);
#pragma unroll
    for (int n = 0; n < kTileRows / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = exp2_fast(fmaf(scores[n][i], problem.log2_scale, -(i % 2 ? log2_sums[n].y : log2_sums[n].x)));
      }
    }
    clear_unseen<kTileRows>(problem, key, query, &scores);
#pragma unroll
    for (int n = 0; n < kTileRows / 8; ++n) {
      [[maybe_unused]] const uint32_t columns = kDrop ? kept.columns(n) : 0;
      float used[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool dropped = kDrop && !kept.kept(columns, i);
        used[i] = dropped ? 0.0f : scores[n][i];
        if (dropped) scores[n][i] = -scores[n][i];  // dS needs the weight, and has no register for what was dropped
      }
      round_to<Type>(weights[n / 2], n % 2, used);
    }
    hold(weights);
    hold(dv);
    queue_by_tile<Type, kTileRows, kWidth>(dv, weights, dout);
    load_pairs(deltas, memory.deltas[stage]);
    multiply_wait<1>();
    hold(dscores);
#pragma unroll
    for (int n = 0; n < kTileRows / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float gradient = kDrop && scores[n][i] < 0.0f ? 0.0f : dscores[n][i];
        dscores[n][i] = fabsf(scores[n][i]) * fmaf(gradient, kDrop ? problem.keep : 1.0f,
                                                   -(i % 2 ? deltas[n].y : deltas[n].x));
      }
      round_to<Type>(differences[n / 2], n % 2, dscores[n]);
    }
    hold(differences);
    hold(dk);
    queue_by_tile<Type, kTileRows, kWidth>(dk, differences, q);
    multiply_wait<0>();
    hold(dv);
    hold(dk);
    hold(weights);
    hold(differences);
    memory.ring.release(tile);
  }

  const Place found = find_place(problem, false);
  const int rows = rows_of(problem, found);
  const KeyFactors factors(problem, found, key + lane / 4);
  sync_group(group);  // its keys and values are scratch memory now
  write_rows<Type, kWidth>(dk, factors.k, scratch_of_warp<kWidth>(k), row_of(gradients.dk, found, key),
                           gradients.dk.strides.row, rows - key);
  write_rows<Type, kWidth>(dv, factors.v, scratch_of_warp<kWidth>(v), row_of(gradients.dv, found, key),
                           gradients.dv.strides.row, rows - key);
}

template <typename Type, int kWidth, bool kDrop>
__global__ void __launch_bounds__(kBlock, 1)
    keys_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Gradients gradients,
                const __grid_constant__ Maps maps) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const Place place = find_place(problem, false);
  if (place.begin >= rows_of(problem, place)) return;
  auto& memory = *reinterpret_cast<BackwardMemory<kWidth>*>(shared_memory());
  const int start = problem.causal ? place.begin : 0, group = find_group();
  const int tiles = place.begin < place.keys ? tiles_between(start, place.queries) : 0;
  memory.init(2, maps);
  if (group < 0) {
    fewer_registers<kProducerRegisters>();
    if (threadIdx.x < 32) bring_queries(problem, gradients, maps, place, start, tiles, memory);
  } else {
    more_registers<kConsumerRegisters>();
    add_queries<Type, kWidth, kDrop>(problem, gradients, place, start, tiles, memory, group);
  }
#else
  __trap();
#endif
}

// ---- dq: queries as rows --------------------------------------------------------------------------------------------

template <int kWidth>
__device__ __forceinline__ void bring_keys(const Maps& maps, const Place& place, int tiles,
                                           BackwardMemory<kWidth>& memory) {
  if (tiles > 0) bring_held(maps.q, maps.dout, place, memory);
  for (int tile = 0; tile < tiles; ++tile) {
    memory.ring.wait_free(tile);
    bring_tile(maps.k, maps.v, place, tile, tile * kTileRows, memory);
  }
}

template <typename Type, int kWidth, bool kDrop>
__device__ __forceinline__ void add_keys(const Problem& problem, const Gradients& gradients, const Place& place,
                                         int tiles, BackwardMemory<kWidth>& memory, int group) {
  const int lane = threadIdx.x % 32, query = place.begin + kGroupRows * group + threadIdx.x / 32 % 4 * 16;
  unsigned char* const q = rows_of_group(memory.first, group);
  const Statistics statistics[2] = {load_statistics(problem, gradients, place, query + lane / 4),
                                    load_statistics(problem, gradients, place, query + lane / 4 + 8)};
  float dq[kWidth / 8][4] = {}, scores[kTileRows / 8][4], dscores[kTileRows / 8][4];
  uint32_t differences[kTileRows / 16][4], q_rows[kWidth / 16][4], dout_rows[kWidth / 16][4];
  const auto weigh = [&](int tile) {
    hide_unseen<kTileRows>(problem, place, query, tile * kTileRows, &scores);
#pragma unroll
    for (int n = 0; n < kTileRows / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = exp2_fast(fmaf(scores[n][i], problem.log2_scale, -statistics[i / 2].log2_sum));
      }
    }
  };
  const auto draw = [&](int tile) {
    KeptByQuery<kTileRows> kept;
    if constexpr (kDrop) kept.draw(problem, flat_row(problem, place, query), tile * kTileRows, place.head);
    return kept;
  };
  const auto differentiate = [&](const KeptByQuery<kTileRows>& kept) {
#pragma unroll
    for (int n = 0; n < kTileRows / 8; ++n) {
      score_gradients<kDrop>(kept, kDrop ? kept.columns(n) : 0, problem.keep, scores[n],
                             [&](int i) { return statistics[i / 2].delta; }, dscores[n]);
    }
  };

  // Under the causal mask the first group's queries see none of the block's last keys.
  const int seen = tiles_between(0, keys_seen(problem, place, place.begin + kGroupRows * (group + 1) - 1));
  if (seen > 0) {
    wait(&memory.held_here, 0);
    load_held<kWidth>(q_rows, q);
    load_held<kWidth>(dout_rows, rows_of_group(memory.second, group));
    memory.ring.wait_here(0);
    clear_beyond(memory, 0, place.keys);
    queue_by_rows<Type, kTileRows, kWidth>(scores, q_rows, memory.firsts[0]);
    queue_by_rows<Type, kTileRows, kWidth>(dscores, dout_rows, memory.seconds[0]);
    multiply_wait<0>();
    hold(scores);
    hold(dscores);
    weigh(0);
    differentiate(draw(0));
    round_to<Type, kTileRows>(differences, dscores);
  }
  if (seen > 1) memory.ring.wait_here(1);
  for (int tile = 1; tile < seen; ++tile) {
    const int stage = Ring<kStages>::stage_of(tile), last = Ring<kStages>::stage_of(tile - 1);
    clear_beyond(memory, stage, place.keys - tile * kTileRows);
    hold(dq);
    hold(differences);
    hold(q_rows);
    hold(dout_rows);
    queue_by_rows<Type, kTileRows, kWidth>(scores, q_rows, memory.firsts[stage]);
    queue_by_rows<Type, kTileRows, kWidth>(dscores, dout_rows, memory.seconds[stage]);
    queue_by_tile<Type, kTileRows, kWidth>(dq, differences, memory.firsts[last]);
    const KeptByQuery<kTileRows> kept = draw(tile);
    if constexpr (kDrop) end_block(&memory.held_here);
    multiply_wait<2>();
    hold(scores);
    weigh(tile);
    if (tile + 1 < seen) memory.ring.wait_here(tile + 1);  // and an end_block()
    multiply_wait<1>();
    hold(dscores);
    differentiate(kept);
    end_block(&memory.held_here);
    multiply_wait<0>();
    hold(dq);
    hold(differences);
    hold(q_rows);
    hold(dout_rows);
    memory.ring.release(tile - 1);
    round_to<Type, kTileRows>(differences, dscores);
  }
  if (seen > 0) {
    hold(dq);
    hold(differences);
    queue_by_tile<Type, kTileRows, kWidth>(dq, differences, memory.firsts[Ring<kStages>::stage_of(seen - 1)]);
    multiply_wait<0>();
    hold(dq);
    hold(differences);
  }
  for (int tile = seen; tile < tiles; ++tile) {
    memory.ring.release(tile - 1);
    memory.ring.wait_here(tile);
    clear_beyond(memory, Ring<kStages>::stage_of(tile), place.keys - tile * kTileRows);
  }
  sync_group(group);  // its queries are scratch memory now
  const float factor[2] = {problem.scale, problem.scale};
  write_rows<Type, kWidth>(dq, factor, scratch_of_warp<kWidth>(q), row_of(gradients.dq, place, query),
                           gradients.dq.strides.row, place.queries - query);
}

template <typename Type, int kWidth, bool kDrop>
__global__ void __launch_bounds__(kBlock, 1)
    queries_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Gradients gradients,
                   const __grid_constant__ Maps maps) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const Place place = find_place(problem, problem.causal);
  if (place.begin >= place.queries) return;
  auto& memory = *reinterpret_cast<BackwardMemory<kWidth>*>(shared_memory());
  const int tiles = tiles_between(0, keys_seen(problem, place, place.begin + kRows - 1)), group = find_group();
  memory.init(1, maps);
  if (group < 0) {
    fewer_registers<kProducerRegisters>();
    if (threadIdx.x < 32 && elect_one()) bring_keys(maps, place, tiles, memory);
  } else {
    more_registers<kConsumerRegisters>();
    add_keys<Type, kWidth, kDrop>(problem, gradients, place, tiles, memory, group);
  }
#else
  __trap();
#endif
}

}  // namespace sm90

const char* wgmma_backward(const AttentionInputs& in, const AttentionShape& shape, const Gradients& gradients,
                           void* stream) {
  const int64_t query_tiles = tiles_of(in.queries, shape), key_tiles = tiles_of(shape.keys, shape);
  const int64_t heads = in.heads * shape.batch;
  sm90::Maps maps{};
  if (!sm90::make_maps(&maps, in, shape) ||
      !sm90::make_map(&maps.dout, gradients.dout.data, sm90::axes_of_queries(gradients.dout.strides, in, shape),
                      in.width, shape.half)) {
    return sm90::no_maps();
  }
  return sm90::with_types(in, shape, [&](auto type, auto width, auto drop) {
    using Type = decltype(type);
    constexpr int kWidth = decltype(width)::value, kShared = sizeof(sm90::BackwardMemory<kWidth>);
    constexpr bool kDrop = decltype(drop)::value;
    const char* error = launch_blocks<sm90::kBlock>(sm90::keys_kernel<Type, kWidth, kDrop>, key_tiles * heads, kShared,
                                                    stream, problem_of(in, shape, key_tiles), gradients, maps);
    if (error != nullptr) return error;
    return launch_blocks<sm90::kBlock>(sm90::queries_kernel<Type, kWidth, kDrop>, query_tiles * heads, kShared, stream,
                                       problem_of(in, shape, query_tiles), gradients, maps);
  });
}

}  // namespace cuda
}  // namespace aura
