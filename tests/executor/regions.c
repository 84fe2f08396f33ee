/* Regions of clients' memory under sanitizers: random places lead to where they should or nowhere, and a file that is shrunk while threads
 * read and write it costs nobody but its own requests anything. Prints "right" at the end. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../executor/native/region.h"

enum { BYTES = 1 << 18, SKIPPED = 100, READERS = 3, ROUNDS = 40, PLACES = 200000, FULL = 0xff };

static struct regions regions;
static _Atomic uint32_t lost[MAX_REGIONS];
static uint64_t random_state = 1;

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "regions.c:%d: %s\n", __LINE__, #condition);    \
            abort();                                                        \
        }                                                                   \
    } while (0)

static uint64_t random_below(uint64_t limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (random_state >> 33) % limit;
}

static uint64_t place_of(uint64_t number, uint64_t offset) { return number << REGION_SHIFT | offset; }

static int make_file(uint64_t size_bytes) {
    int fd = memfd_create("region", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)size_bytes) == 0);
    return fd;
}

static void fill(uint32_t number, uint64_t size_bytes) { memset(region_at(&regions, place_of(number, 0), size_bytes), FULL, size_bytes); }

static void drop(uint32_t number) {
    region_clear(&regions, number);
    region_unmap(&regions, number);
    atomic_store(&lost[number - 1], 0);
}

/* Whatever a slot says: an address inside, or none. */
static void check_places(void) {
    int fd = make_file(SKIPPED + BYTES);
    CHECK(region_map(&regions, 7, fd, SKIPPED, BYTES) == 0);
    CHECK(region_map(&regions, 7, fd, SKIPPED, BYTES) == EEXIST);
    CHECK(region_map(&regions, 0, fd, 0, BYTES) == EINVAL && region_map(&regions, MAX_REGIONS + 1, fd, 0, BYTES) == EINVAL);
    CHECK(region_map(&regions, 8, fd, 0, 0) == EINVAL && region_map(&regions, 8, fd, UINT64_MAX - 8, 8) == EINVAL);
    CHECK(region_map(&regions, 8, fd, 0, UINT64_MAX) == EINVAL && region_map(&regions, 8, -1, 0, BYTES) == EBADF);
    char *base = region_at(&regions, place_of(7, 0), BYTES);
    CHECK(base && (uintptr_t)base % 4096 == SKIPPED % 4096);
    fill(7, BYTES);
    unsigned char byte;
    CHECK(pread(fd, &byte, 1, SKIPPED - 1) == 1 && byte == 0);
    CHECK(pread(fd, &byte, 1, SKIPPED) == 1 && byte == FULL);
    for (int i = 0; i < PLACES; i++) {
        uint64_t number = random_below(4) ? 7 : random_below(UINT64_C(1) << 16);
        uint64_t offset = random_below(4) ? random_below(2 * BYTES) : random_below(UINT64_C(1) << REGION_SHIFT);
        uint64_t size_bytes = random_below(8) ? random_below(2 * BYTES) : UINT64_MAX - random_below(BYTES);
        bool inside = number == 7 && size_bytes <= BYTES && offset <= BYTES - size_bytes && offset % REGION_ALIGNMENT == 0;
        char *found = region_at(&regions, place_of(number, offset), size_bytes);
        CHECK(inside ? found == base + offset : !found);
    }
    drop(7);
    CHECK(!region_at(&regions, place_of(7, 0), 1));
    close(fd);
}

/* Reads what was full until it finds zeros, which must have been announced. ThreadSanitizer takes the handler's mmap for a write, which
 * other threads of a process must not read beside; kernels run in one thread of a worker. */
__attribute__((no_sanitize("thread")))
static void *read_on(void *unused) {
    (void)unused;
    for (;;) {
        volatile unsigned char *bytes = (unsigned char *)region_at(&regions, place_of(1, 0), BYTES);
        for (size_t i = BYTES; i-- > 0;) {
            if (bytes[i] == FULL) continue;
            CHECK(atomic_load(&lost[0]) == 1);
            return NULL;
        }
    }
}

static void *write_on(void *unused) {
    (void)unused;
    while (!atomic_load(&lost[0])) fill(1, BYTES);
    fill(1, BYTES); /* also zeros can be written to */
    return NULL;
}

static void check_shrinking(void *(*work)(void *), int count) {
    int other = make_file(BYTES);
    CHECK(region_map(&regions, 2, other, 0, BYTES) == 0);
    fill(2, BYTES);
    for (int round = 0; round < ROUNDS; round++) {
        int fd = make_file(BYTES);
        CHECK(region_map(&regions, 1, fd, 0, BYTES) == 0);
        fill(1, BYTES);
        pthread_t threads[READERS];
        for (int i = 0; i < count; i++) pthread_create(&threads[i], NULL, work, NULL);
        usleep((useconds_t)random_below(300));
        CHECK(ftruncate(fd, (off_t)random_below(BYTES / 4096) * 4096) == 0); /* whole pages, so that nothing is zero without a fault */
        for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
        CHECK(atomic_load(&lost[0]) == 1 && atomic_load(&lost[1]) == 0);
        drop(1);
        CHECK(ftruncate(fd, BYTES) == 0 && region_map(&regions, 1, fd, 0, BYTES) == 0); /* the number serves again */
        fill(1, BYTES);
        CHECK(atomic_load(&lost[0]) == 0);
        drop(1);
        close(fd);
    }
    unsigned char *bytes = (unsigned char *)region_at(&regions, place_of(2, 0), BYTES);
    for (size_t i = 0; i < BYTES; i++) CHECK(bytes[i] == FULL);
    drop(2);
    close(other);
}

/* A SIGBUS that is not about a region ends the process, as it should. */
static void check_others(void) {
    int fd = make_file(4096);
    CHECK(region_map(&regions, 1, fd, 0, 4096) == 0);
    pid_t child = fork();
    if (child == 0) {
        int own = make_file(4096);
        volatile char *map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, own, 0);
        CHECK(ftruncate(own, 0) == 0);
        _exit(map[0]);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
    drop(1);
    close(fd);
}

int main(void) {
    regions.lost = lost;
    check_places();
    check_shrinking(read_on, READERS);
    check_shrinking(write_on, 1);
    check_others();
    regions_close(&regions);
    puts("right");
    return 0;
}
