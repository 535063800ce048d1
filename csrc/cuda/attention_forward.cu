// Forward of attention.h: softmax(scale q k^T) v, a block of queries at a time. See attention.cuh.
#include "cuda/attention_forward.cuh"

namespace aura {
namespace cuda {
namespace {

constexpr int kKeys = 64;  // of a tile

// Keys whose scores a warp holds at a time. With heads of 64 two blocks share the registers of a multiprocessor: half a
// tile, or they would not suffice.
template <int kWidth>
constexpr int kStep = kWidth == 64 ? 32 : 64;

template <int kWidth>
constexpr int kForwardShared = 4 * tile_bytes<kWidth>(kKeys);  // keys and values, twice

// Add to `sums` the values of keys [begin, begin + kStep), as a warp's 16 queries weigh them.
template <typename Type, int kWidth, bool kDrop>
__device__ __forceinline__ void attend(const Problem& problem, const Place& place, int query, int begin,
                                       const uint32_t (&q)[kWidth / 16][4], const unsigned char* k,
                                       const unsigned char* v, Softmax& softmax, float (&sums)[kWidth / 8][4]) {
  constexpr int kCount = kStep<kWidth>;
  float weights[kCount / 8][4] = {};
  multiply_by_rows<Type, kCount, kWidth>(weights, q, k);
  hide_unseen<kCount>(problem, place, query, begin, weights);
  float shrink[2];
  softmax.rise(weights, problem.scale * kLog2E, shrink);
  scale_rows(sums, shrink);
  softmax.weigh(weights, problem.scale * kLog2E);
  if constexpr (kDrop) drop_weights<kCount>(problem, place, query, begin, weights);
  multiply_by_tile<Type, kCount, kWidth>(sums, weights, v);
}

template <typename Type, int kWidth, bool kDrop>
__global__ void __launch_bounds__(kThreads, kWidth <= 64 ? 2 : 1)
    forward_kernel(const __grid_constant__ Problem problem, uint16_t* out, float* lse) {
  constexpr int kStage = 2 * tile_bytes<kWidth>(kKeys);
  const Place place = find_place(problem, problem.causal);
  if (place.begin >= place.queries) return;
  unsigned char* const memory = shared_memory();
  const int warp = threadIdx.x / 32, query = place.begin + 16 * warp;
  const int seen_by_any = query < place.queries ? keys_seen(problem, place, query + 15) : 0;
  const int end = keys_seen(problem, place, place.begin + kRows - 1);

  // The queries pass through what will be the second pair of tiles on their way to registers.
  copy_tile<kRows, kWidth>(memory + kStage, row_of(problem.q, place, place.begin), problem.q.strides.row,
                           place.queries - place.begin);
  copy_async_commit();
  if (end > 0) copy_tiles<kKeys, kWidth>(memory, problem.k, problem.v, place, 0, place.keys);
  copy_async_commit();
  copy_async_wait<1>();
  __syncthreads();
  uint32_t q[kWidth / 16][4];
  load_operands<kWidth>(q, memory + kStage, 16 * warp);

  Softmax softmax;
  float sums[kWidth / 8][4] = {};
  for (int begin = 0, stage = 0; begin < end; begin += kKeys, stage ^= 1) {
    const unsigned char *k = memory + stage * kStage, *v = k + tile_bytes<kWidth>(kKeys);
    copy_async_wait<0>();
    __syncthreads();  // this tile is here, and nobody reads the one before any more
    if (begin + kKeys < end) {
      copy_tiles<kKeys, kWidth>(memory + (stage ^ 1) * kStage, problem.k, problem.v, place, begin + kKeys, place.keys);
      copy_async_commit();
    }
    for (int done = 0; done < kKeys && begin + done < seen_by_any; done += kStep<kWidth>) {
      const int skip = tile_bytes<kWidth>(done);
      attend<Type, kWidth, kDrop>(problem, place, query, begin + done, q, k + skip, v + skip, softmax, sums);
    }
  }
  softmax.finish();
  __syncthreads();  // the tiles are scratch memory now
  write_output<Type, kWidth>(problem, place, softmax, sums, memory + warp * tile_bytes<kWidth>(16), query, out, lse);
}

bool takes(const AttentionInputs& in) {
  // Scores are scaled after the largest is found, which a scale below 0 would make the smallest.
  return (in.width == 32 || in.width == 64 || in.width == 96 || in.width == 128) && in.scale > 0 &&
         in.scale < INFINITY && can_be_read(in.q, in.q_strides) && can_be_read(in.k, in.k_strides) &&
         can_be_read(in.v, in.v_strides);
}

const char* attention_forward(const AttentionForward& job, const AttentionShape& shape, void* stream) {
  if (wgmma_takes(job.in, shape)) return wgmma_forward(job, shape, stream);
  const int64_t tiles = tiles_of(job.in.queries, shape);
  const Problem problem = problem_of(job.in, shape, tiles);
  return with_types(job.in, shape, [&](auto type, auto width, auto drop) {
    constexpr int kWidth = decltype(width)::value;
    return launch_blocks(forward_kernel<decltype(type), kWidth, decltype(drop)::value>,
                         tiles * job.in.heads * shape.batch, kForwardShared<kWidth>, stream, problem,
                         static_cast<uint16_t*>(job.out), static_cast<float*>(job.lse));
  });
}

}  // namespace

AttentionKernels attention_kernels() { return {takes, attention_forward, attention_workspace, attention_backward}; }

}  // namespace cuda
}  // namespace aura
