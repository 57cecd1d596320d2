/* cuDNN, as far as convolutional models need it: libcudnn.so.9, with convolutions in `cudnn_graph.c`. Here is what is
   older than those graphs: a handle, biases, poolings, normalization. A handle has memory on the device, as a real one.
   When it is made, and when it goes, it waits for the whole device: a real one may. What can't be computed here is
   refused, by a line that names it. */
#include "cudnn.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cudaMalloc(void **address, size_t size);
int cudaFree(void *address);
int cudaDeviceSynchronize(void);
static __thread char last[64]; /* what was refused last on this thread */

int dnn_refuse(const char *what, long number) {
    snprintf(last, sizeof last, "no %s %ld", what, number);
    fprintf(stderr, "stand-in: %s\n", last);
    return DNN_NOT_SUPPORTED;
}
int dnn_queue(const char *call, Handle *handle, Operation *run, const void *arguments, size_t size) {
    int code = gpu_enter(call, FREELY);
    if (!code) code = gpu_compute(handle->stream, run, arguments, size);
    return gpu_leave(code) ? DNN_FAILED : OK;
}

EXPORT size_t cudnnGetVersion(void) { return 92800; }
EXPORT int cudnnCreate(Handle **handle) {
    enum { SOME = 1 << 20 };
    void *memory;
    int code = cudaDeviceSynchronize();
    if (!code) code = cudaMalloc(&memory, SOME);
    if (code) return code == OUT_OF_MEMORY ? DNN_NO_MEMORY : DNN_NOT_INITIALIZED;
    *handle = malloc(sizeof **handle);
    **handle = (Handle){NULL, memory};
    return OK;
}
EXPORT int cudnnDestroy(Handle *handle) {
    int code = cudaDeviceSynchronize() || cudaFree(handle->memory);
    free(handle);
    return code ? DNN_FAILED : OK;
}
EXPORT int cudnnSetStream(Handle *handle, Stream *stream) { handle->stream = stream; return OK; }
EXPORT int cudnnGetStream(Handle *handle, Stream **stream) { *stream = handle->stream; return OK; }
EXPORT const char *cudnnGetErrorString(int code) {
    return code == OK ? "CUDNN_STATUS_SUCCESS" : code == DNN_NOT_INITIALIZED ? "CUDNN_STATUS_NOT_INITIALIZED"
         : code == DNN_BAD_PARAM ? "CUDNN_STATUS_BAD_PARAM" : code == DNN_FAILED ? "CUDNN_STATUS_EXECUTION_FAILED"
         : code == DNN_NO_MEMORY ? "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED" : "CUDNN_STATUS_NOT_SUPPORTED";
}
EXPORT void cudnnGetLastErrorString(char *text, size_t size) { snprintf(text, size, "%s", last); }

/* ---- tensors */

long tensor_count(const Tensor *it) {
    long count = 1;
    for (int dim = 0; dim < it->rank; dim++) count *= it->size[dim];
    return count;
}
int tensor_known(const Tensor *it) {
    if (it->type != FLOATS) return dnn_refuse("cuDNN tensor of data type", it->type);
    if (it->rank != RANK) return dnn_refuse("cuDNN tensor whose rank is", it->rank);
    long step = 1;
    for (int dim = RANK - 1; dim >= 0; step *= it->size[dim--]) /* those between graphs' operations lie as we like */
        if (!it->is_virtual && it->size[dim] > 1 && it->step[dim] != step) return dnn_refuse("cuDNN tensor with a step of", it->step[dim]);
    return OK;
}
long tensor_place(const Tensor *it, long i, const Tensor *of) {
    long found = 0, step = 1;
    for (int dim = RANK - 1; dim >= 0; i /= of->size[dim], step *= it->size[dim--])
        if (it->size[dim] > 1) found += i % of->size[dim] * step;
    return found;
}
const float *tensor_at(const Tensor *it, const void *address) { return gpu_at(address, tensor_count(it) * sizeof(float)); }

