#include "token_loader.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

namespace aura {
namespace {

uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

using Clock = std::chrono::steady_clock;
// A batch that took longer may have waited for the disk: only then is the system asked, at the cost of a call.
constexpr auto kSuspicious = std::chrono::microseconds(200);
constexpr auto kSizeCheckEvery = std::chrono::milliseconds(10);

constexpr size_t kLine = 64;  // bytes of a cache line
// How far ahead lines are fetched: in bytes of output, and in rows of input. Measured; twice as much is no better.
constexpr size_t kWriteAhead = 1024;
constexpr size_t kRowsAhead = 4;

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

int bit_length(uint64_t x) {
  int bits = 0;
  for (; x != 0; x >>= 1) ++bits;
  return bits;
}

// ---- A file that shrinks under its mapping -------------------------------------------------------------------
// Reading a page that the file no longer has raises SIGBUS, which would end days of training without a word. While
// a thread copies tokens it names the mapping here; the handler marks the mapping as lost and puts a page of zeros
// under the fault, and the copy ends as a Fault. The mark stays, and comes before the page: nobody else, now or later,
// may take those zeros for tokens. Any other SIGBUS goes to whoever handled it before us.

struct Guard {
  volatile uintptr_t begin = 0, end = 0;
  std::atomic<bool>* volatile lost = nullptr;
};
thread_local Guard guard;
struct sigaction previous_sigbus;
uintptr_t page_size = 4096;

void on_sigbus(int signal, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (info->si_code > 0 && guard.begin <= address && address < guard.end) {
    guard.lost->store(true);
    void* page = reinterpret_cast<void*>(address & ~(page_size - 1));
    if (mmap(page, page_size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) return;
  }
  sigaction(SIGBUS, &previous_sigbus, nullptr);
  if (info->si_code <= 0) raise(signal);  // sent by a person: returning would not repeat it, as it repeats a fault
}

// ---- Forked children -----------------------------------------------------------------------------------------
// A child inherits the object but not its thread, and maybe a locked mutex: touching either could wait for ever.

std::atomic<uint64_t> forks{0};

void prepare_process() {
  static std::once_flag once;
  std::call_once(once, [] {
    page_size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
    struct sigaction action = {};
    action.sa_sigaction = on_sigbus;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &previous_sigbus);
  });
}

// ---- Copying -------------------------------------------------------------------------------------------------

// Copies a row, widened where the types differ, and returns its highest token, in one pass of whole cache lines.
//
// What bounds it is the wait for lines, both ways. `ahead`, a row to be copied soon, lies at a place that the processor
// cannot foresee: it is brought to the second-level cache meanwhile (to the first, it would compete with the stores for
// the few line buffers). The output has left the first level since the ring last came round: its lines are called
// back for writing a little before their turn. Prefetching beyond the end of anything is harmless.
template <class In, class Out>
uint64_t copy_tokens(const In* in, Out* out, size_t n, const char* ahead) {
  constexpr size_t kTokens = kLine / sizeof(In);
  typedef In Line __attribute__((vector_size(kLine), aligned(sizeof(In)), may_alias));
  In highest = 0;
  const auto copy_one = [&] {
    highest = std::max(highest, *in);
    *out++ = *in++;
    --n;
  };
  // A row of T+1 tokens never ends on a cache line: stores that are not brought to one would touch two lines each.
  while (n > 0 && reinterpret_cast<uintptr_t>(out) % kLine != 0) copy_one();
  Line top = {};
  for (; n >= kTokens; n -= kTokens, in += kTokens, out += kTokens, ahead += kLine) {
    __builtin_prefetch(ahead, 0, 2);
    const char* write_soon = reinterpret_cast<const char*>(out) + kWriteAhead;
    for (size_t i = 0; i < kTokens * sizeof(Out); i += kLine) __builtin_prefetch(write_soon + i, 1);
    const Line line = *reinterpret_cast<const Line*>(in);
    top = line > top ? line : top;
    auto* aligned = static_cast<Out*>(__builtin_assume_aligned(out, kLine));
    for (size_t i = 0; i < kTokens; ++i) aligned[i] = in[i];
  }
  for (size_t i = 0; i < 2 * kLine; i += kLine) __builtin_prefetch(ahead + i, 0, 2);
  while (n > 0) copy_one();
  for (size_t i = 0; i < kTokens; ++i) highest = std::max(highest, static_cast<In>(top[i]));
  return highest;
}

// Whether this thread has read from the disk since it last asked; never where the system does not count per thread.
bool read_from_disk() {
#ifdef RUSAGE_THREAD
  thread_local int64_t before = 0;
  rusage usage;
  if (getrusage(RUSAGE_THREAD, &usage) == 0) return std::exchange(before, usage.ru_majflt + usage.ru_inblock) != before;
#endif
  return false;
}

class Mapping {
 public:
  Mapping(const Shard& shard, const WindowReader::Layout& layout) : path_(shard.path) {
    bytes_ = layout.header_bytes + shard.tokens * static_cast<uint64_t>(layout.file_width);
    const int file = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) throw std::system_error(errno, std::generic_category(), path_);
    struct stat info = {};
    const bool whole = fstat(file, &info) == 0 && static_cast<uint64_t>(info.st_size) >= bytes_;
    device_ = info.st_dev;
    inode_ = info.st_ino;
    void* base = whole ? mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
    const int error = whole ? errno : EIO;
    ::close(file);  // the mapping stays; thousands of shards would exhaust the descriptors
    if (base == MAP_FAILED) throw std::system_error(error, std::generic_category(), path_);
    base_ = static_cast<char*>(base);
    // Windows are read in random order: the kernel's own read-ahead would fetch 32 pages to use one or two.
    madvise(base_, bytes_, MADV_RANDOM);
  }
  Mapping(Mapping&& other) noexcept
      : path_(std::move(other.path_)), base_(other.base_), bytes_(other.bytes_), device_(other.device_),
        inode_(other.inode_) {
    other.base_ = nullptr;
  }
  ~Mapping() {
    if (base_ != nullptr) munmap(base_, bytes_);
  }
  const char* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }
  std::atomic<bool>& lost() { return lost_; }  // a page is zeros and not the file's

