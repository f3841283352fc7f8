// The device: its state, its memory, and what PyTorch asks of any accelerator.
//
// PrivateUse1 is the device type that PyTorch keeps free for backends outside of its own tree. Ours
// computes on the host, at once, in host memory; what makes it a device is that PyTorch takes its
// tensors for another kind than CPU tensors, and that this code refuses to mix the two (ops.cpp).
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "standin.h"

namespace standin {
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

// ---- State. Every process sees as many devices as ranks run on this machine, like cores of a node.

constexpr int kMostDevices = 128;
static thread_local DeviceIndex current = 0;
static thread_local c10::StreamId current_stream[kMostDevices] = {};
static std::atomic<c10::StreamId> last_stream{0};
static std::atomic<bool> used{false};  // a device was chosen, or memory of one

int device_count() {
  const char* ranks = std::getenv("LOCAL_WORLD_SIZE");
  return std::clamp(ranks ? std::atoi(ranks) : 1, 1, kMostDevices);
}
DeviceIndex current_device() { return current; }
bool is_initialized() { return used; }
void set_device(int index) {
  TORCH_CHECK(0 <= index && index < device_count(), "neuron has no device ", index, ": ", device_count(),
              " of them are visible");
  current = static_cast<DeviceIndex>(index);
  used = true;
}

// ---- Memory. A block is preceded by its size and device, so that freeing it can be counted, too.

struct Header {
  size_t size;
  DeviceIndex device;
};
constexpr size_t kHeaderSize = 64;  // keeps the block that follows aligned
static Header* header_of(void* block) {
  return reinterpret_cast<Header*>(static_cast<char*>(block) - kHeaderSize);
}

struct NeuronAllocator final : c10::DeviceAllocator {
  std::mutex mutex;
  c10::CachingDeviceAllocator::DeviceStats stats[kMostDevices];

  template <class Change>  // change(statistic, amount), of all that count bytes or blocks
  void count(DeviceIndex device, size_t bytes, Change change) {
    std::lock_guard<std::mutex> lock(mutex);
    auto& s = stats[device];
    for (auto* of : {&s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.requested_bytes})
      change((*of)[0], static_cast<int64_t>(bytes));
    for (auto* of : {&s.allocation, &s.segment, &s.active}) change((*of)[0], 1);
  }
  c10::DataPtr allocate(size_t size) override {
    used = true;
    if (size == 0) return {nullptr, Device(kNeuron, current)};
    void* block = static_cast<char*>(c10::alloc_cpu(size + kHeaderSize)) + kHeaderSize;
    *header_of(block) = {size, current};
    count(current, size, [](auto& statistic, int64_t by) { statistic.increase(by); });
    return {block, block, &release, Device(kNeuron, current)};
  }
  static void release(void* block);
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    return stats[device];
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    count(device, 0, [](auto& statistic, int64_t) { statistic.reset_accumulated(); });
  }
  void resetPeakStats(DeviceIndex device) override {
    count(device, 0, [](auto& statistic, int64_t) { statistic.reset_peak(); });
  }
};
// Never destroyed: PyTorch's own static objects may hold tensors for longer than we would live.
static NeuronAllocator& allocator() {
  static auto* only = new NeuronAllocator();
  return *only;
}
c10::Allocator* device_allocator() { return &allocator(); }
void NeuronAllocator::release(void* block) {
  if (!block) return;
  const Header header = *header_of(block);
  allocator().count(header.device, header.size, [](auto& statistic, int64_t by) { statistic.decrease(by); });
  c10::free_cpu(header_of(block));
}

// Pinned memory is host memory of which we remember that somebody asked for it.
struct PinnedAllocator final : c10::Allocator {
  std::mutex mutex;
  std::map<const char*, size_t> blocks;

  c10::DataPtr allocate(size_t size) override {
    void* block = c10::alloc_cpu(std::max<size_t>(size, 1));
    std::lock_guard<std::mutex> lock(mutex);
    blocks[static_cast<char*>(block)] = std::max<size_t>(size, 1);
    return {block, block, &release, at::kCPU};
  }
  static void release(void* block);
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool owns(const void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    auto next = blocks.upper_bound(static_cast<const char*>(address));
    if (next == blocks.begin()) return false;
    auto [start, size] = *std::prev(next);
    return address < start + size;
  }
};
static PinnedAllocator& pinned() {
  static auto* only = new PinnedAllocator();
  return *only;
}
void PinnedAllocator::release(void* block) {
  {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().blocks.erase(static_cast<char*>(block));
  }
  c10::free_cpu(block);
}

// ---- Guard: how PyTorch changes the current device and stream. Work is done when it is asked for, so
// streams are only numbers, waiting is over at once, and an event is the time at which it was recorded.

struct Event {
  std::chrono::steady_clock::time_point time;
};
struct NeuronGuard final : c10::impl::DeviceGuardImplInterface {
  static Device exact(Device device) { return {kNeuron, device.has_index() ? device.index() : current}; }
  c10::DeviceType type() const override { return kNeuron; }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_count()); }
  Device getDevice() const override { return {kNeuron, current}; }
  void setDevice(Device device) const override { set_device(exact(device).index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current = exact(device).index(); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, exact(device)); }
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, exact(device), current_stream[exact(device).index()]);
  }
  Stream getNewStream(Device device, int) const override {
    return Stream(Stream::UNSAFE, exact(device), ++last_stream);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_stream[exact(stream.device()).index()] = stream.id();
    return before;
  }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    static_cast<Event*>(*event)->time = std::chrono::steady_clock::now();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    TORCH_CHECK(first && second, "an event was never recorded");
    auto passed = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, NeuronGuard);

// ---- Hooks: the rest, random numbers and pinned memory among it.

struct NeuronGenerator final : at::CPUGeneratorImpl {
  explicit NeuronGenerator(DeviceIndex device) {
    device_ = Device(kNeuron, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
struct NeuronHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count()); }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex before = current;
    set_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current : exchangeDevice(device);
  }
  Device getDeviceFromPtr(void* block) const override { return {kNeuron, header_of(block)->device}; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  bool isPinnedPtr(const void* address) const override { return pinned().owns(address); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    static auto* all = new std::map<DeviceIndex, at::Generator>();
    const DeviceIndex index = device < 0 ? current : device;
    return all->try_emplace(index, getNewGenerator(index)).first->second;
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<NeuronGenerator>(device < 0 ? current : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto block = allocator().allocate(size);
    if (const size_t kept = std::min(size, storage.nbytes())) std::memcpy(block.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(block));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

static const bool registered = [] {
  c10::SetAllocator(kNeuron, &allocator(), /*priority=*/1);
  at::RegisterPrivateUse1HooksInterface(new NeuronHooks());
  return true;
}();

}  // namespace standin
