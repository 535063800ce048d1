// csrc/cuda/library.cpp for the emulator: the table for tensors in host memory.
#include "cuda/kernels.h"

extern "C" const aura::cuda::Kernels* aura_cuda_kernels() {
  using namespace aura::cuda;
  static const Kernels table{[](int) -> void* { return nullptr; },
                             true,
                             norm_kernels(),
                             attention_kernels(),
                             activation_kernels(),
                             rotary_kernels(),
                             loss_kernels()};
  return &table;
}
