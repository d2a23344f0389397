// libcuda for a machine without a GPU: what cuDNN opens by name before it compiles kernels. A kernel that is loaded
// is a pointer to nothing that runs. Without these, cuDNN leaves out the engines that it compiles.
#include <stdlib.h>

#define DONE(name) int name(void) { return 0; }
#define MAKES(name) int name(void** out) { *out = malloc(8); return 0; }

int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuGetExportTable(void) { return 801; }  // CUDA_ERROR_NOT_SUPPORTED
MAKES(cuKernelGetFunction) MAKES(cuLibraryGetKernel) MAKES(cuLibraryLoadData) MAKES(cuModuleGetFunction)
MAKES(cuModuleLoadData)
DONE(cuCtxGetCurrent) DONE(cuCtxGetDevice) DONE(cuCtxGetLimit) DONE(cuCtxPopCurrent) DONE(cuCtxPushCurrent)
DONE(cuDeviceGet) DONE(cuDeviceGetAttribute) DONE(cuDeviceGetCount)
DONE(cuDevicePrimaryCtxRelease) DONE(cuDevicePrimaryCtxReset) DONE(cuDevicePrimaryCtxRetain)
DONE(cuFuncGetAttribute) DONE(cuFuncSetAttribute) DONE(cuGetErrorName) DONE(cuGetErrorString)
DONE(cuGetProcAddress_v2) DONE(cuInit) DONE(cuKernelGetAttribute) DONE(cuKernelSetAttribute)
DONE(cuLaunchCooperativeKernel) DONE(cuLaunchKernel) DONE(cuLaunchKernelEx)
DONE(cuLibraryLoadFromFile) DONE(cuLibraryUnload)
DONE(cuLinkAddData) DONE(cuLinkComplete) DONE(cuLinkCreate) DONE(cuLinkDestroy) DONE(cuMemcpyDtoH_v2)
DONE(cuModuleGetGlobal_v2) DONE(cuModuleLoadFatBinary) DONE(cuModuleUnload)
DONE(cuOccupancyMaxPotentialClusterSize) DONE(cuStreamGetCtx) DONE(cuStreamSynchronize)
