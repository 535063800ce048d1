// Products of float32 on a CPU. torch gives them to MKL, which on AMD's Zen 5 is no faster than vectors of 256 bits are;
// oneDNN, which torch has too, takes those of 512. One core of an EPYC: 110 GFLOP/s by the one, 240 by the other
// (benchmarks/kernels.py --only linear). aura/products.py says where.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/linear.h>

#include "ops.h"

namespace aura {
namespace {

constexpr int64_t kWorthwhile = int64_t{1} << 22;  // multiplications; of fewer, the way to oneDNN takes too long

// torch's operator of oneDNN for x @ weight.T + bias, if it has one.
const std::optional<c10::OperatorHandle>& onednn() {
  static const std::optional<c10::OperatorHandle> op = [] {
    auto found = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    return found && found->schema().arguments().size() == 6 ? found : std::nullopt;
  }();
  return op;
}

// oneDNN takes a matrix by its strides, but not any.
at::Tensor dense(const at::Tensor& matrix) {
  const int64_t row = matrix.stride(0), column = matrix.stride(1);
  const bool by_rows = column == 1 && row >= matrix.size(1), by_columns = row == 1 && column >= matrix.size(0);
  return by_rows || by_columns ? matrix : matrix.contiguous();
}

}  // namespace

at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  if (!x.is_cpu() || x.scalar_type() != at::kFloat || x.numel() * weight.size(0) < kWorthwhile || !onednn()) {
    return at::linear(x, weight, bias);
  }
  TORCH_CHECK(weight.dim() == 2 && x.size(-1) == weight.size(1), "linear: x is ", x.sizes(), ", the weight ",
              weight.sizes());
  std::vector<c10::IValue> stack{x.reshape({-1, x.size(-1)}), dense(weight), bias, "none",
                                 c10::List<std::optional<at::Scalar>>(), ""};
  onednn()->callBoxed(&stack);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = weight.size(0);
  return stack.at(0).toTensor().view(shape);
}

}  // namespace aura
