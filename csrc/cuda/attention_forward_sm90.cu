// Forward of attention.h on Hopper. See attention_forward.cuh, attention_sm90.cuh.
//
// After FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), our own code. A block holds 128 queries of a head. The
// tensor cores always have a product queued while exponentials are computed: a consumer warpgroup queues the scores of
// the next tile of keys before the product with the values of the current one (section 3.2), and the two warpgroups
// take turns at queueing (pingpong, section 3.1). A block that is done with its queries takes others
// (attention_sm90.cuh), whose tiles arrive while the results are written.
#include "cuda/attention_forward.cuh"
#include "cuda/attention_sm90.cuh"

namespace aura {
namespace cuda {
namespace sm90 {

inline constexpr int kKeys = 128, kStages = 2;

// In shared memory.
template <int kWidth>
struct ForwardMemory {
  static constexpr int kTile = tile_bytes<kWidth>(kKeys);
  unsigned char queries[tile_bytes<kWidth>(kRows)], keys[kStages][kTile], values[kStages][kTile];
  unsigned char out[tile_bytes<kWidth>(kRows)];
  Ring<1> held;  // the queries
  Ring<kStages> keys_ring, values_ring;
  Work work[2];
};
static_assert(sizeof(ForwardMemory<128>) <= 227 << 10, "more shared memory than a block may have");

template <int kWidth>
__device__ __forceinline__ void bring_tiles(const Maps& maps, const Work& work, int number, int first,
                                            ForwardMemory<kWidth>& memory) {
  constexpr int kTile = ForwardMemory<kWidth>::kTile;
  const Place& place = work.place;
  memory.held.wait_free(number);
  memory.work[number % 2] = work;
  arrive_expecting(&memory.held.here[0], sizeof(memory.queries));
  bring<kRows, kWidth>(memory.queries, maps.q, &memory.held.here[0], place, place.begin);
  // In the order of use: the keys of a tile before the values of the tile before it.
  for (int tile = 0; tile <= work.tiles; ++tile) {
    if (tile < work.tiles) {
      const int stage = Ring<kStages>::stage_of(first + tile);
      Barrier* const here = &memory.keys_ring.here[stage];
      memory.keys_ring.wait_free(first + tile);
      arrive_expecting(here, kTile);
      bring<kKeys, kWidth>(memory.keys[stage], maps.k, here, place, tile * kKeys);
    }
    if (tile > 0) {
      const int last = first + tile - 1, stage = Ring<kStages>::stage_of(last);
      Barrier* const here = &memory.values_ring.here[stage];
      memory.values_ring.wait_free(last);
      arrive_expecting(here, kTile);
      bring<kKeys, kWidth>(memory.values[stage], maps.v, here, place, (tile - 1) * kKeys);
    }
  }
}

// Turns: a group may queue its products once the other has queued its own. The first group begins.
__device__ __forceinline__ void begin_turn(int group) { sync_threads(kTurn + group, kGroup * kConsumers); }
__device__ __forceinline__ void end_turn(int group) { arrive_named<kGroup * kConsumers>(kTurn + (group ^ 1)); }

// number, first: as of set_work().
template <typename Type, int kWidth, bool kDrop>
__device__ __forceinline__ void attend(const Problem& problem, const Work& work, int number, int first,
                                       ForwardMemory<kWidth>& memory, int group, uint16_t* out, float* lse) {
  const Place& place = work.place;
  const int query = place.begin + kGroupRows * group + threadIdx.x / 32 % 4 * 16, end = first + work.tiles;
  const float scale = problem.log2_scale;
  unsigned char* const queries = rows_of_group(memory.queries, group);
  Softmax<1> softmax;
  float sums[kWidth / 8][4] = {}, scores[kKeys / 8][4], shrink[2];
  uint32_t weights[kKeys / 16][4];

  if (first < end) {
    memory.keys_ring.wait_here(first);
    queue_by_rows<Type, kKeys, kWidth>(scores, queries, memory.keys[Ring<kStages>::stage_of(first)]);
    if (group == 1 && first + 1 < end) end_turn(group);
    multiply_wait<0>();
    hold(scores);
    memory.keys_ring.release(first);
    if (first + 1 == end) memory.held.release(number);
    hide_unseen<kKeys>(problem, place, query, 0, &scores);
    softmax.rise(&scores, scale, shrink);  // there are no sums yet to shrink
    softmax.weigh(&scores, scale);
    if constexpr (kDrop) drop_weights<kKeys>(problem, place, query, 0, scores);
    round_to<Type, kKeys>(weights, scores);
  }
  if (first + 1 < end) memory.keys_ring.wait_here(first + 1);
  for (int tile = first + 1; tile < end; ++tile) {
    const int stage = Ring<kStages>::stage_of(tile), last = Ring<kStages>::stage_of(tile - 1);
    const int key = (tile - first) * kKeys;
    begin_turn(group);
    hold(sums);
    hold(weights);
    queue_by_rows<Type, kKeys, kWidth>(scores, queries, memory.keys[stage]);
    memory.values_ring.wait_here(tile - 1);
    queue_by_tile<Type, kKeys, kWidth>(sums, weights, memory.values[last]);
    if (group == 0 || tile + 1 < end) end_turn(group);
    multiply_wait<1>();
    hold(scores);
    memory.keys_ring.release(tile);
    if (tile + 1 == end) memory.held.release(number);
    hide_unseen<kKeys>(problem, place, query, key, &scores);
    const bool shrinks = softmax.rise(&scores, scale, shrink);
    softmax.weigh(&scores, scale);
    if constexpr (kDrop) drop_weights<kKeys>(problem, place, query, key, scores);
    // So that no turn is spent waiting for keys; this also ends a basic block.
    if (tile + 1 < end) memory.keys_ring.wait_here(tile + 1);
    multiply_wait<0>();
    hold(sums);
    hold(weights);
    memory.values_ring.release(tile - 1);
    if (shrinks) shrink_rows(&sums, shrink);
    round_to<Type, kKeys>(weights, scores);
  }
  if (first < end) {
    unsigned char* const values = memory.values[Ring<kStages>::stage_of(end - 1)];
    const int rows = place.keys - (work.tiles - 1) * kKeys;
    memory.values_ring.wait_here(end - 1);
    if (rows < kKeys) {
      clear_rows<kKeys, kWidth>(values, rows);
      publish_cleared();
    }
    hold(sums);
    hold(weights);
    queue_by_tile<Type, kKeys, kWidth>(sums, weights, values);
    multiply_wait<0>();
    hold(sums);
    hold(weights);
    memory.values_ring.release(end - 1);
  } else {
    memory.held.release(number);
  }
  softmax.finish();
  write_output<Type, kWidth>(problem, place, softmax, &sums,
                             scratch_of_warp<kWidth>(rows_of_group(memory.out, group)), query, out, lse);
}

// taken: as of set_work().
template <typename Type, int kWidth, bool kDrop>
__global__ void __launch_bounds__(kBlock, 1)
    forward_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Maps maps, int* taken,
                   uint16_t* out, float* lse) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  auto& memory = *reinterpret_cast<ForwardMemory<kWidth>*>(shared_memory());
  const int group = find_group();
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&maps.q, &maps.k, &maps.v}) prefetch_map(*map);
    memory.held.init();
    memory.keys_ring.init();
    memory.values_ring.init();
    publish_barriers();
  }
  __syncthreads();
  if (group < 0) {
    fewer_registers<kProducerRegisters>();
    if (threadIdx.x >= 32) return;
    const auto count = [&](const Place& place) {
      if (place.begin >= place.queries) return kNoWork;
      return (keys_seen(problem, place, place.begin + kRows - 1) + kKeys - 1) / kKeys;
    };
    set_work(problem, problem.causal, taken, memory, count, [&](const Work& work, int number, int first) {
      if (elect_one()) bring_tiles<kWidth>(maps, work, number, first, memory);
    });
  } else {
    more_registers<kConsumerRegisters>();
    do_work(memory, [&](const Work& work, int number, int first) {
      attend<Type, kWidth, kDrop>(problem, work, number, first, memory, group, out, lse);
    });
  }
