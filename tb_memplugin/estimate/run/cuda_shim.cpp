// Makes `device='cuda'` known to a PyTorch that has no GPU, built with CUDA or without: enough for fake tensors,
// which have shapes and devices but no memory. No kernel runs, no driver is called.
//
// A device guard that guards nothing, and hooks that answer "yes, there is one device". Both stand in the places of
// PyTorch's own while they are active: the registry of hooks was read when those were made, so they are replaced in
// place. Functions without `override` are ones that not every PyTorch since 2.6 has, or not with this signature.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <new>
#include <string>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr long kCuDNNVersion = 91000; // any that is new enough for every layer

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return DeviceType::CUDA;
  }
  Device getDevice() const override {
    return {DeviceType::CUDA, 0};
  }
  Device exchangeDevice(Device) const override {
    return getDevice();
  }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device device) const noexcept override {
    return Stream(Stream::DEFAULT, device);
  }
  Stream getDefaultStream(Device device) const override {
    return getStream(device);
  }
  Stream getNewStream(Device device, int) const override {
    return getStream(device);
  }
  Stream exchangeStream(Stream stream) const noexcept override {
    return stream;
  }
  DeviceIndex deviceCount() const noexcept override {
    return 8;
  }
  bool queryStream(const Stream&) const override {
    return true;
  }
  void synchronizeStream(const Stream&) const override {}
  // Autograd waits so for gradients of another GPU: here all work is done at once.
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
};

struct Hooks final : public at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool hasCuDNN() const override {
    return true;
  }
  bool compiledWithCuDNN() const override {
    return true;
  }
  bool isBuilt() const {
    return true;
  }
  bool isAvailable() const {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  DeviceIndex current_device() const override {
    return 0;
  }
  DeviceIndex deviceCount() const override {
    return 1;
  }
  int getNumGPUs() const override {
    return 1;
  }
  long versionCuDNN() const override {
    return kCuDNNVersion;
  }
  long versionRuntimeCuDNN() const {
    return kCuDNNVersion;
  }
  bool supportsDepthwiseConvolutionWithCuDNN() const override {
    return true;
  }
  bool supportsDilatedConvolutionWithCuDNN() const override {
    return true;
  }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override {
    return true;
  }
  double batchnormMinEpsilonCuDNN() const override {
    return 1e-5;
  }
  std::string showConfig() const override {
    return "";
  }
  void deviceSynchronize(DeviceIndex) const override {}
};

// Neither has data of its own: an object is its table of functions.
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));

struct Replaced {
  const c10::impl::DeviceGuardImplInterface* guard = nullptr;
  alignas(at::CUDAHooksInterface) unsigned char hooks[sizeof(at::CUDAHooksInterface)] = {};
  bool active = false;
};

Replaced replaced;

void* hooks_place() {
  return const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
}

auto& guard_place() {
  return c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)];
}

} // namespace

extern "C" void tb_memplugin_activate(int on) {
  if ((on != 0) == replaced.active) {
    return;
  }
  static Guard guard;
  if (on != 0) {
    replaced.guard = guard_place().exchange(&guard);
    std::memcpy(replaced.hooks, hooks_place(), sizeof(replaced.hooks));
    new (hooks_place()) Hooks();
  } else {
    // Where there was no guard ours stays: fake tensors that outlive an estimate still name the device.
    guard_place().store(replaced.guard != nullptr ? replaced.guard : &guard);
    std::memcpy(hooks_place(), replaced.hooks, sizeof(replaced.hooks));
  }
  replaced.active = on != 0;
}
