// The fibers behind cuda_runtime.h.
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda.h"
#include "cuda_runtime.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {
namespace {

constexpr size_t kStack = 256 << 10;
constexpr int kWarpgroup = 4 * kWarp;
constexpr uint32_t kWindow = 1024;          // first bytes of the shared window, which are not the block's
constexpr uint32_t kUnderWay = 0x7fc5a5a5;  // an accumulator that a multiplication has yet to write: NaN

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

// Registers that multiplications have taken: d or a.
struct Registers {
  void* at;
  size_t words;
  int under_way = 0;               // multiplications into d
  uint64_t returned = 0;           // fences of the thread when the last of them was waited for
  std::vector<uint32_t> at_fence;  // what they held at the thread's last fence; empty if there was none since the first
  std::vector<float> values;       // of d, while multiplications are under way
};

// A multiplication that a thread has yet to wait for.
struct Issued {
  float* d;
  const uint32_t* a;
  uint32_t values[4];  // of a
};

// One multiplication of a warpgroup.
struct Operation {
  Multiplication what;
  int issued = 0, taken = 0;  // by so many threads
  bool done = false;
  struct {
    int lanes = 0;
    uint64_t collectives, groups;  // that each of its lanes had gone through before
  } warps[4];
  uint32_t a[kWarpgroup][4];
  std::vector<float> product;  // [64, columns]
};
struct Warpgroup {
  uint64_t first = 0;  // the number of the first below
  std::deque<std::unique_ptr<Operation>> operations;
};

// What a map of a tensor holds.
struct Map {
  uint64_t kind, address, dims[5], strides[4];  // strides[i] is that of dims[i + 1]
  uint16_t box[5];
  uint8_t rank, value_bytes, swizzle;
};
constexpr uint64_t kTiledMap = 0x6d61702064656c74;
static_assert(sizeof(Map) <= sizeof(CUtensorMap), "what a map holds");

struct BoxCopy {
  unsigned char* to;
  Map map;
  Coordinates coordinates;
};

// mbarrier: the phase is complete when no arrival and no byte is pending, and the next one begins.
struct PhaseBarrier {
  int arrivals, pending;
  int bytes = 0;       // tx-count
  uint64_t phase = 0;  // that is not complete
  int initializer;     // thread
  bool published = false;
  uint64_t published_at;  // __syncthreads() that the thread had gone through
  std::vector<BoxCopy> copies;
};

struct NamedBarrier {
  int threads = 0, arrived = 0;  // 0: not in use
  uint64_t completed = 0;
  uint64_t warps = 0;  // that have arrived
};

struct Fiber {
  Thread thread;
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack;
  bool ended = false;
  uint64_t barriers = 0, collectives = 0;
  std::vector<Copy> copies;             // not yet committed
  std::deque<std::vector<Copy>> groups;  // committed, oldest first
  std::string waits_for;                 // for the message when all do
  // wgmma: multiplications issued, those waited for, groups, fences, and fences before the last wait.
  uint64_t multiplications = 0, taken = 0, multiplication_groups = 0, fences = 0, fences_at_wait = 0;
  std::vector<Issued> issued;                     // not yet committed
  std::deque<std::vector<Issued>> issued_groups;  // committed, oldest first
  std::vector<std::unique_ptr<Registers>> registers;
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
  size_t shared_bytes;
  std::map<uint64_t*, PhaseBarrier> phase_barriers;
  NamedBarrier named[16];
  std::vector<Warpgroup> warpgroups;
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
// All threads wait, and what is asynchronous has its turn: the first that it lets go on carries it out.
bool idle;

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
  if (!fiber->issued.empty()) fail("it ends with multiplications that were never committed");
  if (!fiber->issued_groups.empty()) fail("it ends with multiplications that were never waited for");
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

// AURA_EMULATED_EAGER: what is asynchronous comes as early as it may. "copies": copies do, and multiplications, which
// may yet read what is written over, as late.
bool eager_copies, eager_multiplications;

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

// Until `done`, which another thread brings about. `what` says what that is.
template <typename What, typename Done>
void wait_until(What what, Done done) {
  if (done()) return;
  fiber->waits_for = what();
  do yield(); while (!done());
  fiber->waits_for.clear();
}

// ---- Shared memory, mbarrier and TMA

Map read_map(const CUtensorMap* map) {
  if (reinterpret_cast<uintptr_t>(map) % 64) fail("cp.async.bulk.tensor: the map is not aligned to 64 bytes");
  Map held;
  std::memcpy(&held, map, sizeof(held));
  if (held.kind != kTiledMap) fail("cp.async.bulk.tensor: not a map");
  return held;
}

// The swizzle of 128 bytes, of TMA and of wgmma: bits 4 to 6 of an address in the shared window, which name 16 of 128
// bytes, are changed (exclusive or) by bits 7 to 9. It is the address that counts, not the place in a tile: hence the
// alignment to 1024 bytes.
uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }

unsigned char* at_address(uint32_t address, uint32_t bytes, const char* what) {
  if (address < kWindow || address + bytes > kWindow + block->shared_bytes) {
    fail(std::string(what) + ": an address outside the block's shared memory");
  }
  return block->shared + (address - kWindow);
}

void complete_phase(PhaseBarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  ++barrier.phase;
  progress = true;
}

// The memory of an mbarrier holds this; nothing else may write there.
uint64_t mark(const PhaseBarrier& barrier) { return 0xba221e2000000000 + (barrier.phase << 16) + barrier.pending; }

PhaseBarrier& find_barrier(uint64_t* at, const char* what) {
  const auto found = block->phase_barriers.find(at);
  if (found == block->phase_barriers.end()) fail(std::string(what) + ": not an mbarrier");
  PhaseBarrier& barrier = found->second;
  if (*at != mark(barrier)) fail(std::string(what) + ": the memory of the mbarrier was written over");
  const bool own = barrier.initializer == fiber->thread.warp * kWarp + fiber->thread.lane;
  if (!own && !(barrier.published && fiber->barriers > barrier.published_at)) {
    fail(std::string(what) + ": another thread's mbarrier, with no publish_barriers() and __syncthreads() since");
  }
  return barrier;
}

void carry_out(const BoxCopy& copy, PhaseBarrier& barrier) {
  const Map& map = copy.map;
  const uint32_t to = shared_address(copy.to);
  const int* const from = copy.coordinates.at;
  uint32_t offset = 0;
  for (int i3 = 0; i3 < map.box[3]; ++i3) {
    for (int i2 = 0; i2 < map.box[2]; ++i2) {
      for (int i1 = 0; i1 < map.box[1]; ++i1) {
        const int64_t outer[3] = {int64_t{from[1]} + i1, int64_t{from[2]} + i2, int64_t{from[3]} + i3};
        bool inside = true;
        uint64_t row = map.address;
        for (int i = 0; i < 3; ++i) {
          inside &= outer[i] >= 0 && static_cast<uint64_t>(outer[i]) < map.dims[i + 1];
          row += static_cast<uint64_t>(outer[i]) * map.strides[i];
        }
        for (int i0 = 0; i0 < map.box[0]; ++i0, offset += map.value_bytes) {
          const int64_t column = int64_t{from[0]} + i0;
          const uint32_t address = map.swizzle ? swizzled(to + offset) : to + offset;
          unsigned char* const value = at_address(address, map.value_bytes, "cp.async.bulk.tensor");
          if (inside && column >= 0 && static_cast<uint64_t>(column) < map.dims[0]) {
            std::memcpy(value, reinterpret_cast<const unsigned char*>(row) + column * map.value_bytes,
                        map.value_bytes);
          } else {
            std::memset(value, 0, map.value_bytes);
          }
        }
      }
    }
  }
  barrier.bytes -= static_cast<int>(offset);  // all of the box counts, what lies beyond the tensor too
  if (barrier.pending == 0 && barrier.bytes < 0) {
    fail("cp.async.bulk.tensor: more bytes than the phase of its mbarrier expects");
  }
}

// ---- wgmma

struct Descriptor {
  uint32_t start, leading, stride;
  explicit Descriptor(uint64_t bits)
      : start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4), stride((bits >> 32 & 0x3fff) << 4) {
    if (bits >> 62 != 1) fail("wgmma: a descriptor without the swizzle of 128 bytes");
    // Bits 14, 15, 30, 31, 46 to 48 and 52 to 61 are nobody's; what is added to the start may not carry into them.
    if (bits & (uint64_t{3} << 14 | uint64_t{3} << 30 | uint64_t{7} << 46 | uint64_t{0x3ff} << 52)) {
      fail("wgmma: bits of a descriptor that must be 0");
    }
    if (bits >> 49 & 7) fail("wgmma: a base offset, but every pattern of the swizzle must begin at 1024 bytes");
    if (start >> 7 & 7) fail("wgmma: a matrix that does not begin with the first row of the swizzle's pattern");
  }
};

