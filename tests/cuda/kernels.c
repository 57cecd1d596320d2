/* In C what onnxruntime/core/providers/cuda has for the device, as far as tests' models need it. Another version of
   ONNX Runtime may have other names and arguments; the runtime says which kernel it would have needed. */
#include "kernels.h"
#include <fnmatch.h>
#include <math.h>
#include <string.h>

#define ARGUMENT(type, number) (*(type *)arguments[number])
#define FLOATS(number, count) gpu_at(ARGUMENT(void *, number), 4l * (count))
#define LACKS(number, found) (ARGUMENT(void *, number) && !(found)) /* one that may be NULL */

typedef struct { int divisor; unsigned multiplier, shift; } Division;
typedef struct { int rank; long each[8]; } Steps;
typedef struct { int rank; Division each[8]; } Divisions;
_Static_assert(sizeof(Steps) <= LARGEST_ARGUMENT && sizeof(Divisions) <= LARGEST_ARGUMENT, "has room");

static int broadcast_bias(void **arguments, Size grid) {
    long count = ARGUMENT(long, 2);
    int width = ARGUMENT(Division, 3).divisor, per_row = ARGUMENT(int, 4), per_column = ARGUMENT(int, 5);
    const float *bias = FLOATS(0, count / width * per_row + per_column);
    float *out = FLOATS(1, count), scale = ARGUMENT(float, 6);
    if (!bias || !out) return ILLEGAL_ADDRESS;
    for (long i = 0; i < count; i++) out[i] = scale * bias[i / width * per_row + i % width * per_column];
    return OK;
}

static int add_rows_up(void **arguments, Size grid) {
    long rows = ARGUMENT(int, 2), columns = ARGUMENT(int, 3);
    const float *in = FLOATS(0, rows * columns);
    float *out = FLOATS(1, columns);
    if (!in || !out) return ILLEGAL_ADDRESS;
    for (long i = 0; i < rows * columns; i++) out[i % columns] = (i < columns ? 0 : out[i % columns]) + in[i];
    return OK;
}

static int each_row_summed(void **arguments, int is_mean) {
    long rows = ARGUMENT(int, 0), columns = ARGUMENT(int, 1);
    const float *in = FLOATS(2, rows * columns);
    float *out = FLOATS(3, rows);
    if (!in || !out) return ILLEGAL_ADDRESS;
    for (long row = 0; row < rows; row++, in += columns) {
        double sum = 0;
        for (long i = 0; i < columns; i++) sum += in[i];
        out[row] = is_mean ? sum / columns : sum;
    }
    return OK;
}
static int sum_rows(void **arguments, Size grid) { return each_row_summed(arguments, 0); }
static int mean_rows(void **arguments, Size grid) { return each_row_summed(arguments, 1); }

#define UNARY_OF(name, from, to, expression) \
    static int name(void **arguments, Size grid) { \
        long count = ARGUMENT(int, 3); \
        const from *in = gpu_at(ARGUMENT(void *, 0), count * sizeof(from)); \
        to *out = gpu_at(ARGUMENT(void *, 1), count * sizeof(to)); \
        if (!in || !out) return ILLEGAL_ADDRESS; \
        for (long i = 0; i < count; i++) { from x = in[i]; out[i] = expression; } \
        return OK; \
    }
#define UNARY(name, expression) UNARY_OF(name, float, float, expression)
UNARY_OF(cast, long, float, x)
UNARY_OF(cast_to_truth, long, char, x != 0)
UNARY(same, x)
UNARY(root, sqrtf(x))
UNARY(sine, sinf(x))
UNARY(cosine, cosf(x))
UNARY(sigmoid, 1 / (1 + expf(-x)))
UNARY(quick_gelu, x / (1 + expf(-ARGUMENT(float, 2) * x)))
UNARY(divided, x / ARGUMENT(float, 2))
UNARY(negative, -x)
UNARY(absolute, fabsf(x))
UNARY(relu, x > 0 ? x : 0)

