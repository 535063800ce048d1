// Philox4x32 with 7 rounds, the numbers of csrc/cpu/philox.h: masks are the same on every device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace aura {
namespace cuda {

// The 128 bits of the counter (c0, c1, c2, c3) under `seed`: eight numbers of 16 bits, word by word, the low half
// first.
// With kUnroll 1 the rounds stay a loop, so that the compiler does not interleave several calls, which takes registers.
template <int kUnroll = 7>
__device__ __forceinline__ uint4 philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll kUnroll
  for (int round = 0; round < 7; ++round) {
    const uint32_t high0 = __umulhi(c0, 0xD2511F53u), low0 = c0 * 0xD2511F53u;
    const uint32_t high1 = __umulhi(c2, 0xCD9E8D57u), low1 = c2 * 0xCD9E8D57u;
    c0 = high1 ^ c1 ^ k0;
    c2 = high0 ^ c3 ^ k1;
    c1 = low1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

// The i-th of the eight numbers. Selections, because an array would be indexed in memory where i is not a constant.
__device__ __forceinline__ uint32_t philox_number(uint4 bits, int i) {
  const uint32_t first = i < 2 ? bits.x : bits.y, second = i < 6 ? bits.z : bits.w;
  const uint32_t word = i < 4 ? first : second;
  return i % 2 ? word >> 16 : word & 0xffffu;
}

}  // namespace cuda
}  // namespace aura
