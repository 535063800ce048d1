// CUDA on a processor, for tests: what csrc/cuda/*.cu needs of the run-time library and of the language, with a block's
// threads as fibers of one ordinary thread. Correctness only: the order of the fibers is drawn anew for every block,
// shared memory begins as NaN, and a barrier or a collective that not all threads reach ends the program.
//
//     g++ -x c++ -std=c++17 -O1 -Itests/cuda_on_cpu -Icsrc csrc/cuda/norms.cu tests/cuda_on_cpu/{runtime,hopper_*}.cpp
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulated {

constexpr int kWarp = 32;

// The thread that runs.
struct Thread {
  dim3 index;
  int warp, lane;
};
const Thread& thread();
unsigned char* shared_memory();

// Wait until all threads of the block that have not ended are here.
void barrier();
// Returns what the lanes of the warp in `mask` bring to this collective, kMost bytes apart. They must all name the same
// `operation`. The pointer is valid until the lane's next collective.
const unsigned char* collect(unsigned mask, const char* operation, const void* mine, size_t size);
constexpr size_t kMost = 64;  // bytes a lane brings, at most

template <typename T>
struct Brought {
  const unsigned char* bytes;
  T operator[](int lane) const {
    T value;
    std::memcpy(&value, bytes + lane * kMost, sizeof(T));
    return value;
  }
};
template <typename T>
Brought<T> exchange(unsigned mask, const char* operation, const T& mine) {
  static_assert(sizeof(T) <= kMost, "more than a lane may bring");
  return {collect(mask, operation, &mine, sizeof(T))};
}

// cp.async: copies of `size` bytes, zeros after the first `bytes`, that are carried out when they are waited for.
void copy_later(void* to, const void* from, int bytes, int size);
void commit_copies();
void wait_for_copies(int pending);

// mbarrier: `barrier` lies in shared memory. An arrival expects `bytes` more.
void init_barrier(uint64_t* barrier, int arrivals);
void publish_barriers();
void arrive(uint64_t* barrier, int bytes);
void wait(uint64_t* barrier, int parity);
// bar.sync and bar.arrive.
void meet(int id, int threads, bool stay);
// cp.async.bulk.tensor: carried out when a thread waits for the barrier. `map` is a CUtensorMap.
struct Coordinates {
  int at[4];
};
void copy_box(void* shared, const void* map, uint64_t* barrier, const Coordinates& coordinates);

// fence.proxy.async: from here on multiplications see what has been written to shared memory. (On a card, what this
// thread has written; here, what any thread has.)
void fence_async_proxy();
// setmaxnreg: registers of each thread of this warp; all warps of a warpgroup must set the same.
void set_registers(int count);

// wgmma: carried out when it is waited for. Until then its accumulators are NaN.
struct Multiplication {
  uint64_t a, b;     // descriptors
  int columns;       // of b and of the result
  bool registers;    // a is in registers
  bool mn_major;     // b is; K-major otherwise, as a always is
  bool accumulate;
  float (*wide)(uint16_t);
};
void multiply_later(const Multiplication& what, float* d, const uint32_t* a);
void fence_multiplications();
void commit_multiplications();
void wait_for_multiplications(int pending);
// Addresses in the shared window, which does not begin at 0; and `bytes` if a descriptor can hold them as a stride.
uint32_t shared_address(const void* pointer);
const unsigned char* shared_pointer(uint32_t address, uint32_t bytes, const char* what);
uint32_t descriptor_stride(int bytes);
// Fails unless the eight rows of 16 bytes that ldmatrix reads at once lie in all the banks. On a card that is no error,
// but takes two to eight times as long.
void require_all_banks(const Brought<const unsigned char*>& rows, int first, const char* what);

// Runs a launch; false if an assertion failed, which ends it.
bool run(dim3 grid, dim3 block, size_t shared, void (*kernel)(void*), void* arguments);
[[noreturn]] void fail_assertion(const char* condition);

}  // namespace emulated

// Of the thread that runs. Not macros: cudaLaunchConfig_t has members of these names.
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

// ---- The language ---------------------------------------------------------------------------------------------------

inline void __syncthreads() { emulated::barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulated::exchange(mask, "syncwarp", 0); }
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return emulated::exchange(mask, "shfl_xor", value)[emulated::thread().lane ^ lanes];
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emulated::exchange(mask, "shfl", value)[lane % emulated::kWarp];
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes) {
  const int from = emulated::thread().lane + static_cast<int>(lanes);
  const auto all = emulated::exchange(mask, "shfl_down", value);
  return from < emulated::kWarp ? all[from] : value;
}
inline int __any_sync(unsigned mask, int value) {
  const auto all = emulated::exchange(mask, "any", value);
  for (int lane = 0; lane < emulated::kWarp; ++lane) {
    if (mask >> lane & 1 && all[lane]) return 1;
  }
  return 0;
}
// Only one fiber runs at a time.
template <typename T>
T atomicAdd(T* to, T value) {
  const T before = *to;
  *to += value;
  return before;
}
inline void __threadfence() {}
template <typename T>
T __ldg(const T* from) {
  return *from;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
using std::max;
using std::min;

// ---- The run-time library -------------------------------------------------------------------------------------------

#define CUDART_VERSION 13000

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorAssert = 710 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrL2CacheSize,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
};
using cudaStream_t = void*;
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

inline const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorAssert) return "device-side assert triggered";
  return error == cudaSuccess ? "no error" : "invalid value";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
// AURA_EMULATED_SM (86 unless set) decides what the card has, AURA_EMULATED_MULTIPROCESSORS how many (3 unless set).
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int bytes) {
  int most = 0;
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
  return bytes <= most ? cudaSuccess : cudaErrorInvalidValue;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1,
  cudaDriverEntryPointVersionNotSufficent = 2,  // spelt so
};
enum cudaGetDriverEntryPointFlags { cudaEnableDefault = 0 };
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* found = nullptr);

template <typename... Wanted, typename... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Wanted...), Given&&... given) {
  struct Call {
    void (*kernel)(Wanted...);
    std::tuple<std::remove_cv_t<Wanted>...> arguments;
  } call{kernel, {std::forward<Given>(given)...}};
  int most = 0;
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
  const dim3 &grid = config->gridDim, &block = config->blockDim;
  if (config->dynamicSmemBytes > static_cast<size_t>(most) || block.x * block.y * block.z > 1024 ||
      grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535) {
    return cudaErrorInvalidValue;
  }
  const bool whole = emulated::run(grid, block, config->dynamicSmemBytes,
                                   [](void* pointer) {
                                     Call& all = *static_cast<Call*>(pointer);
                                     std::apply(all.kernel, all.arguments);
                                   },
                                   &call);
  return whole ? cudaSuccess : cudaErrorAssert;  // a card says so later, to whoever waits for it
}