// A matrix [rows, 16] that lies K-major: rows of 128 bytes of which a multiplication takes 32, in groups of 8 rows that
// are `stride` apart. The leading offset means nothing here: the 16 values of a row lie in one pattern.
void read_k_major(const Multiplication& what, uint64_t bits, int rows, float* to, int row_step, int k_step) {
  const Descriptor descriptor(bits);
  if (descriptor.start % 128 > 96) fail("wgmma: a K-major matrix that runs over the end of its 128 bytes");
  for (int row = 0; row < rows; ++row) {
    for (int chunk = 0; chunk < 2; ++chunk) {
      const uint32_t address = descriptor.start + row / 8 * descriptor.stride + row % 8 * 128 + chunk * 16;
      uint16_t values[8];
      std::memcpy(values, at_address(swizzled(address), 16, "wgmma"), 16);
      for (int i = 0; i < 8; ++i) to[row * row_step + (8 * chunk + i) * k_step] = what.wide(values[i]);
    }
  }
}

// A matrix [columns, 16] that lies MN-major: 64 columns side by side, for 8 k one below the other; the next 8 k are
// `stride` further, the next 64 columns `leading`. To [16, columns].
void read_mn_major(const Multiplication& what, uint64_t bits, float* to) {
  const Descriptor descriptor(bits);
  if (descriptor.start % 128) fail("wgmma: an MN-major matrix that does not begin with its 128 bytes");
  for (int k = 0; k < 16; ++k) {
    for (int column = 0; column < what.columns; column += 8) {
      const uint32_t address = descriptor.start + column / 64 * descriptor.leading + column % 64 * 2 +
                               k / 8 * descriptor.stride + k % 8 * 128;
      uint16_t values[8];
      std::memcpy(values, at_address(swizzled(address), 16, "wgmma"), 16);
      for (int i = 0; i < 8; ++i) to[k * what.columns + column + i] = what.wide(values[i]);
    }
  }
}

