/* What a CUDA driver does, in host memory, as late as its manual allows: copies are carried out when somebody waits for
   them, also those of cuMemcpyHtoD, which has read the host's memory when it returns, and maybe no more. A call is refused with the driver's own codes where a real one may: without a context, with memory or streams
   that it didn't give out, or while `fail_next` names it. Counts what is there. One GPU, one process, any threads; other
   processes' memory is its own, which a real one wouldn't open a handle of. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_HANDLE = 400 };

typedef struct Copy { void *target; const void *source; size_t size; struct Copy *next; int staged; } Copy;
typedef struct Stream { Copy *first, *last; uint64_t queued, done; struct Stream *next; } Stream;
typedef struct Event { Stream *stream; uint64_t place; struct Event *next; } Event;
typedef struct Block { char *begin; size_t size; int pinned; struct Block *next; } Block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Stream *streams, legacy; /* the stream of those who name none */
static Event *events;
static Block *blocks;
static int context_here, retained, opened, copies_in, copies_out, copies_within;
static __thread int current;
static __thread int pushed;
static char failing[64];
static int failing_code;

EXPORT int stand_in_retained(void) { return retained; }
EXPORT void stand_in_fail(const char *call, int code) { strncpy(failing, call, sizeof failing - 1); failing_code = code; }

#define COUNT(list, type, where) int n = 0; for (type *one = list; one; one = one->next) n += (where); return n
EXPORT int stand_in_streams(void) { COUNT(streams, Stream, 1); }
EXPORT int stand_in_events(void) { COUNT(events, Event, 1); }
EXPORT int stand_in_pinned(void) { COUNT(blocks, Block, one->pinned); }
EXPORT int stand_in_device(void) { COUNT(blocks, Block, !one->pinned); }
EXPORT int stand_in_opened(void) { return opened; }
EXPORT int stand_in_copies(const char *kind) { return !strcmp(kind, "in") ? copies_in : !strcmp(kind, "out") ? copies_out : copies_within; }

static int fails(const char *call) {
    if (strcmp(failing, call)) return 0;
    failing[0] = 0;
    return failing_code;
}

static int ready(const char *call) {
    int code = fails(call);
    return code ? code : current ? OK : INVALID_CONTEXT;
}

#define FIND(list, type, it) \
    static int known_##type(const void *it) { for (type *one = list; one; one = one->next) if (one == it) return 1; return 0; }
FIND(streams, Stream, it)
FIND(events, Event, it)

static int within(const void *at, size_t size, int pinned) {
    for (Block *one = blocks; one; one = one->next)
        if (one->pinned == pinned && (char *)at >= one->begin && (char *)at + size <= one->begin + one->size) return 1;
    return 0;
}

static void carry_out(Stream *stream, uint64_t place) {
    while (stream->done < place) {
        Copy *copy = stream->first;
        memcpy(copy->target, copy->source, copy->size);
        if (copy->staged) free((void *)copy->source);
        stream->first = copy->next;
        if (!stream->first) stream->last = NULL;
        free(copy);
        stream->done++;
    }
}

#define LOCKED(call, ...) \
    do { pthread_mutex_lock(&lock); int code = ready(call); if (!code) { __VA_ARGS__ } pthread_mutex_unlock(&lock); return code; } while (0)

EXPORT int cuInit(unsigned flags) { return fails("cuInit"); }
EXPORT int cuGetErrorName(int code, const char **name) {
    *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
          : code == INVALID_HANDLE ? "CUDA_ERROR_INVALID_HANDLE" : "CUDA_ERROR_OF_SOME_KIND";
    return 0;
}
EXPORT int cuDeviceGetCount(int *count) { *count = 1; return fails("cuDeviceGetCount"); }
EXPORT int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal == 0 ? OK : 101; }
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &context_here; retained++; return OK; }
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) { retained--; return OK; }
EXPORT int cuCtxSetCurrent(void *context) { current = context == &context_here; return fails("cuCtxSetCurrent"); }
EXPORT int cuCtxPushCurrent_v2(void *context) { pushed = current; current = context == &context_here; return OK; }
EXPORT int cuCtxPopCurrent_v2(void **context) { current = pushed; return OK; }
EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) { return ready(""); }

static int allocate(const char *call, void **address, size_t size, int pinned) {
    LOCKED(call, {
        Block *block = malloc(sizeof *block);
        *block = (Block){aligned_alloc(256, (size + 255) / 256 * 256), size, pinned, blocks};
        memset(block->begin, 0xA5, size);
        blocks = block;
        *address = block->begin;
    });
}

static int give_back(const char *call, const void *address, int pinned) {
    LOCKED(call, {
        Block **place = &blocks;
        while (*place && !((*place)->begin == address && (*place)->pinned == pinned)) place = &(*place)->next;
        Block *block = *place;
        carry_out(&legacy, legacy.queued);
        if (!block) code = INVALID_VALUE;
        else { *place = block->next; free(block->begin); free(block); }
    });
}

EXPORT int cuMemHostAlloc(void **address, size_t size, unsigned flags) { return allocate("cuMemHostAlloc", address, size, 1); }
EXPORT int cuMemFreeHost(void *address) { return give_back("cuMemFreeHost", address, 1); }
EXPORT int cuMemAlloc_v2(uint64_t *address, size_t size) { return allocate("cuMemAlloc", (void **)address, size, 0); }
EXPORT int cuMemFree_v2(uint64_t address) { return give_back("cuMemFree", (void *)address, 0); }

