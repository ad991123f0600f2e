/* A libnvidia-ml.so.1 without a GPU. The state file named by FAKE_NVML_STATE is read anew at every call, so a test may
 * change it while the library is in use; what a caller sets is written back to it. Lines are KEY=VALUE, see state.py:
 *   driver nvml cuda count log            gpu.N.FIELD            gpu.N.mig.K=UUID
 *   fail.FUNCTION=CODE  gpu.N.fail.FUNCTION=CODE      answer with this nvmlReturn_t
 *   hang.FUNCTION=1     gpu.N.hang.FUNCTION=1         never answer     (crash.FUNCTION=1 likewise: abort)
 * `log` names a file to which each call appends its name and GPU: what was touched, and in which order. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <unistd.h>

enum { OK, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, INSUFFICIENT_SIZE };
enum { MAX_GPUS = 16, MAX_MIG = 8, LINE = 512 };

typedef struct device { int gpu, mig; } *Device;
typedef unsigned int uint;
typedef unsigned long long ull;

static struct device handles[MAX_GPUS][MAX_MIG + 1];
static int users;

static int lookup(const char *key, char *value, size_t size)
{
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "re") : NULL;
    char line[LINE];
    size_t length = strlen(key);
    int found = 0;

    while (file && !found && fgets(line, sizeof line, file)) {
        if (strncmp(line, key, length) || line[length] != '=')
            continue;
        line[strcspn(line, "\n")] = 0;
        snprintf(value, size, "%s", line + length + 1);
        found = 1;
    }
    if (file)
        fclose(file);
    return found;
}

static int field(Device device, const char *name, char *value, size_t size)
{
    char key[128];
    snprintf(key, sizeof key, "gpu.%d.%s", device->gpu, name);
    return lookup(key, value, size);
}

static int number(Device device, const char *name, ull *value)
{
    char text[LINE];
    if (!field(device, name, text, sizeof text))
        return NOT_SUPPORTED;
    *value = strtoull(text, NULL, 0);
    return OK;
}

/* Replace one line of the state, under a lock that the tests take too. */
static int store(Device device, const char *name, const char *value)
{
    const char *path = getenv("FAKE_NVML_STATE");
    char key[128], lock[LINE], fresh[LINE], line[LINE];
    snprintf(key, sizeof key, "gpu.%d.%s=", device->gpu, name);
    snprintf(lock, sizeof lock, "%s.lock", path);
    snprintf(fresh, sizeof fresh, "%s.new", path);
    int fd = open(lock, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    flock(fd, LOCK_EX);
    FILE *from = fopen(path, "re"), *to = fopen(fresh, "we");
    while (fgets(line, sizeof line, from))
        if (strncmp(line, key, strlen(key)))
            fputs(line, to);
    fprintf(to, "%s%s\n", key, value);
    fclose(from);
    fclose(to);
    rename(fresh, path);
    close(fd);
    return OK;
}

/* Every call begins here: log it, then hang or fail when the state says so. */
static int enter(const char *function, Device device)
{
    char key[128], text[LINE];
    if (lookup("log", text, sizeof text)) {
        int fd = open(text, O_CREAT | O_APPEND | O_WRONLY | O_CLOEXEC, 0600);
        dprintf(fd, "%s %d\n", function, device ? device->gpu : -1);
        close(fd);
    }
    for (int own = 0; own < (device ? 2 : 1); own++) {
        char prefix[32] = "";
        if (own)
            snprintf(prefix, sizeof prefix, "gpu.%d.", device->gpu);
        snprintf(key, sizeof key, "%shang.%s", prefix, function);
        while (lookup(key, text, sizeof text))
            usleep(50000);
        snprintf(key, sizeof key, "%scrash.%s", prefix, function);
        if (lookup(key, text, sizeof text))
            abort();
        snprintf(key, sizeof key, "%sfail.%s", prefix, function);
        if (lookup(key, text, sizeof text))
            return atoi(text);
    }
    return users || !strncmp(function, "nvmlInit", 8) ? OK : UNINITIALIZED;
}

#define ENTER(device) do { int code = enter(__func__, device); if (code) return code; } while (0)
#define TRY(call) do { int code = (call); if (code) return code; } while (0)

static int copy(const char *text, char *buffer, uint size)
{
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return OK;
}

static int system_text(const char *key, char *buffer, uint size)
{
    char text[LINE] = "";
    lookup(key, text, sizeof text);
    return copy(text, buffer, size);
}

int nvmlInitWithFlags(uint flags) { (void)flags; ENTER(NULL); users++; return OK; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { ENTER(NULL); users--; return OK; }

const char *nvmlErrorString(int code)
{
    static char text[32];
    snprintf(text, sizeof text, "fake error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *b, uint size) { ENTER(NULL); return system_text("driver", b, size); }
int nvmlSystemGetNVMLVersion(char *b, uint size) { ENTER(NULL); return system_text("nvml", b, size); }

int nvmlSystemGetCudaDriverVersion(int *version)
{
    char text[32] = "0";
    ENTER(NULL);
    lookup("cuda", text, sizeof text);
    *version = atoi(text);
    return OK;
}

static int gpu_count(void)
{
    char text[32] = "0";
    lookup("count", text, sizeof text);
    return atoi(text) < MAX_GPUS ? atoi(text) : MAX_GPUS;
}

int nvmlDeviceGetCount_v2(uint *count) { ENTER(NULL); *count = gpu_count(); return OK; }

static Device device_of(int gpu, int mig)
{
    handles[gpu][mig] = (struct device){ gpu, mig };
    return &handles[gpu][mig];
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Device *device)
{
    uint want[4], have[4];
    char text[LINE];
    ENTER(NULL);
    if (sscanf(bus, "%x:%x:%x.%x", want, want + 1, want + 2, want + 3) != 4)
        return INVALID_ARGUMENT;
    for (int i = 0; i < gpu_count(); i++) {
        Device it = device_of(i, 0);
        if (!field(it, "pci", text, sizeof text))
            continue;
        sscanf(text, "%x:%x:%x.%x", have, have + 1, have + 2, have + 3);
        if (memcmp(want, have, sizeof want))
            continue;
        ENTER(it);
        *device = it;
        return OK;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByIndex_v2(uint index, Device *device)
{
    ENTER(NULL);
    if ((int)index >= gpu_count())
        return INVALID_ARGUMENT;
    *device = device_of(index, 0);
    ENTER(*device);
    return OK;
}

typedef struct { char legacy[16]; uint domain, bus, device, id, subsystem; char bus_id[32]; } PciInfo;

int nvmlDeviceGetPciInfo_v3(Device d, PciInfo *info)
{
    char text[LINE];
    uint function;
    ENTER(d);
    if (!field(d, "pci", text, sizeof text))
        return NOT_FOUND;
    sscanf(text, "%x:%x:%x.%x", &info->domain, &info->bus, &info->device, &function);
    snprintf(info->legacy, sizeof info->legacy, "%04X:%02X:%02X.0", info->domain & 0xffff, info->bus & 0xff, info->device & 0xff);
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.0", info->domain, info->bus, info->device);
    return OK;
}

static int text_field(Device d, const char *name, char *buffer, uint size)
{
    char text[LINE];
    return field(d, name, text, sizeof text) ? copy(text, buffer, size) : NOT_SUPPORTED;
}

int nvmlDeviceGetName(Device d, char *b, uint size) { ENTER(d); return text_field(d, "name", b, size); }

int nvmlDeviceGetUUID(Device d, char *b, uint size)
{
    char name[32];
    ENTER(d);
    snprintf(name, sizeof name, "mig.%d", d->mig - 1);
    return text_field(d, d->mig ? name : "uuid", b, size);
}

int nvmlDeviceGetCpuAffinity(Device d, uint words, unsigned long *set)
{
    char text[LINE];
    ENTER(d);
    if (!field(d, "affinity", text, sizeof text))
        return NOT_SUPPORTED;
    memset(set, 0, words * sizeof *set);
    for (size_t i = 0, digits = strlen(text); i < digits; i++) {
        char digit[2] = { text[digits - 1 - i], 0 };
        if (i / 16 < words)
            set[i / 16] |= strtoul(digit, NULL, 16) << 4 * (i % 16);
    }
    return OK;
}

int nvmlDeviceGetMigMode(Device d, uint *current, uint *pending)
{
    ull now, later;
    ENTER(d);
    TRY(number(d, "mig_current", &now));
    later = now;
    number(d, "mig_pending", &later);
    *current = now;
    *pending = later;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(Device d, uint *count) { ENTER(d); *count = MAX_MIG - 1; return OK; }

int nvmlDeviceGetMigDeviceHandleByIndex(Device d, uint index, Device *mig)
{
    char name[32], text[LINE];
    ENTER(d);
    snprintf(name, sizeof name, "mig.%u", index);
    if (index >= MAX_MIG || !field(d, name, text, sizeof text))
        return NOT_FOUND;
    *mig = device_of(d->gpu, index + 1);
    return OK;
}

/* The many functions of the form "one number of one GPU". */
#define GETTER(function, name) int function(Device d, uint *value) \
    { ull n; ENTER(d); TRY(number(d, name, &n)); *value = n; return OK; }
#define CLOCK_GETTER(function, name) int function(Device d, uint kind, uint *value) \
    { ull n; (void)kind; ENTER(d); TRY(number(d, name, &n)); *value = n; return OK; }

GETTER(nvmlDeviceGetPersistenceMode, "persistence")
GETTER(nvmlDeviceGetPowerUsage, "power")
GETTER(nvmlDeviceGetPowerManagementLimit, "power_limit")
GETTER(nvmlDeviceGetPowerManagementDefaultLimit, "power_default")
GETTER(nvmlDeviceGetEnforcedPowerLimit, "power_enforced")
GETTER(nvmlDeviceGetPerformanceState, "pstate")
GETTER(nvmlDeviceGetComputeMode, "compute_mode")
GETTER(nvmlDeviceGetRetiredPagesPendingStatus, "retired_pending")
GETTER(nvmlDeviceGetCurrPcieLinkGeneration, "link_gen")
GETTER(nvmlDeviceGetCurrPcieLinkWidth, "link_width")
GETTER(nvmlDeviceGetMaxPcieLinkGeneration, "link_gen_max")
GETTER(nvmlDeviceGetMaxPcieLinkWidth, "link_width_max")
CLOCK_GETTER(nvmlDeviceGetTemperature, "temperature")
CLOCK_GETTER(nvmlDeviceGetClockInfo, "sm_clock")
CLOCK_GETTER(nvmlDeviceGetMaxClockInfo, "sm_clock_max")
CLOCK_GETTER(nvmlDeviceGetApplicationsClock, "app_clock")
CLOCK_GETTER(nvmlDeviceGetDefaultApplicationsClock, "app_clock_default")

int nvmlDeviceGetCudaComputeCapability(Device d, int *major, int *minor)
{
    ull a, b;
    ENTER(d);
    TRY(number(d, "capability_major", &a));
    TRY(number(d, "capability_minor", &b));
    *major = (int)a;
    *minor = (int)b;
    return OK;
}

int nvmlDeviceGetPowerManagementLimitConstraints(Device d, uint *low, uint *high)
{
    ull a, b;
    ENTER(d);
    TRY(number(d, "power_min", &a));
    TRY(number(d, "power_max", &b));
    *low = a;
    *high = b;
    return OK;
}

typedef struct { uint gpu, memory; } Rates;
typedef struct { ull total, free, used; } Memory;

int nvmlDeviceGetUtilizationRates(Device d, Rates *rates)
{
    ull n;
    ENTER(d);
    TRY(number(d, "utilization", &n));
    rates->gpu = n;
    rates->memory = 0;
    return OK;
}

int nvmlDeviceGetMemoryInfo(Device d, Memory *memory)
{
    ENTER(d);
    TRY(number(d, "memory_total", &memory->total));
    TRY(number(d, "memory_used", &memory->used));
    memory->free = memory->total - memory->used;
    return OK;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device d, ull *reasons)
{
    ENTER(d);
    return number(d, "throttle", reasons);
}

#ifndef OLD_DRIVER
int nvmlDeviceGetCurrentClocksEventReasons(Device d, ull *reasons)
{
    ENTER(d);
    return number(d, "throttle", reasons);
}

typedef struct { unsigned char cluster[16]; uint status, clique; unsigned char state; } FabricInfo;

int nvmlDeviceGetGpuFabricInfo(Device d, FabricInfo *info)
{
    ull state, status = 0;
    ENTER(d);
    TRY(number(d, "fabric_state", &state));
    number(d, "fabric_status", &status);
    info->state = state;
    info->status = status;
    return OK;
}

int nvmlDeviceGetRemappedRows(Device d, uint *correctable, uint *uncorrectable, uint *pending, uint *failure)
{
    char text[LINE];
    ENTER(d);
    if (!field(d, "rows", text, sizeof text))
        return NOT_SUPPORTED;
    sscanf(text, "%u,%u,%u,%u", correctable, uncorrectable, pending, failure);
    return OK;
}
#endif

typedef struct { uint pid; ull memory; uint gpu_instance, compute_instance; } Process;

/* processes=PID:BYTES,PID:BYTES */
int nvmlDeviceGetComputeRunningProcesses_v3(Device d, uint *count, Process *list)
{
    char text[LINE] = "", *rest = text, *word;
    uint room = *count, have = 0;
    ENTER(d);
    field(d, "processes", text, sizeof text);
    while ((word = strsep(&rest, ","))) {
        Process one = { 0, 0, ~0u, ~0u };
        if (sscanf(word, "%u:%llu", &one.pid, &one.memory) != 2)
            continue;
        if (list && have < room)
            list[have] = one;
        have++;
    }
    *count = have;
    return have > room ? INSUFFICIENT_SIZE : OK;
}

static int set_number(Device d, const char *name, ull value)
{
    char text[32];
    snprintf(text, sizeof text, "%llu", value);
    return store(d, name, text);
}

int nvmlDeviceSetPersistenceMode(Device d, uint mode) { ENTER(d); return set_number(d, "persistence", mode); }
int nvmlDeviceSetComputeMode(Device d, uint mode) { ENTER(d); return set_number(d, "compute_mode", mode); }

int nvmlDeviceSetPowerManagementLimit(Device d, uint limit)
{
    ull low, high, sticky;
    ENTER(d);
    TRY(number(d, "power_min", &low));
    TRY(number(d, "power_max", &high));
    if (limit < low || limit > high)
        return INVALID_ARGUMENT;
    if (number(d, "power_sticky", &sticky) == OK) /* a board that says yes and does nothing */
        return OK;
    set_number(d, "power_enforced", limit);
    return set_number(d, "power_limit", limit);
}

int nvmlDeviceSetGpuLockedClocks(Device d, uint low, uint high)
{
    char text[32];
    ENTER(d);
    snprintf(text, sizeof text, "%u,%u", low, high);
    return low > high ? INVALID_ARGUMENT : store(d, "locked", text);
}

int nvmlDeviceResetGpuLockedClocks(Device d) { ENTER(d); return store(d, "locked", ""); }
