// Products of small matrices, and how their operands lie: docs/kernels.md. Included by attention.inl alone.
#pragma once

#include "cpu/vec.h"
#if defined(AURA_TILES)
#include "cpu/tiles.inl"
#endif

namespace aura {
namespace AURA_ISA {

// A tile of kRows x kVectors accumulators, its right-hand side and one broadcast value fill the registers.
#if AURA_VECTOR_BYTES == 64
constexpr int kRows = 8;
#else
constexpr int kRows = 4;
#endif
constexpr int kVectors = 3;

AURA_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
AURA_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
AURA_INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// ---- Products -------------------------------------------------------------------------------------------------------

// What a product multiplies: numbers as they are computed with or, where the processor multiplies bfloat16 and adds the
// products in float, pairs that are neighbours along the sum.
template <typename T>
using Operand = std::conditional_t<kDotProducts && std::is_same_v<T, bfloat16>, Pair, Compute<T>>;

// Whether pairs are multiplied in tiles.
#if defined(AURA_TILES)
constexpr bool kInTiles = true;
#else
constexpr bool kInTiles = false;
#endif

// What has to live while a task's numbers of type T are computed.
template <typename T>
struct Needed {};
#if AURA_VECTOR_BYTES == 64
template <>
struct Needed<bfloat16> {
  FlushToZero tiny;
#if defined(AURA_TILES)
  Tiles tiles;
#endif
};
#endif

// How many terms of the sum an operand of type E holds, and how many operands hold `terms` terms.
template <typename E>
constexpr int kTerms = std::is_same_v<E, Pair> ? 2 : 1;
template <typename E>
AURA_INLINE int64_t operands(int64_t terms) {
  return (terms + kTerms<E> - 1) / kTerms<E>;
}

// The left-hand side of a product: element (row, k) at data[row * stride + k] or, where rows are adjacent in memory (a
// transposed matrix), at data[row + k * stride].
template <typename E, bool kAdjacentRows>
struct Left {
  const E* data;
  int64_t stride;

