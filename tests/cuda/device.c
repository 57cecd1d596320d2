/* Memory, streams, events and graphs. What is queued is done as late as CUDA's manual allows, when somebody waits for it,
   or, with STAND_IN_SEED, at times and in an order as random as the manual allows. The host can't touch device memory
   where it is said to lie, unless `stand_in_show`. A call is refused with CUDA's own codes where a real one may: without
   a context, with memory or streams that weren't given out, during captures, while `stand_in_fail` names it, and for
   ever once the device is lost: something has touched memory that isn't there, or the file STAND_IN_LOST has appeared.
   While there is a file STAND_IN_HANG, whoever waits does so for ever; with STAND_IN_HANG_LOCKED=1 he keeps the one lock,
   so that all other calls wait as well. Both files may have the number of the GPU in them that is meant, 0 otherwise.
   There are STAND_IN_GPUS of STAND_IN_MEMORY bytes each.

   With STAND_IN_KERNEL_US they keep time: each kernel takes so long, one after the other, and copies go at 25 GB/s beside
   them, one each way; who waits sleeps. With STAND_IN_IDLE kernels take time and compute nothing. Processes with the same
   file STAND_IN_CLOCK have the same GPUs as far as time goes. */
#define _GNU_SOURCE
#include "device.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef struct Op { Operation *run; struct Op *next; int computes; _Alignas(16) char arguments[]; } Op;
typedef struct Queue { Op *first, *last; } Queue;
struct Graph { Queue queue; int64_t takes_ns; int users; };
typedef struct Capture { Graph *graph; int mode, broken; pthread_t thread; struct Capture *next; } Capture;
struct Stream {
    uint64_t id, queued, done; /* operations so far */
    int64_t ends_ns; /* when the last of them will have ended */
    Queue queue; Capture *capture; int device, blocking; Stream *next;
};
typedef struct Point { uint64_t stream, place; int64_t ends_ns; } Point; /* reached when so many operations are done */
struct Event { Point point; Capture *capture; int device; Event *next; };
typedef struct Block {
    char *begin, *real; /* where it is said to lie, and where it does */
    size_t size, offset; int kind, device; struct Block *next;
} Block;
typedef struct Clock { int64_t free_ns[4], busy_ns; } Clock; /* when each engine is free, and how long the first has worked */
typedef struct Device {
    int file, retained; char *begin, *real; Stream *legacy; int64_t told_ns, told_busy_ns;
    int broken; /* what every call says since it is lost */
} Device;

enum { DEVICES = 8, GRAIN = 512, PAGE = 4096, BYTES_PER_NS = 25 };
enum { COMPUTES, COPIES_IN, COPIES_OUT, WAITS }; /* engines, and none */
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static Device devices[DEVICES];
static Stream *streams;
static Event *events;
static Block *blocks; /* device memory in the order of `offset` */
static Capture *captures;
static uint64_t ids;
static int opened;
int gpu_shown;
static __thread int current = -1, capture_mode;
static char failing[64];
static int failing_code;
static volatile int hangs; /* somebody, who keeps the lock */

static size_t setting(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}
int gpu_count(void) { return setting("STAND_IN_GPUS", 1); }
static size_t capacity(void) { return setting("STAND_IN_MEMORY", (size_t)1 << 30) / PAGE * PAGE; }

static char *hidden(size_t size, char *real) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *made = gpu_shown ? real : mmap(NULL, size, PROT_NONE, flags, -1, 0);
    if (made == MAP_FAILED) abort();
    return made;
}