/* `left` and `right`: how far each side goes on with each element, 0 for a single number. */
#define BINARY_OF(name, ins, outs, expression, left, right) \
    static int name##_##left##right(void **arguments, Size grid) { \
        long count = ARGUMENT(int, 4); \
        const ins *one = gpu_at(ARGUMENT(void *, 0), (left ? count : 1) * sizeof(ins)); \
        const ins *other = gpu_at(ARGUMENT(void *, 1), (right ? count : 1) * sizeof(ins)); \
        outs *out = gpu_at(ARGUMENT(void *, 2), count * sizeof(outs)); \
        if (!one || !other || !out) return ILLEGAL_ADDRESS; \
        for (long i = 0; i < count; i++) { ins x = one[i * left], y = other[i * right]; out[i] = expression; } \
        return OK; \
    }
#define BINARY(name, ins, outs, expression) \
    BINARY_OF(name, ins, outs, expression, 1, 1) BINARY_OF(name, ins, outs, expression, 0, 1) \
    BINARY_OF(name, ins, outs, expression, 1, 0)
BINARY(sum, float, float, x + y)
BINARY(difference, float, float, x - y)
BINARY(product, float, float, x * y)
BINARY(quotient, float, float, x / y)
BINARY(greater, float, char, x > y)
BINARY(at_most, long, char, x <= y)
BINARY(both, char, char, x && y)

#define PER_CHANNEL(name, expression) \
    static int name##_per_channel(void **arguments, Size grid) { \
        long count = ARGUMENT(int, 6), height = ARGUMENT(Division, 2).divisor, channels = ARGUMENT(Division, 3).divisor; \
        const float *one = FLOATS(0, count), *other = FLOATS(1, channels); \
        float *out = FLOATS(4, count); \
        if (!one || !other || !out) return ILLEGAL_ADDRESS; \
        for (long i = 0; i < count; i++) { float x = one[i], y = other[i / height % channels]; out[i] = expression; } \
        return OK; \
    }
PER_CHANNEL(sum, x + y)
PER_CHANNEL(product, x * y)

#define PER_ROW(name, expression) \
    static int name##_per_row(void **arguments, Size grid) { \
        long count = ARGUMENT(int, 5), width = ARGUMENT(Division, 2).divisor; \
        const float *one = FLOATS(0, count), *other = FLOATS(1, (count + width - 1) / width); \
        float *out = FLOATS(3, count); \
        if (!one || !other || !out) return ILLEGAL_ADDRESS; \
        for (long i = 0; i < count; i++) { float x = one[i], y = other[i / width]; out[i] = expression; } \
        return OK; \
    }
PER_ROW(sum, x + y)
PER_ROW(product, x * y)
PER_ROW(quotient, x / y)

/* How far into memory that has `steps` the element lies that is number `i` in memory that has `order`. */
static long place(long i, int rank, const long *order, const long *steps) {
    long found = 0;
    for (int dim = 0; dim < rank; i %= order[dim++]) found += i / order[dim] * steps[dim];
    return found;
}

/* Of numbers of types `ins` and `outs`. A side that isn't spread has no steps. */
#define BROADCAST_OF(name, ins, outs, expression) \
    static int name##_broadcast(void **arguments, Size grid) { \
        int rank = ARGUMENT(int, 0); \
        long count = ARGUMENT(int, 8), order[8], *steps[2] = {ARGUMENT(Steps, 1).each, ARGUMENT(Steps, 3).each}; \
        int spread[2] = {ARGUMENT(Steps, 1).rank, ARGUMENT(Steps, 3).rank}; \
        for (int dim = 0; dim < rank; dim++) order[dim] = ARGUMENT(Divisions, 5).each[dim].divisor; \
        const ins *side[2]; \
        for (int i = 0; i < 2; i++) { \
            long most = spread[i] ? place(count - 1, rank, order, steps[i]) + 1 : count; \
            if (!(side[i] = gpu_at(ARGUMENT(void *, 2 + 2 * i), most * sizeof(ins)))) return ILLEGAL_ADDRESS; \
        } \
        outs *out = gpu_at(ARGUMENT(void *, 6), count * sizeof(outs)); \
        if (!out) return ILLEGAL_ADDRESS; \
        for (long i = 0; i < count; i++) { \
            ins x = side[0][spread[0] ? place(i, rank, order, steps[0]) : i]; \
            ins y = side[1][spread[1] ? place(i, rank, order, steps[1]) : i]; \
            out[i] = expression; \
        } \
        return OK; \
    }
#define BROADCAST(name, expression) BROADCAST_OF(name, float, float, expression)
BROADCAST(sum, x + y)
BROADCAST(product, x * y)
BROADCAST(quotient, x / y)
BROADCAST_OF(at_most, long, char, x <= y)
BROADCAST_OF(both, char, char, x && y)

