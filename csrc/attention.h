// Scaled dot-product attention: what the kernels are given. The algorithm is explained in docs/kernels.md.
#pragma once

#include <cstdint>

#include "dropout.h"

namespace aura {

// Where element (batch, row, head, d) of a tensor [B, T, H, D] lies, counted in elements; d is contiguous.
struct Strides {
  int64_t batch, row, head;
};

// Rows [first, first + queries) of one batch entry attend to `keys` rows from `first` on, and to no others.
struct Sequence {
  int64_t batch, first, queries, keys;
};

// A piece of work: a range of queries of one head in forward, a range of keys of one head in backward.
struct AttentionTask {
  int64_t sequence, head, begin, end;
};

struct AttentionInputs {
  const void *q, *k, *v;
  Strides q_strides, k_strides, v_strides;
  const Sequence* sequences;
  int64_t queries;  // T: the rows of a batch entry of q
  int64_t heads, width;
  bool causal;
  double scale;
  Dropout dropout;
};

struct AttentionForward {
  AttentionInputs in;
  void* out;  // [B, T, H, D], contiguous
  // [B, T, H]: logarithm of the sum of exponentials, to base 2 as the kernels compute: a change of base would round what
  // backward takes powers of. Float, double for double.
  void* lse;
};

struct AttentionBackward {
  AttentionInputs in;
  const void *dout, *out, *lse;  // contiguous, as in forward
  void *dq, *dk, *dv;
  Strides dq_strides, dk_strides, dv_strides;
  // Where keys are split over several tasks: [splits, B, T, H, D] in float (double), zeros; else null.
  void* dq_parts;
  int64_t dq_part_size;
};

// Functions by element type: float, bfloat16, double.
struct AttentionKernels {
  int query_block[3];
  // How many floats (doubles) of scratch memory one thread needs; `keys` is the longest range of keys of a task.
  int64_t (*scratch)(int64_t width, int64_t keys);
  void (*forward[3])(const AttentionForward&, const AttentionTask&, void* scratch);
  // `split` numbers the key ranges of one head.
  void (*backward[3])(const AttentionBackward&, const AttentionTask&, int64_t split, void* scratch);
};

}  // namespace aura
