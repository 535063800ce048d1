// aura::rotary: checks, the output, and the rows shared out among threads, or handed to the GPU.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu/kernels.h"
#include "ops.h"

TORCH_LIBRARY_FRAGMENT(aura, m) {
  // qkv: [B, T, 3, H, D]; cosine, sine: [T, D / 2], float32, float64 for float64. back: turn the other way.
  m.def("rotary(Tensor qkv, Tensor cosine, Tensor sine, bool back) -> Tensor");
}

namespace aura {
namespace {

using at::Tensor;

void check_angles(const Tensor& angles, int64_t length, int64_t half, at::ScalarType wanted) {
  TORCH_CHECK(angles.dim() == 2 && angles.size(0) == length && angles.size(1) == half &&
                  angles.scalar_type() == wanted,
              "rotary: cosine and sine must be [", length, ", ", half, "] of ", wanted, ", one is ", angles.sizes(), " of ",
              angles.scalar_type());
}

Tensor rotary(const Tensor& qkv, const Tensor& cosine_given, const Tensor& sine_given, bool back) {
  TORCH_CHECK(qkv.dim() == 5 && qkv.size(2) == 3 && qkv.size(4) % 2 == 0,
              "rotary: qkv must be [B, T, 3, H, D] with D even, is ", qkv.sizes());
  const cuda::Kernels* gpu = gpu_kernels(qkv, "rotary");
  const int type = gpu ? 0 : kernel_type(qkv, "rotary");
  const int64_t length = qkv.size(1), heads = qkv.size(3), half = qkv.size(4) / 2, row = 3 * heads * 2 * half;
  const at::ScalarType wanted = qkv.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  for (const Tensor& angles : {cosine_given, sine_given}) {
    check_angles(angles, length, half, wanted);
    same_device("rotary", qkv, angles);
  }
  const Tensor y = at::empty(qkv.sizes(), qkv.options());
  if (y.numel() == 0) return y;
  const Tensor x = qkv.reshape({qkv.size(0) * length, row});  // a view where rows are evenly apart
  const Tensor whole = x.stride(1) == 1 || row == 1 ? x : x.contiguous();
  const Tensor cosine = cosine_given.contiguous(), sine = sine_given.contiguous();

  RotaryRows job{};
  job.x = whole.const_data_ptr();
  job.y = y.mutable_data_ptr();
  job.stride = whole.stride(0);
  job.length = length;
  job.heads = heads;
  job.half = half;
  job.cosine = cosine.const_data_ptr();
  job.sine = sine.const_data_ptr();
  job.back = back;
  if (gpu) {
    const cuda::Element element = gpu_element(qkv, "rotary");
    on_gpu(gpu, qkv, "rotary",
           [&](void* stream) { return gpu->rotary.rotary(job, whole.size(0), element, stream); });
    return y;
  }
  const auto run = kernels().rotary.rotary[type];
  at::parallel_for(0, whole.size(0), grain(row), [&](int64_t begin, int64_t end) { run(job, begin, end); });
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(aura, CPU, m) { m.impl("rotary", &rotary); }
TORCH_LIBRARY_IMPL(aura, CUDA, m) { m.impl("rotary", &rotary); }

}  // namespace aura
