/* A libnvidia-ml.so.1 without GPUs: answers what the environment says, so that the unmodified Python bindings, the
 * dynamic loader and the C structures are all in the test.
 *
 * FAKE_NVML_GPUS    "NVIDIA H800|81559;NVIDIA H20|97871"   name and MiB of each GPU
 * FAKE_NVML_CPUS    "0-3,8-11;4-7,12-15"                   near CPUs: the first list for the first share of GPUs, ...
 * FAKE_NVML_LINKS   "8"                                    active NVLinks of each GPU, of 18 (absent: no NVLink)
 * FAKE_NVML_ENDS    "switch" | "pair" | "pair-untyped"     what links lead to; a pair is GPUs 0-1, 2-3, ...
 * FAKE_NVML_MIG     "1"                                    MIG mode of every GPU
 * FAKE_NVML_SLICES  "0:3g.40gb|40192|42;0:1g.10gb|9728|14|512" slices: profile, MiB, multiprocessors, MiB in use
 * FAKE_NVML_PROCESSES "0:4711:1024;0:4712:2048"            GPU, process, MiB
 * FAKE_NVML_BUSY    "95,20"                                per cent of each GPU's time, the first, the second, ...
 * FAKE_NVML_USED    "1024"                                 MiB in use on every GPU
 * FAKE_NVML_TRAFFIC "138:4000000;197:1000000000"          field number, and what it grows by in a second
 * FAKE_NVML_PCIE    "5000"                                 KB/s sent over PCIe without counters; one more received
 * FAKE_NVML_HEALTHY "4"                                    so many calls of nvmlDeviceGetUtilizationRates meet no fault
 * FAKE_NVML_VALUES  "1:nvmlDeviceGetPowerUsage:350000;*:nvmlDeviceGetP2PStatus:5;0:nvmlDeviceGetClockInfo.1:345"
 *                   GPU, function (and its argument), and the number that it answers in place of the usual one
 * FAKE_NVML_FAULTS  "3:nvmlDeviceGetName:15;*:nvmlDeviceGetMigMode:3;-:nvmlInitWithFlags:9;0:...:hang"
 *                   GPU ("*" any, "-" none), function, and the error that it returns; "hang" never returns
 * FAKE_NVML_INIT_MS "1500"                                 what nvmlInitWithFlags takes
 *
 * GPU i sits at PCI 00000000:<8(i+1)>:00.0; GPUs 0-1, 2-3, ... share a PCIe switch, each half of them a NUMA node.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { NVLINK_TO_GPU = 0, NVLINK_TO_SWITCH = 2, MAX_LINKS = 18, MAX_GPUS = 16, MAX_SLICES = 7 };
enum { ONE_SWITCH = 10, ONE_NODE = 40, SEVERAL_NODES = 50 };

typedef struct {
    int index, slice; /* slice -1: the whole */
    char name[160];
    unsigned long long bytes;
    unsigned int sms;        /* of a slice */
    unsigned long long used; /* by a slice */
} Gpu;
typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} PciInfo;
typedef struct {
    unsigned long long total, free, used;
} MemoryInfo;
typedef struct {
    unsigned int gpu, memory;
} Utilization;
typedef struct {
    unsigned int sms, copy, decoder, encoder, jpeg, ofa, gpuSlices, computeSlices;
    unsigned long long megabytes;
} Attributes;
typedef struct {
    unsigned int pid;
    unsigned long long bytes;
    unsigned int gpuInstance, computeInstance;
} Process;

static Gpu gpus[MAX_GPUS], slices[MAX_GPUS * MAX_SLICES];
static int count, slice_count;

/* What is usual for a board: CUDA cores, compute capability, W, MHz of multiprocessors and memory, PCIe generation. */
typedef struct {
    const char *word;
    unsigned int cores, major, minor, watts, sm, memory, generation;
} Board;
static const Board boards[] = {
    {"H800", 16896, 9, 0, 700, 1980, 2619, 5}, {"H20", 9984, 9, 0, 500, 1980, 2619, 5},
    {"A100", 6912, 8, 0, 400, 1410, 1593, 4},  {"L40S", 18176, 8, 9, 350, 2520, 9001, 4},
    {"", 1280, 9, 0, 300, 1500, 1500, 4},
};

