/* cuDNN's graphs, of one convolution and what is added to it, as ONNX Runtime makes them by cudnn_frontend. Descriptors
   hold copies of those that they are made of, so it doesn't matter which of them are destroyed first; what is queued, or
   captured, has a copy of the plan, so it may go too (what a real one does with its code since version 9.28).

   From plan to heuristics, engines and knobs, all that there is to choose from is one way to compute. */
#include "cudnn.h"
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    POINTWISE = 0, CONVOLUTION = 1, ENGINE = 2, CONFIG = 3, HEURISTICS = 4, PLAN = 5, KNOB = 7, CONVOLVE = 10,
    PER_POINT = 13, GRAPH = 15, PACK = 16, TENSOR = 17
};
enum { MOST_STEPS = 4, MOST_TENSORS = 8, ADD = 0, RELU = 100, CROSS_CORRELATION = 1, PANEL = 16 };

typedef struct { int mode, type; } Pointwise;
typedef struct { int64_t rank, before[2], after[2], stride[2], dilation[2]; int type, mode; } Convolution;
typedef struct { int kind; float alpha, beta; Convolution convolution; Pointwise pointwise; Tensor x, by, y; } Step;
typedef struct { int64_t count; Step steps[MOST_STEPS]; } Plan;
typedef struct { int64_t count, uids[MOST_TENSORS]; void *at[MOST_TENSORS], *workspace; } Pack;
typedef struct {
    int64_t kind, ignored[1];
    union { Pointwise pointwise; Convolution convolution; Tensor tensor; Step step; Plan plan; Pack pack; };
} Descriptor;
static int plans;

/* ---- attributes, by their numbers in cudnn_graph.h */

enum { HANDLE, DATA_TYPE, BOOLEAN, INT64, FLOAT, DOUBLE, POINTER, MODE, HEURISTIC, POINTWISE_MODE = 14, DESCRIPTOR = 15 };
typedef struct { int64_t of, name; int type, most; size_t at, size, count_at; } Attribute;
#define PART(of, name, type, part, most) {of, name, type, most, offsetof(Descriptor, part), sizeof(((Descriptor *)0)->part) / most, 0}
#define LIST(of, name, type, part, most, count) \
    {of, name, type, most, offsetof(Descriptor, part), sizeof(((Descriptor *)0)->part) / most, offsetof(Descriptor, count)}
static const Attribute ATTRIBUTES[] = {
    PART(POINTWISE, 0, POINTWISE_MODE, pointwise.mode, 1), PART(POINTWISE, 1, DATA_TYPE, pointwise.type, 1),
    PART(CONVOLUTION, 100, DATA_TYPE, convolution.type, 1), PART(CONVOLUTION, 101, MODE, convolution.mode, 1),
    PART(CONVOLUTION, 102, INT64, convolution.dilation, 2), PART(CONVOLUTION, 103, INT64, convolution.stride, 2),
    PART(CONVOLUTION, 104, INT64, convolution.after, 2), PART(CONVOLUTION, 105, INT64, convolution.before, 2),
    PART(CONVOLUTION, 106, INT64, convolution.rank, 1),
    PART(HEURISTICS, 200, HEURISTIC, ignored, 1), PART(HEURISTICS, 201, DESCRIPTOR, plan, 1),
    PART(PLAN, 401, DESCRIPTOR, plan, 1),
    PART(CONVOLVE, 700, FLOAT, step.alpha, 1), PART(CONVOLVE, 701, FLOAT, step.beta, 1),
    PART(CONVOLVE, 702, DESCRIPTOR, step.convolution, 1), PART(CONVOLVE, 703, DESCRIPTOR, step.by, 1),
    PART(CONVOLVE, 704, DESCRIPTOR, step.x, 1), PART(CONVOLVE, 705, DESCRIPTOR, step.y, 1),
    PART(PER_POINT, 750, DESCRIPTOR, step.pointwise, 1), PART(PER_POINT, 751, DESCRIPTOR, step.x, 1),
    PART(PER_POINT, 752, DESCRIPTOR, step.by, 1), PART(PER_POINT, 753, DESCRIPTOR, step.y, 1),
    PART(PER_POINT, 754, FLOAT, step.alpha, 1), PART(PER_POINT, 755, FLOAT, step.beta, 1),
    PART(GRAPH, 800, HANDLE, ignored, 1), LIST(GRAPH, 801, DESCRIPTOR, plan.steps, MOST_STEPS, plan.count),
    PART(TENSOR, 900, INT64, ignored, 1), PART(TENSOR, 901, DATA_TYPE, tensor.type, 1),
    LIST(TENSOR, 902, INT64, tensor.size, RANK, tensor.rank), PART(TENSOR, 903, INT64, tensor.step, RANK),
    PART(TENSOR, 906, INT64, tensor.uid, 1), PART(TENSOR, 907, BOOLEAN, tensor.is_virtual, 1),
    LIST(PACK, 1000, INT64, pack.uids, MOST_TENSORS, pack.count), PART(PACK, 1001, POINTER, pack.at, MOST_TENSORS),
    PART(PACK, 1003, POINTER, pack.workspace, 1),
};

