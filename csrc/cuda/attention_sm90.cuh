// What the attention kernels of Hopper share: tiles that one warp brings with TMA while two warpgroups multiply them
// with wgmma (hopper.cuh), and the tensor maps that TMA reads.
//
// A block has three warpgroups. One warp of the first, the producer, brings tiles into rings of stages in shared
// memory; the other two, the consumers, have 64 of the block's 128 rows each. A tile is made of boxes of 64 rows by 64
// columns, as TMA writes them with its swizzle of 128 bytes: all boxes of the first 64 columns, then those of the next.
#pragma once

#include <cstdlib>
#include <cstring>

#include "cuda/attention.cuh"
#include "cuda/hopper.cuh"

namespace aura {
namespace cuda {
namespace sm90 {  // named, not anonymous: builds for other architectures leave nearly all of it unused

inline constexpr int kGroup = 128, kConsumers = 2, kBlock = kGroup * (1 + kConsumers);
inline constexpr int kConsumerWarps = 4 * kConsumers;
inline constexpr int kGroupRows = kRows / kConsumers;
inline constexpr int kBoxRows = 64, kBoxColumns = 64, kRowBytes = 2 * kBoxColumns;
inline constexpr int kBoxBytes = kBoxRows * kRowBytes;
inline constexpr int kEightRows = 8 * kRowBytes;  // what the swizzle permutes
// Threads of so large a block start with 168 registers each; the producer's give up what the consumers need.
inline constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

// The warpgroup that a thread is in: -1 for the producer's, else the number of the consumer group. By the shuffle the
// compiler knows that it is the same for a whole warp, which it does not know of threadIdx.
__device__ __forceinline__ int find_group() {
  return __shfl_sync(~0u, static_cast<int>(threadIdx.x / kGroup), 0) - 1;
}

// Named barriers of the consumers: one for all of them, and one for each group's turn (attention_forward_sm90.cu).
__device__ __forceinline__ void sync_consumers() { sync_threads(1 + kConsumers, kGroup * kConsumers); }
inline constexpr int kTurn = 2 + kConsumers;

// ---- Tiles ----------------------------------------------------------------------------------------------------------

// Tiles 0, 1, 2... go round kStages stages of shared memory. A phase of a stage's barrier `here` completes when a tile
// has arrived, one of `free` when no consumer warp needs that tile any more.
template <int kStages>
struct Ring {
  Barrier here[kStages], free[kStages];

