// What the attention kernels share: FlashAttention-2 (Dao 2023, arXiv:2307.08691) on mma.sync, our own code.
//
// A block holds 128 rows (queries, or keys where dk and dv are computed), 16 or 32 to a warp, and walks over tiles of
// the other side, which cp.async brings ahead of use. Fragments are those of mma.sync's accumulators (ptx.cuh): a lane
// holds rows lane / 4 and lane / 4 + 8 of every 16 rows of its warp, and columns 2 (lane % 4) and 2 (lane % 4) + 1 of
// every 8. So a row lies in four lanes of one warp, and the accumulators of one product, packed to 16 bits, are the
// left operand of the next without any exchange between lanes.
//
// A block's shared memory fits the 99 KB that one may have on sm_86 and sm_89. Blocks of four warps are sized to run
// two at a time on a multiprocessor, which has 100 KB there, 164 on sm_80 and 228 on sm_90.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/attention.h"
#include "cuda/launch.cuh"
#include "cuda/philox.cuh"
#include "cuda/ptx.cuh"

namespace aura {
namespace cuda {

constexpr int kRows = 128;
// Threads of a block whose warps hold kTall blocks of 16 rows each.
template <int kTall>
constexpr int kThreadsOf = 32 * (kRows / (16 * kTall));

template <typename T>
struct View {
  T* data;
  Strides strides;
};

// An attention as every kernel sees it.
struct Problem {
  View<const uint16_t> q, k, v;
  int queries, keys, heads, width;  // T, S, H, D
  int tiles, blocks;         // blocks per head of a batch entry, and in all
  int together;              // heads whose blocks are numbered together, tile by tile
  bool causal;
  float scale, log2_scale;  // log2_scale: scale times log2(e), as exponentials are powers of 2
  const int64_t *lengths, *cu_seqlens;
  int64_t documents;
  uint32_t thresholds, lower_thresholds;  // Dropout's threshold in both halves; the same without their highest bits
  uint64_t seed;
  float keep;  // 1 / P(kept)
};

// ---- What a block works on ------------------------------------------------------------------------------------------

// Rows [begin, begin + kRows) of one head of a sequence, which is given as in attention.h.
struct Place {
  int batch, first, queries, keys;
  int head, begin;
};

// Blocks are numbered tile by tile over a few heads at a time, the tiles with the most work first (see heads_together).
// Document d owns the tiles from cu_seqlens[d] / kRows + d up to the next document's: as many as it needs or one more,
// so that the grid is known without reading cu_seqlens. The kernels skip a tile without rows. Nobody has checked the
// integers on the device, so they are clamped to the tensor's bounds.
__device__ __forceinline__ Place find_place(const Problem& problem, int block, bool last_first) {
  const int group = block / (problem.tiles * problem.together), number = block % (problem.tiles * problem.together);
  const int first_head = group * problem.together, heads = problem.blocks / problem.tiles - first_head;
  const int together = min(problem.together, heads), all = first_head + number % together;
  const int tile = last_first ? problem.tiles - 1 - number / together : number / together;
  Place place{all / problem.heads, 0, problem.queries, problem.keys, all % problem.heads, tile * kRows};
  if (problem.cu_seqlens != nullptr) {
    const int64_t rows = problem.queries;
    int64_t document = 0;
    for (int64_t last = problem.documents - 1; document < last;) {
      const int64_t middle = (document + last + 1) / 2;
      if (problem.cu_seqlens[middle] / kRows + middle <= tile) {
        document = middle;
      } else {
        last = middle - 1;
      }
    }
    const int64_t first = max(int64_t{0}, min(problem.cu_seqlens[document], rows));
    const int64_t end = max(first, min(problem.cu_seqlens[document + 1], rows));
    const int64_t begin = (tile - first / kRows - document) * kRows;
    const bool inside = begin >= 0 && begin < end - first;
    place.first = static_cast<int>(first);
    place.queries = place.keys = inside ? static_cast<int>(end - first) : 0;
    place.begin = inside ? static_cast<int>(begin) : 0;
  } else if (problem.lengths != nullptr) {
    const int64_t length = problem.lengths[place.batch], keys = problem.keys;
    place.keys = static_cast<int>(max(int64_t{0}, min(length, keys)));
  }
  return place;
}
__device__ __forceinline__ Place find_place(const Problem& problem, bool last_first) {
  return find_place(problem, block_number(), last_first);
}

// The address of row `row` of the place's sequence and head.
template <typename T>
__device__ __forceinline__ T* row_of(const View<T>& view, const Place& place, int row) {
  const Strides& strides = view.strides;
  const int64_t in_batch = int64_t{place.first} + row;
  return view.data + place.batch * strides.batch + in_batch * strides.row + place.head * strides.head;
}

// The row's number in the flattened [B, T].
__device__ __forceinline__ int64_t flat_row(const Problem& problem, const Place& place, int row) {
  return int64_t{place.batch} * problem.queries + place.first + row;
}

// ---- Tiles in shared memory -----------------------------------------------------------------------------------------

// The byte offset of 16 bytes, eight columns of a row, in a tile whose rows have kWidth 16-bit values. ldmatrix reads
// the same eight columns of eight rows at once, free of bank conflicts if these lie in eight different 16-byte pieces
// of 128 bytes. In rows of a multiple of 128 bytes (widths 64 and 128) they would all lie in the same piece: XOR with
// row % 8 spreads them. Rows of 64 or 192 bytes (32 and 96) begin in the first and the second half by turns: XOR with
// row / 2 % 4 spreads the four rows of either half, and never leaves an aligned group of four pieces, so that it also
// does for 12 pieces to a row.
template <int kWidth>
__device__ __forceinline__ int tile_offset(int row, int eight) {
  constexpr int kEights = kWidth / 8;
  return (row * kEights + (kEights % 8 == 0 ? eight ^ (row & 7) : eight ^ (row >> 1 & 3))) * 16;
}

template <int kWidth>
__host__ __device__ constexpr int tile_bytes(int rows) {
  return rows * kWidth * 2;
}

// What one of kBlockThreads threads copies of one head's tiles: the same columns of rows a fixed distance apart, tile
// after tile, so that one addition gives the next address. Rows may have fewer columns than a tile, which has zeros
// then.
template <int kWidth, int kBlockThreads>
struct Source {
  static constexpr int kLanes = kWidth % 64 == 0 ? 8 : 4;  // threads side by side in a row
  const unsigned char* next;
  uint32_t row_bytes;
  int columns;  // of a row

