// A device for tests on a machine without one: torch's PrivateUse1, in host memory.
//
//   kernels   every operator runs as the CPU's, on the host, after all that its stream was given before: in stream
//             order, as on a real device (views, and what makes and copies tensors, are here)
//   streams   each is a worker thread; a non_blocking copy between the device and pinned memory is done by it, late
//   late      `set_delay_ms`: so many milliseconds late; `set_lazy(true)`: not before something waits for it, be it
//             the host or a kernel of a stream that was told to; so a wait that is missing shows every time
//   memory    pinned memory holds NaN until something is copied there; memory that is freed, of either kind, is used
//             again at once, as by torch's caching allocators: a copy does not keep its source or its target alive
//
// The streams' threads and all memory live as long as the process.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr auto PU1 = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(PU1, 0);

std::atomic<int> g_delay_ms{0};
std::atomic<bool> g_lazy{false};
std::atomic<int64_t> g_async_copies{0}, g_sync_copies{0}, g_kernels{0}, g_pinned_allocations{0};
thread_local int64_t t_waits = 0;        // of this thread for the device
thread_local bool t_in_kernel = false;  // whose own copies between the CPU and the device are no copies to count

// -- streams ----------------------------------------------------------------------------------------------------

struct Queue {  // of one stream
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  uint64_t put = 0, done = 0, wanted = 0;  // tasks are numbered from 1

  Queue() {
    std::thread([this] { run(); }).detach();
  }

  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return !tasks.empty() && (!g_lazy || done < wanted); });
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      task();
      {
        std::lock_guard<std::mutex> lock(mutex);
        ++done;
      }
      changed.notify_all();
    }
  }

  void push(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex);
    tasks.push_back(std::move(task));
    ++put;
    changed.notify_all();
  }

  uint64_t mark() {
    std::lock_guard<std::mutex> lock(mutex);
    return put;
  }

  bool reached(uint64_t mark) {
    std::lock_guard<std::mutex> lock(mutex);
    return done >= mark;
  }

  void wait(uint64_t mark) {
    std::unique_lock<std::mutex> lock(mutex);
    wanted = std::max(wanted, mark);
    changed.notify_all();
    changed.wait(lock, [&] { return done >= mark; });
  }

  void wait() { wait(mark()); }
};

std::mutex g_queues_mutex;
thread_local c10::StreamId t_stream = 0;
std::atomic<c10::StreamId> g_next_stream{1};

std::map<c10::StreamId, Queue*>& queues() {
  static auto* all = new std::map<c10::StreamId, Queue*>;
  return *all;
}

Queue& queue(c10::StreamId id) {
  std::lock_guard<std::mutex> lock(g_queues_mutex);
  auto*& found = queues()[id];
  if (!found) found = new Queue;
  return *found;
}

std::vector<Queue*> all_queues() {
  std::lock_guard<std::mutex> lock(g_queues_mutex);
  std::vector<Queue*> all;
  for (auto& [id, one] : queues()) all.push_back(one);
  return all;
}

struct Event {
  c10::StreamId stream = 0;
  uint64_t at = 0;
};

// -- memory -----------------------------------------------------------------------------------------------------

struct Pool {  // memory that is never given back
  std::mutex mutex;
  std::map<uintptr_t, size_t> sizes;
  std::map<size_t, std::vector<void*>> free;

  void* take(size_t size) {
    if (!size) return nullptr;
    size = (size + 63) / 64 * 64;
    std::lock_guard<std::mutex> lock(mutex);
    auto& same = free[size];
    void* found;
    if (same.empty()) {
      found = std::aligned_alloc(64, size);
      sizes[reinterpret_cast<uintptr_t>(found)] = size;
    } else {
      found = same.back();
      same.pop_back();
    }
    std::memset(found, 0xFF, size);  // NaN
    return found;
  }

  void give_back(void* memory) {
    if (!memory) return;
    std::lock_guard<std::mutex> lock(mutex);
    const size_t size = sizes[reinterpret_cast<uintptr_t>(memory)];
    std::memset(memory, 0xFF, size);
    free[size].push_back(memory);
  }

  bool holds(const void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    auto next = sizes.upper_bound(reinterpret_cast<uintptr_t>(address));
    if (next == sizes.begin()) return false;
    --next;
    return reinterpret_cast<uintptr_t>(address) < next->first + next->second;
  }
};

