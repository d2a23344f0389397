// A CUDA runtime with no GPU behind it: memory is counted and handed out, kernels are not run.
// See docs/gpu.md.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

// Where the runtimes of PyTorch's CUDA builds differ: 13, 12, and 11 (PyTorch 1.13 and 2.0).
#if CUDART_VERSION >= 13000
#define EDGES const cudaGraphEdgeData**,
#else
#define EDGES
#endif
#if CUDART_VERSION >= 12000
#define INSTANTIATION_OPTIONS unsigned long long
#else
#define INSTANTIATION_OPTIONS cudaGraphNode_t*, char*, size_t
#define cudaStreamGetCaptureInfo cudaStreamGetCaptureInfo_v2
using cudaKernel_t = void*;
struct cudaLaunchConfig_t;
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
#endif

namespace {

constexpr size_t kPage = size_t(2) << 20;

struct Target {
    char name[256];
    int major, minor, processors, threads_per_processor, blocks_per_processor, shared_optin;
    size_t bytes;
};

long setting(const char* name, long otherwise) {
    const char* value = std::getenv(name);
    return value ? std::atol(value) : otherwise;
}

// STANDIN_DEVICE (environment.py): numbers in this order, and the rest is the driver's name.
const Target& target() {
    static const Target chosen = [] {
        Target it{};
        const char* text = std::getenv("STANDIN_DEVICE");
        if (!text || std::sscanf(text, "%d %d %d %d %d %d %zu %255[^\n]", &it.major, &it.minor, &it.processors,
                                 &it.threads_per_processor, &it.blocks_per_processor, &it.shared_optin, &it.bytes,
                                 it.name) != 8) {
            std::fprintf(stderr, "stand-in: STANDIN_DEVICE does not describe a GPU\n");
            std::exit(2);
        }
        return it;
    }();
    return chosen;
}

// Whether requests beyond the device's memory succeed, so that a run tells how much it needs.
bool unlimited() { static bool found = setting("STANDIN_UNLIMITED", 0) == 1; return found; }

int devices() { static int count = int(setting("STANDIN_DEVICES", 1)); return count; }

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) { last_error = error; return error; }

struct Range { size_t bytes; int device; bool host; };

std::mutex lock;
std::map<uintptr_t, Range> ranges;
size_t used[64];
size_t most_used[64];

size_t context_bytes() { static size_t bytes = size_t(setting("STANDIN_CONTEXT_BYTES", 500L << 20)); return bytes; }

// What a process has that is not there, on each device.
size_t others_bytes() { static size_t bytes = size_t(setting("STANDIN_OTHERS_BYTES", 0)); return bytes; }

size_t free_bytes(int device) {
    return target().bytes - std::min(target().bytes, context_bytes() + others_bytes() + used[device]);
}

bool take(int device, size_t bytes) {
    if (bytes > free_bytes(device) && !unlimited()) return false;
    used[device] += bytes;
    most_used[device] = std::max(most_used[device], used[device]);
    return true;
}

void* reserve(size_t bytes) {
    void* at = mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return nullptr;
    uintptr_t start = (uintptr_t(at) + kPage - 1) / kPage * kPage;
    uintptr_t end = start + bytes;
    if (start > uintptr_t(at)) munmap(at, start - uintptr_t(at));
    uintptr_t past = uintptr_t(at) + bytes + kPage;
    if (past > end) munmap(reinterpret_cast<void*>(end), past - end);
    return reinterpret_cast<void*>(start);
}

