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
template <int N>
AURA_INLINE void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,4)" ::"r"(to), "r"(stride), "i"(N) : "memory");
}
// Tile N += A B: A holds [row][pair], B [pair][lane].
template <int N, int A, int B>
AURA_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(N), "i"(A), "i"(B));
}

// While one lives, this thread's tiles are all 16 rows of 64 bytes. Other libraries lay theirs out when they begin too.
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

constexpr int kLeftTile = 4;   // after the sums
constexpr int kRightTile = 5;  // and the two after it

template <int V>
AURA_INLINE void zero_sums() {
  tile_zero<0>();
  if constexpr (V > 1) tile_zero<1>();
  if constexpr (V > 2) tile_zero<2>();
  if constexpr (V > 3) tile_zero<3>();
}

// Sums 0 to V - 1 += left, which is tile 4, times V tiles of `right`.
template <int V>
AURA_INLINE void multiply_by(const Pair* right, int64_t stride) {
  tile_load<kRightTile>(right, stride);
  if constexpr (V > 1) tile_load<kRightTile + 1>(right + kTile, stride);
  if constexpr (V > 2) tile_load<kRightTile + 2>(right + 2 * kTile, stride);
  tile_multiply<0, kLeftTile, kRightTile>();
  if constexpr (V > 1) tile_multiply<1, kLeftTile, kRightTile + 1>();
  if constexpr (V > 2) tile_multiply<2, kLeftTile, kRightTile + 2>();
  if constexpr (V > 3) {
    tile_load<kRightTile>(right + 3 * kTile, stride);
    tile_multiply<3, kLeftTile, kRightTile>();
  }
}

template <int V>
AURA_INLINE void store_sums(float* to, int64_t stride) {
  tile_store<0>(to, stride);
  if constexpr (V > 1) tile_store<1>(to + kTile, stride);
  if constexpr (V > 2) tile_store<2>(to + 2 * kTile, stride);
  if constexpr (V > 3) tile_store<3>(to + 3 * kTile, stride);
}

}  // namespace AURA_ISA
}  // namespace aura