static int one_of_two(void **arguments, Size grid) {
    long count = ARGUMENT(int, 4);
    const char *which = gpu_at(ARGUMENT(void *, 0), count);
    const float *one = FLOATS(1, 1), *other = FLOATS(2, 1);
    float *out = FLOATS(3, count);
    if (!which || !one || !other || !out) return ILLEGAL_ADDRESS;
    for (long i = 0; i < count; i++) out[i] = which[i] ? *one : *other;
    return OK;
}

static int range(void **arguments, Size grid) {
    long first = ARGUMENT(long, 0), step = ARGUMENT(long, 1), count = ARGUMENT(long, 2);
    long *out = gpu_at(ARGUMENT(void *, 3), count * sizeof(long));
    if (!out) return ILLEGAL_ADDRESS;
    for (long i = 0; i < count; i++) out[i] = first + i * step;
    return OK;
}

static int expand(void **arguments, Size grid) {
    int rank = ARGUMENT(int, 0);
    long count = ARGUMENT(int, 1), order[8], *steps = ARGUMENT(Steps, 5).each;
    for (int dim = 0; dim < rank; dim++) order[dim] = ARGUMENT(Divisions, 4).each[dim].divisor;
    const float *in = FLOATS(2, place(count - 1, rank, order, steps) + 1);
    float *out = FLOATS(3, count);
    if (!in || !out) return ILLEGAL_ADDRESS;
    for (long i = 0; i < count; i++) out[i] = in[place(i, rank, order, steps)];
    return OK;
}

static int transpose_first_three(void **arguments, Size grid) {
    long count = 4l * ARGUMENT(int, 5), *from = ARGUMENT(Steps, 0).each, *to = ARGUMENT(Steps, 2).each;
    const float *in = FLOATS(1, count);
    float *out = FLOATS(3, count);
    if (!in || !out) return ILLEGAL_ADDRESS;
    for (long i = 0; i < count; i++) out[place(i, 4, from, to)] = in[i];
    return OK;
}

static int transpose_last_two(void **arguments, Size grid) {
    long rows = ARGUMENT(long, 0), columns = ARGUMENT(long, 1), step = ARGUMENT(long, 2);
    const float *in = FLOATS(3, grid.z * step);
    float *out = FLOATS(4, grid.z * step);
    if (!in || !out) return ILLEGAL_ADDRESS;
    for (long batch = 0; batch < grid.z; batch++, in += step, out += step)
        for (long i = 0; i < rows * columns; i++) out[i % columns * rows + i / columns] = in[i];
    return OK;
}

/* In pieces of 16 bytes. */
static int split(void **arguments, Size grid) {
    const Steps *sizes = &ARGUMENT(Steps, 0);
    char **targets = ((struct { long count; char *each[4]; } *)arguments[2])->each;
    long width = ARGUMENT(long, 3), rows = 16l * ARGUMENT(int, 4) / width, begin = 0;
    const char *in = gpu_at(ARGUMENT(void *, 1), rows * width);
    for (int part = 0; part < sizes->rank; begin += sizes->each[part++]) {
        long size = sizes->each[part];
        char *out = gpu_at(targets[part], rows * size);
        if (!in || !out) return ILLEGAL_ADDRESS;
        for (long row = 0; row < rows; row++) memcpy(out + row * size, in + row * width + begin, size);
    }
    return OK;
}

typedef struct { int count; void *each[32]; } Pointers;
typedef struct { int count; long each[32]; } Numbers;

/* Of two that lie one after the other in blocks of `size` numbers, so many of which are of each. */
static int join(const Pointers *from, const long *sizes, float *out, long size, long count) {
    if (from->count != 2) return NOT_SUPPORTED;
    long blocks = count / size;
    for (int part = 0; part < 2; part++) {
        if (!sizes[part]) continue;
        const float *in = gpu_at(from->each[part], 4 * blocks * sizes[part]);
        if (!in || !out) return ILLEGAL_ADDRESS;
        for (long block = 0; block < blocks; block++)
            memcpy(out + block * size + (part ? sizes[0] : 0), in + block * sizes[part], 4 * sizes[part]);
    }
    return OK;
}
static int join_equal(void **arguments, Size grid) {
    long count = ARGUMENT(int, 5), size = ARGUMENT(Division, 0).divisor;
    long each = (long)ARGUMENT(Division, 1).divisor * ARGUMENT(Division, 2).divisor, sizes[] = {each, each};
    return join(&ARGUMENT(Pointers, 4), sizes, FLOATS(3, count), size, count);
}
static int join_unequal(void **arguments, Size grid) {
    long count = ARGUMENT(int, 5), inside = ARGUMENT(Division, 1).divisor, *ends = ARGUMENT(Numbers, 2).each;
    long sizes[] = {ends[0] * inside, (ends[1] - ends[0]) * inside};
    return join(&ARGUMENT(Pointers, 4), sizes, FLOATS(3, count), ARGUMENT(Division, 0).divisor, count);
}