  // SIGBUS tells of whole missing pages; the rest of the last page reads as zeros, so the size is looked at as well.
  // Another file may have taken the name since; this one is then unchanged.
  bool shrunk() const {
    struct stat info = {};
    return stat(path_.c_str(), &info) == 0 && info.st_dev == device_ && info.st_ino == inode_ &&
           static_cast<uint64_t>(info.st_size) < bytes_;
  }

 private:
  std::string path_;
  char* base_ = nullptr;
  uint64_t bytes_ = 0;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  std::atomic<bool> lost_{false};
};

struct Job {
  size_t slot;
  std::vector<uint64_t> windows;
};

}  // namespace

// ---- Order ---------------------------------------------------------------------------------------------------

Permutation::Permutation(uint64_t count, uint64_t seed, uint64_t epoch) : count_(count) {
  if (count == 0 || count > (uint64_t{1} << 62)) throw std::invalid_argument("count must be in 1 ... 2^62");
  const int bits = bit_length(count - 1);
  low_bits_ = bits - bits / 2;
  low_mask_ = (uint64_t{1} << low_bits_) - 1;
  high_mask_ = (uint64_t{1} << (bits / 2)) - 1;
  const uint64_t base = mix64(mix64(seed + kGolden) + epoch);
  for (int round = 0; round < kRounds; ++round) {
    keys_[round] = mix64(base + kGolden * static_cast<uint64_t>(round + 1));
  }
}

uint64_t Permutation::operator()(uint64_t n) const {
  uint64_t window;
  range(n, 1, &window);
  return window;
}

// The rounds of one value wait for each other, those of different values do not: many at once fill the processor. A
// value that has arrived inside the domain stays there while the others walk on.
void Permutation::range(uint64_t first, size_t count, uint64_t* out) const {
  constexpr size_t kLanes = 8;
  for (size_t done = 0; done < count; done += kLanes) {
    const size_t lanes = std::min(kLanes, count - done);
    uint64_t n[kLanes], outside = 1, walking[kLanes];
    for (size_t i = 0; i < kLanes; ++i) {
      n[i] = first + done + std::min(i, lanes - 1);
      walking[i] = 1;
    }
    while (outside != 0) {
      uint64_t high[kLanes], low[kLanes];
      for (size_t i = 0; i < kLanes; ++i) {
        high[i] = n[i] >> low_bits_;
        low[i] = n[i] & low_mask_;
      }
      for (int round = 0; round < kRounds; round += 2) {
        for (size_t i = 0; i < kLanes; ++i) low[i] ^= mix64(high[i] + keys_[round]) & low_mask_;
        for (size_t i = 0; i < kLanes; ++i) high[i] ^= mix64(low[i] + keys_[round + 1]) & high_mask_;
      }
      outside = 0;
      for (size_t i = 0; i < kLanes; ++i) {
        n[i] = walking[i] != 0 ? (high[i] << low_bits_) | low[i] : n[i];
        walking[i] = n[i] >= count_ ? 1 : 0;
        outside |= walking[i];
      }
    }
    std::copy(n, n + lanes, out + done);
  }
}

