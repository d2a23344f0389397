// What PyTorch calls of NVIDIA's libraries and what has to answer more than "done". The rest: build.py.
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

void* handle() { return std::calloc(1, 256); }

long plans = 0, solvers = 0, sparse = 0;  // of cuFFT; handles of cuSOLVER and cuSPARSE: workspaces are not known

}  // namespace

#define SAYS_ZERO(name, ...) \
    int name(__VA_ARGS__, size_t* bytes) { *bytes = 0; return 0; }

extern "C" {

// cuBLAS; cuBLASLt is estimate/libraries/cudnn/cublaslt.c.
int cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }

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
SAYS_ZERO(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, void*, int, int, void*, void*, void*, void*, void*)
SAYS_ZERO(cudnnGetBatchNormalizationBackwardExWorkspaceSize, void*, int, int, void*, void*, void*, void*, void*, void*, void*)
SAYS_ZERO(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, void*, int, int, void*, void*)
SAYS_ZERO(cudnnDropoutGetStatesSize, void*)

// cuFFT: the workspace of every plan is 0.
int cufftXtMakePlanMany(
    int, int, long long*, long long*, long long, long long, int, long long*, long long, long long, int, long long,
    size_t* workspace, int
) {
    *workspace = 0;
    plans++;
    return 0;
}
long standin_fourier_plans() { return plans; }

// cuSOLVER and cuSPARSE: workspaces are 0 (build.py).
int cusolverDnCreate(void** out) { *out = handle(); solvers++; return 0; }
int cusparseCreate(void** out) { *out = handle(); sparse++; return 0; }
const char* cusparseGetErrorString(int) { return "not in the stand-in"; }
long standin_solvers() { return solvers; }
long standin_sparse() { return sparse; }

// CUPTI: agrees to everything and records nothing.
int cuptiGetVersion(uint32_t* version) { *version = 130000; return 0; }
int cuptiGetResultString(int, const char** out) { *out = "not in the stand-in"; return 0; }
int cuptiActivityGetNextRecord(uint8_t*, size_t, void**) { return 12; }  // CUPTI_ERROR_MAX_LIMIT_REACHED
int cuptiActivityGetNumDroppedRecords(void*, uint32_t, size_t* dropped) { *dropped = 0; return 0; }
int cuptiSubscribe(void** out, void*, void*) { *out = handle(); return 0; }
int cuptiGetCallbackName(int, uint32_t, const char** out) { *out = "unknown"; return 0; }

// What transformer-engine's core library asks of the driver: to compile its kernels, and to launch nothing.
int standin_cuCtxSetCurrent(void*) { return 0; }
int standin_cuDevicePrimaryCtxRetain(void** context, int) { *context = reinterpret_cast<void*>(1); return 0; }
int standin_cuDevicePrimaryCtxRelease(int) { return 0; }
int standin_cuModuleLoadDataEx(void** module, const void*, unsigned, void*, void**) { *module = std::malloc(8); return 0; }
int standin_cuModuleUnload(void* module) { std::free(module); return 0; }
int standin_cuModuleGetFunction(void** function, void*, const char*) { *function = std::malloc(8); return 0; }
int standin_cuFuncSetAttribute(void*, int, int) { return 0; }
int standin_cuFuncSetCacheConfig(void*, int) { return 0; }
int standin_cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void*, int, unsigned long) { *count = 1; return 0; }
int standin_cuTensorMapEncodeTiled() { return 0; }
int standin_cuLaunchKernel() { return 0; }
int standin_cuLaunchCooperativeKernel() { return 0; }
}
