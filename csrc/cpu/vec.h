// Vectors of one instruction set, written once with the compiler's vector extension.
//
// Every file that includes this is compiled several times, once for each instruction set, and lives in a namespace of
// that name. Such files include no header with inline functions of its own (torch's, most of the standard library's):
// the linker keeps one copy of each of those, and it could be the one a smaller processor cannot run.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AMX_BF16__) || defined(__AMXBF16__)  // the second: clang, up to 14 at least
#define AURA_TILES 1
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#if defined(__AVX512BF16__) && defined(AURA_TILES)
#define AURA_ISA amx
#elif defined(__AVX512BF16__)
#define AURA_ISA avx512bf16
#else
#define AURA_ISA avx512
#endif
#define AURA_VECTOR_BYTES 64
#elif defined(__AVX2__) && defined(__FMA__)
#define AURA_ISA avx2
#define AURA_VECTOR_BYTES 32
#else
#define AURA_ISA portable
#define AURA_VECTOR_BYTES 16
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 takes the don't-care operand of its own intrinsics for one
#endif

#define AURA_INLINE inline __attribute__((always_inline))

namespace aura {

// The upper half of a float (Brain floating point, 8 bits of exponent and 7 of mantissa).
struct bfloat16 {
  uint16_t bits;
};

namespace AURA_ISA {

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(AURA_VECTOR_BYTES)));
};
template <typename T>
using Vec = typename VectorOf<T>::type;
using VecF = Vec<float>;
using VecI = Vec<int32_t>;
using VecU = Vec<uint32_t>;

template <typename T>
constexpr int kWidth = AURA_VECTOR_BYTES / static_cast<int>(sizeof(T));

// float and double are computed as themselves, bfloat16 as float.
template <typename T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename V>
AURA_INLINE V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <typename V>
AURA_INLINE void store(void* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

template <typename V, typename T>
AURA_INLINE V splat(T x) {
  return V{} + x;
}

template <typename V>
AURA_INLINE V vmax(V a, V b) {
  return a > b ? a : b;
}

AURA_INLINE float to_float(bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
AURA_INLINE float to_float(float x) { return x; }
AURA_INLINE double to_float(double x) { return x; }

typedef uint16_t VecH __attribute__((vector_size(AURA_VECTOR_BYTES / 2)));

// As many elements as Vec<Compute<T>> holds, widened.
AURA_INLINE VecF load_as(const float* from) { return load<VecF>(from); }
AURA_INLINE Vec<double> load_as(const double* from) { return load<Vec<double>>(from); }
AURA_INLINE VecF load_as(const bfloat16* from) {
#if AURA_VECTOR_BYTES == 64  // GCC takes __builtin_convertvector of 16 to 32 bits, or back, apart into halves
  return reinterpret_cast<VecF>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16));
#else
  const VecU bits = __builtin_convertvector(load<VecH>(from), VecU) << 16;
  return reinterpret_cast<VecF>(bits);
#endif
}

AURA_INLINE void store_as(float* to, VecF v) { store(to, v); }
AURA_INLINE void store_as(double* to, Vec<double> v) { store(to, v); }
// Round to nearest, ties to even; a NaN stays a NaN.
AURA_INLINE void store_as(bfloat16* to, VecF v) {
#if defined(__AVX512BF16__)
  store(to, _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v)));  // below 2^-126, zero
#else
  const VecU bits = reinterpret_cast<VecU>(v);
  const VecU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const VecU quiet = (bits >> 16) | 0x40u;
  const VecU is_nan = reinterpret_cast<VecU>(v != v);
  const VecU result = (rounded & ~is_nan) | (quiet & is_nan);
#if AURA_VECTOR_BYTES == 64
  store(to, _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(result)));
#else
  store(to, __builtin_convertvector(result, VecH));
#endif
#endif
}

// Two bfloat16 in one lane, the first in the lower half.
using Pair = uint32_t;
using VecP = Vec<Pair>;

AURA_INLINE VecF add_product(VecF sum, VecF a, VecF b) { return sum + a * b; }
AURA_INLINE Vec<double> add_product(Vec<double> sum, Vec<double> a, Vec<double> b) { return sum + a * b; }

// Whether the processor multiplies pairs and adds both products to a float.
#if defined(__AVX512BF16__)
constexpr bool kDotProducts = true;

AURA_INLINE VecF add_product(VecF sum, VecP a, VecP b) {
  return reinterpret_cast<VecF>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a),
                                                 reinterpret_cast<__m512bh>(b)));
}

// Pairs of a[i] and b[i], from a vector that holds a in its lower half and b in its upper one.
AURA_INLINE VecP zip(VecP halves) {
  typedef uint16_t Words __attribute__((vector_size(64)));
  const Words index = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return reinterpret_cast<VecP>(_mm512_permutexvar_epi16(reinterpret_cast<__m512i>(index), reinterpret_cast<__m512i>(halves)));
}

// a, rounded, in the lower half and b in the upper one.
AURA_INLINE VecP round_halves(VecF a, VecF b) {
  return reinterpret_cast<VecP>(_mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(a)));
}

// Pairs of a[i] and b[i] for numbers whose ties may go away from zero, which takes fewer instructions. A NaN that came
// with eight bits stays one.
AURA_INLINE VecP round_weights(VecF a, VecF b) {
  const VecU first = (reinterpret_cast<VecU>(a) + 0x8000u) >> 16, second = reinterpret_cast<VecU>(b) + 0x8000u;
  return reinterpret_cast<VecP>(
      _mm512_mask_blend_epi16(0xaaaaaaaa, reinterpret_cast<__m512i>(first), reinterpret_cast<__m512i>(second)));
}

