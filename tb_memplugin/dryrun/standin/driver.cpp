// libcuda.so.1 for those who open it by name: a driver that has a context and runs nothing. The rest: build.py.
#include <cstdint>
#include <cstdlib>
#include <unistd.h>

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { *version = STANDIN_CUDA * 10; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
    if (flags) *flags = 0;
    if (active) *active = 1;
    return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) { *context = reinterpret_cast<void*>(1); return 0; }
int cuCtxGetCurrent(void** context) { *context = reinterpret_cast<void*>(1); return 0; }
int cuCtxGetDevice(int* device) { *device = 0; return 0; }
int cuGetErrorString(int, const char** text) { *text = "not in the stand-in"; return 0; }
int cuGetExportTable(const void**, const void*) { return 801; }  // CUDA_ERROR_NOT_SUPPORTED
int cuModuleLoad(void** module, const char*) { *module = std::malloc(8); return 0; }
int cuModuleLoadData(void** module, const void*) { *module = std::malloc(8); return 0; }
int cuModuleLoadDataEx(void** module, const void*, unsigned, void*, void**) { *module = std::malloc(8); return 0; }
int cuModuleGetFunction(void** function, void*, const char*) { *function = std::malloc(8); return 0; }
int cuLibraryLoadData(void** library, const void*, void*, void**, unsigned, void*, void**, unsigned) {
    *library = std::malloc(8);
    return 0;
}
int cuLibraryGetKernel(void** kernel, void*, const char*) { *kernel = std::malloc(8); return 0; }
int cuKernelGetFunction(void** function, void*) { *function = std::malloc(8); return 0; }
// Attribute 0 is CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, which Triton compares with its kernels' threads.
int cuFuncGetAttribute(int* value, int attribute, void*) { *value = attribute == 0 ? 1024 : 0; return 0; }
int cuOccupancyMaxActiveClusters(int* count, void*, void*) { *count = 1; return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void*, int, unsigned long) { *count = 2; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    extern int cudaDeviceGetAttribute(int*, int, int) __attribute__((weak));
    *value = 0;
    return cudaDeviceGetAttribute ? cudaDeviceGetAttribute(value, attribute, device) : 0;
}

// libnvidia-ml.so.1 is the same file: expandable segments ask it whether devices share a fabric.
int nvmlInit_v2() { return 0; }
int nvmlInitWithFlags(unsigned) { return 0; }

// Memory, as nvidia-smi shows it. A handle is the device's number plus one; the driver keeps 600 MiB for itself.
int cudaMemGetInfo(size_t* free, size_t* total) __attribute__((weak));
int cudaGetDevice(int* device) __attribute__((weak));
int cudaSetDevice(int device) __attribute__((weak));
size_t standin_others_bytes() __attribute__((weak));

struct Memory { unsigned version; unsigned long long total, reserved, free, used; };
struct Process { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {  // GPU-01000000-...
    *device = reinterpret_cast<void*>(std::strtoul(uuid + 4, nullptr, 16) >> 24);
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void* device, Memory* it) {
    size_t free = 0, total = 0;
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(int(intptr_t(device)) - 1);
    cudaMemGetInfo(&free, &total);
    cudaSetDevice(before);
    it->reserved = 600ull << 20;
    it->total = total + it->reserved;
    it->free = free;
    it->used = total - free;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, Process* list) {
    const size_t others = standin_others_bytes();
    const unsigned processes = others ? 2 : 1;
    if (*count < processes) { *count = processes; return 7; }  // 7: insufficient size
    *count = processes;
    Memory memory;
    nvmlDeviceGetMemoryInfo_v2(device, &memory);
    list[0] = {unsigned(getpid()), memory.used - others, ~0u, ~0u};
    if (others) list[1] = {1, others, ~0u, ~0u};
    return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { *device = reinterpret_cast<void*>(1); return 0; }
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }  // it stays as it was, all zeros: no fabric
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return 3; }  // 3: not supported
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { *count = 0; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = STANDIN_CUDA * 10; return 0; }
}
