// aura::cross_entropy_chunk_ on the CPU: checks, and the rows shared out among threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu/kernels.h"
#include "ops.h"

TORCH_LIBRARY_FRAGMENT(aura, m) {
  // logits: [rows, classes]; targets: int64 [rows]; gives the losses in nats, float64 [rows], 0 where ignored. With
  // `gradient` the logits become softmax(logits) - onehot(targets), 0 where ignored.
  m.def("cross_entropy_chunk_(Tensor(a!) logits, Tensor targets, int ignore_index, bool gradient) -> Tensor");
}

namespace aura {
namespace {

using at::Tensor;

Tensor cross_entropy_chunk_(Tensor& logits, const Tensor& targets_given, int64_t ignore_index, bool gradient) {
  TORCH_CHECK(logits.dim() == 2 && (logits.stride(1) == 1 || logits.size(1) == 1),
              "cross_entropy_chunk_: logits must be [rows, classes] with contiguous rows, is ", logits.sizes(),
              " with strides ", logits.strides());
  const int64_t rows = logits.size(0), classes = logits.size(1);
  TORCH_CHECK(targets_given.dim() == 1 && targets_given.size(0) == rows && targets_given.scalar_type() == at::kLong,
              "cross_entropy_chunk_: targets must be int64 [", rows, "], is ", targets_given.scalar_type(), " ",
              targets_given.sizes());
  const int type = kernel_type(logits, "cross_entropy_chunk_");
  const Tensor targets = targets_given.contiguous();
  const int64_t* target = targets.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; ++row) {
    TORCH_CHECK_INDEX(target[row] == ignore_index || (target[row] >= 0 && target[row] < classes), "target ",
                      target[row], " is neither in [0, ", classes, ") nor the ignored ", ignore_index);
  }

  const Tensor losses = at::empty({rows}, logits.options().dtype(at::kDouble));
  CrossEntropyRows job{};
  job.logits = logits.mutable_data_ptr();
  job.row_stride = logits.stride(0);
  job.classes = classes;
  job.targets = target;
  job.ignore_index = ignore_index;
  job.losses = losses.mutable_data_ptr<double>();
  job.gradient = gradient;
  const auto run = kernels().loss.cross_entropy[type];
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) { run(job, begin, end); });
  return losses;
}

}  // namespace

TORCH_LIBRARY_IMPL(aura, CPU, m) { m.impl("cross_entropy_chunk_", &cross_entropy_chunk_); }

}  // namespace aura
