// GELU in its tanh form, SwiGLU and a sigmoid gate, forward and backward; the formulas and the bounds that keep their
// exponentials finite are those of csrc/cpu/activation.inl.
//
// All of this is bound by memory: every element is read once and written once, by 16-byte accesses where the rows are
// aligned for it. A thread has one vector of each tensor, so that a card has as many loads under way as it has threads.
#include "cuda/activation.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vectors.cuh"

namespace aura {
namespace cuda {
namespace {

constexpr int kThreads = 256;  // of a block, at most
constexpr float kGeluBound = 9.0f;
constexpr float kSiluBound = 64.0f;

// ---- The functions, of one element ---------------------------------------------------------------------------------

// Not fminf and fmaxf, which lose NaNs.
__device__ __forceinline__ float at_least(float x, float low) { return x < low ? low : x; }
__device__ __forceinline__ float bounded(float x, float bound) {
  x = at_least(x, -bound);
  return x > bound ? bound : x;
}

// sigmoid(x) and 1 - sigmoid(x), neither by subtraction.
struct Sigmoid {
  float value, rest;
};
__device__ __forceinline__ Sigmoid sigmoid(float x) {
  const float e = exp2_fast(x * -kLog2E);
  const float value = __fdividef(1.0f, e + 1.0f);
  return {value, e * value};
}

// 2u = 2 sqrt(2/pi) (x + 0.044715 x^3) and its derivative (Hendrycks and Gimpel 2016).
constexpr double kLinear = 1.59576912160573071176;
constexpr double kCubic = 0.044715 * kLinear;
__device__ __forceinline__ float twice_u(float x) {
  return x * (x * x * static_cast<float>(kCubic) + static_cast<float>(kLinear));
}
__device__ __forceinline__ float twice_u_slope(float x) {
  return x * x * static_cast<float>(3 * kCubic) + static_cast<float>(kLinear);
}

struct GeluTanh {
  static constexpr int kInputs = 1, kOutputs = 1;
  static __device__ __forceinline__ void of(const float (&in)[1], float (&out)[1]) {
    const float x = at_least(in[0], -kGeluBound);
    out[0] = x * sigmoid(twice_u(x)).value;
  }
};

struct GeluTanhBackward {
  static constexpr int kInputs = 2, kOutputs = 1;
  static __device__ __forceinline__ void of(const float (&in)[2], float (&out)[1]) {
    const float x = bounded(in[1], kGeluBound);
    const Sigmoid s = sigmoid(twice_u(x));
    out[0] = in[0] * (s.value + x * s.rest * s.value * twice_u_slope(x));
  }
};

struct Swiglu {
  static constexpr int kInputs = 2, kOutputs = 1;
  static __device__ __forceinline__ void of(const float (&in)[2], float (&out)[1]) {
    const float gate = at_least(in[0], -kSiluBound);
    out[0] = gate * sigmoid(gate).value * in[1];
  }
};

// The slope of SiLU is 1 past its bound, so its sigmoid is that of the bounded gate; SiLU itself goes on growing.
struct SwigluBackward {
  static constexpr int kInputs = 3, kOutputs = 2;
  static __device__ __forceinline__ void of(const float (&in)[3], float (&out)[2]) {
    const float low = at_least(in[1], -kSiluBound), gate = bounded(in[1], kSiluBound);
    const Sigmoid s = sigmoid(gate);
    out[0] = in[0] * in[2] * (s.value + gate * s.rest * s.value);
    out[1] = in[0] * (low * s.value);
  }
};

struct SigmoidGate {
  static constexpr int kInputs = 2, kOutputs = 1;
  static __device__ __forceinline__ void of(const float (&in)[2], float (&out)[1]) {
    out[0] = sigmoid(bounded(in[0], kSiluBound)).value * in[1];
  }
};

struct SigmoidGateBackward {
  static constexpr int kInputs = 3, kOutputs = 2;
  static __device__ __forceinline__ void of(const float (&in)[3], float (&out)[2]) {
    const Sigmoid s = sigmoid(bounded(in[1], kSiluBound));
    const float d = in[0] * s.value;
    out[0] = d * s.rest * in[2];
    out[1] = d;
  }
};

// ---- All elements --------------------------------------------------------------------------------------------------

template <typename T, typename Function, int kCount>
__device__ __forceinline__ void apply(const ActivationRows& a, int64_t row, int64_t column) {
  Vector<T, kCount> in[Function::kInputs];
#pragma unroll
  for (int i = 0; i < Function::kInputs; ++i) {
    in[i] = load<T, kCount>(a.tensors[i].data, row * a.tensors[i].stride + column);
  }
  float out[Function::kOutputs][kCount];
#pragma unroll
  for (int element = 0; element < kCount; ++element) {
    float x[Function::kInputs], y[Function::kOutputs];
#pragma unroll
    for (int i = 0; i < Function::kInputs; ++i) x[i] = in[i][element];
    Function::of(x, y);
#pragma unroll
    for (int i = 0; i < Function::kOutputs; ++i) out[i][element] = y[i];
  }
#pragma unroll
  for (int i = 0; i < Function::kOutputs; ++i) {
    const Rows& to = a.tensors[Function::kInputs + i];
    store(const_cast<void*>(to.data), row * to.stride + column, to_vector<T>(out[i]));
  }
}

// threadIdx.x counts vectors of a row, threadIdx.y rows; one thread takes what is left of a row after its whole
// vectors.
template <typename T, typename Function, int kCount>
__global__ void __launch_bounds__(kThreads) elements(const ActivationRows a) {
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kCount;
  const int64_t step = int64_t{gridDim.x} * blockDim.x * kCount;
  for (int64_t row = int64_t{blockIdx.y} * blockDim.y + threadIdx.y; row < a.rows;
       row += int64_t{gridDim.y} * blockDim.y) {
    int64_t column = first;
    for (; column + kCount <= a.width; column += step) apply<T, Function, kCount>(a, row, column);
    if constexpr (kCount > 1) {
      for (; column < a.width; ++column) apply<T, Function, 1>(a, row, column);
    }
  }
}

// ---- Launches -----------------------------------------------------------------------------------------------------

// Whether every row of every tensor begins on 16 bytes.
bool aligned(const ActivationRows& a, int tensors, int count) {
  return std::all_of(a.tensors, a.tensors + tensors, [&](const Rows& each) {
    return reinterpret_cast<uintptr_t>(each.data) % 16 == 0 && (a.rows == 1 || each.stride % count == 0);
  });
}

// As many threads in x as cover a row with the fewest blocks, all of about one size; those that a short row leaves are
// for other rows.
dim3 block_of(int64_t vectors) {
  if (vectors <= kWarp) return dim3(static_cast<unsigned>(vectors), static_cast<unsigned>(kThreads / vectors));
  const int64_t each = ceil_div(vectors, ceil_div(vectors, kThreads));
  return dim3(static_cast<unsigned>(ceil_div(each, kWarp) * kWarp));
}

template <typename T, typename Function>
const char* queue(const ActivationRows& a, void* stream) {
  constexpr int kCount = 16 / kBytes<T>;
  const bool wide = aligned(a, Function::kInputs + Function::kOutputs, kCount);
  const int64_t vectors = ceil_div(a.width, wide ? kCount : 1);
  const dim3 block = block_of(vectors);
  return launch(wide ? elements<T, Function, kCount> : elements<T, Function, 1>,
                grid_of(ceil_div(vectors, block.x), ceil_div(a.rows, block.y)), block, 0, stream, a);
}

const char* run(Activation activation, const ActivationRows& a, Element element, void* stream) {
  if (a.rows == 0 || a.width == 0) return nullptr;
  return with_element(element, [&](auto t) -> const char* {
    using T = decltype(t);
    switch (activation) {
      case Activation::kGeluTanh: return queue<T, GeluTanh>(a, stream);
      case Activation::kGeluTanhBackward: return queue<T, GeluTanhBackward>(a, stream);
      case Activation::kSwiglu: return queue<T, Swiglu>(a, stream);
      case Activation::kSwigluBackward: return queue<T, SwigluBackward>(a, stream);
      case Activation::kSigmoidGate: return queue<T, SigmoidGate>(a, stream);
      case Activation::kSigmoidGateBackward: return queue<T, SigmoidGateBackward>(a, stream);
    }
    return "no such activation function";
  });
}

}  // namespace

ActivationKernels activation_kernels() { return {run}; }

}  // namespace cuda
}  // namespace aura
