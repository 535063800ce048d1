// aura::layer_norm, rms_norm, their forms with a residual and their gradients: checks, outputs, and the rows shared out
// among threads, or handed to the GPU.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "cpu/kernels.h"
#include "ops.h"

// x, residual, y: [..., C]; weight, bias: [C]; mean, rstd: [rows], float32 (float64 for float64). y is of the dtype of
// the residual or, with like_x, of x. In the backwards dx is empty where it would equal dresidual, as no two outputs
// may share their memory; so is dbias where there is no bias. post_layer_norm is for an x narrower than the residual.
TORCH_LIBRARY_FRAGMENT(aura, m) {
  m.def("layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool has_bias) "
      "-> (Tensor dx, Tensor dweight, Tensor dbias)");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor rstd)");
  m.def("rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor dx, Tensor dweight)");
  m.def(
      "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps, float dropout, Tensor? seed, "
      "bool like_x=False) -> (Tensor y, Tensor new_residual, Tensor mean, Tensor rstd)");
  m.def(
      "add_layer_norm_backward(Tensor dy, Tensor? d_new_residual, Tensor new_residual, Tensor weight, Tensor mean, "
      "Tensor rstd, bool has_bias, ScalarType x_dtype, float dropout, Tensor? seed) "
      "-> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)");
  m.def(
      "post_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps, float dropout, Tensor? seed) "
      "-> (Tensor y, Tensor y_like_x, Tensor sum, Tensor mean, Tensor rstd)");
  m.def(
      "post_layer_norm_backward(Tensor dy, Tensor dy_like_x, Tensor sum, Tensor weight, Tensor mean, Tensor rstd, "
      "bool has_bias, ScalarType x_dtype, float dropout, Tensor? seed) "
      "-> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)");
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float dropout, Tensor? seed, "
      "bool like_x=False) -> (Tensor y, Tensor new_residual, Tensor rstd)");
  m.def(
      "add_rms_norm_backward(Tensor dy, Tensor? d_new_residual, Tensor new_residual, Tensor weight, Tensor rstd, "
      "ScalarType x_dtype, float dropout, Tensor? seed) -> (Tensor dx, Tensor dresidual, Tensor dweight)");
}

namespace aura {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

bool halves(NormTypes types) {
  return types == NormTypes::kHalf || types == NormTypes::kHalfFloat || types == NormTypes::kHalfFloatFloat;
}

NormTypes types_of(const char* op, bool gpu, at::ScalarType x, at::ScalarType residual, at::ScalarType weight) {
  struct Row {
    at::ScalarType x, residual, weight;
    NormTypes types;
  };
  constexpr Row rows[] = {
      {at::kFloat, at::kFloat, at::kFloat, NormTypes::kFloat},
      {at::kBFloat16, at::kBFloat16, at::kBFloat16, NormTypes::kBFloat16},
      {at::kBFloat16, at::kBFloat16, at::kFloat, NormTypes::kBFloat16Float},
      {at::kBFloat16, at::kFloat, at::kFloat, NormTypes::kBFloat16FloatFloat},
      {at::kDouble, at::kDouble, at::kDouble, NormTypes::kDouble},
      {at::kHalf, at::kHalf, at::kHalf, NormTypes::kHalf},
      {at::kHalf, at::kHalf, at::kFloat, NormTypes::kHalfFloat},
      {at::kHalf, at::kFloat, at::kFloat, NormTypes::kHalfFloatFloat},
  };
  for (const Row& row : rows) {
    const bool there_is = gpu ? row.types != NormTypes::kDouble : !halves(row.types);
    if (there_is && row.x == x && row.residual == residual && row.weight == weight) return row.types;
  }
  TORCH_CHECK(false, op, ": no kernel for x ", x, ", residual ", residual, ", weight ", weight,
              "; all float32, bfloat16 or float64 (on a GPU float16), or x of 16 bits with float32 weight, with or "
              "without float32 residual");
}

int64_t columns_of(const char* op, const Tensor& x, const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 1 && weight.numel() >= 1, op, ": weight must be [C] with C >= 1, is ", weight.sizes());
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) == weight.numel(), op, ": x must be [..., ", weight.numel(), "], is ",
              x.sizes());
  return weight.numel();
}

