/* Clocks, futexes and spinning. */
#ifndef GANGWAY_WAIT_H
#define GANGWAY_WAIT_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SPINS_PER_CLOCK = 64 }; /* pauses between two readings of the clock */

static inline uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* _mm_pause without <immintrin.h>, whose 40,000 lines would double the compile time of each file. */
static inline void spin_pause(void) { __builtin_ia32_pause(); }

/* Sleeps while *word == expected, at most `timeout_ns`. May return early without a reason: callers check again. */
static inline void futex_wait(void *word, uint32_t expected, uint64_t timeout_ns) {
    struct timespec timeout = {(time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u)};
    syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, NULL, 0);
}

/* One of the words that futex_wait_any waits for: the kernel's struct futex_waitv, which older headers do not have. */
struct awaited {
    uint64_t expected;
    uint64_t address;
    uint32_t flags;
    uint32_t reserved;
};

enum { FUTEX_WAITV_CALL = 449, FUTEX_WORD_OF_32_BITS = 2, OLD_KERNEL_NS = 1000000 };

static inline struct awaited awaited_word(void *word, uint32_t expected) {
    return (struct awaited){expected, (uint64_t)(uintptr_t)word, FUTEX_WORD_OF_32_BITS, 0};
}

/* Sleeps while each word has its value, at most `timeout_ns`. May return early without a reason: callers check again. Kernels
 * before 5.16 cannot wait for several words: there it sleeps on the first one, a millisecond at most. */
static inline void futex_wait_any(struct awaited *awaited, uint32_t count, uint64_t timeout_ns) {
    uint64_t end_ns = now_ns() + timeout_ns;
    struct timespec end = {(time_t)(end_ns / 1000000000u), (long)(end_ns % 1000000000u)};
    if (syscall(FUTEX_WAITV_CALL, awaited, count, 0, &end, CLOCK_MONOTONIC) >= 0) return;
    if (errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT) return;
    uint64_t short_ns = timeout_ns < OLD_KERNEL_NS ? timeout_ns : OLD_KERNEL_NS;
    futex_wait((void *)(uintptr_t)awaited[0].address, (uint32_t)awaited[0].expected, short_ns);
}

static inline void futex_wake_all(void *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

/* Makes an eventfd readable, which does not block. */
static inline void event_signal(int descriptor) {
    uint64_t one = 1;
    while (write(descriptor, &one, sizeof one) < 0 && errno == EINTR) {}
}

#endif