static const Board *board(const Gpu *gpu) {
    const Board *one = boards;
    while (!strstr(gpu->name, one->word))
        one++;
    return one;
}

static const char *env(const char *name) {
    const char *value = getenv(name);
    return value ? value : "";
}

static int fault(int index, const char *function) {
    char faults[4096];
    snprintf(faults, sizeof faults, "%s", env("FAKE_NVML_FAULTS"));
    char *rest = NULL;
    for (char *one = strtok_r(faults, ";", &rest); one; one = strtok_r(NULL, ";", &rest)) {
        char who[8], what[96], error[16];
        if (sscanf(one, "%7[^:]:%95[^:]:%15s", who, what, error) != 3 || strcmp(what, function))
            continue;
        if (strcmp(who, "*") && (index < 0 ? strcmp(who, "-") : strcmp(who, "-") == 0 || atoi(who) != index))
            continue;
        while (!strcmp(error, "hang"))
            pause();
        return atoi(error);
    }
    return SUCCESS;
}

/* The number that a function answers, with its argument where it has one (-1: none). */
static unsigned long long value(const Gpu *gpu, const char *function, int argument, unsigned long long usual) {
    char values[4096], name[96];
    snprintf(values, sizeof values, "%s", env("FAKE_NVML_VALUES"));
    snprintf(name, sizeof name, argument < 0 ? "%s" : "%s.%d", function, argument);
    char *rest = NULL;
    for (char *one = strtok_r(values, ";", &rest); one; one = strtok_r(NULL, ";", &rest)) {
        char who[8], what[96], number[24];
        if (sscanf(one, "%7[^:]:%95[^:]:%23s", who, what, number) == 3 && !strcmp(what, name) &&
            (!strcmp(who, "*") || atoi(who) == gpu->index))
            return strtoull(number, NULL, 0);
    }
    return usual;
}

#define CHECK(index)                                                                                                   \
    do {                                                                                                               \
        int failed = fault(index, __func__);                                                                           \
        if (failed)                                                                                                    \
            return failed;                                                                                             \
    } while (0)

static void read_slices(void) {
    char list[4096];
    snprintf(list, sizeof list, "%s", env("FAKE_NVML_SLICES"));
    char *rest = NULL;
    slice_count = 0;
    int places[MAX_GPUS] = {0};
    for (char *one = strtok_r(list, ";", &rest); one && slice_count < MAX_GPUS * MAX_SLICES;
         one = strtok_r(NULL, ";", &rest)) {
        Gpu *slice = &slices[slice_count];
        char profile[32];
        unsigned long long mib = 0, used = 0;
        if (sscanf(one, "%d:%31[^|]|%llu|%u|%llu", &slice->index, profile, &mib, &slice->sms, &used) < 4 ||
            slice->index >= count)
            continue;
        slice->used = used << 20;
        slice->slice = places[slice->index]++;
        slice->bytes = mib << 20;
        snprintf(slice->name, sizeof slice->name, "%s MIG %s", gpus[slice->index].name, profile);
        slice_count++;
    }
}

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    CHECK(-1);
    usleep((unsigned int)atoi(env("FAKE_NVML_INIT_MS")) * 1000u);
    char list[4096];
    snprintf(list, sizeof list, "%s", env("FAKE_NVML_GPUS"));
    char *rest = NULL;
    count = 0;
    for (char *one = strtok_r(list, ";", &rest); one && count < MAX_GPUS; one = strtok_r(NULL, ";", &rest)) {
        unsigned long long mib = 0;
        sscanf(one, "%95[^|]|%llu", gpus[count].name, &mib);
        gpus[count].bytes = mib << 20;
        gpus[count].index = count;
        gpus[count].slice = -1;
        count++;
    }
    read_slices();
    return SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int error) {
    (void)error;
    return "fake error";
}