EXPORT int cudnnCreateTensorDescriptor(Tensor **tensor) { *tensor = calloc(1, sizeof **tensor); return OK; }
EXPORT int cudnnDestroyTensorDescriptor(Tensor *tensor) { free(tensor); return OK; }
EXPORT int cudnnSetTensorNdDescriptor(Tensor *tensor, int type, int rank, const int *sizes, const int *steps) {
    *tensor = (Tensor){.type = type, .rank = rank};
    for (int dim = 0; dim < rank && dim < RANK; dim++) { tensor->size[dim] = sizes[dim]; tensor->step[dim] = steps[dim]; }
    return OK;
}
EXPORT int cudnnDeriveBNTensorDescriptor(Tensor *derived, const Tensor *x, int mode) {
    long channels = x->size[1];
    *derived = (Tensor){.rank = RANK, .size = {1, channels, 1, 1}, .step = {channels, 1, 1, 1}, .type = x->type};
    return mode == 1 ? OK : dnn_refuse("cuDNN normalization of mode", mode);
}
/* ONNX Runtime makes some for each convolution, and uses none: it is all in the graph. */
EXPORT int cudnnCreateFilterDescriptor(Tensor **filter) { return cudnnCreateTensorDescriptor(filter); }
EXPORT int cudnnDestroyFilterDescriptor(Tensor *filter) { free(filter); return OK; }
EXPORT int cudnnSetFilterNdDescriptor(Tensor *filter, int type, int layout, int rank, const int *sizes) { return OK; }
EXPORT int cudnnCreateActivationDescriptor(void **made) { *made = calloc(1, 1); return OK; }
EXPORT int cudnnDestroyActivationDescriptor(void *it) { free(it); return OK; }
EXPORT int cudnnSetActivationDescriptor(void *it, int mode, int nan, double coefficient) { return OK; }

/* ---- biases */

typedef struct { Tensor a, c; const void *a_at; void *c_at; float alpha, beta; } Addition;
static int run_addition(void *arguments) {
    Addition *it = arguments;
    const float *a = tensor_at(&it->a, it->a_at);
    float *c = (float *)tensor_at(&it->c, it->c_at);
    if (!a || !c) return ILLEGAL_ADDRESS;
    long count = tensor_count(&it->c);
    for (long i = 0; i < count; i++) c[i] = it->alpha * a[tensor_place(&it->a, i, &it->c)] + it->beta * c[i];
    return OK;
}
EXPORT int cudnnAddTensor(
    Handle *handle, const float *alpha, const Tensor *a, const void *a_at, const float *beta, const Tensor *c, void *c_at
) {
    int code = tensor_known(a) ? DNN_NOT_SUPPORTED : tensor_known(c);
    Addition it = {*a, *c, a_at, c_at, *alpha, *beta};
    return code ? code : dnn_queue(__func__, handle, run_addition, &it, sizeof it);
}

/* ---- sums */

enum { SUM = 0 };
typedef struct { Tensor a, c; const void *a_at; void *c_at; } Sum;
static int run_sum(void *arguments) {
    Sum *it = arguments;
    const float *a = tensor_at(&it->a, it->a_at);
    float *c = (float *)tensor_at(&it->c, it->c_at);
    if (!a || !c) return ILLEGAL_ADDRESS;
    memset(c, 0, tensor_count(&it->c) * sizeof(float));
    for (long i = 0; i < tensor_count(&it->a); i++) c[tensor_place(&it->c, i, &it->a)] += a[i];
    return OK;
}
EXPORT int cudnnCreateReduceTensorDescriptor(int **reduce) { *reduce = calloc(1, sizeof **reduce); return OK; }
EXPORT int cudnnDestroyReduceTensorDescriptor(int *reduce) { free(reduce); return OK; }
EXPORT int cudnnSetReduceTensorDescriptor(int *reduce, int how, int type, int nan, int indices, int index_type) {
    *reduce = how;
    return how == SUM ? OK : dnn_refuse("cuDNN reduction of kind", how);
}
EXPORT int cudnnGetReductionIndicesSize(Handle *handle, const int *reduce, const Tensor *a, const Tensor *c, size_t *size) {
    *size = 0;
    return OK;
}
EXPORT int cudnnGetReductionWorkspaceSize(Handle *handle, const int *reduce, const Tensor *a, const Tensor *c, size_t *size) {
    *size = 256;
    return OK;
}
static Tensor with_all_dims(const Tensor *it) {
    Tensor found = *it;
    while (found.rank < RANK) found.size[found.rank] = found.step[found.rank] = 1, found.rank++;
    return found;
}
EXPORT int cudnnReduceTensor(
    Handle *handle, const int *reduce, void *indices, size_t indices_size, void *workspace, size_t workspace_size,
    const float *alpha, const Tensor *a, const void *a_at, const float *beta, const Tensor *c, void *c_at
) {
    if (*alpha != 1 || *beta != 0) return dnn_refuse("cuDNN reduction that is added, by", *beta);
    Sum it = {with_all_dims(a), with_all_dims(c), a_at, c_at};
    if (tensor_known(&it.a) || tensor_known(&it.c)) return DNN_NOT_SUPPORTED;
    return dnn_queue(__func__, handle, run_sum, &it, sizeof it);
}

