// Attention with document bounds that nobody has checked, as on a GPU: the operators would refuse wrong ones, since the
// emulator's tensors are in host memory, where they look.
#include <memory>

#include "cuda/kernels.h"

// Forward and backward, causal, of q, k and v packed as [1, rows, 3, heads, width] in float16. Null, or why not.
extern "C" const char* attention_with_bounds(const void* qkv, const void* dout, void* dqkv, void* out, void* lse,
                                             const int64_t* bounds, int64_t documents, int64_t rows, int64_t heads,
                                             int64_t width) {
  using namespace aura;
  const cuda::AttentionKernels kernels = cuda::attention_kernels();
  const Strides strides{rows * 3 * heads * width, 3 * heads * width, width};
  const auto part = [&](const void* tensor, int64_t number) {
    return static_cast<const uint16_t*>(tensor) + number * heads * width;
  };
  const auto writable = [&](int64_t number) { return const_cast<uint16_t*>(part(dqkv, number)); };
  AttentionInputs in{};
  in.q = part(qkv, 0), in.k = part(qkv, 1), in.v = part(qkv, 2);
  in.q_strides = in.k_strides = in.v_strides = strides;
  in.queries = rows;
  in.heads = heads;
  in.width = width;
  in.causal = true;
  in.scale = 0.125;
  const cuda::AttentionShape shape{1, rows, nullptr, bounds, documents, true};
  const std::unique_ptr<unsigned char[]> workspace(new unsigned char[kernels.workspace(in, shape)]);
  int counter = 0;
  const char* const problem = kernels.forward({in, out, lse}, shape, &counter, nullptr);
  if (problem) return problem;
  const AttentionBackward backward{in,      dout,    out,     lse,     writable(0), writable(1), writable(2),
                                   strides, strides, strides, nullptr, 0};
  return kernels.backward(backward, shape, workspace.get(), nullptr);
}
