// cuDNN's backend API. By default one engine can do everything and needs no workspace. With
// STANDIN_CUDNN_WORKSPACES=1, the real cuDNN (9.8 or newer) answers, for a described device instead of a handle: which
// engines its heuristics choose and how much workspace they want. Nothing runs.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

extern "C" int cudaDeviceGetAttribute(int* value, int attribute, int device);

namespace {

// Values of cudnn_graph.h.
constexpr int kDescriptors = 15, kCharacters = 24;                        // cudnnBackendAttributeType_t
constexpr int kEngineHeuristics = 4, kDeviceProperties = 38;              // cudnnBackendDescriptorType_t
constexpr int kEngineResults = 202, kHeuristicsDevice = 204, kPlanHandle = 400, kPlanWorkspace = 402;
constexpr int kPlanDevice = 407, kGraphHandle = 800, kPropertiesJson = 2702;  // cudnnBackendAttributeName_t

bool asks() {
    static bool found = [] {
        const char* value = std::getenv("STANDIN_CUDNN_WORKSPACES");
        return value && *value == '1' && STANDIN_CUDNN >= 90800;
    }();
    return found;
}

template <class F>
F real(const char* name) {
    static void* library = dlopen(STANDIN_CUDNN_LIBRARY, RTLD_LAZY | RTLD_LOCAL | RTLD_DEEPBIND);
    return reinterpret_cast<F>(dlsym(library, name));
}

int make(int type, void** out) { return real<int (*)(int, void**)>("cudnnBackendCreateDescriptor")(type, out); }

int set(void* it, int attribute, int type, int64_t count, const void* values) {
    using Set = int (*)(void*, int, int, int64_t, const void*);
    return real<Set>("cudnnBackendSetAttribute")(it, attribute, type, count, values);
}

int finish(void* it) { return real<int (*)(void*)>("cudnnBackendFinalize")(it); }

int attribute(int which) {
    int value = 0;
    cudaDeviceGetAttribute(&value, which, 0);
    return value;
}

// A description of the device as cuDNN writes it; clocks and caches are those of T4, A100 and H100.
void* device() {
    static void* made = [] {
        const int major = attribute(75), minor = attribute(76);  // cudaDevAttrComputeCapabilityMajor, ...Minor
        const bool hopper = major >= 9, turing = major < 8;
        char json[1200];
        int size = std::snprintf(json, sizeof json,
            "{\"deviceVer\": %d, \"multiProcessorCount\": %d, \"maxSharedMemoryPerBlockOptin\": %d, "
            "\"maxThreadsPerSM\": %d, \"maxCtasPerSM\": %d, \"totalGlobalMem\": %lld, \"smClockRateKHz\": %d, "
            "\"memClockRateKHz\": %d, \"l2CacheSize\": %d, \"reservedSharedMemoryPerBlock\": %d, "
            "\"warpSize\": 32, \"maxSharedMemoryPerBlock\": 49152, \"maxRegistersPerSM\": 65536, "
            "\"maxThreadsPerBlock\": 1024, \"regsPerBlock\": 65536, \"maxBlockSize\": [1024, 1024, 64], "
            "\"maxGridSize\": [2147483647, 65535, 65535], \"supportCoopLaunch\": 1, \"pciDeviceId\": 0, "
            "\"isTccDriver\": 0, \"cudaDeviceId\": 0, \"driverVer\": 13000, \"deviceName\": \"stand-in\"}",
            100 * major + 10 * minor, attribute(16), attribute(97), attribute(39), attribute(106),
            hopper ? 85029158912LL : turing ? 15642329088LL : 42298834944LL,
            hopper ? 1980000 : turing ? 1590000 : 1410000, hopper ? 2619000 : turing ? 5001000 : 1215000,
            hopper ? 52428800 : turing ? 4194304 : 41943040, turing ? 0 : 1024);
        void* it = nullptr;
        int status = make(kDeviceProperties, &it);
        if (!status) status = set(it, kPropertiesJson, kCharacters, size, json);
        if (!status) status = finish(it);
        if (status) std::fprintf(stderr, "stand-in: cuDNN does not take the device (%d)\n", status);
        return it;
    }();
    return made;
}

std::mutex lock;
std::map<void*, int> types;

}  // namespace

extern "C" {

int cudnnBackendCreateDescriptor(int type, void** out) {
    if (!asks()) { *out = std::calloc(1, 256); return 0; }
    int status = make(type, out);
    std::lock_guard<std::mutex> held(lock);
    types[*out] = type;
    return status;
}

int cudnnBackendDestroyDescriptor(void* it) {
    if (!asks()) { std::free(it); return 0; }
    { std::lock_guard<std::mutex> held(lock); types.erase(it); }
    return real<int (*)(void*)>("cudnnBackendDestroyDescriptor")(it);
}

int cudnnBackendSetAttribute(void* it, int attribute, int type, int64_t count, const void* values) {
    if (!asks() || attribute == kGraphHandle) return 0;
    if (attribute == kPlanHandle) {
        void* properties = device();
        return set(it, kPlanDevice, kDescriptors, 1, &properties);
    }
    return set(it, attribute, type, count, values);
}

int cudnnBackendFinalize(void* it) {
    if (!asks()) return 0;
    int type;
    { std::lock_guard<std::mutex> held(lock); type = types[it]; }
    if (type == kEngineHeuristics) {
        void* properties = device();
        set(it, kHeuristicsDevice, kDescriptors, 1, &properties);
    }
    return finish(it);
}

int cudnnBackendGetAttribute(void* it, int attribute, int type, int64_t wanted, int64_t* count, void* out) {
    if (asks()) {
        using Get = int (*)(void*, int, int, int64_t, int64_t*, void*);
        return real<Get>("cudnnBackendGetAttribute")(it, attribute, type, wanted, count, out);
    }
    if (count) *count = attribute == kEngineResults || attribute == kPlanWorkspace;
    if (attribute == kPlanWorkspace && out && wanted) *static_cast<int64_t*>(out) = 0;
    return 0;
}

int cudnnBackendExecute(void*, void*, void*) { return 0; }
}
