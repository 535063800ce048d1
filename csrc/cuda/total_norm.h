// The norm of many tensors together on a GPU.
#pragma once

#include <cstdint>

namespace aura {
namespace cuda {

struct TotalNormKernels {
  // How many partial sums, each a float, norm() makes of tensors of these sizes.
  int64_t (*partials)(const int64_t* sizes, int64_t count);
  // tensors: `count` pointers to float [sizes[i]] without gaps; norm: one float. Added up in the same order always.
  const char* (*norm)(const void* const* tensors, const int64_t* sizes, int64_t count, float* partials, float* norm,
                      void* stream);
};

TotalNormKernels total_norm_kernels();

}  // namespace cuda
}  // namespace aura
