// Attention without the matrix of scores, forward and backward: docs/kernels.md. Included by kernels.cpp alone.
//
// A block of queries lies across the lanes of a few vectors, so that a score's maximum, exponential and sum are taken
// without moving anything between lanes: scores are kept as [key][query] and outputs as [d][query] until the end.
#pragma once

#include "attention.h"
#include "cpu/philox.h"
#include "cpu/vec.h"

namespace aura {
namespace AURA_ISA {

// A tile of kRows x kVectors accumulators, its right-hand side and one broadcast value fill the registers.
#if AURA_VECTOR_BYTES == 64
constexpr int kRows = 8;
#else
constexpr int kRows = 4;
#endif
constexpr int kVectors = 3;
constexpr int kKeyBlock = 48;  // a block of scores, keys, queries and output share 48 KB of first-level cache

template <typename T>
constexpr int kQueryBlock = kVectors* kWidth<T>;

constexpr double kLog2E = 1.44269504088896340736;

template <typename T>
constexpr T kInfinity = static_cast<T>(__builtin_inf());

AURA_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
AURA_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
AURA_INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// ---- Products -------------------------------------------------------------------------------------------------------

// The left-hand side of a product: element (row, k) at data[row * row_stride + k] or, where rows are adjacent in memory
// (a transposed matrix), at data[row + k * stride].
template <typename C, bool kAdjacentRows>
struct Left {
  const C* data;
  int64_t stride;

