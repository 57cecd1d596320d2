/* CUDA's runtime library, as far as ONNX Runtime's CUDA provider links to it: libcudart.so.13. */
#include "errors.h"
#include "kernels.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread int last; /* what went wrong last on this thread */

static int done(int code) { if (code) last = code; return code; }
static int set_device(int device) {
    if (device < 0 || device >= gpu_count()) return INVALID_DEVICE;
    gpu_make_current(device);
    return gpu_retain(device);
}
/* Unlike the driver, the runtime makes the context that it needs. */
static int enter(const char *call, int captures) {
    int code = gpu_enter(call, captures);
    if (code != INVALID_CONTEXT) return code;
    code = set_device(0);
    gpu_leave(code);
    return gpu_enter(call, captures);
}
#define CALL(captures, ...) \
    do { int code = enter(__func__, captures); if (!code) { __VA_ARGS__; } return done(gpu_leave(code)); } while (0)

EXPORT int cudaGetLastError(void) { int code = last; last = OK; return code; }
EXPORT int cudaPeekAtLastError(void) { return last; }
EXPORT const char *cudaGetErrorName(int code) { return error_of(code)->runtime; }
EXPORT const char *cudaGetErrorString(int code) { return error_of(code)->text; }
EXPORT int cudaDriverGetVersion(int *version) { *version = 13000; return OK; }
EXPORT int cudaRuntimeGetVersion(int *version) { *version = 13000; return OK; }
EXPORT int cudaGetDeviceCount(int *count) { *count = gpu_count(); return OK; }
EXPORT int cudaSetDevice(int device) {
    int code = gpu_enter_anyhow(__func__);
    if (!code && device != gpu_current()) code = set_device(device);
    return done(gpu_leave(code));
}
EXPORT int cudaGetDevice(int *device) { *device = gpu_current() < 0 ? 0 : gpu_current(); return OK; }
EXPORT int cudaDeviceSynchronize(void) { CALL(NEVER_IN_CAPTURES, code = gpu_synchronize_all()); }

/* An H100's figures, where somebody reads them. */
typedef struct {
    char name[256], uuid[16], luid[8]; unsigned luid_mask; size_t memory, shared_per_block; int registers, warp; size_t pitch;
    int threads, block[3], grid[3]; size_t constant; int major, minor; size_t alignment, pitch_alignment; int processors;
    int others[200]; /* 808 bytes to CUDA 13's 1008 */
} Properties;
EXPORT int cudaGetDeviceProperties(Properties *properties, int device) {
    CALL(FREELY, {
        memset(properties, 0, 1008);
        size_t free;
        strcpy(properties->name, "Stand-in");
        memset(properties->uuid, 0x10 + device, 16);
        gpu_memory(&free, &properties->memory);
        properties->shared_per_block = 49152; properties->registers = 65536; properties->warp = 32;
        properties->pitch = 2147483647; properties->threads = 1024; properties->constant = 65536;
        for (int i = 0; i < 3; i++) properties->block[i] = i < 2 ? 1024 : 64;
        properties->grid[0] = 2147483647; properties->grid[1] = properties->grid[2] = 65535;
        properties->major = 9; properties->alignment = 512; properties->pitch_alignment = 32; properties->processors = 132;
    });
}
EXPORT int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    static const struct { int attribute, value; } KNOWN[] = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152}, {10, 32}, {12, 65536},
        {16, 132}, {39, 2048}, {75, 9}, {76, 0}, {81, 233472}, {97, 232448}, {115, 1},
    };
    *value = 0;
    for (size_t i = 0; i < sizeof KNOWN / sizeof *KNOWN; i++) if (KNOWN[i].attribute == attribute) *value = KNOWN[i].value;
    return OK;
}
EXPORT int cudaGetDriverEntryPointByVersion(
    const char *symbol, void **function, unsigned version, unsigned long long flags, int *result
) {
    *function = NULL;
    if (result) *result = 1;
    return done(NOT_FOUND);
}

