// A simulated accelerator for torch: a back end on the PrivateUse1 key, with two devices in one process.
//
// Device memory is mapped twice. Tensors have addresses in a mapping that nobody may access, so that host code that
// reads device memory ends the process. Kernels and copies use the second mapping of the same pages.
//
// A stream is a queue of operations. They run in the order of the queue, and wait for events of other streams. A
// seeded scheduler decides which stream runs next, and how much later than the call: in the thread of a later call to
// the device, or in a thread of the device. What CUDA may reorder, it reorders.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_copy_from_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_map>

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr int DEVICES = 2;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr size_t ROUND = 512;
constexpr size_t PIECE = 256 << 10;  // a copy runs in pieces of so many bytes, and other streams run between them
constexpr size_t QUEUED_MOST = 4096;

bool forked = false;

void not_forked() {
  TORCH_CHECK(!forked, "sim: the device cannot be used in a forked process");
}

// ---------------------------------------------------------------- what was done, for tests that count

struct Counters {
  std::atomic<int64_t> kernels{0}, waits{0}, to_host{0}, to_host_bytes{0}, to_device{0}, to_device_bytes{0},
      allocations{0}, unpinned{0};
} counters;
thread_local int64_t waits_here = 0;  // of the calling thread

// ---------------------------------------------------------------- streams

struct StreamQueue;

struct Marker {  // a recorded event
  StreamQueue* stream = nullptr;
  bool done = false;
};
using MarkerPtr = std::shared_ptr<Marker>;

struct Operation {
  std::function<void()> run;  // empty for markers
  MarkerPtr wait;             // runs only after this one
  MarkerPtr sets;
  std::chrono::steady_clock::time_point not_before{};
};

struct StreamQueue {
  int device;
  int64_t id;
  std::deque<Operation> queue;
  bool ready() const {
    if (queue.empty() || (queue.front().wait && !queue.front().wait->done)) return false;
    return queue.front().not_before <= std::chrono::steady_clock::now();
  }
};

struct DeviceState {
  std::string failed;   // an error of a kernel: every later call reports it
  std::string pending;  // an error of a refused call: the next call reports it, once
  std::deque<std::unique_ptr<StreamQueue>> streams;
};

enum class Mode { lazy, eager, mixed };

struct Scheduler {
  std::mutex mutex;
  std::condition_variable changed;
  DeviceState devices[DEVICES];
  std::mt19937_64 random{0};
  Mode mode = Mode::mixed;
  int64_t executed = 0, fail_at = -1;
  size_t queued = 0;
  bool threads = false;
  unsigned others_first = 25;  // chance in 100 that other streams run before the one that somebody waits for
  int64_t slow = -1;           // streams of this number, modulo 3, run only if somebody waits for them

  Scheduler() {
    for (int device = 0; device < DEVICES; device++) add_stream(device);
  }

  int64_t add_stream(int device) {
    auto& streams = devices[device].streams;
    streams.push_back(std::make_unique<StreamQueue>());
    streams.back()->device = device;
    streams.back()->id = int64_t(streams.size()) - 1;
    return streams.back()->id;
  }

  StreamQueue& stream(int device, int64_t id) { return *devices[device].streams.at(id); }

  // All below: with the mutex held.

  void run_first(StreamQueue& stream) {
    Operation operation = std::move(stream.queue.front());
    stream.queue.pop_front();
    queued--;
    auto& device = devices[stream.device];
    if (operation.run) {
      if (device.failed.empty() && executed++ == fail_at)
        device.failed = "sim: an injected error of a kernel";
      if (device.failed.empty()) try {
          operation.run();
        } catch (const std::exception& error) {
          device.failed = std::string("sim: a kernel failed: ") + error.what();
        }
    }
    if (operation.sets) operation.sets->done = true;
  }

  bool run_any(const StreamQueue* except = nullptr) {
    std::vector<StreamQueue*> ready;
    for (auto& device : devices)
      for (auto& stream : device.streams)
        if (stream->ready() && stream.get() != except && (slow < 0 || stream->id % 3 != slow)) ready.push_back(stream.get());
    if (ready.empty()) return false;
    run_first(*ready[random() % ready.size()]);
    return true;
  }

  void run_until(MarkerPtr marker) {
    while (!marker->done) {
      if (mode == Mode::mixed && random() % 100 < others_first && run_any(marker->stream)) continue;
      run_or_wait(*marker->stream);
    }
  }

  void run_or_wait(StreamQueue& stream) {
    if (stream.ready()) run_first(stream);
    else if (stream.queue.empty()) return;
    else if (stream.queue.front().wait && !stream.queue.front().wait->done) run_until(stream.queue.front().wait);
    else {  // a kernel that takes its time: the host may go on
      mutex.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      mutex.lock();
    }
  }

  void drain(StreamQueue& stream) {
    while (!stream.queue.empty()) {
      if (mode == Mode::mixed && random() % 100 < others_first && run_any(&stream)) continue;
      run_or_wait(stream);
    }
  }

