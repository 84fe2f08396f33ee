/* A kernel of known duration: each task takes `weights[0]` nanoseconds. */
#include <stdint.h>
#include <time.h>

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

void spin(void *input, void *weights, void *output, int32_t begin, int32_t end) {
    (void)input;
    for (int32_t task = begin; task < end; task++) {
        int64_t stop_ns = now_ns() + *(int32_t *)weights;
        while (now_ns() < stop_ns) {}
        ((int32_t *)output)[task] = 1;
    }
}