  __device__ __forceinline__ Source(const View<const uint16_t>& view, const Place& place, int begin, int columns_)
      : next(reinterpret_cast<const unsigned char*>(row_of(view, place, begin + threadIdx.x / kLanes)) +
             16 * (threadIdx.x % kLanes)),
        row_bytes(static_cast<uint32_t>(2 * view.strides.row)),
        columns(columns_) {}

  // Start the copy of the next kCount rows, the first of them `begin`; those from `end` on become zeros.
  template <int kCount>
  __device__ __forceinline__ void copy(unsigned char* tile, int begin, int end) {
    constexpr int kApart = kBlockThreads / kLanes;
    static_assert(kApart % 8 == 0, "the swizzle repeats after eight rows");
    const int row = threadIdx.x / kLanes;
    if (kCount < kApart && row >= kCount) return;
    unsigned char* const to = tile + tile_offset<kWidth>(row, threadIdx.x % kLanes);
    // A tile has less than 32 columns more than a row: only a thread's last access in a row may lie beyond its end.
    const int there = end - begin;
    const int there_last = kWidth - 8 * kLanes + 8 * static_cast<int>(threadIdx.x % kLanes) < columns ? there : 0;
#pragma unroll
    for (int done = 0; done < kCount; done += kApart) {
      const unsigned char* const at = next + uint64_t{row_bytes} * done;
#pragma unroll
      for (int column = 0; column < 2 * kWidth; column += 16 * kLanes) {
        const int rows = column < 2 * kWidth - 16 * kLanes ? there : there_last;
        copy_async_16(to + tile_bytes<kWidth>(done) + column, at + column, row + done < rows ? 16 : 0);
      }
    }
    next += uint64_t{row_bytes} * kCount;
  }
};

// The same for two tensors, whose tiles lie one behind the other.
template <int kWidth, int kBlockThreads>
struct Sources {
  Source<kWidth, kBlockThreads> first, second;