  AURA_INLINE E at(int64_t row, int64_t k) const {
    return kAdjacentRows ? data[row + k * stride] : data[row * stride + k];
  }
  AURA_INLINE Left skip_rows(int64_t rows) const { return {data + (kAdjacentRows ? rows : rows * stride), stride}; }
};

// What a product is added to: nothing, what c holds, or what c holds times a factor for each row or, in tiles, each lane.
enum class To { kNothing, kSum, kScaledSum };

// c[row][lane] = to + sum over k of a(row, k) * b[k][lane], for R rows and V vectors of lanes. c is added at the end: one
// long chain of sums over all blocks would round more than short ones that are then added up.
template <int R, int V, To kTo, typename E, typename C, bool kAdjacentRows>
AURA_INLINE void tile(int64_t depth, Left<E, kAdjacentRows> a, const E* b, int64_t b_stride, C* c, int64_t c_stride,
                      const C* factor) {
  constexpr int W = kWidth<C>;
  Vec<C> sum[R][V] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vec<E> right[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) right[v] = load<Vec<E>>(b + k * b_stride + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec<E> left = splat<Vec<E>>(a.at(r, k));
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] = add_product(sum[r][v], left, right[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      C* to = c + r * c_stride + v * W;
      if (kTo == To::kSum) sum[r][v] += load<Vec<C>>(to);
      if (kTo == To::kScaledSum) sum[r][v] += load<Vec<C>>(to) * factor[r];
      store(to, sum[r][v]);
    }
  }
}

template <int V, To kTo, typename E, typename C, bool kAdjacentRows>
void product_of(int64_t rows, int64_t depth, Left<E, kAdjacentRows> a, const E* b, int64_t b_stride, C* c,
                int64_t c_stride, const C* factor) {
  constexpr int kMost = V == 4 ? 6 : kRows;
  const auto tile_at = [&](auto of, int64_t row) {
    tile<decltype(of)::value, V, kTo>(depth, a.skip_rows(row), b, b_stride, c + row * c_stride, c_stride,
                                      kTo == To::kScaledSum ? factor + row : factor);
  };
  int64_t row = 0;
  for (; row + kMost <= rows; row += kMost) tile_at(std::integral_constant<int, kMost>{}, row);
  if (kMost > 4 && row + 4 <= rows) {
    tile_at(std::integral_constant<int, 4>{}, row);
    row += 4;
  }
  if (row + 2 <= rows) {
    tile_at(std::integral_constant<int, 2>{}, row);
    row += 2;
  }
  if (row < rows) tile_at(std::integral_constant<int, 1>{}, row);
}

// c = to + a b over `vectors` vectors of lanes: three at a time, or four where that leaves none over and the registers
// hold 6 x 4 sums. depth: operands, not terms, of a sum.
template <To kTo, typename E, typename C, bool kAdjacentRows>
void product(int64_t vectors, int64_t rows, int64_t depth, Left<E, kAdjacentRows> a, const E* b, int64_t b_stride, C* c,
             int64_t c_stride, const C* factor = nullptr) {
  while (vectors > 0) {
    constexpr bool kFour = kRows == 8;
    const int64_t now = vectors % 4 == 0 && kFour ? 4 : vectors == 4 ? 2 : smaller(vectors, 3);
    switch (now) {
      case 4:
        if constexpr (kFour) product_of<4, kTo>(rows, depth, a, b, b_stride, c, c_stride, factor);
        break;
      case 3: product_of<3, kTo>(rows, depth, a, b, b_stride, c, c_stride, factor); break;
      case 2: product_of<2, kTo>(rows, depth, a, b, b_stride, c, c_stride, factor); break;
      default: product_of<1, kTo>(rows, depth, a, b, b_stride, c, c_stride, factor); break;
    }
    vectors -= now;
    b += now * kWidth<C>;
    c += now * kWidth<C>;
  }
}

// ---- Moving between [row][d] and [d][row] ---------------------------------------------------------------------------

template <int... I>
struct Lanes {};
template <int N, int... I>
struct MakeLanes : MakeLanes<N - 1, N - 1, I...> {};
template <int... I>
struct MakeLanes<0, I...> {
  using type = Lanes<I...>;
};

// Exchange, between two rows S apart, the S x S squares off the diagonal.
template <int S, typename V, int... I>
AURA_INLINE void exchange(V& a, V& b, Lanes<I...>) {
  constexpr int W = sizeof...(I);
#if defined(__clang__)
  const V first = __builtin_shufflevector(a, b, ((I & S) ? W + I - S : I)...);
  const V second = __builtin_shufflevector(a, b, ((I & S) ? W + I : I + S)...);
#else
  using Mask = Vec<std::conditional_t<sizeof(a[0]) == 8, int64_t, int32_t>>;
  const V first = __builtin_shuffle(a, b, Mask{((I & S) ? W + I - S : I)...});
  const V second = __builtin_shuffle(a, b, Mask{((I & S) ? W + I : I + S)...});
#endif
  a = first;
  b = second;
}

template <int S, typename V, int W>
AURA_INLINE void exchange_all(V (&rows)[W]) {
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) {
    if (!(i & S)) exchange<S>(rows[i], rows[i + S], typename MakeLanes<W>::type{});
  }
}

// to[j][i] = from[i][j] for a square as wide as a vector.
template <typename C>
AURA_INLINE void transpose_square(const C* from, int64_t from_stride, C* to, int64_t to_stride) {
  constexpr int W = kWidth<C>;
  Vec<C> rows[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) rows[i] = load<Vec<C>>(from + i * from_stride);
  exchange_all<1>(rows);
  if constexpr (W > 2) exchange_all<2>(rows);
  if constexpr (W > 4) exchange_all<4>(rows);
  if constexpr (W > 8) exchange_all<8>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) store(to + i * to_stride, rows[i]);
}

// Rows and columns in whole vectors.
template <typename C>
void transpose(int64_t rows, int64_t columns, const C* from, int64_t from_stride, C* to, int64_t to_stride) {
  constexpr int W = kWidth<C>;
  for (int64_t i = 0; i < rows; i += W) {
    for (int64_t j = 0; j < columns; j += W) {
      transpose_square(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride);
    }
  }
}

// ---- Products in tiles ----------------------------------------------------------------------------------------------