  AURA_INLINE C at(int64_t row, int64_t k) const {
    return kAdjacentRows ? data[row + k * stride] : data[row * stride + k];
  }
  AURA_INLINE Left skip_rows(int64_t rows) const { return {data + (kAdjacentRows ? rows : rows * stride), stride}; }
};

// What a product is added to: nothing, what c holds, or what c holds times a factor for each lane.
enum class To { kNothing, kSum, kScaledSum };

// c[row][lane] = to + sum over k of a(row, k) * b[k][lane], for R rows and V vectors of lanes. c is added at the end: one
// long chain of sums over all blocks would round more than short ones that are then added up.
template <int R, int V, To kTo, typename C, bool kAdjacentRows>
AURA_INLINE void tile(int64_t depth, Left<C, kAdjacentRows> a, const C* b, int64_t b_stride, C* c, int64_t c_stride,
                      const C* factor) {
  constexpr int W = kWidth<C>;
  Vec<C> sum[R][V] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vec<C> right[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) right[v] = load<Vec<C>>(b + k * b_stride + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec<C> left = splat<Vec<C>>(a.at(r, k));
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] += left * right[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      C* to = c + r * c_stride + v * W;
      if (kTo == To::kSum) sum[r][v] += load<Vec<C>>(to);
      if (kTo == To::kScaledSum) sum[r][v] += load<Vec<C>>(to) * load<Vec<C>>(factor + v * W);
      store(to, sum[r][v]);
    }
  }
}

template <int V, To kTo, typename C, bool kAdjacentRows>
void product_of(int64_t rows, int64_t depth, Left<C, kAdjacentRows> a, const C* b, int64_t b_stride, C* c,
                int64_t c_stride, const C* factor) {
  constexpr int kMost = V == 4 ? 6 : kRows;
  int64_t row = 0;
  for (; row + kMost <= rows; row += kMost) {
    tile<kMost, V, kTo>(depth, a.skip_rows(row), b, b_stride, c + row * c_stride, c_stride, factor);
  }
  if (kMost > 4 && row + 4 <= rows) {
    tile<4, V, kTo>(depth, a.skip_rows(row), b, b_stride, c + row * c_stride, c_stride, factor);
    row += 4;
  }
  if (row + 2 <= rows) {
    tile<2, V, kTo>(depth, a.skip_rows(row), b, b_stride, c + row * c_stride, c_stride, factor);
    row += 2;
  }
  if (row < rows) tile<1, V, kTo>(depth, a.skip_rows(row), b, b_stride, c + row * c_stride, c_stride, factor);
}

// c = to + a b over `vectors` vectors of lanes: three at a time, or four where that leaves none over and the registers
// hold 6 x 4 sums.
template <To kTo, typename C, bool kAdjacentRows>
void product(int64_t vectors, int64_t rows, int64_t depth, Left<C, kAdjacentRows> a, const C* b, int64_t b_stride, C* c,
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
    if (kTo == To::kScaledSum) factor += now * kWidth<C>;
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

// to[i][0..width) = factor * from(row i); zeros up to `padded` columns and `all` rows.
template <typename T, typename C>
void gather_rows(const T* from, int64_t row_stride, int64_t rows, int64_t all, int64_t width, int64_t padded, C factor,
                 C* to) {
  constexpr int W = kWidth<C>;
  constexpr int64_t ahead = 8;  // rows may lie on pages of their own, where no hardware looks ahead
  for (int64_t i = 0; i < rows; ++i) {
    if (i + ahead < rows) {
      const T* next = from + (i + ahead) * row_stride;
      for (int64_t d = 0; d < width; d += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(next + d);
    }
    int64_t d = 0;
    for (; d + W <= width; d += W) store(to + i * padded + d, load_as(from + i * row_stride + d) * factor);
    if (d < width) store(to + i * padded + d, load_some(from + i * row_stride + d, width - d) * factor);
  }
  std::memset(to + rows * padded, 0, static_cast<size_t>((all - rows) * padded) * sizeof(C));
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

// ---- One block of queries against one block of keys -------------------------------------------------------------------

// Which pairs of a block count. `diagonal`: the block starts at the same position as the queries and key n is seen by
// the queries from n on; otherwise every query sees every key.
struct Block {
  int64_t first, keys;
  bool diagonal;
};

// Call work(key begin, key end, first vector of queries) for the parts of a block: under a causal mask the vectors whose
// queries all come before a key are left out.
template <typename C, typename Work>
AURA_INLINE void for_parts(const Block& block, Work work) {
  constexpr int W = kWidth<C>;
  if (!block.diagonal) return work(int64_t(0), block.keys, int64_t(0));
  for (int64_t begin = 0; begin < block.keys; begin += W) work(begin, smaller(begin + W, block.keys), begin / W);
}

// Call work(block) for every block of keys in [begin, end) that queries [query, query + queries) see.
template <typename C, typename Work>
AURA_INLINE void for_blocks(bool causal, int64_t query, int64_t queries, int64_t begin, int64_t end, Work work) {
  const int64_t full = causal ? smaller(end, query) : end;
  for (int64_t n = begin; n < full; n += kKeyBlock) work(Block{n, smaller(kKeyBlock, full - n), false});
  // Blocks of queries and ranges of keys both start at multiples of the block, so the diagonal is never cut.
  if (causal && begin <= query && query < end) work(Block{query, smaller(end - query, queries), true});
}

// Lanes of vector v that see key n of a diagonal block, all ones.
template <typename C>
AURA_INLINE auto seen_in_diagonal(int64_t n, int64_t v) {
  using Index = Vec<std::conditional_t<sizeof(C) == 8, int64_t, int32_t>>;
  Index lane;
  for (int i = 0; i < kWidth<C>; ++i) lane[i] = i;
  return lane + static_cast<decltype(lane[0] + 0)>(v * kWidth<C>) >= static_cast<decltype(lane[0] + 0)>(n);
}

// Which of eight adjacent keys each lane keeps.
template <typename C>
struct Kept;

template <>
struct Kept<float> {
  PhiloxBits bits;
  Kept(const Dropout& dropout, int64_t row, int64_t key, int64_t head) {
    VecU rows;
    for (int i = 0; i < kWidth<float>; ++i) rows[i] = static_cast<uint32_t>(row) + i;
    const VecU eight = splat<VecU>(static_cast<uint32_t>(key >> 3)), heads = splat<VecU>(static_cast<uint32_t>(head));
    bits = philox(dropout.seed, rows, eight, heads, VecU{});
  }
  AURA_INLINE VecI mask(int64_t key, uint32_t threshold) const {
    return reinterpret_cast<VecI>(half(bits, static_cast<int>(key & 7)) >= threshold);
  }
};

// Rare (gradient checks only): each lane asks the float version for its own row.
template <>
struct Kept<double> {
  Kept<float> lanes[kWidth<double>];
  Kept(const Dropout& dropout, int64_t row, int64_t key, int64_t head)
      : Kept(dropout, row, key, head, typename MakeLanes<kWidth<double>>::type{}) {}
  template <int... I>
  Kept(const Dropout& dropout, int64_t row, int64_t key, int64_t head, Lanes<I...>)
      : lanes{Kept<float>(dropout, row + I, key, head)...} {}
  AURA_INLINE Vec<int64_t> mask(int64_t key, uint32_t threshold) const {
    Vec<int64_t> result;
    for (int i = 0; i < kWidth<double>; ++i) result[i] = lanes[i].mask(key, threshold)[0];
    return result;
  }
};

// Call work(key, dropout mask) for the keys [begin, end) of a block that starts at key `first`; without dropout the mask
// is all ones.
template <typename C, bool kDrop, typename Work>
AURA_INLINE void for_keys(const Dropout& dropout, int64_t row, int64_t head, int64_t first, int64_t begin, int64_t end,
                          Work work) {
  using Mask = decltype(Vec<C>{} == Vec<C>{});
  if constexpr (!kDrop) {
    for (int64_t n = begin; n < end; ++n) work(n, Mask{} == Mask{});
  } else {
    for (int64_t n = begin; n < end;) {
      const Kept<C> kept(dropout, row, first + n, head);
      const int64_t stop = smaller(end, n + 8 - ((first + n) & 7));
      for (; n < stop; ++n) work(n, kept.mask(first + n, dropout.threshold));
    }
  }
}

// ---- Where a task's rows lie ----------------------------------------------------------------------------------------

template <typename T>
AURA_INLINE T* row_of(T* data, const Strides& strides, const Sequence& sequence, int64_t row, int64_t head) {
  return data + sequence.batch * strides.batch + (sequence.first + row) * strides.row + head * strides.head;
}

AURA_INLINE Strides contiguous_strides(const AttentionInputs& in) {
  return {in.queries * in.heads * in.width, in.heads * in.width, in.width};
}

// The row's number in the flattened [B, T].
AURA_INLINE int64_t flat_row(const AttentionInputs& in, const Sequence& sequence, int64_t row) {
  return sequence.batch * in.queries + sequence.first + row;
}

// Consecutive pieces of a thread's scratch memory, each on a cache line of its own.
template <typename C>
struct Scratch {
  C* next;
  C* take(int64_t count) {
    C* piece = next;
    next += round_up(count, 64 / static_cast<int64_t>(sizeof(C)));
    return piece;
  }
};

// ---- Forward --------------------------------------------------------------------------------------------------------

// The running maximum and sum of each query (Milakov and Gimelshein 2018), in units of log2, and what the output gathered
// under the maximum of before is to be multiplied by.
template <typename C>
struct Softmax {
  C maximum[kQueryBlock<C>];
  C sum[kQueryBlock<C>];
  C shrink[kQueryBlock<C>];
};

// Scores to weights in place, for vector v of the queries.
template <typename T, bool kDrop>
void weigh(const AttentionInputs& in, const Block& block, int64_t row, int64_t head, int64_t v, Compute<T>* scores,
           Softmax<Compute<T>>& softmax) {
  using C = Compute<T>;
  constexpr int W = kWidth<C>, Q = kQueryBlock<C>;
  using V = Vec<C>;
  const int64_t keys = block.diagonal ? smaller(block.keys, (v + 1) * W) : block.keys;
  if (block.diagonal) {
    for (int64_t n = v * W; n < keys; ++n) {
      C* s = scores + n * Q + v * W;
      store(s, seen_in_diagonal<C>(n, v) ? load<V>(s) : splat<V>(-kInfinity<C>));
    }
  }
  const V before = load<V>(softmax.maximum + v * W);
  V maxima[4] = {before, before, before, before};  // several, or each would wait for the one before
  int64_t key = 0;
  for (; key + 4 <= keys; key += 4) {
    for (int i = 0; i < 4; ++i) maxima[i] = vmax(maxima[i], load<V>(scores + (key + i) * Q + v * W));
  }
  for (; key < keys; ++key) maxima[0] = vmax(maxima[0], load<V>(scores + key * Q + v * W));
  const V now = vmax(vmax(maxima[0], maxima[1]), vmax(maxima[2], maxima[3]));
  const V base = now == -kInfinity<C> ? V{} : now;  // scores of -inf alone, so far: weights of 0, not of inf - inf
  V sum{};
  for_keys<C, kDrop>(in.dropout, row + v * W, head, block.first, 0, keys, [&](int64_t n, auto kept) {
    C* s = scores + n * Q + v * W;
    const V weight = exp2_for<T>(load<V>(s) - base);
    sum += weight;
    store(s, kDrop ? (kept ? weight : V{}) : weight);
  });
  const V shrink = exp2(before - base);
  store(softmax.maximum + v * W, now);
  store(softmax.sum + v * W, load<V>(softmax.sum + v * W) * shrink + sum);
  store(softmax.shrink + v * W, shrink);
}

// One block of queries; k and v: [key][d] of the whole sequence.
template <typename T, bool kDrop>
void forward_block(const AttentionForward& job, const AttentionTask& task, int64_t begin, int64_t queries, const Compute<T>* k,
                   const Compute<T>* v, Scratch<Compute<T>> scratch) {
  using C = Compute<T>;
  constexpr int W = kWidth<C>, Q = kQueryBlock<C>;
  const AttentionInputs& in = job.in;
  const Sequence& sequence = in.sequences[task.sequence];
  const int64_t vectors = round_up(queries, W) / W, width = in.width, padded = round_up(width, W);
  C* rows = scratch.take(Q * padded);
  C* q = scratch.take(padded * Q);       // [d][query], times scale * log2(e)
  C* output = scratch.take(padded * Q);  // [d][query]
  C* scores = scratch.take(kKeyBlock * Q);
  Softmax<C> softmax;
  for (int i = 0; i < Q; ++i) softmax.maximum[i] = -kInfinity<C>, softmax.sum[i] = 0;
  if (sequence.keys == 0) std::memset(output, 0, static_cast<size_t>(padded * Q) * sizeof(C));

  const T* from = row_of(static_cast<const T*>(in.q), in.q_strides, sequence, begin, task.head);
  gather_rows(from, in.q_strides.row, queries, vectors * W, width, padded, static_cast<C>(in.scale * kLog2E), rows);
  transpose(vectors * W, padded, rows, padded, q, Q);

  const int64_t end = in.causal ? smaller(sequence.keys, begin + queries) : sequence.keys;
  const int64_t row = flat_row(in, sequence, begin);
  for_blocks<C>(in.causal, begin, queries, 0, end, [&](const Block& block) {
    for_parts<C>(block, [&](int64_t a, int64_t b, int64_t skip) {
      const Left<C, false> left{k + (block.first + a) * padded, padded};
      product<To::kNothing>(vectors - skip, b - a, width, left, q + skip * W, Q, scores + a * Q + skip * W, Q);
    });
    for (int64_t i = 0; i < vectors; ++i) {
      weigh<T, kDrop>(in, block, row, task.head, i, scores, softmax);
    }
    for_parts<C>(block, [&](int64_t a, int64_t b, int64_t skip) {
      const Left<C, true> left{v + (block.first + a) * padded, padded};
      const C* weights = scores + a * Q + skip * W;
      if (block.first == 0 && a == 0) {
        product<To::kNothing>(vectors, width, b - a, left, weights, Q, output, Q);
      } else if (a == 0) {
        product<To::kScaledSum>(vectors, width, b - a, left, weights, Q, output, Q, softmax.shrink);
      } else {
        product<To::kSum>(vectors - skip, width, b - a, left, weights, Q, output + skip * W, Q);
      }
    });
  });

  transpose(padded, vectors * W, output, Q, rows, padded);
  const C keep = kDrop ? static_cast<C>(in.dropout.scale()) : C(1);
  const Strides strides = contiguous_strides(in);
  T* to = row_of(static_cast<T*>(job.out), strides, sequence, begin, task.head);
  for (int64_t i = 0; i < queries; ++i) {
    const C factor = softmax.sum[i] == 0 ? C(0) : keep / softmax.sum[i];
    scatter_rows(rows + i * padded, padded, 1, width, factor, to + i * strides.row, strides.row);
  }
  C* lse = static_cast<C*>(job.lse) + row * in.heads + task.head;
  for (int64_t i = 0; i < queries; ++i) {
    if (i % W == 0) {
      using V = Vec<C>;
      const V sum = load<V>(softmax.sum + i);
      store(softmax.sum + i, sum == 0 ? splat<V>(-kInfinity<C>) : load<V>(softmax.maximum + i) + log2(sum));
    }
    lse[i * in.heads] = softmax.sum[i];
  }
}

// The keys or values [begin, end) of a head side by side: in a packed projection each row lies on a page of its own, and
// every block of queries reads them all.
template <typename T, typename C>
C* collect(const void* data, const Strides& strides, const Sequence& sequence, int64_t head, int64_t begin, int64_t end,
           int64_t width, Scratch<C>& scratch) {
  const int64_t padded = round_up(width, kWidth<C>), rows = end - begin;
  C* to = scratch.take(rows * padded);
  const T* from = row_of(static_cast<const T*>(data), strides, sequence, begin, head);
  gather_rows(from, strides.row, rows, rows, width, padded, C(1), to);
  return to;
}

template <typename T, bool kDrop>
void forward_queries(const AttentionForward& job, const AttentionTask& task, void* memory) {
  using C = Compute<T>;
  const AttentionInputs& in = job.in;
  const Sequence& sequence = in.sequences[task.sequence];
  const int64_t end = in.causal ? smaller(sequence.keys, task.end) : sequence.keys;
  Scratch<C> scratch{static_cast<C*>(memory)};
  const C* k = collect<T>(in.k, in.k_strides, sequence, task.head, 0, end, in.width, scratch);
  const C* v = collect<T>(in.v, in.v_strides, sequence, task.head, 0, end, in.width, scratch);
  for (int64_t begin = task.begin; begin < task.end; begin += kQueryBlock<C>) {
    forward_block<T, kDrop>(job, task, begin, smaller(kQueryBlock<C>, task.end - begin), k, v, scratch);
  }
}

// ---- Backward -------------------------------------------------------------------------------------------------------

// What backward needs of one block of queries, twice: as rows to multiply by, and with the queries across the lanes.
template <typename C>
struct QueryBlock {
  C *q_rows, *dout_rows;  // [query][d]
  C *q, *dout;            // [d][query]; q times scale * log2(e)
  C *lse, *delta;         // [query]: log-sum-exp, and the sum over d of dout * out
};

template <typename T, typename C>
void load_queries(const AttentionBackward& job, const Sequence& sequence, int64_t head, int64_t begin, int64_t queries,
                  int64_t padded, C* rows, const QueryBlock<C>& to) {
  constexpr int W = kWidth<C>, Q = kQueryBlock<C>;
  const AttentionInputs& in = job.in;
  const int64_t all = round_up(queries, W);
  const T* q = row_of(static_cast<const T*>(in.q), in.q_strides, sequence, begin, head);
  gather_rows(q, in.q_strides.row, queries, all, in.width, padded, C(1), to.q_rows);
  // Scaled as in forward, or rounding would part these scores from the log-sum-exp of those.
  gather_rows(q, in.q_strides.row, queries, all, in.width, padded, static_cast<C>(in.scale * kLog2E), rows);
  transpose(all, padded, rows, padded, to.q, Q);
  const Strides strides = contiguous_strides(in);
  const T* dout = row_of(static_cast<const T*>(job.dout), strides, sequence, begin, head);
  gather_rows(dout, strides.row, queries, all, in.width, padded, C(1), to.dout_rows);
  transpose(all, padded, to.dout_rows, padded, to.dout, Q);
  const T* out = row_of(static_cast<const T*>(job.out), strides, sequence, begin, head);
  gather_rows(out, strides.row, queries, all, in.width, padded, C(1), rows);
  const C* lse = static_cast<const C*>(job.lse) + flat_row(in, sequence, begin) * in.heads + head;
  for (int64_t i = 0; i < Q; ++i) {
    Vec<C> sum{};
    for (int64_t d = 0; i < queries && d < padded; d += W) {
      sum += load<Vec<C>>(rows + i * padded + d) * load<Vec<C>>(to.dout_rows + i * padded + d);
    }
    to.delta[i] = sum_lanes<C>(sum);
    // A query that sees no key, or a lane without a query, gets weights of 2^(x - inf) = 0.
    const C value = i < queries ? lse[i * in.heads] : -kInfinity<C>;
    to.lse[i] = value == -kInfinity<C> ? kInfinity<C> : value;
  }
}

// From scores and the gradient of the weights: the weights as the values saw them, and the gradient of the scores.
template <typename T, bool kDrop, typename C>
void weigh_backward(const AttentionInputs& in, const Block& block, int64_t row, int64_t head, int64_t v,
                    const QueryBlock<C>& query, C* weights, C* gradients) {
  constexpr int W = kWidth<C>, Q = kQueryBlock<C>;
  using V = Vec<C>;
  const V lse = load<V>(query.lse + v * W), delta = load<V>(query.delta + v * W);
  const V keep = splat<V>(kDrop ? static_cast<C>(in.dropout.scale()) : C(1));
  const int64_t keys = block.diagonal ? smaller(block.keys, (v + 1) * W) : block.keys;
  for_keys<C, kDrop>(in.dropout, row + v * W, head, block.first, 0, keys, [&](int64_t n, auto kept) {
    C *w = weights + n * Q + v * W, *g = gradients + n * Q + v * W;
    V weight = exp2_for<T>(load<V>(w) - lse);
    if (block.diagonal && n >= v * W) weight = seen_in_diagonal<C>(n, v) ? weight : V{};
    V gradient = load<V>(g);
    if (kDrop) gradient = kept ? gradient * keep : V{};
    store(g, weight * (gradient - delta));
    store(w, kDrop ? (kept ? weight * keep : V{}) : weight);
  });
}

template <typename T, bool kDrop>
void backward_keys(const AttentionBackward& job, const AttentionTask& task, int64_t split, void* memory) {
  using C = Compute<T>;
  constexpr int W = kWidth<C>, Q = kQueryBlock<C>;
  const AttentionInputs& in = job.in;
  const Sequence& sequence = in.sequences[task.sequence];
  const int64_t width = in.width, padded = round_up(width, W), wide = padded / W, range = task.end - task.begin;

  Scratch<C> scratch{static_cast<C*>(memory)};
  QueryBlock<C> query;
  C* rows = scratch.take(Q * padded);
  query.q_rows = scratch.take(Q * padded);
  query.dout_rows = scratch.take(Q * padded);
  query.q = scratch.take(padded * Q);
  query.dout = scratch.take(padded * Q);
  query.lse = scratch.take(Q);
  query.delta = scratch.take(Q);
  C* dq = scratch.take(padded * Q);  // [d][query]
  C* weights = scratch.take(kKeyBlock * Q);
  C* gradients = scratch.take(kKeyBlock * Q);
  const C* k = collect<T>(in.k, in.k_strides, sequence, task.head, task.begin, task.end, width, scratch);
  const C* v = collect<T>(in.v, in.v_strides, sequence, task.head, task.begin, task.end, width, scratch);
  C* dk = scratch.take(range * padded);
  C* dv = scratch.take(range * padded);
  std::memset(dk, 0, static_cast<size_t>(range * padded) * sizeof(C));
  std::memset(dv, 0, static_cast<size_t>(range * padded) * sizeof(C));

  const int64_t start = in.causal ? task.begin / Q * Q : 0;
  // The first range also writes the zeros of queries that see nothing at all.
  for (int64_t begin = split == 0 ? 0 : start; begin < sequence.queries; begin += Q) {
    const int64_t queries = smaller(Q, sequence.queries - begin), vectors = round_up(queries, W) / W;
    const int64_t row = flat_row(in, sequence, begin);
    const int64_t end = smaller(task.end, in.causal ? begin + queries : task.end);
    load_queries<T>(job, sequence, task.head, begin, queries, padded, rows, query);
    std::memset(dq, 0, static_cast<size_t>(padded * Q) * sizeof(C));
    for_blocks<C>(in.causal, begin, queries, task.begin, end, [&](const Block& block) {
      const int64_t offset = (block.first - task.begin) * padded;
      for_parts<C>(block, [&](int64_t a, int64_t b, int64_t skip) {
        const Left<C, false> k_left{k + offset + a * padded, padded}, v_left{v + offset + a * padded, padded};
        const int64_t at = a * Q + skip * W;
        product<To::kNothing>(vectors - skip, b - a, width, k_left, query.q + skip * W, Q, weights + at, Q);
        product<To::kNothing>(vectors - skip, b - a, width, v_left, query.dout + skip * W, Q, gradients + at, Q);
      });
      for (int64_t i = 0; i < vectors; ++i) {
        weigh_backward<T, kDrop>(in, block, row, task.head, i, query, weights, gradients);
      }
      for_parts<C>(block, [&](int64_t a, int64_t b, int64_t skip) {
        const int64_t first = skip * W, depth = queries - first, at = a * Q + first, to = offset + a * padded;
        const Left<C, false> w{weights + at, Q}, g{gradients + at, Q};
        product<To::kSum>(wide, b - a, depth, w, query.dout_rows + first * padded, padded, dv + to, padded);
        product<To::kSum>(wide, b - a, depth, g, query.q_rows + first * padded, padded, dk + to, padded);
        const Left<C, true> k_left{k + to, padded};
        product<To::kSum>(vectors - skip, width, b - a, k_left, gradients + at, Q, dq + first, Q);
      });
    });
    transpose(padded, vectors * W, dq, Q, rows, padded);
    const C scale = static_cast<C>(in.scale);
    if (job.dq_parts == nullptr) {
      T* to = row_of(static_cast<T*>(job.dq), job.dq_strides, sequence, begin, task.head);
      scatter_rows(rows, padded, queries, width, scale, to, job.dq_strides.row);
    } else {
      const Strides strides = contiguous_strides(in);
      C* part = static_cast<C*>(job.dq_parts) + split * job.dq_part_size;
      scatter_rows(rows, padded, queries, width, scale, row_of(part, strides, sequence, begin, task.head), strides.row);
    }
  }
  T* dk_rows = row_of(static_cast<T*>(job.dk), job.dk_strides, sequence, task.begin, task.head);
  T* dv_rows = row_of(static_cast<T*>(job.dv), job.dv_strides, sequence, task.begin, task.head);
  scatter_rows(dk, padded, range, width, static_cast<C>(in.scale), dk_rows, job.dk_strides.row);
  scatter_rows(dv, padded, range, width, C(1), dv_rows, job.dv_strides.row);
}

// ---- The table ------------------------------------------------------------------------------------------------------

template <typename T>
void attention_forward(const AttentionForward& job, const AttentionTask& task, void* scratch) {
  return job.in.dropout.threshold ? forward_queries<T, true>(job, task, scratch)
                                  : forward_queries<T, false>(job, task, scratch);
}

template <typename T>
void attention_backward(const AttentionBackward& job, const AttentionTask& task, int64_t split, void* scratch) {
  return job.in.dropout.threshold ? backward_keys<T, true>(job, task, split, scratch)
                                  : backward_keys<T, false>(job, task, split, scratch);
}

inline int64_t attention_scratch(int64_t width, int64_t keys) {
  const int64_t padded = round_up(width, kWidth<float>), q = kQueryBlock<float>;
  return 6 * q * padded + 2 * kKeyBlock * q + 4 * keys * padded + 2 * q + 16 * 16;
}

constexpr AttentionKernels kAttention = {
    {kQueryBlock<float>, kQueryBlock<float>, kQueryBlock<double>},
    attention_scratch,
    {attention_forward<float>, attention_forward<bfloat16>, attention_forward<double>},
    {attention_backward<float>, attention_backward<bfloat16>, attention_backward<double>},
};

}  // namespace AURA_ISA
}  // namespace aura
