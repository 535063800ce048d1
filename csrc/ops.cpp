// The library of torch operators, torch.ops.aura, and the choice of the kernels that carry them out.
#include <torch/library.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(AURA_HAS_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "cpu/kernels.h"
#include "ops.h"

TORCH_LIBRARY(aura, m) {
  static_cast<void>(m);  // each family declares its own operators
}

namespace aura {
namespace {

#if defined(AURA_HAS_AMX)
// Linux saves the tiles only of processes that have asked for it, which covers all their threads. The processor is
// asked by hand: not every clang that compiles these kernels knows the names of what they need.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h; Intel SDM 1, 13.1
  constexpr unsigned kNeeded = 1u << 24 | 1u << 22;            // AMX-TILE and AMX-BF16: Intel SDM 2, CPUID
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kNeeded) == kNeeded &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

// Best first. The compiler's check covers the operating system too, which must save the wider registers.
// AURA_HAS_AVX2 and so on: there are kernels of that set. Older compilers cannot make the newest, and what is built for
// one machine has those of its processor.
std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> tables;
#if defined(AURA_HAS_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
#if defined(AURA_HAS_AMX)
    if (__builtin_cpu_supports("avx512bf16") && may_use_tiles()) tables.push_back(&amx::kernels());
#endif
#if defined(AURA_HAS_AVX512BF16)
    if (__builtin_cpu_supports("avx512bf16")) tables.push_back(&avx512bf16::kernels());
#endif
    tables.push_back(&avx512::kernels());
  }
#endif
#if defined(AURA_HAS_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(&avx2::kernels());
#endif
  tables.push_back(&portable::kernels());
  return tables;
}

Kernels fastest() {
  const std::vector<const Kernels*> tables = runnable();
  Kernels table = *tables.front();
#if defined(AURA_HAS_AVX512BF16)
  // Where there are pairs and no tiles: a Xeon with AMX starts a product of pairs in the time of four FMAs, an EPYC in
  // that of one (docs/kernels.md).
  if (tables.front() == &avx512bf16::kernels() && !__builtin_cpu_is("amd")) {
    table.attention = avx512::kernels().attention;
  }
#endif
  return table;
}

Kernels chosen() {
  const char* wanted = std::getenv("AURA_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return fastest();
  std::string names;
  for (const Kernels* table : runnable()) {
    if (std::string(wanted) == table->name) return *table;
    names += std::string(names.empty() ? "" : ", ") + table->name;
  }
  throw std::invalid_argument(std::string("AURA_CPU_ISA=") + wanted + ": this processor runs " + names);
}

const cuda::Kernels* loaded_gpu_kernels = nullptr;

}  // namespace

void load_gpu_kernels(const cuda::Kernels* table) { loaded_gpu_kernels = table; }

const cuda::Kernels* gpu_kernels_if_any(const at::Tensor& t) {
  return t.is_cpu() && loaded_gpu_kernels && !loaded_gpu_kernels->emulated ? nullptr : loaded_gpu_kernels;
}

const cuda::Kernels* gpu_kernels(const at::Tensor& t, const char* op) {
  const cuda::Kernels* found = gpu_kernels_if_any(t);
  TORCH_CHECK(found != nullptr || t.is_cpu(), op, ": the CUDA kernels are not loaded");
  return found;
}

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const Kernels* table : runnable()) names.push_back(table->name);
  return names;
}

const Kernels& kernels() {
  static const Kernels table = chosen();
  return table;
}

}  // namespace aura