// a in registers: warp w has rows 16 w to 16 w + 15, as for mma.m16n8k16.
void read_registers(const Operation& operation, float* to) {
  for (int thread = 0; thread < kWarpgroup; ++thread) {
    for (int i = 0; i < 8; ++i) {
      const int row = thread / kWarp * 16 + thread % kWarp / 4 + i / 2 % 2 * 8, k = thread % 4 * 2 + i % 2 + i / 4 * 8;
      to[row * 16 + k] = operation.what.wide(static_cast<uint16_t>(operation.a[thread][i / 2] >> i % 2 * 16));
    }
  }
}

void carry_out(Operation& operation) {
  const Multiplication& what = operation.what;
  const int columns = what.columns;
  float a[64 * 16];
  std::vector<float> b(16 * columns);
  if (what.registers) {
    read_registers(operation, a);
  } else {
    read_k_major(what, what.a, 64, a, 16, 1);
  }
  if (what.mn_major) {
    read_mn_major(what, what.b, b.data());
  } else {
    read_k_major(what, what.b, columns, b.data(), 1, columns);
  }
  operation.product.assign(64 * columns, 0.0f);
  for (int row = 0; row < 64; ++row) {
    float* const sums = &operation.product[row * columns];
    for (int k = 0; k < 16; ++k) {
      const float left = a[row * 16 + k];
      const float* const right = &b[k * columns];
      for (int i = 0; i < columns; ++i) sums[i] += left * right[i];
    }
  }
  operation.done = true;
}

