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

// The device as estimates describe it to cuDNN (estimate/libraries/cudnn/device.py).
void* device() {
    static void* made = [] {
        const char* json = std::getenv("STANDIN_CUDNN_DEVICE");
        void* it = nullptr;
        int status = make(kDeviceProperties, &it);
        if (!status) status = set(it, kPropertiesJson, kCharacters, json ? int64_t(std::strlen(json)) : 0, json);
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