  __device__ __forceinline__ Sources(const View<const uint16_t>& one, const View<const uint16_t>& other,
                                     const Place& place, int begin, int columns)
      : first(one, place, begin, columns), second(other, place, begin, columns) {}
  template <int kCount>
  __device__ __forceinline__ void copy(unsigned char* tiles, int begin, int end) {
    first.template copy<kCount>(tiles, begin, end);
    second.template copy<kCount>(tiles + tile_bytes<kWidth>(kCount), begin, end);
  }
};

// ---- Products of a warp's rows --------------------------------------------------------------------------------------
//
// A warp has kTall blocks of 16 rows, which follow one another in `sums` and left operands. What one ldmatrix reads of
// a tile in four cycles of shared memory serves them all, with two products for each block. The tensor cores of sm_80
// take two cycles for a product: with a single block they would take just as long as shared memory.

// The addresses that a lane gives to ldmatrix: in a block of 16 rows and 16 columns, the first or the second 16 bytes
// of one row. Row and half are the lane's own; which block is known when compiling. So an address is `first` XOR a
// constant, plus a constant: the swizzle stays within 64 or 128 bytes, and rows begin at multiples of these.
template <int kWidth>
struct Reader {
  static constexpr int kSwizzled = kWidth % 64 == 0 ? 128 : 64;
  uint32_t first;

  __device__ __forceinline__ Reader(const unsigned char* tile, int row, int half)
      : first(shared_address(tile) + tile_offset<kWidth>(row, half)) {}
  __device__ __forceinline__ uint32_t at(int rows, int columns) const {
    const int bytes = 32 * columns;
    return (first ^ bytes % kSwizzled) + (bytes / kSwizzled * kSwizzled + 16 * rows * tile_bytes<kWidth>(1));
  }
};

// A warp's rows, from `row` + kFrom on, as the left operand of products: the first kHeld columns are in registers, the
// others stay in shared memory, in a tile of the last kRest columns.
template <int kWidth, int kTall, int kHeld, int kFrom = 0, int kRest = kWidth>
struct Left {
  Reader<kRest> rest;
  uint32_t held[kHeld / 16 + 1][kTall][4];

