// Compiled once for each instruction set: the namespace and the vectors follow from the compiler's flags.
#include "cpu/kernels.h"

#include "cpu/activation.inl"
#include "cpu/attention.inl"
#include "cpu/loss.inl"
#include "cpu/norms.inl"
#include "cpu/rotary.inl"

#define AURA_TEXT(x) #x
#define AURA_NAME(x) AURA_TEXT(x)

namespace aura {
namespace AURA_ISA {

const Kernels& kernels() {
  static constexpr Kernels table = {AURA_NAME(AURA_ISA), kAttention, kNorms, kActivation, kLoss, kRotary};
  return table;
}

}  // namespace AURA_ISA
}  // namespace aura