/* ---- poolings */

enum { LARGEST, MEAN_OF_ALL, MEAN_OF_THOSE_THERE, LARGEST_AGAIN };
typedef struct { int mode, rank, window[2], padding[2], stride[2]; } Pooling;
EXPORT int cudnnCreatePoolingDescriptor(Pooling **pooling) { *pooling = calloc(1, sizeof **pooling); return OK; }
EXPORT int cudnnDestroyPoolingDescriptor(Pooling *pooling) { free(pooling); return OK; }
EXPORT int cudnnSetPoolingNdDescriptor(
    Pooling *pooling, int mode, int nan, int rank, const int *window, const int *padding, const int *stride
) {
    if (rank != 2) return dnn_refuse("cuDNN pooling whose rank is", rank);
    if (mode < LARGEST || mode > LARGEST_AGAIN) return dnn_refuse("cuDNN pooling of mode", mode);
    *pooling = (Pooling){mode, rank, {window[0], window[1]}, {padding[0], padding[1]}, {stride[0], stride[1]}};
    return OK;
}

typedef struct { Pooling how; Tensor x, y; const void *x_at; void *y_at; } Pool;
static float pooled(const Pool *it, const float *plane, long row, long column) {
    const Pooling *how = &it->how;
    long height = it->x.size[2], width = it->x.size[3], there = 0;
    long top = row * how->stride[0] - how->padding[0], left = column * how->stride[1] - how->padding[1];
    float most = -INFINITY, sum = 0;
    for (long y = top < 0 ? 0 : top; y < top + how->window[0] && y < height; y++)
        for (long x = left < 0 ? 0 : left; x < left + how->window[1] && x < width; x++, there++) {
            most = fmaxf(most, plane[y * width + x]);
            sum += plane[y * width + x];
        }
    long all = (long)how->window[0] * how->window[1];
    return how->mode == MEAN_OF_ALL ? sum / all : how->mode == MEAN_OF_THOSE_THERE ? sum / there : most;
}
static int run_pool(void *arguments) {
    Pool *it = arguments;
    const float *x = tensor_at(&it->x, it->x_at);
    float *y = (float *)tensor_at(&it->y, it->y_at);
    if (!x || !y) return ILLEGAL_ADDRESS;
    long height = it->y.size[2], width = it->y.size[3];
    for (long plane = it->x.size[0] * it->x.size[1]; plane; plane--, x += it->x.size[2] * it->x.size[3])
        for (long i = 0; i < height * width; i++) *y++ = pooled(it, x, i / width, i % width);
    return OK;
}
EXPORT int cudnnPoolingForward(
    Handle *handle, const Pooling *how, const float *alpha, const Tensor *x, const void *x_at, const float *beta,
    const Tensor *y, void *y_at
) {
    if (*alpha != 1 || *beta != 0) return dnn_refuse("cuDNN pooling that is added, by", *beta);
    if (tensor_known(x) || tensor_known(y)) return DNN_NOT_SUPPORTED;
    if (x->size[0] != y->size[0] || x->size[1] != y->size[1]) return DNN_BAD_PARAM;
    Pool it = {*how, *x, *y, x_at, y_at};
    return dnn_queue(__func__, handle, run_pool, &it, sizeof it);
}