#if defined(AURA_TILES)
// Tile N: 16 rows of the left-hand side and pairs [k, k + pairs) of them, with zeros up to 16 pairs.
template <int N>
AURA_INLINE void load_left(const Left<Pair, false>& a, int64_t k, int64_t pairs) {
  if (pairs == kTile) return tile_stream<N>(a.data + k, a.stride);
  alignas(64) Pair some[kTile * kTile];
  const auto present = static_cast<__mmask16>((1u << pairs) - 1);
  for (int64_t i = 0; i < kTile; ++i) {
    _mm512_store_si512(some + i * kTile, _mm512_maskz_loadu_epi32(present, a.data + i * a.stride + k));
  }
  tile_load<N>(some, kTile);
}

// R x V tiles of c, which has `rows` rows. A sum of fewer than 16 pairs is filled up with zeros on both sides, on the
// right in `last`: beyond lies what another block left, which need not be a number.
template <int R, int V, To kTo>
AURA_INLINE void square(int64_t rows, int64_t depth, Left<Pair, false> a, const Pair* b, int64_t b_stride,
                        const Pair* last, float* c, int64_t c_stride, const float* factor) {
  const bool in_place = kTo != To::kScaledSum && rows >= R * kTile;
  if (in_place && kTo == To::kSum) {
    load_sums<R, V>(c, c_stride);
  } else {
    zero_sums<R, V>();
  }
  const int64_t whole = depth / kTile * kTile;
  for (int64_t k = 0; k < whole; k += kTile) {
    load_left<kLeftTile>(a, k, kTile);
    if constexpr (R > 1) load_left<kLeftTile + 1>(a.skip_rows(kTile), k, kTile);
    multiply_by<R, V>(b + k * b_stride, b_stride);
  }
  if (whole < depth) {
    load_left<kLeftTile>(a, whole, depth - whole);
    if constexpr (R > 1) load_left<kLeftTile + 1>(a.skip_rows(kTile), whole, depth - whole);
    multiply_by<R, V>(last, V * kTile);
  }
  if (in_place) return store_sums<R, V>(c, c_stride);
  alignas(64) float sums[R * kTile * V * kTile];
  store_sums<R, V>(sums, V * kTile);
  for (int64_t i = 0; i < smaller(rows, R * kTile); ++i) {
    for (int64_t v = 0; v < V * kTile; v += kTile) {
      float* to = c + i * c_stride + v;
      VecF sum = load<VecF>(sums + i * V * kTile + v);
      if (kTo == To::kSum) sum += load<VecF>(to);
      if (kTo == To::kScaledSum) sum += load<VecF>(to) * load<VecF>(factor + v);
      store(to, sum);
    }
  }
}

template <int V, To kTo>
void product_in_tiles(int64_t rows, int64_t depth, Left<Pair, false> a, const Pair* b, int64_t b_stride, float* c,
                      int64_t c_stride, const float* factor) {
  const int64_t whole = depth / kTile * kTile, rest = depth - whole;
  alignas(64) Pair last[kTile * V * kTile];
  for (int64_t i = 0; rest > 0 && i < kTile; ++i) {
    for (int64_t v = 0; v < V * kTile; v += kTile) {
      store(last + i * V * kTile + v, i < rest ? load<VecP>(b + (whole + i) * b_stride + v) : VecP{});
    }
  }
  const auto square_at = [&](auto high, int64_t row) {
    square<decltype(high)::value, V, kTo>(rows - row, depth, a.skip_rows(row), b, b_stride, last, c + row * c_stride,
                                          c_stride, factor);
  };
  int64_t row = 0;
  for (; row + kTile < rows; row += 2 * kTile) square_at(std::integral_constant<int, 2>{}, row);
  if (row < rows) square_at(std::integral_constant<int, 1>{}, row);
}

// Instead of the product of vectors above. Rows of `a` are read up to the next multiple of 16: what lies there is
// not used.
template <To kTo>
void product(int64_t vectors, int64_t rows, int64_t depth, Left<Pair, false> a, const Pair* b, int64_t b_stride,
             float* c, int64_t c_stride, const float* factor = nullptr) {
  const auto strip_at = [&](auto wide, int64_t lane) {
    product_in_tiles<decltype(wide)::value, kTo>(rows, depth, a, b + lane, b_stride, c + lane, c_stride,
                                                 kTo == To::kScaledSum ? factor + lane : factor);
  };
  int64_t v = 0;
  for (; v + 1 < vectors; v += 2) strip_at(std::integral_constant<int, 2>{}, v * kTile);
  if (v < vectors) strip_at(std::integral_constant<int, 1>{}, v * kTile);
}
#endif

