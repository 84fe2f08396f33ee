/* A kernel of known duration: each task takes at least `weights[0]` nanoseconds, and no core, so that the tasks of two ranks overlap
 * on any host. */
#include <errno.h>
#include <stdint.h>
#include <time.h>

void wait_for(void *input, void *weights, void *output, int32_t begin, int32_t end) {
    (void)input;
    for (int32_t task = begin; task < end; task++) {
        struct timespec left = {0, *(int32_t *)weights};
        while (left.tv_nsec && nanosleep(&left, &left) != 0 && errno == EINTR) {}
        ((int32_t *)output)[task] = 1;
    }
}
