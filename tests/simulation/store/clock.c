/* Postgres reads its time of day from here: a file with microseconds since 1970, which the simulation writes.
   Preloaded by LD_PRELOAD. Monotonic clocks and timers stay real. */

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

static const volatile int64_t *now_us;

__attribute__((constructor)) static void open_clock(void)
{
    int file = open(getenv("SIMULATED_CLOCK"), O_RDONLY);
    void *page = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (page == MAP_FAILED)
        abort();
    close(file);
    now_us = page;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    (void)zone;
    now->tv_sec = *now_us / 1000000;
    now->tv_usec = *now_us % 1000000;
    return 0;
}
