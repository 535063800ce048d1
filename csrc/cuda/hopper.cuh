// Instructions of Hopper (sm_90a), one function each (PTX ISA 8.0, under the names in the comments): barriers that
// count bytes (mbarrier), copies of boxes of a tensor (TMA), and products of a warpgroup straight from shared memory
// (wgmma). tests/cuda_on_cpu/cuda/hopper.cuh says in plain C++ what each of them does.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx.cuh"

namespace aura {
namespace cuda {

// ---- Barriers in shared memory --------------------------------------------------------------------------------------

// mbarrier: a phase is complete when all arrivals and all bytes that it expects are there; then the next one begins.
// Phases are told apart by their parity, which is 0 for the first.
using Barrier = uint64_t;

__device__ __forceinline__ void init_barrier(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// To be called by the thread that has initialised them, before the block's __syncthreads: makes them visible to copies
// too.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\n" ::: "memory");
}

__device__ __forceinline__ void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}

// Arrive, and expect `bytes` more bytes from copies in this phase.
__device__ __forceinline__ void arrive_expecting(Barrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity is complete; on a fresh barrier, that of parity 1 is. The loop has no other way
// out: with one, ptxas no longer gives a warpgroup the registers it has taken (setmaxnreg), and serialises products.
__device__ __forceinline__ void wait(Barrier* barrier, int parity) {
  for (uint32_t done = 0; !done;) {
    asm volatile(
        "{\n.reg .pred complete;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
        "selp.u32 %0, 1, 0, complete;\n}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// bar.arrive: comes to a barrier of sync_threads and does not wait.
template <int kThreads>
__device__ __forceinline__ void arrive_named(int id) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "n"(kThreads) : "memory");
}

// elect.sync: true for one lane of the warp, all of which must be here. ptxas knows that it is just one; of a
// comparison with threadIdx it does not, and puts a loop over the lanes around every copy.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, one;\n}\n"
      : "=r"(elected));
  return elected;
}

// ---- Copies ---------------------------------------------------------------------------------------------------------

// cp.async.bulk.tensor: copies the box of the tensor that begins at these coordinates, the innermost first, to shared
// memory aligned to 1024 bytes. What lies beyond the tensor becomes zeros, and counts among the barrier's bytes too.
__device__ __forceinline__ void copy_box(void* shared, const CUtensorMap& map, Barrier* barrier, int c0, int c1, int c2,
                                         int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];\n" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// prefetch.tensormap: fetches a map, a kernel's parameter, that copies will need.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
}

// fence.proxy.async: from here on copies and products see what this thread has written to shared memory.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// ---- Registers ------------------------------------------------------------------------------------------------------

// setmaxnreg, by all warps of a warpgroup: each thread has kRegisters from here on. For more of them it waits until
// others have given theirs up.
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// ---- Products -------------------------------------------------------------------------------------------------------

// The matrix descriptor of wgmma, for an operand in shared memory whose rows of 128 bytes are swizzled as TMA leaves
// them with CU_TENSOR_MAP_SWIZZLE_128B: within 1024 bytes, the 16-byte piece p of row r lies at p ^ r. Every eight rows
// begin `stride` bytes after the eight before. In an "MN-major" operand, whose rows run along M or N and not along K,
// every 64 elements of a row begin `leading` bytes after the 64 before. `start` may be advanced within a row: the
// swizzle depends on the address alone.
__device__ __forceinline__ uint64_t tile_descriptor(const void* start, int leading, int stride) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  const auto field = [](uint32_t bytes) { return static_cast<uint64_t>((bytes & 0x3ffff) >> 4); };
  return field(shared_address(start)) | field(leading) << 16 | field(stride) << 32 | kSwizzle128;
}

// wgmma.fence, commit_group, wait_group: products are asynchronous. After registers have been written otherwise, a
// fence must come before the first product that reads or writes them. Commit makes a group of the products queued; wait
// returns once at most kPending groups are under way.
__device__ __forceinline__ void multiply_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void multiply_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// To the compiler a product is done where it is queued. It moves no use of these registers across a call of this:
// called after the wait, it keeps results from being read, and operands from being overwritten, before.
template <int kCount>
__device__ __forceinline__ void hold(float (&registers)[kCount][4]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(registers[n][i])::"memory");
  }
}
template <int kCount>
__device__ __forceinline__ void hold(uint32_t (&registers)[kCount][4]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(registers[n][i])::"memory");
  }
}

