// What both directions of attention share: blocks of queries and keys, dropout, where rows lie. Included by
// attention_forward.inl and attention_backward.inl.
//
// A block of queries lies across the lanes of a few vectors, so that a score's maximum, exponential and sum are taken
// without moving anything between lanes: scores are kept as [key][query].
#pragma once

#include "attention.h"
#include "cpu/matrix.inl"
#include "cpu/philox.h"

namespace aura {
namespace AURA_ISA {

// Whether operands of type E are multiplied in tiles.
template <typename E>
constexpr bool kTiled = kInTiles && std::is_same_v<E, Pair>;

// Queries and keys of a block. Scores, keys, queries and output of a block share the 48 KB of the first-level cache. A
// block has as many pairs of keys as it would have keys, since their products take half the time and adding a block to
// the output does not; with tiles, whose sums are squares, a block has fewer queries and more keys.
template <typename E>
constexpr int kQueryBlock = (kTiled<E> ? 2 : kVectors) * kWidth<E>;
template <typename E>
constexpr int kKeyBlock = kTiled<E> ? 128 : 48 * kTerms<E>;

constexpr double kLog2E = 1.44269504088896340736;

template <typename T>
constexpr T kInfinity = static_cast<T>(__builtin_inf());

// ---- One block of queries against one block of keys -------------------------------------------------------------------

// Which pairs of a block count: every query sees the first `seen` keys, and of those after them key n the queries from n on.
struct Block {
  int64_t first, keys, seen;