// ---- Reader --------------------------------------------------------------------------------------------------

struct WindowReader::State {
  Layout layout;
  std::vector<Mapping> maps;
  std::vector<uint64_t> starts;  // starts[i]: stream position of shard i's first token; one more for the end
  std::vector<void*> buffers;
  uint64_t windows = 0;
  uint64_t forks_at_birth = 0;

  std::mutex mutex;  // guards what follows
  std::condition_variable work, done;
  std::deque<Job> queue;
  std::vector<char> ready;
  std::vector<Fault> faults;
  int filling = 0;
  bool stop = false;
  size_t check_next = 0;  // the shard whose size is looked at next
  Clock::time_point checked{};
  bool cold = false;      // the last batch had to wait for the disk
  std::thread thread;

  void run();
  void enqueue(Job job);
  void take(std::unique_lock<std::mutex>& lock, std::deque<Job>::iterator position);
  Fault fill(const Job& job, const uint64_t* next, size_t known, bool hint);
  Fault copy_window(uint64_t window, char* out, const char* ahead);
  uint64_t copy_piece(size_t shard, uint64_t position, uint64_t count, char* out, const char* ahead) const;
  const char* address(size_t shard, uint64_t position) const;
  const char* address(uint64_t window) const;
  uint64_t find_token(size_t shard, uint64_t position) const;
  bool ends_in_zeros(size_t shard, uint64_t position, uint64_t count) const;
  size_t shard_of(uint64_t token) const;
  template <class Visit>
  void pieces(uint64_t window, Visit visit) const;
};

size_t WindowReader::State::shard_of(uint64_t token) const {
  return static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), token) - starts.begin()) - 1;
}

// A window may straddle shards of any size: visit(shard, position in it, tokens) for each part.
template <class Visit>
void WindowReader::State::pieces(uint64_t window, Visit visit) const {
  uint64_t at = window * layout.seq_len;
  uint64_t left = layout.seq_len + 1;
  size_t shard = shard_of(at);
  for (; left > 0; ++shard) {
    const uint64_t count = std::min(left, starts[shard + 1] - at);
    if (count > 0) visit(shard, at - starts[shard], count);
    at += count;
    left -= count;
  }
}

const char* WindowReader::State::address(size_t shard, uint64_t position) const {
  return maps[shard].base() + layout.header_bytes + position * static_cast<uint64_t>(layout.file_width);
}

const char* WindowReader::State::address(uint64_t window) const {
  const uint64_t at = window * layout.seq_len;
  const size_t shard = shard_of(at);
  return address(shard, at - starts[shard]);
}

uint64_t WindowReader::State::copy_piece(size_t shard, uint64_t position, uint64_t count, char* out,
                                         const char* ahead) const {
  const char* in = address(shard, position);
  if (layout.file_width == 2) {
    const auto* tokens = reinterpret_cast<const uint16_t*>(in);
    if (layout.buffer_width == 2) return copy_tokens(tokens, reinterpret_cast<uint16_t*>(out), count, ahead);
    return copy_tokens(tokens, reinterpret_cast<int64_t*>(out), count, ahead);
  }
  const auto* tokens = reinterpret_cast<const uint32_t*>(in);
  if (layout.buffer_width == 4) return copy_tokens(tokens, reinterpret_cast<uint32_t*>(out), count, ahead);
  return copy_tokens(tokens, reinterpret_cast<int64_t*>(out), count, ahead);
}

uint64_t WindowReader::State::find_token(size_t shard, uint64_t position) const {
  uint64_t token = 0;
  // Shards are little-endian, as every host here.
  std::memcpy(&token, address(shard, position), static_cast<size_t>(layout.file_width));
  return token;
}

// Whether the tokens could be what a cut has left of its last page: zeros up to the end of the page, or of these.
bool WindowReader::State::ends_in_zeros(size_t shard, uint64_t position, uint64_t count) const {
  const auto width = static_cast<uint64_t>(layout.file_width);
  const uint64_t end = position + count;
  for (uint64_t at = position; at < end;) {
    const uint64_t page_end = ((layout.header_bytes + at * width) / page_size + 1) * page_size;
    at = std::min(end, std::max(at + 1, (page_end - layout.header_bytes) / width));
    if (find_token(shard, at - 1) == 0) return true;
  }
  return false;
}