size_t rounded(size_t bytes) { return (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage; }

void* fresh_handle() { return std::malloc(64); }

struct Stream { int priority; unsigned long long capture; };
std::unordered_map<cudaStream_t, Stream> streams;
unsigned long long captures = 0;
bool accessible(const void* at) {
    std::lock_guard<std::mutex> held(lock);
    auto next = ranges.upper_bound(uintptr_t(at));
    return next != ranges.begin() && uintptr_t(at) < std::prev(next)->first + std::prev(next)->second.bytes;
}

void clear_bytes(void* at, int value, size_t count) {
    if (value || count < 4 * 4096) { std::memset(at, value, count); return; }
    uintptr_t start = (uintptr_t(at) + 4095) / 4096 * 4096, end = (uintptr_t(at) + count) / 4096 * 4096;
    std::memset(at, 0, start - uintptr_t(at));
    madvise(reinterpret_cast<void*>(start), end - start, MADV_DONTNEED);
    std::memset(reinterpret_cast<void*>(end), 0, uintptr_t(at) + count - end);
}

}  // namespace

#define OK { return cudaSuccess; }

extern "C" {

// Devices.
cudaError_t cudaGetDeviceCount(int* count) {
    static void* driver = dlopen("libcuda.so.1", RTLD_LAZY);  // as NVIDIA's runtime: PyTorch before 2.8 relies on it
    *count = driver ? devices() : 0;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) { *device = current_device; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= devices()) return fail(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() OK
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) OK
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
    std::snprintf(id, size_t(length), "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* it, int device) {
    const Target& gpu = target();
    std::memset(it, 0, sizeof *it);
    std::snprintf(it->name, sizeof it->name, "%s", gpu.name);
    it->uuid.bytes[0] = char(device + 1);
    it->totalGlobalMem = gpu.bytes;
    it->sharedMemPerBlock = 49152;
    it->sharedMemPerBlockOptin = size_t(gpu.shared_optin);
    it->sharedMemPerMultiprocessor = size_t(gpu.shared_optin) + 1024;
    it->reservedSharedMemPerBlock = 1024;
    it->regsPerBlock = it->regsPerMultiprocessor = 65536;
    it->warpSize = 32;
    it->memPitch = 2147483647;
    it->maxThreadsPerBlock = 1024;
    it->maxThreadsDim[0] = it->maxThreadsDim[1] = 1024;
    it->maxThreadsDim[2] = 64;
    it->maxGridSize[0] = 2147483647;
    it->maxGridSize[1] = it->maxGridSize[2] = 65535;
    it->totalConstMem = 65536;
    it->major = gpu.major;
    it->minor = gpu.minor;
    it->textureAlignment = 512;
    it->texturePitchAlignment = 32;
    it->multiProcessorCount = gpu.processors;
    it->maxThreadsPerMultiProcessor = gpu.threads_per_processor;
    it->maxBlocksPerMultiProcessor = gpu.blocks_per_processor;
    it->l2CacheSize = 52428800;
    it->canMapHostMemory = it->unifiedAddressing = it->concurrentKernels = it->managedMemory = 1;
    it->streamPrioritiesSupported = it->cooperativeLaunch = 1;
    it->asyncEngineCount = 3;
    it->memoryBusWidth = 5120;
    it->pciBusID = device + 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp it;
    cudaGetDeviceProperties(&it, device);
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = it.maxThreadsPerBlock; break;
        case cudaDevAttrMaxBlockDimX: *value = 1024; break;
        case cudaDevAttrMaxBlockDimY: *value = 1024; break;
        case cudaDevAttrMaxBlockDimZ: *value = 64; break;
        case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
        case cudaDevAttrMaxGridDimY: *value = 65535; break;
        case cudaDevAttrMaxGridDimZ: *value = 65535; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(it.sharedMemPerBlockOptin); break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = int(it.sharedMemPerMultiprocessor); break;
        case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
        case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
        case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMultiProcessorCount: *value = it.multiProcessorCount; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = it.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = it.maxBlocksPerMultiProcessor; break;
        case cudaDevAttrComputeCapabilityMajor: *value = it.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = it.minor; break;
        case cudaDevAttrL2CacheSize: *value = it.l2CacheSize; break;
        case cudaDevAttrUnifiedAddressing: *value = 1; break;
        case cudaDevAttrCooperativeLaunch: *value = 1; break;
        case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
        case cudaDevAttrClockRate: *value = 1980000; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

// Memory: host pages that are not touched until somebody does.
cudaError_t cudaMalloc(void** out, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    size_t taken = rounded(bytes);
    *out = nullptr;
    if (!take(current_device, taken)) return fail(cudaErrorMemoryAllocation);
    *out = reserve(taken);
    if (!*out) { used[current_device] -= taken; return fail(cudaErrorMemoryAllocation); }
    ranges[uintptr_t(*out)] = {taken, current_device, false};
    return cudaSuccess;
}
cudaError_t cudaFree(void* at) {
    if (!at) return cudaSuccess;
    std::lock_guard<std::mutex> held(lock);
    auto found = ranges.find(uintptr_t(at));
    if (found == ranges.end()) return fail(cudaErrorInvalidValue);
    used[found->second.device] -= found->second.bytes;
    munmap(at, found->second.bytes);
    ranges.erase(found);
    return cudaSuccess;
}
cudaError_t cudaMallocManaged(void** out, size_t bytes, unsigned) { return cudaMalloc(out, bytes); }
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
    if (posix_memalign(out, 4096, std::max<size_t>(bytes, 1))) return fail(cudaErrorMemoryAllocation);
    std::lock_guard<std::mutex> held(lock);
    ranges[uintptr_t(*out)] = {bytes, current_device, true};
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void** out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }
cudaError_t cudaFreeHost(void* at) {
    std::lock_guard<std::mutex> held(lock);
    ranges.erase(uintptr_t(at));
    std::free(at);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void* at, size_t bytes, unsigned) {
    std::lock_guard<std::mutex> held(lock);
    ranges[uintptr_t(at)] = {bytes, current_device, true};
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* at) {
    std::lock_guard<std::mutex> held(lock);
    ranges.erase(uintptr_t(at));
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    std::lock_guard<std::mutex> held(lock);
    *free = free_bytes(current_device);
    *total = target().bytes;
    return cudaSuccess;
}
size_t standin_others_bytes() { return others_bytes(); }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* it, const void* at) {
    std::lock_guard<std::mutex> held(lock);
    std::memset(it, 0, sizeof *it);
    it->type = cudaMemoryTypeUnregistered;
    it->device = -2;
    auto next = ranges.upper_bound(uintptr_t(at));
    if (next == ranges.begin()) return cudaSuccess;
    auto& [start, range] = *std::prev(next);
    if (uintptr_t(at) >= start + range.bytes) return cudaSuccess;
    it->type = range.host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    it->device = range.device;
    it->devicePointer = it->hostPointer = const_cast<void*>(at);
    return cudaSuccess;
}
// What the host reads on this thread while one operator runs, where a kernel would have counted it (values.cpp).
static thread_local long read_answer = 0;
static thread_local bool has_answer = false;
void standin_answer_reads(long value, int set) { read_answer = value; has_answer = set; }
int standin_take_answer(void* to, size_t bytes) {
    if (!has_answer || bytes > sizeof read_answer) return 0;
    std::memcpy(to, &read_answer, bytes);
    return 1;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    if (kind == cudaMemcpyDeviceToHost && standin_take_answer(to, bytes)) return cudaSuccess;
    // What is on the device is never computed: long copies within it would only touch pages.
    const bool within = kind == cudaMemcpyDeviceToDevice ||
                        (kind == cudaMemcpyDefault && accessible(to) && accessible(from));
    if (within && bytes > 4096) return cudaSuccess;
    std::memmove(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemcpyPeerAsync(void*, int, const void*, int, size_t, cudaStream_t) OK
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t) {
    if (kind == cudaMemcpyDeviceToDevice) return cudaSuccess;
    for (size_t row = 0; row < height; ++row)
        std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) OK
cudaError_t cudaGetSymbolAddress(void** out, const void*) {
    static void* somewhere = std::calloc(1, 1 << 20);
    *out = somewhere;
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* at, int value, size_t count, cudaStream_t) {
    clear_bytes(at, value, count);
    return cudaSuccess;
}
cudaError_t cudaMemset(void* at, int value, size_t count) { return cudaMemsetAsync(at, value, count, nullptr); }

// Streams and events: everything has always just finished.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int priority) {
    std::lock_guard<std::mutex> held(lock);
    *out = static_cast<cudaStream_t>(fresh_handle());
    streams[*out] = {priority, 0};
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t it) {
    std::lock_guard<std::mutex> held(lock);
    streams.erase(it);
    return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t it, int* priority) {
    std::lock_guard<std::mutex> held(lock);
    auto found = streams.find(it);
    *priority = found == streams.end() ? 0 : found->second.priority;
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) OK
cudaError_t cudaStreamSynchronize(cudaStream_t) OK
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) OK
cudaError_t cudaStreamAddCallback(cudaStream_t it, cudaStreamCallback_t call, void* data, unsigned) {
    call(it, cudaSuccess, data);
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* data) { call(data); return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) { *out = static_cast<cudaEvent_t>(fresh_handle()); return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t it) { std::free(it); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) OK
cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) OK
cudaError_t cudaEventQuery(cudaEvent_t) OK
cudaError_t cudaEventSynchronize(cudaEvent_t) OK
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { *ms = 1.0f; return cudaSuccess; }

