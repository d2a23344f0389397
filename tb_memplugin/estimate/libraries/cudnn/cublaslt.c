// libcublasLt for a machine without a GPU. cuDNN opens it by name, and asks it which kernels multiply matrices: it
// knows some, and they want no workspace. Without an answer, cuDNN leaves out its engines of matrix products.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DONE(name) int name(void) { return 0; }
#define MAKES(name) int name(void** out) { *out = calloc(1, 512); return 0; }
#define FREES(name) int name(void* it) { free(it); return 0; }
#define DESCRIPTION(name) \
    MAKES(name##Create) FREES(name##Destroy) DONE(name##Init_internal) DONE(name##SetAttribute) DONE(name##GetAttribute)

#ifdef __cplusplus  // in the stand-in (dryrun/build.py)
extern "C" {
#endif

struct Result {  // cublasLtMatmulHeuristicResult_t
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
};

size_t cublasLtGetVersion(void) { return 130000; }
int cublasLtGetProperty(int which, int* value) { *value = which == 0 ? 13 : 0; return 0; }
MAKES(cublasLtCreate)
FREES(cublasLtDestroy)
DESCRIPTION(cublasLtMatmulDesc)
DESCRIPTION(cublasLtMatrixLayout)
DESCRIPTION(cublasLtMatmulPreference)
DESCRIPTION(cublasLtMatrixTransformDesc)
DONE(cublasLtMatmul)
DONE(cublasLtMatrixTransform)
int cublasLtMatmulAlgoGetHeuristic(
    void* handle, void* product, void* a, void* b, void* c, void* d, void* preference, int wanted,
    struct Result* results, int* count) {
    memset(results, 0, wanted * sizeof *results);
    for (int i = 0; i < wanted; i++) results[i].waves = 1;
    *count = wanted;
    return 0;
}

#ifdef __cplusplus
}
#endif