  // A tile is here after `arrivals` arrivals of the producer and all the bytes that these expect.
  __device__ __forceinline__ void init(int arrivals = 1) {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(&here[stage], arrivals);
      init_barrier(&free[stage], kConsumerWarps);
    }
  }
  static __device__ __forceinline__ int stage_of(int tile) { return tile % kStages; }
  // Also called just to end a basic block, which costs next to nothing if the tile is here and not yet released: within
  // one basic block, ptxas puts the wait for a product before work that could be done meanwhile.
  __device__ __forceinline__ void wait_here(int tile) { wait(&here[stage_of(tile)], tile / kStages % 2); }
  __device__ __forceinline__ void wait_free(int tile) { wait(&free[stage_of(tile)], tile / kStages % 2 ^ 1); }
  __device__ __forceinline__ void release(int tile) {
    __syncwarp();  // whoever sees the first lane arrive knows that all lanes have read
    if (threadIdx.x % 32 == 0) arrive(&free[stage_of(tile)]);
  }
};

// ---- Work -----------------------------------------------------------------------------------------------------------

// Blocks are persistent: there are no more than multiprocessors, and each does one piece of work after another. While
// the consumers write the results of one, the producer brings tiles of the next. A block takes the next piece that none
// has taken, by the counter `taken`, so that no multiprocessor waits for one that has had more to do or began later.
// Where `taken` is null, there are as many blocks as pieces.

// What a producer hands its consumers: rows, and how many tiles of the other side these need.
struct Work {
  Place place;
  int tiles;
};
inline constexpr int kNoWork = -1;  // for `tiles`

// Run by the producer's warp. A block's Memory has a ring `held`, for the tiles that consumers hold throughout a piece
// of work, and the Work itself in work[number % 2], which outlives the release of those tiles. count(place): the tiles
// of a place, or kNoWork. bring(work, number, first) brings its tiles to shared memory; number: of this work, and
// first: of its first tile, counted over all that the block has had.
template <typename Memory, typename Count, typename Bring>
__device__ __forceinline__ void set_work(const Problem& problem, bool last_first, int* taken, Memory& memory,
                                         Count count, Bring bring) {
  const bool first_lane = threadIdx.x % 32 == 0;
  const auto take = [&] { return __shfl_sync(~0u, first_lane ? atomicAdd(taken, 1) : 0, 0); };
  int number = 0, first = 0;
  for (int block = taken == nullptr ? blockIdx.x : take(); block < problem.blocks;
       block = taken == nullptr ? problem.blocks : take()) {
    Work work{find_place(problem, block, last_first), 0};
    work.tiles = count(work.place);
    if (work.tiles == kNoWork) continue;
    bring(work, number, first);
    ++number;
    first += work.tiles;
  }
  memory.held.wait_free(number);
  if (first_lane) {
    memory.work[number % 2].tiles = kNoWork;
    arrive(&memory.held.here[0]);
  }
}

// Run by the consumers. carry_out(work, number, first) releases the ring `held` when it no longer needs its tiles.
template <typename Memory, typename Job>
__device__ __forceinline__ void do_work(Memory& memory, Job carry_out) {
  for (int number = 0, first = 0;; ++number) {
    memory.held.wait_here(number);
    const Work work = memory.work[number % 2];
    if (work.tiles == kNoWork) return;
    carry_out(work, number, first);
    first += work.tiles;
  }
}

// ---- Tiles in shared memory -----------------------------------------------------------------------------------------

// Start the copies of kCount rows, from `row` of the sequence on. Rows beyond the tensor become zeros; rows beyond the
// sequence bring whatever lies there.
template <int kCount, int kWidth>
__device__ __forceinline__ void bring(unsigned char* tile, const CUtensorMap& map, Barrier* here, const Place& place,
                                      int row) {
#pragma unroll
  for (int column = 0; column < kWidth; column += kBoxColumns) {
#pragma unroll
    for (int done = 0; done < kCount; done += kBoxRows, tile += kBoxBytes) {
      copy_box(tile, map, here, column, place.head, place.first + row + done, place.batch);
    }
  }
}

// Zeroes the rows of a tile from `rows` on: they must add nothing, but may hold inf or NaN, which times 0 is not 0. To
// be called by all consumers, whose threads come after the producer's kGroup.
template <int kCount, int kWidth>
__device__ __forceinline__ void clear_rows(unsigned char* tile, int rows) {
  constexpr int kColumnBytes = kCount * kRowBytes;
  for (int column = 0; column < kWidth / kBoxColumns; ++column) {
#pragma unroll 1  // seldom executed, and in the middle of the loops over tiles
    for (int at = rows * kRowBytes + 16 * (threadIdx.x - kGroup); at < kColumnBytes; at += 16 * kGroup * kConsumers) {
      *reinterpret_cast<uint4*>(tile + column * kColumnBytes + at) = make_uint4(0, 0, 0, 0);
    }
  }
}
// To be called after clear_rows(), before the tiles are multiplied.
__device__ __forceinline__ void publish_cleared() {
  fence_async_proxy();
  sync_consumers();
}

// Where a group's rows of a tile of kRows rows begin.
__device__ __forceinline__ unsigned char* rows_of_group(unsigned char* tile, int group) {
  return tile + group * kBoxBytes;
}

// Scratch memory for 16 rows of a warp's own, within rows_of_group() that hold nothing its group still needs.
template <int kWidth>
__device__ __forceinline__ unsigned char* scratch_of_warp(unsigned char* rows) {
  const int offset = threadIdx.x / 32 % 4 * tile_bytes<kWidth>(16);
  return rows + offset / kBoxBytes * (kRows * kRowBytes) + offset % kBoxBytes;
}

// ---- Products of a group's 64 rows ----------------------------------------------------------------------------------

// The descriptor of what lies `bytes` further on, by one addition to its lower half: making it anew takes four
// instructions, and products of 64 columns are too short to hide them.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, int bytes) {
  return (descriptor & ~uint64_t{UINT32_MAX}) | (static_cast<uint32_t>(descriptor) + bytes / 16);
}

// Queue sums[64, kCount] = left tile^T, where `left` is rows_of_group() and the tile has kCount rows.
template <typename Type, int kCount, int kWidth>
__device__ __forceinline__ void queue_by_rows(float (&sums)[kCount / 8][4], const unsigned char* left,
                                              const unsigned char* tile) {
  const uint64_t left_begin = tile_descriptor(left, 0, kEightRows), tile_begin = tile_descriptor(tile, 0, kEightRows);
  multiply_fence();
#pragma unroll
  for (int column = 0; column < kWidth; column += 16) {
    const int box = column / kBoxColumns * kRowBytes, within = column % kBoxColumns * 2;
    multiply_tiles(Type{}, sums, advance(left_begin, box * kRows + within), advance(tile_begin, box * kCount + within),
                   column > 0);
  }
  multiply_commit();
}

// The same for a left operand in registers, where load_held() brings it from rows_of_group() of a tile of kRows rows.
// wgmma reads a left operand in shared memory anew for every product, which with 64 columns takes as long as the tile.
template <int kWidth>
__device__ __forceinline__ void load_held(uint32_t (&left)[kWidth / 16][4], const unsigned char* rows) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  const uint32_t first = shared_address(rows) + row * kRowBytes + 16 * (lane / 16 ^ row % 8);
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) {
    const int bytes = 32 * k;
    load_matrices(left[k], (first ^ bytes % kRowBytes) + bytes / kRowBytes * (kRows * kRowBytes));
  }
}
template <typename Type, int kCount, int kWidth>
__device__ __forceinline__ void queue_by_rows(float (&sums)[kCount / 8][4], const uint32_t (&left)[kWidth / 16][4],
                                              const unsigned char* tile) {
  const uint64_t begin = tile_descriptor(tile, 0, kEightRows);
  multiply_fence();
#pragma unroll
  for (int column = 0; column < kWidth; column += 16) {
    const int box = column / kBoxColumns * kRowBytes, within = column % kBoxColumns * 2;
    multiply_tiles(Type{}, sums, left[column / 16], advance(begin, box * kCount + within), column > 0);
  }
  multiply_commit();
}

