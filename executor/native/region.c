#include "region.h"

#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>

enum { PAGE = 4096, BLOCK = 512, READY_BYTES = 64 << 20 };
#define MAX_REGION_BYTES (UINT64_C(1) << 34)

static struct regions *_Atomic guarded; /* those of this process */

/* Maps zeros in place of lost memory, from the page of `address` to the region's end, so that each region costs few faults and one more
 * mapping. The mark comes first: it is visible before any answer that is computed from those zeros. */
static bool replace(struct regions *regions, uintptr_t address) {
    for (uint32_t i = 0; i < MAX_REGIONS; i++) {
        struct region *region = &regions->regions[i];
        if (!atomic_load(&region->base)) continue;
        uintptr_t begin = (uintptr_t)region->map, page = address - address % PAGE;
        if (address < begin || address - begin >= region->map_bytes) continue;
        atomic_store(&regions->lost[i], 1);
        size_t left = region->map_bytes - (page - begin);
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
        return mmap((void *)page, left, PROT_READ | PROT_WRITE, flags, -1, 0) != MAP_FAILED;
    }
    return false;
}

/* The instruction is executed again after this: with zeros, or, if the fault was not in a region, with the default action. */
static void on_bus_error(int number, siginfo_t *info, void *context) {
    (void)context;
    int error = errno;
    struct regions *regions = atomic_load(&guarded);
    if (info->si_code != BUS_ADRERR || !regions || !replace(regions, (uintptr_t)info->si_addr)) signal(number, SIG_DFL);
    errno = error;
}

static int guard(struct regions *regions) {
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO};
    atomic_store(&guarded, regions);
    return sigaction(SIGBUS, &action, NULL) == 0 ? 0 : errno;
}

/* Fills the page tables now instead of in the first request. Only where the file needs no new memory for that: a hole that is
 * read takes memory. */
static void make_ready(const struct region *region, int fd) {
#ifdef MADV_POPULATE_READ
    struct stat status;
    if (region->map_bytes > READY_BYTES || fstat(fd, &status) != 0 || status.st_blocks * BLOCK < status.st_size) return;
    madvise(region->map, region->map_bytes, MADV_POPULATE_READ); /* what is missing is no SIGBUS here, but an error */
#else
    (void)region, (void)fd;
#endif
}

int region_map(struct regions *regions, uint32_t number, int fd, uint64_t offset, uint64_t size_bytes) {
    if (number < 1 || number > MAX_REGIONS || size_bytes < 1 || size_bytes > MAX_REGION_BYTES) return EINVAL;
    if (offset > INT64_MAX - MAX_REGION_BYTES - PAGE) return EINVAL;
    struct region *region = &regions->regions[number - 1];
    if (region->map) return EEXIST;
    int error = guard(regions);
    if (error) return error;
    size_t skipped = offset % PAGE, map_bytes = skipped + size_bytes;
    char *map = mmap(NULL, map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(offset - skipped));
    if (map == MAP_FAILED) return errno;
    region->map = map;
    region->map_bytes = map_bytes;
    region->size_bytes = size_bytes;
    make_ready(region, fd);
    atomic_store(&region->base, map + skipped);
    return 0;
}

void region_clear(struct regions *regions, uint32_t number) {
    if (number >= 1 && number <= MAX_REGIONS) atomic_store(&regions->regions[number - 1].base, NULL);
}

void region_unmap(struct regions *regions, uint32_t number) {
    if (number < 1 || number > MAX_REGIONS) return;
    struct region *region = &regions->regions[number - 1];
    if (!region->map || atomic_load(&region->base)) return;
    munmap(region->map, region->map_bytes);
    region->map = NULL;
}

char *region_at(struct regions *regions, uint64_t place, uint64_t size_bytes) {
    uint64_t number = place_region(place), offset = place_offset(place);
    if (number < 1 || number > MAX_REGIONS) return NULL;
    struct region *region = &regions->regions[number - 1];
    char *base = atomic_load(&region->base);
    if (!base || size_bytes > region->size_bytes || offset > region->size_bytes - size_bytes) return NULL;
    return (uintptr_t)(base + offset) % REGION_ALIGNMENT ? NULL : base + offset;
}

void regions_close(struct regions *regions) {
    for (uint32_t number = 1; number <= MAX_REGIONS; number++) {
        region_clear(regions, number);
        region_unmap(regions, number);
    }
    if (atomic_load(&guarded) == regions) atomic_store(&guarded, NULL);
}
