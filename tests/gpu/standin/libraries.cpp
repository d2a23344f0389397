// What PyTorch calls of NVIDIA's libraries and what has to answer more than "done". The rest: build.py.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace {

void* handle() { return std::calloc(1, 256); }

// One engine that can do everything and needs no workspace.
constexpr int kEngineResults = 202, kPlanWorkspace = 402;  // CUDNN_ATTR_ENGINEHEUR_RESULTS, ..._WORKSPACE_SIZE

struct RecurrentNet { int cell, biases, directions, input, hidden, projected, layers, element; };
struct Shape { int rank; int sizes[3]; };

std::mutex lock;
std::map<void*, RecurrentNet> nets;
std::map<void*, Shape> shapes;

int gates(const RecurrentNet& net) { return net.cell == 2 ? 4 : net.cell == 3 ? 3 : 1; }

int out_features(const RecurrentNet& net) { return net.projected ? net.projected : net.hidden; }

int in_features(const RecurrentNet& net, int layer) {
    return layer < net.directions ? net.input : out_features(net) * net.directions;
}

// Elements of one layer's matrices (both, and the projection) or biases.
size_t matrices(const RecurrentNet& net, int layer) {
    size_t each = size_t(net.hidden) * size_t(in_features(net, layer) + out_features(net));
    bool projects = net.projected && net.projected != net.hidden;
    return size_t(gates(net)) * each + (projects ? size_t(net.projected) * size_t(net.hidden) : 0);
}
size_t bias_elements(const RecurrentNet& net) { return net.biases ? size_t(2 * gates(net)) * size_t(net.hidden) : 0; }

size_t weight_elements(const RecurrentNet& net) {
    size_t all = 0;
    for (int layer = 0; layer < net.layers * net.directions; ++layer) all += matrices(net, layer) + bias_elements(net);
    return all;
}

}  // namespace

#define SAYS_ZERO(name, ...) \
    int name(__VA_ARGS__, size_t* bytes) { *bytes = 0; return 0; }

extern "C" {

// cuBLAS, cuBLASLt.
int cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }
size_t cublasLtGetVersion() { return 130000; }
int cublasLtMatmulDescCreate(void** out, int, int) { *out = handle(); return 0; }
int cublasLtMatrixLayoutCreate(void** out, int, uint64_t, uint64_t, int64_t) { *out = handle(); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* count) {
    std::memset(results, 0, 64);
    *count = 1;
    return 0;
}