// Queue sums[64, kWidth] += left[64, kCount] tile, for a left operand in registers.
template <typename Type, int kCount, int kWidth>
__device__ __forceinline__ void queue_by_tile(float (&sums)[kWidth / 8][4], const uint32_t (&left)[kCount / 16][4],
                                              const unsigned char* tile) {
  const uint64_t begin = tile_descriptor(tile, kCount * kRowBytes, kEightRows);
  multiply_fence();
#pragma unroll
  for (int k = 0; k < kCount / 16; ++k) {
    multiply_by_values(Type{}, sums, left[k], advance(begin, 16 * k * kRowBytes));
  }
  multiply_commit();
}

// Rounds accumulators of one product to the left operand of the next: eight columns, the first or second of sixteen.
template <typename Type>
__device__ __forceinline__ void round_to(uint32_t (&left)[4], int second, const float (&sums)[4]) {
  left[2 * second] = pack(Type{}, sums[0], sums[1]);
  left[2 * second + 1] = pack(Type{}, sums[2], sums[3]);
}

// The same for all columns.
template <typename Type, int kCount>
__device__ __forceinline__ void round_to(uint32_t (&left)[kCount / 16][4], const float (&sums)[kCount / 8][4]) {
#pragma unroll
  for (int n = 0; n < kCount / 8; ++n) round_to<Type>(left[n / 2], n % 2, sums[n]);
}

// ---- Launching ------------------------------------------------------------------------------------------------------

// AURA_CUDA_ISA=sm_80 keeps to the instructions that all cards have, for tests and benchmarks.
inline bool is_hopper() {
  const char* wanted = std::getenv("AURA_CUDA_ISA");
  if (wanted != nullptr && std::strcmp(wanted, "sm_80") == 0) return false;
  return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         device_attribute(cudaDevAttrComputeCapabilityMinor) == 0;
}

// The axes of a tensor except the innermost, from the inside out as a tensor map wants them. The stride of an axis with
// one element does not matter; here it is that of a tensor without gaps.
struct Axes {
  int64_t heads, rows, batch;
  int64_t head, row, entry;  // strides

  Axes(const Strides& strides, int64_t heads_, int64_t rows_, int64_t batch_, int64_t width)
      : heads(heads_), rows(rows_), batch(batch_) {
    head = heads > 1 ? strides.head : width;
    row = rows > 1 ? strides.row : heads * head;
    entry = batch > 1 ? strides.batch : rows * row;
  }

