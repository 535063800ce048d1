// Neighbouring elements of a tensor, packed as an access brings them, and as floats.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/element.h"
#include "cuda/ptx.cuh"

namespace aura {
namespace cuda {

// Element types are float, Half and BFloat.
template <typename T>
constexpr int kBytes = std::is_same_v<T, float> ? 4 : 2;

// Calls call(T{}) for the type of that name.
template <typename Call>
const char* with_element(Element element, const Call& call) {
  switch (element) {
    case Element::kFloat: return call(float{});
    case Element::kBFloat16: return call(BFloat{});
    case Element::kHalf: return call(Half{});
  }
  return "no such element type";
}

// kCount neighbours, packed as in memory: 16-bit values in pairs, a single one in the low half.
template <typename T, int kCount>
struct Vector {
  static constexpr int kSize = kCount * kBytes<T>;
  static_assert(kSize == 2 || kSize == 4 || kSize == 8 || kSize % 16 == 0, "not an access, nor several of 16 bytes");
  uint32_t word[(kSize + 3) / 4];

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (std::is_same_v<T, float>) {
      return __uint_as_float(word[i]);
    } else {
      return i % 2 ? high_half(T{}, word[i / 2]) : low_half(T{}, word[i / 2]);
    }
  }
};

// Rounds to nearest even.
template <typename T, int kCount>
__device__ __forceinline__ Vector<T, kCount> to_vector(const float (&values)[kCount]) {
  Vector<T, kCount> vector;
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) vector.word[i] = __float_as_uint(values[i]);
  } else if constexpr (kCount == 1) {
    vector.word[0] = pack(T{}, values[0], 0.0f);
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) vector.word[i] = pack(T{}, values[2 * i], values[2 * i + 1]);
  }
  return vector;
}

// AnyTime: a load of memory that this kernel does not write, which may be moved ahead of earlier stores, so that more
// loads are under way together, in more registers. InOrder: a load that may not.
struct AnyTime {};
struct InOrder {};
template <typename Word>
__device__ __forceinline__ Word load_word(AnyTime, const void* from) {
  return __ldg(static_cast<const Word*>(from));
}
template <typename Word>
__device__ __forceinline__ Word load_word(InOrder, const void* from) {
  return *static_cast<const Word*>(from);
}

// The address of an element of a tensor.
template <typename T>
__device__ __forceinline__ const void* place(const void* tensor, int64_t index) {
  return reckoned(static_cast<const unsigned char*>(tensor) + index * kBytes<T>);
}

// The elements [index, index + kCount) of a tensor, at an address aligned to their size together, at most to 16 bytes.
template <typename T, int kCount, typename Path = AnyTime>
__device__ __forceinline__ Vector<T, kCount> load(const void* tensor, int64_t index, Path path = {}) {
  using V = Vector<T, kCount>;
  const unsigned char* from = static_cast<const unsigned char*>(tensor) + index * kBytes<T>;
  V vector;
  if constexpr (V::kSize == 2) {
    vector.word[0] = load_word<uint16_t>(path, from);
  } else if constexpr (V::kSize == 4) {
    vector.word[0] = load_word<uint32_t>(path, from);
  } else if constexpr (V::kSize == 8) {
    const uint2 words = load_word<uint2>(path, from);
    vector.word[0] = words.x, vector.word[1] = words.y;
  } else {
#pragma unroll
    for (int i = 0; i < V::kSize / 16; ++i) {
      const uint4 words = load_word<uint4>(path, from + 16 * i);
      vector.word[4 * i] = words.x, vector.word[4 * i + 1] = words.y;
      vector.word[4 * i + 2] = words.z, vector.word[4 * i + 3] = words.w;
    }
  }
  return vector;
}

template <typename T, int kCount>
__device__ __forceinline__ void store(void* tensor, int64_t index, const Vector<T, kCount>& vector) {
  using V = Vector<T, kCount>;
  unsigned char* to = static_cast<unsigned char*>(tensor) + index * kBytes<T>;
  if constexpr (V::kSize == 2) {
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(vector.word[0]);
  } else if constexpr (V::kSize == 4) {
    *reinterpret_cast<uint32_t*>(to) = vector.word[0];
  } else if constexpr (V::kSize == 8) {
    *reinterpret_cast<uint2*>(to) = make_uint2(vector.word[0], vector.word[1]);
  } else {
#pragma unroll
    for (int i = 0; i < V::kSize / 16; ++i) {
      const uint32_t* word = vector.word + 4 * i;
      *reinterpret_cast<uint4*>(to + 16 * i) = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
}

}  // namespace cuda
}  // namespace aura
