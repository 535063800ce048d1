// What the instructions of csrc/cuda/hopper.cuh do, in plain C++: see there for what lies where. What is asynchronous
// on a card is carried out as late as possible, when no thread can go on without it; with AURA_EMULATED_EAGER as early
// as possible, and with AURA_EMULATED_EAGER=copies copies early and multiplications late.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "cuda/ptx.cuh"

namespace aura {
namespace cuda {

using Barrier = uint64_t;

inline void init_barrier(Barrier* barrier, int arrivals) { emulated::init_barrier(barrier, arrivals); }
inline void publish_barriers() { emulated::publish_barriers(); }
inline void arrive(Barrier* barrier) { emulated::arrive(barrier, 0); }
inline void arrive_expecting(Barrier* barrier, int bytes) { emulated::arrive(barrier, bytes); }
inline void wait(Barrier* barrier, int parity) { emulated::wait(barrier, parity); }

template <int kThreads>
void arrive_named(int id) {
  static_assert(kThreads > 0 && kThreads % 32 == 0, "bar counts whole warps");
  emulated::meet(id, kThreads, false);
}

inline void copy_box(void* shared, const CUtensorMap& map, Barrier* barrier, int c0, int c1, int c2, int c3) {
  emulated::copy_box(shared, &map, barrier, {c0, c1, c2, c3});
}
// Nothing to fetch: the map's 128 bytes lie in the kernel's parameters.
inline void prefetch_map(const CUtensorMap&) {}
inline void fence_async_proxy() { emulated::fence_async_proxy(); }

// Any lane but the first: nothing may count on its being that one.
inline bool elect_one() {
  emulated::exchange(~0u, "elect.sync", 0);
  return emulated::thread().lane == 21;
}

// setmaxnreg takes multiples of 8 from 24 to 256.
template <int kRegisters>
void more_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "setmaxnreg");
  emulated::set_registers(kRegisters);
}
template <int kRegisters>
void fewer_registers() {
  more_registers<kRegisters>();
}

// Bits 0 to 13 the start, 16 to 29 the leading dimension's byte offset, 32 to 45 the stride dimension's, each without
// its lowest 4 bits (of 18); 49 to 51 the base offset, 0 where the swizzle's pattern begins at multiples of 1024 bytes;
// 62 and 63 the swizzle: 1 for 128 bytes.
inline uint64_t tile_descriptor(const void* start, int leading_stride, int stride) {
  const auto field = [](uint64_t bytes) { return (bytes & 0x3ffff) >> 4; };
  return field(emulated::shared_address(start)) | field(emulated::descriptor_stride(leading_stride)) << 16 |
         field(emulated::descriptor_stride(stride)) << 32 | uint64_t{1} << 62;
}
inline void multiply_fence() { emulated::fence_multiplications(); }
inline void multiply_commit() { emulated::commit_multiplications(); }
template <int kPending>
void multiply_wait() {
  static_assert(kPending >= 0 && kPending <= 7, "wgmma.wait_group");
  emulated::wait_for_multiplications(kPending);
}

namespace detail {
template <typename Type>
float wide_of(uint16_t bits) {
  return wide(bits, std::is_same<Type, Half>::value);
}
}  // namespace detail

template <typename Type, int kCount>
void multiply_tiles(Type, float (&d)[kCount][4], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(kCount == 8 || kCount == 16, "64 or 128 columns");
  emulated::multiply_later({a, b, 8 * kCount, false, false, accumulate, detail::wide_of<Type>}, &d[0][0], nullptr);
}
template <typename Type>
void multiply_tiles(Type, float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  emulated::multiply_later({0, b, 64, true, false, accumulate, detail::wide_of<Type>}, &d[0][0], a);
}
template <typename Type, int kCount>
void multiply_by_values(Type, float (&d)[kCount][4], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kCount == 8 || kCount == 16, "64 or 128 columns");
  emulated::multiply_later({0, b, 8 * kCount, true, true, true, detail::wide_of<Type>}, &d[0][0], a);
}

template <int kCount>
void hold(float (&)[kCount][4]) {}
template <int kCount>
void hold(uint32_t (&)[kCount][4]) {}

}  // namespace cuda
}  // namespace aura