Fault WindowReader::State::copy_window(uint64_t window, char* out, const char* ahead) {
  Fault fault;
  Guard& mine = guard;
  pieces(window, [&](size_t shard, uint64_t position, uint64_t count) {
    Mapping& map = maps[shard];
    mine.lost = &map.lost();
    mine.begin = reinterpret_cast<uintptr_t>(map.base());
    mine.end = mine.begin + map.bytes() + page_size;
    std::atomic_signal_fence(std::memory_order_seq_cst);
    const uint64_t highest = copy_piece(shard, position, count, out, ahead);
    if (highest >= layout.vocab_size && fault.kind == Fault::kNone) {
      for (uint64_t i = position; i < position + count && fault.kind == Fault::kNone; ++i) {
        const uint64_t token = find_token(shard, i);
        if (token >= layout.vocab_size) fault = {Fault::kToken, shard, i, token};
      }
    }
    if (ends_in_zeros(shard, position, count) && map.shrunk()) map.lost().store(true);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    mine.begin = 0;
    mine.end = 0;
    if (map.lost()) fault = {Fault::kShrunk, shard, position, 0};
    out += count * static_cast<uint64_t>(layout.buffer_width);
  });
  return fault;
}

// `next` are the first `known` windows of the job that comes after this one: this one's last rows fetch them ahead.
Fault WindowReader::State::fill(const Job& job, const uint64_t* next, size_t known, bool hint) {
  const auto width = static_cast<uint64_t>(layout.file_width);
  if (hint) {  // ask for all the windows at once, so that the disk sees them together and not one fault at a time
    for (uint64_t window : job.windows) {
      pieces(window, [&](size_t shard, uint64_t position, uint64_t count) {
        const uint64_t begin = (layout.header_bytes + position * width) & ~(uint64_t{page_size} - 1);
        const uint64_t end = layout.header_bytes + (position + count) * width;
        madvise(const_cast<char*>(maps[shard].base()) + begin, end - begin, MADV_WILLNEED);
      });
    }
  }
  Fault fault;
  auto* out = static_cast<char*>(buffers[job.slot]);
  const uint64_t row_bytes = (layout.seq_len + 1) * static_cast<uint64_t>(layout.buffer_width);
  const size_t rows = job.windows.size();
  for (size_t row = 0; row < rows && fault.kind == Fault::kNone; ++row) {
    const size_t then = row + kRowsAhead;
    uint64_t soon = job.windows[row];  // when nothing is known of the future
    if (then < rows) soon = job.windows[then];
    else if (then - rows < known) soon = next[then - rows];
    fault = copy_window(job.windows[row], out + row * row_bytes, address(soon));
  }
  return fault;
}

void WindowReader::State::enqueue(Job job) {
  const std::lock_guard<std::mutex> lock(mutex);
  ready[job.slot] = 0;
  queue.push_back(std::move(job));
  if (queue.size() * 2 >= buffers.size() && filling == 0) work.notify_one();
}

// Takes a job off the queue and fills its buffer, with the lock released meanwhile.
void WindowReader::State::take(std::unique_lock<std::mutex>& lock, std::deque<Job>::iterator position) {
  Job job = std::move(*position);
  std::array<uint64_t, kRowsAhead> next;
  size_t known = 0;
  const auto after = queue.erase(position);
  if (after != queue.end()) {
    known = std::min(kRowsAhead, after->windows.size());
    std::copy_n(after->windows.begin(), known, next.begin());
  }
  const bool hint = cold;
  const Clock::time_point begin = Clock::now();
  const bool check = begin - checked > kSizeCheckEvery;
  const size_t checked_shard = check ? check_next++ % maps.size() : 0;
  if (check) checked = begin;
  ++filling;
  lock.unlock();
  Fault fault = fill(job, next.data(), known, hint);
  if (check && fault.kind == Fault::kNone && maps[checked_shard].shrunk()) fault = {Fault::kShrunk, checked_shard, 0, 0};
  const bool waited = (hint || Clock::now() - begin > kSuspicious) && read_from_disk();
  lock.lock();
  --filling;
  cold = waited;
  faults[job.slot] = fault;
  ready[job.slot] = 1;
  done.notify_all();
}

