// aura::attention and its gradient: checks, outputs, and the work shared out among threads, or handed to the GPU.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu/kernels.h"
#include "ops.h"

namespace aura {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// What the caller gave besides the three tensors.
struct Options {
  bool causal;
  double scale;
  double dropout;
  const OptionalTensor &seed, &lengths, &cu_seqlens;
};

// The kernels' view of one call; owns what it points to.
struct Call {
  Tensor q, k, v;  // [B, T, H, D] with d contiguous
  AttentionInputs inputs;
  std::vector<Sequence> sequences;  // on the CPU
  int type;
  const cuda::Kernels* gpu;  // null: the CPU
  cuda::AttentionShape shape;
  Tensor lengths, cu_seqlens;
};

Strides strides_of(const Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

Tensor with_contiguous_rows(const Tensor& t) { return t.stride(3) == 1 || t.size(3) == 1 ? t : t.contiguous(); }

// The same for the kernels of a GPU, which read 16 bytes of a row at a time: every row begins at a multiple of that, and
// 128 of them span less than 2^31 elements.
Tensor with_aligned_rows(const Tensor& t) {
  const Tensor rows = with_contiguous_rows(t);
  const int64_t values = 16 / rows.element_size();
  bool aligned = reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % 16 == 0 && rows.stride(1) < INT32_MAX / 128;
  for (int64_t i = 0; i < 3; ++i) aligned = aligned && rows.stride(i) % values == 0;
  return aligned ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

std::vector<int64_t> integers(const Tensor& t, const char* name) {
  TORCH_CHECK(t.device().is_cpu() && t.dim() == 1, name, " must be a one-dimensional tensor on the CPU");
  TORCH_CHECK(t.scalar_type() == at::kInt || t.scalar_type() == at::kLong, name, " must hold int32 or int64");
  const Tensor values = t.to(at::kLong).contiguous();
  const int64_t* data = values.const_data_ptr<int64_t>();
  return std::vector<int64_t>(data, data + values.numel());
}

std::vector<Sequence> padded_batch(const Tensor& q, const Tensor& k, const OptionalTensor& lengths) {
  const int64_t batch = q.size(0), keys = k.size(1);
  std::vector<int64_t> seen(batch, keys);
  if (lengths.has_value()) {
    seen = integers(*lengths, "lengths");
    TORCH_CHECK(static_cast<int64_t>(seen.size()) == batch, "lengths must have one entry for each batch entry");
  }
  std::vector<Sequence> sequences;
  for (int64_t b = 0; b < batch; ++b) {
    TORCH_CHECK(seen[b] >= 0 && seen[b] <= keys, "lengths[", b, "] = ", seen[b], " is not between 0 and ", keys);
    sequences.push_back({b, 0, q.size(1), seen[b]});
  }
  return sequences;
}

std::vector<Sequence> documents(int64_t rows, const Tensor& cu_seqlens) {
  const std::vector<int64_t> bounds = integers(cu_seqlens, "cu_seqlens");
  TORCH_CHECK(!bounds.empty() && bounds.front() == 0 && bounds.back() == rows, "cu_seqlens must begin with 0 and end with ",
              rows, ", the number of tokens");
  std::vector<Sequence> sequences;
  for (size_t i = 1; i < bounds.size(); ++i) {
    TORCH_CHECK(bounds[i] >= bounds[i - 1], "cu_seqlens must not decrease: ", bounds[i - 1], ", ", bounds[i]);
    sequences.push_back({0, bounds[i - 1], bounds[i] - bounds[i - 1], bounds[i] - bounds[i - 1]});
  }
  return sequences;
}

// int64 on the device of q. prepare() checks those in host memory; those of a GPU are taken as they are, since looking
// at them would mean waiting for all that is queued.
Tensor on_device(const OptionalTensor& t, const Tensor& q) {
  if (!t.has_value()) return Tensor();
  // Pinned memory would be read when the stream comes to it, and its owner may have filled it anew by then.
  const Tensor settled = t->is_cpu() && t->is_pinned() ? t->clone() : *t;
  return settled.to(q.device(), at::kLong, /*non_blocking=*/true).contiguous();
}

bool in_host_memory(const OptionalTensor& t) { return !t.has_value() || t->is_cpu(); }

// What the kernels of a GPU are told instead of sequences.
void describe(Call* call, const Options& options) {
  const Tensor& q = call->q;
  TORCH_CHECK(q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16, "attention: dtype ", q.scalar_type(),
              " is not float16 or bfloat16, which the kernels of a GPU take");
  const auto holds = [](const OptionalTensor& t, int64_t least, int64_t most) {
    return !t.has_value() || (t->dim() == 1 && at::isIntegralType(t->scalar_type(), false) && t->numel() >= least &&
                              t->numel() <= most);
  };
  TORCH_CHECK(holds(options.lengths, q.size(0), q.size(0)), "attention: lengths must be ", q.size(0), " integers");
  TORCH_CHECK(holds(options.cu_seqlens, 2, INT32_MAX), "attention: cu_seqlens must be two integers or more");
  call->lengths = on_device(options.lengths, q);
  call->cu_seqlens = on_device(options.cu_seqlens, q);
  cuda::AttentionShape& shape = call->shape;
  shape.batch = q.size(0);
  shape.keys = call->k.size(1);
  shape.lengths = call->lengths.defined() ? call->lengths.const_data_ptr<int64_t>() : nullptr;
  shape.cu_seqlens = call->cu_seqlens.defined() ? call->cu_seqlens.const_data_ptr<int64_t>() : nullptr;
  shape.documents = call->cu_seqlens.defined() ? call->cu_seqlens.numel() - 1 : 0;
  shape.half = q.scalar_type() == at::kHalf;
}

// [B, T, H, D] as one batch entry of B * T rows, a view wherever the strides allow.
Tensor flattened(const Tensor& t) { return t.reshape({1, t.size(0) * t.size(1), t.size(2), t.size(3)}); }

Call prepare(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "attention: q, k, v must be [B, T, H, D]");
  TORCH_CHECK(q.device() == k.device() && q.device() == v.device(), "attention: q, k, v must be on the same device");
  TORCH_CHECK(k.sizes() == v.sizes(), "attention: k and v must have the same shape");
  TORCH_CHECK(q.size(0) == k.size(0) && q.size(2) == k.size(2) && q.size(3) == k.size(3),
              "attention: q and k must agree in batch, heads and head width");
  TORCH_CHECK(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(),
              "attention: q, k, v must have the same dtype");
  TORCH_CHECK(q.size(3) >= 1 && q.size(3) <= 256, "attention: head width ", q.size(3), " is not between 1 and 256");
  TORCH_CHECK(!options.causal || q.size(1) == k.size(1), "attention: causal needs as many queries as keys");
  TORCH_CHECK(!options.cu_seqlens.has_value() || (!options.lengths.has_value() && q.size(1) == k.size(1)),
              "attention: cu_seqlens excludes lengths and needs as many queries as keys");
  const bool packed = options.cu_seqlens.has_value();
  Call call{};
  call.gpu = gpu_kernels(q, "attention");
  const auto readable = call.gpu ? with_aligned_rows : with_contiguous_rows;
  call.q = readable(packed ? flattened(q) : q);
  call.k = readable(packed ? flattened(k) : k);
  call.v = readable(packed ? flattened(v) : v);
  if (call.gpu) {
    describe(&call, options);
  } else {
    call.type = kernel_type(q, "attention");
  }
  if (in_host_memory(options.lengths) && in_host_memory(options.cu_seqlens)) {
    call.sequences = packed ? documents(call.q.size(1), *options.cu_seqlens) : padded_batch(q, k, options.lengths);
  } else {
    TORCH_CHECK(call.gpu, "attention: lengths and cu_seqlens must be on the CPU, as q is");
  }
  AttentionInputs& in = call.inputs;
  in.q = call.q.const_data_ptr();
  in.k = call.k.const_data_ptr();
  in.v = call.v.const_data_ptr();
  in.q_strides = strides_of(call.q);
  in.k_strides = strides_of(call.k);
  in.v_strides = strides_of(call.v);
  in.sequences = call.sequences.data();
  in.queries = call.q.size(1);
  in.heads = q.size(2);
  in.width = q.size(3);
  in.causal = options.causal;
  in.scale = options.scale;
  in.dropout = dropout_of(options.dropout, options.seed);
  TORCH_CHECK(!call.gpu || call.gpu->attention.takes(in), "attention: no kernel for head width ", in.width,
              " on this GPU, or for a scale of ", in.scale);
  return call;
}

// Run work(task number, the thread's own scratch memory) for all tasks. Each thread takes the next when it is free:
// under a causal mask they differ in length.
template <typename Work>
void share_out(int64_t tasks, int64_t scratch_bytes, Work work) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(tasks, at::get_num_threads());
  const Tensor memory = at::empty({threads, scratch_bytes + 64}, at::kByte);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      auto* scratch = static_cast<uint8_t*>(memory.data_ptr()) + thread * (scratch_bytes + 64);
      scratch += (64 - reinterpret_cast<uintptr_t>(scratch) % 64) % 64;
      for (int64_t task; (task = next.fetch_add(1)) < tasks;) work(task, scratch);
    }
  });
}