int nvmlSystemGetDriverVersion(char *text, unsigned int length) {
    CHECK(-1);
    snprintf(text, length, "550.54.15");
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *result) {
    CHECK(-1);
    *result = (unsigned int)count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Gpu **handle) {
    if (index >= (unsigned int)count)
        return INVALID_ARGUMENT;
    CHECK((int)index);
    *handle = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetName(Gpu *gpu, char *text, unsigned int length) {
    CHECK(gpu->index);
    snprintf(text, length, "%s", gpu->name);
    return SUCCESS;
}

int nvmlDeviceGetUUID(Gpu *gpu, char *text, unsigned int length) {
    CHECK(gpu->index);
    if (gpu->slice < 0)
        snprintf(text, length, "GPU-%08x-0000-0000-0000-000000000000", gpu->index);
    else
        snprintf(text, length, "MIG-%08x-0000-0000-0000-%012x", gpu->index, gpu->slice);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Gpu *gpu, MemoryInfo *memory) {
    CHECK(gpu->index);
    int denied = gpu->slice < 0 ? fault(gpu->index, "nvmlDeviceGetMemoryInfo.whole") : SUCCESS;
    if (denied)
        return denied;
    memory->total = gpu->bytes;
    memory->used = gpu->slice < 0 ? (unsigned long long)atoi(env("FAKE_NVML_USED")) << 20 : gpu->used;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Gpu *gpu, Utilization *rates) {
    static int calls;
    if (++calls > atoi(env("FAKE_NVML_HEALTHY")))
        CHECK(gpu->index);
    if (atoi(env("FAKE_NVML_MIG")))
        return NOT_SUPPORTED; /* as nvml.h says: neither of the whole nor of a slice */
    char list[256];
    snprintf(list, sizeof list, "%s", env("FAKE_NVML_BUSY"));
    char *rest = NULL, *one = strtok_r(list, ",", &rest);
    for (int skip = gpu->index; skip > 0 && one; skip--)
        one = strtok_r(NULL, ",", &rest);
    rates->gpu = one ? (unsigned int)atoi(one) : 0;
    rates->memory = 0;
    return SUCCESS;
}

static void pci_of(int index, PciInfo *pci) {
    memset(pci, 0, sizeof *pci);
    pci->bus = 8u * (unsigned int)(index + 1);
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:00.0", 0u, pci->bus);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:00.0", 0u, pci->bus);
}

int nvmlDeviceGetPciInfo_v3(Gpu *gpu, PciInfo *pci) {
    CHECK(gpu->index);
    pci_of(gpu->index, pci);
    return SUCCESS;
}

