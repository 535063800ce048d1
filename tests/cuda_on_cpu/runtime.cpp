// The fibers behind cuda_runtime.h.
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda_runtime.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {
namespace {

constexpr size_t kStack = 256 << 10;

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

struct Fiber {
  Thread thread;
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack;
  bool ended = false;
  uint64_t barriers = 0, collectives = 0;
  std::vector<Copy> copies;             // not yet committed
  std::deque<std::vector<Copy>> groups;  // committed, oldest first
};

// What the lanes of a warp have brought to the collectives with even and with odd numbers: a lane can be one ahead of
// another, never two.
struct Warp {
  alignas(16) unsigned char brought[2][kWarp][kMost];
  uint64_t number[kWarp];  // of each lane's last
  const char* operation[2][kWarp];
  unsigned mask[2][kWarp];
};

struct Block {
  dim3 index, size, grid;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  std::unique_ptr<unsigned char[]> memory;
  unsigned char* shared;
  uint64_t barriers = 0;  // passed by all
  int arrived = 0, ended = 0;
  bool asserted = false;
  ucontext_t scheduler;
  void (*kernel)(void*);
  void* arguments;
};

Block* block;
Fiber* fiber;
bool progress;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "emulated CUDA, block (%u, %u, %u), thread (%u, %u, %u): %s\n", block->index.x, block->index.y,
               block->index.z, fiber->thread.index.x, fiber->thread.index.y, fiber->thread.index.z, what.c_str());
  std::abort();
}

void yield() { swapcontext(&fiber->context, &block->scheduler); }

void release_barrier() {
  if (block->arrived > 0 && block->arrived + block->ended == static_cast<int>(block->fibers.size())) {
    block->arrived = 0;
    ++block->barriers;
  }
}

void body() {
  block->kernel(block->arguments);
  if (!fiber->copies.empty()) fail("it ends with copies that were never committed");
  wait_for_copies(0);
  fiber->ended = true;
  ++block->ended;
  progress = true;
  release_barrier();
  swapcontext(&fiber->context, &block->scheduler);
}

void carry_out(const Copy& copy) {
  std::memset(copy.to, 0, 16);
  if (copy.bytes) std::memcpy(copy.to, copy.from, copy.bytes);
}

bool eager() {  // copies as early as they may come: finds what is written over while others still read it
  static const bool value = std::getenv("AURA_EMULATED_EAGER") != nullptr;
  return value;
}

std::mt19937& random() {
  static std::mt19937 generator(12345);
  return generator;
}

void run_block(size_t shared) {
  const dim3 size = block->size;
  const int threads = static_cast<int>(size.x * size.y * size.z);
  block->memory.reset(new unsigned char[shared + 1024]);
  block->shared = block->memory.get() + (1024 - reinterpret_cast<uintptr_t>(block->memory.get()) % 1024) % 1024;
  std::memset(block->memory.get(), 0xff, shared + 1024);
  block->warps.assign((threads + kWarp - 1) / kWarp, Warp{});
  block->barriers = 0;
  block->arrived = block->ended = 0;
  for (int i = 0; i < threads; ++i) {
    if (i == static_cast<int>(block->fibers.size())) {
      block->fibers.emplace_back(new Fiber);
      block->fibers.back()->stack.reset(new unsigned char[kStack]);
    }
    Fiber& each = *block->fibers[i];
    each.thread = {dim3(i % size.x, i / size.x % size.y, i / size.x / size.y), i / kWarp, i % kWarp};
    each.ended = false;
    each.barriers = each.collectives = 0;
    getcontext(&each.context);
    each.context.uc_stack.ss_sp = each.stack.get();
    each.context.uc_stack.ss_size = kStack;
    each.context.uc_link = nullptr;
    makecontext(&each.context, body, 0);
  }
  std::vector<int> order(threads);
  for (int i = 0; i < threads; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random());
  // A warp runs for as long as it can before another does: what two of them race for goes wrong then.
  const auto warp_of = [](int i) { return block->fibers[i]->thread.warp; };
  std::vector<int> ranks(block->warps.size());
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = static_cast<int>(i);
  std::shuffle(ranks.begin(), ranks.end(), random());
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return ranks[warp_of(a)] < ranks[warp_of(b)]; });
  while (block->ended < threads) {
    bool any = false;
    for (int begin = 0, end = 0; begin < threads; begin = end) {
      while (end < threads && warp_of(order[end]) == warp_of(order[begin])) ++end;
      do {
        progress = false;
        for (int i = begin; i < end; ++i) {
          fiber = block->fibers[order[i]].get();
          threadIdx = fiber->thread.index;
          if (!fiber->ended) swapcontext(&block->scheduler, &fiber->context);
          if (block->asserted) return;
        }
        any |= progress;
      } while (progress);
    }
    progress = any;
    if (!progress) fail("all threads wait: a barrier or a collective that not all of them reach");
  }
}

}  // namespace

