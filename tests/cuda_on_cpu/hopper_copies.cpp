// mbarrier and TMA behind cuda_runtime.h, and the shared window, in which their addresses and wgmma's lie.
#include "state.h"

namespace emulated {
namespace {

constexpr uint32_t kWindow = 1024;  // first bytes of the shared window, which are not the block's

Map read_map(const CUtensorMap* map) {
  if (reinterpret_cast<uintptr_t>(map) % 64) fail("cp.async.bulk.tensor: the map is not aligned to 64 bytes");
  Map held;
  std::memcpy(&held, map, sizeof(held));
  if (held.kind != kTiledMap) fail("cp.async.bulk.tensor: not a map");
  return held;
}

void complete_phase(PhaseBarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  ++barrier.phase;
  progress = true;
}

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
          const uint32_t at = offset_of(address, map.value_bytes, "cp.async.bulk.tensor");
          if (inside && column >= 0 && static_cast<uint64_t>(column) < map.dims[0]) {
            std::memcpy(block->shared + at, reinterpret_cast<const unsigned char*>(row) + column * map.value_bytes,
                        map.value_bytes);
          } else {
            std::memset(block->shared + at, 0, map.value_bytes);
          }
          std::memcpy(block->seen.data() + at, block->shared + at, map.value_bytes);
        }
      }
    }
  }
  barrier.bytes -= static_cast<int>(offset);  // all of the box counts, what lies beyond the tensor too
  if (barrier.pending == 0 && barrier.bytes < 0) {
    fail("cp.async.bulk.tensor: more bytes than the phase of its mbarrier expects");
  }
}

}  // namespace

uint32_t offset_of(uint32_t address, uint32_t bytes, const char* what) {
  if (address < kWindow || address + bytes > kWindow + block->shared_bytes) {
    fail(std::string(what) + ": an address outside the block's shared memory");
  }
  return address - kWindow;
}

const unsigned char* shared_pointer(uint32_t address, uint32_t bytes, const char* what) {
  return block->shared + offset_of(address, bytes, what);
}

uint32_t shared_address(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) - block->shared;
  if (offset < 0 || offset >= static_cast<ptrdiff_t>(block->shared_bytes)) fail("a pointer outside shared memory");
  if (offset % 16) fail("shared memory that is not aligned to 16 bytes");
  return kWindow + static_cast<uint32_t>(offset);
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

void fence_async_proxy() { std::memcpy(block->seen.data(), block->shared, block->shared_bytes); }

void set_registers(int count) {
  exchange(~0u, "setmaxnreg", count);
  block->warps[fiber->thread.warp].registers = count;
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
  offset_of(to, bytes, "cp.async.bulk.tensor");
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

}  // namespace emulated

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
    // The innermost dimension's element stride is ignored without interleaving.
    if (i > 0 && (element_strides[i] == 0 || element_strides[i] > 8)) return CUDA_ERROR_INVALID_VALUE;
    if (i > 0 && element_strides[i] != 1) return CUDA_ERROR_NOT_SUPPORTED;
    map.dims[i] = dims[i];
    map.box[i] = static_cast<uint16_t>(box[i]);
  }
  for (uint32_t i = 0; i + 1 < rank; ++i) {
    if (strides[i] % 16 || strides[i] >= uint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
    // A stride is a multiple of the one below it, and at least that times the size of its dimension.
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