int64_t scratch_bytes(const Call& call, int64_t keys) {
  const int64_t size = call.q.scalar_type() == at::kDouble ? sizeof(double) : sizeof(float);
  return kernels().attention.scratch(call.inputs.width, keys) * size;
}

at::ScalarType statistics_type(const Tensor& q) { return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// How many tasks the rows of one head are split into: one where there are heads enough for every thread, since each task
// collects the head's keys anew in forward and leaves a partial dq in backward; else a few for each thread, never shorter
// than two blocks.
int64_t splits_of(const Call& call, int64_t rows) {
  const int64_t heads = call.inputs.heads * static_cast<int64_t>(call.sequences.size());
  const int64_t wanted = 4 * at::get_num_threads();
  if (at::get_num_threads() == 1 || heads >= wanted || heads == 0) return 1;
  const int64_t shortest = 2 * kernels().attention.query_block[call.type];
  return std::max<int64_t>(1, std::min((wanted + heads - 1) / heads, rows / shortest));
}

// The length of a task, whole blocks, when `rows` are split.
int64_t range_of(const Call& call, int64_t rows, int64_t splits) {
  const int64_t block = kernels().attention.query_block[call.type];
  return std::max<int64_t>(1, (rows + splits * block - 1) / (splits * block)) * block;
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) {
  const Call call = prepare(q, k, v, options);
  const AttentionInputs& in = call.inputs;
  const Tensor out = at::empty({q.size(0), q.size(1), q.size(2), q.size(3)}, q.options());
  const Tensor lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(statistics_type(q)));
  const AttentionForward job{in, out.mutable_data_ptr(), lse.mutable_data_ptr()};
  if (call.gpu) {
    const Tensor counter = at::empty({1}, q.options().dtype(at::kInt));
    on_gpu(call.gpu, q, "attention", [&](void* stream) {
      return call.gpu->attention.forward(job, call.shape, counter.mutable_data_ptr<int>(), stream);
    });
    return {out, lse};
  }
  const int64_t range = range_of(call, in.queries, splits_of(call, in.queries));
  std::vector<AttentionTask> tasks;
  int64_t keys = 0;
  for (size_t s = 0; s < call.sequences.size(); ++s) {
    const Sequence& sequence = call.sequences[s];
    keys = std::max(keys, sequence.keys);
    for (int64_t head = 0; head < in.heads; ++head) {
      for (int64_t begin = 0; begin < sequence.queries; begin += range) {
        tasks.push_back({static_cast<int64_t>(s), head, begin, std::min(begin + range, sequence.queries)});
      }
    }
  }
  // Under a causal mask the last rows of a sequence take longest: they go first.
  std::stable_sort(tasks.begin(), tasks.end(), [](const auto& a, const auto& b) { return a.end > b.end; });
  const auto run = kernels().attention.forward[call.type];
  share_out(tasks.size(), scratch_bytes(call, keys), [&](int64_t i, void* scratch) { run(job, tasks[i], scratch); });
  return {out, lse};
}