static int gather(void **arguments, Size grid) {
    long count = ARGUMENT(int, 8), in_block = ARGUMENT(long, 0), out_block = ARGUMENT(Division, 2).divisor;
    long width = ARGUMENT(Division, 3).divisor, most = ARGUMENT(long, 1), index_size = ARGUMENT(long, 5);
    const char *indices = gpu_at(ARGUMENT(void *, 4), out_block / width * index_size);
    const float *in = FLOATS(6, count / out_block * in_block);
    float *out = FLOATS(7, count);
    if (!indices || !in || !out) return ILLEGAL_ADDRESS;
    for (long i = 0; i < count; i++) {
        const void *at = indices + i % out_block / width * index_size;
        long index = index_size == 8 ? *(const long *)at : *(const int *)at;
        if (index < 0) index += most;
        out[i] = index < 0 || index >= most ? 0 : in[i / out_block * in_block + index * width + i % width];
    }
    return OK;
}

static int bias_gelu(void **arguments, Size grid) {
    long width = ARGUMENT(long, 0), count = grid.x * width;
    const float *in = FLOATS(1, count), *bias = FLOATS(2, width);
    float *out = FLOATS(3, count);
    if (!in || !bias || !out) return ILLEGAL_ADDRESS;
    for (long i = 0; i < count; i++) {
        float x = in[i] + bias[i % width];
        out[i] = 0.5f * x * (1 + erff(x * (float)M_SQRT1_2));
    }
    return OK;
}

static void become_shares(float *row, long width) {
    float most = -INFINITY, sum = 0;
    for (long i = 0; i < width; i++) most = fmaxf(most, row[i]);
    for (long i = 0; i < width; i++) sum += row[i] = expf(row[i] - most);
    for (long i = 0; i < width; i++) row[i] /= sum;
}

static int softmax(void **arguments, Size grid) {
    long rows = ARGUMENT(int, 2), step = ARGUMENT(int, 3), width = ARGUMENT(int, 4);
    float *out = FLOATS(0, rows * step);
    const float *in = FLOATS(1, rows * step);
    if (!in || !out) return ILLEGAL_ADDRESS;
    memmove(out, in, 4 * rows * step);
    for (; rows; rows--, out += step) become_shares(out, width);
    return OK;
}

static int softmax_of_biased(void **arguments, Size grid) {
    long width = ARGUMENT(int, 3), rows = ARGUMENT(int, 4), each = ARGUMENT(Division, 5).divisor;
    float *out = FLOATS(0, rows * width);
    const float *in = FLOATS(1, rows * width), *bias = FLOATS(2, (rows + each - 1) / each * width);
    if (!in || !bias || !out) return ILLEGAL_ADDRESS;
    for (long row = 0; row < rows; row++) {
        for (long i = row * width; i < (row + 1) * width; i++) out[i] = in[i] + bias[row / each * width + i % width];
        become_shares(out + row * width, width);
    }
    return OK;
}

static void normalize(float *row, long width, float epsilon, const float *scale, const float *bias) {
    double mean = 0, variance = 0;
    for (long i = 0; i < width; i++) mean += row[i] / width;
    for (long i = 0; i < width; i++) variance += (row[i] - mean) * (row[i] - mean) / width;
    for (long i = 0; i < width; i++)
        row[i] = (scale ? scale[i] : 1) * (row[i] - mean) / sqrt(variance + epsilon) + (bias ? bias[i] : 0);
}

