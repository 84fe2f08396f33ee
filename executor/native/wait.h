/* Clocks, futexes and the polite spin. */
#ifndef GANGWAY_WAIT_H
#define GANGWAY_WAIT_H

#include <immintrin.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SPINS_PER_CLOCK = 64 }; /* pauses between two looks at the clock */

static inline uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void spin_pause(void) { _mm_pause(); }

/* Sleeps while *word == expected, at most `timeout_ns`. May return early for no reason: callers look again. */
static inline void futex_wait(void *word, uint32_t expected, uint64_t timeout_ns) {
    struct timespec timeout = {(time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u)};
    syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, NULL, 0);
}

static inline void futex_wake_all(void *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

#endif
