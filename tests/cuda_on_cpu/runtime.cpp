// The fibers behind cuda_runtime.h.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "state.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

Block* block;
Fiber* fiber;
bool progress;
bool idle;
bool eager_copies, eager_multiplications;

void fail(const std::string& what) {
  std::fprintf(stderr, "emulated CUDA, block (%u, %u, %u), thread (%u, %u, %u): %s\n", block->index.x, block->index.y,
               block->index.z, fiber->thread.index.x, fiber->thread.index.y, fiber->thread.index.z, what.c_str());
  std::abort();
}

// In place of swapcontext, which asks the kernel for the signal mask each time.
void yield() {
  if (!_setjmp(fiber->place)) _longjmp(block->scheduler, 1);
}

namespace {

constexpr size_t kStack = 256 << 10;

void release_barrier() {
  if (block->arrived > 0 && block->arrived + block->ended == static_cast<int>(block->fibers.size())) {
    block->arrived = 0;
    ++block->barriers;
  }
}

void body() {
  block->kernel(block->arguments);
  if (!fiber->copies.empty()) fail("it ends with copies that were never committed");
  if (!fiber->issued.empty()) fail("it ends with multiplications that were never committed");
  if (!fiber->issued_groups.empty()) fail("it ends with multiplications that were never waited for");
  wait_for_copies(0);
  fiber->ended = true;
  ++block->ended;
  progress = true;
  release_barrier();
  _longjmp(block->scheduler, 1);
}

// Let a thread go on until it yields or ends.
void resume(Fiber& next) {
  fiber = &next;
  threadIdx = next.thread.index;
  if (_setjmp(block->scheduler)) return;
  if (next.begun) _longjmp(next.place, 1);
  next.begun = true;
  setcontext(&next.beginning);
}

void carry_out(const Copy& copy) {
  std::memset(copy.to, 0, copy.size);
  if (copy.bytes) std::memcpy(copy.to, copy.from, copy.bytes);
}

void find_order() {
  const char* const value = std::getenv("AURA_EMULATED_EAGER");
  eager_copies = value != nullptr;
  eager_multiplications = value != nullptr && std::strcmp(value, "copies") != 0;
}

std::mt19937& random() {
  static std::mt19937 generator(12345);
  return generator;
}

[[noreturn]] void fail_waiting() {
  std::map<std::string, int> threads;
  for (size_t i = 0; i < block->size.x * block->size.y * block->size.z; ++i) {
    const Fiber& each = *block->fibers[i];
    if (!each.ended) ++threads[each.waits_for.empty() ? "something else" : each.waits_for];
  }
  std::string what = "all threads wait: a barrier or a collective that not all of them reach";
  for (const auto& each : threads) what += "\n  " + std::to_string(each.second) + " threads for " + each.first;
  fail(what);
}

// ---- Blocks

void check_end() {
  for (const auto& each : block->phase_barriers) {
    if (*each.first != mark(each.second)) fail("the memory of an mbarrier was written over");
    if (!each.second.copies.empty()) fail("the block ends with copies under way that nobody waited for");
    if (each.second.bytes) fail("the block ends while bytes of an mbarrier's phase are missing or too many");
    // No error on a card, but a sign of a wrong count: later phases would begin early.
    if (each.second.pending != each.second.arrivals) fail("the block ends with an mbarrier that only some arrived at");
  }
  for (const NamedBarrier& each : block->named) {
    if (each.arrived) fail("the block ends with a named barrier that only some arrived at");
  }
  for (size_t i = 0; i < block->warps.size(); ++i) {
    if (block->warps[i].registers != block->warps[i / 4 * 4].registers) {
      fail("setmaxnreg: not by all warps of a warpgroup");
    }
  }
  for (const Warpgroup& each : block->warpgroups) {
    if (!each.operations.empty()) fail("the block ends with multiplications that not all of a warpgroup took part in");
  }
}

void run_block(size_t shared) {
  const dim3 size = block->size;
  const int threads = static_cast<int>(size.x * size.y * size.z);
  block->memory.reset(new unsigned char[shared + 1024]);
  block->shared = block->memory.get() + (1024 - reinterpret_cast<uintptr_t>(block->memory.get()) % 1024) % 1024;
  std::memset(block->memory.get(), 0xff, shared + 1024);
  block->seen.assign(shared, 0xff);
  block->warps.assign((threads + kWarp - 1) / kWarp, Warp{});
  block->barriers = 0;
  block->arrived = block->ended = 0;
  block->shared_bytes = shared;
  block->phase_barriers.clear();
  for (NamedBarrier& each : block->named) each = NamedBarrier();
  idle = false;
  block->warpgroups = std::vector<Warpgroup>((threads + kWarpgroup - 1) / kWarpgroup);
  for (int i = 0; i < threads; ++i) {
    if (i == static_cast<int>(block->fibers.size())) {
      block->fibers.emplace_back(new Fiber);
      block->fibers.back()->stack.reset(new unsigned char[kStack]);
    }
    Fiber& each = *block->fibers[i];
    each.thread = {dim3(i % size.x, i / size.x % size.y, i / size.x / size.y), i / kWarp, i % kWarp};
    each.begun = each.ended = false;
    each.barriers = each.collectives = 0;
    each.waits_for.clear();
    each.multiplications = each.taken = each.multiplication_groups = each.fences = each.fences_at_wait = 0;
    each.registers.clear();
    getcontext(&each.beginning);
    each.beginning.uc_stack.ss_sp = each.stack.get();
    each.beginning.uc_stack.ss_size = kStack;
    each.beginning.uc_link = nullptr;
    makecontext(&each.beginning, body, 0);
  }
  std::vector<int> order(threads);
  for (int i = 0; i < threads; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random());
  // A warp runs for as long as it can before another does: a race between two of them goes wrong then.
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
          Fiber& next = *block->fibers[order[i]];
          if (!next.ended) resume(next);
          if (block->asserted) return;
        }
        any |= progress;
      } while (progress);
    }
    progress = any;
    if (!progress && idle) fail_waiting();
    idle = !progress;
  }
  check_end();
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