/* ---- normalization by what was learned */

typedef struct { Tensor x, by; const void *x_at, *scale_at, *bias_at, *mean_at, *variance_at; void *y_at; double epsilon; } Norm;
static int run_norm(void *arguments) {
    Norm *it = arguments;
    const float *x = tensor_at(&it->x, it->x_at), *scale = tensor_at(&it->by, it->scale_at);
    const float *bias = tensor_at(&it->by, it->bias_at), *mean = tensor_at(&it->by, it->mean_at);
    const float *variance = tensor_at(&it->by, it->variance_at);
    float *y = (float *)tensor_at(&it->x, it->y_at);
    if (!x || !scale || !bias || !mean || !variance || !y) return ILLEGAL_ADDRESS;
    long count = tensor_count(&it->x), plane = it->x.size[2] * it->x.size[3];
    for (long i = 0; i < count; i++) {
        long channel = i / plane % it->x.size[1];
        y[i] = scale[channel] * (x[i] - mean[channel]) / sqrt(variance[channel] + it->epsilon) + bias[channel];
    }
    return OK;
}
EXPORT int cudnnBatchNormalizationForwardInference(
    Handle *handle, int mode, const float *alpha, const float *beta, const Tensor *x, const void *x_at, const Tensor *y,
    void *y_at, const Tensor *by, const void *scale, const void *bias, const void *mean, const void *variance, double epsilon
) {
    if (mode != 1) return dnn_refuse("cuDNN normalization of mode", mode);
    if (*alpha != 1 || *beta != 0) return dnn_refuse("cuDNN normalization that is added, by", *beta);
    if (tensor_known(x) || tensor_known(y) || tensor_known(by)) return DNN_NOT_SUPPORTED;
    Norm it = {*x, *by, x_at, scale, bias, mean, variance, y_at, epsilon};
    return dnn_queue(__func__, handle, run_norm, &it, sizeof it);
}

/* ONNX Runtime looks for all of these before it makes a handle. */
#define NOT_HERE(name) \
    EXPORT int name(void) { fprintf(stderr, "stand-in: no %s\n", #name); return DNN_NOT_SUPPORTED; }
NOT_HERE(cudnnActivationForward) NOT_HERE(cudnnBatchNormalizationForwardTraining)
NOT_HERE(cudnnConvolutionBiasActivationForward) NOT_HERE(cudnnConvolutionForward)
NOT_HERE(cudnnCreateConvolutionDescriptor)
NOT_HERE(cudnnCreateDropoutDescriptor) NOT_HERE(cudnnCreateLRNDescriptor) NOT_HERE(cudnnCreateRNNDataDescriptor)
NOT_HERE(cudnnCreateRNNDescriptor)
NOT_HERE(cudnnDestroyConvolutionDescriptor)
NOT_HERE(cudnnDestroyDropoutDescriptor) NOT_HERE(cudnnDestroyLRNDescriptor) NOT_HERE(cudnnDestroyRNNDataDescriptor)
NOT_HERE(cudnnDestroyRNNDescriptor) NOT_HERE(cudnnDropoutGetStatesSize)
NOT_HERE(cudnnFindConvolutionForwardAlgorithmEx) NOT_HERE(cudnnGetConvolutionForwardAlgorithm_v7)
NOT_HERE(cudnnGetConvolutionForwardWorkspaceSize) NOT_HERE(cudnnGetRNNTempSpaceSizes) NOT_HERE(cudnnGetRNNWeightParams)
NOT_HERE(cudnnGetTensorNdDescriptor)
NOT_HERE(cudnnLRNCrossChannelForward) NOT_HERE(cudnnRNNForward)
NOT_HERE(cudnnSetConvolutionGroupCount) NOT_HERE(cudnnSetConvolutionMathType)
NOT_HERE(cudnnSetConvolutionNdDescriptor) NOT_HERE(cudnnSetDropoutDescriptor)
NOT_HERE(cudnnSetLRNDescriptor) NOT_HERE(cudnnSetRNNDataDescriptor) NOT_HERE(cudnnSetRNNDescriptor_v8)
NOT_HERE(cudnnSoftmaxForward)
