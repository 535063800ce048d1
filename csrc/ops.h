// What the operators of every family share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "cuda/kernels.h"
#include "dropout.h"

namespace aura {

// Rows a thread must have to be worth waking: about 10 microseconds of work.
inline int64_t grain(int64_t columns) { return std::max<int64_t>(1, 32768 / columns); }

// The kernels for a tensor on a GPU, null for one in host memory. Raises where there are none.
const cuda::Kernels* gpu_kernels(const at::Tensor& t, const char* op);

// The same, null where there are none too.
const cuda::Kernels* gpu_kernels_if_any(const at::Tensor& t);

// Queues work on the current stream of the tensor's GPU: queue(stream) returns null or why it could not.
template <typename Queue>
void on_gpu(const cuda::Kernels* kernels, const at::Tensor& t, const char* op, Queue queue) {
  const c10::DeviceGuard guard(t.device());
  const char* problem = queue(kernels->stream(t.is_cuda() ? t.get_device() : 0));
  TORCH_CHECK(problem == nullptr, op, ": ", problem);
}

// The number of the tensor's element type in the CPU's tables of kernels.
inline int kernel_type(const at::Tensor& t, const char* op) {
  switch (t.scalar_type()) {
    case at::kFloat: return 0;
    case at::kBFloat16: return 1;
    case at::kDouble: return 2;
    default: TORCH_CHECK(false, op, ": dtype ", t.scalar_type(), " is not float32, bfloat16 or float64");
  }
}

// The same on a GPU.
inline cuda::Element gpu_element(const at::Tensor& t, const char* op) {
  switch (t.scalar_type()) {
    case at::kFloat: return cuda::Element::kFloat;
    case at::kBFloat16: return cuda::Element::kBFloat16;
    case at::kHalf: return cuda::Element::kHalf;
    default: TORCH_CHECK(false, op, ": dtype ", t.scalar_type(), " is not float32, bfloat16 or float16, on a GPU");
  }
}

inline void same_device(const char* op, const at::Tensor& x, const at::Tensor& t) {
  TORCH_CHECK(!t.defined() || t.device() == x.device(), op, ": one tensor is on ", x.device(), ", another on ",
              t.device());
}

// Dropout::threshold, of a probability in [0, 1).
inline uint32_t dropout_threshold(double probability) {
  return static_cast<uint32_t>(std::lround(probability * 65536));
}

// `seed`: int64, one element, on the CPU; needed when probability > 0.
inline Dropout dropout_of(double probability, const std::optional<at::Tensor>& seed) {
  TORCH_CHECK(probability >= 0.0 && probability < 1.0, "dropout ", probability, " is not in [0, 1)");
  Dropout dropout;
  dropout.threshold = dropout_threshold(probability);
  TORCH_CHECK(dropout.threshold < 65536, "dropout ", probability, " leaves nothing");
  if (dropout.threshold == 0) return dropout;
  TORCH_CHECK(seed.has_value() && seed->scalar_type() == at::kLong && seed->numel() == 1 && seed->device().is_cpu(),
              "dropout needs a seed: an int64 tensor of one element on the CPU");
  dropout.seed = static_cast<uint64_t>(*seed->const_data_ptr<int64_t>());
  return dropout;
}

// x [..., C] @ weight [N, C] transposed, + bias [N], of one dtype; in float32 on a CPU by oneDNN. Autograd has no part in
// it.
at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

}  // namespace aura