  // first: the tile with the columns to hold, and with no others where kRest leaves those out. others: the tile with
  // the rest; any tile where all columns are held.
  __device__ __forceinline__ Left(const unsigned char* first, const unsigned char* others, int row)
      : rest(others, row + threadIdx.x % 16, threadIdx.x % 32 / 16) {
    if constexpr (kHeld > 0) {
      const Reader<kRest == kWidth ? kWidth : kHeld> reader(first, row + threadIdx.x % 16, threadIdx.x % 32 / 16);
#pragma unroll
      for (int k = 0; k < kHeld / 16; ++k) load(held[k], reader, k);
    }
  }
  template <int kColumns>
  static __device__ __forceinline__ void load(uint32_t (&a)[kTall][4], const Reader<kColumns>& reader, int k) {
#pragma unroll
    for (int t = 0; t < kTall; ++t) load_matrices(a[t], reader.at(kFrom / 16 + t, k));
  }
};

// sums[rows, kCount] += a tile^T over columns [16 k, 16 k + 16) of both, with the tile's rows from kFrom on.
template <typename Type, int kCount, int kFrom, int kWidth, int kTall>
__device__ __forceinline__ void multiply_columns(float (&sums)[kTall][kCount / 8][4], const uint32_t (&a)[kTall][4],
                                                 const Reader<kWidth>& tile, int k) {
#pragma unroll
  for (int n = 0; n < kCount / 16; ++n) {
    uint32_t b[4];
    load_matrices(b, tile.at(kFrom / 16 + n, k));
#pragma unroll
    for (int t = 0; t < kTall; ++t) {
      multiply(Type{}, sums[t][2 * n], a[t], b[0], b[1]);
      multiply(Type{}, sums[t][2 * n + 1], a[t], b[2], b[3]);
    }
  }
}

// sums[rows, kCount] += left tile^T, with the tile's rows from kFrom on: where two tiles lie one behind the other,
// kFrom reaches the second by the addresses of the first.
template <typename Type, int kCount, int kFrom = 0, int kWidth, int kTall, int kHeld, int kLeftFrom, int kRest>
__device__ __forceinline__ void multiply_by_rows(float (&sums)[kTall][kCount / 8][4],
                                                 const Left<kWidth, kTall, kHeld, kLeftFrom, kRest>& left,
                                                 const unsigned char* tile) {
  const int lane = threadIdx.x % 32;
  const Reader<kWidth> reader(tile, lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int k = 0; k < kHeld / 16; ++k) multiply_columns<Type, kCount, kFrom>(sums, left.held[k], reader, k);
#pragma unroll
  for (int k = kHeld / 16; k < kWidth / 16; ++k) {
    uint32_t a[kTall][4];
    left.load(a, left.rest, k - (kWidth - kRest) / 16);
    multiply_columns<Type, kCount, kFrom>(sums, a, reader, k);
  }
}

// sums[rows, kWidth] += left[rows, kCount] tile, where `left` is another product's accumulators, rounded to 16 bits
// here. kFrom: as above.
template <typename Type, int kCount, int kWidth, int kFrom = 0, int kTall>
__device__ __forceinline__ void multiply_by_tile(float (&sums)[kTall][kWidth / 8][4],
                                                 const float (&left)[kTall][kCount / 8][4],
                                                 const unsigned char* tile) {
  const int lane = threadIdx.x % 32;
  const Reader<kWidth> reader(tile, lane % 16, lane / 16);
#pragma unroll
  for (int k = 0; k < kCount / 16; ++k) {
    uint32_t a[kTall][4];
#pragma unroll
    for (int t = 0; t < kTall; ++t) {
      const float(&low)[4] = left[t][2 * k], (&high)[4] = left[t][2 * k + 1];
      a[t][0] = pack(Type{}, low[0], low[1]);
      a[t][1] = pack(Type{}, low[2], low[3]);
      a[t][2] = pack(Type{}, high[0], high[1]);
      a[t][3] = pack(Type{}, high[2], high[3]);
    }
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
      uint32_t b[4];
      load_matrices_transposed(b, reader.at(kFrom / 16 + k, n));
#pragma unroll
      for (int t = 0; t < kTall; ++t) {
        multiply(Type{}, sums[t][2 * n], a[t], b[0], b[1]);
        multiply(Type{}, sums[t][2 * n + 1], a[t], b[2], b[3]);
      }
    }
  }
}

// Write the first `columns` of the first `rows` of a warp's 16 rows, each row times its factor (0 gives zeros, whatever
// the sums are). They go through `memory`, tile_bytes(16) of the warp's own, so that every store to device memory is of
// 16 bytes.
template <typename Type, int kWidth>
__device__ __forceinline__ void write_rows(const float (&sums)[kWidth / 8][4], const float (&factor)[2],
                                           unsigned char* memory, uint16_t* to, int64_t stride, int rows,
                                           int columns) {
  constexpr int kEights = kWidth / 8;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float low = sums[n][2 * r] * factor[r], high = sums[n][2 * r + 1] * factor[r];
      unsigned char* place = memory + tile_offset<kWidth>(lane / 4 + 8 * r, n) + 4 * (lane % 4);
      *reinterpret_cast<uint32_t*>(place) = factor[r] == 0.0f ? 0u : pack(Type{}, low, high);
    }
  }
  __syncwarp();
#pragma unroll
  for (int done = 0; done < 16 * kEights; done += 32) {
    const int i = done + lane, row = i / kEights, eight = i % kEights;
    if (row < rows && 8 * eight < columns) {
      *reinterpret_cast<uint4*>(to + row * stride + 8 * eight) =
          *reinterpret_cast<const uint4*>(memory + tile_offset<kWidth>(row, eight));
    }
  }
}

// ---- Masks ----------------------------------------------------------------------------------------------------------

// How many of the sequence's keys a query sees.
__device__ __forceinline__ int keys_seen(const Problem& problem, const Place& place, int query) {
  return problem.causal ? min(place.keys, query + 1) : place.keys;
}

// Sets the scores of a warp's queries (from `query` on) to -inf for those keys (from `begin` on) that they do not see.
template <int kKeys, int kTall = 1>
__device__ __forceinline__ void hide_unseen(const Problem& problem, const Place& place, int query, int begin,
                                            float (*scores)[kKeys / 8][4]) {
  if (begin + kKeys <= keys_seen(problem, place, query)) return;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2 * kTall; ++r) {
    const int seen = keys_seen(problem, place, query + lane / 4 + 8 * r) - begin - 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (8 * n + i >= seen) scores[r / 2][n][r % 2 * 2 + i] = -INFINITY;
      }
    }
  }
}

