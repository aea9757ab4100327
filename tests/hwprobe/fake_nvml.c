/* A libnvidia-ml.so.1 without GPUs: answers what the environment says, so that the unmodified Python bindings, the
 * dynamic loader and the C structures are all in the test.
 *
 * FAKE_NVML_GPUS    "NVIDIA H800|81559;NVIDIA H20|97871"   name and MiB of each GPU
 * FAKE_NVML_CPUS    "0-3,8-11;4-7,12-15"                   near CPUs: the first list for the first share of GPUs, ...
 * FAKE_NVML_LINKS   "8"                                    active NVLinks of each GPU, of 18 (absent: no NVLink)
 * FAKE_NVML_ENDS    "switch" | "pair" | "pair-untyped"     what links lead to; a pair is GPUs 0-1, 2-3, ...
 * FAKE_NVML_MIG     "1"                                    MIG mode of every GPU
 * FAKE_NVML_BUSY    "95,20"                                per cent of each GPU's time, the first, the second, ...
 * FAKE_NVML_USED    "1024"                                 MiB in use on every GPU
 * FAKE_NVML_HEALTHY "4"                                    so many calls of nvmlDeviceGetUtilizationRates meet no fault
 * FAKE_NVML_FAULTS  "3:nvmlDeviceGetName:15;*:nvmlDeviceGetMigMode:3;-:nvmlInitWithFlags:9;0:...:hang"
 *                   GPU ("*" any, "-" none), function, and the error that it returns; "hang" never returns
 *
 * GPU i sits at PCI 00000000:<8(i+1)>:00.0.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };
enum { NVLINK_TO_GPU = 0, NVLINK_TO_SWITCH = 2, MAX_LINKS = 18, MAX_GPUS = 16 };

typedef struct {
    int index;
    char name[96];
    unsigned long long bytes;
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

static Gpu gpus[MAX_GPUS];
static int count;

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

#define CHECK(index)                                                                                                   \
    do {                                                                                                               \
        int failed = fault(index, __func__);                                                                           \
        if (failed)                                                                                                    \
            return failed;                                                                                             \
    } while (0)

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    CHECK(-1);
    char list[4096];
    snprintf(list, sizeof list, "%s", env("FAKE_NVML_GPUS"));
    char *rest = NULL;
    count = 0;
    for (char *one = strtok_r(list, ";", &rest); one && count < MAX_GPUS; one = strtok_r(NULL, ";", &rest)) {
        unsigned long long mib = 0;
        sscanf(one, "%95[^|]|%llu", gpus[count].name, &mib);
        gpus[count].bytes = mib << 20;
        gpus[count].index = count;
        count++;
    }
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
    snprintf(text, length, "GPU-%08x-0000-0000-0000-000000000000", gpu->index);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Gpu *gpu, MemoryInfo *memory) {
    CHECK(gpu->index);
    memory->total = gpu->bytes;
    memory->used = (unsigned long long)atoi(env("FAKE_NVML_USED")) << 20;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Gpu *gpu, Utilization *rates) {
    static int calls;
    if (++calls > atoi(env("FAKE_NVML_HEALTHY")))
        CHECK(gpu->index);
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