static Device *device_of(int number) {
    Device *device = &devices[number];
    if (device->real) return device;
    device->file = memfd_create("stand-in GPU", MFD_CLOEXEC);
    if (device->file < 0 || ftruncate(device->file, capacity())) abort();
    device->real = mmap(NULL, capacity(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, device->file, 0);
    if (device->real == MAP_FAILED) abort();
    device->begin = hidden(capacity(), device->real);
    return device;
}

/* ---- time */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}
static int64_t kernel_ns(void) {
    static int64_t known = -1;
    if (known < 0) known = 1000 * setting("STAND_IN_KERNEL_US", 0);
    return known;
}
/* Let others call meanwhile. */
static void sleep_until(int64_t end_ns) {
    if (!kernel_ns()) return;
    struct timespec end = {end_ns / 1000000000, end_ns % 1000000000};
    pthread_mutex_unlock(&lock);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL)) {}
    pthread_mutex_lock(&lock);
}
static int64_t later(int64_t one, int64_t other) { return one > other ? one : other; }
static Clock *clock_of(int number) {
    static Clock alone[DEVICES], *clocks;
    const char *path = getenv("STAND_IN_CLOCK");
    if (clocks || !path) return (clocks ? clocks : alone) + number;
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof alone)) abort();
    clocks = mmap(NULL, sizeof alone, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (clocks == MAP_FAILED) abort();
    close(file);
    return clocks + number;
}
static void take_time(Stream *stream, int engine, int64_t ns) {
    if (!kernel_ns()) return;
    Clock *clock = clock_of(stream->device);
    int64_t begin = later(later(now_ns(), stream->ends_ns), engine == WAITS ? 0 : clock->free_ns[engine]);
    stream->ends_ns = begin + ns;
    if (engine != WAITS) clock->free_ns[engine] = begin + ns;
    if (engine == COMPUTES) __atomic_fetch_add(&clock->busy_ns, ns, __ATOMIC_RELAXED);
}
/* The share of the time since it was asked last in which kernels ran, in percent; 50 of a GPU that keeps no time. */
int gpu_busy(int number) {
    Device *device = &devices[number];
    int64_t now = now_ns(), passed = now - device->told_ns, all_ns = clock_of(number)->busy_ns;
    int64_t busy = all_ns - device->told_busy_ns;
    device->told_ns = now;
    device->told_busy_ns = all_ns;
    return !kernel_ns() ? 50 : busy > passed ? 100 : 100 * busy / passed;
}

/* ---- calls */

/* Whether a test has made the file that this variable names, for the current GPU. */
static int told_by(const char *variable) {
    const char *path = getenv(variable);
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    char text[8] = "";
    int number = read(file, text, sizeof text - 1) > 0 ? atoi(text) : 0;
    close(file);
    return number == current;
}
static int lost(void) {
    Device *device = &devices[current];
    if (!device->broken && told_by("STAND_IN_LOST")) device->broken = LAUNCH_FAILURE;
    return device->broken;
}
static void hang(void) {
    int locked = setting("STAND_IN_HANG_LOCKED", 0);
    while (told_by("STAND_IN_HANG")) {
        hangs = locked;
        if (!locked) pthread_mutex_unlock(&lock);
        usleep(10000);
        if (!locked) pthread_mutex_lock(&lock);
    }
    hangs = 0;
}

/* Whether a call that may disturb captures fails, and breaks them (cuThreadExchangeStreamCaptureMode). */
static int disturbs(int call) {
    int code = OK;
    for (Capture *one = captures; one; one = one->next) {
        int ours = pthread_equal(one->thread, pthread_self()) && one->mode != 2 && capture_mode != 2;
        int anybodys = one->mode == 0 && capture_mode == 0;
        if (call == NEVER_IN_CAPTURES || ours || anybodys) { one->broken = 1; code = UNSUPPORTED; }
    }
    return code;
}

int gpu_enter_anyhow(const char *call) {
    pthread_mutex_lock(&lock);
    if (strcmp(failing, call)) return OK;
    failing[0] = 0;
    return failing_code;
}
int gpu_enter(const char *call, int in_captures) {
    int code = gpu_enter_anyhow(call);
    if (code) return code;
    if (current < 0) return INVALID_CONTEXT;
    int broken = devices[current].broken;
    return broken ? broken : in_captures == FREELY ? OK : disturbs(in_captures);
}
int gpu_leave(int code) { pthread_mutex_unlock(&lock); return code; }
int gpu_current(void) { return current; }
void gpu_make_current(int device) { current = device; }
int gpu_retain(int device) { device_of(device)->retained++; return devices[device].broken; }
void gpu_exchange_capture_mode(int *mode) { int before = capture_mode; capture_mode = *mode; *mode = before; }