// Zeros for the keys no task looks at: those beyond a batch entry's length.
void clear_unseen(const Call& call, const Tensor& grad) {
  for (const Sequence& s : call.sequences) {
    grad.select(0, s.batch).narrow(0, s.keys, grad.size(1) - s.keys).zero_();
  }
}

// Shares the keys out among threads; where several tasks add to dq, their parts are summed at the end.
void backward_on_cpu(const Call& call, AttentionBackward job, const Tensor& lse, const Tensor& dq) {
  const int64_t keys = call.k.size(1);
  const int64_t splits = splits_of(call, keys);
  const int64_t range = range_of(call, keys, splits);
  Tensor parts;
  if (splits > 1) {
    parts = at::zeros({splits, dq.size(0), dq.size(1), dq.size(2), dq.size(3)}, lse.options());
    job.dq_parts = parts.mutable_data_ptr();
    job.dq_part_size = dq.numel();
  }
  struct Split {
    AttentionTask task;
    int64_t number;
  };
  std::vector<Split> tasks;
  for (size_t s = 0; s < call.sequences.size(); ++s) {
    for (int64_t head = 0; head < call.inputs.heads; ++head) {
      const int64_t end = call.sequences[s].keys;
      tasks.push_back({{static_cast<int64_t>(s), head, 0, std::min(range, end)}, 0});
      for (int64_t i = 1; i * range < end; ++i) {
        tasks.push_back({{static_cast<int64_t>(s), head, i * range, std::min((i + 1) * range, end)}, i});
      }
    }
  }
  const auto run = kernels().attention.backward[call.type];
  share_out(tasks.size(), scratch_bytes(call, range), [&](int64_t i, void* scratch) {
    run(job, tasks[i].task, tasks[i].number, scratch);
  });
  if (splits > 1) dq.copy_(at::sum(parts, {0}));
}