// ---- Moving rows ----------------------------------------------------------------------------------------------------

// Asks for the row eight rows on: rows may lie on pages of their own, where no hardware looks ahead.
template <typename T>
AURA_INLINE void prefetch_row(const T* from, int64_t row_stride, int64_t i, int64_t rows, int64_t width) {
  if (i + 8 >= rows) return;
  const T* next = from + (i + 8) * row_stride;
  for (int64_t d = 0; d < width; d += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(next + d);
}

// Rows to be summed over d: to[i][d / terms] = factor * from(row i), and zeros where the last operand lacks a term.
// `pitch` operands a row, whole vectors; zeros in all columns of the rows up to `all`.
template <typename T, typename E>
void gather_rows(const T* from, int64_t row_stride, int64_t rows, int64_t all, int64_t width, int64_t pitch,
                 Compute<T> factor, E* to) {
  using Stored = std::conditional_t<std::is_same_v<E, Pair>, T, E>;
  constexpr int W = kWidth<Compute<T>>;
  for (int64_t i = 0; i < rows; ++i) {
    prefetch_row(from, row_stride, i, rows, width);
    Stored* row = reinterpret_cast<Stored*>(to + i * pitch);
    int64_t d = 0;
    if (std::is_same_v<E, Pair> && factor == 1) {
      for (; d + 2 * W <= width; d += 2 * W) store(row + d, load<VecP>(from + i * row_stride + d));
    }
    for (; d + W <= width; d += W) store_as(row + d, load_as(from + i * row_stride + d) * factor);
    if (d < width) store_as(row + d, load_some(from + i * row_stride + d, width - d) * factor);
  }
  std::memset(to + rows * pitch, 0, static_cast<size_t>((all - rows) * pitch) * sizeof(E));
}

// Rows to be summed over: to[i / terms][d] = from(row i), zeros for d up to `padded`, which is whole vectors, for a term
// that is lacking, and for the rows up to `all`.
template <typename T, typename E>
void gather_terms(const T* from, int64_t row_stride, int64_t rows, int64_t all, int64_t width, int64_t padded, E* to) {
  if constexpr (std::is_same_v<E, Pair>) {
    constexpr int W = kWidth<float>;
    for (int64_t i = 0; i < rows; i += 2) {
      prefetch_row(from, row_stride, i, rows, width);
      prefetch_row(from, row_stride, i + 1, rows, width);
      const T* row = from + i * row_stride;
      Pair* pairs = to + i / 2 * padded;
      int64_t d = 0;
      for (; d + W <= width && i + 1 < rows; d += W) store(pairs + d, load_pairs(row + d, row + row_stride + d));
      for (; d < width; d += W) {
        const size_t bytes = static_cast<size_t>(smaller(W, width - d)) * sizeof(T);
        T some[2][W] = {};
        std::memcpy(some[0], row + d, bytes);
        if (i + 1 < rows) std::memcpy(some[1], row + row_stride + d, bytes);
        store(pairs + d, load_pairs(some[0], some[1]));
      }
    }
    const int64_t done = operands<E>(rows);
    std::memset(to + done * padded, 0, static_cast<size_t>((operands<E>(all) - done) * padded) * sizeof(E));
  } else {
    gather_rows(from, row_stride, rows, all, width, padded, Compute<T>(1), to);
  }
}

template <typename T, typename C>
void scatter_rows(const C* from, int64_t padded, int64_t rows, int64_t width, C factor, T* to, int64_t row_stride) {
  constexpr int W = kWidth<C>;
  for (int64_t i = 0; i < rows; ++i) {
    int64_t d = 0;
    for (; d + W <= width; d += W) store_as(to + i * row_stride + d, load<Vec<C>>(from + i * padded + d) * factor);
    if (d < width) store_some(to + i * row_stride + d, load<Vec<C>>(from + i * padded + d) * factor, width - d);
  }
}

}  // namespace AURA_ISA
}  // namespace aura