EXPORT int cudnnBackendCreateDescriptor(int kind, Descriptor **made) {
    *made = calloc(1, sizeof **made);
    (*made)->kind = kind;
    return OK;
}
EXPORT int cudnnBackendDestroyDescriptor(Descriptor *it) { free(it); return OK; }
EXPORT int cudnnBackendSetAttribute(Descriptor *it, int name, int type, int64_t count, const void *values) {
    const Attribute *found = ATTRIBUTES, *end = ATTRIBUTES + sizeof ATTRIBUTES / sizeof *ATTRIBUTES;
    while (found < end && (found->of != it->kind || found->name != name)) found++;
    if (found == end) return dnn_refuse("cuDNN attribute", name);
    if (found->type != type) return DNN_BAD_PARAM;
    if (count > found->most) return dnn_refuse("cuDNN list so long as that of attribute", name);
    char *at = (char *)it + found->at;
    if (type != DESCRIPTOR) memcpy(at, values, count * found->size);
    else for (int64_t i = 0; i < count; i++) memcpy(at + i * found->size, &((Descriptor **)values)[i]->pointwise, found->size);
    if (found->count_at) *(int64_t *)((char *)it + found->count_at) = count;
    return OK;
}

/* ---- what can be computed */

static int same(const Tensor *one, const Tensor *other) { return !memcmp(one->size, other->size, sizeof one->size); }
static int spreads(const Tensor *it, const Tensor *over) {
    for (int dim = 0; dim < RANK; dim++) if (it->size[dim] != 1 && it->size[dim] != over->size[dim]) return 0;
    return 1;
}
static int check_convolve(const Step *it) {
    if (it->alpha != 1 || it->beta != 0) return dnn_refuse("cuDNN convolution that is added, by", it->beta);
    if (!it->by.size[1] || it->x.size[1] % it->by.size[1] || it->y.size[0] != it->x.size[0]) return DNN_BAD_PARAM;
    long groups = it->x.size[1] / it->by.size[1];
    if (it->by.size[0] % groups || it->y.size[1] != it->by.size[0]) return DNN_BAD_PARAM;
    for (int dim = 0; dim < 2; dim++) {
        const Convolution *how = &it->convolution;
        long reach = how->dilation[dim] * (it->by.size[2 + dim] - 1) + 1;
        long room = it->x.size[2 + dim] + how->before[dim] + how->after[dim] - reach;
        if (room < 0 || it->y.size[2 + dim] != room / how->stride[dim] + 1) return DNN_BAD_PARAM;
    }
    return OK;
}
static int check_per_point(const Step *it) {
    if (it->alpha != 1 || (it->pointwise.mode == ADD && it->beta != 1)) return dnn_refuse("cuDNN sum scaled by", it->alpha);
    return same(&it->x, &it->y) && (it->pointwise.mode == RELU || spreads(&it->by, &it->y)) ? OK : DNN_BAD_PARAM;
}
static int check(const Descriptor *it) {
    const Convolution *how = &it->convolution;
    switch (it->kind) {
    case TENSOR: return tensor_known(&it->tensor);
    case CONVOLUTION:
        return how->rank != 2 ? dnn_refuse("cuDNN convolution whose rank is", how->rank)
             : how->type != FLOATS ? dnn_refuse("cuDNN convolution computed as data type", how->type)
             : how->mode != CROSS_CORRELATION ? dnn_refuse("cuDNN convolution of mode", how->mode) : OK;
    case POINTWISE:
        return it->pointwise.mode == ADD || it->pointwise.mode == RELU ? OK
             : dnn_refuse("cuDNN pointwise operation", it->pointwise.mode);
    case CONVOLVE: return check_convolve(&it->step);
    case PER_POINT: return check_per_point(&it->step);
    case GRAPH: case HEURISTICS: case PLAN: return it->plan.count ? OK : DNN_BAD_PARAM;
    case PACK: case CONFIG: case ENGINE: return OK;
    default: return dnn_refuse("cuDNN descriptor", it->kind);
    }
}
/* A plan may load code, for which a capture may break. */
static int planned(void) {
    int code = gpu_enter("cudnnBackendFinalize", NOT_IN_CAPTURES);
    plans += !code;
    return gpu_leave(code) ? DNN_FAILED : OK;
}
EXPORT int cudnnBackendFinalize(Descriptor *it) {
    if (it->kind == CONVOLVE || it->kind == PER_POINT) it->step.kind = it->kind;
    int code = check(it);
    return code || it->kind != PLAN ? code : planned();
}

