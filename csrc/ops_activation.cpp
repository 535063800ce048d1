// aura::gelu_tanh, aura::swiglu and their gradients on the CPU: checks, outputs, and the elements shared out among
// threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "cpu/kernels.h"
#include "ops.h"

TORCH_LIBRARY_FRAGMENT(aura, m) {
  m.def("gelu_tanh(Tensor x) -> Tensor");
  m.def("gelu_tanh_backward(Tensor dy, Tensor x) -> Tensor");
  // x: [..., 2F], gate before up; y: [..., F].
  m.def("swiglu(Tensor x) -> Tensor");
  m.def("swiglu_backward(Tensor dy, Tensor x) -> Tensor");
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

}  // namespace

TORCH_LIBRARY_IMPL(aura, CPU, m) {
  m.impl("gelu_tanh", &gelu_tanh);
  m.impl("gelu_tanh_backward", &gelu_tanh_backward);
  m.impl("swiglu", &swiglu);
  m.impl("swiglu_backward", &swiglu_backward);
}

}  // namespace aura
