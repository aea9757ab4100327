/* A disk on which everything takes SLOW_DISK_MS longer to arrive, for one process (LD_PRELOAD): the file is flushed
 * then, as it would be without it. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void wait_for_the_disk(void) {
    long ms = atol(getenv("SLOW_DISK_MS") ? getenv("SLOW_DISK_MS") : "0");
    struct timespec rest = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&rest, &rest))
        ;
}

int fsync(int file) {
    wait_for_the_disk();
    return (int)syscall(SYS_fsync, file);
}

int fdatasync(int file) {
    wait_for_the_disk();
    return (int)syscall(SYS_fdatasync, file);
}