at::TensorOptions statistics(const Tensor& x) {
  return x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

const void* data(const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }

Tensor contiguous(const OptionalTensor& t) { return t.has_value() ? t->contiguous() : Tensor(); }

// Whether y comes in the dtype of the residual, in that of x, or in both.
enum class Y { kLikeResidual, kLikeX, kBoth };

struct Outputs {
  Tensor y, y_like_x, new_residual, mean, rstd;
};

Outputs forward(const char* op, bool rms, const Tensor& x_given, const OptionalTensor& residual_given,
                const Tensor& weight_given, const OptionalTensor& bias_given, double eps, double dropout,
                const OptionalTensor& seed, Y wanted) {
  const int64_t columns = columns_of(op, x_given, weight_given);
  const Tensor x = x_given.contiguous(), residual = contiguous(residual_given);
  const Tensor weight = weight_given.contiguous(), bias = contiguous(bias_given);
  const Tensor& stream = residual.defined() ? residual : x;
  TORCH_CHECK(stream.sizes() == x.sizes(), op, ": x is ", x.sizes(), ", residual ", stream.sizes());
  TORCH_CHECK(!bias.defined() || (bias.sizes() == weight.sizes() && bias.scalar_type() == weight.scalar_type()), op,
              ": bias must have shape and dtype of weight");
  const cuda::Kernels* gpu = gpu_kernels(x, op);
  const NormTypes types = types_of(op, gpu, x.scalar_type(), stream.scalar_type(), weight.scalar_type());
  for (const Tensor& t : {stream, weight, bias}) same_device(op, x, t);

  const int64_t rows = x.numel() / columns;
  Outputs out;
  const bool differ = x.scalar_type() != stream.scalar_type(), narrow = wanted == Y::kLikeX && differ;
  TORCH_CHECK(wanted != Y::kBoth || differ, op, ": x must be of 16 bits and residual float32");
  out.y = at::empty(x.sizes(), (narrow && gpu ? x : stream).options());
  if (wanted == Y::kBoth && gpu) out.y_like_x = at::empty(x.sizes(), x.options());
  if (residual.defined()) out.new_residual = at::empty(x.sizes(), stream.options());
  if (!rms) out.mean = at::empty({rows}, statistics(x));
  out.rstd = at::empty({rows}, statistics(x));

  NormForward job{};
  job.columns = columns;
  job.eps = eps;
  job.x = data(x);
  job.weight = data(weight);
  job.bias = data(bias);
  job.residual = data(residual);
  if (residual.defined()) job.new_residual = out.new_residual.mutable_data_ptr();
  job.y = out.y.mutable_data_ptr();
  if (out.y_like_x.defined()) job.y_like_x = out.y_like_x.mutable_data_ptr();
  job.rstd = out.rstd.mutable_data_ptr();
  if (!rms) job.mean = out.mean.mutable_data_ptr();
  job.dropout = dropout_of(dropout, seed);
  if (gpu) {
    on_gpu(gpu, x, op,
           [&](void* cuda_stream) { return gpu->norms.forward(job, rows, rms, types, narrow, cuda_stream); });
    return out;
  }
  const NormKernels& table = kernels().norms;
  const auto run = (rms ? table.rms_norm : table.layer_norm)[static_cast<int>(types)];
  at::parallel_for(0, rows, grain(columns), [&](int64_t begin, int64_t end) { run(job, begin, end); });
  if (narrow) out.y = out.y.to(x.scalar_type());
  if (wanted == Y::kBoth) out.y_like_x = out.y.to(x.scalar_type());
  return out;
}

// What the backwards take besides dy.
struct Saved {
  const Tensor &x, &weight;
  const OptionalTensor& mean;  // none: RMS
  const Tensor& rstd;
  bool has_bias;
};

struct Gradients {
  Tensor dx, dresidual, dweight, dbias;
};

Gradients backward(const char* op, const Tensor& dy_given, const OptionalTensor& dy_like_x_given,
                   const OptionalTensor& past_given, const Saved& saved, at::ScalarType x_dtype, double dropout,
                   const OptionalTensor& seed) {
  const int64_t columns = columns_of(op, saved.x, saved.weight);
  const Tensor x = saved.x.contiguous(), weight = saved.weight.contiguous(), rstd = saved.rstd.contiguous();
  const cuda::Kernels* gpu = gpu_kernels(x, op);
  const bool narrow = dy_given.scalar_type() == x_dtype && x_dtype != x.scalar_type();
  const Tensor dy_like_x = contiguous(dy_like_x_given);
  Tensor dy = (narrow && !gpu ? dy_given.to(x.scalar_type()) : dy_given).contiguous();
  const Tensor past = contiguous(past_given), mean = contiguous(saved.mean);
  const int64_t rows = x.numel() / columns;
  TORCH_CHECK(dy.sizes() == x.sizes() && (narrow || dy.scalar_type() == x.scalar_type()), op,
              ": the gradient must have shape and dtype of the output");
  TORCH_CHECK(!dy_like_x.defined() || (dy.scalar_type() != x_dtype && dy_like_x.sizes() == x.sizes() &&
                                       dy_like_x.scalar_type() == x_dtype),
              op, ": the gradient of y_like_x must have its shape and dtype");
  TORCH_CHECK(!past.defined() || (past.sizes() == x.sizes() && past.scalar_type() == x.scalar_type()), op,
              ": the gradient of new_residual must have its shape and dtype");
  for (const Tensor& t : {rstd, mean}) {
    TORCH_CHECK(!t.defined() || (t.numel() == rows && t.scalar_type() == statistics(x).dtype()), op,
                ": mean and rstd must be as the forward gave them");
  }
  const NormTypes types = types_of(op, gpu, x_dtype, x.scalar_type(), weight.scalar_type());
  for (const Tensor& t : {weight, dy, dy_like_x, past, rstd, mean}) same_device(op, x, t);
  if (dy_like_x.defined() && !gpu) dy = at::add(dy, dy_like_x);

  NormBackward job{};
  job.columns = columns;
  job.dy = data(dy);
  if (gpu) job.dy_like_x = data(dy_like_x);
  job.weight = data(weight);
  job.rstd = data(rstd);
  job.mean = data(mean);
  job.x = data(x);
  job.d_new_residual = data(past);
  job.dropout = dropout_of(dropout, seed);
  const bool same = x_dtype == x.scalar_type() && job.dropout.threshold == 0;
  Gradients out;
  out.dresidual = at::empty(x.sizes(), x.options());
  out.dx = same ? at::empty({0}, x.options()) : at::empty(x.sizes(), x.options().dtype(x_dtype));
  out.dweight = at::empty({columns}, weight.options());
  out.dbias = at::empty({saved.has_bias ? columns : 0}, weight.options());
  job.dresidual = out.dresidual.mutable_data_ptr();
  job.dx = same ? nullptr : out.dx.mutable_data_ptr();

  const int64_t stride = mean.defined() ? 2 * columns : columns;
  if (gpu) {
    const c10::DeviceGuard guard(x.device());  // the card decides how many partial sums there are
    const Tensor partials = at::empty({gpu->norms.partials(rows, columns, types), stride}, statistics(x));
    void* dbias = saved.has_bias ? out.dbias.mutable_data_ptr() : nullptr;
    on_gpu(gpu, x, op, [&](void* cuda_stream) {
      return gpu->norms.backward(job, rows, types, narrow, partials.mutable_data_ptr(), out.dweight.mutable_data_ptr(),
                                 dbias, cuda_stream);
    });
    return out;
  }
  // Blocks of rows that do not depend on the number of threads, so that neither do the sums. Long enough for a block's
  // partial sums to be little beside its rows, and a bounded number of them.
  const int64_t block = std::max<int64_t>(32, (rows + 1023) / 1024 * 4);
  const int64_t blocks = (rows + block - 1) / block;
  const Tensor partials = at::empty({blocks, stride}, statistics(x));
  auto* sums = static_cast<uint8_t*>(partials.mutable_data_ptr());
  const int64_t size = partials.element_size();
  const NormKernels& table = kernels().norms;
  const auto run = (mean.defined() ? table.layer_norm_backward : table.rms_norm_backward)[static_cast<int>(types)];
  at::parallel_for(0, blocks, std::max<int64_t>(1, grain(columns) / block), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      run(job, i * block, std::min((i + 1) * block, rows), sums + i * stride * size);
    }
  });
  const auto reduce = table.reduce[static_cast<int>(types)];
  at::parallel_for(0, columns, grain(blocks + 1), [&](int64_t begin, int64_t end) {
    reduce(sums, blocks, stride, begin, end, out.dweight.mutable_data_ptr());
    if (saved.has_bias) reduce(sums + columns * size, blocks, stride, begin, end, out.dbias.mutable_data_ptr());
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                              double eps) {
  const Outputs out = forward("layer_norm", false, x, {}, weight, bias, eps, 0.0, {}, Y::kLikeResidual);
  return {out.y, out.mean, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                                       const Tensor& mean, const Tensor& rstd, bool has_bias) {
  const Gradients out = backward("layer_norm_backward", dy, {}, {}, {x, weight, mean, rstd, has_bias}, x.scalar_type(),
                                 0.0, {});
  return {out.dresidual, out.dweight, out.dbias};
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Outputs out = forward("rms_norm", true, x, {}, weight, {}, eps, 0.0, {}, Y::kLikeResidual);
  return {out.y, out.rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                             const Tensor& rstd) {
  const Gradients out = backward("rms_norm_backward", dy, {}, {}, {x, weight, {}, rstd, false}, x.scalar_type(), 0.0, {});
  return {out.dresidual, out.dweight};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                          const OptionalTensor& bias, double eps, double dropout,
                                                          const OptionalTensor& seed, bool like_x) {
  const Outputs out = forward("add_layer_norm", false, x, residual, weight, bias, eps, dropout, seed,
                              like_x ? Y::kLikeX : Y::kLikeResidual);
  return {out.y, out.new_residual, out.mean, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_backward(
    const Tensor& dy, const OptionalTensor& d_new_residual, const Tensor& new_residual, const Tensor& weight,
    const Tensor& mean, const Tensor& rstd, bool has_bias, at::ScalarType x_dtype, double dropout,
    const OptionalTensor& seed) {
  const Gradients out = backward("add_layer_norm_backward", dy, {}, d_new_residual,
                                 {new_residual, weight, mean, rstd, has_bias}, x_dtype, dropout, seed);
  return {out.dx, out.dresidual, out.dweight, out.dbias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> post_layer_norm(const Tensor& x, const Tensor& residual,
                                                                   const Tensor& weight, const OptionalTensor& bias,
                                                                   double eps, double dropout,
                                                                   const OptionalTensor& seed) {
  const Outputs out = forward("post_layer_norm", false, x, residual, weight, bias, eps, dropout, seed, Y::kBoth);
  return {out.y, out.y_like_x, out.new_residual, out.mean, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> post_layer_norm_backward(
    const Tensor& dy, const Tensor& dy_like_x, const Tensor& sum, const Tensor& weight, const Tensor& mean,
    const Tensor& rstd, bool has_bias, at::ScalarType x_dtype, double dropout, const OptionalTensor& seed) {
  const Gradients out = backward("post_layer_norm_backward", dy, dy_like_x, {}, {sum, weight, mean, rstd, has_bias},
                                 x_dtype, dropout, seed);
  return {out.dx, out.dresidual, out.dweight, out.dbias};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                double eps, double dropout, const OptionalTensor& seed, bool like_x) {
  const Outputs out = forward("add_rms_norm", true, x, residual, weight, {}, eps, dropout, seed,
                              like_x ? Y::kLikeX : Y::kLikeResidual);
  return {out.y, out.new_residual, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_backward(const Tensor& dy, const OptionalTensor& d_new_residual,
                                                         const Tensor& new_residual, const Tensor& weight,
                                                         const Tensor& rstd, at::ScalarType x_dtype, double dropout,
                                                         const OptionalTensor& seed) {
  const Gradients out = backward("add_rms_norm_backward", dy, {}, d_new_residual,
                                 {new_residual, weight, {}, rstd, false}, x_dtype, dropout, seed);
  return {out.dx, out.dresidual, out.dweight};
}

}  // namespace

static void implement_norms(torch::Library& m) {
  m.impl("layer_norm", &layer_norm);
  m.impl("layer_norm_backward", &layer_norm_backward);
  m.impl("rms_norm", &rms_norm);
  m.impl("rms_norm_backward", &rms_norm_backward);
  m.impl("add_layer_norm", &add_layer_norm);
  m.impl("add_layer_norm_backward", &add_layer_norm_backward);
  m.impl("post_layer_norm", &post_layer_norm);
  m.impl("post_layer_norm_backward", &post_layer_norm_backward);
  m.impl("add_rms_norm", &add_rms_norm);
  m.impl("add_rms_norm_backward", &add_rms_norm_backward);
}

TORCH_LIBRARY_IMPL(aura, CPU, m) { implement_norms(m); }
TORCH_LIBRARY_IMPL(aura, CUDA, m) { implement_norms(m); }

}  // namespace aura
