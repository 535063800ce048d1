// Layer and RMS normalisation, with the residual addition and its dropout before them: what the kernels are given.
#pragma once

#include <cstdint>

#include "dropout.h"

namespace aura {

// Element types of x, of the residual (y and its gradient are of that type too, but see cuda/norms.h), and of weight
// and bias: one name stands for all three; of two, the first stands for x and residual. The CPU has no kernels for
// fp16, the GPU none for double.
enum class NormTypes {
  kFloat,
  kBFloat16,
  kBFloat16Float,
  kBFloat16FloatFloat,
  kDouble,
  kHalf,
  kHalfFloat,
  kHalfFloatFloat
};
constexpr int kNormTypes = 8;

// All tensors are contiguous [rows, columns], weight and bias [columns], mean and rstd [rows] in float (double for
// double).
struct NormForward {
  int64_t columns;
  double eps;
  const void *x, *weight;
  const void* bias;      // null: none
  const void* residual;  // null: y is the norm of x; then x is of the residual's type
  void* new_residual;    // residual + dropout(x)
  void *y, *rstd;
  void* y_like_x;  // y once more, in the type of x; null: not wanted
  void* mean;      // layer normalisation only
  Dropout dropout;
};

struct NormBackward {
  int64_t columns;
  const void *dy, *weight, *rstd;
  const void* dy_like_x;       // what y_like_x brings, to be added to dy; null: nothing
  const void* mean;            // layer normalisation only
  const void* x;               // what was normalised: x or new_residual, of the residual's type
  const void* d_new_residual;  // null: zeros
  void* dresidual;             // the gradient of what was normalised
  void* dx;                    // dropout of dresidual in the type of x; null where both are the same
  Dropout dropout;
};

struct NormKernels {
  // Rows [begin, end).
  using Forward = void (*)(const NormForward&, int64_t begin, int64_t end);
  // Rows [begin, end); writes their dweight to partial[0 .. columns) and, of layer normalisation, their dbias to the
  // `columns` after. The partial sums are float (double for double).
  using Backward = void (*)(const NormBackward&, int64_t begin, int64_t end, void* partial);
  // out[c] = sum over the blocks of partials[block * stride + c] for the columns [begin, end).
  using Reduce = void (*)(const void* partials, int64_t blocks, int64_t stride, int64_t begin, int64_t end, void* out);

  Forward layer_norm[kNormTypes], rms_norm[kNormTypes];
  Backward layer_norm_backward[kNormTypes], rms_norm_backward[kNormTypes];
  Reduce reduce[kNormTypes];
};

}  // namespace aura
