// How autograd goes through the operators: what a forward keeps, and the operator that turns it back. In C++, since a
// call that goes by way of Python, as torch's register_autograd does, may take longer than a GPU needs for a small one
// (benchmarks/kernels.py --only call says what it takes).
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "ops.h"

namespace aura {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;

c10::OperatorHandle find(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

// How an operator takes an argument.
template <typename T>
using Taken = std::conditional_t<std::is_arithmetic_v<T> || std::is_enum_v<T>, T, const T&>;

// Calls an operator with several outputs.
template <typename... Outputs, typename... Inputs>
std::tuple<Outputs...> call(const c10::OperatorHandle& op, const Inputs&... inputs) {
  return op.typed<std::tuple<Outputs...>(Taken<Inputs>...)>().call(inputs...);
}

// Calls an operator with one.
template <typename... Inputs>
Tensor call_one(const c10::OperatorHandle& op, const Inputs&... inputs) {
  return op.typed<Tensor(Taken<Inputs>...)>().call(inputs...);
}

OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

// Keeps `saved` for backward. statistics: the outputs that no gradient flows through. With set_materialize_grads(false)
// there are no tensors of zeros in place of their gradients, which took a good part of a short norm's time. Any other
// output is saved as its tensor_data(): the output itself would hold the node that holds it, and for good where saving
// ends in an exception, by which a checkpoint stops once it has what it needs.
void keep(AutogradContext* ctx, variable_list saved, const variable_list& statistics = {}) {
  ctx->save_for_backward(std::move(saved));
  ctx->mark_non_differentiable(statistics);
  ctx->set_materialize_grads(false);
}

// What was kept. Second derivatives are refused: autograd would take the gradients for constants where the incoming one
// is a constant, as that of a plain sum is.
variable_list kept(AutogradContext* ctx) {
  TORCH_CHECK(!at::GradMode::is_enabled(),
              "the fused operators have no second derivatives; --attention sdpa has them");
  return ctx->get_saved_variables();
}

// ---- Norms ----------------------------------------------------------------------------------------------------------

struct LayerNorm : Function<LayerNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                               double eps) {
    static const auto op = find("aura::layer_norm");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [y, mean, rstd] = call<Tensor, Tensor, Tensor>(op, x, weight, bias, eps);
    keep(ctx, {x, weight, mean, rstd}, {mean, rstd});
    ctx->saved_data["has_bias"] = bias.has_value();
    return {y, mean, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    static const auto op = find("aura::layer_norm_backward");
    const variable_list saved = kept(ctx);
    if (!gradients[0].defined()) return variable_list(4);
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    auto [dx, dweight, dbias] =
        call<Tensor, Tensor, Tensor>(op, gradients[0], saved[0], saved[1], saved[2], saved[3], has_bias);
    return {dx, dweight, has_bias ? dbias : Tensor(), {}};
  }
};

struct RmsNorm : Function<RmsNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, double eps) {
    static const auto op = find("aura::rms_norm");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [y, rstd] = call<Tensor, Tensor>(op, x, weight, eps);
    keep(ctx, {x, weight, rstd}, {rstd});
    return {y, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    static const auto op = find("aura::rms_norm_backward");
    const variable_list saved = kept(ctx);
    if (!gradients[0].defined()) return variable_list(3);
    auto [dx, dweight] = call<Tensor, Tensor>(op, gradients[0], saved[0], saved[1], saved[2]);
    return {dx, dweight, {}};
  }
};

// The gradients of a norm with a residual as they come in.
struct SumGradients {
  Tensor dy;
  OptionalTensor d_new_residual;
  at::ScalarType x_dtype;
  double dropout;
  bool same;  // x and the residual have one gradient: the operator returns it once, as dresidual
};

// Keeps the new residual, the first of `saved`, in place of x, which is not needed again.
void keep_sum(AutogradContext* ctx, const Tensor& x, double dropout, variable_list saved,
              const variable_list& statistics) {
  keep(ctx, std::move(saved), statistics);
  ctx->saved_data["x_dtype"] = x.scalar_type();
  ctx->saved_data["dropout"] = dropout;
}