/* ---- memory */

static Block *block_at(const void *address, size_t size) {
    for (Block *one = blocks; one; one = one->next)
        if ((char *)address >= one->begin && (char *)address + size <= one->begin + one->size) return one;
    return NULL;
}
int gpu_kind(const void *address, int *device) {
    Block *found = block_at(address, 1);
    if (found && device) *device = found->device;
    return found ? found->kind : -1;
}
int gpu_range(const void *address, void **begin, size_t *size) {
    Block *found = block_at(address, 1);
    if (!found || found->kind == PINNED) return NOT_FOUND;
    *begin = found->begin;
    *size = found->size;
    return OK;
}
static char *real(Block *block, const void *address) { return block->real + ((char *)address - block->begin); }
void *gpu_at(const void *address, size_t size) {
    Block *found = block_at(address, size);
    return found && found->kind != PINNED && found->device == current ? real(found, address) : NULL;
}

static size_t whole(size_t size, size_t grain) { return (size + grain - 1) / grain * grain; }
void gpu_memory(size_t *free, size_t *total) {
    *total = *free = capacity();
    for (Block *one = blocks; one; one = one->next)
        if (one->kind == ON_DEVICE && one->device == current) *free -= whole(one->size, GRAIN);
}

static Block *insert(Block **place, Block block) {
    Block *made = malloc(sizeof *made);
    *made = block;
    made->next = *place;
    return *place = made;
}
static Block *allocate_on_device(size_t size) { /* in the first gap */
    Device *device = device_of(current);
    size_t offset = 0;
    Block **place = &blocks;
    for (; *place; place = &(*place)->next) {
        Block *other = *place;
        if (other->kind != ON_DEVICE || other->device != current) continue;
        if (other->offset >= offset + size) break;
        offset = whole(other->offset + other->size, GRAIN);
    }
    if (size > capacity() || offset > capacity() - size) return NULL;
    return insert(place, (Block){device->begin + offset, device->real + offset, size, offset, ON_DEVICE, current});
}
int gpu_allocate(void **address, size_t size, int kind) {
    Block *block = NULL;
    if (!size) return INVALID_VALUE;
    if (kind == ON_DEVICE) block = allocate_on_device(size);
    else {
        char *memory = aligned_alloc(GRAIN, whole(size, GRAIN));
        if (memory) block = insert(&blocks, (Block){memory, memory, size, 0, PINNED, current});
    }
    if (!block) return OUT_OF_MEMORY;
    memset(block->real, 0xA5, size < 1 << 20 ? size : 1 << 20);
    *address = block->begin;
    return OK;
}

static void erase(Block *block) {
    if (block->kind == PINNED) { free(block->real); return; }
    char *page = (char *)((uintptr_t)block->real / PAGE * PAGE);
    size_t within = block->real - page;
    if (block->kind == FOREIGN) {
        munmap(page, block->size + within);
        if (block->begin != block->real) munmap(block->begin - within, block->size + within);
        return;
    }
    memset(block->real, 0x5A, block->size < PAGE ? block->size : PAGE);
    size_t from = whole(block->offset, PAGE), to = (block->offset + block->size) / PAGE * PAGE;
    int flags = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    if (to > from && fallocate(devices[block->device].file, flags, from, to - from)) abort();
}
/* Waits for nothing, as no manual says so: what is still to be done with the memory loses the device. */
int gpu_free(void *address, int kind) {
    Block **place = &blocks;
    while (*place && ((*place)->begin != address || (*place)->kind != kind)) place = &(*place)->next;
    Block *block = *place;
    if (!block) return INVALID_VALUE;
    *place = block->next;
    erase(block);
    free(block);
    return OK;
}

