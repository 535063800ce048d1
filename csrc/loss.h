// Cross-entropy: what the kernels are given.
#pragma once

#include <cstdint>

namespace aura {

// Rows of logits become their losses and, where wanted, their own gradients.
struct CrossEntropyRows {
  void* logits;  // [rows, classes], the elements of a row contiguous
  int64_t row_stride, classes;
  const int64_t* targets;  // in [0, classes), or ignore_index
  int64_t ignore_index;
  double* losses;  // in nats; 0 where ignored
  bool gradient;   // logits := softmax(logits) - onehot(target); 0 where ignored
};

// Functions by element type: float, bfloat16, double.
struct LossKernels {
  void (*cross_entropy[3])(const CrossEntropyRows&, int64_t begin, int64_t end);
};

}  // namespace aura