  void drain_device(int device) {  // other threads may add streams meanwhile
    for (size_t i = 0; i < devices[device].streams.size(); i++) drain(*devices[device].streams[i]);
  }

  void sometimes() {  // at every call: what the device did since the last
    if (mode == Mode::eager)
      while (run_any()) {}
    else if (mode == Mode::mixed)
      while (random() % 8 < 5 && run_any()) {}
    for (slow = queued > QUEUED_MOST ? -1 : slow; queued > QUEUED_MOST && run_any();) {}
  }

  void check(int device) {
    auto& state = devices[device];
    if (!state.pending.empty()) {
      std::string error;
      std::swap(error, state.pending);
      TORCH_CHECK(false, error);
    }
    TORCH_CHECK(state.failed.empty(), state.failed);
  }

  void push(StreamQueue& stream, Operation operation) {
    stream.queue.push_back(std::move(operation));
    queued++;
    if (threads) changed.notify_all();
  }
};

Scheduler& scheduler() {
  static auto* the = new Scheduler;
  return *the;
}

thread_local int current_device = 0;
thread_local int64_t current_stream[DEVICES] = {0, 0};

StreamQueue& stream_now(int device) {
  return scheduler().stream(device, current_stream[device]);
}

void enqueue(int device, std::function<void()> run, bool checked = true) {
  not_forked();
  auto& all = scheduler();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (checked) all.check(device);
  all.push(stream_now(device), {std::move(run), nullptr, nullptr, {}});
  all.sometimes();
}

MarkerPtr mark(StreamQueue& stream) {  // with the mutex held
  auto marker = std::make_shared<Marker>();
  marker->stream = &stream;
  scheduler().push(stream, {nullptr, nullptr, marker, {}});
  return marker;
}

void synchronize_stream(int device, int64_t id) {
  not_forked();
  counters.waits++, waits_here++;
  auto& all = scheduler();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.drain(all.stream(device, id));
  all.check(device);
}

void synchronize_device(int device) {
  not_forked();
  counters.waits++, waits_here++;
  auto& all = scheduler();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.drain_device(device);
  all.check(device);
}

void device_thread() {
  auto& all = scheduler();
  std::unique_lock<std::mutex> lock(all.mutex);
  std::mt19937_64 random(7);
  while (true) {
    all.changed.wait(lock, [&] { return all.threads && all.queued; });
    for (auto turns = random() % 8; turns-- && all.run_any();) {}
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 50));
    lock.lock();
  }
}

// ---------------------------------------------------------------- device memory

struct Block {
  int device;
  size_t offset, size;
  int64_t stream;
  std::vector<int64_t> other_streams;
};

struct Memory {
  std::mutex mutex;
  char* guarded[DEVICES];
  char* shared[DEVICES];
  size_t capacity = size_t(16) << 30;
  size_t limit[DEVICES], used[DEVICES] = {0, 0}, end[DEVICES] = {0, 0};
  std::map<std::tuple<int, int64_t, size_t>, std::vector<size_t>> cached;  // by device, stream, size
  std::vector<std::pair<Block, std::vector<MarkerPtr>>> pending;
  std::unordered_map<void*, Block> blocks;
  int64_t fail_in = -1;
  bool poison = true;

  Memory() {
    for (int device = 0; device < DEVICES; device++) {
      limit[device] = size_t(2) << 30;
      int fd = memfd_create("sim-device", MFD_CLOEXEC);
      TORCH_CHECK(fd >= 0 && ftruncate(fd, off_t(capacity)) == 0, "sim: no memory for a device");
      auto map = [&](int rights) {
        void* at = mmap(nullptr, capacity, rights, MAP_SHARED | MAP_NORESERVE, fd, 0);
        TORCH_CHECK(at != MAP_FAILED, "sim: cannot map a device's memory");
        madvise(at, capacity, MADV_DONTDUMP);
        return static_cast<char*>(at);
      };
      guarded[device] = map(PROT_NONE);
      shared[device] = map(PROT_READ | PROT_WRITE);
      close(fd);
    }
  }

  int device_of(const void* address) {
    for (int device = 0; device < DEVICES; device++)
      if (address >= guarded[device] && address < guarded[device] + capacity) return device;
    return -1;
  }

  // where kernels see what tensors have at ``address``
  char* kernel_address(const void* address) {
    if (address == nullptr) return nullptr;
    int device = device_of(address);
    TORCH_CHECK(device >= 0, "sim: not an address of a device");
    return shared[device] + (static_cast<const char*>(address) - guarded[device]);
  }
};

Memory& memory() {
  static auto* the = new Memory;
  return *the;
}

size_t rounded(size_t bytes) {
  size_t size = ROUND;
  while (size < bytes && size < (1 << 20)) size *= 2;
  return size >= bytes ? size : (bytes + (1 << 20) - 1) >> 20 << 20;
}

