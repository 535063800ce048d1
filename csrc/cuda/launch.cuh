// How every kernel is queued, and in what grid.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <initializer_list>

namespace aura {
namespace cuda {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A grid of x by y blocks, or of as many as a grid may have: kernels then go on in steps of its size.
inline dim3 grid_of(int64_t x, int64_t y = 1) {
  return dim3(static_cast<unsigned>(std::min<int64_t>(x, INT_MAX)), static_cast<unsigned>(std::min<int64_t>(y, 65535)));
}

// An attribute of the current device; 0 where it cannot be read.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  const bool known = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess;
  return known ? value : 0;
}

// Whether every tensor begins on 16 bytes.
inline bool aligned(std::initializer_list<const void*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const void* tensor) {
    return reinterpret_cast<uintptr_t>(tensor) % 16 == 0;
  });
}

// Why a call failed.
inline const char* report(cudaError_t error) {
  cudaGetLastError();  // what is reported here must not be found by others
  return cudaGetErrorString(error);
}

// Queue a grid of blocks with `shared` bytes of dynamic shared memory each; null, or why not. early: see launch_early.
template <typename... Wanted, typename... Given>
const char* queue_grid(bool early, void (*kernel)(Wanted...), dim3 grid, dim3 block, int shared, void* stream,
                       const Given&... given) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  cudaError_t error = cudaSuccess;
  if (shared > 48 * 1024) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, given...);
  return error == cudaSuccess ? nullptr : report(error);
}

template <typename... Wanted, typename... Given>
const char* launch(void (*kernel)(Wanted...), dim3 grid, dim3 block, int shared, void* stream, const Given&... given) {
  return queue_grid(false, kernel, grid, block, shared, stream, given...);
}

// The same for a kernel that begins with begin_early() (ptx.cuh): its blocks are launched while the kernel before it
// ends or, if that calls let_next_begin(), is at work. A kernel of a few microseconds saves a good part of its time so.
template <typename... Wanted, typename... Given>
const char* launch_early(void (*kernel)(Wanted...), dim3 grid, dim3 block, int shared, void* stream,
                         const Given&... given) {
  const bool can = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  return queue_grid(can, kernel, grid, block, shared, stream, given...);
}

}  // namespace cuda
}  // namespace aura
