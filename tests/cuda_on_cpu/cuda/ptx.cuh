// What the instructions of csrc/cuda/ptx.cuh do, in plain C++: see there for what lies where.
#pragma once

#include <cstdlib>

#include "cuda_runtime.h"

namespace aura {
namespace cuda {

inline uint32_t shared_address(const void* pointer) { return emulated::shared_address(pointer); }
inline unsigned char* shared_memory() { return emulated::shared_memory(); }

inline int block_number() { return static_cast<int>(blockIdx.x); }

inline const void* reckoned(const void* global) { return global; }
inline void prefetch(const void*) {}
inline void sync_threads(int barrier, int threads) { emulated::meet(barrier, threads, true); }
// A kernel begins when the one before has ended.
inline int begin_early() { return block_number(); }
inline void let_next_begin() {}

inline void copy_async_16(void* shared, const void* global, int bytes) {
  emulated::copy_later(shared, global, bytes, 16);
}
inline void copy_async_8(void* shared, const void* global, int bytes) {
  emulated::copy_later(shared, global, bytes, 8);
}
inline void copy_async_commit() { emulated::commit_copies(); }
template <int kPending>
void copy_async_wait() {
  emulated::wait_for_copies(kPending);
}

namespace detail {
inline uint16_t at(const unsigned char* row, int column) {
  uint16_t value;
  std::memcpy(&value, row + 2 * column, 2);
  return value;
}
inline float wide(uint16_t bits, bool half) {
  if (!half) return __uint_as_float(uint32_t{bits} << 16);
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                              : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  if (exponent == 31) value = mantissa ? NAN : INFINITY;
  return bits >> 15 ? -value : value;
}
inline uint16_t narrow(float value, bool half) {
  if (half) {
    if (std::isnan(value)) return 0x7fff;
    const float size = std::fabs(value);
    const uint32_t sign = std::signbit(value) ? 0x8000 : 0;
    if (size >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
    const int exponent = size < 6.103515625e-5f ? -14 : std::ilogb(size);  // below 2^-14 the steps grow no finer
    const int steps = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
    return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + steps));
  }
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
struct Operands {
  uint32_t a[4], b[2];
};
inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool half, const char* name) {
  const auto all = emulated::exchange(~0u, name, Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int g = emulated::thread().lane / 4, t = emulated::thread().lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      const uint32_t left = all[row % 8 * 4 + k % 8 / 2].a[row / 8 + 2 * (k / 8)];
      const uint32_t right = all[column * 4 + k % 8 / 2].b[k / 8];
      sum += wide(static_cast<uint16_t>(left >> 16 * (k % 2)), half) *
             wide(static_cast<uint16_t>(right >> 16 * (k % 2)), half);
    }
    d[i] += sum;
  }
}
inline void load(uint32_t (&r)[4], uint32_t row, bool transposed, const char* name) {
  if (row % 16) std::abort();
  const auto rows = emulated::exchange(~0u, name, emulated::shared_pointer(row, 16, name));
  const int lane = emulated::thread().lane, first = lane / 4, second = 2 * (lane % 4);
  for (int m = 0; m < 4; ++m) {
    emulated::require_all_banks(rows, 8 * m, name);
    const uint32_t low = transposed ? at(rows[8 * m + second], first) : at(rows[8 * m + first], second);
    const uint32_t high = transposed ? at(rows[8 * m + second + 1], first) : at(rows[8 * m + first], second + 1);
    r[m] = low | high << 16;
  }
  __syncwarp();  // what is read may be written over from here on, and not before
}
}  // namespace detail

inline void load_matrices(uint32_t (&r)[4], uint32_t row) { detail::load(r, row, false, "ldmatrix"); }
inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t row) {
  detail::load(r, row, true, "ldmatrix.trans");
}

struct Half {};
struct BFloat {};

inline void multiply(BFloat, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  detail::multiply(d, a, b0, b1, false, "mma.bf16");
}
inline void multiply(Half, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  detail::multiply(d, a, b0, b1, true, "mma.f16");
}

inline uint32_t pack(BFloat, float low, float high) {
  return detail::narrow(low, false) | uint32_t{detail::narrow(high, false)} << 16;
}
inline uint32_t pack(Half, float low, float high) {
  return detail::narrow(low, true) | uint32_t{detail::narrow(high, true)} << 16;
}
inline float low_half(BFloat, uint32_t packed) { return detail::wide(static_cast<uint16_t>(packed), false); }
inline float high_half(BFloat, uint32_t packed) { return detail::wide(static_cast<uint16_t>(packed >> 16), false); }
inline float low_half(Half, uint32_t packed) { return detail::wide(static_cast<uint16_t>(packed), true); }
inline float high_half(Half, uint32_t packed) { return detail::wide(static_cast<uint16_t>(packed >> 16), true); }

constexpr float kLog2E = 1.44269504f;
inline float exp2_fast(float x) { return std::exp2(x); }

}  // namespace cuda
}  // namespace aura