void collect_pending(Memory& all) {  // with the memory's mutex held
  std::lock_guard<std::mutex> lock(scheduler().mutex);
  auto done = [](const MarkerPtr& marker) { return marker->done; };
  for (auto each = all.pending.begin(); each != all.pending.end();)
    if (std::all_of(each->second.begin(), each->second.end(), done)) {
      auto& block = each->first;
      all.cached[{block.device, block.stream, block.size}].push_back(block.offset);
      each = all.pending.erase(each);
    } else ++each;
}

void free_block(void* address) {
  if (forked || address == nullptr) return;
  auto& all = memory();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.blocks.find(address);
  if (found == all.blocks.end()) return;
  Block block = found->second;
  all.blocks.erase(found);
  all.used[block.device] -= block.size;
  auto& streams = scheduler();
  std::lock_guard<std::mutex> streams_lock(streams.mutex);
  if (!block.other_streams.empty()) {
    std::vector<MarkerPtr> markers;
    for (auto id : block.other_streams) markers.push_back(mark(streams.stream(block.device, id)));
    all.pending.emplace_back(block, markers);
    return;
  }
  // from here on the stream may use the memory for something else: a reader on another stream sees that
  if (all.poison) {
    char* at = all.shared[block.device] + block.offset;
    size_t size = block.size;
    streams.push(streams.stream(block.device, block.stream), {[at, size] { memset(at, 0xA5, size); }, nullptr, nullptr, {}});
  }
  all.cached[{block.device, block.stream, block.size}].push_back(block.offset);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    not_forked();
    int device = current_device;
    if (bytes == 0) return {nullptr, nullptr, &free_block, c10::Device(TYPE, c10::DeviceIndex(device))};
    counters.allocations++;
    auto& all = memory();
    size_t size = rounded(bytes);
    std::lock_guard<std::mutex> lock(all.mutex);
    collect_pending(all);
    bool refused = all.fail_in >= 0 && all.fail_in-- == 0;
    size_t offset = 0;
    if (!refused && all.used[device] + size <= all.limit[device]) {
      auto cached = all.cached.find({device, current_stream[device], size});
      if (cached != all.cached.end() && !cached->second.empty()) {
        offset = cached->second.back();
        cached->second.pop_back();
      } else if (all.end[device] + size <= all.capacity) {
        offset = all.end[device];
        all.end[device] += size;
      } else refused = true;
    } else refused = true;
    TORCH_CHECK_WITH(
        OutOfMemoryError, !refused, "sim: out of memory: tried to allocate ", bytes, " bytes; ", all.used[device],
        " of ", all.limit[device], " are in use");
    all.used[device] += size;
    void* address = all.guarded[device] + offset;
    all.blocks[address] = {device, offset, size, current_stream[device], {}};
    return {address, address, &free_block, c10::Device(TYPE, c10::DeviceIndex(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    auto to = memory().kernel_address(target), from = memory().kernel_address(source);
    enqueue(memory().device_of(target), [=] { memcpy(to, from, count); });
  }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(TYPE, &device_allocator);

void record_stream(const c10::DataPtr& data, c10::Stream stream) {
  auto& all = memory();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.blocks.find(data.get_context());
  if (found != all.blocks.end() && stream.id() != found->second.stream) found->second.other_streams.push_back(stream.id());
}

// ---------------------------------------------------------------- page-locked host memory

struct Registration {
  size_t length;
  char* pages;  // a second mapping of the pages that were there at the registration
};

struct HostMemory {
  std::mutex mutex;
  std::map<char*, Registration> registered;
  std::map<char*, std::pair<size_t, std::vector<MarkerPtr>>> lent;
  std::map<size_t, std::vector<std::pair<char*, std::vector<MarkerPtr>>>> free;
  size_t limit = size_t(8) << 30, locked = 0;
};

HostMemory& host() {
  static auto* the = new HostMemory;
  return *the;
}

// where the device reads and writes what the host has at ``address``; nullptr: not page-locked
char* locked_address(char* address, size_t length, const MarkerPtr& user = nullptr) {
  auto& all = host();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto next = all.registered.upper_bound(address);
  if (next != all.registered.begin()) {
    auto& [begin, range] = *std::prev(next);
    if (address < begin + range.length) {
      TORCH_CHECK(
          address + length <= begin + range.length,
          "sim: invalid argument: a copy begins in page-locked memory and ends outside of it");
      return range.pages + (address - begin);
    }
  }
  auto block = all.lent.upper_bound(address);
  if (block != all.lent.begin()) {
    auto& [begin, lent] = *std::prev(block);
    if (address < begin + lent.first) {
      if (user) lent.second.push_back(user);
      return address;
    }
  }
  return nullptr;
}

void free_host(void* address) {
  if (forked || address == nullptr) return;
  auto& all = host();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.lent.find(static_cast<char*>(address));
  if (found == all.lent.end()) return;
  all.free[found->second.first].emplace_back(found->first, std::move(found->second.second));
  all.lent.erase(found);
}

struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    not_forked();
    if (bytes == 0) return {nullptr, nullptr, &free_host, c10::Device(c10::DeviceType::CPU)};
    size_t size = std::max<size_t>(4096, rounded(bytes));
    auto& all = host();
    std::lock_guard<std::mutex> lock(all.mutex);
    char* address = nullptr;
    auto& free = all.free[size];
    {
      std::lock_guard<std::mutex> streams(scheduler().mutex);
      for (auto each = free.begin(); each != free.end(); ++each)
        if (std::all_of(each->second.begin(), each->second.end(), [](auto& marker) { return marker->done; })) {
          address = each->first;
          free.erase(each);
          break;
        }
    }
    if (address == nullptr) {
      TORCH_CHECK(all.locked + size <= all.limit, "sim: no more page-locked memory: ", all.locked, " bytes are in use");
      address = static_cast<char*>(aligned_alloc(4096, size));
      TORCH_CHECK(address != nullptr, "sim: no host memory");
      all.locked += size;
    }
    all.lent[address] = {size, {}};
    return {address, address, &free_host, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_host; }
  void copy_data(void* target, const void* source, std::size_t count) const override { memcpy(target, source, count); }
};
HostAllocator host_allocator;

int host_register(uintptr_t address, size_t length, int device) {
  not_forked();
  auto& all = host();
  std::lock_guard<std::mutex> lock(all.mutex);
  char* begin = reinterpret_cast<char*>(address);
  auto next = all.registered.lower_bound(begin);
  bool overlaps = (next != all.registered.end() && next->first < begin + length) ||
      (next != all.registered.begin() && std::prev(next)->first + std::prev(next)->second.length > begin);
  void* pages = MAP_FAILED;
  if (!overlaps && all.locked + length <= all.limit) pages = mremap(begin, 0, length, MREMAP_MAYMOVE);
  if (pages == MAP_FAILED) {  // as CUDA: the next kernel reports it
    std::lock_guard<std::mutex> streams(scheduler().mutex);
    scheduler().devices[device].pending = "sim: a registration of host memory failed";
    return overlaps ? 712 : 2;
  }
  all.registered[begin] = {length, static_cast<char*>(pages)};
  all.locked += length;
  return 0;
}

int host_unregister(uintptr_t address) {
  if (forked) return 1;
  {
    auto& streams = scheduler();
    std::lock_guard<std::mutex> lock(streams.mutex);
    for (int device = 0; device < DEVICES; device++) streams.drain_device(device);
  }
  auto& all = host();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.registered.find(reinterpret_cast<char*>(address));
  if (found == all.registered.end()) return 713;
  munmap(found->second.pages, found->second.length);
  all.locked -= found->second.length;
  all.registered.erase(found);
  return 0;
}

void unregister_all() {
  std::vector<uintptr_t> all;
  for (auto& [address, range] : host().registered) all.push_back(reinterpret_cast<uintptr_t>(address));
  for (auto address : all) host_unregister(address);
}

// ---------------------------------------------------------------- generators

struct SimGenerator final : c10::GeneratorImpl {
  uint64_t seed_now = c10::default_rng_seed_val, drawn = 0;
  explicit SimGenerator(int device)
      : GeneratorImpl(c10::Device(TYPE, c10::DeviceIndex(device)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_now = seed, drawn = 0; }
  void set_offset(uint64_t offset) override { drawn = offset; }
  uint64_t get_offset() const override { return drawn; }
  uint64_t current_seed() const override { return seed_now; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_now;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.is_cpu(), "sim: a generator's state has 16 bytes of host memory");
    auto words = static_cast<const uint64_t*>(state.data());
    seed_now = words[0], drawn = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    auto words = reinterpret_cast<uint64_t*>(state.data_ptr<uint8_t>());
    words[0] = seed_now, words[1] = drawn;
    return state.getIntrusivePtr();
  }
  static c10::DeviceType device_type() { return TYPE; }
  SimGenerator* clone_impl() const override {
    auto* copy = new SimGenerator(device().index());
    copy->seed_now = seed_now, copy->drawn = drawn;
    return copy;
  }
  at::Generator next() {  // host numbers for one kernel, fixed at the call
    std::lock_guard<std::mutex> lock(mutex_);
    std::seed_seq mix{uint32_t(seed_now), uint32_t(seed_now >> 32), uint32_t(drawn), uint32_t(drawn >> 32)};
    drawn++;
    uint64_t seed[1];
    mix.generate(reinterpret_cast<uint32_t*>(seed), reinterpret_cast<uint32_t*>(seed) + 2);
    auto generator = at::globalContext().defaultGenerator(at::kCPU).clone();
    generator.set_current_seed(seed[0]);
    return generator;
  }
};

at::Generator& default_generator(int device) {
  static auto* all = new std::vector<at::Generator>{at::make_generator<SimGenerator>(0), at::make_generator<SimGenerator>(1)};
  return all->at(device);
}

// ---------------------------------------------------------------- guard and hooks

struct SimEvent {
  MarkerPtr marker;
};

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = TYPE;
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {TYPE, c10::DeviceIndex(current_device)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "sim: there are ", DEVICES, " devices");
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream of(int device, int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, {TYPE, c10::DeviceIndex(device)}, id);
  }
  int index(c10::Device device) const { return device.index() < 0 ? current_device : device.index(); }
  c10::Stream getStream(c10::Device device) const override { return of(index(device), current_stream[index(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return of(index(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    not_forked();
    std::lock_guard<std::mutex> lock(scheduler().mutex);
    return of(index(device), scheduler().add_stream(index(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<SimEvent*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    not_forked();
    if (*event == nullptr) *event = new SimEvent;
    auto& all = scheduler();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.check(stream.device_index());
    static_cast<SimEvent*>(*event)->marker = mark(all.stream(stream.device_index(), stream.id()));
    all.sometimes();
  }
  void block(void* event, const c10::Stream& stream) const override {
    not_forked();
    auto marker = event == nullptr ? nullptr : static_cast<SimEvent*>(event)->marker;
    if (!marker) return;
    auto& all = scheduler();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.check(stream.device_index());
    all.push(all.stream(stream.device_index(), stream.id()), {nullptr, marker, nullptr, {}});
    all.sometimes();
  }
  bool queryEvent(void* event) const override {
    auto marker = event == nullptr ? nullptr : static_cast<SimEvent*>(event)->marker;
    if (!marker) return true;
    auto& all = scheduler();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.sometimes();
    if (all.random() % 4 == 0) all.run_any();
    if (marker->done) all.check(marker->stream->device);
    return marker->done;
  }
  void synchronizeEvent(void* event) const override {
    not_forked();
    counters.waits++, waits_here++;
    auto marker = event == nullptr ? nullptr : static_cast<SimEvent*>(event)->marker;
    if (!marker) return;
    auto& all = scheduler();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.run_until(marker);
    all.check(marker->stream->device);
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto& all = scheduler();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.sometimes();
    if (all.random() % 4 == 0) all.run_any();
    return all.stream(stream.device_index(), stream.id()).queue.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(stream.device_index(), stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(device < 0 ? current_device : device); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override { record_stream(data, stream); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
  bool isStreamCapturing(const c10::Stream&) const override { return false; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard);

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  if (bytes == storage->nbytes()) return;
  c10::DeviceGuard guard(storage->device());
  auto data = device_allocator.allocate(bytes);
  auto kept = std::min(bytes, storage->nbytes());
  if (kept) device_allocator.copy_data(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex device) const override { SimGuard().setDevice({TYPE, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = current_device;
    setCurrentDevice(device);
    return c10::DeviceIndex(before);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<SimGenerator>(device < 0 ? current_device : device);
  }
  at::Device getDeviceFromPtr(void* data) const override { return {TYPE, c10::DeviceIndex(memory().device_of(data))}; }
  bool isPinnedPtr(const void* data) const override {
    return !forked && locked_address(static_cast<char*>(const_cast<void*>(data)), 0) != nullptr;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

// ---------------------------------------------------------------- kernels: the host's, queued

bool on_device(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == TYPE;
}

struct Operand {  // a tensor as a kernel sees it; holds no memory
  char* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  Tensor value;  // of a host tensor: a copy, made at the call

  explicit Operand(const Tensor& tensor) {
    if (!tensor.defined()) return;
    dtype = tensor.scalar_type();
    if (!on_device(tensor)) {
      value = tensor.clone();
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) value.unsafeGetTensorImpl()->set_wrapped_number(true);
      return;
    }
    data = tensor.numel() ? memory().kernel_address(tensor.const_data_ptr()) : nullptr;
    sizes = tensor.sizes().vec(), strides = tensor.strides().vec();
  }
  Tensor tensor() const {
    if (value.defined()) return value;
    return at::from_blob(data, sizes, strides, [](void*) {}, at::TensorOptions().dtype(dtype).device(at::kCPU));
  }
};

struct KernelScope {  // host kernels that neither record gradients nor call Python
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard without{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::AutocastCPU,
       c10::DispatchKey::AutocastPrivateUse1})};
};

template <class F>
IValue each_tensor(const IValue& value, F&& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor.has_value() ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

Tensor on_meta(const Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

void call_on(const c10::OperatorHandle& op, c10::DispatchKey key, Stack& stack) {
  op.redispatchBoxed(c10::DispatchKeySet(key), &stack);
}

Tensor empty_like_on(const Tensor& like, int device) {
  c10::DeviceGuard guard({TYPE, c10::DeviceIndex(device)});
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(TYPE, c10::DeviceIndex(device)));
}

void wait_for_current(int device) {
  synchronize_stream(device, current_stream[device]);
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  std::vector<IValue> arguments(stack->end() - int64_t(count), stack->end());

  int device = -1;
  bool writes = false, random = false;
  std::vector<size_t> outputs;
  for (size_t i = 0; i < count; i++) {
    const auto& info = schema.arguments()[i].alias_info();
    if (info && info->isWrite()) writes = true;
    if (schema.arguments()[i].is_out()) outputs.push_back(i);
    each_tensor(arguments[i], [&](const Tensor& tensor) {
      if (on_device(tensor) && device < 0) device = tensor.device().index();
      return tensor;
    });
    if (arguments[i].isDevice() && device < 0) device = SimGuard().index(arguments[i].toDevice());
  }
  if (device < 0) device = current_device;
  c10::DeviceGuard guard({TYPE, c10::DeviceIndex(device)});

  for (size_t i = 0; i < count; i++) {
    if (arguments[i].isDevice()) arguments[i] = IValue(c10::Device(at::kCPU));
    auto kind = schema.arguments()[i].type();
    bool generator = *kind == *c10::OptionalType::create(c10::GeneratorType::get()) || *kind == *c10::GeneratorType::get();
    if (!generator) continue;
    random = true;
    auto given = arguments[i].isNone() ? default_generator(device) : arguments[i].toGenerator();
    arguments[i] = given.device().type() == TYPE ? IValue(at::check_generator<SimGenerator>(given)->next()) : IValue(given);
  }
  TORCH_CHECK(
      random || !op.hasTag(at::Tag::nondeterministic_seeded), "sim: ", schema.operator_name(),
      " draws from a generator that it does not name");

  bool returns_new = false, returns_other = false, returns_views = false;
  for (const auto& result : schema.returns()) {
    if (result.alias_info() && !result.alias_info()->isWrite()) returns_views = true;
    if (!result.alias_info()) (result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                               result.type()->isSubtypeOf(*c10::ListType::ofTensors())
                           ? returns_new : returns_other) = true;
  }
  TORCH_CHECK(!returns_views, "sim: ", schema.operator_name(), " returns a view, and has no kernel of its own");

  // what shape will the results have: metadata alone, as the device's own kernels know before they run
  std::vector<IValue> results;
  bool known = !returns_other;
  if (known && (returns_new || !outputs.empty())) {
    known = op.hasKernelForDispatchKey(c10::DispatchKey::Meta) || op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
    if (known) try {
        Stack meta;
        for (const auto& argument : arguments) meta.push_back(each_tensor(argument, on_meta));
        auto kept = meta;
        {
          KernelScope scope;
          call_on(op, c10::DispatchKey::Meta, meta);
        }
        for (auto i : outputs) {
          if (!arguments[i].isTensor()) continue;
          auto wanted = kept[i].toTensor();
          auto tensor = arguments[i].toTensor();
          if (wanted.sizes() != tensor.sizes()) at::native::resize_output(tensor, wanted.sizes());
        }
        results = std::move(meta);
      } catch (const c10::NotImplementedError&) {
        known = false;
      }
  }

  std::vector<IValue> operands;  // descriptions: a kernel that waits in a queue holds no tensor of the device
  auto descriptions = std::make_shared<std::vector<Operand>>();
  auto described = [descriptions](const Tensor& tensor) {
    if (tensor.defined()) descriptions->emplace_back(tensor);
    return tensor.defined() ? at::empty({0}) : tensor;
  };
  for (const auto& argument : arguments) operands.push_back(each_tensor(argument, described));
  auto bound = [descriptions, operands = std::move(operands)] {
    Stack bound;
    size_t next = 0;
    for (const auto& operand : operands)
      bound.push_back(each_tensor(
          operand, [&](const Tensor& tensor) { return tensor.defined() ? descriptions->at(next++).tensor() : tensor; }));
    return bound;
  };
  counters.kernels++;

  if (!known) {  // its results depend on data
    wait_for_current(device);
    KernelScope scope;
    auto now = bound();
    call_on(op, c10::DispatchKey::CPU, now);
    results.clear();
    size_t n = 0;
    for (auto& value : now) {
      const auto& info = schema.returns()[n++].alias_info();
      if (info && info->isWrite()) {
        results.emplace_back();
        continue;
      }
      results.push_back(each_tensor(value, [&](const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        auto made = empty_like_on(tensor, device);
        wait_for_current(device);
        if (made.numel()) Operand(made).tensor().copy_(tensor);
        return made;
      }));
    }
  } else {
    auto made = std::make_shared<std::vector<std::pair<size_t, Operand>>>();
    for (size_t n = 0; n < schema.returns().size(); n++) {
      if (schema.returns()[n].alias_info()) continue;
      size_t place = 0;
      results[n] = each_tensor(results[n], [&](const Tensor& tensor) {
        place++;
        if (!tensor.defined()) return tensor;
        auto output = empty_like_on(tensor, device);
        made->emplace_back(n << 16 | (place - 1), Operand(output));
        return output;
      });
    }
    enqueue(device, [op, bound = std::move(bound), made] {
      KernelScope scope;
      auto now = bound();
      call_on(op, c10::DispatchKey::CPU, now);
      for (const auto& [place, output] : *made) {
        const auto& value = now[place >> 16];
        auto tensor = value.isTensor() ? value.toTensor() : value.toTensorVector()[place & 0xffff];
        if (tensor.numel()) output.tensor().copy_(tensor);
      }
    });
  }

  // results that are arguments are those arguments themselves
  size_t n = 0;
  for (const auto& result : schema.returns()) {
    if (result.alias_info() && result.alias_info()->isWrite())
      for (size_t i = 0; i < count; i++) {
        const auto& info = schema.arguments()[i].alias_info();
        if (info && info->isWrite() && info->beforeSets() == result.alias_info()->beforeSets()) {
          if (results.size() <= n) results.resize(n + 1);
          results[n] = *(stack->end() - int64_t(count) + int64_t(i));
        }
      }
    n++;
  }
  results.resize(schema.returns().size());
  torch::jit::drop(*stack, count);
  for (auto& value : results) stack->push_back(std::move(value));
}

// ---------------------------------------------------------------- copies

// queue a copy of bytes on the current stream, in pieces; the last one sets ``marker``
void enqueue_bytes(int device, char* to, const char* from, size_t length, const MarkerPtr& marker = nullptr) {
  not_forked();
  auto& all = scheduler();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.check(device);
  auto& stream = stream_now(device);
  if (marker) marker->stream = &stream;
  for (size_t begin = 0; begin < length; begin += PIECE) {
    size_t part = std::min(PIECE, length - begin);
    all.push(stream, {[=] { memcpy(to + begin, from + begin, part); }, nullptr, nullptr, {}});
  }
  if (marker) all.push(stream, {nullptr, nullptr, marker, {}});
  all.sometimes();
}

bool same_layout(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

void between_host(const Tensor& device_tensor, const Tensor& host_tensor, bool to_host, bool non_blocking) {
  size_t length = device_tensor.numel() * device_tensor.element_size();
  auto* there = static_cast<char*>(const_cast<void*>(host_tensor.const_data_ptr()));
  auto* here = memory().kernel_address(device_tensor.const_data_ptr());
  int device = device_tensor.device().index();
  auto marker = std::make_shared<Marker>();
  char* locked = locked_address(there, length, marker);
  if (to_host) counters.to_host++, counters.to_host_bytes += int64_t(length);
  else counters.to_device++, counters.to_device_bytes += int64_t(length);
  if (locked == nullptr) counters.unpinned++, locked = there;
  else if (non_blocking) {
    to_host ? enqueue_bytes(device, locked, here, length, marker) : enqueue_bytes(device, here, locked, length, marker);
    return;
  }
  to_host ? enqueue_bytes(device, locked, here, length, marker) : enqueue_bytes(device, here, locked, length, marker);
  wait_for_current(device);
}

void copy_on_device(const Tensor& from, const Tensor& to) {
  Operand source(from), target(to);
  enqueue(to.device().index(), [source, target] {
    KernelScope scope;
    target.tensor().copy_(source.tensor());
  });
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  Tensor from = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
  c10::DeviceGuard guard(on_device(from) ? from.device() : to.device());
  if (on_device(from) && on_device(to)) {
    if (from.device() == to.device()) {
      counters.kernels++;
      copy_on_device(from, to);
      return to;
    }
    Tensor source = same_layout(from, to) ? from : from.to(to.scalar_type()).contiguous();
    Tensor target = same_layout(source, to) ? to : at::empty_like(source, source.options().device(to.device()));
    auto& all = scheduler();
    int device = from.device().index(), other = to.device().index();
    {
      std::lock_guard<std::mutex> lock(all.mutex);
      all.push(stream_now(device), {nullptr, mark(stream_now(other)), nullptr, {}});
    }
    enqueue_bytes(
        device, memory().kernel_address(target.const_data_ptr()), memory().kernel_address(source.const_data_ptr()),
        source.numel() * source.element_size());
    {
      std::lock_guard<std::mutex> lock(all.mutex);
      all.push(stream_now(other), {nullptr, mark(stream_now(device)), nullptr, {}});
    }
    if (!target.is_same(to)) {
      c10::DeviceGuard there(to.device());
      copy_on_device(target, to);
    }
    return to;
  }
  if (on_device(from)) {
    if (same_layout(from, to)) {
      between_host(from, to, true, non_blocking);
    } else if (to.is_contiguous()) {
      between_host(from.to(to.scalar_type()).contiguous(), to, true, non_blocking);
    } else {
      Tensor source = from.contiguous(), arrived = at::empty(from.sizes(), from.options().device(at::kCPU));
      between_host(source, arrived, true, false);
      to.copy_(arrived);
    }
    return to;
  }
  if (same_layout(from, to)) {
    between_host(to, from, false, non_blocking);
    return to;
  }
  Tensor source = from.contiguous();
  Tensor target = at::empty(source.sizes(), source.options().device(to.device()).pinned_memory(false));
  between_host(target, source, false, non_blocking && source.is_same(from));
  copy_on_device(target, to);
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  at::native::resize_output(to, self.sizes());
  return copy_from(self, to, false);
}

// ---------------------------------------------------------------- kernels that only change metadata

Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(at::Device(TYPE)));
  return at::detail::empty_generic(
      size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(at::Device(TYPE)));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

void make_room(const Tensor& self) {
  auto* tensor = self.unsafeGetTensorImpl();
  if (!tensor->numel()) return;
  int64_t last = tensor->storage_offset() + 1;
  for (int64_t i = 0; i < tensor->dim(); i++) last += (tensor->size(i) - 1) * tensor->stride(i);
  size_t needed = size_t(last) * tensor->itemsize();
  if (tensor->unsafe_storage().nbytes() < needed) resize_storage(tensor->unsafe_storage().unsafeGetStorageImpl(), needed);
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format.has_value()) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  make_room(self);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.size() != size.size()) tensor->set_sizes_contiguous(size);
  else tensor->set_sizes_and_strides(size, stride);
  make_room(self);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  int64_t count = int64_t(storage.nbytes() / self.element_size());
  return set_storage(self, std::move(storage), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Scalar local_scalar(const Tensor& self) {
  auto value = at::empty({}, self.options().device(at::kCPU));
  copy_from(self, value, false);
  return value.item();
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

void record_tensor_on_stream(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("native_dropout", &native_dropout);
  m.impl("record_stream", &record_tensor_on_stream);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  static SimHooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  memory();
  auto locked = [] { return std::lock_guard<std::mutex>(scheduler().mutex); };
  m.def("device_count", [] { return DEVICES; });
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int device) { hooks.setCurrentDevice(c10::DeviceIndex(device)); });
  m.def("forked", [] { return forked; });
  m.def("synchronize", &synchronize_device, py::call_guard<py::gil_scoped_release>());
  m.def("adversary", [=](uint64_t seed, const std::string& mode) {
    auto lock = locked();
    scheduler().random.seed(seed);
    auto& all = scheduler();
    all.mode = mode == "lazy" ? Mode::lazy : mode == "eager" ? Mode::eager : Mode::mixed;
    constexpr unsigned chances[] = {0, 25, 95};
    all.others_first = chances[all.random() % 3];
    all.slow = mode == "mixed" && all.random() % 2 ? int64_t(all.random() % 3) : -1;
  });
  m.def("threads", [=](bool on) {
    static bool started = false;
    auto lock = locked();
    scheduler().threads = on;
    if (on && !started) {
      started = true;
      for (int device = 0; device < DEVICES; device++) std::thread(device_thread).detach();
    }
    scheduler().changed.notify_all();
  });
  m.def("sleep", [=](int device, double seconds) {
    auto lock = locked();
    Operation sleep{nullptr, nullptr, nullptr};
    sleep.not_before = std::chrono::steady_clock::now() + std::chrono::microseconds(int64_t(seconds * 1e6));
    scheduler().push(stream_now(device), std::move(sleep));
  });
  m.def("counters", [] {
    return std::map<std::string, int64_t>{
        {"kernels", counters.kernels}, {"waits", counters.waits}, {"to_host", counters.to_host},
        {"to_host_bytes", counters.to_host_bytes}, {"to_device", counters.to_device},
        {"to_device_bytes", counters.to_device_bytes}, {"waits_here", waits_here}, {"allocations", counters.allocations}, {"unpinned", counters.unpinned}};
  });
  m.def("queued", [=] {
    auto lock = locked();
    return scheduler().queued;
  });
  m.def("set_memory_limit", [](int device, size_t bytes) { memory().limit[device] = bytes; });
  m.def("memory_allocated", [](int device) { return memory().used[device]; });
  m.def("fail_allocation", [](int64_t after) { memory().fail_in = after; });
  m.def("fail_kernel", [=](int64_t after) {
    auto lock = locked();
    scheduler().fail_at = after < 0 ? -1 : scheduler().executed + after;
  });
  m.def("lose", [=](int device, const std::string& why) {  // an empty text gives the device back
    auto lock = locked();
    scheduler().devices[device].failed = why;
    scheduler().devices[device].pending.clear();
    scheduler().fail_at = -1;
  });
  m.def("host_register", &host_register);
  m.def("host_unregister", &host_unregister, py::call_guard<py::gil_scoped_release>());
  m.def("unregister_all", &unregister_all, py::call_guard<py::gil_scoped_release>());
  m.def("set_locked_limit", [](size_t bytes) { host().limit = bytes; });
  m.def("locked_bytes", [] { return host().locked; });
  m.def("rng", [](int device) {
    auto* generator = at::check_generator<SimGenerator>(default_generator(device));
    return std::make_pair(generator->seed_now, generator->drawn);
  });
  m.def("set_rng", [](int device, uint64_t seed, uint64_t drawn) {
    auto* generator = at::check_generator<SimGenerator>(default_generator(device));
    generator->seed_now = seed, generator->drawn = drawn;
  });
}
