// Attention without the matrix of scores, forward and backward: docs/kernels.md. Included by kernels.cpp alone.
//
// A block of queries lies across the lanes of a few vectors, so that a score's maximum, exponential and sum are taken
// without moving anything between lanes: scores are kept as [key][query].
#pragma once

#include "attention.h"
#include "cpu/matrix.inl"
#include "cpu/philox.h"

namespace aura {
namespace AURA_ISA {

// A block of scores, keys, queries and output share 48 KB of first-level cache. Pairs of keys are as many, as their
// products take half the time and what each block adds to the output does not; of tiles that is true even more, and the
// second level is near enough.
template <typename T>
constexpr int kKeyBlock = kTerms<Operand<T>> == 1 ? 48 : kInTiles ? 192 : 96;

template <typename T>
constexpr int kQueryBlock = kVectors* kWidth<T>;

constexpr double kLog2E = 1.44269504088896340736;

template <typename T>
constexpr T kInfinity = static_cast<T>(__builtin_inf());

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

// Call work(first vector of queries, last, keys) for the parts of a block that one sum over keys makes: under a causal
// mask each vector sees more of them than the one before.
template <typename C, typename Work>
AURA_INLINE void for_sums(const Block& block, int64_t vectors, Work work) {
  if (!block.diagonal) return work(int64_t(0), vectors, block.keys);
  for (int64_t v = 0; v < vectors; ++v) work(v, v + 1, smaller(block.keys, (v + 1) * kWidth<C>));
}

// Call work(block) for every block of keys in [begin, end) that queries [query, query + queries) see.
template <typename T, typename Work>
AURA_INLINE void for_blocks(bool causal, int64_t query, int64_t queries, int64_t begin, int64_t end, Work work) {
  const int64_t full = causal ? smaller(end, query) : end;
  for (int64_t n = begin; n < full; n += kKeyBlock<T>) work(Block{n, smaller(kKeyBlock<T>, full - n), false});
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

// Scores are q k times scale * log2(e). Numbers that are rounded on the way take it with the queries; pairs are what the
// caller gave, so their scores take it, but for its sign, which the largest score depends on.
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

// ---- Forward --------------------------------------------------------------------------------------------------------

// The running maximum and sum of each query (Milakov and Gimelshein 2018), in units of log2, and what the output gathered
// under the maximum of before is to be multiplied by.
template <typename C>
struct Softmax {
  C maximum[kQueryBlock<C>];
  C sum[kQueryBlock<C>];
  C shrink[kQueryBlock<C>];
};

// Scores [key][query], before their factor, to weights in place, as the left-hand side of a sum over keys: [key / terms]
// [query], for vector v of the queries.
template <typename T, bool kDrop>
void weigh(const AttentionInputs& in, const Scale<T>& scale, const Block& block, int64_t row, int64_t head, int64_t v,
           Compute<T>* scores, Softmax<Compute<T>>& softmax) {
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
  const V none = splat<V>(-kInfinity<C>);
  V maxima[4] = {none, none, none, none};  // several, or each would wait for the one before
  int64_t key = 0;
  for (; key + 4 <= keys; key += 4) {
    for (int i = 0; i < 4; ++i) maxima[i] = vmax(maxima[i], load<V>(scores + (key + i) * Q + v * W));
  }
  for (; key < keys; ++key) maxima[0] = vmax(maxima[0], load<V>(scores + key * Q + v * W));
  const V now = vmax(before, scale.scores(vmax(vmax(maxima[0], maxima[1]), vmax(maxima[2], maxima[3]))));
  const V base = now == -kInfinity<C> ? V{} : now;  // scores of -inf alone, so far: weights of 0, not of inf - inf
  V sum{}, even{};
  const auto put = [&](int64_t n, auto operands) { store(scores + n * Q + v * W, operands); };
  for_keys<C, kDrop>(in.dropout, row + v * W, head, block.first, 0, keys, [&](int64_t n, auto kept) {
    V weight = exp2_for<T>(scale.scores(load<V>(scores + n * Q + v * W)) - base);
    sum += weight;
    if (kDrop) weight = kept ? weight : V{};
    if constexpr (kTerms<Operand<T>> == 1) {
      put(n, weight);
    } else if (n % 2 != 0) {
      put(n / 2, zip(round_halves(even, weight)));
    } else if (n + 1 < keys) {
      even = weight;
    } else {
      put(n / 2, zip(round_halves(weight, V{})));
    }
  });
  const V shrink = exp2(before - base);
  store(softmax.maximum + v * W, now);
  store(softmax.sum + v * W, load<V>(softmax.sum + v * W) * shrink + sum);
  store(softmax.shrink + v * W, shrink);
}

// Weights [key][query] as the left-hand side of a sum over keys, [key / terms][query]: where they are, or as pairs in `to`.
// `first`, `last`: vectors of queries.
template <typename E, typename C>
AURA_INLINE const E* sum_over_keys(int64_t keys, int64_t first, int64_t last, const C* weights, E* to) {
  if constexpr (std::is_same_v<E, Pair>) {
    constexpr int W = kWidth<C>, Q = kQueryBlock<C>;
    for (int64_t n = 0; n < keys; n += 2) {
      for (int64_t v = first; v < last; ++v) {
        const C* w = weights + n * Q + v * W;
        store(to + n / 2 * Q + v * W, zip(round_halves(load<Vec<C>>(w), n + 1 < keys ? load<Vec<C>>(w + Q) : Vec<C>{})));
      }
    }
    return to;
  } else {
    return weights;
  }
}

// One block of queries; k: [key][d / terms], v: [key / terms][d] of the whole sequence.
template <typename T, bool kDrop>
void forward_block(const AttentionForward& job, const AttentionTask& task, int64_t begin, int64_t queries,
                   const Operand<T>* k, const Operand<T>* v, Scratch scratch) {
  using C = Compute<T>;
  using E = Operand<T>;
  constexpr int W = kWidth<C>, Q = kQueryBlock<C>;
  const AttentionInputs& in = job.in;
  const Sequence& sequence = in.sequences[task.sequence];
  const Widths<T> w(in.width);
  const Scale<T> scale(in.scale);
  const int64_t vectors = round_up(queries, W) / W, wide = w.padded / W;
  E* rows = scratch.take<E>(Q * w.pitch);
  E* q = scratch.take<E>(w.pitch * Q);        // [d / terms][query]
  C* output = scratch.take<C>(Q * w.padded);  // [query][d]
  C* scores = scratch.take<C>(kKeyBlock<T> * Q);
  Softmax<C> softmax;
  for (int i = 0; i < Q; ++i) softmax.maximum[i] = -kInfinity<C>, softmax.sum[i] = 0;
  if (sequence.keys == 0) std::memset(output, 0, static_cast<size_t>(Q * w.padded) * sizeof(C));

  const T* from = row_of(static_cast<const T*>(in.q), in.q_strides, sequence, begin, task.head);
  gather_rows(from, in.q_strides.row, queries, vectors * W, in.width, w.pitch, scale.queries, rows);
  transpose(vectors * W, w.pitch, rows, w.pitch, q, Q);

  const int64_t end = in.causal ? smaller(sequence.keys, begin + queries) : sequence.keys;
  const int64_t row = flat_row(in, sequence, begin);
  for_blocks<T>(in.causal, begin, queries, 0, end, [&](const Block& block) {
    for_parts<C>(block, [&](int64_t a, int64_t b, int64_t skip) {
      const Left<E, false> left{k + (block.first + a) * w.pitch, w.pitch};
      product<To::kNothing>(vectors - skip, b - a, w.depth, left, q + skip * W, Q, scores + a * Q + skip * W, Q);
    });
    for (int64_t i = 0; i < vectors; ++i) {
      weigh<T, kDrop>(in, scale, block, row, task.head, i, scores, softmax);
    }
    for_sums<C>(block, vectors, [&](int64_t v_begin, int64_t v_end, int64_t keys) {
      const int64_t first = v_begin * W, rows = smaller(queries, v_end * W) - first, depth = operands<E>(keys);
      const Left<E, true> left{reinterpret_cast<const E*>(scores) + first, Q};
      const E* right = v + block.first / kTerms<E> * w.padded;
      C* to = output + first * w.padded;
      if (block.first == 0) {
        product<To::kNothing>(wide, rows, depth, left, right, w.padded, to, w.padded);
      } else {
        product<To::kScaledSum>(wide, rows, depth, left, right, w.padded, to, w.padded, softmax.shrink + first);
      }
    });
  });

  const C keep = kDrop ? static_cast<C>(in.dropout.scale()) : C(1);
  const Strides strides = contiguous_strides(in);
  T* to = row_of(static_cast<T*>(job.out), strides, sequence, begin, task.head);
  for (int64_t i = 0; i < queries; ++i) {
    const C factor = softmax.sum[i] == 0 ? C(0) : keep / softmax.sum[i];
    scatter_rows(output + i * w.padded, w.padded, 1, in.width, factor, to + i * strides.row, strides.row);
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
// every block of queries reads them all. As rows to be summed over d, or to be summed over.
template <typename T>
Operand<T>* collect_rows(const void* data, const Strides& strides, const Sequence& sequence, int64_t head, int64_t begin,
                         int64_t end, const Widths<T>& w, Scratch& scratch) {
  Operand<T>* to = scratch.take<Operand<T>>((end - begin) * w.pitch);
  const T* from = row_of(static_cast<const T*>(data), strides, sequence, begin, head);
  gather_rows(from, strides.row, end - begin, end - begin, w.width, w.pitch, Compute<T>(1), to);
  return to;
}

template <typename T>
Operand<T>* collect_terms(const void* data, const Strides& strides, const Sequence& sequence, int64_t head, int64_t begin,
                          int64_t end, const Widths<T>& w, Scratch& scratch) {
  Operand<T>* to = scratch.take<Operand<T>>(operands<Operand<T>>(end - begin) * w.padded);
  const T* from = row_of(static_cast<const T*>(data), strides, sequence, begin, head);
  gather_terms(from, strides.row, end - begin, end - begin, w.width, w.padded, to);
  return to;
}

template <typename T, bool kDrop>
void forward_queries(const AttentionForward& job, const AttentionTask& task, void* memory) {
  const AttentionInputs& in = job.in;
  const Sequence& sequence = in.sequences[task.sequence];
  const int64_t end = in.causal ? smaller(sequence.keys, task.end) : sequence.keys;
  const Widths<T> w(in.width);
  Scratch scratch{static_cast<uint8_t*>(memory)};
  [[maybe_unused]] const Needed<T> needed;
  const auto* k = collect_rows<T>(in.k, in.k_strides, sequence, task.head, 0, end, w, scratch);
  const auto* v = collect_terms<T>(in.v, in.v_strides, sequence, task.head, 0, end, w, scratch);
  constexpr int Q = kQueryBlock<Compute<T>>;
  for (int64_t begin = task.begin; begin < task.end; begin += Q) {
    forward_block<T, kDrop>(job, task, begin, smaller(Q, task.end - begin), k, v, scratch);
  }
}

// ---- Backward -------------------------------------------------------------------------------------------------------

// What backward needs of one block of queries, twice: to be summed over, and with the queries across the lanes.
template <typename E, typename C>
struct QueryBlock {
  E *q_terms, *dout_terms;  // [query / terms][d]
  E *q, *dout;              // [d / terms][query]
  C *lse, *delta;           // [query]: log-sum-exp, and the sum over d of dout * out
};

template <typename T, typename E, typename C>
void load_queries(const AttentionBackward& job, const Sequence& sequence, int64_t head, int64_t begin, int64_t queries,
                  const Widths<T>& w, C scale, E* rows, const QueryBlock<E, C>& to) {
  constexpr int W = kWidth<C>, Q = kQueryBlock<C>;
  const AttentionInputs& in = job.in;
  const int64_t all = round_up(queries, W);
  const T* q = row_of(static_cast<const T*>(in.q), in.q_strides, sequence, begin, head);
  gather_terms(q, in.q_strides.row, queries, all, w.width, w.padded, to.q_terms);
  // Scaled as in forward, or rounding would part these scores from the log-sum-exp of those.
  gather_rows(q, in.q_strides.row, queries, all, w.width, w.pitch, scale, rows);
  transpose(all, w.pitch, rows, w.pitch, to.q, Q);
  const Strides strides = contiguous_strides(in);
  const T* dout = row_of(static_cast<const T*>(job.dout), strides, sequence, begin, head);
  gather_terms(dout, strides.row, queries, all, w.width, w.padded, to.dout_terms);
  gather_rows(dout, strides.row, queries, all, w.width, w.pitch, C(1), rows);
  transpose(all, w.pitch, rows, w.pitch, to.dout, Q);
  const T* out = row_of(static_cast<const T*>(job.out), strides, sequence, begin, head);
  const C* lse = static_cast<const C*>(job.lse) + flat_row(in, sequence, begin) * in.heads + head;
  for (int64_t i = 0; i < Q; ++i) {
    Vec<C> sum{};
    for (int64_t d = 0; i < queries && d < w.width; d += W) {
      const int64_t at = i * strides.row + d, count = smaller(W, w.width - d);
      sum += count == W ? load_as(out + at) * load_as(dout + at) : load_some(out + at, count) * load_some(dout + at, count);
    }
    to.delta[i] = sum_lanes<C>(sum);
    // A query that sees no key, or a lane without a query, gets weights of 2^(x - inf) = 0.
    const C value = i < queries ? lse[i * in.heads] : -kInfinity<C>;
    to.lse[i] = value == -kInfinity<C> ? kInfinity<C> : value;
  }
}

// From scores and the gradient of the weights: the weights as the values saw them, and the gradient of the scores.
template <typename T, bool kDrop, typename E, typename C>
void weigh_backward(const AttentionInputs& in, const Scale<T>& scale, const Block& block, int64_t row, int64_t head, int64_t v,
                    const QueryBlock<E, C>& query, C* weights, C* gradients) {
  constexpr int W = kWidth<C>, Q = kQueryBlock<C>;
  using V = Vec<C>;
  const V lse = load<V>(query.lse + v * W), delta = load<V>(query.delta + v * W);
  const V keep = splat<V>(kDrop ? static_cast<C>(in.dropout.scale()) : C(1));
  const int64_t keys = block.diagonal ? smaller(block.keys, (v + 1) * W) : block.keys;
  for_keys<C, kDrop>(in.dropout, row + v * W, head, block.first, 0, keys, [&](int64_t n, auto kept) {
    C *w = weights + n * Q + v * W, *g = gradients + n * Q + v * W;
    V weight = exp2_for<T>(scale.scores(load<V>(w)) - lse);
    if (block.diagonal && n >= v * W) weight = seen_in_diagonal<C>(n, v) ? weight : V{};
    V gradient = load<V>(g);
    if (kDrop) gradient = kept ? gradient * keep : V{};
    store(g, weight * (gradient - delta));
    store(w, kDrop ? (kept ? weight * keep : V{}) : weight);
  });
}

// Weights [key][query] as the left-hand side of a sum over queries, [key][query / terms].
template <typename E, typename C>
AURA_INLINE const E* sum_over_queries(int64_t keys, int64_t first, int64_t last, const C* weights, E* to) {
  if constexpr (std::is_same_v<E, Pair>) {
    constexpr int W = kWidth<C>, Q = kQueryBlock<C>;
    bfloat16* rounded = reinterpret_cast<bfloat16*>(to);
    for (int64_t n = 0; n < keys; ++n) {
      for (int64_t v = first; v < last; ++v) store_as(rounded + n * Q + v * W, load<Vec<C>>(weights + n * Q + v * W));
    }
    return to;
  } else {
    return weights;
  }
}

// What a task of backward keeps in its scratch memory: its keys with their gradients, and what one block of queries needs.
template <typename T>
struct BackwardMemory {
  using C = Compute<T>;
  using E = Operand<T>;
  static constexpr int Q = kQueryBlock<C>, kPitch = Q / kTerms<E>;
  QueryBlock<E, C> query;
  E* rows;                          // of a block of queries, on their way to it
  C *dq, *weights, *gradients;      // [query][d]; [key][query] twice
  E* pairs;                         // [key][query / terms]
  const E *k, *v, *k_terms;         // [key][d / terms] twice, [key / terms][d]
  C *dk, *dv;                       // [key][d]

  BackwardMemory(const AttentionInputs& in, const Sequence& sequence, const AttentionTask& task, const Widths<T>& w,
                 void* memory) {
    Scratch scratch{static_cast<uint8_t*>(memory)};
    rows = scratch.take<E>(Q * w.pitch);
    query.q_terms = scratch.take<E>(kPitch * w.padded);
    query.dout_terms = scratch.take<E>(kPitch * w.padded);
    query.q = scratch.take<E>(w.pitch * Q);
    query.dout = scratch.take<E>(w.pitch * Q);
    query.lse = scratch.take<C>(Q);
    query.delta = scratch.take<C>(Q);
    dq = scratch.take<C>(Q * w.padded);
    weights = scratch.take<C>(kKeyBlock<T> * Q);
    gradients = scratch.take<C>(kKeyBlock<T> * Q);
    pairs = scratch.take<E>(kKeyBlock<T> * kPitch);
    k = collect_rows<T>(in.k, in.k_strides, sequence, task.head, task.begin, task.end, w, scratch);
    v = collect_rows<T>(in.v, in.v_strides, sequence, task.head, task.begin, task.end, w, scratch);
    k_terms = k;
    if constexpr (kTerms<E> > 1) {
      k_terms = collect_terms<T>(in.k, in.k_strides, sequence, task.head, task.begin, task.end, w, scratch);
    }
    const int64_t numbers = (task.end - task.begin) * w.padded;
    dk = scratch.take<C>(numbers);
    dv = scratch.take<C>(numbers);
    std::memset(dk, 0, static_cast<size_t>(numbers) * sizeof(C));
    std::memset(dv, 0, static_cast<size_t>(numbers) * sizeof(C));
  }
};

// What a block of queries, the first of them at `row` of the flattened [B, T], and a block of keys, at `offset` of the
// task's, add to the gradients of both: the five products.
template <typename T, bool kDrop>
AURA_INLINE void backward_block(const AttentionInputs& in, const Scale<T>& scale, const Block& block, int64_t offset,
                                int64_t row, int64_t queries, int64_t head, const Widths<T>& w,
                                const BackwardMemory<T>& m) {
  using C = Compute<T>;
  using E = Operand<T>;
  constexpr int W = kWidth<C>, Q = kQueryBlock<C>, kPitch = Q / kTerms<E>;
  const int64_t vectors = round_up(queries, W) / W, padded = w.padded, wide = padded / W;
  for_parts<C>(block, [&](int64_t a, int64_t b, int64_t skip) {
    const Left<E, false> k_left{m.k + (offset + a) * w.pitch, w.pitch}, v_left{m.v + (offset + a) * w.pitch, w.pitch};
    const int64_t at = a * Q + skip * W;
    product<To::kNothing>(vectors - skip, b - a, w.depth, k_left, m.query.q + skip * W, Q, m.weights + at, Q);
    product<To::kNothing>(vectors - skip, b - a, w.depth, v_left, m.query.dout + skip * W, Q, m.gradients + at, Q);
  });
  for (int64_t i = 0; i < vectors; ++i) {
    weigh_backward<T, kDrop>(in, scale, block, row, head, i, m.query, m.weights, m.gradients);
  }
  for_parts<C>(block, [&](int64_t a, int64_t b, int64_t skip) {
    const int64_t first = skip * W, keys = b - a, depth = operands<E>(queries - first);
    const int64_t to = (offset + a) * padded, from = first / kTerms<E>;
    const auto left = [&](const C* sums) {
      return Left<E, false>{sum_over_queries(keys, skip, vectors, sums + a * Q, m.pairs) + from, kPitch};
    };
    product<To::kSum>(wide, keys, depth, left(m.weights), m.query.dout_terms + from * padded, padded, m.dv + to, padded);
    product<To::kSum>(wide, keys, depth, left(m.gradients), m.query.q_terms + from * padded, padded, m.dk + to, padded);
  });
  for_sums<C>(block, vectors, [&](int64_t v_begin, int64_t v_end, int64_t keys) {
    const int64_t first = v_begin * W, rows = smaller(queries, v_end * W) - first;
    const Left<E, true> left{sum_over_keys(keys, v_begin, v_end, m.gradients, m.pairs) + first, Q};
    const E* right = m.k_terms + offset / kTerms<E> * padded;
    product<To::kSum>(wide, rows, operands<E>(keys), left, right, padded, m.dq + first * padded, padded);
  });
}

template <typename T, bool kDrop>
void backward_keys(const AttentionBackward& job, const AttentionTask& task, int64_t split, void* memory) {
  using C = Compute<T>;
  constexpr int Q = kQueryBlock<C>;
  const AttentionInputs& in = job.in;
  const Sequence& sequence = in.sequences[task.sequence];
  const Widths<T> w(in.width);
  const Scale<T> scale(in.scale);
  const BackwardMemory<T> m(in, sequence, task, w, memory);
  [[maybe_unused]] const Needed<T> needed;
  const int64_t start = in.causal ? task.begin / Q * Q : 0;
  // The first range also writes the zeros of queries that see nothing at all.
  for (int64_t begin = split == 0 ? 0 : start; begin < sequence.queries; begin += Q) {
    const int64_t queries = smaller(Q, sequence.queries - begin), row = flat_row(in, sequence, begin);
    const int64_t end = smaller(task.end, in.causal ? begin + queries : task.end);
    load_queries<T>(job, sequence, task.head, begin, queries, w, scale.queries, m.rows, m.query);
    std::memset(m.dq, 0, static_cast<size_t>(Q * w.padded) * sizeof(C));
    for_blocks<T>(in.causal, begin, queries, task.begin, end, [&](const Block& block) {
      backward_block<T, kDrop>(in, scale, block, block.first - task.begin, row, queries, task.head, w, m);
    });
    const C factor = static_cast<C>(in.scale);
    if (job.dq_parts == nullptr) {
      T* to = row_of(static_cast<T*>(job.dq), job.dq_strides, sequence, begin, task.head);
      scatter_rows(m.dq, w.padded, queries, w.width, factor, to, job.dq_strides.row);
    } else {
      const Strides strides = contiguous_strides(in);
      C* part = static_cast<C*>(job.dq_parts) + split * job.dq_part_size;
      scatter_rows(m.dq, w.padded, queries, w.width, factor, row_of(part, strides, sequence, begin, task.head), strides.row);
    }
  }
  const int64_t range = task.end - task.begin;
  T* dk_rows = row_of(static_cast<T*>(job.dk), job.dk_strides, sequence, task.begin, task.head);
  T* dv_rows = row_of(static_cast<T*>(job.dv), job.dv_strides, sequence, task.begin, task.head);
  scatter_rows(m.dk, w.padded, range, w.width, static_cast<C>(in.scale), dk_rows, job.dk_strides.row);
  scatter_rows(m.dv, w.padded, range, w.width, C(1), dv_rows, job.dv_strides.row);
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
  const int64_t copies = kDotProducts ? 5 : 4;  // of keys and values, in backward: pairs want the keys in both ways
  return 6 * q * padded + 3 * kKeyBlock<bfloat16> * q + copies * (keys + 1) * padded + 2 * q + 16 * 16;
}

constexpr AttentionKernels kAttention = {
    {kQueryBlock<float>, kQueryBlock<float>, kQueryBlock<double>},
    attention_scratch,
    {attention_forward<float>, attention_forward<bfloat16>, attention_forward<double>},
    {attention_backward<float>, attention_backward<bfloat16>, attention_backward<double>},
};

}  // namespace AURA_ISA
}  // namespace aura