SumGradients kept_sum(AutogradContext* ctx, const variable_list& gradients, const Tensor& new_residual) {
  const auto x_dtype = ctx->saved_data["x_dtype"].toScalarType();
  const double dropout = ctx->saved_data["dropout"].toDouble();
  const bool same = x_dtype == new_residual.scalar_type() && dropout_threshold(dropout) == 0;
  // y has none where only the new residual is used, the new residual none where nobody uses it: in the last block.
  const Tensor dy = gradients[0].defined() ? gradients[0] : at::zeros_like(new_residual);
  return {dy, optional(gradients[1]), x_dtype, dropout, same};
}

struct AddLayerNorm : Function<AddLayerNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& residual, const Tensor& weight,
                               const OptionalTensor& bias, double eps, double dropout, const OptionalTensor& seed,
                               bool like_x) {
    static const auto op = find("aura::add_layer_norm");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [y, new_residual, mean, rstd] =
        call<Tensor, Tensor, Tensor, Tensor>(op, x, residual, weight, bias, eps, dropout, seed, like_x);
    keep_sum(ctx, x, dropout, {new_residual.tensor_data(), weight, mean, rstd, seed.value_or(Tensor())}, {mean, rstd});
    ctx->saved_data["has_bias"] = bias.has_value();
    return {y, new_residual, mean, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    static const auto op = find("aura::add_layer_norm_backward");
    const variable_list saved = kept(ctx);
    const SumGradients in = kept_sum(ctx, gradients, saved[0]);
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    auto [dx, dresidual, dweight, dbias] =
        call<Tensor, Tensor, Tensor, Tensor>(op, in.dy, in.d_new_residual, saved[0], saved[1], saved[2], saved[3],
                                             has_bias, in.x_dtype, in.dropout, optional(saved[4]));
    return {in.same ? dresidual : dx, dresidual, dweight, has_bias ? dbias : Tensor(), {}, {}, {}, {}};
  }
};

struct PostLayerNorm : Function<PostLayerNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& residual, const Tensor& weight,
                               const OptionalTensor& bias, double eps, double dropout, const OptionalTensor& seed) {
    static const auto op = find("aura::post_layer_norm");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [y, y_like_x, sum, mean, rstd] =
        call<Tensor, Tensor, Tensor, Tensor, Tensor>(op, x, residual, weight, bias, eps, dropout, seed);
    keep_sum(ctx, x, dropout, {sum, weight, mean, rstd, seed.value_or(Tensor())}, {sum, mean, rstd});
    ctx->saved_data["has_bias"] = bias.has_value();
    return {y, y_like_x, sum, mean, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    static const auto of_both = find("aura::post_layer_norm_backward"), of_one = find("aura::add_layer_norm_backward");
    const variable_list saved = kept(ctx);
    const Tensor &dy = gradients[0], &dy_like_x = gradients[1], &sum = saved[0];
    if (!dy.defined() && !dy_like_x.defined()) return variable_list(7);
    const auto x_dtype = ctx->saved_data["x_dtype"].toScalarType();
    const double dropout = ctx->saved_data["dropout"].toDouble();
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    const OptionalTensor seed = optional(saved[4]);
    auto [dx, dresidual, dweight, dbias] =
        dy.defined() && dy_like_x.defined()
            ? call<Tensor, Tensor, Tensor, Tensor>(of_both, dy, dy_like_x, sum, saved[1], saved[2], saved[3], has_bias,
                                                   x_dtype, dropout, seed)
            : call<Tensor, Tensor, Tensor, Tensor>(of_one, dy.defined() ? dy : dy_like_x, OptionalTensor(), sum,
                                                   saved[1], saved[2], saved[3], has_bias, x_dtype, dropout, seed);
    return {dx, dresidual, dweight, has_bias ? dbias : Tensor(), {}, {}, {}};
  }
};

