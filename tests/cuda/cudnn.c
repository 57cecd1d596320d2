/* cuDNN, a handle and nothing to compute with: libcudnn.so.9. ONNX Runtime asks for it with each session. */
#include "device.h"
#include <stdlib.h>

typedef struct { Stream *stream; } Handle;
EXPORT size_t cudnnGetVersion(void) { return 91400; }
EXPORT int cudnnCreate(Handle **handle) { *handle = calloc(1, sizeof **handle); return 0; }
EXPORT int cudnnDestroy(Handle *handle) { free(handle); return 0; }
EXPORT int cudnnSetStream(Handle *handle, Stream *stream) { handle->stream = stream; return 0; }
EXPORT int cudnnGetStream(Handle *handle, Stream **stream) { *stream = handle->stream; return 0; }
EXPORT const char *cudnnGetErrorString(int code) { return code ? "CUDNN_STATUS_NOT_SUPPORTED" : "CUDNN_STATUS_SUCCESS"; }
EXPORT void cudnnGetLastErrorString(char *text, size_t size) { if (size) *text = 0; }