void backward_on_gpu(const Call& call, const AttentionBackward& job) {
  const cuda::AttentionKernels& table = call.gpu->attention;
  const int64_t bytes = table.workspace(call.inputs, call.shape);
  const Tensor workspace = at::empty({bytes}, call.q.options().dtype(at::kByte));
  on_gpu(call.gpu, call.q, "attention", [&](void* stream) {
    return table.backward(job, call.shape, workspace.mutable_data_ptr(), stream);
  });
}

void backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
              const Tensor& lse, const Options& options, const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  const Call call = prepare(q, k, v, options);
  TORCH_CHECK(dout.sizes() == q.sizes() && dout.scalar_type() == q.scalar_type(),
              "attention: the gradient must look like the output");
  TORCH_CHECK(out.sizes() == q.sizes() && out.scalar_type() == q.scalar_type(), "attention: out is of another forward");
  TORCH_CHECK(lse.sizes() == q.sizes().slice(0, 3) && lse.scalar_type() == statistics_type(q),
              "attention: lse is of another forward");
  for (const Tensor& t : {dout, out, lse}) {
    TORCH_CHECK(t.device() == q.device(), "attention: the gradient, out and lse must be where q is");
  }
  const auto readable = call.gpu ? with_aligned_rows : with_contiguous_rows;
  const Tensor gradient = readable(dout.contiguous()), output = readable(out.contiguous()), sums = lse.contiguous();
  const bool packed = options.cu_seqlens.has_value();
  const Tensor dq_rows = packed ? dq.view(call.q.sizes()) : dq;
  const Tensor dk_rows = packed ? dk.view(call.k.sizes()) : dk;
  const Tensor dv_rows = packed ? dv.view(call.v.sizes()) : dv;
  const AttentionBackward job{call.inputs, gradient.const_data_ptr(), output.const_data_ptr(), sums.const_data_ptr(),
                              dq_rows.mutable_data_ptr(), dk_rows.mutable_data_ptr(), dv_rows.mutable_data_ptr(),
                              strides_of(dq_rows), strides_of(dk_rows), strides_of(dv_rows), nullptr, 0};
  if (call.gpu) return backward_on_gpu(call, job);
  backward_on_cpu(call, job, lse, dq);
  if (options.lengths.has_value()) {
    clear_unseen(call, dk);
    clear_unseen(call, dv);
  }
}

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double scale,
                                     double dropout, const OptionalTensor& seed, const OptionalTensor& lengths,
                                     const OptionalTensor& cu_seqlens) {
  return forward(q, k, v, {causal, scale, dropout, seed, lengths, cu_seqlens});
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                                      const Tensor& v, const Tensor& out, const Tensor& lse,
                                                      bool causal, double scale, double dropout,
                                                      const OptionalTensor& seed, const OptionalTensor& lengths,
                                                      const OptionalTensor& cu_seqlens) {
  const Tensor dq = at::empty(q.sizes(), q.options()), dk = at::empty(k.sizes(), k.options());
  const Tensor dv = at::empty(v.sizes(), v.options());
  backward(dout, q, k, v, out, lse, {causal, scale, dropout, seed, lengths, cu_seqlens}, dq, dk, dv);
  return {dq, dk, dv};
}

