// aura::gelu_tanh, aura::swiglu, aura::sigmoid_gate and their gradients: checks, outputs, and the elements shared out
// among threads, or handed to the GPU.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

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

struct Bytes {
  const Tensor& t;
  const char* from(int64_t element) const {
    return static_cast<const char*>(t.const_data_ptr()) + element * t.element_size();
  }
  char* to(int64_t element) const { return static_cast<char*>(t.mutable_data_ptr()) + element * t.element_size(); }
};

// Rows of a tensor for the GPU: from `element` on, `stride` apart or, of a tensor [rows, C], as they lie.
cuda::Rows rows_at(const Tensor& t, int64_t element, int64_t stride) { return {Bytes{t}.from(element), stride}; }
cuda::Rows rows_at(const Tensor& t) { return rows_at(t, 0, t.stride(0)); }

void queue(const cuda::Kernels* gpu, const Tensor& x, const char* op, cuda::Activation activation,
           const cuda::ActivationRows& job) {
  const cuda::Element element = gpu_element(x, op);
  on_gpu(gpu, x, op, [&](void* stream) { return gpu->activation.run(activation, job, element, stream); });
}

void check_gradient(const char* op, const Tensor& dy, const Tensor& like, at::IntArrayRef sizes) {
  same_device(op, like, dy);
  TORCH_CHECK(dy.sizes() == sizes && dy.scalar_type() == like.scalar_type(), op, ": dy must be ", sizes, " of ",
              like.scalar_type(), ", is ", dy.sizes(), " of ", dy.scalar_type());
}

Tensor gelu_tanh(const Tensor& x_given) {
  const char* op = "gelu_tanh";
  const Tensor x = x_given.contiguous();
  const cuda::Kernels* gpu = gpu_kernels(x, op);
  const int type = gpu ? 0 : kernel_type(x, op);
  const Tensor y = at::empty_like(x);
  if (gpu) {
    const int64_t count = x.numel();
    queue(gpu, x, op, cuda::Activation::kGeluTanh, {1, count, {rows_at(x, 0, count), rows_at(y, 0, count)}});
    return y;
  }
  const auto run = kernels().activation.gelu_tanh[type];
  at::parallel_for(0, x.numel(), grain(1), [&](int64_t begin, int64_t end) {
    run(Bytes{x}.from(begin), Bytes{y}.to(begin), end - begin);
  });
  return y;
}

