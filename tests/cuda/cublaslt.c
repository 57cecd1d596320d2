/* cuBLASLt, a handle and nothing else: libcublasLt.so.13. */
#include "device.h"
#include <stdio.h>

EXPORT int cublasLtCreate(void **handle) { static char made; *handle = &made; return 0; }
EXPORT int cublasLtDestroy(void *handle) { return 0; }
#define NOT_HERE(name) EXPORT int name(void) { fprintf(stderr, "stand-in: no %s\n", #name); return 15; }
NOT_HERE(cublasLtMatmul) NOT_HERE(cublasLtMatmulAlgoConfigSetAttribute) NOT_HERE(cublasLtMatmulAlgoGetHeuristic)
NOT_HERE(cublasLtMatmulAlgoInit) NOT_HERE(cublasLtMatmulDescCreate) NOT_HERE(cublasLtMatmulDescDestroy)
NOT_HERE(cublasLtMatmulDescSetAttribute) NOT_HERE(cublasLtMatmulPreferenceCreate)
NOT_HERE(cublasLtMatmulPreferenceDestroy) NOT_HERE(cublasLtMatmulPreferenceSetAttribute)
NOT_HERE(cublasLtMatrixLayoutCreate) NOT_HERE(cublasLtMatrixLayoutDestroy) NOT_HERE(cublasLtMatrixLayoutSetAttribute)
NOT_HERE(cublasLtMatrixTransform) NOT_HERE(cublasLtMatrixTransformDescCreate) NOT_HERE(cublasLtMatrixTransformDescDestroy)