// Graphs: a capture has a number, its graph does nothing.
cudaError_t cudaStreamBeginCapture(cudaStream_t it, cudaStreamCaptureMode) {
    std::lock_guard<std::mutex> held(lock);
    streams[it].capture = ++captures;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t it, cudaGraph_t* graph) {
    std::lock_guard<std::mutex> held(lock);
    streams[it].capture = 0;
    *graph = static_cast<cudaGraph_t>(fresh_handle());
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t it, cudaStreamCaptureStatus* status) {
    std::lock_guard<std::mutex> held(lock);
    auto found = streams.find(it);
    bool capturing = found != streams.end() && found->second.capture;
    *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t it, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, EDGES size_t* count) {
    cudaStreamIsCapturing(it, status);
    std::lock_guard<std::mutex> held(lock);
    auto found = streams.find(it);
    if (id) *id = found == streams.end() ? 0 : found->second.capture;
    static void* pending = fresh_handle();
    if (graph) *graph = static_cast<cudaGraph_t>(pending);
    if (nodes) *nodes = nullptr;
    if (count) *count = 0;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) OK
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t, INSTANTIATION_OPTIONS) {
    *out = static_cast<cudaGraphExec_t>(fresh_handle());
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t, unsigned long long) {
    *out = static_cast<cudaGraphExec_t>(fresh_handle());
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) OK
cudaError_t cudaGraphDestroy(cudaGraph_t) OK
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) OK

