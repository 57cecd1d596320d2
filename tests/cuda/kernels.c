/* In C what onnxruntime/core/providers/cuda has for the device, as far as tests' models need it. Another version of
   ONNX Runtime may have other names and arguments; the runtime says which kernel it would have needed. */
#include "kernels.h"
#include <math.h>
#include <string.h>

#define ARGUMENT(type, number) (*(type *)arguments[number])
#define FLOATS(number, count) gpu_at(ARGUMENT(void *, number), 4l * (count))

typedef struct { int divisor; unsigned multiplier, shift; } Division;
_Static_assert(sizeof(Division) <= LARGEST_ARGUMENT, "has room");

static int broadcast_bias(void **arguments) {
    long count = ARGUMENT(long, 2);
    int width = ARGUMENT(Division, 3).divisor, per_row = ARGUMENT(int, 4), per_column = ARGUMENT(int, 5);
    const float *bias = FLOATS(0, count / width * per_row + per_column);
    float *out = FLOATS(1, count), scale = ARGUMENT(float, 6);
    if (!bias || !out) return ILLEGAL_ADDRESS;
    for (long i = 0; i < count; i++) out[i] = scale * bias[i / width * per_row + i % width * per_column];
    return OK;
}

static int add_rows_up(void **arguments) {
    long rows = ARGUMENT(int, 2), columns = ARGUMENT(int, 3);
    const float *in = FLOATS(0, rows * columns);
    float *out = FLOATS(1, columns);
    if (!in || !out) return ILLEGAL_ADDRESS;
    for (long i = 0; i < rows * columns; i++) out[i % columns] = (i < columns ? 0 : out[i % columns]) + in[i];
    return OK;
}

#define UNARY(name, expression) \
    static int name(void **arguments) { \
        long count = ARGUMENT(int, 3); \
        const float *in = FLOATS(0, count); \
        float *out = FLOATS(1, count); \
        if (!in || !out) return ILLEGAL_ADDRESS; \
        for (long i = 0; i < count; i++) { float x = in[i]; out[i] = expression; } \
        return OK; \
    }
UNARY(negative, -x)
UNARY(absolute, fabsf(x))
UNARY(relu, x > 0 ? x : 0)

/* `left` and `right`: how far each side goes on with each element, 0 for a single number. */
#define BINARY_OF(name, type, expression, left, right) \
    static int name##_##left##right(void **arguments) { \
        long count = ARGUMENT(int, 4); \
        const float *one = FLOATS(0, left ? count : 1), *other = FLOATS(1, right ? count : 1); \
        type *out = gpu_at(ARGUMENT(void *, 2), count * sizeof(type)); \
        if (!one || !other || !out) return ILLEGAL_ADDRESS; \
        for (long i = 0; i < count; i++) { float x = one[i * left], y = other[i * right]; out[i] = expression; } \
        return OK; \
    }
#define BINARY(name, type, expression) \
    BINARY_OF(name, type, expression, 1, 1) BINARY_OF(name, type, expression, 0, 1) BINARY_OF(name, type, expression, 1, 0)
BINARY(sum, float, x + y)
BINARY(difference, float, x - y)
BINARY(product, float, x * y)
BINARY(greater, char, x > y)

#define UNARY_KERNEL(op, run) {"_UnaryElementWiseIffNS0_" op "IfEE", 4, {8, 8, 4, 4}, run}
#define BINARY_KERNEL(left, right, out, op, run) \
    {"_BinaryElementWiseSimpleILb" #left "ELb" #right "E" out "ffNS0_" op "I", 5, {8, 8, 8, 1, 4}, run##_##left##right}
#define BINARY_KERNELS(out, op, run) \
    BINARY_KERNEL(1, 1, out, op, run), BINARY_KERNEL(0, 1, out, op, run), BINARY_KERNEL(1, 0, out, op, run)

static const Kernel KERNELS[] = {
    {"BroadcastBiasKernelIfiLb0EE", 7, {8, 8, 8, sizeof(Division), 4, 4, 4}, broadcast_bias},
    {"reduce_matrix_rows_kernelIfffEE", 4, {8, 8, 4, 4}, add_rows_up},
    UNARY_KERNEL("6OP_Neg", negative), UNARY_KERNEL("6OP_Abs", absolute), UNARY_KERNEL("7OP_Relu", relu),
    BINARY_KERNELS("f", "6OP_Add", sum), BINARY_KERNELS("f", "6OP_Sub", difference),
    BINARY_KERNELS("f", "6OP_Mul", product), BINARY_KERNELS("b", "10OP_Greater", greater),
};
const Kernel *kernel_named(const char *name) {
    for (size_t i = 0; i < sizeof KERNELS / sizeof *KERNELS; i++) if (strstr(name, KERNELS[i].name)) return &KERNELS[i];
    return NULL;
}