// Which of the keys [8 eight, 8 eight + 8) dropout keeps for a query, one bit each.
__device__ __forceinline__ uint32_t kept_keys(const Problem& problem, uint32_t row, int eight, int head) {
  const uint4 bits = philox(problem.seed, row, eight, head, 0);
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
  // For both halves of a word at once, the highest bit of each becomes "half >= threshold". That holds where only the
  // half has its highest bit; where both or neither have it, the subtraction of the lower bits decides, which must not
  // borrow.
  uint32_t kept = 0;  // even keys from bit 1 on, odd ones from bit 17 on
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t lower_no_less = (words[w] | 0x80008000u) - problem.lower_thresholds;
    const uint32_t no_less = (words[w] & ~problem.thresholds) | (~(words[w] ^ problem.thresholds) & lower_no_less);
    kept |= no_less >> (14 - 2 * w) & 0x20002u << 2 * w;
  }
  return kept >> 16 | (kept >> 1 & 0x55u);
}

// Dropout for 16 queries (rows, from the flat row `row` on) and kKeys keys (columns, from key `key` on) of a warp. Each
// call of philox is made by one of the four lanes that hold its query, and they share the result.
template <int kKeys>
struct KeptByQuery {
  static constexpr int kEach = kKeys / 32;  // how many of a query's groups of eight keys a lane draws
  uint32_t bytes = 0;                       // one for each group of both queries

  __device__ __forceinline__ void draw(const Problem& problem, uint32_t row, int key, int head) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int byte = 0; byte < 2 * kEach; ++byte) {
      const int eight = key / 8 + lane % 4 * kEach + byte % kEach;
      bytes |= kept_keys(problem, row + lane / 4 + byte / kEach * 8, eight, head) << 8 * byte;
    }
  }

  // The bits of the n-th eight columns, for kept(). To be called by the whole warp.
  __device__ __forceinline__ uint32_t columns(int n) const {
    const int lane = threadIdx.x % 32;
    return __shfl_sync(~0u, bytes, lane / 4 * 4 + n / kEach) >> (n % kEach * 8 + lane % 4 * 2);
  }
  static __device__ __forceinline__ bool kept(uint32_t columns, int i) {
    return columns >> (i / 2 * kEach * 8 + i % 2) & 1;
  }
};

// The same with keys as rows: 16 keys from `key` on, and kQueries queries from `row` on. A lane draws for two adjacent
// queries: both groups of eight keys where there are as many such pairs as lanes, one group where there are half as
// many.
template <int kQueries>
struct KeptByKey {
  static constexpr int kPairs = kQueries / 2;
  uint32_t bytes = 0;  // byte 2 i + j: keys [key + 8 i, key + 8 i + 8), query j of the pair

  __device__ __forceinline__ void draw(const Problem& problem, uint32_t row, int key, int head) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = lane / kPairs; i < 2; i += 32 / kPairs) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t query = row + lane % kPairs * 2 + j;
        bytes |= kept_keys(problem, query, key / 8 + i, head) << (16 * i + 8 * j);
      }
    }
    if (kPairs < 32) bytes |= __shfl_xor_sync(~0u, bytes, 16);
  }

  __device__ __forceinline__ uint32_t columns(int n) const {
    const int lane = threadIdx.x % 32;
    return __shfl_sync(~0u, bytes, 4 * n + lane % 4) >> lane / 4;
  }
  static __device__ __forceinline__ bool kept(uint32_t columns, int i) { return columns >> 8 * i & 1; }
};

// ---- Launching ------------------------------------------------------------------------------------------------------

// Queue `blocks` blocks of kBlockThreads threads each. Returns null, or why it could not.
template <int kBlockThreads, typename... Wanted, typename... Given>
const char* launch_blocks(void (*kernel)(Wanted...), int64_t blocks, int shared, void* stream, const Given&... given) {
  if (blocks == 0) return nullptr;
  if (blocks > INT32_MAX) return "attention: more blocks than a grid may have";
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kBlockThreads), shared, stream, given...);
}

// Tiles of one head of a batch entry of `rows` queries or keys; with documents, those that find_place() numbers.
inline int64_t tiles_of(int64_t rows, const AttentionShape& shape) {
  return shape.cu_seqlens != nullptr ? rows / kRows + shape.documents : (rows + kRows - 1) / kRows;
}

inline View<const uint16_t> view_of(const void* data, const Strides& strides) {
  return {static_cast<const uint16_t*>(data), strides};
}

