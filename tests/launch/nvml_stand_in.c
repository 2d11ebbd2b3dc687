/* A stand-in for NVIDIA's management library on machines without a GPU: the few functions that are asked of it.

   Which devices there are, and who computes on them, stands in the text file named by NVML_STAND_IN, one line a device:
       UUID NAME [PID ...]
   The file is read anew at every call, so that a test can let processes come and go. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };
enum { MAX_DEVICES = 16, MAX_PIDS = 32 };

typedef struct {
    char uuid[96];
    char name[96];
    unsigned pids[MAX_PIDS];
    unsigned count;
} Device;

typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance;
    unsigned compute_instance;
} Process;

/* A handle is the index of a device plus one, so that none is NULL. */
typedef size_t Handle;

static int read_devices(Device *devices, unsigned *count) {
    const char *path = getenv("NVML_STAND_IN");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[4096];
    if (!file) return DRIVER_NOT_LOADED;
    *count = 0;
    while (*count < MAX_DEVICES && fgets(line, sizeof line, file)) {
        Device *device = &devices[*count];
        char *rest = line, *word = strtok_r(line, " \n", &rest);
        memset(device, 0, sizeof *device);
        if (!word) continue;
        strncpy(device->uuid, word, sizeof device->uuid - 1);
        if ((word = strtok_r(NULL, " \n", &rest))) strncpy(device->name, word, sizeof device->name - 1);
        while ((word = strtok_r(NULL, " \n", &rest)) && device->count < MAX_PIDS)
            device->pids[device->count++] = (unsigned)strtoul(word, NULL, 10);
        ++*count;
    }
    fclose(file);
    return SUCCESS;
}

static int find(Handle handle, Device *found) {
    Device devices[MAX_DEVICES];
    unsigned count;
    int status = read_devices(devices, &count);
    if (status != SUCCESS) return status;
    if (handle < 1 || handle > count) return INVALID_ARGUMENT;
    *found = devices[handle - 1];
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    Device devices[MAX_DEVICES];
    unsigned count;
    (void)flags;
    return read_devices(devices, &count);
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int status) {
    switch (status) {
        case SUCCESS: return "Success";
        case INVALID_ARGUMENT: return "Invalid Argument";
        case NOT_FOUND: return "Not Found";
        case INSUFFICIENT_SIZE: return "Insufficient Size";
        case DRIVER_NOT_LOADED: return "Driver Not Loaded";
        default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    snprintf(version, length, "570.00");
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    Device devices[MAX_DEVICES];
    return read_devices(devices, count);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *handle) {
    Device device;
    *handle = (Handle)index + 1;
    return find(*handle, &device);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Handle *handle) {
    Device devices[MAX_DEVICES];
    unsigned count, i;
    int status = read_devices(devices, &count);
    if (status != SUCCESS) return status;
    for (i = 0; i < count; ++i)
        if (!strcmp(devices[i].uuid, uuid)) {
            *handle = (Handle)i + 1;
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetName(Handle handle, char *name, unsigned length) {
    Device device;
    int status = find(handle, &device);
    if (status == SUCCESS) snprintf(name, length, "%s", device.name);
    return status;
}

int nvmlDeviceGetUUID(Handle handle, char *uuid, unsigned length) {
    Device device;
    int status = find(handle, &device);
    if (status == SUCCESS) snprintf(uuid, length, "%s", device.uuid);
    return status;
}

#ifdef OLD_DRIVER
#define nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetComputeRunningProcesses_v2
#endif

int nvmlDeviceGetComputeRunningProcesses_v3(Handle handle, unsigned *count, Process *processes) {
    Device device;
    unsigned room = *count, i;
    int status = find(handle, &device);
    if (status != SUCCESS) return status;
    *count = device.count;
    if (device.count > room) return INSUFFICIENT_SIZE;
    for (i = 0; i < device.count; ++i) processes[i] = (Process){device.pids[i], 1ULL << 30, 0xFFFFFFFFu, 0xFFFFFFFFu};
    return SUCCESS;
}
