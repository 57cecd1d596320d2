/* CUDA's driver: libcuda.so.1. */
#include "device.h"
#include "errors.h"
#include <stdio.h>
#include <string.h>

#define CALL(name, captures, ...) \
    do { int code = gpu_enter(name, captures); if (!code) { __VA_ARGS__; } return gpu_leave(code); } while (0)
#define CALL_ANYHOW(name, ...) do { int code = gpu_enter_anyhow(name); if (!code) { __VA_ARGS__; } return gpu_leave(code); } while (0)

static __thread int pushed[8], pushes;
static char contexts[8]; /* a context's address says whose it is */

EXPORT int cuInit(unsigned flags) { return gpu_leave(gpu_enter_anyhow("cuInit")); }
EXPORT int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
EXPORT int cuGetErrorName(int code, const char **name) {
    *name = error_of(code)->driver;
    return OK;
}
EXPORT int cuGetErrorString(int code, const char **text) { *text = error_of(code)->text; return OK; }

EXPORT int cuDeviceGetCount(int *number) { CALL_ANYHOW("cuDeviceGetCount", *number = gpu_count()); }
EXPORT int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < gpu_count() ? OK : INVALID_DEVICE;
}
EXPORT int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { memset(uuid, 0x10 + device, 16); return OK; }
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
    CALL_ANYHOW("cuDevicePrimaryCtxRetain", { *context = &contexts[device]; code = gpu_retain(device); });
}
void stand_in_release(int device);
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    CALL_ANYHOW("cuDevicePrimaryCtxRelease", stand_in_release(device));
}
static int number_of(void *context) { return context ? (char *)context - contexts : -1; }
EXPORT int cuCtxSetCurrent(void *context) {
    CALL_ANYHOW("cuCtxSetCurrent", gpu_make_current(number_of(context)));
}
EXPORT int cuCtxPushCurrent_v2(void *context) {
    pushed[pushes++ % 8] = gpu_current();
    gpu_make_current(number_of(context));
    return OK;
}
EXPORT int cuCtxPopCurrent_v2(void **context) { gpu_make_current(pushed[--pushes % 8]); return OK; }
EXPORT int cuCtxSynchronize(void) { CALL("cuCtxSynchronize", NEVER_IN_CAPTURES, code = gpu_synchronize_all()); }
EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) {
    CALL("cuThreadExchangeStreamCaptureMode", FREELY, gpu_exchange_capture_mode(mode));
}

EXPORT int cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    CALL("cuMemHostAlloc", NOT_IN_CAPTURES, code = gpu_allocate(address, size, PINNED));
}
EXPORT int cuMemFreeHost(void *address) { CALL("cuMemFreeHost", NOT_IN_CAPTURES, code = gpu_free(address, PINNED)); }
EXPORT int cuMemAlloc_v2(void **address, size_t size) {
    CALL("cuMemAlloc", NOT_IN_CAPTURES, code = gpu_allocate(address, size, ON_DEVICE));
}
EXPORT int cuMemFree_v2(void *address) { CALL("cuMemFree", NOT_IN_CAPTURES, code = gpu_free(address, ON_DEVICE)); }
EXPORT int cuMemGetInfo_v2(size_t *free, size_t *total) { CALL("cuMemGetInfo", FREELY, gpu_memory(free, total)); }
EXPORT int cuMemGetAddressRange_v2(void **base, size_t *size, void *address) {
    CALL("cuMemGetAddressRange", FREELY, code = gpu_range(address, base, size));
}
EXPORT int cuPointerGetAttribute(unsigned *data, int attribute, void *address) {
    CALL("cuPointerGetAttribute", FREELY, {
        int kind = gpu_kind(address, NULL);
        if (kind < 0 || attribute != 2) code = INVALID_VALUE; else *data = kind == PINNED ? 1 : 2;
    });
}