int nvmlDeviceGetCpuAffinity(Gpu *gpu, unsigned int words, unsigned long *set) {
    CHECK(gpu->index);
    char lists[1024];
    snprintf(lists, sizeof lists, "%s", env("FAKE_NVML_CPUS"));
    if (!*lists)
        return NOT_SUPPORTED;
    int shares = 1;
    for (char *at = lists; *at; at++)
        shares += *at == ';';
    char *rest = NULL, *mine = strtok_r(lists, ";", &rest);
    for (int skip = gpu->index * shares / count; skip > 0; skip--)
        mine = strtok_r(NULL, ";", &rest);
    memset(set, 0, words * sizeof *set);
    for (char *range = strtok_r(mine, ",", &rest); range; range = strtok_r(NULL, ",", &rest)) {
        unsigned int first = 0, last = 0;
        if (sscanf(range, "%u-%u", &first, &last) < 2)
            last = first;
        for (unsigned int cpu = first; cpu <= last; cpu++) {
            if (cpu / 64 >= words)
                return INSUFFICIENT_SIZE;
            set[cpu / 64] |= 1ul << (cpu % 64);
        }
    }
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Gpu *gpu, unsigned int *current, unsigned int *pending) {
    CHECK(gpu->index);
    *current = *pending = (unsigned int)atoi(env("FAKE_NVML_MIG"));
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(Gpu *gpu, unsigned int link, unsigned int *active) {
    CHECK(gpu->index);
    if (!*env("FAKE_NVML_LINKS"))
        return NOT_SUPPORTED;
    if (link >= MAX_LINKS)
        return INVALID_ARGUMENT;
    *active = link < (unsigned int)atoi(env("FAKE_NVML_LINKS"));
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(Gpu *gpu, unsigned int link, unsigned int *type) {
    CHECK(gpu->index);
    (void)link;
    if (!strcmp(env("FAKE_NVML_ENDS"), "pair-untyped"))
        return NOT_SUPPORTED;
    *type = strcmp(env("FAKE_NVML_ENDS"), "pair") ? NVLINK_TO_SWITCH : NVLINK_TO_GPU;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Gpu *gpu, unsigned int link, PciInfo *pci) {
    CHECK(gpu->index);
    (void)link;
    pci_of(gpu->index ^ 1, pci);
    return SUCCESS;
}

/* Functions that answer one number. */
#define NUMBER(function, usual)                                                                                        \
    int function(Gpu *gpu, unsigned int *result) {                                                                     \
        CHECK(gpu->index);                                                                                             \
        if (gpu->slice >= 0)                                                                                           \
            return INVALID_ARGUMENT;                                                                                   \
        *result = (unsigned int)value(gpu, __func__, -1, usual);                                                       \
        return SUCCESS;                                                                                                \
    }
NUMBER(nvmlDeviceGetNumGpuCores, board(gpu)->cores)
NUMBER(nvmlDeviceGetPowerUsage, board(gpu)->watts * 200u) /* a fifth of the limit, in mW */
NUMBER(nvmlDeviceGetEnforcedPowerLimit, board(gpu)->watts * 1000u)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, board(gpu)->watts * 1000u)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, board(gpu)->generation)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, board(gpu)->generation)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, 16)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, *env("FAKE_NVML_MIG") ? MAX_SLICES : 0)

static unsigned int mhz(const Gpu *gpu, unsigned int clock) {
    return clock == 2 ? board(gpu)->memory : board(gpu)->sm;
}

int nvmlDeviceGetClockInfo(Gpu *gpu, unsigned int clock, unsigned int *result) {
    CHECK(gpu->index);
    *result = (unsigned int)value(gpu, __func__, (int)clock, mhz(gpu, clock));
    return SUCCESS;
}

int nvmlDeviceGetMaxClockInfo(Gpu *gpu, unsigned int clock, unsigned int *result) {
    CHECK(gpu->index);
    *result = (unsigned int)value(gpu, __func__, (int)clock, mhz(gpu, clock));
    return SUCCESS;
}