bool same(const Multiplication& one, const Multiplication& other) {
  return one.a == other.a && one.b == other.b && one.columns == other.columns && one.registers == other.registers &&
         one.mn_major == other.mn_major && one.accumulate == other.accumulate && one.wide == other.wide;
}

// What is known of these registers of the thread. Memory of the stack may have been others' before.
Registers& find_registers(const void* at, size_t words, bool& known) {
  auto& all = fiber->registers;
  known = true;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(at), end = begin + 4 * words;
  for (size_t i = 0; i < all.size();) {
    const uintptr_t its_begin = reinterpret_cast<uintptr_t>(all[i]->at), its_end = its_begin + 4 * all[i]->words;
    if (its_begin == begin && its_end == end) return *all[i];
    if (its_begin < end && begin < its_end) {
      if (all[i]->under_way) fail("wgmma: accumulators of a multiplication under way, but not in the same shape");
      all.erase(all.begin() + i);
    } else {
      ++i;
    }
  }
  known = false;
  all.emplace_back(new Registers{const_cast<void*>(at), words, 0, 0, {}, {}});
  return *all.back();
}

bool changed_since_fence(const Registers& registers) {
  return !registers.at_fence.empty() && std::memcmp(registers.at_fence.data(), registers.at, 4 * registers.words) != 0;
}

void check_untouched(const Registers& accumulators) {
  const uint32_t* const bits = static_cast<const uint32_t*>(accumulators.at);
  for (size_t i = 0; i < accumulators.words; ++i) {
    uint32_t word;
    std::memcpy(&word, bits + i, 4);
    if (word != kUnderWay) fail("wgmma: accumulators were written while a multiplication into them is under way");
  }
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
    each.ended = false;
    each.barriers = each.collectives = 0;
    each.waits_for.clear();
    each.multiplications = each.taken = each.multiplication_groups = each.fences = each.fences_at_wait = 0;
    each.registers.clear();
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

void copy_later(void* to, const void* from, int bytes) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || (bytes && reinterpret_cast<uintptr_t>(from) % 16)) {
    fail("cp.async: an address is not aligned to 16 bytes");
  }
  if (eager_copies) {
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

uint32_t shared_address(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) - block->shared;
  if (offset < 0 || offset >= static_cast<ptrdiff_t>(block->shared_bytes)) fail("a pointer outside shared memory");
  if (offset % 16) fail("shared memory that is not aligned to 16 bytes");
  return kWindow + static_cast<uint32_t>(offset);
}

uint32_t descriptor_stride(int bytes) {
  if (bytes < 0 || bytes >= 1 << 18 || bytes % 16) fail("wgmma: a stride that no descriptor can hold");
  return static_cast<uint32_t>(bytes);
}

void init_barrier(uint64_t* at, int arrivals) {
  const auto offset = reinterpret_cast<unsigned char*>(at) - block->shared;
  if (offset < 0 || offset + 8 > static_cast<ptrdiff_t>(block->shared_bytes) || offset % 8) {
    fail("mbarrier.init: not 8 aligned bytes of shared memory");
  }
  if (arrivals < 1 || arrivals >= 1 << 20) fail("mbarrier.init: the count is not in [1, 2^20)");
  PhaseBarrier barrier{};
  barrier.arrivals = barrier.pending = arrivals;
  barrier.initializer = fiber->thread.warp * kWarp + fiber->thread.lane;
  if (!block->phase_barriers.emplace(at, barrier).second) fail("mbarrier.init: there is an mbarrier already");
  *at = mark(barrier);
}