static long outputs(const Step *it) { return it->y.size[2] * it->y.size[3]; }
static long products(const Step *it) { return it->by.size[1] * it->by.size[2] * it->by.size[3]; }
static long workspace_of(const Plan *it) {
    long size = 0;
    for (int i = 0; i < it->count; i++) {
        const Step *step = &it->steps[i];
        long needed = step->kind == CONVOLVE ? (outputs(step) + PANEL - 1) / PANEL * PANEL * products(step) * sizeof(float) : 0;
        if (needed > size) size = needed;
    }
    return size;
}
/* Engines are asked for notes, configurations for choices: there are none. */
EXPORT int cudnnBackendGetAttribute(
    const Descriptor *it, int name, int type, int64_t room, int64_t *count, void *values
) {
    enum { RESULTS = 202, ENGINE_OF = 300, CHOICES = 302, CONFIG_WORKSPACE, CONFIG_SHARED, PLAN_WORKSPACE = 402, INDEX = 1301 };
    int64_t found = 1;
    switch (name) {
    case RESULTS: case ENGINE_OF: if (room && values) ((Descriptor **)values)[0]->plan = it->plan; break;
    case CONFIG_WORKSPACE: case PLAN_WORKSPACE: *(int64_t *)values = workspace_of(&it->plan); break;
    case CONFIG_SHARED: *(int *)values = 0; break;
    case INDEX: *(int64_t *)values = 0; break;
    default: found = 0;
    }
    if (count) *count = found;
    return OK;
}

/* ---- computing */