static int layer_norm(void **arguments, Size grid) {
    static const int UNKNOWN[] = {1, 2, 10, 11, 12}; /* statistics, and what is to be added before */
    for (int i = 0; i < 5; i++) if (ARGUMENT(void *, UNKNOWN[i])) return NOT_SUPPORTED;
    if (ARGUMENT(int, 9)) return NOT_SUPPORTED; /* scales that aren't the same for all rows */
    long rows = ARGUMENT(int, 4), width = ARGUMENT(int, 5);
    const float *in = FLOATS(3, rows * width), *scale = FLOATS(7, width), *bias = FLOATS(8, width);
    float *out = FLOATS(0, rows * width);
    if (!in || !out || LACKS(7, scale) || LACKS(8, bias)) return ILLEGAL_ADDRESS;
    memmove(out, in, 4 * rows * width);
    for (long row = 0; row < rows; row++) normalize(out + row * width, width, ARGUMENT(float, 6), scale, bias);
    return OK;
}

static int layer_norm_of_sum(void **arguments, Size grid) {
    if (ARGUMENT(void *, 1)) return NOT_SUPPORTED; /* the sum */
    long width = ARGUMENT(int, 8), count = grid.x * width, others = ARGUMENT(int, 9);
    const float *one = FLOATS(2, count), *other = FLOATS(3, others), *added = FLOATS(4, width);
    const float *scale = FLOATS(5, width), *bias = FLOATS(6, width);
    float *out = FLOATS(0, count);
    if (!one || !other || !out || LACKS(4, added) || LACKS(5, scale) || LACKS(6, bias)) return ILLEGAL_ADDRESS;
    for (long i = 0; i < count; i++) out[i] = one[i] + other[i % others] + (added ? added[i % width] : 0);
    for (long i = 0; i < count; i += width) normalize(out + i, width, ARGUMENT(float, 7), scale, bias);
    return OK;
}