#else
  __trap();
#endif
}

}  // namespace sm90

bool wgmma_takes(const AttentionInputs& in, const AttentionShape& shape) {
  using namespace sm90;
  return in.width > 32 && in.width <= 128 && max(in.queries, shape.keys) <= INT32_MAX - kRows &&
         axes_of_queries(in.q_strides, in, shape).can_be_mapped(in.width) &&
         axes_of_keys(in.k_strides, in, shape).can_be_mapped(in.width) &&
         axes_of_keys(in.v_strides, in, shape).can_be_mapped(in.width) && is_hopper();
}

const char* wgmma_forward(const AttentionForward& job, const AttentionShape& shape, int* counter, void* stream) {
  const AttentionInputs& in = job.in;
  const int64_t tiles = tiles_of(in.queries, shape), blocks = tiles * in.heads * shape.batch;
  sm90::Maps maps{};
  if (!sm90::make_maps(&maps, in, shape)) return sm90::no_maps();
  if (sm90::by_counter(blocks)) {
    const cudaError_t error = cudaMemsetAsync(counter, 0, sizeof(int), static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) return report(error);
  }
  return sm90::with_types(in, shape, [&](auto type, auto width, auto drop) {
    constexpr int kWidth = decltype(width)::value;
    return sm90::launch_work(sm90::forward_kernel<decltype(type), kWidth, decltype(drop)::value>, blocks,
                             sizeof(sm90::ForwardMemory<kWidth>), counter, stream, problem_of(in, shape, tiles), maps,
                             static_cast<uint16_t*>(job.out), static_cast<float*>(job.lse));
  });
}

}  // namespace cuda
}  // namespace aura