// Whether every eight columns begin at a multiple of 16 bytes, and kRows rows span less than 2^31 elements.
inline bool can_be_read(const void* data, const Strides& strides) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && strides.batch % 8 == 0 && strides.row % 8 == 0 &&
         strides.head % 8 == 0 && strides.row >= 0 && strides.row < INT32_MAX / kRows;
}

// How many heads' blocks are numbered together. Under the causal mask blocks differ in work: with the longest of
// several heads first, the last to end leave little of the card idle (list scheduling: Graham 1969). But blocks that
// run together should find what they read in the L2 cache: no more heads than half of it holds, and no more than kMost,
// which comes close to the order over all heads. Groups are of about equal size: a small one at the end would leave the
// card idle again.
inline int heads_together(const AttentionInputs& in, const AttentionShape& shape) {
  constexpr int64_t kMost = 16;
  if (!in.causal || shape.cu_seqlens != nullptr) return 1;
  const int64_t head_bytes = 2 * 2 * in.width * max(in.queries, int64_t{1});  // of two tensors
  const int64_t heads = max(shape.batch * in.heads, int64_t{1});
  const int64_t most =
      std::clamp<int64_t>(device_attribute(cudaDevAttrL2CacheSize) / 2 / head_bytes, 1, std::min(kMost, heads));
  const int64_t times = (heads + most - 1) / most;
  return static_cast<int>((heads + times - 1) / times);
}

inline Problem problem_of(const AttentionInputs& in, const AttentionShape& shape, int64_t tiles) {
  Problem problem{};
  problem.q = view_of(in.q, in.q_strides);
  problem.k = view_of(in.k, in.k_strides);
  problem.v = view_of(in.v, in.v_strides);
  problem.queries = static_cast<int>(in.queries);
  problem.keys = static_cast<int>(shape.keys);
  problem.heads = static_cast<int>(in.heads);
  problem.width = static_cast<int>(in.width);
  problem.tiles = static_cast<int>(tiles);
  problem.blocks = static_cast<int>(tiles * in.heads * shape.batch);
  problem.together = heads_together(in, shape);
  problem.causal = in.causal;
  problem.scale = static_cast<float>(in.scale);
  problem.log2_scale = problem.scale * kLog2E;
  problem.lengths = shape.lengths;
  problem.cu_seqlens = shape.cu_seqlens;
  problem.documents = shape.documents;
  problem.thresholds = in.dropout.threshold * 0x10001u;
  problem.lower_thresholds = problem.thresholds & 0x7fff7fffu;
  problem.seed = in.dropout.seed;
  problem.keep = in.dropout.threshold ? static_cast<float>(in.dropout.scale()) : 1.0f;
  return problem;
}

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// call(type, width, dropout) with what `in` and `shape` say, as types. width: the head's, rounded up to one that there
// are kernels for, which take the missing columns for zeros.
template <typename Type, int kWidth, typename Call>
const char* with_dropout(const AttentionInputs& in, Call call) {
  return in.dropout.threshold ? call(Type{}, Constant<kWidth>{}, std::true_type{})
                              : call(Type{}, Constant<kWidth>{}, std::false_type{});
}
template <typename Type, typename Call>
const char* with_width(const AttentionInputs& in, Call call) {
  switch ((in.width + 31) / 32) {
    case 1: return with_dropout<Type, 32>(in, call);
    case 2: return with_dropout<Type, 64>(in, call);
    case 3: return with_dropout<Type, 96>(in, call);
    case 4: return with_dropout<Type, 128>(in, call);
    default: return "attention: a head width that takes() refuses";
  }
}
template <typename Call>
const char* with_types(const AttentionInputs& in, const AttentionShape& shape, Call call) {
  if (max(in.queries, shape.keys) > INT32_MAX - kRows) return "attention: sequences of 2^31 rows or more";
  return shape.half ? with_width<Half>(in, call) : with_width<BFloat>(in, call);
}

// The kernels for sm_90 only: whether they take a problem on the current device, and their AttentionKernels::forward.
bool wgmma_takes(const AttentionInputs& in, const AttentionShape& shape);
const char* wgmma_forward(const AttentionForward& job, const AttentionShape& shape, int* counter, void* stream);

// Entries of attention_kernels(): attention_backward.cu defines them, attention_forward.cu makes the table.
int64_t attention_workspace(const AttentionInputs& in, const AttentionShape& shape);
const char* attention_backward(const AttentionBackward& job, const AttentionShape& shape, void* workspace,
                               void* stream);

}  // namespace cuda
}  // namespace aura