Pool& device_pool() {
  static auto* pool = new Pool;
  return *pool;
}
Pool& pinned_pool() {
  static auto* pool = new Pool;
  return *pool;
}
void free_device(void* memory) { device_pool().give_back(memory); }
void free_pinned(void* memory) { pinned_pool().give_back(memory); }

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = device_pool().take(size);
    return {memory, memory, &free_device, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
DeviceAllocator g_device_allocator;
REGISTER_ALLOCATOR(PU1, &g_device_allocator);

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    ++g_pinned_allocations;
    void* memory = pinned_pool().take(size);
    return {memory, memory, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
PinnedAllocator g_pinned_allocator;

// -- what torch asks a device -----------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* address) const override { return pinned_pool().holds(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto memory = g_device_allocator.allocate(size);
    if (impl->data()) std::memcpy(memory.get(), impl->data(), std::min(size, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(memory));
    impl->set_nbytes(size);
  }
};

c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = PU1;
  c10::DeviceType type() const override { return PU1; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream_of(t_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(g_next_stream++); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(t_stream, stream.id()));
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {stream.id(), queue(stream.id()).mark()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    const Event copy = *static_cast<Event*>(event);
    if (copy.stream != stream.id()) queue(stream.id()).push([copy] { queue(copy.stream).wait(copy.at); });
  }
  bool queryEvent(void* event) const override {
    auto* found = static_cast<Event*>(event);
    return !found || queue(found->stream).reached(found->at);
  }
  void synchronizeEvent(void* event) const override {
    ++t_waits;
    if (auto* found = static_cast<Event*>(event)) queue(found->stream).wait(found->at);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const c10::Stream& stream) const override {
    auto& found = queue(stream.id());
    return found.reached(found.mark());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    ++t_waits;
    queue(stream.id()).wait();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    ++t_waits;
    for (auto* one : all_queues()) one->wait();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- operators --------------------------------------------------------------------------------------------------

// The same memory as a tensor of the CPU, for as long as `tensor` lives.
at::Tensor on_host(const at::Tensor& tensor) {
  auto* start = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  return at::from_blob(start, tensor.sizes(), tensor.strides(), tensor.storage_offset(), [](void*) {},
                       at::TensorOptions().dtype(tensor.scalar_type()), std::nullopt);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &g_device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &g_device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  const bool to_host = self.is_privateuseone() && target.is_cpu() && pinned_pool().holds(target.data_ptr());
  const bool to_device = self.is_cpu() && target.is_privateuseone() && pinned_pool().holds(self.data_ptr());
  if (non_blocking && (to_host || to_device)) {
    ++g_async_copies;
    const int delay_ms = g_delay_ms;
    at::Tensor to = on_host(target), from = on_host(self).expand(to.sizes());  // what does not fit raises here
    queue(t_stream).push([from, to, delay_ms] {
      if (delay_ms) std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
      at::NoGradGuard no_grad;
      const_cast<at::Tensor&>(to).copy_(from);
    });
  } else {
    if (!t_in_kernel && (self.is_cpu() || target.is_cpu())) {
      ++g_sync_copies;
      ++t_waits;
    }
    queue(t_stream).wait();
    at::Tensor to = target.is_cpu() ? target : on_host(target);
    to.copy_(self.is_cpu() ? self : on_host(self));
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (target.sizes() != self.sizes()) const_cast<at::Tensor&>(target).resize_(self.sizes());
  return copy_from(self, target, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t needed = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (needed > impl->storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(impl->storage(), needed);
  }
  return self;
}

at::Scalar item(const at::Tensor& self) {
  if (!t_in_kernel) ++t_waits;
  queue(t_stream).wait();
  return on_host(self).item();
}

at::Tensor& set_with_shape(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                           c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_flat(at::Tensor& self, at::Storage storage) {
  const int64_t count = storage.nbytes() / self.itemsize();
  return set_with_shape(self, std::move(storage), 0, {count}, {1});
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> plain;
  if (offset) plain = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), plain);
}

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++g_kernels;
  queue(t_stream).wait();
  const bool outer = std::exchange(t_in_kernel, true);
  at::native::cpu_fallback(op, stack);
  t_in_kernel = outer;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("set_.source_Storage_storage_offset", &set_with_shape);
  m.impl("set_.source_Storage", &set_flat);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("set_delay_ms", [](int delay_ms) { g_delay_ms = delay_ms; });
  m.def("set_lazy", [](bool lazy) {
    g_lazy = lazy;
    for (auto* one : all_queues()) {
      std::lock_guard<std::mutex> lock(one->mutex);
      one->changed.notify_all();
    }
  });
  m.def("counts", [] {
    py::dict counts;
    counts["async_copies"] = g_async_copies.load();
    counts["sync_copies"] = g_sync_copies.load();
    counts["kernels"] = g_kernels.load();
    counts["pinned_allocations"] = g_pinned_allocations.load();
    counts["waits"] = t_waits;
    return counts;
  });
}