void require_all_banks(const Brought<const unsigned char*>& rows, int first, const char* what) {
  unsigned banks = 0;
  for (int row = first; row < first + 8; ++row) banks |= 1u << (rows[row] - block->shared) / 16 % 8;
  if (banks != 0xff) fail(std::string(what) + ": rows of a matrix lie in the same banks");
}

void copy_later(void* to, const void* from, int bytes, int size) {
  if (reinterpret_cast<uintptr_t>(to) % size || (bytes && reinterpret_cast<uintptr_t>(from) % size)) {
    fail("cp.async: an address is not aligned to the bytes of the copy");
  }
  if (eager_copies) {
    carry_out({to, from, bytes, size});
  } else {
    fiber->copies.push_back({to, from, bytes, size});
  }
}

void commit_copies() { fiber->groups.push_back(std::move(fiber->copies)), fiber->copies.clear(); }

void wait_for_copies(int pending) {
  for (; static_cast<int>(fiber->groups.size()) > pending; fiber->groups.pop_front()) {
    for (const Copy& copy : fiber->groups.front()) carry_out(copy);
  }
}

void meet(int id, int threads, bool stay) {
  if (id < 1 || id > 15) fail("bar: the number is not in [1, 15]");
  // All lanes of a warp execute it, and are counted together.
  const auto all = exchange(~0u, stay ? "bar.sync" : "bar.arrive", id);
  if (all[0] != id) fail("bar: the lanes of a warp name different barriers");
  NamedBarrier& barrier = block->named[id];
  if (barrier.threads && barrier.threads != threads) fail("bar: threads name different counts for one barrier");
  const uint64_t warp = uint64_t{1} << fiber->thread.warp, before = barrier.completed;
  if (fiber->thread.lane == 0) {
    if (barrier.warps & warp) fail("bar: a warp comes again before the barrier is complete");
    barrier.warps |= warp;
  }
  barrier.threads = threads;
  progress = true;
  if (++barrier.arrived == threads) {
    barrier.threads = barrier.arrived = 0;
    barrier.warps = 0;
    ++barrier.completed;
  }
  if (!stay) return;
  wait_until([&] { return "the barrier " + std::to_string(id) + " of " + std::to_string(threads) + " threads"; },
             [&] { return barrier.completed > before; });
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
  find_order();
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
  const char* multiprocessors = std::getenv("AURA_EMULATED_MULTIPROCESSORS");
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = multiprocessors ? std::atoi(multiprocessors) : 3; break;
    case cudaDevAttrL2CacheSize: *value = 192 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (sm == 90 ? 227 : sm == 80 ? 163 : 99) * 1024; break;
    case cudaDevAttrComputeCapabilityMajor: *value = sm / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = sm % 10; break;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0, old = version < 12000;
  *function = known && !old ? reinterpret_cast<void*>(cuTensorMapEncodeTiled) : nullptr;
  if (found) {
    *found = !known ? cudaDriverEntryPointSymbolNotFound
             : old  ? cudaDriverEntryPointVersionNotSufficent
                    : cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}
