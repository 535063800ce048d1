// How every kernel is queued.
#pragma once

#include <cuda_runtime.h>

namespace aura {
namespace cuda {

// Queue a grid of blocks with `shared` bytes of dynamic shared memory each; null, or why not.
template <typename... Wanted, typename... Given>
const char* launch(void (*kernel)(Wanted...), dim3 grid, dim3 block, int shared, void* stream, const Given&... given) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaError_t error = cudaSuccess;
  if (shared > 48 * 1024) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, given...);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // what is reported here must not be found by others
  return cudaGetErrorString(error);
}

}  // namespace cuda
}  // namespace aura
