// aura::cross_entropy_chunk_: checks, and the rows shared out among threads, or handed to the GPU.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu/kernels.h"
#include "ops.h"

TORCH_LIBRARY_FRAGMENT(aura, m) {
  // logits: [rows, classes]; targets: int64 [rows]; gives the losses in nats, float64 [rows], 0 where ignored. With
  // `gradient` the logits become softmax(logits) - onehot(targets), 0 where ignored. A target that is no class and not
  // ignored is an IndexError; on a GPU, which is not waited for, a failed assertion there.
  m.def("cross_entropy_chunk_(Tensor(a!) logits, Tensor targets, int ignore_index, bool gradient) -> Tensor");
}

namespace aura {
namespace {

using at::Tensor;

void check_targets(const CrossEntropyRows& job, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t target = job.targets[row];
    TORCH_CHECK_INDEX(target == job.ignore_index || (target >= 0 && target < job.classes), "target ", target,
                      " is neither in [0, ", job.classes, ") nor the ignored ", job.ignore_index);
  }
}

Tensor cross_entropy_chunk_(Tensor& logits, const Tensor& targets_given, int64_t ignore_index, bool gradient) {
  TORCH_CHECK(logits.dim() == 2 && (logits.stride(1) == 1 || logits.size(1) == 1),
              "cross_entropy_chunk_: logits must be [rows, classes] with contiguous rows, is ", logits.sizes(),
              " with strides ", logits.strides());
  const int64_t rows = logits.size(0), classes = logits.size(1);
  TORCH_CHECK(targets_given.dim() == 1 && targets_given.size(0) == rows && targets_given.scalar_type() == at::kLong,
              "cross_entropy_chunk_: targets must be int64 [", rows, "], is ", targets_given.scalar_type(), " ",
              targets_given.sizes());
  same_device("cross_entropy_chunk_", logits, targets_given);
  const cuda::Kernels* gpu = gpu_kernels(logits, "cross_entropy_chunk_");
  const int type = gpu ? 0 : kernel_type(logits, "cross_entropy_chunk_");
  const Tensor targets = targets_given.contiguous();
  const Tensor losses = at::empty({rows}, logits.options().dtype(at::kDouble));
  CrossEntropyRows job{};
  job.logits = logits.mutable_data_ptr();
  job.row_stride = logits.stride(0);
  job.classes = classes;
  job.targets = targets.const_data_ptr<int64_t>();
  job.ignore_index = ignore_index;
  job.losses = losses.mutable_data_ptr<double>();
  job.gradient = gradient;
  if (gpu) {
    const cuda::Element element = gpu_element(logits, "cross_entropy_chunk_");
    on_gpu(gpu, logits, "cross_entropy_chunk_",
           [&](void* stream) { return gpu->loss.cross_entropy(job, rows, element, stream); });
    return losses;
  }
  const auto run = kernels().loss.cross_entropy[type];
  check_targets(job, rows);
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) { run(job, begin, end); });
  return losses;
}

}  // namespace

TORCH_LIBRARY_IMPL(aura, CPU, m) { m.impl("cross_entropy_chunk_", &cross_entropy_chunk_); }
TORCH_LIBRARY_IMPL(aura, CUDA, m) { m.impl("cross_entropy_chunk_", &cross_entropy_chunk_); }

}  // namespace aura