// Pairs of the sixteen values from a on and the sixteen from b on.
AURA_INLINE VecP load_pairs(const bfloat16* a, const bfloat16* b) {
  const __m512i lower = _mm512_castsi256_si512(reinterpret_cast<__m256i>(load<VecH>(a)));
  return zip(reinterpret_cast<VecP>(_mm512_inserti64x4(lower, reinterpret_cast<__m256i>(load<VecH>(b)), 1)));
}
#else
constexpr bool kDotProducts = false;
#endif

// The first `count` elements only; the rest reads as zero and is not written.
template <typename T>
AURA_INLINE Vec<Compute<T>> load_some(const T* from, int64_t count) {
  T padded[kWidth<Compute<T>>] = {};
  std::memcpy(padded, from, static_cast<size_t>(count) * sizeof(T));
  return load_as(padded);
}
template <typename T>
AURA_INLINE void store_some(T* to, Vec<Compute<T>> v, int64_t count) {
  T padded[kWidth<Compute<T>>];
  store_as(padded, v);
  std::memcpy(to, padded, static_cast<size_t>(count) * sizeof(T));
}

// Halves are added until one lane is left: sixteen lanes take four sums one after another, not sixteen.
template <typename T, int kBytes = AURA_VECTOR_BYTES, typename V>
AURA_INLINE T sum_lanes(V v) {
  if constexpr (kBytes == sizeof(T)) {
    return v[0];
  } else {
    typedef T Half __attribute__((vector_size(kBytes / 2)));
    Half halves[2];
    std::memcpy(halves, &v, kBytes);
    return sum_lanes<T, kBytes / 2>(halves[0] + halves[1]);
  }
}

#if AURA_VECTOR_BYTES == 64
// While one lives, this thread's results below 2^-126 are 0, not denormals, which take the processor 50 times as long.
class FlushToZero {
 public:
  FlushToZero() { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON); }
  ~FlushToZero() { _mm_setcsr(before_); }
  FlushToZero(const FlushToZero&) = delete;
  FlushToZero& operator=(const FlushToZero&) = delete;

 private:
  const unsigned before_ = _mm_getcsr();
};

// 2^x by what AVX-512 has for it: the fraction goes through a minimax polynomial for [0, 1) of degree 4 (error 2.6e-6), and
// is multiplied by 2 to the power of the integer below x. Wants a FlushToZero.
AURA_INLINE VecF exp2_of_few_bits(VecF x) {
  const __m512 bits = reinterpret_cast<__m512>(x);
  const VecF f = reinterpret_cast<VecF>(_mm512_reduce_ps(bits, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  VecF p = splat<VecF>(1.3534168e-2f);
  p = p * f + 5.2011461e-2f;
  p = p * f + 2.4144276e-1f;
  p = p * f + 6.9300383e-1f;
  p = p * f + 1.0000026f;
  return reinterpret_cast<VecF>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), bits));
}

AURA_INLINE bool any_lane(VecI mask) { return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask)) != 0; }
#endif

// 2^x for x <= 127: the nearest integer goes to the exponent, the rest, within [-1/2, 1/2], through a minimax polynomial
// of degree 6 (error 1.9e-9, so what remains is the rounding of float) or, where the numbers came with 8 bits, of degree 4
// (2.6e-6). Below 2^-126 the result is 0, so 2^-inf = 0; a NaN stays a NaN.
template <bool kFewBits = false>
AURA_INLINE VecF exp2(VecF x) {
#if AURA_VECTOR_BYTES == 64
  if constexpr (kFewBits) return exp2_of_few_bits(x);
#endif
  // 1.5 * 2^23 leaves the nearest integer in the low bits when it is added, and 127 there is a float's exponent of 0.
  const float magic = 12582912.0f + 127.0f;
  const VecF shifted = x + magic;
  const VecF f = x - (shifted - magic);
  VecF p;
  if constexpr (kFewBits) {
    p = splat<VecF>(9.570100e-3f);
    p = p * f + 5.591786e-2f;
    p = p * f + 2.402475e-1f;
    p = p * f + 6.931218e-1f;
    p = p * f + 9.999993e-1f;
  } else {
    p = splat<VecF>(1.534581203e-4f);
    p = p * f + 1.339993122e-3f;
    p = p * f + 9.618488957e-3f;
    p = p * f + 5.550328777e-2f;
    p = p * f + 2.402264689e-1f;
    p = p * f + 6.931472057e-1f;
    p = p * f + 1.0f;
  }
  const VecF power = reinterpret_cast<VecF>(reinterpret_cast<VecI>(shifted) << 23);
  return x < -126.0f ? VecF{} : p * power;
}
AURA_INLINE Vec<double> exp2(Vec<double> x) {
  for (int i = 0; i < kWidth<double>; ++i) x[i] = __builtin_exp2(x[i]);
  return x;
}

// 2^x as precise as numbers of type T deserve.
template <typename T>
AURA_INLINE Vec<Compute<T>> exp2_for(Vec<Compute<T>> x) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return exp2<true>(x);
  } else {
    return exp2(x);
  }
}

// log2 of x in [1, 2^126]: exponent and mantissa - 1 as a first guess (0.09 off at most), then Newton's method on
// 2^y = x, which squares the error: 3e-3, 3e-6, and the rounding of float.
AURA_INLINE VecF log2(VecF x) {
  VecF y = __builtin_convertvector(reinterpret_cast<VecI>(x) - 0x3f800000, VecF) * 0x1p-23f;
  for (int i = 0; i < 3; ++i) y += (x * exp2(-y) - 1.0f) * 1.442695041f;
  return y;
}
AURA_INLINE Vec<double> log2(Vec<double> x) {
  for (int i = 0; i < kWidth<double>; ++i) x[i] = __builtin_log2(x[i]);
  return x;
}

}  // namespace AURA_ISA
}  // namespace aura
