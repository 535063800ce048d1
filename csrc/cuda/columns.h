// The sums of the columns of a matrix on a GPU.
#pragma once

#include <cstdint>

#include "cuda/element.h"

namespace aura {
namespace cuda {

struct ColumnKernels {
  // How many partial sums, each float [columns], sum() makes.
  int64_t (*partials)(int64_t rows, int64_t columns, Element);
  // x [rows, columns] without gaps; sums: float [columns]. Added up in the same order always.
  const char* (*sum)(const void* x, int64_t rows, int64_t columns, Element, float* partials, float* sums, void* stream);
};

ColumnKernels column_kernels();

}  // namespace cuda
}  // namespace aura