Tensor gelu_tanh_backward(const Tensor& dy_given, const Tensor& x_given) {
  const char* op = "gelu_tanh_backward";
  const Tensor dy = dy_given.contiguous(), x = x_given.contiguous();
  const cuda::Kernels* gpu = gpu_kernels(x, op);
  const int type = gpu ? 0 : kernel_type(x, op);
  check_gradient(op, dy, x, x.sizes());
  const Tensor dx = at::empty_like(x);
  if (gpu) {
    const int64_t count = x.numel();
    queue(gpu, x, op, cuda::Activation::kGeluTanhBackward,
           {1, count, {rows_at(dy, 0, count), rows_at(x, 0, count), rows_at(dx, 0, count)}});
    return dx;
  }
  const auto run = kernels().activation.gelu_tanh_backward[type];
  at::parallel_for(0, x.numel(), grain(1), [&](int64_t begin, int64_t end) {
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
  const char* op = "swiglu";
  const Tensor x = x_given.contiguous();
  const int64_t width = swiglu_width(op, x);
  const cuda::Kernels* gpu = gpu_kernels(x, op);
  const int type = gpu ? 0 : kernel_type(x, op);
  const Tensor y = at::empty(half_sizes(x, width), x.options());
  if (y.numel() == 0) return y;
  if (gpu) {
    queue(gpu, x, op, cuda::Activation::kSwiglu,
           {y.numel() / width, width,
            {rows_at(x, 0, 2 * width), rows_at(x, width, 2 * width), rows_at(y, 0, width)}});
    return y;
  }
  const auto run = kernels().activation.swiglu[type];
  at::parallel_for(0, y.numel() / width, grain(width), [&](int64_t begin, int64_t end) {
    run(Bytes{x}.from(begin * 2 * width), Bytes{y}.to(begin * width), end - begin, width);
  });
  return y;
}

Tensor swiglu_backward(const Tensor& dy_given, const Tensor& x_given) {
  const char* op = "swiglu_backward";
  const Tensor dy = dy_given.contiguous(), x = x_given.contiguous();
  const int64_t width = swiglu_width(op, x);
  const cuda::Kernels* gpu = gpu_kernels(x, op);
  const int type = gpu ? 0 : kernel_type(x, op);
  check_gradient(op, dy, x, half_sizes(x, width));
  const Tensor dx = at::empty_like(x);
  if (dx.numel() == 0) return dx;
  if (gpu) {
    queue(gpu, x, op, cuda::Activation::kSwigluBackward,
           {dy.numel() / width, width,
            {rows_at(dy, 0, width), rows_at(x, 0, 2 * width), rows_at(x, width, 2 * width), rows_at(dx, 0, 2 * width),
             rows_at(dx, width, 2 * width)}});
    return dx;
  }
  const auto run = kernels().activation.swiglu_backward[type];
  at::parallel_for(0, dy.numel() / width, grain(width), [&](int64_t begin, int64_t end) {
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

void check_gate(const char* op, const Tensor& gate, const Tensor& x) {
  TORCH_CHECK(x.dim() >= 1 && gate.sizes() == x.sizes() && gate.scalar_type() == x.scalar_type(), op,
              ": gate and x must be alike, are ", gate.sizes(), " of ", gate.scalar_type(), " and ", x.sizes(), " of ",
              x.scalar_type());
  same_device(op, x, gate);
}

Tensor sigmoid_gate(const Tensor& gate_given, const Tensor& x_given) {
  const char* op = "sigmoid_gate";
  check_gate(op, gate_given, x_given);
  const cuda::Kernels* gpu = gpu_kernels(x_given, op);
  const int type = gpu ? 0 : kernel_type(x_given, op);
  const Tensor y = at::empty(x_given.sizes(), x_given.options());
  if (y.numel() == 0) return y;
  const Tensor gate = rows_of(gate_given), x = rows_of(x_given);
  const int64_t width = x.size(1);
  if (gpu) {
    queue(gpu, x, op, cuda::Activation::kSigmoidGate,
           {x.size(0), width, {rows_at(gate), rows_at(x), rows_at(y, 0, width)}});
    return y;
  }
  const auto run = kernels().activation.sigmoid_gate[type];
  at::parallel_for(0, x.size(0), grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      run(Bytes{gate}.from(row * gate.stride(0)), Bytes{x}.from(row * x.stride(0)), Bytes{y}.to(row * width), width);
    }
  });
  return y;
}

std::tuple<Tensor, Tensor> sigmoid_gate_backward(const Tensor& dy_given, const Tensor& gate_given,
                                                 const Tensor& x_given) {
  const char* op = "sigmoid_gate_backward";
  check_gate(op, gate_given, x_given);
  const cuda::Kernels* gpu = gpu_kernels(x_given, op);
  const int type = gpu ? 0 : kernel_type(x_given, op);
  check_gradient(op, dy_given, x_given, x_given.sizes());
  const Tensor dgate = at::empty(x_given.sizes(), x_given.options());
  const Tensor dx = at::empty(x_given.sizes(), x_given.options());
  if (dx.numel() == 0) return {dgate, dx};
  const Tensor dy = rows_of(dy_given), gate = rows_of(gate_given), x = rows_of(x_given);
  const int64_t width = x.size(1);
  if (gpu) {
    queue(gpu, x, op, cuda::Activation::kSigmoidGateBackward,
           {x.size(0), width,
            {rows_at(dy), rows_at(gate), rows_at(x), rows_at(dgate, 0, width), rows_at(dx, 0, width)}});
    return {dgate, dx};
  }
  const auto run = kernels().activation.sigmoid_gate_backward[type];
  at::parallel_for(0, x.size(0), grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      run(Bytes{dy}.from(row * dy.stride(0)), Bytes{gate}.from(row * gate.stride(0)), Bytes{x}.from(row * x.stride(0)),
          Bytes{dgate}.to(row * width), Bytes{dx}.to(row * width), width);
    }
  });
  return {dgate, dx};
}

}  // namespace

static void implement_activation(torch::Library& m) {
  m.impl("gelu_tanh", &gelu_tanh);
  m.impl("gelu_tanh_backward", &gelu_tanh_backward);
  m.impl("swiglu", &swiglu);
  m.impl("swiglu_backward", &swiglu_backward);
  m.impl("sigmoid_gate", &sigmoid_gate);
  m.impl("sigmoid_gate_backward", &sigmoid_gate_backward);
}

TORCH_LIBRARY_IMPL(aura, CPU, m) { implement_activation(m); }
TORCH_LIBRARY_IMPL(aura, CUDA, m) { implement_activation(m); }

}  // namespace aura
