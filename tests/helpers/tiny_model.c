/* Kernels of the tests' tiny model. Input: int32 {task_ns, hang_task + 1, crash_task + 1, layer of both}. Output: a counter per task. */
#include <stdint.h>
#include <time.h>
#include <unistd.h>

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* `weights`: one int32, the number of the layer. */
void count(void *input, void *weights, void *arena, void *counters, int32_t begin, int32_t end) {
    volatile int32_t *order = input;
    int32_t layer = *(int32_t *)weights;
    for (int32_t task = begin; task < end; task++) {
        int64_t stop_ns = now_ns() + order[0];
        while (order[0] && now_ns() < stop_ns) {}
        while (order[1] == task + 1 && order[3] == layer) {}
        if (order[2] == task + 1 && order[3] == layer) __builtin_trap();
        __atomic_fetch_add((int32_t *)counters + task, 1, __ATOMIC_RELAXED);
        ((volatile int32_t *)arena)[2] = getpid();
        ((volatile int32_t *)arena)[0] = layer;
    }
}

/* Counts as `count` does, for `batch[0]` rows, and leaves that number behind the layer's in each row's arena. */
void count_rows(char *input, void *weights, char *arena, char *counters, const int64_t *batch, int32_t begin, int32_t end) {
    for (int64_t row = 0; row < batch[0]; row++) {
        count(input + row * batch[1], weights, arena + row * batch[3], counters + row * batch[4], begin, end);
        ((int32_t *)(arena + row * batch[3]))[1] = (int32_t)batch[0];
    }
}

/* Counts as `count` does; refuses a negative order[3], by check -order[3]. */
void count_checked(void *input, void *weights, void *arena, void *counters, int64_t *refused, int32_t begin, int32_t end) {
    int32_t number = ((volatile int32_t *)input)[3];
    count(input, weights, arena, counters, begin, end);
    if (number < 0) refused[0] = -number, refused[1] = number;
}

void nothing(void *counters, int32_t begin, int32_t end) { (void)counters, (void)begin, (void)end; }
