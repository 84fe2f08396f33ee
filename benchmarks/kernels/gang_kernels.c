/* Kernels of benchmarks/kernels/gang.py. Input: the ns that even and odd tasks take. */
#include <stdint.h>
#include <time.h>

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

void nothing(void *task_ns, void *output, int32_t begin, int32_t end) {
    (void)task_ns, (void)output, (void)begin, (void)end;
}

void busy(int32_t *task_ns, void *output, int32_t begin, int32_t end) {
    (void)output; /* an artifact whose outputs no layer has is refused */
    for (int32_t task = begin; task < end; task++) {
        int64_t stop_ns = now_ns() + task_ns[task % 2];
        while (now_ns() < stop_ns) {}
    }
}
