// aura::total_norm, for a GPU alone: checks, and where the tensors lie.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "ops.h"

// The Euclidean norm of all tensors together, a scalar. All are float32, contiguous and on one GPU.
TORCH_LIBRARY_FRAGMENT(aura, m) { m.def("total_norm(Tensor[] tensors) -> Tensor"); }

namespace aura {
namespace {

at::Tensor total_norm(at::TensorList tensors) {
  const char* op = "total_norm";
  const cuda::Kernels* gpu = gpu_kernels(tensors[0], op);
  TORCH_CHECK(gpu != nullptr, op, ": only for tensors on a GPU");
  std::vector<const void*> places;
  std::vector<int64_t> sizes;
  for (const at::Tensor& t : tensors) {
    TORCH_CHECK(t.scalar_type() == at::kFloat && t.is_contiguous(), op, ": all must be contiguous and float32");
    same_device(op, tensors[0], t);
    places.push_back(t.const_data_ptr());
    sizes.push_back(t.numel());
  }
  const auto count = static_cast<int64_t>(sizes.size());
  const at::Tensor norm = at::empty({}, tensors[0].options());
  const at::Tensor partials = at::empty({gpu->total_norm.partials(sizes.data(), count)}, tensors[0].options());
  on_gpu(gpu, tensors[0], op, [&](void* stream) {
    return gpu->total_norm.norm(places.data(), sizes.data(), count, partials.mutable_data_ptr<float>(),
                                norm.mutable_data_ptr<float>(), stream);
  });
  return norm;
}

}  // namespace

TORCH_LIBRARY_IMPL(aura, CPU, m) { m.impl("total_norm", &total_norm); }
TORCH_LIBRARY_IMPL(aura, CUDA, m) { m.impl("total_norm", &total_norm); }

}  // namespace aura