// Kernels: known to the runtime, never run.
void** __cudaRegisterFatBinary(void*) { return static_cast<void**>(fresh_handle()); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

struct Configuration { dim3 grid, block; size_t shared; void* stream; };
static thread_local std::vector<Configuration> configurations;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
    configurations.push_back({grid, block, shared, stream});
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    Configuration last = configurations.back();
    configurations.pop_back();
    *grid = last.grid;
    *block = last.block;
    *shared = last.shared;
    *static_cast<void**>(stream) = last.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* function) {
    *out = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) OK
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) OK
cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) OK
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) OK
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) OK
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) OK
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* it, const void*) {
    std::memset(it, 0, sizeof *it);
    it->maxThreadsPerBlock = 1024;
    it->numRegs = 32;
    it->ptxVersion = it->binaryVersion = target().major * 10 + target().minor;
    it->maxDynamicSharedSizeBytes = target().shared_optin;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads, size_t, unsigned) {
    *blocks = std::max(1, std::min(target().blocks_per_processor, target().threads_per_processor / std::max(1, threads)));
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

// Errors.
cudaError_t cudaGetLastError() { cudaError_t error = last_error; last_error = cudaSuccess; return error; }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOfStandIn"; }
const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : error ? "not in the stand-in" : "no error"; }

