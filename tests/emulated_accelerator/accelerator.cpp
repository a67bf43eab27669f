// An accelerator emulated on the CPU (PrivateUse1). Kernels compute at once on the host, but end in
// the device's own time, `slowness` times as long: a program that reads an event or a result without
// waiting for it is refused, or waits, as on a real device.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr size_t kRounding = 512, kSegment = 2 << 20;

// -- the device's time ------------------------------------------------------------------------------

std::mutex time_mutex;
double device_s = 0;  // when the device ends what was given to it
std::atomic<double> slowness{2.0};
std::atomic<int64_t> n_waits{0};

double host_s() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

void launch(double seconds) {
  std::lock_guard<std::mutex> lock(time_mutex);
  device_s = std::max(device_s, host_s()) + seconds;
}

double end_s() {
  std::lock_guard<std::mutex> lock(time_mutex);
  return std::max(device_s, host_s());
}

void wait_until(double moment) {  // mostly asleep: the core is free for others
  constexpr double kNap = 1e-4;
  for (double left; (left = moment - host_s()) > 0;) {
    if (left > kNap) {
      std::this_thread::sleep_for(std::chrono::duration<double>(left - kNap));
    } else {
      std::this_thread::yield();
    }
  }
}

void wait() {
  n_waits++;
  wait_until(end_s());
}

thread_local int depth = 0;  // of kernels that run: their own copies are a part of them

struct Kernel {
  double begin = host_s();
  Kernel() { depth++; }
  ~Kernel() {
    if (!--depth) launch(slowness * (host_s() - begin));
  }
};

// -- memory -----------------------------------------------------------------------------------------

std::mutex memory_mutex;
int64_t allocated = 0, peak = 0, limit = INT64_MAX;

int64_t rounded(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    if (!size) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(kDevice, 0)};
    int64_t taken = rounded(size, kRounding);
    {
      std::lock_guard<std::mutex> lock(memory_mutex);
      TORCH_CHECK_WITH(OutOfMemoryError, allocated + taken <= limit, "emulated: out of memory");
      peak = std::max(peak, allocated += taken);
    }
    auto* block = static_cast<int64_t*>(std::aligned_alloc(64, rounded(size + 64, 64)));
    *block = taken;
    return {block + 8, block, &release, c10::Device(kDevice, 0)};
  }
  static void release(void* block) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    allocated -= *static_cast<int64_t*>(block);
    std::free(block);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    peak = allocated;
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator);

// -- streams and events -----------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, getDevice());
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new double;
    *static_cast<double*>(*event) = end_s();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<double*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    return !event || host_s() >= *static_cast<double*>(event);
  }
  void synchronizeEvent(void* event) const override { wait_until(*static_cast<double*>(event)); }
  bool queryStream(const c10::Stream&) const override { return host_s() >= device_s; }
  void synchronizeStream(const c10::Stream&) const override { wait(); }
  void synchronizeDevice(c10::DeviceIndex) const override { wait(); }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(queryEvent(first) && queryEvent(second), "emulated: an event was not reached yet");
    return 1e3 * (*static_cast<double*>(second) - *static_cast<double*>(first));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU).clone();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU);
  }
};

Hooks hooks;
const bool has_hooks = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// -- operators --------------------------------------------------------------------------------------

at::Tensor on_cpu(const at::Tensor& tensor) {  // the same memory
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  {
    Kernel kernel;
    on_cpu(to).copy_(on_cpu(from));
  }
  if (to.is_cpu() && !depth) wait();
  return to;
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* storage = self.storage().unsafeGetStorageImpl();
  size_t needed = self.itemsize() * (c10::multiply_integers(sizes) + self.storage_offset());
  if (needed > storage->nbytes()) {
    auto data = allocator.allocate(needed);
    std::memcpy(data.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& self) {
  wait();
  return on_cpu(self).item();
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  std::optional<int64_t> from;
  if (offset) from = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), from);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(
      self, storage, offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride));
}

// Products and convolutions of halves are computed in float, as many processors have no
// instructions for them.
at::Tensor computed(const at::Tensor& tensor) {
  auto type = tensor.scalar_type();
  return on_cpu(tensor).to(at::isReducedFloatingType(type) ? at::kFloat : type);
}

at::Tensor to_device(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.defined() ? tensor.to(c10::Device(kDevice, 0), type) : tensor;
}

at::Tensor mm(const at::Tensor& left, const at::Tensor& right) {
  Kernel kernel;
  return to_device(at::mm(computed(left), computed(right)), left.scalar_type());
}

at::Tensor convolution(
    const at::Tensor& image, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
    bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  Kernel kernel;
  std::optional<at::Tensor> host_bias;
  if (bias && bias->defined()) host_bias = computed(*bias);
  return to_device(
      at::convolution_symint(
          computed(image), computed(weight), host_bias, stride, padding, dilation, transposed,
          output_padding, groups),
      image.scalar_type());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& image, const at::Tensor& weight,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
    bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> mask) {
  Kernel kernel;
  c10::SymInt out = weight.sym_size(0);
  auto found = at::convolution_backward_symint(
      computed(gradient), computed(image), computed(weight), c10::SymIntArrayRef(&out, 1), stride,
      padding, dilation, transposed, output_padding, groups, mask);
  auto type = image.scalar_type();
  return {to_device(std::get<0>(found), type), to_device(std::get<1>(found), type),
          to_device(std::get<2>(found), type)};
}

void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Kernel kernel;
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("mm", mm);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY(emulated, m) {
  m.def("waits() -> int", [] { return n_waits.load(); });
  m.def("peak(bool reserved) -> int", [](bool reserved) {
    return reserved ? rounded(peak, kSegment) : peak;
  });
  m.def("reset_peak() -> ()", [] { allocator.resetPeakStats(0); });
  m.def("synchronize() -> ()", [] { wait(); });
  m.def("limit(int bytes) -> ()", [](int64_t bytes) { limit = bytes; });
  m.def("slow(float factor) -> ()", [](double factor) { slowness = factor; });
}

}  // namespace