struct AddRmsNorm : Function<AddRmsNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& residual, const Tensor& weight,
                               double eps, double dropout, const OptionalTensor& seed, bool like_x) {
    static const auto op = find("aura::add_rms_norm");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [y, new_residual, rstd] =
        call<Tensor, Tensor, Tensor>(op, x, residual, weight, eps, dropout, seed, like_x);
    keep_sum(ctx, x, dropout, {new_residual.tensor_data(), weight, rstd, seed.value_or(Tensor())}, {rstd});
    return {y, new_residual, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    static const auto op = find("aura::add_rms_norm_backward");
    const variable_list saved = kept(ctx);
    const SumGradients in = kept_sum(ctx, gradients, saved[0]);
    auto [dx, dresidual, dweight] =
        call<Tensor, Tensor, Tensor>(op, in.dy, in.d_new_residual, saved[0], saved[1], saved[2], in.x_dtype, in.dropout,
                                     optional(saved[3]));
    return {in.same ? dresidual : dx, dresidual, dweight, {}, {}, {}, {}};
  }
};

// ---- Attention ------------------------------------------------------------------------------------------------------

void keep_attention(AutogradContext* ctx, variable_list saved, const Tensor& lse, bool causal, double scale,
                    double dropout) {
  keep(ctx, std::move(saved), {lse});
  ctx->saved_data["causal"] = causal;
  ctx->saved_data["scale"] = scale;
  ctx->saved_data["dropout"] = dropout;
}

struct Attention : Function<Attention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                               double scale, double dropout, const OptionalTensor& seed, const OptionalTensor& lengths,
                               const OptionalTensor& cu_seqlens) {
    static const auto op = find("aura::attention");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [out, lse] = call<Tensor, Tensor>(op, q, k, v, causal, scale, dropout, seed, lengths, cu_seqlens);
    keep_attention(ctx, {q, k, v, out.tensor_data(), lse, seed.value_or(Tensor()),
                         lengths.value_or(Tensor()), cu_seqlens.value_or(Tensor())}, lse, causal, scale, dropout);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    static const auto op = find("aura::attention_backward");
    const variable_list saved = kept(ctx);
    if (!gradients[0].defined()) return variable_list(9);
    auto [dq, dk, dv] = call<Tensor, Tensor, Tensor>(
        op, gradients[0], saved[0], saved[1], saved[2], saved[3], saved[4], ctx->saved_data["causal"].toBool(),
        ctx->saved_data["scale"].toDouble(), ctx->saved_data["dropout"].toDouble(), optional(saved[5]),
        optional(saved[6]), optional(saved[7]));
    return {dq, dk, dv, {}, {}, {}, {}, {}, {}};
  }
};

struct AttentionPacked : Function<AttentionPacked> {
  static variable_list forward(AutogradContext* ctx, const Tensor& qkv, bool causal, double scale, double dropout,
                               const OptionalTensor& seed, const OptionalTensor& lengths,
                               const OptionalTensor& cu_seqlens) {
    static const auto op = find("aura::attention_packed");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [out, lse] = call<Tensor, Tensor>(op, qkv, causal, scale, dropout, seed, lengths, cu_seqlens);
    keep_attention(ctx, {qkv, out.tensor_data(), lse, seed.value_or(Tensor()), lengths.value_or(Tensor()),
                         cu_seqlens.value_or(Tensor())}, lse, causal, scale, dropout);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    static const auto op = find("aura::attention_packed_backward");
    const variable_list saved = kept(ctx);
    if (!gradients[0].defined()) return variable_list(7);
    const Tensor dqkv = call_one(op, gradients[0], saved[0], saved[1], saved[2], ctx->saved_data["causal"].toBool(),
                                 ctx->saved_data["scale"].toDouble(), ctx->saved_data["dropout"].toDouble(),
                                 optional(saved[3]), optional(saved[4]), optional(saved[5]));
    return {dqkv, {}, {}, {}, {}, {}, {}};
  }
};

// ---- Activations and rotary positions -------------------------------------------------------------------------------

struct GeluTanh {
  static constexpr char kForward[] = "aura::gelu_tanh", kBackward[] = "aura::gelu_tanh_backward";
};