EXPORT int cudaMalloc(void **address, size_t size) {
    CALL(NOT_IN_CAPTURES, code = gpu_allocate(address, size, ON_DEVICE));
}
EXPORT int cudaFree(void *address) { CALL(NOT_IN_CAPTURES, code = address ? gpu_free(address, ON_DEVICE) : OK); }
EXPORT int cudaMallocHost(void **address, size_t size) {
    CALL(NOT_IN_CAPTURES, code = gpu_allocate(address, size, PINNED));
}
EXPORT int cudaHostAlloc(void **address, size_t size, unsigned flags) {
    CALL(NOT_IN_CAPTURES, code = gpu_allocate(address, size, PINNED));
}
EXPORT int cudaFreeHost(void *address) { CALL(NOT_IN_CAPTURES, code = address ? gpu_free(address, PINNED) : OK); }
EXPORT int cudaMemGetInfo(size_t *free, size_t *total) { CALL(FREELY, gpu_memory(free, total)); }
typedef struct { int type, device; void *on_device, *on_host; long reserved[8]; } Attributes;
EXPORT int cudaPointerGetAttributes(Attributes *attributes, const void *address) {
    CALL(FREELY, {
        int device = 0;
        int kind = gpu_kind(address, &device);
        void *known = kind < 0 ? NULL : (void *)address;
        *attributes = (Attributes){!known ? 0 : kind == PINNED ? 1 : 2, device, known, kind == PINNED ? known : NULL};
    });
}
EXPORT int cudaIpcGetMemHandle(void *handle, const void *address) { CALL(FREELY, code = gpu_share(address, handle)); }
EXPORT int cudaMemPoolCreate(void **pool, const void *properties) { return done(NOT_SUPPORTED); }
EXPORT int cudaMemPoolDestroy(void *pool) { return OK; }
EXPORT int cudaMemPoolGetAttribute(void *pool, int attribute, void *value) { return done(NOT_SUPPORTED); }
EXPORT int cudaMemPoolSetAttribute(void *pool, int attribute, void *value) { return done(NOT_SUPPORTED); }
EXPORT int cudaMemPoolTrimTo(void *pool, size_t size) { return OK; }
EXPORT int cudaMallocFromPoolAsync(void **address, size_t size, void *pool, Stream *stream) {
    return done(NOT_SUPPORTED);
}
EXPORT int cudaFreeAsync(void *address, Stream *stream) { return done(NOT_SUPPORTED); }

EXPORT int cudaStreamCreate(Stream **stream) { CALL(FREELY, code = gpu_stream(stream, 0)); }
EXPORT int cudaStreamCreateWithFlags(Stream **stream, unsigned flags) {
    CALL(FREELY, code = gpu_stream(stream, flags));
}
EXPORT int cudaStreamDestroy(Stream *stream) { CALL(FREELY, code = gpu_stream_end(stream)); }
EXPORT int cudaStreamSynchronize(Stream *stream) { CALL(FREELY, code = gpu_synchronize(stream)); }
EXPORT int cudaStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
    CALL(FREELY, code = gpu_wait(stream, event));
}
EXPORT int cudaEventCreate(Event **event) { CALL(FREELY, code = gpu_event(event)); }
EXPORT int cudaEventCreateWithFlags(Event **event, unsigned flags) { CALL(FREELY, code = gpu_event(event)); }
EXPORT int cudaEventDestroy(Event *event) { CALL(FREELY, code = gpu_event_end(event)); }
EXPORT int cudaEventRecord(Event *event, Stream *stream) { CALL(FREELY, code = gpu_record(event, stream)); }
EXPORT int cudaEventRecordWithFlags(Event *event, Stream *stream, unsigned flags) {
    CALL(FREELY, code = gpu_record(event, stream));
}
EXPORT int cudaEventSynchronize(Event *event) { CALL(FREELY, code = gpu_event_synchronize(event)); }
EXPORT int cudaEventElapsedTime(float *ms, Event *start, Event *end) { *ms = 1; return OK; }

EXPORT int cudaMemcpy(void *target, const void *source, size_t size, int kind) {
    CALL(FREELY, code = gpu_copy_now(target, source, size));
}
EXPORT int cudaMemcpyAsync(void *target, const void *source, size_t size, int kind, Stream *stream) {
    CALL(FREELY, code = gpu_copy(stream, target, source, size));
}
EXPORT int cudaMemcpy2DAsync(
    char *target, size_t target_step, const char *source, size_t source_step, size_t width, size_t rows, int kind, Stream *stream
) {
    CALL(FREELY, for (size_t i = 0; i < rows && !code; i++) {
        code = gpu_copy(stream, target + i * target_step, source + i * source_step, width);
    });
}
EXPORT int cudaMemset(void *target, int value, size_t size) { CALL(FREELY, code = gpu_set(NULL, target, value, size)); }
EXPORT int cudaMemsetAsync(void *target, int value, size_t size, Stream *stream) {
    CALL(FREELY, code = gpu_set(stream, target, value, size));
}
EXPORT int cudaMemcpyFromSymbol(void *target, const void *symbol, size_t size, size_t offset, int kind) {
    return done(NOT_FOUND);
}

EXPORT int cudaStreamBeginCapture(Stream *stream, int mode) { CALL(FREELY, code = gpu_capture(stream, mode)); }
EXPORT int cudaStreamEndCapture(Stream *stream, Graph **graph) { CALL(FREELY, code = gpu_captured(stream, graph)); }
EXPORT int cudaStreamIsCapturing(Stream *stream, int *state) { CALL(FREELY, code = gpu_capture_state(stream, state)); }
EXPORT int cudaGraphInstantiate(Graph **made, Graph *graph, unsigned long long flags) {
    CALL(FREELY, gpu_graph_keep(*made = graph));
}
EXPORT int cudaGraphLaunch(Graph *graph, Stream *stream) { CALL(FREELY, code = gpu_launch(graph, stream)); }
EXPORT int cudaGraphDestroy(Graph *graph) { CALL(FREELY, gpu_graph_drop(graph)); }
EXPORT int cudaGraphExecDestroy(Graph *graph) { CALL(FREELY, gpu_graph_drop(graph)); }