#define UNARY_KERNEL(op, run) {"*_UnaryElementWiseIffNS0_" op "IfEE*", 4, {8, 8, 4, 4}, run}
#define BINARY_KERNEL(left, right, types, op, run) \
    {"*_BinaryElementWiseSimpleILb" #left "ELb" #right "E" types "NS0_" op "I*", \
     5, {8, 8, 8, 1, 4}, run##_##left##right}
#define BINARY_KERNELS(types, op, run) \
    BINARY_KERNEL(1, 1, types, op, run), BINARY_KERNEL(0, 1, types, op, run), BINARY_KERNEL(1, 0, types, op, run)
#define PER_CHANNEL_KERNEL(op, run) \
    {"*_BinaryElementWiseRhsPerChannelBatchNIfffNS0_" op "I*", \
     7, {8, 8, sizeof(Division), sizeof(Division), 8, 1, 4}, run##_per_channel}
#define PER_ROW_KERNEL(op, run) \
    {"*_BinaryElementWiseRhsPerChannelBatch1IfffNS0_" op "I*", 6, {8, 8, sizeof(Division), 8, 1, 4}, run##_per_row}
#define BROADCAST_KERNEL_OF(types, op, run) \
    {"*_BinaryElementWiseI" types "NS0_" op "*EELb*", \
     9, {4, sizeof(Steps), 8, sizeof(Steps), 8, sizeof(Divisions), 8, 1, 4}, run##_broadcast}
#define BROADCAST_KERNEL(op, run) BROADCAST_KERNEL_OF("fff", op, run)

static const Kernel KERNELS[] = {
    {"*BroadcastBiasKernelIfiLb0EE*", 7, {8, 8, 8, sizeof(Division), 4, 4, 4}, broadcast_bias},
    {"*reduce_matrix_rows_kernelIfffEE*", 4, {8, 8, 4, 4}, add_rows_up},
    {"*reduce_matrix_columns_kernelIfffNS0_8IdentityES3_Lb0EE*", 6, {4, 4, 8, 8, 8, 8}, sum_rows},
    {"*reduce_matrix_columns_kernelIfffNS0_8IdentityES3_Lb1EE*", 6, {4, 4, 8, 8, 8, 8}, mean_rows},
    {"*_UnaryElementWiseIlfNS0_7OP_CastIlfEE*", 4, {8, 8, 4, 4}, cast},
    {"*_UnaryElementWiseIffNS0_6OP_DivIfEE*", 4, {8, 8, 4, 4}, divided},
    {"*_UnaryElementWiseIlbNS0_7OP_CastIlbEE*", 4, {8, 8, 4, 4}, cast_to_truth},
    {"*_UnaryElementWiseIffNS_7contrib4cuda12OP_QuickGeluIfEE*", 4, {8, 8, 4, 4}, quick_gelu},
    {"*_UnaryElementWiseIffNS0_7OP_CastIffEE*", 4, {8, 8, 4, 4}, same}, 
    UNARY_KERNEL("6OP_Sin", sine), UNARY_KERNEL("6OP_Cos", cosine), UNARY_KERNEL("10OP_Sigmoid", sigmoid),
    UNARY_KERNEL("7OP_Sqrt", root), UNARY_KERNEL("6OP_Neg", negative), UNARY_KERNEL("6OP_Abs", absolute), UNARY_KERNEL("7OP_Relu", relu),
    BINARY_KERNELS("fff", "6OP_Add", sum), BINARY_KERNELS("fff", "6OP_Sub", difference),
    BINARY_KERNELS("fff", "6OP_Mul", product), BINARY_KERNELS("fff", "6OP_Div", quotient),
    BINARY_KERNELS("bff", "10OP_Greater", greater),
    BINARY_KERNELS("bll", "14OP_LessOrEqual", at_most), BINARY_KERNELS("bbb", "6OP_And", both),
    PER_CHANNEL_KERNEL("6OP_Add", sum), PER_CHANNEL_KERNEL("6OP_Mul", product),
    PER_ROW_KERNEL("6OP_Add", sum), PER_ROW_KERNEL("6OP_Mul", product), PER_ROW_KERNEL("6OP_Div", quotient),
    BROADCAST_KERNEL("6OP_Add", sum), BROADCAST_KERNEL("6OP_Mul", product), BROADCAST_KERNEL("6OP_Div", quotient),
    {"*Transpose4DKernelParallelizeMultipleElementsPerThreadInInnermostDimILi4EE*",
     6, {sizeof(Steps), 8, sizeof(Steps), 8, 8, 4}, transpose_first_three},
    {"*Transpose3DKernelIiLj32EE*", 5, {8, 8, 8, 8, 8}, transpose_last_two},
    {"*_SplitSmallInnerKernelI4int4EE*", 5, {40, 8, 40, 8, 4}, split},
    {"*_ConcatKernelSameConcatDimIi*", 6, {sizeof(Division), sizeof(Division), sizeof(Division), 8, sizeof(Pointers), 4},
     join_equal},
    {"*_ConcatKernelOutputMajorIiEE*", 6, {sizeof(Division), sizeof(Division), sizeof(Numbers), 8, sizeof(Pointers), 4},
     join_unequal},
    {"*_TenaryElementWiseSimpleIfLNS0_18BroadcastIndexTypeE?ELS2_1ELS2_1E*", 5, {8, 8, 8, 8, 4}, one_of_two},
    {"*cuda11RangeKernelIlEE*", 4, {8, 8, 8, 8}, range},
    BROADCAST_KERNEL_OF("bll", "14OP_LessOrEqual", at_most), BROADCAST_KERNEL_OF("bbb", "6OP_And", both),
    {"*cuda12ExpandKernelIjLi*", 6, {4, 4, 8, 8, sizeof(Divisions), sizeof(Steps)}, expand},
    {"*_GatherKernelIiEE*", 9, {8, 8, sizeof(Division), sizeof(Division), 8, 8, 8, 8, 4}, gather},
    {"*BiasGeluKernelIfEE*", 4, {8, 8, 8, 8}, bias_gelu},
    {"*softmax_warp_forwardIfffLi*ELb0EE*", 5, {8, 8, 4, 4, 4}, softmax},
    {"*BiasSoftmaxWarpForwardIfffLi*ELb1EE*", 6, {8, 8, 8, 4, 4, sizeof(Division)}, softmax_of_biased},
    {"*cuApplyLayerNormIfffLb0EE*", 13, {8, 8, 8, 8, 4, 4, 4, 8, 8, 4, 8, 8, 8}, layer_norm},
    {"*SkipLayerNormKernelSmallIfLj*ELb0EE*", 10, {8, 8, 8, 8, 8, 8, 8, 4, 4, 4}, layer_norm_of_sum},
};
const Kernel *kernel_named(const char *name) {
    for (size_t i = 0; i < sizeof KERNELS / sizeof *KERNELS; i++)
        if (!fnmatch(KERNELS[i].name, name, 0)) return &KERNELS[i];
    return NULL;
}
