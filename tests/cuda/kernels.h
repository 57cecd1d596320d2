/* The kernels of ONNX Runtime that the stand-in can compute. */
#pragma once
#include "device.h"

enum { MOST_ARGUMENTS = 8, LARGEST_ARGUMENT = 16 };
/* What its mangled name contains, how large its arguments are, and what it does with pointers to them. */
typedef struct { const char *name; int count; unsigned char sizes[MOST_ARGUMENTS]; int (*run)(void **arguments); } Kernel;
const Kernel *kernel_named(const char *name); /* NULL for one that isn't known */