// cuDNN: versions are those that PyTorch was built against (build.py).
const char* cudnnGetErrorString(int) { return "not in the stand-in"; }
void cudnnGetLastErrorString(char* out, size_t size) { if (size) *out = 0; }
size_t cudnnGetVersion() { return STANDIN_CUDNN; }
size_t cudnnGetCudartVersion() { return STANDIN_CUDA * 10; }
int cudnnGetProperty(int which, int* value) {
    *value = which == 0 ? STANDIN_CUDNN / 10000 : which == 1 ? STANDIN_CUDNN / 100 % 100 : STANDIN_CUDNN % 100;
    return 0;
}
int cudnnGetStream(void*, void** out) { *out = nullptr; return 0; }
int cudnnBackendCreateDescriptor(int, void** out) { *out = handle(); return 0; }
int cudnnBackendDestroyDescriptor(void* it) { std::free(it); return 0; }
int cudnnBackendGetAttribute(void*, int attribute, int, int64_t wanted, int64_t* count, void* out) {
    if (count) *count = attribute == kEngineResults || attribute == kPlanWorkspace;
    if (attribute == kPlanWorkspace && out && wanted) *static_cast<int64_t*>(out) = 0;
    return 0;
}
SAYS_ZERO(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, void*, int, int, void*, void*, void*, void*, void*)
SAYS_ZERO(cudnnGetBatchNormalizationBackwardExWorkspaceSize, void*, int, int, void*, void*, void*, void*, void*, void*, void*)
SAYS_ZERO(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, void*, int, int, void*, void*)
SAYS_ZERO(cudnnDropoutGetStatesSize, void*)
int cudnnGetRNNTempSpaceSizes(void*, void*, int, void*, size_t* work, size_t* reserve) {
    if (work) *work = 0;
    if (reserve) *reserve = 0;
    return 0;
}
int cudnnSetRNNDescriptor_v8(void* it, int, int cell, int biases, int direction, int, int type, int, int, int input,
                             int hidden, int projected, int layers, void*, unsigned) {
    int element = type == 1 ? 8 : type == 2 || type == 9 ? 2 : 4;  // CUDNN_DATA_DOUBLE; HALF, BFLOAT16; FLOAT
    std::lock_guard<std::mutex> held(lock);
    nets[it] = {cell, biases, direction + 1, input, hidden, projected == hidden ? 0 : projected, layers, element};
    return 0;
}
int cudnnGetRNNWeightSpaceSize(void*, void* it, size_t* bytes) {
    std::lock_guard<std::mutex> held(lock);
    *bytes = weight_elements(nets[it]) * size_t(nets[it].element);
    return 0;
}
// All matrices lie before all biases; those of one layer lie one after another, input before recurrent.
int cudnnGetRNNWeightParams(void*, void* it, int32_t layer, size_t, const void* space, int32_t linear, void* matrix_desc,
                            void** matrix, void* bias_desc, void** bias) {
    std::lock_guard<std::mutex> held(lock);
    const RecurrentNet& net = nets[it];
    const int count = gates(net), hidden = net.hidden, out = out_features(net);
    size_t before = 0, before_bias = 0;
    for (int other = 0; other < net.layers * net.directions; ++other) before_bias += matrices(net, other);
    for (int other = 0; other < layer; ++other) before += matrices(net, other);
    before_bias += bias_elements(net) * size_t(layer) + size_t(linear) * size_t(hidden);
    int columns = linear < count ? in_features(net, layer) : out;
    int rows = linear < 2 * count ? hidden : out;
    if (linear < count) before += size_t(linear) * size_t(hidden) * size_t(columns);
    else before += size_t(count) * size_t(hidden) * size_t(in_features(net, layer)) +
                   size_t(linear - count) * size_t(hidden) * size_t(out);
    if (linear == 2 * count) columns = hidden;
    const char* start = static_cast<const char*>(space);
    if (matrix) *matrix = const_cast<char*>(start + before * size_t(net.element));
    if (bias) *bias = net.biases && linear < 2 * count ? const_cast<char*>(start + before_bias * size_t(net.element)) : nullptr;
    shapes[matrix_desc] = {3, {1, rows, columns}};
    shapes[bias_desc] = {3, {1, hidden, 1}};
    return 0;
}
int cudnnGetTensorNdDescriptor(void* it, int wanted, int* type, int* rank, int* sizes, int* strides) {
    std::lock_guard<std::mutex> held(lock);
    const Shape& shape = shapes[it];
    *type = 0;
    *rank = shape.rank;
    for (int i = 0; i < shape.rank && i < wanted; ++i) sizes[i] = shape.sizes[i], strides[i] = 1;
    return 0;
}

// CUPTI: agrees to everything and records nothing.
int cuptiGetVersion(uint32_t* version) { *version = 130000; return 0; }
int cuptiGetResultString(int, const char** out) { *out = "not in the stand-in"; return 0; }
int cuptiActivityGetNextRecord(uint8_t*, size_t, void**) { return 12; }  // CUPTI_ERROR_MAX_LIMIT_REACHED
int cuptiActivityGetNumDroppedRecords(void*, uint32_t, size_t* dropped) { *dropped = 0; return 0; }
int cuptiSubscribe(void** out, void*, void*) { *out = handle(); return 0; }
int cuptiGetCallbackName(int, uint32_t, const char** out) { *out = "unknown"; return 0; }
}