EXPORT int cuStreamCreate(void **stream, unsigned flags) {
    LOCKED("cuStreamCreate", { Stream *made = calloc(1, sizeof *made); made->next = streams; streams = made; *stream = made; });
}
EXPORT int cuEventCreate(void **event, unsigned flags) {
    LOCKED("cuEventCreate", { Event *made = calloc(1, sizeof *made); made->next = events; events = made; *event = made; });
}
#define DESTROY(name, type, list, last) \
    EXPORT int name(void *it) { LOCKED(#name, { \
        type **place = &list; while (*place && *place != it) place = &(*place)->next; \
        type *gone = *place; if (!gone) code = INVALID_HANDLE; else { *place = gone->next; last; free(gone); } }); }
DESTROY(cuStreamDestroy_v2, Stream, streams, carry_out(gone, gone->queued))
DESTROY(cuEventDestroy_v2, Event, events, (void)0)

EXPORT int cuStreamSynchronize(void *stream) {
    LOCKED("cuStreamSynchronize", {
        if (!stream) carry_out(&legacy, legacy.queued);
        else if (!known_Stream(stream)) code = INVALID_HANDLE; else carry_out(stream, ((Stream *)stream)->queued);
    });
}
EXPORT int cuEventRecord(void *event, void *stream) {
    LOCKED("cuEventRecord", {
        if (!known_Event(event) || !known_Stream(stream)) code = INVALID_HANDLE;
        else { ((Event *)event)->stream = stream; ((Event *)event)->place = ((Stream *)stream)->queued; }
    });
}
static int wait_for(void *it) {
    Event *event = it;
    if (!known_Event(event)) return INVALID_HANDLE;
    if (event->stream && known_Stream(event->stream)) carry_out(event->stream, event->place);
    return OK;
}
EXPORT int cuEventSynchronize(void *event) { LOCKED("cuEventSynchronize", { code = wait_for(event); }); }
EXPORT int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    LOCKED("cuStreamWaitEvent", { code = known_Stream(stream) ? wait_for(event) : INVALID_HANDLE; });
}

static void queue(Stream *stream, void *target, const void *source, size_t size, int staged) {
    Copy *made = malloc(sizeof *made);
    *made = (Copy){target, source, size, NULL, staged};
    if (stream->last) stream->last->next = made; else stream->first = made;
    stream->last = made;
    stream->queued++;
}

static int copy(const char *call, void *target, const void *source, size_t size, void *it, int target_pinned, int source_pinned) {
    LOCKED(call, {
        Stream *stream = it;
        /* A real driver takes host memory that isn't page-locked too, and then the copy isn't asynchronous. Memory that
           ONNX Runtime allocates for outputs isn't known here. */
        if (!known_Stream(stream)) code = INVALID_HANDLE;
        else if (target_pinned && !within(target, size, 1)) code = INVALID_VALUE;
        else if (source_pinned && !within(source, size, 1)) code = INVALID_VALUE;
        else if (!target_pinned && !within(target, size, 0)) code = INVALID_VALUE;
        else {
            *(source_pinned ? &copies_in : target_pinned ? &copies_out : &copies_within) += 1;
            queue(stream, target, source, size, 0);
        }
    });
}
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t size, void *stream) {
    return copy("cuMemcpyHtoDAsync", (void *)target, source, size, stream, 0, 1);
}
EXPORT int cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t size, void *stream) {
    return copy("cuMemcpyDtoHAsync", target, (const void *)source, size, stream, 1, 0);
}
EXPORT int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t size, void *stream) {
    return copy("cuMemcpyDtoDAsync", (void *)target, (const void *)source, size, stream, 0, 0);
}

EXPORT int cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t size) {
    LOCKED("cuMemcpyHtoD", {
        if (!within((void *)target, size, 0)) code = INVALID_VALUE;
        else queue(&legacy, (void *)target, memcpy(malloc(size + 1), source, size), size, 1);
    });
}
EXPORT int cuMemcpyDtoH_v2(void *target, uint64_t source, size_t size) {
    LOCKED("cuMemcpyDtoH", {
        carry_out(&legacy, legacy.queued);
        if (within((void *)source, size, 0)) memcpy(target, (void *)source, size); else code = INVALID_VALUE;
    });
}

typedef struct Handle { char reserved[64]; } Handle;
EXPORT int cuIpcGetMemHandle(Handle *handle, uint64_t address) {
    LOCKED("cuIpcGetMemHandle", { memset(handle, 7, sizeof *handle); memcpy(handle, &address, sizeof address); });
}
EXPORT int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags) {
    LOCKED("cuIpcOpenMemHandle", {
        memcpy(address, &handle, sizeof *address);
        if (flags != 1 || handle.reserved[63] != 7 || !within((void *)*address, 1, 0)) code = INVALID_VALUE; else opened++;
    });
}
EXPORT int cuIpcCloseMemHandle(uint64_t address) {
    LOCKED("cuIpcCloseMemHandle", { if (within((void *)address, 1, 0)) opened--; else code = INVALID_VALUE; });
}
EXPORT int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
    LOCKED("cuMemGetAddressRange", {
        code = INVALID_VALUE;
        for (Block *one = blocks; one; one = one->next)
            if (!one->pinned && (char *)address >= one->begin && (char *)address < one->begin + one->size) {
                *base = (uint64_t)one->begin; *size = one->size; code = OK;
            }
    });
}
