/* cuBLAS, as far as tests' models need it: libcublas.so.13. A handle has a workspace on the device, as a real one. When it
   is made, and when it goes, it waits for the whole device: a real one may. */
#include "device.h"
#include <stdio.h>
#include <stdlib.h>

enum { NOT_INITIALIZED = 1, ALLOC_FAILED = 3, EXECUTION_FAILED = 13, BLAS_NOT_SUPPORTED = 15, WORKSPACE = 4 << 20 };
int cudaMalloc(void **address, size_t size);
int cudaFree(void *address);
int cudaDeviceSynchronize(void);

typedef struct { Stream *stream; void *workspace; int mode; } Handle;
EXPORT int cublasCreate_v2(Handle **handle) {
    void *workspace;
    int code = cudaDeviceSynchronize();
    if (!code) code = cudaMalloc(&workspace, WORKSPACE);
    if (code) return code == OUT_OF_MEMORY ? ALLOC_FAILED : NOT_INITIALIZED;
    *handle = malloc(sizeof **handle);
    **handle = (Handle){NULL, workspace, 0};
    return OK;
}
EXPORT int cublasDestroy_v2(Handle *handle) {
    int code = cudaDeviceSynchronize() || cudaFree(handle->workspace);
    free(handle);
    return code ? EXECUTION_FAILED : OK;
}
EXPORT int cublasSetStream_v2(Handle *handle, Stream *stream) { handle->stream = stream; return OK; }
EXPORT int cublasGetMathMode(Handle *handle, int *mode) { *mode = handle->mode; return OK; }
EXPORT int cublasSetMathMode(Handle *handle, int mode) { handle->mode = mode; return OK; }
EXPORT const char *cublasGetStatusName(int code) {
    return code == ALLOC_FAILED ? "CUBLAS_STATUS_ALLOC_FAILED" : code == NOT_INITIALIZED ? "CUBLAS_STATUS_NOT_INITIALIZED"
         : code == EXECUTION_FAILED ? "CUBLAS_STATUS_EXECUTION_FAILED" : "CUBLAS_STATUS_NOT_SUPPORTED";
}
EXPORT const char *cublasGetStatusString(int code) { return cublasGetStatusName(code); }

/* Matrices lie in columns, one after another in steps of `ld` elements; those of a batch in steps of `stride`. */
typedef struct { const float *at; int transposed, ld; long long stride; } Matrix;
typedef struct { int rows, columns, inner, batch; float alpha, beta; Matrix a, b, c; } Gemm;

static const float *given(const Matrix *it, int number, long rows, long columns) {
    long last = it->transposed ? (rows - 1) * it->ld + columns : (columns - 1) * it->ld + rows;
    return gpu_at(it->at + number * it->stride, last * sizeof(float));
}
static int multiply(const Gemm *it, int number) {
    const float *a = given(&it->a, number, it->rows, it->inner), *b = given(&it->b, number, it->inner, it->columns);
    float *c = (float *)given(&it->c, number, it->rows, it->columns);
    if (!a || !b || !c) return ILLEGAL_ADDRESS;
    long a_row = it->a.transposed ? it->a.ld : 1, a_inner = it->a.transposed ? 1 : it->a.ld;
    long b_column = it->b.transposed ? 1 : it->b.ld, b_inner = it->b.transposed ? it->b.ld : 1;
    for (int column = 0; column < it->columns; column++) {
        float *out = c + (long)column * it->c.ld;
        for (int row = 0; row < it->rows; row++) out[row] = it->beta ? it->beta * out[row] : 0;
        for (int inner = 0; inner < it->inner; inner++) {
            float by = it->alpha * b[column * b_column + inner * b_inner];
            for (int row = 0; row < it->rows; row++) out[row] += by * a[row * a_row + inner * a_inner];
        }
    }
    return OK;
}
static int run_gemm(void *arguments) {
    Gemm *it = arguments;
    int code = OK;
    for (int number = 0; number < it->batch && !code; number++) code = multiply(it, number);
    return code;
}
static long at(const Matrix *it, long row, long column) {
    return it->transposed ? row * it->ld + column : column * it->ld + row;
}
static int run_add(void *arguments) {
    Gemm *it = arguments;
    const float *a = given(&it->a, 0, it->rows, it->columns);
    const float *b = it->beta ? given(&it->b, 0, it->rows, it->columns) : a;
    float *c = (float *)given(&it->c, 0, it->rows, it->columns);
    if (!a || !b || !c) return ILLEGAL_ADDRESS;
    for (long column = 0; column < it->columns; column++)
        for (long row = 0; row < it->rows; row++) {
            float other = it->beta ? it->beta * b[at(&it->b, row, column)] : 0;
            c[at(&it->c, row, column)] = it->alpha * a[at(&it->a, row, column)] + other;
        }
    return OK;
}
static int queue(Handle *handle, Operation *run, Gemm gemm) {
    int code = gpu_enter("cublasSgemm", FREELY);
    if (!code) code = gpu_compute(handle->stream, run, &gemm, sizeof gemm);
    return gpu_leave(code) ? EXECUTION_FAILED : OK;
}
EXPORT int cublasSgeam(
    Handle *handle, int ta, int tb, int m, int n, const float *alpha, const float *a, int lda, const float *beta,
    const float *b, int ldb, float *c, int ldc
) {
    return queue(handle, run_add, (Gemm){m, n, 0, 1, *alpha, *beta, {a, ta, lda}, {b, tb, ldb}, {c, 0, ldc}});
}
EXPORT int cublasSgemm_v2(
    Handle *handle, int ta, int tb, int m, int n, int k, const float *alpha, const float *a, int lda, const float *b,
    int ldb, const float *beta, float *c, int ldc
) {
    return queue(handle, run_gemm, (Gemm){m, n, k, 1, *alpha, *beta, {a, ta, lda}, {b, tb, ldb}, {c, 0, ldc}});
}
EXPORT int cublasSgemmStridedBatched(
    Handle *handle, int ta, int tb, int m, int n, int k, const float *alpha, const float *a, int lda, long long sa,
    const float *b, int ldb, long long sb, const float *beta, float *c, int ldc, long long sc, int batch
) {
    Gemm gemm = {m, n, k, batch, *alpha, *beta, {a, ta, lda, sa}, {b, tb, ldb, sb}, {c, 0, ldc, sc}};
    return queue(handle, run_gemm, gemm);
}

#define NOT_HERE(name) \
    EXPORT int name(void) { fprintf(stderr, "stand-in: no %s\n", #name); return BLAS_NOT_SUPPORTED; }
NOT_HERE(cublasDgeam) NOT_HERE(cublasDgemmBatched) NOT_HERE(cublasDgemmStridedBatched) NOT_HERE(cublasDgemm_v2)
NOT_HERE(cublasDgetrfBatched) NOT_HERE(cublasDgetriBatched) NOT_HERE(cublasGemmBatchedEx) NOT_HERE(cublasGemmEx)
NOT_HERE(cublasGemmStridedBatchedEx) NOT_HERE(cublasScopy_v2) NOT_HERE(cublasSgemmBatched)
NOT_HERE(cublasSgetrfBatched) NOT_HERE(cublasSgetriBatched) NOT_HERE(cublasSscal_v2)
