// The instructions of the GPU that CUDA C++ has no name for, one function each (PTX ISA 8.x, sections in the comments).
// tests/cuda_on_cpu/cuda/ptx.cuh says in plain C++ what each of them does.
#pragma once

#include <cstdint>

namespace aura {
namespace cuda {

// The address in the shared window of a generic pointer into shared memory.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The block's dynamic shared memory, aligned to 1024 bytes.
__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char aura_shared_memory[];
  return aura_shared_memory;
}

// 10.7 %ctaid.x, blockIdx.x: read anew at each call, so that what is derived from it can be derived again later, and
// needs no registers meanwhile.
__device__ __forceinline__ int block_number() {
  int number;
  asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(number));
  return number;
}

// An address in device memory, computed here and only once: nvcc would compute it again for each access under a
// condition, which takes registers as well.
__device__ __forceinline__ const void* reckoned(const void* global) {
  asm("" : "+l"(global));
  __builtin_assume(__isGlobal(global));
  return global;
}

// 9.7.9.15 prefetch: brings the 128 bytes in which this lies to the L2 cache; nobody waits for them.
__device__ __forceinline__ void prefetch(const void* global) {
  constexpr uintptr_t kLine = 128;
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(reinterpret_cast<uintptr_t>(global) & ~(kLine - 1)) : "memory");
}

// 9.7.13.1 bar.sync: the named barriers of a block, 1 to 15 (0 is __syncthreads). Whole warps, `threads` threads in
// all.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// 9.7.13.13 griddepcontrol, of sm_90 and later. A kernel queued by launch_early() begins with begin_early, which waits
// until all kernels before it are done and what they wrote can be read. It returns the block's number so that addresses
// derived from that are unknown before the wait: the compiler takes what __ldg reads for constant, and could load it
// sooner. (ptxas, to which the number is a constant, may read it sooner, but moves no load over the wait.)
__device__ __forceinline__ int begin_early() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
  return block_number();
}
// As soon as all blocks of this kernel have come here, those of the next one, if queued by launch_early(), may be
// launched. Only where the next kernel is ours: another that was queued so might not wait.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// 9.7.9.25 cp.async: copies 16 or 8 bytes from device to shared memory, both aligned to as many, asynchronously. The
// first `bytes` of them are read, the rest become zeros (0: nothing is read).
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_async_8(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until at most `kPending` of this thread's committed groups are under way. Other threads see the copies after a
// barrier.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// 9.7.14.5.15 ldmatrix: four 8 x 8 matrices of 16-bit values. Lane l gives the shared_address() of row l % 8 (16 bytes)
// of matrix l / 8, and receives in r[m] the values 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of matrix m or, with
// load_matrices_transposed, of its transpose.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

struct Half {};    // 16-bit values are fp16
struct BFloat {};  // or bf16

// 9.7.14.5.8 mma.m16n8k16, d[16, 8] += a[16, 16] b[16, 8], products and sums in float. With g = lane / 4, t = lane % 4:
// a[0] rows g, columns 2 t and 2 t + 1; a[1] rows g + 8; a[2] rows g, columns + 8; a[3] rows g + 8, columns + 8;
// b[0] rows 2 t and 2 t + 1, column g; b[1] rows + 8; d[0], d[1] row g, columns 2 t and 2 t + 1; d[2], d[3] row g + 8.
__device__ __forceinline__ void multiply(BFloat, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(Half, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats rounded to nearest even, `low` in the lower 16 bits; and back.
__device__ __forceinline__ uint32_t pack(BFloat, float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ uint32_t pack(Half, float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ float low_half(BFloat, uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float high_half(BFloat, uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }
__device__ __forceinline__ float low_half(Half, uint32_t packed) {
  float value;
  asm("{.reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}\n" : "=f"(value) : "r"(packed));
  return value;
}
__device__ __forceinline__ float high_half(Half, uint32_t packed) {
  float value;
  asm("{.reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}\n" : "=f"(value) : "r"(packed));
  return value;
}

constexpr float kLog2E = 1.44269504f;  // e^x is 2^(kLog2E x)

// 2^x, about 2 units in the last place; -inf gives 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace cuda
}  // namespace aura
