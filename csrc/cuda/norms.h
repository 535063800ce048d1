// The norms of norms.h on a GPU.
#pragma once

#include <cstdint>

#include "../norms.h"  // not this file, which is what quotes alone would find

namespace aura {
namespace cuda {

struct NormKernels {
  // All rows. Types: those of norms.h except kDouble. narrow: y (in backward dy) has the type of x and not that of the
  // residual; false where both have the same.
  const char* (*forward)(const NormForward&, int64_t rows, bool rms, NormTypes types, bool narrow, void* stream);
  // How many partial sums backward makes for these rows: each float [columns], or [2 columns] where there is a mean.
  int64_t (*partials)(int64_t rows, int64_t columns, NormTypes types);
  // All rows; dweight [columns] of the type of weight, dbias likewise or null. Sums are added up in the same order
  // always.
  const char* (*backward)(const NormBackward&, int64_t rows, NormTypes types, bool narrow, void* partials,
                          void* dweight, void* dbias, void* stream);
};

NormKernels norm_kernels();

}  // namespace cuda
}  // namespace aura
