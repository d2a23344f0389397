// The runtime's own pools, for backend:cudaMallocAsync: every device has one, which keeps no reserve.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace {

constexpr size_t kBlock = 512;
constexpr int kDevices = 64;

std::mutex lock;
std::map<void*, std::pair<int, size_t>> blocks;
uint64_t used[kDevices], most_used[kDevices];

}  // namespace

extern "C" {
cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t) {
    int device = 0;
    cudaGetDevice(&device);
    cudaError_t error = cudaMalloc(out, bytes);
    if (error) return error;
    std::lock_guard<std::mutex> held(lock);
    size_t taken = (bytes + kBlock - 1) / kBlock * kBlock;
    blocks[*out] = {device, taken};
    used[device] += taken;
    most_used[device] = std::max(most_used[device], used[device]);
    return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* at, cudaStream_t) {
    {
        std::lock_guard<std::mutex> held(lock);
        auto found = blocks.find(at);
        if (found != blocks.end()) {
            used[found->second.first] -= found->second.second;
            blocks.erase(found);
        }
    }
    return cudaFree(at);
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
    *pool = reinterpret_cast<cudaMemPool_t>(uintptr_t(device + 1));
    return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
    int device = int(reinterpret_cast<uintptr_t>(pool)) - 1;
    std::lock_guard<std::mutex> held(lock);
    bool highest = attribute == cudaMemPoolAttrUsedMemHigh || attribute == cudaMemPoolAttrReservedMemHigh;
    *static_cast<uint64_t*>(value) = highest ? most_used[device] : used[device];
    return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void*) {
    int device = int(reinterpret_cast<uintptr_t>(pool)) - 1;
    std::lock_guard<std::mutex> held(lock);
    if (attribute == cudaMemPoolAttrUsedMemHigh) most_used[device] = used[device];
    return cudaSuccess;
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
}