/* Between processes: whose memory, by process and file, and which part of it. */
typedef struct Handle { int process, file; uint64_t address, offset, size; char mark[32]; } Handle;
_Static_assert(sizeof(Handle) == 64, "as large as CUDA's");
int gpu_share(const void *address, void *handle) {
    Block *found = block_at(address, 1);
    if (!found || found->kind != ON_DEVICE) return INVALID_VALUE;
    Handle made = {getpid(), devices[found->device].file, (uint64_t)found->begin, found->offset, found->size, {0}};
    memset(made.mark, 7, sizeof made.mark);
    memcpy(handle, &made, sizeof made);
    return OK;
}
static int open_foreign(void **address, const Handle *handle) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->process, handle->file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return INVALID_VALUE;
    size_t within = handle->offset % PAGE, size = handle->size + within;
    char *there = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, handle->offset - within);
    close(file);
    if (there == MAP_FAILED) return INVALID_VALUE;
    Block block = {hidden(size, there) + within, there + within, handle->size, 0, FOREIGN, current};
    *address = insert(&blocks, block)->begin;
    return OK;
}
int gpu_open(void **address, const void *raw) {
    const Handle *handle = raw;
    int code = OK;
    if (handle->mark[31] != 7) return INVALID_VALUE;
    /* A real driver opens no handle of its own process. Tests within one process do. */
    if (handle->process != getpid()) code = open_foreign(address, handle);
    else if (block_at((void *)handle->address, 1)) *address = (void *)handle->address;
    else code = INVALID_VALUE;
    opened += !code;
    return code;
}
int gpu_close(void *address) {
    int kind = gpu_kind(address, NULL), code = OK;
    if (kind == FOREIGN) code = gpu_free(address, FOREIGN); else if (kind != ON_DEVICE) code = INVALID_VALUE;
    opened -= !code;
    return code;
}

/* ---- streams */

static int known_stream(const Stream *it) {
    for (Stream *one = streams; one; one = one->next) if (one == it) return 1;
    return 0;
}
static Stream *made_stream(int blocking) {
    Stream *made = calloc(1, sizeof *made);
    *made = (Stream){.device = current, .blocking = blocking, .id = ++ids, .next = streams};
    return streams = made;
}
static Stream *stream_of(Stream *it) {
    if ((uintptr_t)it > 2) return known_stream(it) ? it : NULL;
    Device *device = device_of(current); /* nobody, or a number by which CUDA calls its default streams */
    return device->legacy ? device->legacy : (device->legacy = made_stream(1));
}
static Stream *behind(Point point) { /* the stream that hasn't reached it, if there is one */
    for (Stream *one = streams; one; one = one->next) if (one->id == point.stream && one->done < point.place) return one;
    return NULL;
}

static void append(Queue *queue, Operation *run, const void *arguments, size_t size, int computes) {
    Op *op = malloc(sizeof *op + size);
    *op = (Op){run, NULL, computes};
    memcpy(op->arguments, arguments, size);
    if (queue->last) queue->last->next = op; else queue->first = op;
    queue->last = op;
}
static int do_op(Op *op) {
    static int idle = -1;
    if (idle < 0) idle = setting("STAND_IN_IDLE", 0);
    return idle && op->computes ? OK : op->run(op->arguments);
}
static void do_next(Stream *stream) {
    Op *op = stream->queue.first;
    stream->queue.first = op->next;
    if (!op->next) stream->queue.last = NULL;
    int before = current;
    current = stream->device;
    int code = lost();
    if (!code) devices[current].broken = do_op(op);
    current = before;
    stream->done++;
    free(op);
}
static void carry_out(Stream *stream, uint64_t place) { while (stream->done < place) do_next(stream); }
static int run_graph(void *arguments);
static int run_wait(void *arguments) {
    Point *point = arguments;
    Stream *stream = behind(*point);
    if (stream) carry_out(stream, point->place);
    return OK;
}