// wgmma.mma_async.m64nNk16. Warp w of the four has rows 16 w to 16 w + 15 of d, and of a where that is in registers;
// within them a lane has the fragments of mma.m16n8k16 (ptx.cuh).
#define AURA_LIST_32                                                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define AURA_LIST_64                                                                                             \
  AURA_LIST_32                                                                                                   \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define AURA_FOUR(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define AURA_SUMS_32 \
  AURA_FOUR(0), AURA_FOUR(1), AURA_FOUR(2), AURA_FOUR(3), AURA_FOUR(4), AURA_FOUR(5), AURA_FOUR(6), AURA_FOUR(7)
#define AURA_SUMS_64                                                                                        \
  AURA_SUMS_32, AURA_FOUR(8), AURA_FOUR(9), AURA_FOUR(10), AURA_FOUR(11), AURA_FOUR(12), AURA_FOUR(13), \
      AURA_FOUR(14), AURA_FOUR(15)

// d[64, N] = a[64, 16] b[N, 16]^T, or += with `accumulate`; N is 64 or 128. Both by descriptor and "K-major": their
// rows run along the 16.
#define AURA_MULTIPLY_TILES(columns, type, list, sums, a_place, b_place, add_place)                             \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" add_place ", 0;\n"                                     \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" list "}, %" a_place \
               ", %" b_place ", add, 1, 1, 0, 0;\n}\n"                                                          \
               : sums                                                                                           \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))
#define AURA_MULTIPLY_64_TILES(type) AURA_MULTIPLY_TILES("64", type, AURA_LIST_32, AURA_SUMS_32, "32", "33", "34")
#define AURA_MULTIPLY_128_TILES(type) AURA_MULTIPLY_TILES("128", type, AURA_LIST_64, AURA_SUMS_64, "64", "65", "66")
__device__ __forceinline__ void multiply_tiles(BFloat, float (&d)[8][4], uint64_t a, uint64_t b, bool accumulate) {
  AURA_MULTIPLY_64_TILES("bf16");
}
__device__ __forceinline__ void multiply_tiles(BFloat, float (&d)[16][4], uint64_t a, uint64_t b, bool accumulate) {
  AURA_MULTIPLY_128_TILES("bf16");
}
__device__ __forceinline__ void multiply_tiles(Half, float (&d)[8][4], uint64_t a, uint64_t b, bool accumulate) {
  AURA_MULTIPLY_64_TILES("f16");
}
__device__ __forceinline__ void multiply_tiles(Half, float (&d)[16][4], uint64_t a, uint64_t b, bool accumulate) {
  AURA_MULTIPLY_128_TILES("f16");
}

// The same with a in registers, N 64.
#define AURA_MULTIPLY_REGISTERS(type)                                                             \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"                                  \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" AURA_LIST_32 "}, " \
               "{%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}\n"                                    \
               : AURA_SUMS_32                                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)))
__device__ __forceinline__ void multiply_tiles(BFloat, float (&d)[8][4], const uint32_t (&a)[4], uint64_t b,
                                               bool accumulate) {
  AURA_MULTIPLY_REGISTERS("bf16");
}
__device__ __forceinline__ void multiply_tiles(Half, float (&d)[8][4], const uint32_t (&a)[4], uint64_t b,
                                               bool accumulate) {
  AURA_MULTIPLY_REGISTERS("f16");
}

// d[64, N] += a[64, 16] b[16, N]: a in registers, b by descriptor and "MN-major": its rows run along the N.
#define AURA_MULTIPLY_BY_VALUES(columns, type, list, sums, a0, a1, a2, a3, b_place)                               \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" list "}, {%" a0 ", %" a1 \
               ", %" a2 ", %" a3 "}, %" b_place ", 1, 1, 1, 1;\n"                                                 \
               : sums                                                                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define AURA_MULTIPLY_BY_64_VALUES(type) \
  AURA_MULTIPLY_BY_VALUES("64", type, AURA_LIST_32, AURA_SUMS_32, "32", "33", "34", "35", "36")
#define AURA_MULTIPLY_BY_128_VALUES(type) \
  AURA_MULTIPLY_BY_VALUES("128", type, AURA_LIST_64, AURA_SUMS_64, "64", "65", "66", "67", "68")
__device__ __forceinline__ void multiply_by_values(BFloat, float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
  AURA_MULTIPLY_BY_64_VALUES("bf16");
}
__device__ __forceinline__ void multiply_by_values(BFloat, float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  AURA_MULTIPLY_BY_128_VALUES("bf16");
}
__device__ __forceinline__ void multiply_by_values(Half, float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
  AURA_MULTIPLY_BY_64_VALUES("f16");
}
__device__ __forceinline__ void multiply_by_values(Half, float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  AURA_MULTIPLY_BY_128_VALUES("f16");
}
#undef AURA_LIST_32
#undef AURA_LIST_64
#undef AURA_FOUR
#undef AURA_SUMS_32
#undef AURA_SUMS_64
#undef AURA_MULTIPLY_TILES
#undef AURA_MULTIPLY_64_TILES
#undef AURA_MULTIPLY_128_TILES
#undef AURA_MULTIPLY_REGISTERS
#undef AURA_MULTIPLY_BY_VALUES
#undef AURA_MULTIPLY_BY_64_VALUES
#undef AURA_MULTIPLY_BY_128_VALUES

}  // namespace cuda
}  // namespace aura