typedef struct { void (*call)(void *); void *data; } HostCall;
static int run_host_call(void *arguments) { HostCall *it = arguments; it->call(it->data); return OK; }
EXPORT int cudaLaunchHostFunc(Stream *stream, void (*call)(void *), void *data) {
    HostCall it = {call, data};
    CALL(FREELY, code = gpu_call(stream, run_host_call, &it, sizeof it));
}

/* ---- kernels: compilers have them registered by a function of the host's, by which they are launched */

typedef struct { const void *function; const char *name; } Registered;
static Registered *registered;
static size_t known, room, sorted;

EXPORT void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {}
EXPORT void __cudaUnregisterFatBinary(void **handle) {}
EXPORT void __cudaRegisterVar(void **handle, char *variable, char *address, const char *name, int a, size_t b, int c, int d) {}
EXPORT void __cudaRegisterFunction(
    void **handle, const char *function, char *address, const char *name, int limit, void *a, void *b, void *c, void *d, int *e
) {
    if (known == room) registered = realloc(registered, (room = room ? 2 * room : 1024) * sizeof *registered);
    registered[known++] = (Registered){function, name};
}
static int compare(const void *a, const void *b) {
    const char *one = ((const Registered *)a)->function, *other = ((const Registered *)b)->function;
    return (one > other) - (one < other);
}
static const char *name_of(const void *function) {
    if (sorted != known) qsort(registered, sorted = known, sizeof *registered, compare);
    Registered wanted = {function, NULL}, *found = bsearch(&wanted, registered, known, sizeof wanted, compare);
    return found ? found->name : "that was never registered";
}

typedef struct { const Kernel *kernel; Size grid; _Alignas(16) char values[MOST_ARGUMENTS][LARGEST_ARGUMENT]; } Launch;
static int run_kernel(void *arguments) {
    Launch *launch = arguments;
    void *each[MOST_ARGUMENTS];
    for (int i = 0; i < MOST_ARGUMENTS; i++) each[i] = launch->values[i];
    return launch->kernel->run(each, launch->grid);
}
static int launch(const void *function, Size grid, void **arguments, Stream *stream) {
    Launch made = {kernel_named(name_of(function)), grid};
    if (!made.kernel) {
        fprintf(stderr, "stand-in: no kernel %s\n", name_of(function));
        return INVALID_FUNCTION;
    }
    for (int i = 0; i < made.kernel->count; i++) memcpy(made.values[i], arguments[i], made.kernel->sizes[i]);
    return gpu_compute(stream, run_kernel, &made, sizeof made);
}
EXPORT int cudaLaunchKernel(const void *function, Size grid, Size block, void **arguments, size_t shared, Stream *stream) {
    CALL(FREELY, code = launch(function, grid, arguments, stream));
}
EXPORT int cudaLaunchCooperativeKernel(
    const void *function, Size grid, Size block, void **arguments, size_t shared, Stream *stream
) {
    CALL(FREELY, code = launch(function, grid, arguments, stream));
}
EXPORT int __cudaGetKernel(const void **kernel, const void *function) { *kernel = function; return OK; }
EXPORT int __cudaLaunchKernel(const void *kernel, Size grid, Size block, void **arguments, size_t shared, Stream *stream) {
    CALL(FREELY, code = launch(kernel, grid, arguments, stream));
}
typedef struct { Size grid, block; size_t shared; Stream *stream; void *attributes; unsigned count; } Config;
EXPORT int cudaLaunchKernelExC(const Config *config, const void *function, void **arguments) {
    CALL(FREELY, code = launch(function, config->grid, arguments, config->stream));
}
static __thread Config configured;
EXPORT unsigned __cudaPushCallConfiguration(Size grid, Size block, size_t shared, Stream *stream) {
    configured = (Config){grid, block, shared, stream, NULL, 0};
    return OK;
}
EXPORT int __cudaPopCallConfiguration(Size *grid, Size *block, size_t *shared, Stream **stream) {
    *grid = configured.grid; *block = configured.block; *shared = configured.shared; *stream = configured.stream;
    return OK;
}
typedef struct { size_t shared, constant, local; int threads, registers, ptx, binary, others[9]; } FunctionAttributes;
EXPORT int cudaFuncGetAttributes(FunctionAttributes *attributes, const void *function) {
    *attributes = (FunctionAttributes){.threads = 1024, .registers = 32, .ptx = 90, .binary = 90};
    return OK;
}
EXPORT int cudaFuncSetAttribute(const void *function, int attribute, int value) { return OK; }
EXPORT int cudaKernelSetAttributeForDevice(const void *kernel, int attribute, int value, int device) { return OK; }
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int size, size_t shared, unsigned flags
) {
    *blocks = 2;
    return OK;
}
EXPORT int cudaLibraryLoadData(void) { return done(NOT_SUPPORTED); }
EXPORT int cudaLibraryGetKernel(void) { return done(NOT_SUPPORTED); }
EXPORT int cudaLibraryUnload(void) { return OK; }
