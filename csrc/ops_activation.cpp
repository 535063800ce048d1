// aura::gelu_tanh, aura::swiglu, aura::sigmoid_gate and their gradients on the CPU: checks, outputs, and the elements shared out among
// threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "cpu/kernels.h"
#include "ops.h"

TORCH_LIBRARY_FRAGMENT(aura, m) {
  m.def("gelu_tanh(Tensor x) -> Tensor");
  m.def("gelu_tanh_backward(Tensor dy, Tensor x) -> Tensor");
  // x: [..., 2F], gate before up; y: [..., F].
  m.def("swiglu(Tensor x) -> Tensor");
  m.def("swiglu_backward(Tensor dy, Tensor x) -> Tensor");
  // gate, x, y: [..., C].
  m.def("sigmoid_gate(Tensor gate, Tensor x) -> Tensor");
  m.def("sigmoid_gate_backward(Tensor dy, Tensor gate, Tensor x) -> (Tensor, Tensor)");
}

namespace aura {
namespace {

using at::Tensor;

constexpr int64_t kGrain = 32768;  // elements a thread must have to be worth starting

struct Bytes {
  const Tensor& t;
  const char* from(int64_t element) const {
    return static_cast<const char*>(t.const_data_ptr()) + element * t.element_size();
  }
  char* to(int64_t element) const { return static_cast<char*>(t.mutable_data_ptr()) + element * t.element_size(); }
};

void check_gradient(const char* op, const Tensor& dy, const Tensor& like, at::IntArrayRef sizes) {
  TORCH_CHECK(dy.sizes() == sizes && dy.scalar_type() == like.scalar_type(), op, ": dy must be ", sizes, " of ",
              like.scalar_type(), ", is ", dy.sizes(), " of ", dy.scalar_type());
}

Tensor gelu_tanh(const Tensor& x_given) {
  const Tensor x = x_given.contiguous();
  const int type = kernel_type(x, "gelu_tanh");
  const Tensor y = at::empty_like(x);
  const auto run = kernels().activation.gelu_tanh[type];
  at::parallel_for(0, x.numel(), kGrain, [&](int64_t begin, int64_t end) {
    run(Bytes{x}.from(begin), Bytes{y}.to(begin), end - begin);
  });
  return y;
}

Tensor gelu_tanh_backward(const Tensor& dy_given, const Tensor& x_given) {
  const Tensor dy = dy_given.contiguous(), x = x_given.contiguous();
  const int type = kernel_type(x, "gelu_tanh_backward");
  check_gradient("gelu_tanh_backward", dy, x, x.sizes());
  const Tensor dx = at::empty_like(x);
  const auto run = kernels().activation.gelu_tanh_backward[type];
  at::parallel_for(0, x.numel(), kGrain, [&](int64_t begin, int64_t end) {
    run(Bytes{dy}.from(begin), Bytes{x}.from(begin), Bytes{dx}.to(begin), end - begin);
  });
  return dx;
}

int64_t swiglu_width(const char* op, const Tensor& x) {
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) % 2 == 0, op, ": x must be [..., 2F], is ", x.sizes());
  return x.size(-1) / 2;
}

std::vector<int64_t> half_sizes(const Tensor& x, int64_t width) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = width;
  return sizes;
}

Tensor swiglu(const Tensor& x_given) {
  const Tensor x = x_given.contiguous();
  const int64_t width = swiglu_width("swiglu", x);
  const int type = kernel_type(x, "swiglu");
  const Tensor y = at::empty(half_sizes(x, width), x.options());
  if (y.numel() == 0) return y;
  const auto run = kernels().activation.swiglu[type];
  at::parallel_for(0, y.numel() / width, std::max<int64_t>(1, kGrain / width), [&](int64_t begin, int64_t end) {
    run(Bytes{x}.from(begin * 2 * width), Bytes{y}.to(begin * width), end - begin, width);
  });
  return y;
}