EXPORT int cuStreamCreate(Stream **made, unsigned flags) { CALL("cuStreamCreate", FREELY, code = gpu_stream(made, flags)); }
EXPORT int cuStreamDestroy_v2(Stream *stream) { CALL("cuStreamDestroy", FREELY, code = gpu_stream_end(stream)); }
EXPORT int cuStreamSynchronize(Stream *stream) { CALL("cuStreamSynchronize", FREELY, code = gpu_synchronize(stream)); }
EXPORT int cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
    CALL("cuStreamWaitEvent", FREELY, code = gpu_wait(stream, event));
}
EXPORT int cuEventCreate(Event **made, unsigned flags) { CALL("cuEventCreate", FREELY, code = gpu_event(made)); }
EXPORT int cuEventDestroy_v2(Event *event) { CALL("cuEventDestroy", FREELY, code = gpu_event_end(event)); }
EXPORT int cuEventRecord(Event *event, Stream *stream) { CALL("cuEventRecord", FREELY, code = gpu_record(event, stream)); }
EXPORT int cuEventSynchronize(Event *event) { CALL("cuEventSynchronize", FREELY, code = gpu_event_synchronize(event)); }

/* A real driver takes host memory that isn't page-locked, too, and then it isn't asynchronous: nothing here may do that. */
static int copies_in, copies_out, copies_within;
static int right(const void *memory, int on_host, int unknown) {
    int kind = gpu_kind(memory, NULL);
    return kind < 0 ? unknown : on_host ? kind == PINNED : kind != PINNED;
}
static int copy(Stream *stream, void *target, const void *source, size_t size, int to_host, int from_host) {
    if (!right(target, to_host, 0) || !right(source, from_host, gpu_shown && !from_host)) return INVALID_VALUE;
    *(from_host ? &copies_in : to_host ? &copies_out : &copies_within) += 1;
    return gpu_copy(stream, target, source, size);
}
EXPORT int stand_in_copies(const char *kind) {
    return !strcmp(kind, "in") ? copies_in : !strcmp(kind, "out") ? copies_out : copies_within;
}
EXPORT int cuMemcpyHtoDAsync_v2(void *target, const void *source, size_t size, Stream *stream) {
    CALL("cuMemcpyHtoDAsync", FREELY, code = copy(stream, target, source, size, 0, 1));
}
EXPORT int cuMemcpyDtoHAsync_v2(void *target, const void *source, size_t size, Stream *stream) {
    CALL("cuMemcpyDtoHAsync", FREELY, code = copy(stream, target, source, size, 1, 0));
}
EXPORT int cuMemcpyDtoDAsync_v2(void *target, const void *source, size_t size, Stream *stream) {
    CALL("cuMemcpyDtoDAsync", FREELY, code = copy(stream, target, source, size, 0, 0));
}
typedef struct {
    size_t x, y; unsigned memory; const void *host, *device, *array; size_t pitch;
} Side;
typedef struct { Side from, to; size_t width, height; } Lines;
EXPORT int cuMemcpy2DAsync_v2(const Lines *it, Stream *stream) {
    CALL("cuMemcpy2DAsync", FREELY, {
        if (it->from.memory != 2 || it->to.memory != 2 || it->from.pitch < it->width || it->to.pitch < it->width) code = INVALID_VALUE;
        for (size_t line = 0; line < it->height && !code; line++)
            code = copy(stream, (char *)it->to.device + line * it->to.pitch,
                        (const char *)it->from.device + line * it->from.pitch, it->width, 0, 0);
    });
}
EXPORT int cuMemsetD8Async(void *target, unsigned char value, size_t size, Stream *stream) {
    CALL("cuMemsetD8Async", FREELY, code = gpu_set(stream, target, value, size));
}
EXPORT int cuMemcpyHtoD_v2(void *target, const void *source, size_t size) {
    CALL("cuMemcpyHtoD", FREELY, code = gpu_at(target, size) ? gpu_copy_now(target, source, size) : INVALID_VALUE);
}
EXPORT int cuMemcpyDtoH_v2(void *target, const void *source, size_t size) {
    CALL("cuMemcpyDtoH", FREELY, code = gpu_at(source, size) ? gpu_copy_now(target, source, size) : INVALID_VALUE);
}

typedef struct { char bytes[64]; } Handle;
EXPORT int cuIpcGetMemHandle(Handle *handle, void *address) {
    CALL("cuIpcGetMemHandle", FREELY, code = gpu_share(address, handle));
}
EXPORT int cuIpcOpenMemHandle_v2(void **address, Handle handle, unsigned flags) {
    CALL("cuIpcOpenMemHandle", FREELY, code = flags == 1 ? gpu_open(address, &handle) : INVALID_VALUE);
}
EXPORT int cuIpcCloseMemHandle(void *address) { CALL("cuIpcCloseMemHandle", FREELY, code = gpu_close(address)); }
EXPORT int cuTensorMapEncodeTiled(void) { return NOT_SUPPORTED; }
