// wgmma behind cuda_runtime.h: its descriptors, the registers that it takes and returns, its fences and groups.
#include "state.h"

namespace emulated {
namespace {

constexpr uint32_t kUnderWay = 0x7fc5a5a5;  // an accumulator that a multiplication has yet to write: NaN

struct Descriptor {
  uint32_t start, leading, stride;
  explicit Descriptor(uint64_t bits)
      : start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4), stride((bits >> 32 & 0x3fff) << 4) {
    if (bits >> 62 != 1) fail("wgmma: a descriptor without the swizzle of 128 bytes");
    // Bits 14, 15, 30, 31, 46 to 48 and 52 to 61 belong to no field: what is added to the start may not carry into
    // them.
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
      std::memcpy(values, &block->seen[offset_of(swizzled(address), 16, "wgmma")], 16);
      for (int i = 0; i < 8; ++i) to[row * row_step + (8 * chunk + i) * k_step] = what.wide(values[i]);
    }
  }
}

// A matrix [columns, 16] that lies MN-major: rows of 64 columns, one for each k, in groups of 8 k that are `stride`
// apart; the next 64 columns are `leading` further. It is written as [16, columns].
void read_mn_major(const Multiplication& what, uint64_t bits, float* to) {
  const Descriptor descriptor(bits);
  if (descriptor.start % 128) fail("wgmma: an MN-major matrix that does not begin with its 128 bytes");
  for (int k = 0; k < 16; ++k) {
    for (int column = 0; column < what.columns; column += 8) {
      const uint32_t address = descriptor.start + column / 64 * descriptor.leading + column % 64 * 2 +
                               k / 8 * descriptor.stride + k % 8 * 128;
      uint16_t values[8];
      std::memcpy(values, &block->seen[offset_of(swizzled(address), 16, "wgmma")], 16);
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

// What is known of these registers of the thread. The same memory of the stack may have been other registers before.
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

}  // namespace

uint32_t descriptor_stride(int bytes) {
  if (bytes < 0 || bytes >= 1 << 18 || bytes % 16) fail("wgmma: a stride that no descriptor can hold");
  return static_cast<uint32_t>(bytes);
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

  // A wgmma.fence must come after whatever else touched these registers. Between multiplications none is needed.
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
      // The threads take results in order: the oldest operation is the first that all have taken.
      if (++operation.taken == kWarpgroup) warpgroup.operations.pop_front(), ++warpgroup.first;
    }
  }
}

}  // namespace emulated
