// The table of attention. Included by kernels.cpp alone.
#pragma once

#include "cpu/attention_backward.inl"
#include "cpu/attention_forward.inl"

namespace aura {
namespace AURA_ISA {

template <typename T>
void attention_forward(const AttentionForward& job, const AttentionTask& task, void* scratch) {
  return job.in.dropout.threshold ? forward_queries<T, true>(job, task, scratch)
                                  : forward_queries<T, false>(job, task, scratch);
}

template <typename T>
void attention_backward(const AttentionBackward& job, const AttentionTask& task, int64_t split, void* scratch) {
  return job.in.dropout.threshold ? backward_keys<T, true>(job, task, split, scratch)
                                  : backward_keys<T, false>(job, task, split, scratch);
}

inline int64_t attention_scratch(int64_t width, int64_t keys) {
  using Pairs = Operand<bfloat16>;  // or float
  const int64_t padded = round_up(width, kWidth<float>), q = larger(kQueryBlock<float>, kQueryBlock<Pairs>);
  const int64_t scores = larger(kKeyBlock<float> * kQueryBlock<float>, kKeyBlock<Pairs> * kQueryBlock<Pairs>);
  const int64_t copies = kDotProducts ? 5 : 4;  // of keys and values, in backward: pairs need the keys in both layouts
  return 6 * q * padded + 3 * scores + copies * (keys + 1) * padded + 2 * q + 16 * 16;
}

constexpr AttentionKernels kAttention = {
    {kQueryBlock<float>, kQueryBlock<Operand<bfloat16>>, kQueryBlock<double>},
    attention_scratch,
    {attention_forward<float>, attention_forward<bfloat16>, attention_forward<double>},
    {attention_backward<float>, attention_backward<bfloat16>, attention_backward<double>},
};

}  // namespace AURA_ISA
}  // namespace aura
