// Layer normalisation (Ba et al. 2016) and RMS normalisation (Zhang and Sennrich 2019), one row after the other.
//
// All of this waits for memory, so what counts is how often a row crosses the bus: each pass below runs over a row that
// the first of them has brought into the L1 cache. That leaves room for statistics in two passes, which lose no digits
// where the mean is large (sum(x^2) - n mean^2 would).
#pragma once

#include "cpu/philox.h"
#include "cpu/vec.h"
#include "norms.h"

namespace aura {
namespace AURA_ISA {
namespace norms {

// A full vector at its place, or the last elements of a row.
struct Whole {};

template <typename T>
AURA_INLINE Vec<Compute<T>> load_part(const T* from, Whole) {
  return load_as(from);
}
template <typename T>
AURA_INLINE Vec<Compute<T>> load_part(const T* from, int64_t count) {
  return load_some(from, count);
}
template <typename T>
AURA_INLINE void store_part(T* to, Vec<Compute<T>> v, Whole) {
  store_as(to, v);
}
template <typename T>
AURA_INLINE void store_part(T* to, Vec<Compute<T>> v, int64_t count) {
  store_some(to, v, count);
}
template <typename V>
AURA_INLINE V zero_rest(V v, Whole) {
  return v;
}
template <typename V>
AURA_INLINE V zero_rest(V v, int64_t count) {
  for (int64_t i = count; i < static_cast<int64_t>(sizeof(V) / sizeof(v[0])); ++i) v[i] = 0;
  return v;
}

// Asks for what a later row reads there, into the second-level cache: the passes over a row that is in the first leave
// the bus to it. Not for what is written: whole cache lines are written without being read first, unless they are
// prefetched.
AURA_INLINE void fetch(const void* from) { __builtin_prefetch(from, 0, 2); }

// Calls body(column, chain, part) for each vector of C in a row; neighbours get different chains 0..3, so that four
// sums can run side by side.
template <typename C, typename Body>
AURA_INLINE void sweep(int64_t columns, const Body& body) {
  constexpr int64_t width = kWidth<C>;
  int64_t c = 0;
  for (; c + 4 * width <= columns; c += 4 * width) {
    body(c, 0, Whole{});
    body(c + width, 1, Whole{});
    body(c + 2 * width, 2, Whole{});
    body(c + 3 * width, 3, Whole{});
  }
  for (; c + width <= columns; c += width) body(c, 0, Whole{});
  if (c < columns) body(c, 0, columns - c);
}

template <typename C>
struct Chains {
  Vec<C> sum[4] = {};
  AURA_INLINE C total() const { return sum_lanes<C>((sum[0] + sum[1]) + (sum[2] + sum[3])); }
};

AURA_INLINE float root(float x) { return __builtin_sqrtf(x); }
AURA_INLINE double root(double x) { return __builtin_sqrt(x); }

// Columns whose dropout bits one call of philox() gives: eight for each lane.
constexpr int64_t kDropoutColumns = 8 * kWidth<uint32_t>;

// Lane j of a row of vectors 4 x kWidth, turned so that the words of one counter lie side by side in memory. The
// 128-bit lanes of the vectors stay apart (their instructions do not cross them): lane 4 q + k of the input comes out as
// quarter q of vector k. `lane_group` numbers the counters so that the result is in order all the same.
AURA_INLINE VecU lane_group() {
  VecU group{};
  for (int i = 0; i < kWidth<uint32_t>; ++i) group[i] = static_cast<uint32_t>(i % 4 * (kWidth<uint32_t> / 4) + i / 4);
  return group;
}

// 16 bits for each of the columns [first, first + kDropoutColumns) of a row, `first` a multiple of 8.
AURA_INLINE void dropout_bits(const Dropout& dropout, int64_t row, int64_t first, uint16_t* to) {
  const VecU row_number = splat<VecU>(static_cast<uint32_t>(row)), one = splat<VecU>(1u);
  const PhiloxBits bits =
      philox(dropout.seed, row_number, lane_group() + static_cast<uint32_t>(first / 8), VecU{}, one);
  const VecU a = bits.word[0], b = bits.word[1], c = bits.word[2], d = bits.word[3];
#if AURA_VECTOR_BYTES == 64
  const __m512i va = reinterpret_cast<__m512i>(a), vb = reinterpret_cast<__m512i>(b);
  const __m512i vc = reinterpret_cast<__m512i>(c), vd = reinterpret_cast<__m512i>(d);
  const __m512i low_ab = _mm512_unpacklo_epi32(va, vb), high_ab = _mm512_unpackhi_epi32(va, vb);
  const __m512i low_cd = _mm512_unpacklo_epi32(vc, vd), high_cd = _mm512_unpackhi_epi32(vc, vd);
  store(to, _mm512_unpacklo_epi64(low_ab, low_cd));
  store(to + 32, _mm512_unpackhi_epi64(low_ab, low_cd));
  store(to + 64, _mm512_unpacklo_epi64(high_ab, high_cd));
  store(to + 96, _mm512_unpackhi_epi64(high_ab, high_cd));
#elif AURA_VECTOR_BYTES == 32
  const __m256i va = reinterpret_cast<__m256i>(a), vb = reinterpret_cast<__m256i>(b);
  const __m256i vc = reinterpret_cast<__m256i>(c), vd = reinterpret_cast<__m256i>(d);
  const __m256i low_ab = _mm256_unpacklo_epi32(va, vb), high_ab = _mm256_unpackhi_epi32(va, vb);
  const __m256i low_cd = _mm256_unpacklo_epi32(vc, vd), high_cd = _mm256_unpackhi_epi32(vc, vd);
  store(to, _mm256_unpacklo_epi64(low_ab, low_cd));
  store(to + 16, _mm256_unpackhi_epi64(low_ab, low_cd));
  store(to + 32, _mm256_unpacklo_epi64(high_ab, high_cd));
  store(to + 48, _mm256_unpackhi_epi64(high_ab, high_cd));
#else
  for (int i = 0; i < kWidth<uint32_t>; ++i) {
    const VecU words = {a[i], b[i], c[i], d[i]};
    store(to + 8 * i, words);
  }
#endif
}

AURA_INLINE VecF drop(VecF v, const uint16_t* bits, uint32_t threshold, float scale) {
#if AURA_VECTOR_BYTES == 64
  const VecU wide = reinterpret_cast<VecU>(_mm512_cvtepu16_epi32(load<__m256i>(bits)));
#else
  const VecU wide = __builtin_convertvector(load<VecH>(bits), VecU);
#endif
  return wide >= threshold ? v * scale : VecF{};
}
AURA_INLINE Vec<double> drop(Vec<double> v, const uint16_t* bits, uint32_t threshold, double scale) {
  for (int i = 0; i < kWidth<double>; ++i) v[i] = bits[i] >= threshold ? v[i] * scale : 0.0;
  return v;
}

// Calls body(column, part, f) for each vector of C in a row, where f(v) is dropout of v at that place. The bits of the
// last columns may belong to no element; they are not used.
template <typename C, bool kDrop, typename Body>
AURA_INLINE void sweep_dropout(const Dropout& dropout, int64_t row, int64_t columns, const Body& body) {
  if constexpr (kDrop) {
    uint16_t bits[kDropoutColumns];
    const C scale = static_cast<C>(dropout.scale());
    for (int64_t first = 0; first < columns; first += kDropoutColumns) {
      dropout_bits(dropout, row, first, bits);
      const int64_t left = columns - first;
      sweep<C>(left < kDropoutColumns ? left : kDropoutColumns, [&](int64_t c, int, auto part)
                   __attribute__((always_inline)) {
        body(first + c, part, [&](Vec<C> v) __attribute__((always_inline)) { return drop(v, bits + c, dropout.threshold, scale); });
      });
    }
  } else {
    sweep<C>(columns, [&](int64_t c, int, auto part) __attribute__((always_inline)) {
      body(c, part, [](Vec<C> v) __attribute__((always_inline)) { return v; });
    });
  }
}

// new_residual = residual + dropout(x).
template <typename X, typename R, bool kDrop>
AURA_INLINE void add_row(const NormForward& a, int64_t row) {
  const X* x = static_cast<const X*>(a.x) + row * a.columns;
  const R* residual = static_cast<const R*>(a.residual) + row * a.columns;
  R* to = static_cast<R*>(a.new_residual) + row * a.columns;
  sweep_dropout<Compute<R>, kDrop>(a.dropout, row, a.columns, [&](int64_t c, auto part, auto dropped)
                                       __attribute__((always_inline)) {
    store_part(to + c, load_part(residual + c, part) + dropped(load_part(x + c, part)), part);
  });
}

template <typename X, typename R, typename W, bool kRms>
AURA_INLINE void normalise_row(const NormForward& a, const R* x, int64_t row) {
  using C = Compute<R>;
  C mean = 0;
  if constexpr (!kRms) {
    Chains<C> sum;
    sweep<C>(a.columns, [&](int64_t c, int chain, auto part) __attribute__((always_inline)) {
      sum.sum[chain] += load_part(x + c, part);
    });
    mean = sum.total() / static_cast<C>(a.columns);
    static_cast<C*>(a.mean)[row] = mean;
  }
  const int64_t next = (row + 1) * a.columns;
  Chains<C> squares;
  sweep<C>(a.columns, [&](int64_t c, int chain, auto part) __attribute__((always_inline)) {
    if (a.residual) {  // the processor follows a single stream by itself
      fetch(static_cast<const X*>(a.x) + next + c);
      fetch(static_cast<const R*>(a.residual) + next + c);
    }
    const Vec<C> d = zero_rest(load_part(x + c, part) - mean, part);
    squares.sum[chain] += d * d;
  });
  const C rstd = 1 / root(squares.total() / static_cast<C>(a.columns) + static_cast<C>(a.eps));
  static_cast<C*>(a.rstd)[row] = rstd;

  const W *weight = static_cast<const W*>(a.weight), *bias = static_cast<const W*>(a.bias);
  R* y = static_cast<R*>(a.y) + row * a.columns;
  if (bias) {
    sweep<C>(a.columns, [&](int64_t c, int, auto part) __attribute__((always_inline)) {
      const Vec<C> normal = (load_part(x + c, part) - mean) * rstd;
      store_part(y + c, normal * load_part(weight + c, part) + load_part(bias + c, part), part);
    });
  } else {
    sweep<C>(a.columns, [&](int64_t c, int, auto part) __attribute__((always_inline)) {
      store_part(y + c, (load_part(x + c, part) - mean) * rstd * load_part(weight + c, part), part);
    });
  }
}

template <typename X, typename R, typename W, bool kRms>
void forward(const NormForward& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const void* x = a.x;
    if (a.residual) {
      if (a.dropout.threshold) {
        add_row<X, R, true>(a, row);
      } else {
        add_row<X, R, false>(a, row);
      }
      x = a.new_residual;
    }
    normalise_row<X, R, W, kRms>(a, static_cast<const R*>(x) + row * a.columns, row);
  }
}

// d(what was normalised) of one row, n = (x - mean) * rstd, g = dy * weight:
//   rstd * (g - mean(g) - n * mean(g * n)), without the middle term for RMS; plus what comes past the norm.
template <typename R, typename W, bool kRms, bool kPast, int kRows>
AURA_INLINE void gradient_row(const NormBackward& a, int64_t row, Compute<R> mean, Compute<R> rstd, Compute<R> mean_g,
                              Compute<R> mean_gn) {
  using C = Compute<R>;
  const W* weight = static_cast<const W*>(a.weight);
  const R* x = static_cast<const R*>(a.x) + row * a.columns;
  const R* dy = static_cast<const R*>(a.dy) + row * a.columns;
  const R* past = static_cast<const R*>(a.d_new_residual) + (kPast ? row * a.columns : 0);
  R* to = static_cast<R*>(a.dresidual) + row * a.columns;
  const int64_t later = kRows * a.columns;
  sweep<C>(a.columns, [&](int64_t c, int, auto part) __attribute__((always_inline)) {
    fetch(x + later + c);
    fetch(dy + later + c);
    if constexpr (kPast) fetch(past + later + c);
    const Vec<C> n = (load_part(x + c, part) - mean) * rstd;
    const Vec<C> g = load_part(dy + c, part) * load_part(weight + c, part);
    Vec<C> d = (g - mean_g - n * mean_gn) * rstd;
    if constexpr (kPast) d += load_part(past + c, part);
    store_part(to + c, d, part);
  });
}

template <typename X, typename R, bool kDrop>
AURA_INLINE void drop_row(const NormBackward& a, int64_t row) {
  const R* from = static_cast<const R*>(a.dresidual) + row * a.columns;
  X* to = static_cast<X*>(a.dx) + row * a.columns;
  sweep_dropout<Compute<R>, kDrop>(a.dropout, row, a.columns, [&](int64_t c, auto part, auto dropped)
                                       __attribute__((always_inline)) {
    store_part(to + c, dropped(load_part(from + c, part)), part);
  });
}

// kRows rows together, so that dweight and dbias are loaded and stored once for all of them; and the rows are added up
// before that, because one long chain of sums would round more.
template <typename X, typename R, typename W, bool kRms, int kRows>
AURA_INLINE void backward_rows(const NormBackward& a, int64_t row, Compute<R>* dweight, Compute<R>* dbias) {
  using C = Compute<R>;
  const W* weight = static_cast<const W*>(a.weight);
  const R* x = static_cast<const R*>(a.x) + row * a.columns;
  const R* dy = static_cast<const R*>(a.dy) + row * a.columns;
  C mean[kRows] = {}, rstd[kRows];
  Vec<C> sum_g[kRows] = {}, sum_gn[kRows] = {};
  for (int i = 0; i < kRows; ++i) {
    if constexpr (!kRms) mean[i] = static_cast<const C*>(a.mean)[row + i];
    rstd[i] = static_cast<const C*>(a.rstd)[row + i];
  }
  const auto accumulate = [&](int64_t c, auto part) __attribute__((always_inline)) {
    const Vec<C> w = load_part(weight + c, part);
    Vec<C> dw{}, db{};
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const Vec<C> n = (load_part(x + i * a.columns + c, part) - mean[i]) * rstd[i];
      const Vec<C> d = load_part(dy + i * a.columns + c, part);
      const Vec<C> g = d * w;
      if constexpr (!kRms) {
        sum_g[i] += g;
        db += d;
      }
      sum_gn[i] += g * n;
      dw += d * n;
    }
    store_part(dweight + c, load_part(dweight + c, part) + dw, part);
    if constexpr (!kRms) store_part(dbias + c, load_part(dbias + c, part) + db, part);
  };
  int64_t c = 0;
  for (; c + kWidth<C> <= a.columns; c += kWidth<C>) accumulate(c, Whole{});
  if (c < a.columns) accumulate(c, a.columns - c);