/* Of one image's `channels`, what each output is made of: in panels of PANEL outputs side by side, product by product. */
static void unfold(const Step *it, const float *image, long channels, float *panels) {
    const Convolution *how = &it->convolution;
    long height = it->x.size[2], width = it->x.size[3], tall = it->by.size[2], wide = it->by.size[3];
    for (long first = 0; first < outputs(it); first += PANEL) {
        long tops[PANEL], lefts[PANEL];
        for (long i = 0; i < PANEL; i++) {
            tops[i] = (first + i) / it->y.size[3] * how->stride[0] - how->before[0];
            lefts[i] = (first + i) % it->y.size[3] * how->stride[1] - how->before[1];
            if (first + i >= outputs(it)) tops[i] = -how->before[0] - height - tall * how->dilation[0]; /* nowhere */
        }
        for (long product = 0; product < channels * tall * wide; product++, panels += PANEL) {
            const float *plane = image + product / wide / tall * height * width;
            long down = product / wide % tall * how->dilation[0], right = product % wide * how->dilation[1];
            for (long i = 0; i < PANEL; i++) {
                long y = tops[i] + down, x = lefts[i] + right;
                panels[i] = y >= 0 && y < height && x >= 0 && x < width ? plane[y * width + x] : 0;
            }
        }
    }
}
static void multiply(const Step *it, const float *weights, const float *panels, long channels, float *out) {
    long count = outputs(it), inner = products(it);
    for (long first = 0; first < count; first += PANEL, panels += inner * PANEL)
        for (long channel = 0; channel < channels; channel++) {
            float sums[PANEL] = {0};
            for (long k = 0; k < inner; k++)
                for (int i = 0; i < PANEL; i++) sums[i] += weights[channel * inner + k] * panels[k * PANEL + i];
            memcpy(out + channel * count + first, sums, sizeof *out * (count - first < PANEL ? count - first : PANEL));
        }
}
static void convolve(const Step *it, const float *x, const float *weights, float *panels, float *y) {
    long taken = it->by.size[1], groups = it->x.size[1] / taken, given = it->y.size[1] / groups;
    for (long image = 0; image < it->x.size[0]; image++)
        for (long group = 0; group < groups; group++, x += taken * it->x.size[2] * it->x.size[3], y += given * outputs(it)) {
            unfold(it, x, taken, panels);
            multiply(it, weights + group * given * products(it), panels, given, y);
        }
}
static void per_point(const Step *it, const float *x, const float *by, float *y) {
    long count = tensor_count(&it->y);
    for (long i = 0; i < count; i++)
        y[i] = it->pointwise.mode == ADD ? x[i] + by[tensor_place(&it->by, i, &it->y)] : x[i] > 0 ? x[i] : 0;
}

typedef struct { Plan plan; Pack pack; } Run;
typedef struct { int64_t uid; float *at; } Between;
static float *find(Run *it, const Tensor *tensor, Between *between) {
    if (!tensor->is_virtual) {
        for (int i = 0; i < it->pack.count; i++)
            if (it->pack.uids[i] == tensor->uid) return (float *)tensor_at(tensor, it->pack.at[i]);
        return NULL;
    }
    while (between->at && between->uid != tensor->uid) between++;
    if (!between->at) *between = (Between){tensor->uid, malloc(tensor_count(tensor) * sizeof(float))};
    return between->at;
}
static int run_plan(void *arguments) {
    Run *it = arguments;
    Between between[MOST_STEPS + 1] = {{0}};
    float *panels = gpu_at(it->pack.workspace, workspace_of(&it->plan));
    int code = OK;
    for (int i = 0; i < it->plan.count && !code; i++) {
        const Step *step = &it->plan.steps[i];
        int alone = step->kind == PER_POINT && step->pointwise.mode == RELU;
        float *x = find(it, &step->x, between), *y = find(it, &step->y, between);
        float *by = alone ? x : find(it, &step->by, between);
        if (!x || !by || !y || (step->kind == CONVOLVE && !panels)) code = ILLEGAL_ADDRESS;
        else if (step->kind == CONVOLVE) convolve(step, x, by, panels, y);
        else per_point(step, x, by, y);
    }
    for (int i = 0; i < MOST_STEPS; i++) free(between[i].at);
    return code;
}
EXPORT int cudnnBackendExecute(Handle *handle, const Descriptor *plan, const Descriptor *pack) {
    Run it = {plan->plan, pack->pack};
    if (workspace_of(&it.plan) && !it.pack.workspace) return DNN_BAD_PARAM;
    return dnn_queue(__func__, handle, run_plan, &it, sizeof it);
}

EXPORT int stand_in_plans(void) { return plans; } /* so far */
