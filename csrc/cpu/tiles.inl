// Products of pairs of bfloat16 in tiles of 16 x 16 sums (Intel AMX): docs/kernels.md. Included by matrix.inl alone.
//
// The instructions are written out, as the compiler's intrinsics for a load do not tell it that memory is read.
#pragma once

#include "cpu/vec.h"

namespace aura {
namespace AURA_ISA {

constexpr int kTile = 16;  // rows of a tile, and numbers of 32 bits in each

template <int N>
AURA_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(N));
}
// `stride`: between rows, in numbers of 32 bits.
template <int N>
AURA_INLINE void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,4), %%tmm%c2" ::"r"(from), "r"(stride), "i"(N) : "memory");
}
// For what is read through from end to end, so that it does not drive out of the first-level cache what is needed soon.
template <int N>
AURA_INLINE void tile_stream(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,4), %%tmm%c2" ::"r"(from), "r"(stride), "i"(N) : "memory");
}
template <int N>
AURA_INLINE void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,4)" ::"r"(to), "r"(stride), "i"(N) : "memory");
}
// Tile N += A B: A holds [row][pair], B [pair][lane].
template <int N, int A, int B>
AURA_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(N), "i"(A), "i"(B));
}

// While one lives, this thread's tiles are all 16 rows of 64 bytes. Other libraries set theirs up as they begin, too.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile};
    } layout;
    static_assert(sizeof layout == 64, "as LDTILECFG reads it");
    asm volatile("ldtilecfg %0" ::"m"(layout));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// A square of up to 2 x 2 tiles of sums, row r and column v in tile 2 r + v, takes two tiles on either side: one load for
// each product, and no sum has to wait for itself.
constexpr int kLeftTile = 4;   // and the one after it
constexpr int kRightTile = 6;  // and the one after it

template <int R, int V>
AURA_INLINE void zero_sums() {
  tile_zero<0>();
  if constexpr (V > 1) tile_zero<1>();
  if constexpr (R > 1) tile_zero<2>();
  if constexpr (R > 1 && V > 1) tile_zero<3>();
}

template <int R, int V>
AURA_INLINE void load_sums(const float* from, int64_t stride) {
  tile_load<0>(from, stride);
  if constexpr (V > 1) tile_load<1>(from + kTile, stride);
  if constexpr (R > 1) tile_load<2>(from + kTile * stride, stride);
  if constexpr (R > 1 && V > 1) tile_load<3>(from + kTile * stride + kTile, stride);
}

template <int R, int V>
AURA_INLINE void store_sums(float* to, int64_t stride) {
  tile_store<0>(to, stride);
  if constexpr (V > 1) tile_store<1>(to + kTile, stride);
  if constexpr (R > 1) tile_store<2>(to + kTile * stride, stride);
  if constexpr (R > 1 && V > 1) tile_store<3>(to + kTile * stride + kTile, stride);
}

// Sums += the left, which is in its tiles, times the V tiles of `right`.
template <int R, int V>
AURA_INLINE void multiply_by(const Pair* right, int64_t stride) {
  tile_load<kRightTile>(right, stride);
  if constexpr (V > 1) tile_load<kRightTile + 1>(right + kTile, stride);
  tile_multiply<0, kLeftTile, kRightTile>();
  if constexpr (R > 1) tile_multiply<2, kLeftTile + 1, kRightTile>();
  if constexpr (V > 1) tile_multiply<1, kLeftTile, kRightTile + 1>();
  if constexpr (R > 1 && V > 1) tile_multiply<3, kLeftTile + 1, kRightTile + 1>();
}

}  // namespace AURA_ISA
}  // namespace aura
