// Every CPU kernel, once for each instruction set, behind one table of functions.
#pragma once

#include "attention.h"
#include "cpu/activation.h"
#include "loss.h"
#include "norms.h"
#include "rotary.h"

namespace aura {

struct Kernels {
  const char* name;
  AttentionKernels attention;
  NormKernels norms;
  ActivationKernels activation;
  LossKernels loss;
  RotaryKernels rotary;
};

namespace portable {
const Kernels& kernels();
}
#if defined(__x86_64__)
namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
namespace avx512bf16 {
const Kernels& kernels();
}
namespace amx {
const Kernels& kernels();
}
#endif

// What is fastest on this processor, or the table AURA_CPU_ISA names (portable, avx2, avx512, avx512bf16, amx). Chosen
// once. Throws std::invalid_argument when the name is unknown or the processor lacks the instructions.
const Kernels& kernels();

}  // namespace aura
