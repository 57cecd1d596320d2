/* A GPU that lies in the host's memory, for want of one, and what the CUDA libraries made here share: `device.c`. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* CUDA's own numbers, the same in driver and runtime. */
enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_FUNCTION = 98, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, LAUNCH_FAILURE = 719,
    NOT_SUPPORTED = 801, UNSUPPORTED = 900, INVALIDATED = 901, ISOLATION = 905, CAPTURED_EVENT = 907, WRONG_THREAD = 908
};
enum { ON_DEVICE, PINNED, FOREIGN }; /* memory: of the GPU, page-locked, of another process on the GPU */
enum { FREELY, NOT_IN_CAPTURES, NEVER_IN_CAPTURES }; /* calls: how they get on with graphs that are being captured */

typedef struct Stream Stream;
typedef struct Event Event;
typedef struct Graph Graph;
typedef int Operation(void *arguments); /* what a stream does in its turn; anything but OK loses the device */

/* `gpu_enter` takes the one lock, whatever it returns, and says whether the call may be made; `gpu_leave` releases it and
   returns its argument. Everything below is called in between. */
EXPORT int gpu_enter(const char *call, int captures);
EXPORT int gpu_enter_anyhow(const char *call); /* which is nothing to a context, nor to what befell it */
EXPORT int gpu_leave(int code);

/* Said by `stand_in_show`: device memory is the host's as well, and it is the CPU that computes in it, on no stream but
   when it is told to. So a stream waits for an event as soon as it is told to, and there is memory that isn't known here. */
extern int gpu_shown;

EXPORT int gpu_count(void);
EXPORT int gpu_busy(int device);
EXPORT int gpu_current(void);
EXPORT int gpu_retain(int device);
EXPORT void gpu_make_current(int device); /* -1 for none */
EXPORT void gpu_exchange_capture_mode(int *mode);

EXPORT int gpu_allocate(void **address, size_t size, int kind);
EXPORT int gpu_free(void *address, int kind);
EXPORT void gpu_memory(size_t *free, size_t *total);
EXPORT int gpu_kind(const void *address, int *device); /* -1 for memory that CUDA knows nothing of */
EXPORT int gpu_range(const void *address, void **begin, size_t *size);
EXPORT void *gpu_at(const void *address, size_t size); /* device memory as kernels see it; NULL for what isn't theirs */
EXPORT int gpu_share(const void *address, void *handle);
EXPORT int gpu_open(void **address, const void *handle);
EXPORT int gpu_close(void *address);

EXPORT int gpu_stream(Stream **stream, unsigned flags);
EXPORT int gpu_stream_end(Stream *stream);
EXPORT int gpu_synchronize(Stream *stream);
EXPORT int gpu_synchronize_all(void);
EXPORT int gpu_compute(Stream *stream, Operation *run, const void *arguments, size_t size); /* on its own device only */
EXPORT int gpu_call(Stream *stream, Operation *run, const void *arguments, size_t size); /* which takes no time */
EXPORT int gpu_copy(Stream *stream, void *target, const void *source, size_t size);
EXPORT int gpu_copy_now(void *target, const void *source, size_t size);
EXPORT int gpu_set(Stream *stream, void *target, int value, size_t size);

EXPORT int gpu_event(Event **event);
EXPORT int gpu_event_end(Event *event);
EXPORT int gpu_record(Event *event, Stream *stream);
EXPORT int gpu_wait(Stream *stream, Event *event);
EXPORT int gpu_event_synchronize(Event *event);

EXPORT int gpu_capture(Stream *stream, int mode);
EXPORT int gpu_captured(Stream *stream, Graph **graph);
EXPORT int gpu_capture_state(Stream *stream, int *state);
EXPORT int gpu_launch(Graph *graph, Stream *stream);
EXPORT void gpu_graph_keep(Graph *graph);
EXPORT void gpu_graph_drop(Graph *graph);
