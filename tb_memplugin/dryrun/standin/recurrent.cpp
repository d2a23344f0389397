// Recurrent layers. The layout of the weights is cuDNN's. The sizes of the workspace and of the reserve are those of the
// rule that estimates have (values.py). Where the rule is tested, they are what cuDNN 9.20 answered: in a file that
// STANDIN_RECURRENT_SIZES names, and 0 for a layer that is not listed there.
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

extern "C" int cudaDeviceGetAttribute(int* value, int attribute, int device);

namespace {

struct RecurrentNet {
    int cell, biases, directions, input, hidden, projected, layers, element;
    int algorithm, input_mode, type, precision, mathematics;
    unsigned padded;
    bool drops;
};
struct RecurrentData { int type, layout, steps, sequences, features; std::vector<int> lengths; };
struct Shape { int rank; int sizes[3]; };

std::mutex lock;
std::map<void*, RecurrentNet> nets;
std::map<void*, RecurrentData> inputs;
std::map<void*, bool> dropouts;
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

// A call as it stands at the start of a line of recurrent_sizes.txt, in which its workspace and reserve follow.
std::string line_of(const RecurrentNet& net, const RecurrentData& data, int mode) {
    int major = 0, minor = 0, rows = 0;
    cudaDeviceGetAttribute(&major, 75, 0);  // cudaDevAttrComputeCapabilityMajor, ...Minor
    cudaDeviceGetAttribute(&minor, 76, 0);
    for (int length : data.lengths) rows += length;
    std::ostringstream line;
    line << 10 * major + minor << ' ' << mode << ' ' << net.algorithm << ' ' << net.cell << ' ' << net.biases << ' '
         << net.directions << ' ' << net.type << ' ' << net.precision << ' ' << net.mathematics << ' ' << net.input << ' '
         << net.hidden << ' ' << net.projected << ' ' << net.layers << ' ' << net.drops << ' ' << net.padded << ' '
         << data.layout << ' ' << data.steps << ' ' << data.sequences << ' ' << rows;
    return line.str();
}

struct Sizes { size_t work = 0, reserve = 0; };

void (*rule)(const char* call, size_t* sizes) = nullptr;

Sizes recorded(const std::string& wanted) {
    static const std::map<std::string, Sizes> all = [] {
        std::map<std::string, Sizes> found;
        const char* name = std::getenv("STANDIN_RECURRENT_SIZES");
        std::ifstream file(name ? name : "");
        for (std::string line; std::getline(file, line);) {
            size_t second = line.rfind(' '), first = line.rfind(' ', second - 1);
            if (line.empty() || line[0] == '#') continue;
            found[line.substr(0, first)] = {std::stoull(line.substr(first)), std::stoull(line.substr(second))};
        }
        return found;
    }();
    auto place = all.find(wanted);
    return place == all.end() ? Sizes() : place->second;
}

}  // namespace

extern "C" {

// From now on, ask what a call (line_of) takes: its workspace and reserve.
void standin_size_recurrent_layers(void (*asked)(const char*, size_t*)) { rule = asked; }

int cudnnGetRNNTempSpaceSizes(void*, void* it, int mode, void* data, size_t* work, size_t* reserve) {
    std::string call;
    {
        std::lock_guard<std::mutex> held(lock);
        call = line_of(nets[it], inputs[data], mode);
    }
    Sizes sizes;
    if (rule) rule(call.c_str(), &sizes.work);
    else sizes = recorded(call);
    if (work) *work = sizes.work;
    if (reserve) *reserve = sizes.reserve;
    return 0;
}
int cudnnSetDropoutDescriptor(void* it, void*, float share, void*, size_t, unsigned long long) {
    std::lock_guard<std::mutex> held(lock);
    dropouts[it] = share > 0;
    return 0;
}
int cudnnRestoreDropoutDescriptor(void* it, void* handle, float share, void* states, size_t bytes, unsigned long long seed) {
    return cudnnSetDropoutDescriptor(it, handle, share, states, bytes, seed);
}
int cudnnSetRNNDataDescriptor(void* it, int type, int layout, int steps, int sequences, int features, const int* lengths, void*) {
    std::lock_guard<std::mutex> held(lock);
    inputs[it] = {type, layout, steps, sequences, features, std::vector<int>(lengths, lengths + sequences)};
    return 0;
}
int cudnnSetRNNDescriptor_v8(void* it, int algorithm, int cell, int biases, int direction, int input_mode, int type,
                             int precision, int mathematics, int input, int hidden, int projected, int layers,
                             void* dropout, unsigned padded) {
    int element = type == 1 ? 8 : type == 2 || type == 9 ? 2 : 4;  // CUDNN_DATA_DOUBLE; HALF, BFLOAT16; FLOAT
    std::lock_guard<std::mutex> held(lock);
    nets[it] = {cell, biases, direction + 1, input, hidden, projected == hidden ? 0 : projected, layers, element,
                algorithm, input_mode, type, precision, mathematics, padded, dropouts[dropout]};
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
}