  for (int i = 0; i < kRows; ++i) {
    const C mean_g = sum_lanes<C>(sum_g[i]) / static_cast<C>(a.columns);
    const C mean_gn = sum_lanes<C>(sum_gn[i]) / static_cast<C>(a.columns);
    if (a.d_new_residual) {
      gradient_row<R, W, kRms, true, kRows>(a, row + i, mean[i], rstd[i], mean_g, mean_gn);
    } else {
      gradient_row<R, W, kRms, false, kRows>(a, row + i, mean[i], rstd[i], mean_g, mean_gn);
    }
    if (!a.dx) continue;
    if (a.dropout.threshold) {
      drop_row<X, R, true>(a, row + i);
    } else {
      drop_row<X, R, false>(a, row + i);
    }
  }
}

template <typename X, typename R, typename W, bool kRms>
void backward(const NormBackward& a, int64_t begin, int64_t end, void* partial) {
  using C = Compute<R>;
  C *dweight = static_cast<C*>(partial), *dbias = dweight + a.columns;
  std::memset(partial, 0, static_cast<size_t>((kRms ? 1 : 2) * a.columns) * sizeof(C));
  constexpr int kRows = 4;
  int64_t row = begin;
  for (; row + kRows <= end; row += kRows) backward_rows<X, R, W, kRms, kRows>(a, row, dweight, dbias);
  for (; row < end; ++row) backward_rows<X, R, W, kRms, 1>(a, row, dweight, dbias);
}

template <typename W>
void reduce(const void* partials, int64_t blocks, int64_t stride, int64_t begin, int64_t end, void* out) {
  using C = Compute<W>;
  const C* from = static_cast<const C*>(partials);
  sweep<C>(end - begin, [&](int64_t c, int, auto part) __attribute__((always_inline)) {
    constexpr int64_t kChain = 16;  // about the root of the number of blocks: no sum is a long chain
    Vec<C> sum{};
    for (int64_t block = 0; block < blocks;) {
      Vec<C> chain{};
      for (int64_t stop = block + kChain; block < stop && block < blocks; ++block) {
        chain += load_part(from + block * stride + begin + c, part);
      }
      sum += chain;
    }
    store_part(static_cast<W*>(out) + begin + c, sum, part);
  });
}

}  // namespace norms

// One function for each of NormTypes; the last three, of fp16, are null.
#define AURA_NORM_TYPES(function, kRms)                                                                               \
  {                                                                                                                   \
    norms::function<float, float, float, kRms>, norms::function<bfloat16, bfloat16, bfloat16, kRms>,                  \
        norms::function<bfloat16, bfloat16, float, kRms>, norms::function<bfloat16, float, float, kRms>,              \
        norms::function<double, double, double, kRms>                                                                 \
  }

constexpr NormKernels kNorms = {
    AURA_NORM_TYPES(forward, false),
    AURA_NORM_TYPES(forward, true),
    AURA_NORM_TYPES(backward, false),
    AURA_NORM_TYPES(backward, true),
    {norms::reduce<float>, norms::reduce<bfloat16>, norms::reduce<float>, norms::reduce<float>, norms::reduce<double>},
};

#undef AURA_NORM_TYPES

}  // namespace AURA_ISA
}  // namespace aura