/* The default stream and those that don't say otherwise wait for each other. */
static void in_order(Stream *stream) {
    Stream *legacy = devices[stream->device].legacy;
    for (Stream *one = streams; stream->blocking && one; one = one->next)
        if (one != stream && one->blocking && one->device == stream->device && (one == legacy || stream == legacy))
            carry_out(one, one->queued);
}

/* Something of what could be done by now, or nothing. */
static void at_random(void) {
    static unsigned state;
    if (!state) state = setting("STAND_IN_SEED", 0);
    for (int times = state ? rand_r(&state) % 4 : 0; times; times--) {
        int number = 0;
        for (Stream *one = streams; one; one = one->next) number++;
        Stream *one = streams;
        for (int skip = rand_r(&state) % number; skip; skip--) one = one->next;
        Op *next = one->queue.first;
        if (next && (next->run != run_wait || !behind(*(Point *)next->arguments))) do_next(one);
    }
}

static int queue(Stream *stream, Operation *run, const void *arguments, size_t size, int engine, int64_t ns) {
    int computes = engine == COMPUTES && run != run_graph;
    if (stream->capture) {
        if (stream->capture->broken) return INVALIDATED;
        append(&stream->capture->graph->queue, run, arguments, size, computes);
        stream->capture->graph->takes_ns += ns;
        return OK;
    }
    in_order(stream);
    append(&stream->queue, run, arguments, size, computes);
    stream->queued++;
    take_time(stream, engine, ns);
    at_random();
    return OK;
}
static int compute(Stream *it, Operation *run, const void *arguments, size_t size, int64_t ns) {
    Stream *stream = stream_of(it);
    return stream && stream->device == current ? queue(stream, run, arguments, size, COMPUTES, ns) : INVALID_HANDLE;
}
int gpu_compute(Stream *it, Operation *run, const void *arguments, size_t size) {
    return compute(it, run, arguments, size, kernel_ns());
}
int gpu_call(Stream *it, Operation *run, const void *arguments, size_t size) {
    Stream *stream = stream_of(it);
    return stream ? queue(stream, run, arguments, size, WAITS, 0) : INVALID_HANDLE;
}
int gpu_stream(Stream **stream, unsigned flags) { *stream = made_stream(!(flags & 1)); return OK; }
int gpu_stream_end(Stream *it) {
    if (!known_stream(it)) return INVALID_HANDLE;
    if (it->capture) { it->capture->broken = 1; return UNSUPPORTED; }
    carry_out(it, it->queued);
    Stream **place = &streams;
    while (*place != it) place = &(*place)->next;
    *place = it->next;
    free(it);
    return OK;
}
int gpu_synchronize(Stream *it) {
    Stream *stream = stream_of(it);
    if (!stream) return INVALID_HANDLE;
    if (stream->capture) { stream->capture->broken = 1; return UNSUPPORTED; }
    uint64_t queued = stream->queued;
    hang();
    sleep_until(stream->ends_ns);
    if (stream != stream_of(it)) return INVALID_HANDLE; /* gone meanwhile */
    in_order(stream);
    carry_out(stream, queued);
    return lost();
}
int gpu_synchronize_all(void) {
    int64_t ends_ns = 0;
    for (Stream *one = streams; one; one = one->next) if (one->device == current) ends_ns = later(ends_ns, one->ends_ns);
    hang();
    sleep_until(ends_ns);
    for (Stream *one = streams; one; one = one->next) if (one->device == current) carry_out(one, one->queued);
    return lost();
}

/* ---- copies */