void check_packed(const Tensor& qkv) {
  TORCH_CHECK(qkv.dim() == 5 && qkv.size(2) == 3, "attention: a packed projection must be [B, T, 3, H, D]");
}

std::tuple<Tensor, Tensor> attention_packed(const Tensor& qkv, bool causal, double scale, double dropout,
                                            const OptionalTensor& seed, const OptionalTensor& lengths,
                                            const OptionalTensor& cu_seqlens) {
  check_packed(qkv);
  return forward(qkv.select(2, 0), qkv.select(2, 1), qkv.select(2, 2),
                 {causal, scale, dropout, seed, lengths, cu_seqlens});
}

Tensor attention_packed_backward(const Tensor& dout, const Tensor& qkv, const Tensor& out, const Tensor& lse,
                                 bool causal, double scale, double dropout, const OptionalTensor& seed,
                                 const OptionalTensor& lengths, const OptionalTensor& cu_seqlens) {
  check_packed(qkv);
  const Tensor dqkv = at::empty(qkv.sizes(), qkv.options());
  backward(dout, qkv.select(2, 0), qkv.select(2, 1), qkv.select(2, 2), out, lse,
           {causal, scale, dropout, seed, lengths, cu_seqlens}, dqkv.select(2, 0), dqkv.select(2, 1), dqkv.select(2, 2));
  return dqkv;
}

}  // namespace

#define AURA_OPTIONS "bool causal, float scale, float dropout, Tensor? seed, Tensor? lengths, Tensor? cu_seqlens"

TORCH_LIBRARY_FRAGMENT(aura, m) {
  m.def("attention(Tensor q, Tensor k, Tensor v, " AURA_OPTIONS ") -> (Tensor, Tensor)");
  m.def("attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, " AURA_OPTIONS
        ") -> (Tensor, Tensor, Tensor)");
  m.def("attention_packed(Tensor qkv, " AURA_OPTIONS ") -> (Tensor, Tensor)");
  m.def("attention_packed_backward(Tensor dout, Tensor qkv, Tensor out, Tensor lse, " AURA_OPTIONS ") -> Tensor");
}

static void implement_attention(torch::Library& m) {
  m.impl("attention", &attention);
  m.impl("attention_backward", &attention_backward);
  m.impl("attention_packed", &attention_packed);
  m.impl("attention_packed_backward", &attention_packed_backward);
}

TORCH_LIBRARY_IMPL(aura, CPU, m) { implement_attention(m); }
TORCH_LIBRARY_IMPL(aura, CUDA, m) { implement_attention(m); }

}  // namespace aura