Tensor swiglu_backward(const Tensor& dy_given, const Tensor& x_given) {
  const Tensor dy = dy_given.contiguous(), x = x_given.contiguous();
  const int64_t width = swiglu_width("swiglu_backward", x);
  const int type = kernel_type(x, "swiglu_backward");
  check_gradient("swiglu_backward", dy, x, half_sizes(x, width));
  const Tensor dx = at::empty_like(x);
  if (dx.numel() == 0) return dx;
  const auto run = kernels().activation.swiglu_backward[type];
  at::parallel_for(0, dy.numel() / width, std::max<int64_t>(1, kGrain / width), [&](int64_t begin, int64_t end) {
    run(Bytes{dy}.from(begin * width), Bytes{x}.from(begin * 2 * width), Bytes{dx}.to(begin * 2 * width), end - begin,
        width);
  });
  return dx;
}

// [rows, C] with contiguous rows, a view where the rows of t are evenly apart.
Tensor rows_of(const Tensor& t) {
  const Tensor rows = t.reshape({-1, t.size(-1)});
  return rows.stride(1) == 1 || rows.size(1) == 1 ? rows : rows.contiguous();
}

int gated_type(const char* op, const Tensor& gate, const Tensor& x) {
  TORCH_CHECK(x.dim() >= 1 && gate.sizes() == x.sizes() && gate.scalar_type() == x.scalar_type(), op,
              ": gate and x must be alike, are ", gate.sizes(), " of ", gate.scalar_type(), " and ", x.sizes(), " of ",
              x.scalar_type());
  return kernel_type(x, op);
}

Tensor sigmoid_gate(const Tensor& gate_given, const Tensor& x_given) {
  const int type = gated_type("sigmoid_gate", gate_given, x_given);
  const Tensor y = at::empty(x_given.sizes(), x_given.options());
  if (y.numel() == 0) return y;
  const Tensor gate = rows_of(gate_given), x = rows_of(x_given);
  const int64_t width = x.size(1);
  const auto run = kernels().activation.sigmoid_gate[type];
  at::parallel_for(0, x.size(0), std::max<int64_t>(1, kGrain / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      run(Bytes{gate}.from(row * gate.stride(0)), Bytes{x}.from(row * x.stride(0)), Bytes{y}.to(row * width), width);
    }
  });
  return y;
}

std::tuple<Tensor, Tensor> sigmoid_gate_backward(const Tensor& dy_given, const Tensor& gate_given,
                                                 const Tensor& x_given) {
  const int type = gated_type("sigmoid_gate_backward", gate_given, x_given);
  check_gradient("sigmoid_gate_backward", dy_given, x_given, x_given.sizes());
  const Tensor dgate = at::empty(x_given.sizes(), x_given.options()), dx = at::empty(x_given.sizes(), x_given.options());
  if (dx.numel() == 0) return {dgate, dx};
  const Tensor dy = rows_of(dy_given), gate = rows_of(gate_given), x = rows_of(x_given);
  const int64_t width = x.size(1);
  const auto run = kernels().activation.sigmoid_gate_backward[type];
  at::parallel_for(0, x.size(0), std::max<int64_t>(1, kGrain / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      run(Bytes{dy}.from(row * dy.stride(0)), Bytes{gate}.from(row * gate.stride(0)), Bytes{x}.from(row * x.stride(0)),
          Bytes{dgate}.to(row * width), Bytes{dx}.to(row * width), width);
    }
  });
  return {dgate, dx};
}

}  // namespace

TORCH_LIBRARY_IMPL(aura, CPU, m) {
  m.impl("gelu_tanh", &gelu_tanh);
  m.impl("gelu_tanh_backward", &gelu_tanh_backward);
  m.impl("swiglu", &swiglu);
  m.impl("swiglu_backward", &swiglu_backward);
  m.impl("sigmoid_gate", &sigmoid_gate);
  m.impl("sigmoid_gate_backward", &sigmoid_gate_backward);
}

}  // namespace aura
