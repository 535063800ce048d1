// Backward of attention.h on Hopper: attention_backward.cu's kernels by key and by query, with wgmma and TMA. See
// attention_backward.cuh, attention_sm90.cuh.
#include "cuda/attention_backward.cuh"
#include "cuda/attention_sm90.cuh"

namespace aura {
namespace cuda {
namespace sm90 {

// While the dq kernel works on a tile it still holds the one before, and already waits for the one after: the fourth
// stage is the one that is filled ahead.
inline constexpr int kTileRows = 64, kStages = 4;

// In shared memory: the 128 rows of two tensors that a block holds (keys and values, or queries and their dout), stages
// for tiles of the other two, and a gradient on its way out.
template <int kWidth>
struct BackwardMemory {
  static constexpr int kHeldTile = tile_bytes<kWidth>(kRows), kTile = tile_bytes<kWidth>(kTileRows);
  unsigned char first[kHeldTile], second[kHeldTile];
  unsigned char firsts[kStages][kTile], seconds[kStages][kTile];
  alignas(16) float log2_sums[kStages][kTileRows], deltas[kStages][kTileRows];  // where the tiles are queries
  unsigned char out[kHeldTile];
  Ring<1> held;
  Ring<kStages> ring;
  Work work[2];

  // arrivals: as of Ring::init(), for `ring`.
  __device__ __forceinline__ void init(int arrivals, const Maps& maps) {
    if (threadIdx.x == 0) {
      for (const CUtensorMap* map : {&maps.q, &maps.k, &maps.v, &maps.dout}) prefetch_map(*map);
      held.init();
      ring.init(arrivals);
      publish_barriers();
    }
    __syncthreads();
  }
};
static_assert(sizeof(BackwardMemory<128>) <= 227 << 10, "more shared memory than a block may have");

// To be called by one thread, once `held` is free.
template <int kWidth>
__device__ __forceinline__ void bring_held(const CUtensorMap& first, const CUtensorMap& second, const Work& work,
                                           int number, BackwardMemory<kWidth>& memory) {
  Barrier* const here = &memory.held.here[0];
  memory.work[number % 2] = work;
  arrive_expecting(here, 2 * BackwardMemory<kWidth>::kHeldTile);
  bring<kRows, kWidth>(memory.first, first, here, work.place, work.place.begin);
  bring<kRows, kWidth>(memory.second, second, here, work.place, work.place.begin);
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

// Zeroes what lies beyond the first `rows` rows of a stage's two tiles, once they are here.
template <int kWidth>
__device__ __forceinline__ void clear_beyond(BackwardMemory<kWidth>& memory, int stage, int rows) {
  if (rows >= kTileRows) return;
  clear_rows<kTileRows, kWidth>(memory.firsts[stage], rows);
  clear_rows<kTileRows, kWidth>(memory.seconds[stage], rows);
  publish_cleared();
}

inline __device__ int tiles_between(int start, int end) { return max(0, end - start + kTileRows - 1) / kTileRows; }

// ---- dk and dv: keys as rows ----------------------------------------------------------------------------------------

// The first query that sees any of a block's keys.
__device__ __forceinline__ int first_query(const Problem& problem, const Place& place) {
  return problem.causal ? place.begin : 0;
}

// To be called by the producer's whole warp. number, first: as of set_work().
template <int kWidth>
__device__ __forceinline__ void bring_queries(const Problem& problem, const Gradients& gradients, const Maps& maps,
                                              const Work& work, int number, int first,
                                              BackwardMemory<kWidth>& memory) {
  const Place& place = work.place;
  const int lane = threadIdx.x;
  const bool elected = elect_one();
  memory.held.wait_free(number);
  if (elected) bring_held(maps.k, maps.v, work, number, memory);
  for (int tile = first, row = first_query(problem, place); tile < first + work.tiles; ++tile, row += kTileRows) {
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

// A value of each of the lane's queries, two of every eight of a tile, in one access for both. LSEs and deltas are
// apart, so that each can be loaded before the wait for the product that it goes with.
__device__ __forceinline__ void load_pairs(float2 (&pairs)[kTileRows / 8], const float (&of_tile)[kTileRows]) {
#pragma unroll
  for (int n = 0; n < kTileRows / 8; ++n) {
    pairs[n] = *reinterpret_cast<const float2*>(&of_tile[8 * n + 2 * (threadIdx.x % 4)]);
  }
}

// number, first: as of set_work().
template <typename Type, int kWidth, bool kDrop>
__device__ __forceinline__ void add_queries(const Problem& problem, const Gradients& gradients, const Work& work,
                                            int number, int first, BackwardMemory<kWidth>& memory, int group) {
  const Place& place = work.place;
  const int lane = threadIdx.x % 32, key = place.begin + kGroupRows * group + threadIdx.x / 32 % 4 * 16;
  const int end = first + work.tiles;
  unsigned char *const k = rows_of_group(memory.first, group), *const v = rows_of_group(memory.second, group);
  float dk[kWidth / 8][4] = {}, dv[kWidth / 8][4] = {};
  int tile = first, query = first_query(problem, place);
  // Under the causal mask the block's first queries see none of the second group's keys.
  const int seen = problem.causal ? min(first + group * kGroupRows / kTileRows, end) : first;
  for (; tile < seen; ++tile, query += kTileRows) {
    memory.ring.wait_here(tile);
    clear_beyond(memory, Ring<kStages>::stage_of(tile), place.queries - query);
    memory.ring.release(tile);
  }
  for (; tile < end; ++tile, query += kTileRows) {
    const int stage = Ring<kStages>::stage_of(tile);
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
      memory.ring.wait_here(tile);  // ends a basic block
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
        if (dropped) scores[n][i] = -scores[n][i];  // the sign marks it: dS needs the weight
      }
      round_to<Type>(weights[n / 2], n % 2, used);
    }
    hold(weights);
    hold(dv);
    queue_by_tile<Type, kTileRows, kWidth>(dv, weights, dout);
    load_pairs(deltas, memory.deltas[stage]);
    multiply_wait<1>();
    hold(dscores);
    if (tile + 1 == end) memory.held.release(number);
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

  if (seen == end) memory.held.release(number);

  const Place again = memory.work[number % 2].place;  // read again: the loop leaves no registers to keep it
  const int rows = rows_of(problem, again);
  const KeyFactors factors(problem, again, key + lane / 4);
  unsigned char* const out = scratch_of_warp<kWidth>(rows_of_group(memory.out, group));
  write_rows<Type, kWidth>(dk, factors.k, out, row_of(gradients.dk, again, key), gradients.dk.strides.row, rows - key,
                           problem.width);
  __syncwarp();  // all have read dk before dv takes its place
  write_rows<Type, kWidth>(dv, factors.v, out, row_of(gradients.dv, again, key), gradients.dv.strides.row, rows - key,
                           problem.width);
}

template <typename Type, int kWidth, bool kDrop>
__global__ void __launch_bounds__(kBlock, 1)
    keys_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Maps maps, int* taken,
                const __grid_constant__ Gradients gradients) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  auto& memory = *reinterpret_cast<BackwardMemory<kWidth>*>(shared_memory());
  const int group = find_group();
  memory.init(2, maps);
  if (group < 0) {
    fewer_registers<kProducerRegisters>();
    if (threadIdx.x >= 32) return;
    const auto count = [&](const Place& place) {
      if (place.begin >= rows_of(problem, place)) return kNoWork;
      return place.begin < place.keys ? tiles_between(first_query(problem, place), place.queries) : 0;
    };
    set_work(problem, false, taken, memory, count, [&](const Work& work, int number, int first) {
      bring_queries(problem, gradients, maps, work, number, first, memory);
    });
  } else {
    more_registers<kConsumerRegisters>();
    do_work(memory, [&](const Work& work, int number, int first) {
      add_queries<Type, kWidth, kDrop>(problem, gradients, work, number, first, memory, group);
    });
  }
#else
  __trap();
#endif
}

// ---- dq: queries as rows --------------------------------------------------------------------------------------------

// To be called by one thread. number, first: as of set_work().
template <int kWidth>
__device__ __forceinline__ void bring_keys(const Maps& maps, const Work& work, int number, int first,
                                           BackwardMemory<kWidth>& memory) {
  memory.held.wait_free(number);
  bring_held(maps.q, maps.dout, work, number, memory);
  for (int tile = 0; tile < work.tiles; ++tile) {
    memory.ring.wait_free(first + tile);
    bring_tile(maps.k, maps.v, work.place, first + tile, tile * kTileRows, memory);
  }
}

// number, first: as of set_work().
template <typename Type, int kWidth, bool kDrop>
__device__ __forceinline__ void add_keys(const Problem& problem, const Gradients& gradients, const Work& work,
                                         int number, int first, BackwardMemory<kWidth>& memory, int group) {
  const Place& place = work.place;
  const int lane = threadIdx.x % 32, query = place.begin + kGroupRows * group + threadIdx.x / 32 % 4 * 16;
  const Statistics statistics[2] = {load_statistics(problem, gradients, place, query + lane / 4),
                                    load_statistics(problem, gradients, place, query + lane / 4 + 8)};
  float dq[kWidth / 8][4] = {}, scores[kTileRows / 8][4], dscores[kTileRows / 8][4];
  uint32_t differences[kTileRows / 16][4], q_rows[kWidth / 16][4], dout_rows[kWidth / 16][4];
  const auto key_of = [&](int tile) { return (tile - first) * kTileRows; };
  const auto weigh = [&](int tile) {
    hide_unseen<kTileRows>(problem, place, query, key_of(tile), &scores);
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
    if constexpr (kDrop) kept.draw(problem, flat_row(problem, place, query), key_of(tile), place.head);
    return kept;
  };
  const auto differentiate = [&](const KeptByQuery<kTileRows>& kept) {
#pragma unroll
    for (int n = 0; n < kTileRows / 8; ++n) {
      score_gradients<kDrop>(kept, kDrop ? kept.columns(n) : 0, problem.keep, scores[n],
                             [&](int i) { return statistics[i / 2].delta; }, dscores[n]);
    }
  };

  load_held<kWidth>(q_rows, rows_of_group(memory.first, group));
  load_held<kWidth>(dout_rows, rows_of_group(memory.second, group));
  // Under the causal mask the first group's queries see none of the block's last keys.
  const int end = first + work.tiles;
  const int seen =
      first + tiles_between(0, keys_seen(problem, place, place.begin + kGroupRows * (group + 1) - 1));
  if (first < seen) {
    memory.ring.wait_here(first);
    clear_beyond(memory, Ring<kStages>::stage_of(first), place.keys);
    queue_by_rows<Type, kTileRows, kWidth>(scores, q_rows, memory.firsts[Ring<kStages>::stage_of(first)]);
    queue_by_rows<Type, kTileRows, kWidth>(dscores, dout_rows, memory.seconds[Ring<kStages>::stage_of(first)]);
    multiply_wait<0>();
    hold(scores);
    hold(dscores);
    weigh(first);
    differentiate(draw(first));
    round_to<Type, kTileRows>(differences, dscores);
  }
  memory.held.release(number);  // not sooner: by now the loads from it are done, since products needed them
  if (first + 1 < seen) memory.ring.wait_here(first + 1);
  for (int tile = first + 1; tile < seen; ++tile) {
    const int stage = Ring<kStages>::stage_of(tile), last = Ring<kStages>::stage_of(tile - 1);
    clear_beyond(memory, stage, place.keys - key_of(tile));
    hold(dq);
    hold(differences);
    hold(q_rows);
    hold(dout_rows);
    queue_by_rows<Type, kTileRows, kWidth>(scores, q_rows, memory.firsts[stage]);
    queue_by_rows<Type, kTileRows, kWidth>(dscores, dout_rows, memory.seconds[stage]);
    queue_by_tile<Type, kTileRows, kWidth>(dq, differences, memory.firsts[last]);
    const KeptByQuery<kTileRows> kept = draw(tile);
    if constexpr (kDrop) memory.ring.wait_here(tile);  // ends a basic block
    multiply_wait<2>();
    hold(scores);
    weigh(tile);
    if (tile + 1 < seen) memory.ring.wait_here(tile + 1);  // and ends a basic block
    multiply_wait<1>();
    hold(dscores);
    differentiate(kept);
    memory.ring.wait_here(tile);  // ends a basic block
    multiply_wait<0>();
    hold(dq);
    hold(differences);
    hold(q_rows);
    hold(dout_rows);
    memory.ring.release(tile - 1);
    round_to<Type, kTileRows>(differences, dscores);
  }
  if (first < seen) {
    hold(dq);
    hold(differences);
    queue_by_tile<Type, kTileRows, kWidth>(dq, differences, memory.firsts[Ring<kStages>::stage_of(seen - 1)]);
    multiply_wait<0>();
    hold(dq);
    hold(differences);
    memory.ring.release(seen - 1);
  }
  for (int tile = seen; tile < end; ++tile) {
    memory.ring.wait_here(tile);
    clear_beyond(memory, Ring<kStages>::stage_of(tile), place.keys - key_of(tile));
    memory.ring.release(tile);
  }
  const float factor[2] = {problem.scale, problem.scale};
  write_rows<Type, kWidth>(dq, factor, scratch_of_warp<kWidth>(rows_of_group(memory.out, group)),
                           row_of(gradients.dq, place, query), gradients.dq.strides.row, place.queries - query,
                           problem.width);
}

template <typename Type, int kWidth, bool kDrop>
__global__ void __launch_bounds__(kBlock, 1)
    queries_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Maps maps, int* taken,
                   const __grid_constant__ Gradients gradients) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  auto& memory = *reinterpret_cast<BackwardMemory<kWidth>*>(shared_memory());
  const int group = find_group();
  memory.init(1, maps);
  if (group < 0) {
    fewer_registers<kProducerRegisters>();
    if (threadIdx.x >= 32) return;
    const auto count = [&](const Place& place) {
      if (place.begin >= place.queries) return kNoWork;
      return tiles_between(0, keys_seen(problem, place, place.begin + kRows - 1));
    };
    set_work(problem, problem.causal, taken, memory, count, [&](const Work& work, int number, int first) {
      if (elect_one()) bring_keys(maps, work, number, first, memory);
    });
  } else {
    more_registers<kConsumerRegisters>();
    do_work(memory, [&](const Work& work, int number, int first) {
      add_keys<Type, kWidth, kDrop>(problem, gradients, work, number, first, memory, group);
    });
  }
#else
  __trap();
#endif
}

}  // namespace sm90

const char* wgmma_backward(const AttentionInputs& in, const AttentionShape& shape, const Gradients& gradients,
                           int* counters, void* stream) {
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
    const char* error = sm90::launch_work(sm90::keys_kernel<Type, kWidth, kDrop>, key_tiles * heads, kShared, counters,
                                          stream, problem_of(in, shape, key_tiles), maps, gradients);
    if (error != nullptr) return error;
    return sm90::launch_work(sm90::queries_kernel<Type, kWidth, kDrop>, query_tiles * heads, kShared, counters + 1,
                             stream, problem_of(in, shape, query_tiles), maps, gradients);
  });
}

}  // namespace cuda
}  // namespace aura