void publish_barriers() {
  for (auto& each : block->phase_barriers) {
    PhaseBarrier& barrier = each.second;
    if (barrier.initializer != fiber->thread.warp * kWarp + fiber->thread.lane || barrier.published) continue;
    barrier.published = true;
    barrier.published_at = fiber->barriers;
  }
}

void arrive(uint64_t* at, int bytes) {
  PhaseBarrier& barrier = find_barrier(at, "mbarrier.arrive");
  if (barrier.pending == 0) fail("mbarrier.arrive: more arrivals than the phase expects");
  if (bytes < 0 || barrier.bytes + bytes >= 1 << 20) fail("mbarrier.arrive.expect_tx: so many bytes cannot be counted");
  barrier.bytes += bytes;
  --barrier.pending;
  progress = true;
  if (barrier.pending == 0 && barrier.bytes < 0) {
    fail("mbarrier.arrive: more bytes have come than the phase expects");
  }
  complete_phase(barrier);
  *at = mark(barrier);
}

void wait(uint64_t* at, int parity) {
  if (parity != 0 && parity != 1) fail("mbarrier.try_wait.parity: neither 0 nor 1");
  find_barrier(at, "mbarrier.try_wait");
  const auto complete = [&] {
    PhaseBarrier& barrier = find_barrier(at, "mbarrier.try_wait");
    // Late: when nobody can go on, and bytes are all that is missing.
    const bool late = idle && barrier.pending == 0 && !barrier.copies.empty();
    while (late && static_cast<int>(barrier.phase % 2) == parity && !barrier.copies.empty()) {
      idle = false;
      progress = true;
      const BoxCopy copy = barrier.copies.front();
      barrier.copies.erase(barrier.copies.begin());
      carry_out(copy, barrier);
      complete_phase(barrier);
      *at = mark(barrier);
    }
    return static_cast<int>(barrier.phase % 2) != parity;
  };
  const auto what = [&] {
    return "the mbarrier at byte " + std::to_string(reinterpret_cast<unsigned char*>(at) - block->shared) +
           " of shared memory, parity " + std::to_string(parity);
  };
  wait_until(what, complete);
}

