// The linear layer that aura/products.py explains: in mixed precision y from 16-bit copies of the parameters, the
// weight's gradient added in float32 by the product itself; in float32 by oneDNN. In C++, as a step of a small model
// waits for the CPU to queue its work.
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <optional>

#include "ops.h"

namespace aura {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::CppNode;
using torch::autograd::Function;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;

// sums += a @ b, of 16 bits each: not rounded to 16 bits before.
void add_product(Tensor sums, const Tensor& a, const Tensor& b) {
  if (a.is_cuda()) {
    at::addmm_out(sums, sums, a, b, sums.scalar_type());
  } else {
    at::addmm_out(sums, sums, a.to(sums.scalar_type()), b.to(sums.scalar_type()));
  }
}

// a @ b in `dtype`: not rounded to 16 bits before where a GPU writes float32 itself.
Tensor product(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  if (a.is_cuda() && a.scalar_type() != dtype && dtype == at::kFloat) return at::mm(a, b, dtype);
  // For second derivatives autograd must see the product.
  if (a.is_cuda() || at::GradMode::is_enabled()) return at::mm(a, b).to(dtype);
  return linear_product(a, b.t(), std::nullopt).to(dtype);
}

// x [rows, C] summed over its rows, in float32: by our kernel where those of a GPU are loaded.
Tensor column_sums(const Tensor& x_given) {
  const char* op = "column_sums";
  TORCH_CHECK(x_given.dim() == 2, op, ": x must be [rows, C], is ", x_given.sizes());
  const cuda::Kernels* gpu = gpu_kernels_if_any(x_given);
  if (!gpu || x_given.numel() == 0) return x_given.sum(0, false, at::kFloat);
  const Tensor x = x_given.contiguous();
  const int64_t rows = x.size(0), columns = x.size(1);
  const cuda::Element element = gpu_element(x, op);
  const at::TensorOptions options = x.options().dtype(at::kFloat);
  const Tensor sums = at::empty({columns}, options);
  on_gpu(gpu, x, op, [&](void* stream) {
    const Tensor partials = at::empty({gpu->columns.partials(rows, columns, element), columns}, options);
    return gpu->columns.sum(x.const_data_ptr(), rows, columns, element, partials.mutable_data_ptr<float>(),
                            sums.mutable_data_ptr<float>(), stream);
  });
  return sums;
}

// Keeps what a Linear needs for backward before its product is computed. A Function keeps its tensors when it is done,
// torch's own products before they begin: a checkpointed block that ends with one of those is computed again without
// it and, with this node, so is one that ends with ours. weight is an input so that autograd records the node.
struct Kept : Function<Kept> {
  static Tensor forward(AutogradContext* ctx, const Tensor& weight, const Tensor& x, const Tensor& low) {
    ctx->save_for_backward({x, low});
    return at::empty({0}, weight.options());
  }

  static variable_list backward(AutogradContext*, const variable_list&) { return variable_list(3); }
};

struct Linear : Function<Linear> {
  // What the product takes: autograd has no part in it.
  struct Low {
    Tensor x, weight;
    OptionalTensor bias;
  };

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& kept, const Low& low, bool adding) {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (!kept) ctx->save_for_backward({low.x, low.weight});
    ctx->saved_data["kept"] = kept;
    ctx->saved_data["weight"] = weight;
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["x_dtype"] = x.scalar_type();
    ctx->saved_data["adding"] = adding;
    return linear_product(low.x, low.weight, low.bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const OptionalTensor kept = ctx->saved_data["kept"].toOptional<Tensor>();
    const variable_list saved = kept ? static_cast<CppNode<Kept>*>(kept->grad_fn().get())->ctx_.get_saved_variables()
                                     : ctx->get_saved_variables();
    variable_list found(6);
    if (!gradients[0].defined()) return found;
    const Tensor &x = saved[0], &low = saved[1], weight = ctx->saved_data["weight"].toTensor();
    TORCH_CHECK(!at::GradMode::is_enabled() || low.scalar_type() == weight.scalar_type(),
                "aura::linear has no second derivatives in mixed precision; without products.step() it has");
    const Tensor rows = gradients[0].reshape({-1, low.size(0)});
    // Not where others alone are asked for, as torch.autograd.grad(loss, x) does: it leaves every .grad as it was.
    if (ctx->needs_input_grad(1)) {
      const bool adding = ctx->saved_data["adding"].toBool();
      const Tensor x_rows = x.reshape({-1, low.size(1)});
      if (adding && weight.grad().defined()) {
        add_product(weight.grad(), rows.t(), x_rows);
      } else {
        const Tensor dweight = product(rows.t(), x_rows, weight.scalar_type());
        if (adding) {
          weight.mutable_grad() = dweight;
        } else {
          found[1] = dweight;
        }
      }
    }
    if (ctx->needs_input_grad(0)) {
      found[0] = product(rows, low, ctx->saved_data["x_dtype"].toScalarType()).view(x.sizes());
    }
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) found[2] = column_sums(rows);
    return found;
  }
};

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& low_weight,
              const OptionalTensor& low_bias, bool adding) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Tensor low_x = x;
  if (x.scalar_type() != low_weight.scalar_type()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    low_x = x.to(low_weight.scalar_type());
  }
  OptionalTensor kept;
  // A checkpoint computes again. Beside a frozen weight there may be no node that could be asked for what was kept.
  if (torch::autograd::get_current_graph_task_id() != -1 && weight.requires_grad()) {
    kept = Kept::apply(weight, low_x, low_weight);
  }
  return Linear::apply(x, weight, bias, kept, Linear::Low{low_x, low_weight, low_bias}, adding);
}

}  // namespace

// x [..., C] @ weight [N, C] transposed, + bias [N], in the dtype of low_weight and low_bias, which are copies of them in
// 16 bits, or they themselves. adding: backward adds to weight's .grad itself, of which autograd then sees nothing.
TORCH_LIBRARY_FRAGMENT(aura, m) {
  m.def("column_sums(Tensor x) -> Tensor");
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, Tensor low_weight, Tensor? low_bias, bool adding) -> Tensor");
}

TORCH_LIBRARY_IMPL(aura, CPU, m) {
  m.impl("column_sums", &column_sums);
  // Where autograd is left out altogether, as in inference mode.
  m.impl("linear", [](const Tensor& x, const Tensor&, const OptionalTensor&, const Tensor& low_weight,
                      const OptionalTensor& low_bias, bool) {
    return linear_product(x.to(low_weight.scalar_type()), low_weight, low_bias);
  });
}
TORCH_LIBRARY_IMPL(aura, CUDA, m) { m.impl("column_sums", &column_sums); }
TORCH_LIBRARY_IMPL(aura, Autograd, m) { m.impl("linear", &linear); }

}  // namespace aura