// The driver's virtual memory, for expandable segments.
CUresult standin_cuMemGetAllocationGranularity(size_t* out, const CUmemAllocationProp*, int) { *out = kPage; return CUDA_SUCCESS; }
CUresult standin_cuMemAddressReserve(CUdeviceptr* out, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    *out = CUdeviceptr(reserve(bytes));
    if (!*out) return CUDA_ERROR_OUT_OF_MEMORY;
    std::lock_guard<std::mutex> held(lock);
    ranges[*out] = {bytes, current_device, false};
    return CUDA_SUCCESS;
}
CUresult standin_cuMemAddressFree(CUdeviceptr at, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    ranges.erase(at);
    munmap(reinterpret_cast<void*>(at), bytes);
    return CUDA_SUCCESS;
}
struct Physical { size_t bytes; int device; };
CUresult standin_cuMemCreate(CUmemGenericAllocationHandle* out, size_t bytes, const CUmemAllocationProp* prop, unsigned long long) {
    std::lock_guard<std::mutex> held(lock);
    if (!take(prop->location.id, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    *out = CUmemGenericAllocationHandle(new Physical{bytes, prop->location.id});
    return CUDA_SUCCESS;
}
CUresult standin_cuMemRelease(CUmemGenericAllocationHandle it) {
    std::lock_guard<std::mutex> held(lock);
    auto* physical = reinterpret_cast<Physical*>(it);
    used[physical->device] -= physical->bytes;
    delete physical;
    return CUDA_SUCCESS;
}
CUresult standin_cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) { return CUDA_SUCCESS; }
CUresult standin_cuMemUnmap(CUdeviceptr at, size_t bytes) { madvise(reinterpret_cast<void*>(at), bytes, MADV_DONTNEED); return CUDA_SUCCESS; }
CUresult standin_cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
CUresult standin_cuGetErrorString(CUresult, const char** out) { *out = "not in the stand-in"; return CUDA_SUCCESS; }
CUresult standin_cuDeviceGet(CUdevice* out, int ordinal) { *out = ordinal; return CUDA_SUCCESS; }
CUresult standin_cuDeviceGetAttribute(int* out, int, CUdevice) { *out = 0; return CUDA_SUCCESS; }
CUresult standin_cuCtxGetCurrent(CUcontext* out) { static void* context = fresh_handle(); *out = static_cast<CUcontext>(context); return CUDA_SUCCESS; }
CUresult standin_cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr at) {
    std::lock_guard<std::mutex> held(lock);
    auto next = ranges.upper_bound(at);
    if (next == ranges.begin()) return CUDA_ERROR_INVALID_VALUE;
    auto& [start, range] = *std::prev(next);
    if (base) *base = start;
    if (bytes) *bytes = range.bytes;
    return CUDA_SUCCESS;
}
static CUresult nothing() { return CUDA_ERROR_NOT_SUPPORTED; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** out, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
    std::string name = std::string("standin_") + symbol;
    *out = dlsym(RTLD_DEFAULT, name.c_str());
    if (!*out) *out = reinterpret_cast<void*>(&nothing);
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

#if CUDART_VERSION >= 12000
#undef cudaGetDriverEntryPoint
cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** out, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* status) {
    return cudaGetDriverEntryPointByVersion(symbol, out, CUDART_VERSION, flags, status);
}
#endif

size_t standin_used(int device) { std::lock_guard<std::mutex> held(lock); return used[device]; }
size_t standin_most_used(int device) { std::lock_guard<std::mutex> held(lock); return most_used[device]; }
}
