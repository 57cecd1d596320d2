/* NVIDIA's management library: libnvidia-ml.so.1. It tells what this process has, as if it were alone on the machine. */
#include "device.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NOT_FOUND_HERE = 6 };
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Rates;
static int numbers[8];

EXPORT int nvmlInitWithFlags(unsigned flags) { return 0; }
EXPORT int nvmlShutdown(void) { return 0; }
EXPORT const char *nvmlErrorString(int code) { return code ? "Not Found" : "The operation was successful"; }
EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, int **handle) {
    for (int number = 0; number < gpu_count(); number++) {
        char name[64] = "GPU-", byte[3];
        snprintf(byte, sizeof byte, "%02x", 0x10 + number);
        for (int i = 0; i < 16; i++) {
            if (i == 4 || i == 6 || i == 8 || i == 10) strcat(name, "-");
            strcat(name, byte);
        }
        numbers[number] = number;
        *handle = &numbers[number];
        if (!strcmp(name, uuid)) return 0;
    }
    return NOT_FOUND_HERE;
}
EXPORT int nvmlDeviceGetMemoryInfo(int *handle, Memory *memory) {
    size_t free, total;
    gpu_enter_anyhow("nvmlDeviceGetMemoryInfo");
    int before = gpu_current();
    gpu_make_current(*handle);
    gpu_memory(&free, &total);
    gpu_make_current(before);
    *memory = (Memory){total, free, total - free};
    return gpu_leave(0);
}
EXPORT int nvmlDeviceGetUtilizationRates(int *handle, Rates *rates) {
    gpu_enter_anyhow("nvmlDeviceGetUtilizationRates");
    *rates = (Rates){gpu_busy(*handle), 25};
    return gpu_leave(0);
}
EXPORT int nvmlDeviceGetPowerUsage(int *handle, unsigned *mw) { *mw = 100000; return 0; }
EXPORT int nvmlDeviceGetPowerManagementLimit(int *handle, unsigned *mw) { *mw = 700000; return 0; }
EXPORT int nvmlDeviceGetTotalEnergyConsumption(int *handle, unsigned long long *mj) {
    static unsigned long long taken;
    *mj = taken += 1000;
    return 0;
}