typedef struct { void *target; void *source; size_t size; int staged; } Copy;
static int run_copy(void *arguments) {
    Copy *copy = arguments;
    Block *to = block_at(copy->target, copy->size), *from = copy->staged ? NULL : block_at(copy->source, copy->size);
    if (!to || (!from && !copy->staged)) return ILLEGAL_ADDRESS;
    memcpy(real(to, copy->target), from ? real(from, copy->source) : copy->source, copy->size);
    if (copy->staged) free(copy->source);
    return OK;
}
/* What isn't page-locked is read, or written, before the call returns. */
static int copy_pageable(Stream *stream, Copy copy, Block *from) {
    if (stream->capture) { stream->capture->broken = 1; return UNSUPPORTED; }
    if (from) {
        int code = gpu_synchronize(stream);
        if (!code) memcpy(copy.target, real(from, copy.source), copy.size);
        return code;
    }
    copy.source = memcpy(malloc(copy.size), copy.source, copy.size);
    copy.staged = 1;
    return queue(stream, run_copy, &copy, sizeof copy, COPIES_IN, copy.size / BYTES_PER_NS);
}
int gpu_copy(Stream *it, void *target, const void *source, size_t size) {
    Stream *stream = stream_of(it);
    if (!stream) return INVALID_HANDLE;
    if (!size) return OK;
    Block *to = block_at(target, size), *from = block_at(source, size);
    if ((!to && gpu_kind(target, NULL) >= 0) || (!from && gpu_kind(source, NULL) >= 0) || (!to && !from)) return INVALID_VALUE;
    Copy copy = {target, (void *)source, size, 0};
    if (!to || !from) return copy_pageable(stream, copy, from);
    int engine = from->kind == PINNED ? COPIES_IN : to->kind == PINNED ? COPIES_OUT : WAITS;
    return queue(stream, run_copy, &copy, sizeof copy, engine, size / BYTES_PER_NS);
}
int gpu_copy_now(void *target, const void *source, size_t size) {
    int pageable = gpu_kind(source, NULL) < 0, code = gpu_copy(NULL, target, source, size);
    return code || pageable ? code : gpu_synchronize(NULL);
}
typedef struct { void *target; size_t size; int value; } Set;
static int run_set(void *arguments) {
    Set *set = arguments;
    void *there = gpu_at(set->target, set->size);
    if (there) memset(there, set->value, set->size);
    return there ? OK : ILLEGAL_ADDRESS;
}
int gpu_set(Stream *stream, void *target, int value, size_t size) {
    Set set = {target, size, value};
    return !size ? OK : block_at(target, size) ? gpu_call(stream, run_set, &set, sizeof set) : INVALID_VALUE;
}

/* ---- events */

static int known_event(const Event *it) {
    for (Event *one = events; one; one = one->next) if (one == it) return 1;
    return 0;
}
int gpu_event(Event **event) {
    Event *made = calloc(1, sizeof *made);
    *made = (Event){.device = current, .next = events};
    *event = events = made;
    return OK;
}
int gpu_event_end(Event *it) {
    if (!known_event(it)) return INVALID_HANDLE;
    Event **place = &events;
    while (*place != it) place = &(*place)->next;
    *place = it->next;
    free(it);
    return OK;
}
int gpu_record(Event *event, Stream *it) {
    Stream *stream = stream_of(it);
    if (!known_event(event) || !stream || event->device != stream->device) return INVALID_HANDLE;
    event->point = (Point){stream->id, stream->queued, stream->ends_ns};
    event->capture = stream->capture;
    return OK;
}
int gpu_wait(Stream *it, Event *event) {
    Stream *stream = stream_of(it);
    if (!known_event(event) || !stream) return INVALID_HANDLE;
    if (event->capture && stream->capture != event->capture) { /* which draws the stream into the capture */
        if (stream->capture) return ISOLATION;
        stream->capture = event->capture;
    }
    if (event->capture) return OK;
    if (stream->capture) { stream->capture->broken = 1; return ISOLATION; }
    if (gpu_shown) return run_wait(&event->point);
    stream->ends_ns = later(stream->ends_ns, event->point.ends_ns);
    return queue(stream, run_wait, &event->point, sizeof event->point, WAITS, 0);
}
int gpu_event_synchronize(Event *event) {
    if (!known_event(event)) return INVALID_HANDLE;
    if (event->capture) { event->capture->broken = 1; return CAPTURED_EVENT; }
    Point point = event->point;
    hang();
    sleep_until(point.ends_ns);
    run_wait(&point);
    return lost();
}