void copy_box(void* shared, const void* pointer, uint64_t* at, const Coordinates& coordinates) {
  const Map held = read_map(static_cast<const CUtensorMap*>(pointer));
  PhaseBarrier& barrier = find_barrier(at, "cp.async.bulk.tensor");
  if (!barrier.published) fail("cp.async.bulk.tensor: an mbarrier without publish_barriers()");
  if (held.rank != 4) fail("cp.async.bulk.tensor: four coordinates, but another rank");
  uint32_t bytes = held.value_bytes;
  for (int i = 0; i < 4; ++i) bytes *= held.box[i];
  const uint32_t to = shared_address(shared);
  if (to % (held.swizzle ? 1024 : 128)) fail("cp.async.bulk.tensor: the tile is not aligned to the swizzle's pattern");
  if (held.swizzle && held.box[0] * held.value_bytes != 128) {
    fail("cp.async.bulk.tensor: rows that do not fill the swizzle's 128 bytes");
  }
  at_address(to, bytes, "cp.async.bulk.tensor");
  if (bytes >= 1 << 20 || barrier.bytes - static_cast<int>(bytes) <= -(1 << 20)) {
    fail("cp.async.bulk.tensor: so many bytes cannot be counted");
  }
  const BoxCopy copy{static_cast<unsigned char*>(shared), held, coordinates};
  if (eager_copies) {
    carry_out(copy, barrier);
    complete_phase(barrier);
    *at = mark(barrier);
  } else {
    barrier.copies.push_back(copy);
  }
  progress = true;
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

void multiply_later(const Multiplication& what, float* d, const uint32_t* a) {
  const int warp = fiber->thread.warp, lane = fiber->thread.lane;
  if ((warp / 4 + 1) * 4 > static_cast<int>(block->warps.size())) fail("wgmma: not a whole warpgroup");
  Warpgroup& warpgroup = block->warpgroups[warp / 4];
  const uint64_t index = fiber->multiplications++ - warpgroup.first;
  if (index == warpgroup.operations.size()) {
    warpgroup.operations.emplace_back(new Operation);
    warpgroup.operations.back()->what = what;
  }
  Operation& operation = *warpgroup.operations[index];
  if (!same(operation.what, what)) fail("wgmma: the threads of a warpgroup bring different operands or instructions");
  auto& its = operation.warps[warp % 4];
  if (its.lanes++ == 0) its.collectives = fiber->collectives, its.groups = fiber->multiplication_groups;
  if (its.collectives != fiber->collectives || its.groups != fiber->multiplication_groups) {
    fail("wgmma: the lanes of a warp do not come to it together");
  }

  // Whatever else touched these registers must be before a wgmma.fence. Multiplications among themselves need none.
  bool known;
  Registers& accumulators = find_registers(d, what.columns / 2, known);
  if (accumulators.under_way) {
    check_untouched(accumulators);
  } else {
    if (fiber->fences <= (known ? accumulators.returned : fiber->fences_at_wait)) {
      fail("wgmma: no multiply_fence() since the accumulators were the thread's");
    }
    if (known && what.accumulate && changed_since_fence(accumulators)) {
      fail("wgmma: the accumulators were written after the last multiply_fence()");
    }
    accumulators.values.assign(d, d + accumulators.words);
    for (size_t i = 0; i < accumulators.words; ++i) std::memcpy(d + i, &kUnderWay, 4);
  }
  ++accumulators.under_way;
  Issued issued{d, a, {}};
  if (a) {
    if (fiber->fences == 0) fail("wgmma: no multiply_fence()");
    if (changed_since_fence(find_registers(a, 4, known))) {
      fail("wgmma: the registers of a were written after the last multiply_fence()");
    }
    std::memcpy(issued.values, a, sizeof(issued.values));
    std::memcpy(operation.a[warp % 4 * kWarp + lane], a, sizeof(issued.values));
  }
  fiber->issued.push_back(issued);
  if (++operation.issued == kWarpgroup) {
    progress = true;
    if (eager_multiplications) carry_out(operation);
  }
}

void fence_multiplications() {
  ++fiber->fences;
  for (auto& each : fiber->registers) {
    each->at_fence.resize(each->words);
    std::memcpy(each->at_fence.data(), each->at, 4 * each->words);
  }
}

void commit_multiplications() {
  ++fiber->multiplication_groups;
  fiber->issued_groups.push_back(std::move(fiber->issued)), fiber->issued.clear();
}

void wait_for_multiplications(int pending) {
  fiber->fences_at_wait = fiber->fences;
  const int warp = fiber->thread.warp, thread = warp % 4 * kWarp + fiber->thread.lane;
  Warpgroup& warpgroup = block->warpgroups[warp / 4];
  for (; static_cast<int>(fiber->issued_groups.size()) > pending; fiber->issued_groups.pop_front()) {
    const auto number = [&](size_t i) -> Operation& {
      return *warpgroup.operations[fiber->taken + i - warpgroup.first];
    };
    const size_t count = fiber->issued_groups.front().size();
    const auto done = [&] {
      bool issued = true, all = true;
      for (size_t i = 0; i < count; ++i) issued &= number(i).issued == kWarpgroup, all &= number(i).done;
      if (all || !issued || !idle) return all;
      for (size_t i = 0; i < count; ++i) {
        if (!number(i).done) carry_out(number(i));
      }
      idle = false;
      return progress = true;
    };
    wait_until([] { return "multiplications, in which all threads of its warpgroup have to take part"; }, done);
    for (const Issued& issued : fiber->issued_groups.front()) {
      Operation& operation = *warpgroup.operations[fiber->taken++ - warpgroup.first];
      if (issued.a && std::memcmp(issued.a, issued.values, sizeof(issued.values)) != 0) {
        fail("wgmma: the registers of a were written while the multiplication was under way");
      }
      bool known;
      Registers& accumulators = find_registers(issued.d, operation.what.columns / 2, known);
      check_untouched(accumulators);
      const int row = thread / kWarp * 16 + thread % kWarp / 4, column = thread % 4 * 2;
      for (size_t i = 0; i < accumulators.words; ++i) {
        const size_t from = (row + i % 4 / 2 * 8) * operation.what.columns + column + i / 4 * 8 + i % 2;
        float& value = accumulators.values[i];
        value = (operation.what.accumulate ? value : 0.0f) + operation.product[from];
      }
      if (--accumulators.under_way == 0) {
        std::memcpy(accumulators.at, accumulators.values.data(), 4 * accumulators.words);
        accumulators.returned = fiber->fences;
      }
      // The threads take them in order: the oldest is the first that all have.
      if (++operation.taken == kWarpgroup) warpgroup.operations.pop_front(), ++warpgroup.first;
    }
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
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 3; break;
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

CUresult cuTensorMapEncodeTiled(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  static const uint8_t kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
  const auto is_at_most = [](int value, int most) { return value >= 0 && value <= most; };
  if (reinterpret_cast<uintptr_t>(to) % 64 || !to || !is_at_most(type, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) ||
      rank < 1 || rank > 5 || reinterpret_cast<uintptr_t>(address) % 16 || !address ||
      !is_at_most(interleave, CU_TENSOR_MAP_INTERLEAVE_32B) || !is_at_most(swizzle, CU_TENSOR_MAP_SWIZZLE_128B) ||
      !is_at_most(promotion, CU_TENSOR_MAP_L2_PROMOTION_L2_256B) ||
      !is_at_most(fill, CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (rank != 4 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ||
      (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && swizzle != CU_TENSOR_MAP_SWIZZLE_128B)) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const uint64_t value_bytes = kBytes[type];
  emulated::Map map{};
  for (uint32_t i = 0; i < rank; ++i) {
    if (dims[i] == 0 || dims[i] > uint64_t{1} << 32 || box[i] == 0 || box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
    // That of the innermost dimension is ignored without interleaving.
    if (i > 0 && (element_strides[i] == 0 || element_strides[i] > 8)) return CUDA_ERROR_INVALID_VALUE;
    if (i > 0 && element_strides[i] != 1) return CUDA_ERROR_NOT_SUPPORTED;
    map.dims[i] = dims[i];
    map.box[i] = static_cast<uint16_t>(box[i]);
  }
  for (uint32_t i = 0; i + 1 < rank; ++i) {
    if (strides[i] % 16 || strides[i] >= uint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
    // A stride is that of the dimension below times its size and its padding.
    const uint64_t below = i == 0 ? value_bytes : strides[i - 1];
    if (below == 0 || strides[i] / below < dims[i] || (i > 0 && strides[i] % below)) return CUDA_ERROR_INVALID_VALUE;
    map.strides[i] = strides[i];
  }
  if (box[0] * value_bytes % 16 || (swizzle == CU_TENSOR_MAP_SWIZZLE_128B && box[0] * value_bytes > 128)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  map.kind = emulated::kTiledMap;
  map.address = reinterpret_cast<uint64_t>(address);
  map.rank = static_cast<uint8_t>(rank);
  map.value_bytes = static_cast<uint8_t>(value_bytes);
  map.swizzle = static_cast<uint8_t>(swizzle);
  std::memset(to, 0, sizeof(*to));
  std::memcpy(to, &map, sizeof(map));
  return CUDA_SUCCESS;
}
