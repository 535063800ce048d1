// Every CPU kernel of one instruction set on buffers that end where their last element ends, for a build with
// -fsanitize=address: what is read or written beyond them stops the program. test_sanitized.py compiles it.
//
// SANITIZED_ISA: the namespace of the kernels. Outputs are filled with NaN before, so that what a kernel leaves
// unwritten is found too; whether the numbers are right is for the other tests.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <vector>

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "cpu/kernels.h"

namespace {

// float, bfloat16, double: their numbers in the tables of kernels.
constexpr int64_t kSizes[] = {4, 2, 8};
constexpr int kStatistics[] = {0, 0, 2};  // the type of sums: float for bfloat16
uint32_t random_state = 1;

double next_random() {
  random_state = random_state * 1664525u + 1013904223u;
  return random_state / 4294967296.0 * 4 - 2;
}

// A malloc of exactly `count` elements: the sanitizer guards both ends.
class Buffer {
 public:
  Buffer(int type, int64_t count) : type_(type), count_(count), bytes_(std::malloc(size())) {
    std::memset(bytes_, 0xff, size());  // NaN in every type
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { std::free(bytes_); }

  Buffer& random() {
    for (int64_t i = 0; i < count_; ++i) put(i, next_random());
    return *this;
  }
  Buffer& zeros() {
    std::memset(bytes_, 0, size());
    return *this;
  }
  void* at(int64_t element) { return static_cast<char*>(bytes_) + element * kSizes[type_]; }
  operator void*() { return bytes_; }

  void expect_written(const char* what) {
    for (int64_t i = 0; i < count_; ++i) {
      if (std::isnan(get(i))) {
        std::printf("%s: element %ld of %ld was not written\n", what, static_cast<long>(i), static_cast<long>(count_));
        std::exit(1);
      }
    }
  }

 private:
  size_t size() const { return static_cast<size_t>(count_ * kSizes[type_]); }
  void put(int64_t i, double value) {
    const float single = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &single, 4);
    const uint16_t upper = static_cast<uint16_t>(bits >> 16);
    const void* const forms[] = {&single, &upper, &value};
    std::memcpy(at(i), forms[type_], static_cast<size_t>(kSizes[type_]));
  }
  double get(int64_t i) {
    if (type_ == 2) return static_cast<double*>(bytes_)[i];
    if (type_ == 0) return static_cast<float*>(bytes_)[i];
    const uint32_t bits = static_cast<uint32_t>(static_cast<uint16_t*>(bytes_)[i]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }

  int type_;
  int64_t count_;
  void* bytes_;
};

const aura::Kernels& kernels() { return aura::SANITIZED_ISA::kernels(); }

aura::Dropout dropout(bool wanted) { return {wanted ? 6554u : 0u, 0x123456789abcdefu}; }

// ---- Attention ------------------------------------------------------------------------------------------------------

struct Attention {
  int type;
  int64_t batch, queries, keys, heads, width;
  bool causal, drop, packed;  // packed: [B, T, 3, H, D], else three tensors
  std::vector<aura::Sequence> sequences;
};

void attention(const Attention& a) {
  const aura::AttentionKernels& table = kernels().attention;
  const int64_t row = a.heads * a.width, q_count = a.batch * a.queries * row, k_count = a.batch * a.keys * row;
  const int sums = kStatistics[a.type];
  Buffer together(a.type, a.packed ? 3 * q_count : 0), d_together(a.type, a.packed ? 3 * q_count : 0);
  together.random();
  Buffer q(a.type, a.packed ? 0 : q_count), k(a.type, a.packed ? 0 : k_count), v(a.type, a.packed ? 0 : k_count);
  q.random(), k.random(), v.random();
  Buffer dq(a.type, a.packed ? 0 : q_count), dk(a.type, a.packed ? 0 : k_count), dv(a.type, a.packed ? 0 : k_count);

  aura::AttentionForward job{};
  aura::AttentionInputs& in = job.in;
  const auto strides = [&](int64_t rows) {
    const int64_t parts = a.packed ? 3 : 1;
    return aura::Strides{rows * parts * row, parts * row, a.width};
  };
  in.q = a.packed ? together.at(0) : q, in.k = a.packed ? together.at(row) : k;
  in.v = a.packed ? together.at(2 * row) : v;
  in.q_strides = strides(a.queries), in.k_strides = in.v_strides = strides(a.keys);
  in.sequences = a.sequences.data();
  in.queries = a.queries, in.heads = a.heads, in.width = a.width, in.causal = a.causal;
  in.scale = 0.3, in.dropout = dropout(a.drop);
  Buffer out(a.type, q_count), lse(sums, a.batch * a.queries * a.heads);
  job.out = out, job.lse = lse;

  const int64_t block = table.query_block[a.type], count = static_cast<int64_t>(a.sequences.size());
  for (int64_t s = 0; s < count; ++s) {
    const aura::Sequence& sequence = a.sequences[static_cast<size_t>(s)];
    Buffer scratch(sums, table.scratch(a.width, sequence.keys));
    for (int64_t head = 0; head < a.heads; ++head) {
      for (int64_t begin = 0; begin < sequence.queries; begin += 2 * block) {
        const int64_t end = begin + 2 * block < sequence.queries ? begin + 2 * block : sequence.queries;
        table.forward[a.type](job, {s, head, begin, end}, scratch);
      }
    }
  }
  out.expect_written("attention");
  lse.expect_written("attention: log-sum-exp");

  aura::AttentionBackward back{};
  back.in = in;
  Buffer dout(a.type, q_count);
  back.dout = dout.random(), back.out = out, back.lse = lse;
  back.dq = a.packed ? d_together.at(0) : dq, back.dk = a.packed ? d_together.at(row) : dk;
  back.dv = a.packed ? d_together.at(2 * row) : dv;
  back.dq_strides = in.q_strides, back.dk_strides = in.k_strides, back.dv_strides = in.v_strides;
  for (const bool split : {false, true}) {  // whole heads, then one block of keys a task
    const int64_t range = split ? block : a.keys + block, splits = (a.keys + range - 1) / range;
    Buffer parts(sums, split ? splits * q_count : 0), scratch(sums, table.scratch(a.width, split ? block : a.keys));
    back.dq_parts = split ? static_cast<void*>(parts.zeros()) : nullptr;
    back.dq_part_size = q_count;
    for (int64_t s = 0; s < count; ++s) {
      const int64_t keys = a.sequences[static_cast<size_t>(s)].keys;
      for (int64_t head = 0; head < a.heads; ++head) {
        for (int64_t i = 0; i == 0 || i * range < keys; ++i) {
          const int64_t end = (i + 1) * range < keys ? (i + 1) * range : keys;
          table.backward[a.type](back, {s, head, i * range, end}, i, scratch);
        }
      }
    }
  }
  int64_t seen = 0;
  for (const aura::Sequence& sequence : a.sequences) seen += sequence.keys;
  if (seen < a.batch * a.keys) return;  // padding has no task: its gradients are the caller's to clear
  for (Buffer* gradient : {&d_together, &dq, &dk, &dv}) gradient->expect_written("attention: gradients");
}

void all_attention() {
  for (int type = 0; type < 3; ++type) {
    for (const bool drop : {false, true}) {
      for (const bool causal : {false, true}) {
        for (const int64_t rows : {1, 7, 48, 65, 127}) {
          for (const int64_t width : {1, 8, 33, 40, 64}) {
            attention({type, 1, rows, rows, 2, width, causal, drop, rows % 2 == 0, {{0, 0, rows, rows}}});
          }
        }
        attention({type, 1, 49, 49, 1, 256, causal, drop, true, {{0, 0, 49, 49}}});
        attention({type, 3, 50, 50, 1, 24, causal, drop, true, {{0, 0, 50, 0}, {1, 0, 50, 50}, {2, 0, 50, 17}}});
        attention({type, 1, 120, 120, 1, 24, causal, drop, false,
                   {{0, 0, 1, 1}, {0, 1, 0, 0}, {0, 1, 70, 70}, {0, 71, 49, 49}}});
      }
      attention({type, 2, 5, 130, 1, 40, false, drop, false, {{0, 0, 5, 130}, {1, 0, 5, 49}}});
      attention({type, 1, 100, 3, 1, 40, false, drop, false, {{0, 0, 100, 3}}});
      // The share of the scratch memory that grows with the keys, of heads narrower than a vector, shows nowhere else.
      attention({type, 1, 3, 2500, 1, 8, false, drop, false, {{0, 0, 3, 2500}}});
    }
  }
}

// ---- Norms ----------------------------------------------------------------------------------------------------------

// Numbers of the types of x, of the residual and of the weight, by NormTypes: those that the CPU has kernels for.
constexpr int kCpuTypes = 5;
constexpr int kNormTypes[kCpuTypes][3] = {{0, 0, 0}, {1, 1, 1}, {1, 1, 0}, {1, 0, 0}, {2, 2, 2}};

void norm(int types, bool rms, bool add, bool drop, bool bias_wanted, int64_t rows, int64_t columns) {
  const aura::NormKernels& table = kernels().norms;
  const int x_type = kNormTypes[types][0], type = kNormTypes[types][1], weight_type = kNormTypes[types][2];
  const int sums = kStatistics[type];
  const int64_t count = rows * columns;
  Buffer x(x_type, count), residual(type, count), weight(weight_type, columns), bias(weight_type, columns);
  x.random(), residual.random(), weight.random(), bias.random();
  Buffer new_residual(type, count), y(type, count), mean(sums, rows), rstd(sums, rows);
  aura::NormForward job{};
  job.columns = columns, job.eps = 1e-5, job.x = x, job.weight = weight, job.bias = bias_wanted ? bias.at(0) : nullptr;
  job.residual = add ? residual.at(0) : nullptr, job.new_residual = add ? new_residual.at(0) : nullptr;
  job.y = y, job.rstd = rstd, job.mean = rms ? nullptr : mean.at(0), job.dropout = dropout(drop);
  (rms ? table.rms_norm : table.layer_norm)[types](job, 0, rows);
  y.expect_written("norm"), rstd.expect_written("norm: rstd");
  if (add) new_residual.expect_written("norm: new residual");
  if (!rms) mean.expect_written("norm: mean");

  Buffer dy(type, count), past(type, count), dresidual(type, count), dx(x_type, count);
  dy.random(), past.random();
  const int64_t stride = (rms ? 1 : 2) * columns, half = rows / 2;
  Buffer partials(sums, 2 * stride), dweight(weight_type, columns);
  aura::NormBackward back{};
  back.columns = columns, back.dy = dy, back.weight = weight, back.rstd = rstd;
  back.mean = rms ? nullptr : mean.at(0), back.x = add ? new_residual.at(0) : x.at(0);
  back.d_new_residual = add ? past.at(0) : nullptr, back.dresidual = dresidual;
  const bool apart = drop || x_type != type;
  back.dx = apart ? dx.at(0) : nullptr, back.dropout = dropout(drop);
  const auto run = (rms ? table.rms_norm_backward : table.layer_norm_backward)[types];
  run(back, 0, half, partials.at(0));
  run(back, half, rows, partials.at(stride));
  table.reduce[types](partials, 2, stride, 0, columns, dweight);
  dresidual.expect_written("norm: gradient"), dweight.expect_written("norm: dweight");
  partials.expect_written("norm: partial sums");
  if (apart) dx.expect_written("norm: dx");
}

void all_norms() {
  for (int types = 0; types < kCpuTypes; ++types) {
    const bool mixed = kNormTypes[types][0] != kNormTypes[types][1];
    for (const int64_t columns : {1, 7, 8, 15, 17, 31, 64, 100, 129, 300}) {
      for (int flags = 0; flags < 16; ++flags) {
        const bool rms = flags & 1, add = flags & 2, drop = flags & 4, bias = flags & 8;
        if ((drop && !add) || (mixed && !add) || (rms && bias)) continue;
        for (const int64_t rows : {1, 9}) norm(types, rms, add, drop, bias, rows, columns);
      }
    }
  }
}

// ---- Activations and loss -------------------------------------------------------------------------------------------

void all_activations() {
  const aura::ActivationKernels& table = kernels().activation;
  for (int type = 0; type < 3; ++type) {
    for (const int64_t width : {1, 2, 3, 7, 8, 15, 16, 17, 33, 100}) {
      Buffer x(type, width), dy(type, width), y(type, width), dx(type, width);
      table.gelu_tanh[type](x.random(), y, width);
      table.gelu_tanh_backward[type](dy.random(), x, dx, width);
      y.expect_written("gelu_tanh"), dx.expect_written("gelu_tanh: gradient");
      Buffer pair(type, 6 * width), product(type, 3 * width), d_product(type, 3 * width), d_pair(type, 6 * width);
      table.swiglu[type](pair.random(), product, 3, width);
      table.swiglu_backward[type](d_product.random(), pair, d_pair, 3, width);
      product.expect_written("swiglu"), d_pair.expect_written("swiglu: gradient");
      Buffer gate(type, width), dgate(type, width);
      table.sigmoid_gate[type](gate.random(), x, y, width);
      table.sigmoid_gate_backward[type](dy, gate, x, dgate, dx, width);
      y.expect_written("sigmoid_gate"), dx.expect_written("sigmoid_gate"), dgate.expect_written("sigmoid_gate: gate");
    }
  }
}

void all_losses() {
  for (int type = 0; type < 3; ++type) {
    for (const int64_t classes : {1, 2, 7, 16, 17, 63, 64, 65, 100, 16385}) {
      for (const int64_t gap : {0, 3}) {  // between rows; none after the last
        Buffer logits(type, 3 * classes + 2 * gap), losses(2, 3);
        logits.random();
        int64_t* targets = static_cast<int64_t*>(std::malloc(3 * sizeof(int64_t)));
        targets[0] = 0, targets[1] = -100, targets[2] = classes - 1;
        for (const bool gradient : {false, true}) {
          const aura::CrossEntropyRows job{logits, classes + gap, classes, targets, -100,
                                           static_cast<double*>(static_cast<void*>(losses)), gradient};
          kernels().loss.cross_entropy[type](job, 0, 3);
        }
        losses.expect_written("cross_entropy"), logits.expect_written("cross_entropy: gradient");
        std::free(targets);
      }
    }
  }
}

// ---- Rotary positions -----------------------------------------------------------------------------------------------

void all_rotary() {
  for (int type = 0; type < 3; ++type) {
    for (const int64_t half : {1, 3, 8, 15, 16, 17, 64}) {
      for (const int64_t gap : {0, 5}) {  // between rows; none after the last
        const int64_t row = 3 * 2 * 2 * half;
        Buffer x(type, 4 * row + 3 * gap), y(type, 4 * row);
        Buffer cosine(kStatistics[type], 2 * half), sine(kStatistics[type], 2 * half);
        x.random(), cosine.random(), sine.random();
        const aura::RotaryRows job{x, y, row + gap, 2, 2, half, cosine, sine, gap == 0};
        kernels().rotary.rotary[type](job, 0, 4);
        y.expect_written("rotary");
      }
    }
  }
}

}  // namespace

int main() {
#if defined(__AMX_TILE__)
  if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 2;  // as csrc/ops.cpp asks for the tiles
#endif
  all_attention();
  all_norms();
  all_activations();
  all_losses();
  all_rotary();
  std::printf("%s: nothing found\n", kernels().name);
}