int nvmlDeviceGetTemperature(Gpu *gpu, unsigned int sensor, unsigned int *result) {
    CHECK(gpu->index);
    (void)sensor;
    *result = (unsigned int)value(gpu, __func__, -1, 31);
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *gpu, unsigned long long *reasons) {
    CHECK(gpu->index);
    *reasons = value(gpu, __func__, -1, 1); /* idle */
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(Gpu *gpu, int *major, int *minor) {
    CHECK(gpu->index);
    *major = (int)board(gpu)->major;
    *minor = (int)board(gpu)->minor;
    return SUCCESS;
}

int nvmlDeviceGetEccMode(Gpu *gpu, unsigned int *current, unsigned int *pending) {
    CHECK(gpu->index);
    *current = *pending = (unsigned int)value(gpu, __func__, -1, 1);
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(Gpu *gpu, unsigned int kind, unsigned int since, unsigned long long *errors) {
    CHECK(gpu->index);
    (void)since;
    *errors = value(gpu, __func__, (int)kind, 0);
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(Gpu *gpu, unsigned int *corrected, unsigned int *uncorrected, unsigned int *pending,
                              unsigned int *failed) {
    CHECK(gpu->index);
    *corrected = *uncorrected = 0;
    *pending = (unsigned int)value(gpu, __func__, 2, 0);
    *failed = (unsigned int)value(gpu, __func__, 3, 0);
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Gpu *gpu, unsigned int place, Gpu **handle) {
    CHECK(gpu->index);
    for (int i = 0; i < slice_count; i++)
        if (slices[i].index == gpu->index && slices[i].slice == (int)place) {
            *handle = &slices[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetAttributes_v2(Gpu *gpu, Attributes *attributes) {
    CHECK(gpu->index);
    if (gpu->slice < 0)
        return NOT_SUPPORTED;
    memset(attributes, 0, sizeof *attributes);
    attributes->sms = gpu->sms;
    attributes->megabytes = gpu->bytes >> 20;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, unsigned int *room, Process *processes) {
    CHECK(gpu->index);
    char list[1024];
    snprintf(list, sizeof list, "%s", env("FAKE_NVML_PROCESSES"));
    char *rest = NULL;
    unsigned int found = 0, fits = *room;
    for (char *one = strtok_r(list, ";", &rest); one; one = strtok_r(NULL, ";", &rest)) {
        int index;
        Process process = {0};
        if (sscanf(one, "%d:%u:%llu", &index, &process.pid, &process.bytes) != 3 || index != gpu->index)
            continue;
        process.bytes <<= 20;
        if (found++ < fits)
            processes[found - 1] = process;
    }
    *room = found;
    return found > fits ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetTopologyCommonAncestor(Gpu *one, Gpu *other, unsigned int *level) {
    CHECK(one->index);
    int half = (count + 1) / 2, alike = one->index / half == other->index / half;
    unsigned int usual = one->index / 2 == other->index / 2 ? ONE_SWITCH : alike ? ONE_NODE : SEVERAL_NODES;
    *level = (unsigned int)value(one, __func__, -1, usual);
    return SUCCESS;
}

int nvmlDeviceGetP2PStatus(Gpu *one, Gpu *other, unsigned int what, unsigned int *status) {
    CHECK(one->index);
    (void)other, (void)what;
    *status = (unsigned int)value(one, __func__, -1, SUCCESS);
    return SUCCESS;
}

/* Counters that grow evenly, with the time at which they were read. */
typedef struct {
    unsigned int field, scope;
    long long timestamp, latency;
    unsigned int type;
    int result;
    union {
        double number;
        unsigned long long count;
    } value;
} FieldValue;

int nvmlDeviceGetFieldValues(Gpu *gpu, int length, FieldValue *values) {
    CHECK(gpu->index);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    long long us = now.tv_sec * 1000000ll + now.tv_nsec / 1000;
    for (int i = 0; i < length; i++) {
        char list[256];
        snprintf(list, sizeof list, "%s", env("FAKE_NVML_TRAFFIC"));
        char *rest = NULL;
        values[i].result = NOT_SUPPORTED;
        for (char *one = strtok_r(list, ";", &rest); one; one = strtok_r(NULL, ";", &rest)) {
            unsigned int field = 0;
            unsigned long long rate = 0;
            if (sscanf(one, "%u:%llu", &field, &rate) != 2 || field != values[i].field)
                continue;
            values[i].type = 3;
            values[i].timestamp = us;
            values[i].value.count = (unsigned long long)((long double)rate * us / 1e6L);
            values[i].result = SUCCESS;
        }
    }
    return SUCCESS;
}

int nvmlDeviceGetPcieThroughput(Gpu *gpu, unsigned int counter, unsigned int *kilobytes) {
    CHECK(gpu->index);
    if (!*env("FAKE_NVML_PCIE"))
        return NOT_SUPPORTED;
    *kilobytes = (unsigned int)atoi(env("FAKE_NVML_PCIE")) + counter;
    return SUCCESS;
}