  // Each axis must lie wholly within one step of the next, as the documentation of cuTensorMapEncodeTiled requires.
  bool can_be_mapped(int64_t width) const {
    constexpr int64_t kMost = int64_t{1} << 39;  // elements; 2^40 bytes
    return heads > 0 && rows > 0 && batch > 0 && head >= width && row >= heads * head && row % head == 0 &&
           entry >= rows * row && entry % row == 0 && entry < kMost;
  }
};

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, looked up at run time: there may be no driver to link with where this is built.
inline Encode find_encode() {
  constexpr char kName[] = "cuTensorMapEncodeTiled";
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 13000  // 12.5 has it too, but what was built with 12.5 may run with the runtime of 12.0
  const cudaError_t error = cudaGetDriverEntryPointByVersion(kName, &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(kName, &function, cudaEnableDefault, &found);
#endif
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

inline bool make_map(CUtensorMap* map, const void* data, const Axes& axes, int64_t width, bool half) {
  static const Encode encode = find_encode();
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(axes.heads),
                              static_cast<cuuint64_t>(axes.rows), static_cast<cuuint64_t>(axes.batch)};
  const cuuint64_t bytes[] = {2 * static_cast<cuuint64_t>(axes.head), 2 * static_cast<cuuint64_t>(axes.row),
                              2 * static_cast<cuuint64_t>(axes.entry)};
  const cuuint32_t box[] = {kBoxColumns, 1, kBoxRows, 1}, steps[] = {1, 1, 1, 1};
  return encode != nullptr &&
         encode(map, half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
                const_cast<void*>(data), sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

inline Axes axes_of_queries(const Strides& strides, const AttentionInputs& in, const AttentionShape& shape) {
  return Axes(strides, in.heads, in.queries, shape.batch, in.width);
}
inline Axes axes_of_keys(const Strides& strides, const AttentionInputs& in, const AttentionShape& shape) {
  return Axes(strides, in.heads, shape.keys, shape.batch, in.width);
}

struct Maps {
  CUtensorMap q, k, v, dout;
};

// Makes the maps of q, k and v; whether the driver did. It makes none in a thread that has no context yet, as one of
// torch's may not have on its first call: cudaSetDevice() gives it one.
inline bool make_maps(Maps* maps, const AttentionInputs& in, const AttentionShape& shape) {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess &&
         make_map(&maps->q, in.q, axes_of_queries(in.q_strides, in, shape), in.width, shape.half) &&
         make_map(&maps->k, in.k, axes_of_keys(in.k_strides, in, shape), in.width, shape.half) &&
         make_map(&maps->v, in.v, axes_of_keys(in.v_strides, in, shape), in.width, shape.half);
}
inline const char* no_maps() { return "attention: the driver makes no tensor maps of q, k, v or their gradient"; }

// One block for each multiprocessor; and whether these take `pieces` pieces of work by a counter.
inline int64_t most_blocks() { return std::max(1, device_attribute(cudaDevAttrMultiProcessorCount)); }
inline bool by_counter(int64_t pieces) { return pieces > most_blocks(); }

// Queue a kernel for `blocks` pieces of work. counter: an int on the device for `taken`, set to 0 if by_counter().
template <typename... Wanted, typename... Given>
const char* launch_work(void (*kernel)(Problem, Maps, int*, Wanted...), int64_t blocks, int shared, int* counter,
                        void* stream, const Problem& problem, const Maps& maps, const Given&... given) {
  if (blocks > INT32_MAX - most_blocks()) return "attention: more blocks than can be numbered";
  const bool taking = by_counter(blocks);
  return launch_blocks<kBlock>(kernel, taking ? most_blocks() : blocks, shared, stream, problem, maps,
                               taking ? counter : nullptr, given...);
}

// call(type, width, dropout) with what `in` and `shape` say as types.
template <typename Call>
const char* with_types(const AttentionInputs& in, const AttentionShape& shape, Call call) {
  const auto with_width = [&](auto type) {
    using Type = decltype(type);
    return in.width <= 64 ? with_dropout<Type, 64>(in, call) : with_dropout<Type, 128>(in, call);
  };
  return shape.half ? with_width(Half{}) : with_width(BFloat{});
}

}  // namespace sm90
}  // namespace cuda
}  // namespace aura
