// Products of float32 on a CPU. torch gives them to MKL, which on AMD's Zen 5 is no faster than vectors of 256 bits are;
// oneDNN, which torch has too, takes those of 512. One core of an EPYC: 110 GFLOP/s by the one, 240 by the other
// (benchmarks/kernels.py --only linear). aura/products.py says where.
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <algorithm>

#include "ops.h"

namespace aura {
namespace {

constexpr int64_t kTile = 16;        // a cache line of floats
constexpr int64_t kGrain = 1 << 15;  // floats that one thread copies sooner than two

// torch's operator of oneDNN for x @ weight.T + bias, if it has one.
const std::optional<c10::OperatorHandle>& onednn() {
  static const std::optional<c10::OperatorHandle> op = [] {
    auto found = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    return found && found->schema().arguments().size() == 6 ? found : std::nullopt;
  }();
  return op;
}

// to[j * to_row + i] = from[i * from_row + j] for a tile of rows x columns, neither more than kTile.
void transpose_tile(const float* from, int64_t from_row, float* to, int64_t to_row, int64_t rows, int64_t columns) {
  if (rows < kTile || columns < kTile) {
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t i = 0; i < rows; ++i) to[j * to_row + i] = from[i * from_row + j];
    }
    return;
  }
  float tile[kTile][kTile];  // what is written by columns must be near: addresses a power of two apart share few lines
  for (int64_t i = 0; i < kTile; ++i) {
    for (int64_t j = 0; j < kTile; ++j) tile[i][j] = from[i * from_row + j];
  }
  for (int64_t j = 0; j < kTile; ++j) {
    for (int64_t i = 0; i < kTile; ++i) to[j * to_row + i] = tile[i][j];
  }
}

// x [rows, columns] of float32 as [columns, rows], copied. torch does it with one thread.
at::Tensor transposed(const at::Tensor& x) {
  TORCH_CHECK(x.dim() == 2 && x.is_cpu() && x.scalar_type() == at::kFloat && (x.stride(1) == 1 || x.size(1) < 2),
              "transposed: x must be float32 [rows, columns] on the CPU, its rows whole, is ", x.scalar_type(), " ",
              x.sizes(), " of strides ", x.strides());
  const int64_t rows = x.size(0), columns = x.size(1), stride = x.stride(0);
  const at::Tensor copy = at::empty({columns, rows}, x.options());
  const float* from = x.const_data_ptr<float>();
  float* to = copy.mutable_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(1, kGrain / (kTile * std::max<int64_t>(1, columns)));
  at::parallel_for(0, (rows + kTile - 1) / kTile, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first * kTile; i < std::min(rows, last * kTile); i += kTile) {
      for (int64_t j = 0; j < columns; j += kTile) {
        transpose_tile(from + i * stride + j, stride, to + j * rows + i, rows, std::min(kTile, rows - i),
                       std::min(kTile, columns - j));
      }
    }
  });
  return copy;
}

// oneDNN wants the rows of its first operand one after the other. Python's are tensors without data, as torch's
// FakeTensorMode has them.
at::Tensor by_rows(const at::Tensor& x) {
  const bool by_columns = !x.is_contiguous() && x.stride(0) == 1;
  return by_columns && !x.key_set().has(c10::DispatchKey::Python) ? transposed(x.t()) : x;
}

// oneDNN takes a matrix by its strides, but not any.
at::Tensor dense(const at::Tensor& matrix) {
  const int64_t row = matrix.stride(0), column = matrix.stride(1);
  const bool by_rows = column == 1 && row >= matrix.size(1), by_columns = row == 1 && column >= matrix.size(0);
  return by_rows || by_columns ? matrix : matrix.contiguous();
}

}  // namespace

at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  if (!x.is_cpu() || x.scalar_type() != at::kFloat || x.numel() == 0 || weight.numel() == 0 || !onednn()) {
    return at::linear(x, weight, bias);
  }
  TORCH_CHECK(weight.dim() == 2 && x.size(-1) == weight.size(1), "linear: x is ", x.sizes(), ", the weight ",
              weight.sizes());
  // Of a bias it takes the first elements in memory.
  const auto whole = bias ? std::make_optional(bias->expand({weight.size(0)}).contiguous()) : std::nullopt;
  std::vector<c10::IValue> stack{by_rows(x.reshape({-1, x.size(-1)})), dense(weight), whole, "none",
                                 c10::List<std::optional<at::Scalar>>(), ""};
  onednn()->callBoxed(&stack);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = weight.size(0);
  return stack.at(0).toTensor().view(shape);
}

TORCH_LIBRARY_FRAGMENT(aura, m) { m.def("transposed(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(aura, CPU, m) { m.impl("transposed", &transposed); }

}  // namespace aura