void WindowReader::State::run() {
#ifdef SCHED_BATCH
  // Woken on a busy core, this thread must not push the training step aside: wait() can do without it. A refusal
  // costs a little speed and nothing else.
  const sched_param none = {};
  pthread_setschedparam(pthread_self(), SCHED_BATCH, &none);
#endif
  std::unique_lock<std::mutex> lock(mutex);
  while (!stop) {
    // Half the buffers at a time: one wake-up (two context switches on a busy core) then serves several batches.
    work.wait(lock, [&] { return stop || queue.size() * 2 >= buffers.size(); });
    while (!stop && !queue.empty()) take(lock, queue.begin());
  }
}

WindowReader::WindowReader(const std::vector<Shard>& shards, const Layout& layout,
                           const std::vector<void*>& buffers) {
  const bool widths = (layout.file_width == 2 || layout.file_width == 4) &&
                      (layout.buffer_width == layout.file_width || layout.buffer_width == 8);
  if (!widths || layout.seq_len == 0 || buffers.empty()) throw std::invalid_argument("WindowReader layout");
  prepare_process();
  auto state = std::make_unique<State>();
  state->layout = layout;
  state->buffers = buffers;
  state->ready.assign(buffers.size(), 0);
  state->faults.resize(buffers.size());
  state->forks_at_birth = forks.load();
  uint64_t total = 0;
  state->starts.push_back(0);
  for (const Shard& shard : shards) {
    state->maps.emplace_back(shard, layout);
    total += shard.tokens;
    state->starts.push_back(total);
  }
  if (total <= layout.seq_len) throw std::invalid_argument("fewer tokens than one window");
  state->windows = (total - 1) / layout.seq_len;
  State* raw = state.get();
  // Signals are for the main thread: a handler of Python's that ran here would find no interpreter state.
  sigset_t all, old;
  sigfillset(&all);
  sigdelset(&all, SIGBUS);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  try {
    state->thread = std::thread([raw] { raw->run(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  state_ = std::move(state);
}

WindowReader::~WindowReader() { close(); }

WindowReader::State& WindowReader::live() const {
  if (state_ == nullptr) throw std::runtime_error("the reader is closed");
  if (state_->forks_at_birth != forks.load()) {
    throw std::runtime_error("the reader belongs to the parent process: open it after the fork");
  }
  return *state_;
}

uint64_t WindowReader::windows() const { return live().windows; }

void WindowReader::submit(size_t slot, uint64_t seed, uint64_t epoch, uint64_t first, uint64_t count) {
  State& state = live();
  if (slot >= state.buffers.size() || count == 0) throw std::invalid_argument("WindowReader::submit");
  if (first > state.windows || count > state.windows - first) throw std::out_of_range("sequence number");
  std::vector<uint64_t> windows(count);
  Permutation(state.windows, seed, epoch).range(first, count, windows.data());
  state.enqueue({slot, std::move(windows)});
}

void WindowReader::submit(size_t slot, std::vector<uint64_t> windows) {
  State& state = live();
  if (slot >= state.buffers.size() || windows.empty()) throw std::invalid_argument("WindowReader::submit");
  for (uint64_t window : windows) {
    if (window >= state.windows) throw std::out_of_range("window");
  }
  state.enqueue({slot, std::move(windows)});
}

bool WindowReader::wait(size_t slot, int timeout_ms, Fault* fault) {
  State& state = live();
  if (slot >= state.buffers.size()) throw std::invalid_argument("WindowReader::wait");
  std::unique_lock<std::mutex> lock(state.mutex);
  if (!state.ready[slot]) {
    // The caller would only wait, so it fills the batch itself: no context switch, and two hands if the thread lags.
    auto& queue = state.queue;
    const auto mine = std::find_if(queue.begin(), queue.end(), [&](const Job& job) { return job.slot == slot; });
    if (mine != queue.end()) state.take(lock, mine);
  }
  const auto limit = std::chrono::milliseconds(timeout_ms);
  const bool ok = state.done.wait_for(lock, limit, [&] { return state.ready[slot] != 0; });
  if (ok) *fault = state.faults[slot];
  return ok;
}

void WindowReader::cancel() {
  State& state = live();
  std::unique_lock<std::mutex> lock(state.mutex);
  state.queue.clear();
  state.done.wait(lock, [&] { return state.filling == 0; });
}

void WindowReader::close() {
  if (state_ == nullptr) return;
  if (state_->forks_at_birth != forks.load()) {
    (void)state_.release();  // its mutex and thread are the parent's: even destroying them may wait for ever
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop = true;
    state_->queue.clear();
  }
  state_->work.notify_all();
  state_->thread.join();
  state_.reset();
}

}  // namespace aura