struct Swiglu {
  static constexpr char kForward[] = "aura::swiglu", kBackward[] = "aura::swiglu_backward";
};

template <typename Name>
struct Activation : Function<Activation<Name>> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    static const auto op = find(Name::kForward);
    const at::AutoDispatchBelowADInplaceOrView below;
    keep(ctx, {x});
    return call_one(op, x);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    static const auto op = find(Name::kBackward);
    const variable_list saved = kept(ctx);
    if (!gradients[0].defined()) return {{}};
    return {call_one(op, gradients[0], saved[0])};
  }
};

struct SigmoidGate : Function<SigmoidGate> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& x) {
    static const auto op = find("aura::sigmoid_gate");
    const at::AutoDispatchBelowADInplaceOrView below;
    keep(ctx, {gate, x});
    return call_one(op, gate, x);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    static const auto op = find("aura::sigmoid_gate_backward");
    const variable_list saved = kept(ctx);
    if (!gradients[0].defined()) return variable_list(2);
    auto [dgate, dx] = call<Tensor, Tensor>(op, gradients[0], saved[0], saved[1]);
    return {dgate, dx};
  }
};

struct Rotary : Function<Rotary> {
  static Tensor forward(AutogradContext* ctx, const Tensor& qkv, const Tensor& cosine, const Tensor& sine, bool back) {
    const at::AutoDispatchBelowADInplaceOrView below;
    keep(ctx, {cosine, sine});
    ctx->saved_data["back"] = back;
    return turned(qkv, cosine, sine, back);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = kept(ctx);
    if (!gradients[0].defined()) return variable_list(4);
    return {turned(gradients[0], saved[0], saved[1], !ctx->saved_data["back"].toBool()), {}, {}, {}};
  }

  static Tensor turned(const Tensor& x, const Tensor& cosine, const Tensor& sine, bool back) {
    static const auto op = find("aura::rotary");
    return call_one(op, x, cosine, sine, back);
  }
};

// ---- What the dispatcher calls --------------------------------------------------------------------------------------

// The outputs of Applied as a tuple of `count`.
template <size_t... I>
auto as_tuple(const variable_list& outputs, std::index_sequence<I...>) {
  return std::make_tuple(outputs[I]...);
}

template <typename Applied, size_t kOutputs, typename... Inputs>
auto apply(Inputs... inputs) {
  return as_tuple(Applied::apply(inputs...), std::make_index_sequence<kOutputs>());
}

template <typename Applied, typename... Inputs>
Tensor apply_one(Inputs... inputs) {
  return Applied::apply(inputs...);
}

using In = const Tensor&;
using MaybeIn = const OptionalTensor&;

}  // namespace

TORCH_LIBRARY_IMPL(aura, Autograd, m) {
  m.impl("layer_norm", &apply<LayerNorm, 3, In, In, MaybeIn, double>);
  m.impl("rms_norm", &apply<RmsNorm, 2, In, In, double>);
  m.impl("add_layer_norm", &apply<AddLayerNorm, 4, In, In, In, MaybeIn, double, double, MaybeIn, bool>);
  m.impl("post_layer_norm", &apply<PostLayerNorm, 5, In, In, In, MaybeIn, double, double, MaybeIn>);
  m.impl("add_rms_norm", &apply<AddRmsNorm, 3, In, In, In, double, double, MaybeIn, bool>);
  m.impl("attention", &apply<Attention, 2, In, In, In, bool, double, double, MaybeIn, MaybeIn, MaybeIn>);
  m.impl("attention_packed", &apply<AttentionPacked, 2, In, bool, double, double, MaybeIn, MaybeIn, MaybeIn>);
  m.impl("gelu_tanh", &apply_one<Activation<GeluTanh>, In>);
  m.impl("swiglu", &apply_one<Activation<Swiglu>, In>);
  m.impl("sigmoid_gate", &apply_one<SigmoidGate, In, In>);
  m.impl("rotary", &apply_one<Rotary, In, In, In, bool>);
}

}  // namespace aura
