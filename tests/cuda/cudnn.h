/* What both of cuDNN's interfaces share: handles, and tensors that lie row after row, NCHW. */
#pragma once
#include "device.h"

enum { DNN_NOT_INITIALIZED = 1001, DNN_BAD_PARAM = 2000, DNN_NOT_SUPPORTED = 3000, DNN_NO_MEMORY = 4004, DNN_FAILED = 5000 };
enum { FLOATS = 0, RANK = 4 }; /* the one data type, and the one number of dimensions: lines are planes one row high */

typedef struct { Stream *stream; void *memory; } Handle;
typedef struct { int64_t uid, rank, size[RANK], step[RANK]; int type; char is_virtual; } Tensor;

long tensor_count(const Tensor *it);
int tensor_known(const Tensor *it); /* DNN_NOT_SUPPORTED, and a line that says so, for all that isn't computed here */
long tensor_place(const Tensor *it, long i, const Tensor *of); /* where element `i` of `of` is in one that is spread */
const float *tensor_at(const Tensor *it, const void *address); /* NULL for what isn't the device's */

int dnn_refuse(const char *what, long number);
int dnn_queue(const char *call, Handle *handle, Operation *run, const void *arguments, size_t size);