const Thread& thread() { return fiber->thread; }
unsigned char* shared_memory() { return block->shared; }

void barrier() {
  const uint64_t wanted = ++fiber->barriers;
  ++block->arrived;
  progress = true;
  release_barrier();
  while (block->barriers < wanted) yield();
}

const unsigned char* collect(unsigned mask, const char* operation, const void* mine, size_t size) {
  Warp& warp = block->warps[fiber->thread.warp];
  const int lane = fiber->thread.lane;
  if (!(mask >> lane & 1)) fail(std::string(operation) + ": the thread is not in its own mask");
  const uint64_t number = ++fiber->collectives;
  const int side = number % 2;
  std::memcpy(warp.brought[side][lane], mine, size);
  warp.operation[side][lane] = operation;
  warp.mask[side][lane] = mask;
  warp.number[lane] = number;
  progress = true;
  for (int other = 0; other < kWarp; ++other) {
    if (!(mask >> other & 1)) continue;
    while (warp.number[other] < number) yield();
    if (warp.number[other] == number &&
        (std::strcmp(warp.operation[side][other], operation) != 0 || warp.mask[side][other] != mask)) {
      fail(std::string("lanes of a warp meet in ") + operation + " and " + warp.operation[side][other]);
    }
  }
  return &warp.brought[side][0][0];
}

void fail_assertion(const char* condition) {
  std::fprintf(stderr, "emulated CUDA, block (%u, %u, %u), thread (%u, %u, %u): assertion `%s` failed\n",
               block->index.x, block->index.y, block->index.z, fiber->thread.index.x, fiber->thread.index.y,
               fiber->thread.index.z, condition);
  block->asserted = true;
  yield();
  std::abort();  // nobody resumes this fiber
}

void copy_later(void* to, const void* from, int bytes) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || (bytes && reinterpret_cast<uintptr_t>(from) % 16)) {
    fail("cp.async: an address is not aligned to 16 bytes");
  }
  if (eager()) {
    carry_out({to, from, bytes});
  } else {
    fiber->copies.push_back({to, from, bytes});
  }
}

void commit_copies() { fiber->groups.push_back(std::move(fiber->copies)), fiber->copies.clear(); }

void wait_for_copies(int pending) {
  for (; static_cast<int>(fiber->groups.size()) > pending; fiber->groups.pop_front()) {
    for (const Copy& copy : fiber->groups.front()) carry_out(copy);
  }
}

bool run(dim3 grid, dim3 size, size_t shared, void (*kernel)(void*), void* arguments) {
  Block current;
  current.size = size;
  current.grid = grid;
  current.kernel = kernel;
  current.arguments = arguments;
  block = &current;
  blockDim = size;
  gridDim = grid;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  std::vector<uint64_t> order(blocks);
  for (uint64_t i = 0; i < blocks; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random());
  for (uint64_t i : order) {
    blockIdx = current.index = dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
    run_block(shared);
    if (current.asserted) break;
  }
  block = nullptr;
  return !current.asserted;
}

}  // namespace emulated

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const char* given = std::getenv("AURA_EMULATED_SM");
  const int sm = given ? std::atoi(given) : 86;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 3; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (sm == 90 ? 227 : sm == 80 ? 163 : 99) * 1024; break;
    case cudaDevAttrComputeCapabilityMajor: *value = sm / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = sm % 10; break;
  }
  return cudaSuccess;
}
