// A CUDA device that computes nothing: hooks, guard, allocator and generator of a torch that was built without CUDA.
//
// It must be loaded before torch looks for a device. Memory is addresses that nothing lies at, so whoever reads it on the
// host crashes; every allocation and release is counted, by storage, as a driver would see them.
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace fake {

std::function<void(const std::string&)> on_wait;
thread_local std::string op_name;  // of the kernel under way; set by kernels.cpp

namespace {

std::recursive_mutex mutex;
Memory state;
bool tracing = false;
std::vector<Change> changes;
std::string label;
std::unordered_map<void*, int64_t> blocks;
std::unordered_set<void*> inner;  // blocks inside of one kernel, which are not counted
thread_local int fused = 0;
thread_local std::vector<void*> fused_blocks;
bool capturing = false;
std::unordered_set<void*> captured;  // blocks taken since a capture began, whichever thread lets go of others meanwhile
int64_t captured_now = 0, captured_peak = 0;
uintptr_t next_address = uintptr_t{1} << 52;  // no process has memory there
std::map<uintptr_t, size_t> pinned;
thread_local int device = 0;
thread_local int64_t streams[kDevices] = {};
int64_t newest_stream = 0;

void release(void* block) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto found = blocks.find(block);
  if (found == blocks.end()) return;
  if (inner.erase(block)) {
    blocks.erase(found);
    return;
  }
  state.allocated -= found->second;
  if (captured.erase(block)) captured_now -= found->second;
  if (tracing) changes.push_back({reinterpret_cast<int64_t>(block), -found->second, op_name, label});
  blocks.erase(found);
}

void count(void* block, int64_t bytes) {
  TORCH_CHECK_WITH(
      OutOfMemoryError, state.total == 0 || state.allocated + bytes <= state.total,
      "CUDA out of memory. Tried to allocate ", bytes / 1048576.0, " MiB. GPU ", device, " has a total capacity of ",
      state.total / 1073741824.0, " GiB of which ", (state.total - state.allocated) / 1073741824.0, " GiB is free.");
  state.allocated += bytes;
  state.allocations += 1;
  if (state.allocated > state.peak) state.peak = state.allocated;
  if (capturing) {
    captured.insert(block);
    captured_now += bytes;
    captured_peak = std::max(captured_peak, captured_now);
  }
  if (tracing) changes.push_back({reinterpret_cast<int64_t>(block), bytes, op_name, label});
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device where(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0) return {nullptr, nullptr, &release, where};
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto rounded = static_cast<int64_t>((bytes + kRounding - 1) / kRounding * kRounding);
    void* block = reinterpret_cast<void*>(next_address);
    if (fused) {
      inner.insert(block);
      fused_blocks.push_back(block);
    } else {
      count(block, rounded);
    }
    next_address += rounded;
    blocks[block] = rounded;
    return {block, block, &release, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, size_t) const override {}
};
Allocator allocator;

void unpin(void* block) {
  unregister_pinned(reinterpret_cast<uintptr_t>(block));
  c10::GetAllocator(c10::DeviceType::CPU)->raw_deallocate(block);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &unpin, c10::DeviceType::CPU};
    void* block = c10::GetAllocator(c10::DeviceType::CPU)->raw_allocate(bytes);
    register_pinned(reinterpret_cast<uintptr_t>(block), bytes);
    return {block, block, &unpin, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index)
      : GeneratorImpl(c10::Device(c10::DeviceType::CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { return seed_; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.is_cpu(), "the state of a generator is 16 bytes of the host's memory");
    auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    seed_ = other->current_seed(), offset_ = other->get_offset();
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::intrusive_ptr<c10::GeneratorImpl>::reclaim(clone_impl());
  }
  static c10::DeviceType device_type() { return c10::DeviceType::CUDA; }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

}  // namespace

Memory& memory() { return state; }
void trace(bool on) { tracing = on; }
std::vector<Change> take_changes() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return std::move(changes);
}
void set_label(std::string text) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  label = std::move(text);
}
void begin_capture() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  capturing = true;
}
int64_t end_capture() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  int64_t released = captured_peak - captured_now;
  capturing = false, captured_now = captured_peak = 0;
  captured.clear();
  return released;
}
void begin_fused() { ++fused; }
void end_fused() {
  if (--fused) return;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  for (void* block : std::exchange(fused_blocks, {}))
    if (inner.erase(block)) count(block, blocks.at(block));
}
void wait(const std::string& what) {
  if (on_wait) on_wait(what);
}
int current_device() { return device; }
void set_current_device(int index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "CUDA error: invalid device ordinal ", index);
  device = index;
}
int64_t current_stream() { return streams[device]; }
int64_t exchange_stream(int64_t id) { return std::exchange(streams[device], id); }

bool is_pinned(const void* data) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto address = reinterpret_cast<uintptr_t>(data);
  auto after = pinned.upper_bound(address);
  return after != pinned.begin() && address < std::prev(after)->first + std::prev(after)->second;
}
void register_pinned(uintptr_t data, size_t bytes) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  pinned[data] = bytes;
}
void unregister_pinned(uintptr_t data) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  TORCH_CHECK(pinned.erase(data) == 1, "CUDA error: part or all of the memory was not page-locked");
}

}  // namespace fake

namespace at {

struct CUDAHooks : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return fake::kDevices; }
  int getNumGPUs() const override { return fake::kDevices; }
  DeviceIndex current_device() const override { return static_cast<DeviceIndex>(fake::current_device()); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex index) const override { fake::set_current_device(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    auto before = getCurrentDevice();
    fake::set_current_device(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override { return fake::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &fake::pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &fake::allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, current_device()); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    static std::vector<at::Generator> generators = [] {
      std::vector<at::Generator> all;
      for (int each = 0; each < fake::kDevices; ++each)
        all.push_back(make_generator<fake::Generator>(static_cast<DeviceIndex>(each)));
      return all;
    }();
    return generators.at(index < 0 ? fake::current_device() : index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return make_generator<fake::Generator>(index < 0 ? current_device() : index);
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at

namespace fake {
namespace {

// Events and streams end at once; which stream a thread is on is kept, since who starts what on which is checked.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static c10::Device of(int index) { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)}; }
  static c10::Stream stream(c10::Device where, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, where, id); }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = getDevice();
    set_current_device(to.index());
    return before;
  }
  c10::Device getDevice() const override { return of(current_device()); }
  void setDevice(c10::Device to) const override { set_current_device(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { device = to.index(); }
  c10::Stream getStream(c10::Device where) const noexcept override { return stream(where, streams[where.index()]); }
  c10::Stream getDefaultStream(c10::Device where) const override { return stream(where, 0); }
  c10::Stream getNewStream(c10::Device where, int) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    return stream(where, ++newest_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device where, bool) const override { return getNewStream(where, 0); }
  c10::Stream exchangeStream(c10::Stream to) const noexcept override {
    return stream(to.device(), std::exchange(streams[to.device_index()], to.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override { wait("an event"); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait("a stream"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait("the device"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
};
Guard guard;

__attribute__((constructor)) void put() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
  c10::SetAllocator(c10::DeviceType::CUDA, &allocator, 100);
}

}  // namespace
}  // namespace fake
