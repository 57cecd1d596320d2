/* The kernels of ONNX Runtime that the stand-in can compute. */
#pragma once
#include "device.h"

enum { MOST_ARGUMENTS = 13, LARGEST_ARGUMENT = 264 };
typedef struct { unsigned x, y, z; } Size;
/* A pattern of its mangled name, how large its arguments are, and what it does with pointers to them on a grid. */
typedef struct {
    const char *name; int count; unsigned short sizes[MOST_ARGUMENTS]; int (*run)(void **arguments, Size grid);
} Kernel;
const Kernel *kernel_named(const char *name); /* NULL for one that isn't known */
