// Makes `device='cuda'` known to a PyTorch that was built without CUDA: enough for fake tensors, which have
// shapes and devices but no memory. No kernel runs, no driver is called.
//
// A device guard that guards nothing, and hooks that answer "yes, there is one device" while `active`.
// They replace PyTorch's stand-in hooks in place: the registry was read when the stand-in was made.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

namespace {

bool active = false;

constexpr long kCuDNNVersion = 91000; // any that is new enough for every layer

struct Guard final : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override {
    return {c10::DeviceType::CUDA, 0};
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return getDevice();
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return stream;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
};

struct Hooks final : public at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override {
    return active;
  }
  bool hasCuDNN() const override {
    return active;
  }
  bool compiledWithCuDNN() const override {
    return active;
  }
  bool isBuilt() const override {
    return active;
  }
  bool isAvailable() const override {
    return active;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return active;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex current_device() const override {
    return 0;
  }
  c10::DeviceIndex deviceCount() const override {
    return active ? 1 : 0;
  }
  long versionCuDNN() const override {
    return kCuDNNVersion;
  }
  long versionRuntimeCuDNN() const override {
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
};

} // namespace

extern "C" void tb_memplugin_install() {
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) {
    c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, new Guard());
  }
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
}

extern "C" void tb_memplugin_activate(int on) {
  active = on != 0;
}
