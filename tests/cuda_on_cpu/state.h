// What the files behind cuda_runtime.h share: the block and the thread that run, all that is known of them, and how a
// thread waits or fails.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda.h"
#include "cuda_runtime.h"

namespace emulated {

constexpr int kWarpgroup = 4 * kWarp;

struct Copy {
  void* to;
  const void* from;
  int bytes, size;
};

// Registers that multiplications have taken: d or a.
struct Registers {
  void* at;
  size_t words;
  int under_way = 0;               // multiplications into d
  uint64_t returned = 0;           // how many fences the thread had had when the last of these was waited for
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
  int issued = 0, taken = 0;  // how many threads have issued it, and taken its result
  bool done = false;
  struct {
    int lanes = 0;
    uint64_t collectives, groups;  // how many each of its lanes had gone through before
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
  uint64_t phase = 0;  // the current one, which is not complete
  int initializer;     // the thread that did it
  bool published = false;
  uint64_t published_at;  // how many __syncthreads() that thread had gone through
  std::vector<BoxCopy> copies;
};
// The memory of an mbarrier holds this; nothing else may write there.
inline uint64_t mark(const PhaseBarrier& barrier) {
  return 0xba221e2000000000 + (barrier.phase << 16) + barrier.pending;
}

struct NamedBarrier {
  int threads = 0, arrived = 0;  // 0: not in use
  uint64_t completed = 0;
  uint64_t warps = 0;  // that have arrived
};

struct Fiber {
  Thread thread;
  ucontext_t beginning;
  jmp_buf place;  // where it yielded
  std::unique_ptr<unsigned char[]> stack;
  bool begun = false, ended = false;
  uint64_t barriers = 0, collectives = 0;
  std::vector<Copy> copies;             // not yet committed
  std::deque<std::vector<Copy>> groups;  // committed, oldest first
  std::string waits_for;                 // for the message when all threads wait
  // wgmma: multiplications issued, those waited for, groups, fences, and fences before the last wait.
  uint64_t multiplications = 0, taken = 0, multiplication_groups = 0, fences = 0, fences_at_wait = 0;
  std::vector<Issued> issued;                     // not yet committed
  std::deque<std::vector<Issued>> issued_groups;  // committed, oldest first
  std::vector<std::unique_ptr<Registers>> registers;
};

// What the lanes of a warp have brought to collectives, apart for even and odd numbers: a lane can be one collective
// ahead of another, never two.
struct Warp {
  alignas(16) unsigned char brought[2][kWarp][kMost];
  uint64_t number[kWarp];  // of each lane's last collective
  const char* operation[2][kWarp];
  unsigned mask[2][kWarp];
  int registers;  // of a thread, by setmaxnreg; 0: as many as it was started with
};

struct Block {
  dim3 index, size, grid;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  std::unique_ptr<unsigned char[]> memory;
  unsigned char* shared;
  size_t shared_bytes;
  std::vector<unsigned char> seen;  // shared memory as multiplications see it
  std::map<uint64_t*, PhaseBarrier> phase_barriers;
  NamedBarrier named[16];
  std::vector<Warpgroup> warpgroups;
  uint64_t barriers = 0;  // passed by all
  int arrived = 0, ended = 0;
  bool asserted = false;
  jmp_buf scheduler;
  void (*kernel)(void*);
  void* arguments;
};
extern Block* block;
extern Fiber* fiber;
extern bool progress;
// All threads wait, so that what is asynchronous has its turn: the first thread that it lets go on carries it out.
extern bool idle;
// AURA_EMULATED_EAGER: what is asynchronous comes as early as it may. "copies": copies do, while multiplications come
// as late as they may, so that they can read what was overwritten too soon.
extern bool eager_copies, eager_multiplications;

[[noreturn]] void fail(const std::string& what);
void yield();

// Waits until done(), which another thread brings about. what() names it for the message.
template <typename What, typename Done>
void wait_until(What what, Done done) {
  if (done()) return;
  fiber->waits_for = what();
  do yield(); while (!done());
  fiber->waits_for.clear();
}

// The swizzle of 128 bytes, of TMA and of wgmma: bits 4 to 6 of an address in the shared window, which select 16 of 128
// bytes, are XORed with bits 7 to 9. It is the address that counts, not the place in a tile: hence the alignment to
// 1024 bytes.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }
// The offset of that address in the block's shared memory.
uint32_t offset_of(uint32_t address, uint32_t bytes, const char* what);

}  // namespace emulated
