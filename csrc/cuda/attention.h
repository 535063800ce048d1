// The attention of attention.h on a GPU.
#pragma once

#include <cstdint>

#include "../attention.h"  // not this file, which is what quotes alone would find

namespace aura {
namespace cuda {

struct AttentionShape {
  int64_t batch;  // 1 where there are documents
  int64_t keys;   // S: the rows of a batch entry of k and v
  const int64_t* lengths;     // [batch], on the device; null: all keys count
  const int64_t* cu_seqlens;  // [documents + 1], on the device; null: none
  int64_t documents;
  bool half;  // elements are fp16, else bf16
};

struct AttentionKernels {
  // Whether a shape can be computed: head widths of up to 128 that are multiples of 8, addresses and strides of whole
  // 16 bytes, a scale above 0.
  bool (*takes)(const AttentionInputs&);
  // in.sequences is not read. counter: an int on the device that the call may overwrite.
  const char* (*forward)(const AttentionForward&, const AttentionShape&, int* counter, void* stream);
  // How many bytes of device memory backward needs besides its outputs.
  int64_t (*workspace)(const AttentionInputs&, const AttentionShape&);
  const char* (*backward)(const AttentionBackward&, const AttentionShape&, void* workspace, void* stream);
};

AttentionKernels attention_kernels();

}  // namespace cuda
}  // namespace aura
