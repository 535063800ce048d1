// Products of float32 on a CPU. torch gives them to MKL, which on processors of others than Intel leaves the vectors of
// 512 bits alone; oneDNN, which torch has too, takes them. One core of an EPYC with Zen 5: 110 GFLOP/s by the one, 250
// by the other (benchmarks/kernels.py --only linear).
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/linear.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

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

// Whether oneDNN multiplies float32 much faster than what torch takes. That was measured on AMD's family 1Ah, Zen 5. In
// a Zen 4, whose units have 256 bits, MKL reaches the processor's limit.
bool onednn_is_better() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!at::hasMKL() || !onednn() || !__builtin_cpu_is("amd") || !__get_cpuid(1, &a, &b, &c, &d)) return false;
  const unsigned family = (a >> 8 & 0xF) + (a >> 20 & 0xFF);  // AMD 24594, CPUID Fn0000_0001_EAX
  return family >= 0x1A && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
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

namespace {

at::Tensor mm(const at::Tensor& a, const at::Tensor& b) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2, "mm: a and b must be matrices, are ", a.sizes(), " and ", b.sizes());
  return linear_product(a, b.t(), std::nullopt);
}

}  // namespace

// mm: a [M, K] @ b [K, N], of one dtype.
TORCH_LIBRARY_FRAGMENT(aura, m) {
  m.def("onednn_is_better() -> bool", &onednn_is_better);
  m.def("mm(Tensor a, Tensor b) -> Tensor");
}

TORCH_LIBRARY_IMPL(aura, CPU, m) { m.impl("mm", &mm); }

}  // namespace aura