/* ---- graphs */

int gpu_capture(Stream *it, int mode) {
    if (!known_stream(it)) return INVALID_HANDLE;
    if (it->capture || it == devices[it->device].legacy) return UNSUPPORTED;
    Capture *capture = malloc(sizeof *capture);
    *capture = (Capture){calloc(1, sizeof(Graph)), mode, 0, pthread_self(), captures};
    gpu_graph_keep(capture->graph);
    it->capture = captures = capture;
    return OK;
}
int gpu_captured(Stream *it, Graph **graph) {
    *graph = NULL;
    if (!known_stream(it)) return INVALID_HANDLE;
    Capture *capture = it->capture;
    if (!capture) return INVALID_VALUE;
    if (capture->mode != 2 && !pthread_equal(capture->thread, pthread_self())) return WRONG_THREAD;
    for (Stream *one = streams; one; one = one->next) if (one->capture == capture) one->capture = NULL;
    for (Event *one = events; one; one = one->next)
        if (one->capture == capture) { one->capture = NULL; one->point = (Point){0}; }
    Capture **place = &captures;
    while (*place != capture) place = &(*place)->next;
    *place = capture->next;
    int code = capture->broken ? INVALIDATED : OK;
    if (code) gpu_graph_drop(capture->graph); else *graph = capture->graph;
    free(capture);
    return code;
}
int gpu_capture_state(Stream *it, int *state) {
    Stream *stream = stream_of(it);
    if (!stream) return INVALID_HANDLE;
    *state = !stream->capture ? 0 : stream->capture->broken ? 2 : 1;
    return OK;
}
void gpu_graph_keep(Graph *graph) { graph->users++; }
void gpu_graph_drop(Graph *graph) {
    if (--graph->users) return;
    for (Op *op = graph->queue.first, *next; op; op = next) { next = op->next; free(op); }
    free(graph);
}
static int run_graph(void *arguments) {
    Graph *graph = *(Graph **)arguments;
    int code = OK;
    for (Op *op = graph->queue.first; op && !code; op = op->next) code = do_op(op);
    gpu_graph_drop(graph);
    return code;
}
int gpu_launch(Graph *graph, Stream *stream) {
    gpu_graph_keep(graph);
    return compute(stream, run_graph, &graph, sizeof graph, graph->takes_ns);
}

/* ---- what tests tell and ask */

EXPORT void stand_in_show(void) { gpu_shown = 1; }
EXPORT void stand_in_fail(const char *call, int code) {
    pthread_mutex_lock(&lock);
    strncpy(failing, call, sizeof failing - 1);
    failing_code = code;
    pthread_mutex_unlock(&lock);
}
EXPORT int stand_in_hangs(void) { return hangs; }
EXPORT int stand_in_retained(void) { return devices[0].retained; }
EXPORT void stand_in_release(int device) { devices[device].retained--; }
#define COUNT(list, type, where) \
    int n = 0; \
    pthread_mutex_lock(&lock); \
    for (type *one = list; one; one = one->next) n += (where); \
    return gpu_leave(n)
EXPORT int stand_in_streams(void) { COUNT(streams, Stream, one != devices[one->device].legacy); }
EXPORT int stand_in_events(void) { COUNT(events, Event, 1); }
EXPORT int stand_in_pinned(void) { COUNT(blocks, Block, one->kind == PINNED); }
EXPORT int stand_in_device(void) { COUNT(blocks, Block, one->kind == ON_DEVICE); }
EXPORT int stand_in_opened(void) { return opened; }
EXPORT int stand_in_pending(void) { COUNT(streams, Stream, one->queued - one->done); }