  AURA_INLINE bool diagonal() const { return seen < keys; }
};

// Call work(key begin, key end, first vector of queries) for the parts of a block: under a causal mask the vectors whose
// queries all come before a key are left out. In tiles a block is one part, as are the sums and weights below: a whole tile
// costs less than part of one.
template <typename E, typename Work>
AURA_INLINE void for_parts(const Block& block, Work work) {
  constexpr int W = kWidth<E>;
  if (!block.diagonal() || kTiled<E>) return work(int64_t(0), block.keys, int64_t(0));
  for (int64_t begin = 0; begin < block.keys; begin += W) work(begin, smaller(begin + W, block.keys), begin / W);
}

// Call work(first vector of queries, last, keys) for the parts of a block that one sum over keys makes: under a causal
// mask each vector sees more of them than the one before.
template <typename E, typename Work>
AURA_INLINE void for_sums(const Block& block, int64_t vectors, Work work) {
  if (!block.diagonal() || kTiled<E>) return work(int64_t(0), vectors, block.keys);
  for (int64_t v = 0; v < vectors; ++v) work(v, v + 1, smaller(block.keys, (v + 1) * kWidth<E>));
}

// For how many keys of a block vector v of the queries gets weights; those of keys that it does not see are zero.
template <typename E>
AURA_INLINE int64_t weighed(const Block& block, int64_t v) {
  return block.diagonal() && !kTiled<E> ? smaller(block.keys, (v + 1) * kWidth<E>) : block.keys;
}

// Call work(block) for every block of keys in [begin, end) that queries [query, query + queries) see. The keys of the
// diagonal are a block of their own, of which parts are left out; in tiles, which leave out none, they end the last one.
template <typename E, typename Work>
AURA_INLINE void for_blocks(bool causal, int64_t query, int64_t queries, int64_t begin, int64_t end, Work work) {
  const int64_t full = causal ? smaller(end, query) : end;
  const int64_t last = causal ? smaller(end, query + queries) : end;
  // Blocks of queries and ranges of keys both start at multiples of the block of queries, so the diagonal is never cut.
  static_assert(!kTiled<E> || kKeyBlock<E> % kQueryBlock<E> == 0);
  const int64_t whole = kTiled<E> ? last : full;
  for (int64_t n = begin; n < whole; n += kKeyBlock<E>) {
    const int64_t keys = smaller(kKeyBlock<E>, whole - n);
    work(Block{n, keys, smaller(keys, full - n)});
  }
  if (!kTiled<E> && causal && begin <= query && query < end) work(Block{query, last - query, 0});
}

// All ones in the lanes of vector v that see key n of a diagonal block.
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

// Call work(key, keys, mask) for the first `keys` keys of a block that starts at key `first`, kStep at a time and what is
// left over; mask(i) is the dropout mask of key + i, all ones without dropout.
template <typename C, bool kDrop, int kStep, typename Work>
AURA_INLINE void for_keys(const Dropout& dropout, int64_t row, int64_t head, int64_t first, int64_t keys, Work work) {
  static_assert(8 % kStep == 0, "a step lies within the eight keys that Kept holds");
  using Mask = decltype(Vec<C>{} == Vec<C>{});
  if constexpr (!kDrop) {
    const auto all = [](int64_t) { return Mask{} == Mask{}; };
    int64_t n = 0;
    for (; n + kStep <= keys; n += kStep) work(n, int64_t(kStep), all);
    if (n < keys) work(n, keys - n, all);
  } else {
    for (int64_t n = 0; n < keys;) {
      const Kept<C> kept(dropout, row, first + n, head);
      const int64_t stop = smaller(keys, n + 8 - ((first + n) & 7));
      for (; n < stop; n += kStep) {
        work(n, smaller(kStep, stop - n), [&](int64_t i) { return kept.mask(first + n + i, dropout.threshold); });
      }
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
struct Scratch {
  uint8_t* next;
  template <typename E>
  E* take(int64_t count) {
    E* piece = reinterpret_cast<E*>(next);
    next += round_up(count * static_cast<int64_t>(sizeof(E)), 64);
    return piece;
  }
};

// How a head's rows are kept: `pitch` operands where a sum runs over d, `padded` numbers where it runs over the rows.
template <typename T>
struct Widths {
  int64_t width, padded, pitch, depth;
  explicit Widths(int64_t width)
      : width(width), padded(round_up(width, kWidth<Compute<T>>)),
        pitch(round_up(operands<Operand<T>>(width), kWidth<Compute<T>>)), depth(operands<Operand<T>>(width)) {}
};

// Scores are q k times scale * log2(e). Where operands are plain numbers, the queries are multiplied by it. Pairs stay
// as the caller gave them, so their scores are; but its sign, on which the largest score depends, goes to the queries.
template <typename T>
struct Scale {
  static constexpr bool kByQueries = kTerms<Operand<T>> == 1;
  Compute<T> queries, factor;
  explicit Scale(double scale) {
    const auto all = static_cast<Compute<T>>(scale * kLog2E);
    queries = kByQueries ? all : all > 0 ? 1 : all < 0 ? -1 : 0;
    factor = all == 0 ? 1 : all < 0 ? -all : all;
  }
  AURA_INLINE Vec<Compute<T>> scores(Vec<Compute<T>> products) const { return kByQueries ? products : products * factor; }
};

// The keys or values [begin, end) of a head side by side: in a packed projection each row lies on a page of its own, and
// every block of queries reads them all. As rows to be summed over d, [row][d / terms].
template <typename T>
Operand<T>* collect_rows(const void* data, const Strides& strides, const Sequence& sequence, int64_t head, int64_t begin,
                         int64_t end, const Widths<T>& w, Scratch& scratch) {
  Operand<T>* to = scratch.take<Operand<T>>((end - begin) * w.pitch);
  const T* from = row_of(static_cast<const T*>(data), strides, sequence, begin, head);
  gather_rows(from, strides.row, end - begin, end - begin, w.width, w.pitch, Compute<T>(1), to);
  return to;
}

// Rows of queries, times a factor, as they lie across the lanes: to[d / terms][query]. Pairs of whole vectors are in memory
// as they are needed; others pass through `some`.
template <typename T>
void turn_rows(const T* from, int64_t row_stride, int64_t rows, const Widths<T>& w, Compute<T> factor, Operand<T>* some,
               Operand<T>* to) {
  using E = Operand<T>;
  constexpr int W = kWidth<E>, Q = kQueryBlock<E>;
  const int64_t all = round_up(rows, W);
  if constexpr (kTerms<E> == 2) {
    if (factor == 1 && rows == all && w.width == 2 * w.pitch && row_stride % 2 == 0) {
      return transpose(all, w.pitch, reinterpret_cast<const E*>(from), row_stride / 2, to, Q);
    }
  }
  gather_rows(from, row_stride, rows, all, w.width, w.pitch, factor, some);
  transpose(all, w.pitch, some, w.pitch, to, Q);
}

// As rows to be summed over: [row / terms][d], the right-hand side of products that are [query][d]. In tiles [d][row /
// terms], the left-hand side of products that are [d][query]: then neither they nor the weights, which are [key / terms]
// [query], have to be turned block by block.
template <typename E>
struct Terms {
  const E* data;
  int64_t pitch;
};

template <typename T, typename E = Operand<T>>
Terms<E> collect_terms(const void* data, const Strides& strides, const Sequence& sequence, int64_t head, int64_t begin,
                       int64_t end, const Widths<T>& w, Scratch& scratch) {
  if constexpr (!kTiled<E>) {
    E* to = scratch.take<E>(operands<E>(end - begin) * w.padded);
    const T* from = row_of(static_cast<const T*>(data), strides, sequence, begin, head);
    gather_terms(from, strides.row, end - begin, end - begin, w.width, w.padded, to);
    return {to, w.padded};
  } else {
    constexpr int W = kWidth<E>;
    const int64_t pitch = round_up(operands<E>(end - begin), 2 * W) + W;  // odd cache lines, or rows would share few sets
    E* to = scratch.take<E>(w.padded * pitch);
    E* some = scratch.take<E>(W * w.padded);
    for (int64_t n = begin; n < end; n += kTerms<E> * W) {
      const T* from = row_of(static_cast<const T*>(data), strides, sequence, n, head);
      gather_terms(from, strides.row, smaller(kTerms<E> * W, end - n), kTerms<E> * W, w.width, w.padded, some);
      transpose(W, w.padded, some, w.padded, to + (n - begin) / kTerms<E>, pitch);
    }
    return {to, pitch};
  }
}

// to = what kTo says + the sum over `keys` keys of weights, [key / terms][query], times terms from number `from` on, for
// the queries of vectors [first, last), of which `queries` are there in all. `to` is [query][d], in tiles [d][query].
template <To kTo, typename T, typename E, typename C>
AURA_INLINE void multiply_terms(int64_t first, int64_t last, int64_t queries, int64_t keys, const Widths<T>& w,
                                const Terms<E>& terms, int64_t from, const E* weights, C* to, const C* factor = nullptr) {
  constexpr int W = kWidth<C>, Q = kQueryBlock<E>;
  const int64_t lane = first * W, depth = operands<E>(keys), at = from / kTerms<E>;
  const C* factors = kTo == To::kScaledSum ? factor + lane : nullptr;
  if constexpr (kTiled<E>) {
    const Left<E, false> left{terms.data + at, terms.pitch};
    product<kTo>(last - first, w.padded, depth, left, weights + lane, Q, to + lane, Q, factors);
  } else {
    const Left<E, true> left{weights + lane, Q};
    const int64_t rows = smaller(queries, last * W) - lane;
    product<kTo>(w.padded / W, rows, depth, left, terms.data + at * terms.pitch, terms.pitch, to + lane * w.padded, w.padded,
                 factors);
  }
}

}  // namespace AURA_ISA
}  // namespace aura
