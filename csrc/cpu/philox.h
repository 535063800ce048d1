// Philox4x32 with 7 rounds, one independent counter a lane (Salmon et al. 2011, "Parallel random numbers: as easy as
// 1, 2, 3", table 2: 7 rounds pass BigCrush).
//
// Dropout takes one 16-bit half of the output for each element, so that a mask is a pure function of the seed and the
// element's place: the same in backward, with any number of threads, on any device.
#pragma once

#include "dropout.h"
#include "cpu/vec.h"

namespace aura {

namespace AURA_ISA {

struct PhiloxBits {
  VecU word[4];
};

AURA_INLINE void multiply_wide(VecU a, uint32_t factor, VecU* high, VecU* low) {
#if AURA_VECTOR_BYTES == 64
  const __m512i x = reinterpret_cast<__m512i>(a), m = _mm512_set1_epi64(factor);
  const __m512i even = _mm512_mul_epu32(x, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), m);
  *low = reinterpret_cast<VecU>(_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32)));
  *high = reinterpret_cast<VecU>(_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd));
#elif AURA_VECTOR_BYTES == 32
  const __m256i x = reinterpret_cast<__m256i>(a), m = _mm256_set1_epi64x(factor);
  const __m256i even = _mm256_mul_epu32(x, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), m);
  *low = reinterpret_cast<VecU>(_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa));
  *high = reinterpret_cast<VecU>(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa));
#else
  for (int i = 0; i < kWidth<uint32_t>; ++i) {
    const uint64_t product = static_cast<uint64_t>(a[i]) * factor;
    (*low)[i] = static_cast<uint32_t>(product);
    (*high)[i] = static_cast<uint32_t>(product >> 32);
  }
#endif
}

// The 128 bits of each lane's counter (c0, c1, c2, c3) under `seed`.
AURA_INLINE PhiloxBits philox(uint64_t seed, VecU c0, VecU c1, VecU c2, VecU c3) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 7; ++round) {
    VecU high0{}, low0{}, high1{}, low1{};
    multiply_wide(c0, 0xD2511F53u, &high0, &low0);
    multiply_wide(c2, 0xCD9E8D57u, &high1, &low1);
    c0 = high1 ^ c1 ^ k0;
    c2 = high0 ^ c3 ^ k1;
    c1 = low1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The i-th of the eight 16-bit numbers of each lane, i in 0..7: word i / 2, the low half first.
AURA_INLINE VecU half(const PhiloxBits& bits, int i) {
  const VecU word = bits.word[i / 2];
  return i % 2 ? word >> 16 : word & 0xffffu;
}

}  // namespace AURA_ISA
}  // namespace aura
