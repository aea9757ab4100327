/* The time of day, SKEWED_CLOCK_S seconds ahead, for one process (LD_PRELOAD): the clock of a host that is wrong. Every
 * other clock is as it is. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    long failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && clock == CLOCK_REALTIME)
        now->tv_sec += atol(getenv("SKEWED_CLOCK_S") ? getenv("SKEWED_CLOCK_S") : "0");
    return (int)failed;
}
