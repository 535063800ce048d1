// Attention without the matrix of scores, forward: docs/kernels.md. Included by attention.inl alone.
#pragma once

#include "cpu/attention_blocks.inl"

namespace aura {
namespace AURA_ISA {

// The online softmax (Milakov and Gimelshein 2018) of a block of queries, in units of log2. Weights are powers of two of
// scores less `base`: the largest score so far or, in tiles, one that no score exceeds by more than kSlack.
template <typename E, typename C>
struct Softmax {
  C base[kQueryBlock<E>];
  C sum[kQueryBlock<E>];     // of the weights
  C shrink[kQueryBlock<E>];  // what was gathered under the previous base has to be multiplied by this
};

// Tiles add to sums in memory faster than to sums that have to shrink first; with this slack they seldom have to. A key
// that outweighs all others exceeds the slack and gets a weight of 1, which is not rounded.
template <typename E>
constexpr float kSlack = kTiled<E> ? 2.0f : 0.0f;

// Sets scores [key][query] that do not count to -inf, and the base of vector v to what this block asks for. Returns
// whether anything has to shrink.
template <typename T, typename E, typename C>
AURA_INLINE bool rebase(const Scale<T>& scale, const Block& block, int64_t v, C* scores, Softmax<E, C>& softmax) {
  constexpr int W = kWidth<C>, Q = kQueryBlock<E>;
  using V = Vec<C>;
  const int64_t keys = weighed<E>(block, v);
  if (block.diagonal()) {
    for (int64_t n = v * W; n < keys - block.seen; ++n) {
      C* s = scores + (block.seen + n) * Q + v * W;
      store(s, seen_in_diagonal<C>(n, v) ? load<V>(s) : splat<V>(-kInfinity<C>));
    }
  }
  const V none = splat<V>(-kInfinity<C>);
  V maxima[4] = {none, none, none, none};  // several, or each would wait for the one before
  int64_t n = 0;
  for (; n + 4 <= keys; n += 4) {
    for (int i = 0; i < 4; ++i) maxima[i] = vmax(maxima[i], load<V>(scores + (n + i) * Q + v * W));
  }
  for (; n < keys; ++n) maxima[0] = vmax(maxima[0], load<V>(scores + n * Q + v * W));
  const V most = scale.scores(vmax(vmax(maxima[0], maxima[1]), vmax(maxima[2], maxima[3])));
  const V before = load<V>(softmax.base + v * W);
  const auto exceeds = most > before + static_cast<C>(kSlack<E>);
  const V base = exceeds ? most : before;
  store(softmax.base + v * W, base);
  // Where all scores so far are -inf, not inf - inf.
  store(softmax.shrink + v * W, exp2(before - (base == -kInfinity<C> ? V{} : base)));
  if constexpr (kTiled<E>) return any_lane(exceeds);
  return true;
}

// Scores, before their factor, to weights in place, as the left-hand side of a sum over keys: [key / terms][query], for
// vector v of the queries. All bases are found beforehand, so that no weight waits for one.
template <typename T, bool kDrop, typename E, typename C>
void weigh(const AttentionInputs& in, const Scale<T>& scale, const Block& block, int64_t row, int64_t head, int64_t v,
           C* scores, Softmax<E, C>& softmax) {
  constexpr int W = kWidth<C>, Q = kQueryBlock<E>;
  using V = Vec<C>;
  V base = load<V>(softmax.base + v * W), sum{};
  base = base == -kInfinity<C> ? V{} : base;
  const auto weight = [&](int64_t n, auto kept) {
    const V all = exp2_for<T>(scale.scores(load<V>(scores + n * Q + v * W)) - base);
    sum += all;
    return kDrop ? (kept ? all : V{}) : all;
  };
  const int64_t keys = weighed<E>(block, v);
  for_keys<C, kDrop, kTerms<E>>(in.dropout, row + v * W, head, block.first, keys, [&](int64_t n, int64_t some, auto mask) {
    const V first = weight(n, mask(0));
    if constexpr (kTerms<E> == 1) {
      store(scores + n * Q + v * W, first);
    } else {
      store(scores + n / 2 * Q + v * W, round_weights(first, some > 1 ? weight(n + 1, mask(1)) : V{}));
    }
  });
  store(softmax.sum + v * W, load<V>(softmax.sum + v * W) * load<V>(softmax.shrink + v * W) + sum);
}

// The output, [query][d] or [d][query] as it was gathered, times a factor for each query, to rows of `to`.
template <typename T, typename E, typename C>
void write_output(int64_t queries, const Widths<T>& w, const C* output, const C* factor, T* to, int64_t row_stride,
                  Scratch scratch) {
  if constexpr (kTiled<E>) {
    constexpr int W = kWidth<C>, Q = kQueryBlock<E>;
    const int64_t lanes = round_up(queries, W);
    E* const columns = scratch.take<E>(w.pitch * Q);  // [d / terms][query]
    E* const rows = scratch.take<E>(Q * w.pitch);
    for (int64_t d = 0; d < w.padded; d += 2) {
      for (int64_t i = 0; i < lanes; i += W) {
        const C* from = output + d * Q + i;
        const auto scale = load<Vec<C>>(factor + i);
        store(columns + d / 2 * Q + i, zip(round_halves(load<Vec<C>>(from) * scale, load<Vec<C>>(from + Q) * scale)));
      }
    }
    transpose(w.pitch, lanes, columns, Q, rows, w.pitch);
    for (int64_t i = 0; i < queries; ++i) {
      const T* row = reinterpret_cast<const T*>(rows + i * w.pitch);
      int64_t d = 0;
      for (; d + 2 * W <= w.width; d += 2 * W) store(to + i * row_stride + d, load<VecP>(row + d));
      if (d < w.width) std::memcpy(to + i * row_stride + d, row + d, static_cast<size_t>(w.width - d) * sizeof(T));
    }
  } else {
    for (int64_t i = 0; i < queries; ++i) {
      scatter_rows(output + i * w.padded, w.padded, 1, w.width, factor[i], to + i * row_stride, row_stride);
    }
  }
}

// One block of queries; k and v: of the whole sequence.
template <typename T, bool kDrop>
void forward_block(const AttentionForward& job, const AttentionTask& task, int64_t begin, int64_t queries,
                   const Operand<T>* k, const Terms<Operand<T>>& v, Scratch scratch) {
  using C = Compute<T>;
  using E = Operand<T>;
  constexpr int W = kWidth<C>, Q = kQueryBlock<E>;
  const AttentionInputs& in = job.in;
  const Sequence& sequence = in.sequences[task.sequence];
  const Widths<T> w(in.width);
  const Scale<T> scale(in.scale);
  const int64_t vectors = round_up(queries, W) / W;
  E* rows = scratch.take<E>(Q * w.pitch);
  E* q = scratch.take<E>(w.pitch * Q);  // [d / terms][query]
  C* output = scratch.take<C>(Q * w.padded);
  C* scores = scratch.take<C>(kKeyBlock<E> * Q);
  Softmax<E, C> softmax;
  for (int i = 0; i < Q; ++i) softmax.base[i] = -kInfinity<C>, softmax.sum[i] = 0;
  if (sequence.keys == 0) std::memset(output, 0, static_cast<size_t>(Q * w.padded) * sizeof(C));

  const T* from = row_of(static_cast<const T*>(in.q), in.q_strides, sequence, begin, task.head);
  turn_rows(from, in.q_strides.row, queries, w, scale.queries, rows, q);

  const int64_t end = in.causal ? smaller(sequence.keys, begin + queries) : sequence.keys;
  const int64_t row = flat_row(in, sequence, begin);
  for_blocks<E>(in.causal, begin, queries, 0, end, [&](const Block& block) {
    for_parts<E>(block, [&](int64_t a, int64_t b, int64_t skip) {
      const Left<E, false> left{k + (block.first + a) * w.pitch, w.pitch};
      product<To::kNothing>(vectors - skip, b - a, w.depth, left, q + skip * W, Q, scores + a * Q + skip * W, Q);
    });
    bool shrinks = false;
    for (int64_t i = 0; i < vectors; ++i) shrinks |= rebase(scale, block, i, scores, softmax);
    for (int64_t i = 0; i < vectors; ++i) weigh<T, kDrop>(in, scale, block, row, task.head, i, scores, softmax);
    const E* weights = reinterpret_cast<const E*>(scores);
    for_sums<E>(block, vectors, [&](int64_t first, int64_t last, int64_t keys) {
      if (block.first == 0) {
        multiply_terms<To::kNothing>(first, last, queries, keys, w, v, block.first, weights, output);
      } else if (kTiled<E> && !shrinks) {
        multiply_terms<To::kSum>(first, last, queries, keys, w, v, block.first, weights, output);
      } else {
        multiply_terms<To::kScaledSum>(first, last, queries, keys, w, v, block.first, weights, output, softmax.shrink);
      }
    });
  });

  const C keep = kDrop ? static_cast<C>(in.dropout.scale()) : C(1);
  C factor[Q];
  for (int64_t i = 0; i < vectors * W; i += W) {
    using V = Vec<C>;
    const V sum = load<V>(softmax.sum + i);
    store(factor + i, sum == 0 ? V{} : keep / sum);
    store(softmax.sum + i, sum == 0 ? splat<V>(-kInfinity<C>) : load<V>(softmax.base + i) + log2(sum));
  }
  const Strides strides = contiguous_strides(in);
  T* to = row_of(static_cast<T*>(job.out), strides, sequence, begin, task.head);
  write_output<T, E>(queries, w, output, factor, to, strides.row, scratch);
  C* lse = static_cast<C*>(job.lse) + row * in.heads + task.head;
  for (int64_t i = 0; i < queries; ++i) lse[i * in.heads] = softmax.sum[i];
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
  const auto v = collect_terms<T>(in.v, in.v_strides, sequence, task.head, 0, end, w, scratch);
  constexpr int Q = kQueryBlock<Operand<T>>;
  for (int64_t begin = task.begin; begin < task.end; begin += Q) {
    forward_block<T, kDrop>(job, task, begin, smaller(Q, task.end - begin), k, v, scratch);
  }
}

}  // namespace AURA_ISA
}  // namespace aura
