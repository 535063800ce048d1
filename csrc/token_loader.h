// Memory-mapped token shards, the order of their windows, and a reader that fills batches ahead of time.
// No torch, no CUDA, no Python: the buffers belong to the caller and arrive as plain pointers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace aura {

// A pseudo-random bijection of {0 ... count-1}, chosen by (seed, epoch), in O(1) memory, for count from 1 to 2^62.
//
// An alternating (unbalanced) Feistel network over ceil(log2 count) bits, walked along its cycle until the value
// falls inside the domain: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections
// 4 (cycle walking) and 5 (generalised Feistel). The domain is less than twice the count, so fewer than two walks
// are expected. The round function is the 64-bit finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast
// Splittable Pseudorandom Number Generators", OOPSLA 2014, Stafford's variant 13). aura/tokens.py holds the same
// function for machines without a compiler; a test keeps the two equal bit for bit.
class Permutation {
 public:
  static constexpr int kRounds = 8;

  Permutation(uint64_t count, uint64_t seed, uint64_t epoch);
  uint64_t operator()(uint64_t n) const;
  // out[i] = the value of first+i, for i < count.
  void range(uint64_t first, size_t count, uint64_t* out) const;

 private:
  uint64_t count_;
  int low_bits_;
  uint64_t low_mask_, high_mask_;
  std::array<uint64_t, kRounds> keys_;
};

struct Shard {
  std::string path;
  uint64_t tokens;
};

// What went wrong in a batch; the front turns it into a sentence.
struct Fault {
  enum Kind { kNone, kToken, kShrunk };
  Kind kind = kNone;
  size_t shard = 0;
  uint64_t position = 0;  // of the token inside its shard
  uint64_t token = 0;
};

// Several shards read as one stream and cut into windows: window w is tokens [w*T, w*T + T], T inputs and one more
// for the last target. Batches are asked for with submit(), filled in that order, and awaited with wait().
class WindowReader {
 public:
  struct Layout {
    uint64_t header_bytes;  // before the tokens of every shard
    uint64_t seq_len;       // T
    uint64_t vocab_size;    // a token that is not below it is a fault
    int file_width;         // bytes per token on disk: 2 or 4
    int buffer_width;       // bytes per token in the buffers: as on disk, or 8
  };

  // `buffers` are batch_size * (T+1) tokens each and must outlive close(). Throws std::system_error naming the file
  // that cannot be mapped or is shorter than its tokens.
  WindowReader(const std::vector<Shard>& shards, const Layout& layout, const std::vector<void*>& buffers);
  ~WindowReader();
  WindowReader(const WindowReader&) = delete;
  WindowReader& operator=(const WindowReader&) = delete;

  uint64_t windows() const;

  // Fill buffer `slot` with the windows that hold sequence numbers first ... first+count-1 of (seed, epoch).
  void submit(size_t slot, uint64_t seed, uint64_t epoch, uint64_t first, uint64_t count);
  // Fill buffer `slot` with these windows, as they come.
  void submit(size_t slot, std::vector<uint64_t> windows);

  // True when the buffer is filled (or has failed: see `fault`), false when `timeout_ms` ran out first.
  bool wait(size_t slot, int timeout_ms, Fault* fault);

  // Forget what was asked for; returns once no buffer is being written.
  void cancel();
  // Stop the thread and unmap. Harmless when repeated, and in a forked child, where the thread does not exist.
  void close();

 private:
  struct State;
  std::unique_ptr<State> state_;
  State& live() const;
};

}  // namespace aura
