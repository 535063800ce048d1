// Attention, backward, which computes the scores again: docs/kernels.md. Included by attention.inl alone.
#pragma once

#include "cpu/attention_blocks.inl"

namespace aura {
namespace AURA_ISA {

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
  constexpr int W = kWidth<C>, Q = kQueryBlock<E>;
  const AttentionInputs& in = job.in;
  const int64_t all = round_up(queries, W);
  const T* q = row_of(static_cast<const T*>(in.q), in.q_strides, sequence, begin, head);
  gather_terms(q, in.q_strides.row, queries, all, w.width, w.padded, to.q_terms);
  // Scaled as in forward, or rounding would part these scores from the log-sum-exp of those.
  turn_rows(q, in.q_strides.row, queries, w, scale, rows, to.q);
  const Strides strides = contiguous_strides(in);
  const T* dout = row_of(static_cast<const T*>(job.dout), strides, sequence, begin, head);
  gather_terms(dout, strides.row, queries, all, w.width, w.padded, to.dout_terms);
  turn_rows(dout, strides.row, queries, w, C(1), rows, to.dout);
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

// Weights [key][query] as the left-hand side of a sum over keys, [key / terms][query]: where they are, or as pairs in `to`.
// `first`, `last`: vectors of queries.
template <typename E, typename C>
AURA_INLINE const E* sum_over_keys(int64_t keys, int64_t first, int64_t last, const C* weights, E* to) {
  if constexpr (std::is_same_v<E, Pair>) {
    constexpr int W = kWidth<C>, Q = kQueryBlock<E>;
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

// In place: scores become the weights by which the values were multiplied, gradients of weights those of the scores.
template <typename T, bool kDrop, typename E, typename C>
void weigh_backward(const AttentionInputs& in, const Scale<T>& scale, const Block& block, int64_t row, int64_t head, int64_t v,
                    const QueryBlock<E, C>& query, C* weights, C* gradients) {
  constexpr int W = kWidth<C>, Q = kQueryBlock<E>;
  using V = Vec<C>;
  const V lse = load<V>(query.lse + v * W), delta = load<V>(query.delta + v * W);
  const V keep = splat<V>(kDrop ? static_cast<C>(in.dropout.scale()) : C(1));
  for_keys<C, kDrop, 1>(in.dropout, row + v * W, head, block.first, weighed<E>(block, v), [&](int64_t n, int64_t, auto mask) {
    const auto kept = mask(0);
    C *w = weights + n * Q + v * W, *g = gradients + n * Q + v * W;
    V weight = exp2_for<T>(scale.scores(load<V>(w)) - lse);
    V gradient = load<V>(g);
    if (kDrop) gradient = kept ? gradient * keep : V{};
    gradient = weight * (gradient - delta);
    if (n - block.seen >= v * W) {
      const auto seen = seen_in_diagonal<C>(n - block.seen, v);
      weight = seen ? weight : V{};
      gradient = seen ? gradient : V{};
    }
    store(g, gradient);
    store(w, kDrop ? (kept ? weight * keep : V{}) : weight);
  });
}

// Weights [key][query] as the left-hand side of a sum over queries, [key][query / terms].
template <typename E, typename C>
AURA_INLINE const E* sum_over_queries(int64_t keys, int64_t first, int64_t last, const C* weights, E* to) {
  if constexpr (std::is_same_v<E, Pair>) {
    constexpr int W = kWidth<C>, Q = kQueryBlock<E>;
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
  static constexpr int Q = kQueryBlock<E>, kPitch = Q / kTerms<E>;
  QueryBlock<E, C> query;
  E* rows;                          // of a block of queries, on their way to it
  C *dq, *dq_rows;                  // [query][d], the first in tiles [d][query]
  C *weights, *gradients;           // [key][query]
  E* pairs;                         // [key][query / terms]
  const E *k, *v;                   // [key][d / terms]
  Terms<E> k_terms;
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
    dq = dq_rows = scratch.take<C>(Q * w.padded);
    if constexpr (kTiled<E>) dq_rows = scratch.take<C>(Q * w.padded);
    weights = scratch.take<C>(kKeyBlock<E> * Q);
    gradients = scratch.take<C>(kKeyBlock<E> * Q);
    pairs = scratch.take<E>(kKeyBlock<E> * kPitch);
    k = collect_rows<T>(in.k, in.k_strides, sequence, task.head, task.begin, task.end, w, scratch);
    v = collect_rows<T>(in.v, in.v_strides, sequence, task.head, task.begin, task.end, w, scratch);
    k_terms = {k, w.pitch};
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
  constexpr int W = kWidth<C>, Q = kQueryBlock<E>, kPitch = Q / kTerms<E>;
  const int64_t vectors = round_up(queries, W) / W, padded = w.padded, wide = padded / W;
  for_parts<E>(block, [&](int64_t a, int64_t b, int64_t skip) {
    const Left<E, false> k_left{m.k + (offset + a) * w.pitch, w.pitch}, v_left{m.v + (offset + a) * w.pitch, w.pitch};
    const int64_t at = a * Q + skip * W;
    product<To::kNothing>(vectors - skip, b - a, w.depth, k_left, m.query.q + skip * W, Q, m.weights + at, Q);
    product<To::kNothing>(vectors - skip, b - a, w.depth, v_left, m.query.dout + skip * W, Q, m.gradients + at, Q);
  });
  for (int64_t i = 0; i < vectors; ++i) {
    weigh_backward<T, kDrop>(in, scale, block, row, head, i, m.query, m.weights, m.gradients);
  }
  for_parts<E>(block, [&](int64_t a, int64_t b, int64_t skip) {
    const int64_t first = skip * W, keys = b - a, depth = operands<E>(queries - first);
    const int64_t to = (offset + a) * padded, from = first / kTerms<E>;
    const auto left = [&](const C* sums) {
      return Left<E, false>{sum_over_queries(keys, skip, vectors, sums + a * Q, m.pairs) + from, kPitch};
    };
    product<To::kSum>(wide, keys, depth, left(m.weights), m.query.dout_terms + from * padded, padded, m.dv + to, padded);
    product<To::kSum>(wide, keys, depth, left(m.gradients), m.query.q_terms + from * padded, padded, m.dk + to, padded);
  });
  for_sums<E>(block, vectors, [&](int64_t first, int64_t last, int64_t keys) {
    const E* sums = sum_over_keys(keys, first, last, m.gradients, m.pairs);
    multiply_terms<To::kSum>(first, last, queries, keys, w, m.k_terms, offset, sums, m.dq);
  });
}

template <typename T, bool kDrop>
void backward_keys(const AttentionBackward& job, const AttentionTask& task, int64_t split, void* memory) {
  using C = Compute<T>;
  constexpr int Q = kQueryBlock<Operand<T>>;
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
    for_blocks<Operand<T>>(in.causal, begin, queries, task.begin, end, [&](const Block& block) {
      backward_block<T, kDrop>(in, scale, block, block.first - task.begin, row, queries, task.head, w, m);
    });
    if constexpr (kTiled<Operand<T>>) transpose(w.padded, round_up(queries, kWidth<C>), m.dq, Q, m.dq_rows, w.padded);
    const C factor = static_cast<C>(in.scale);
    if (job.dq_parts == nullptr) {
      T* to = row_of(static_cast<T*>(job.dq), job.dq_strides, sequence, begin, task.head);
      scatter_rows(m.dq_rows, w.padded, queries, w.width, factor, to, job.dq_strides.row);
    } else {
      const Strides strides = contiguous_strides(in);
      C* part = static_cast<C*>(job.dq_parts) + split * job.dq_part_size;
      scatter_rows(m.dq_rows, w.padded, queries, w.width, factor, row_of(part, strides, sequence, begin, task.head), strides.row);
    }
  }
  const int64_t range = task.end - task.begin;
  T* dk_rows = row_of(static_cast<T*>(job.dk), job.dk_strides, sequence, task.begin, task.head);
  T* dv_rows = row_of(static_cast<T*>(job.dv), job.dv_strides, sequence, task.begin, task.head);
  scatter_rows(m.dk, w.padded, range, w.width, static_cast<C>(in.scale), dk_rows, job.dk_strides.row);
  scatter_rows(m.dv, w.padded, range, w.width, C(1), dv_rows, job.dv_strides.row);
}

}  // namespace AURA_ISA
}  // namespace aura
