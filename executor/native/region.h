/* Regions of clients' shared memory that are mapped into this process (docs/how-to/shared-memory.md).
 *
 * A client may shrink its file at any time. Whoever touches what is lost then gets a SIGBUS, of which nobody shall die: the handler puts
 * zeros there, after it has said in shared memory that the region is lost. Who gives the answer to a client looks there. */
#ifndef GANGWAY_REGION_H
#define GANGWAY_REGION_H

#include <stddef.h>

#include "layout.h"

struct region {
    _Atomic(char *) base; /* the first byte that was registered; NULL: nothing is mapped under this number */
    size_t size_bytes;
    char *map; /* what holds it, from a page's boundary */
    size_t map_bytes;
};

struct regions {
    struct region regions[MAX_REGIONS]; /* by number - 1 */
    _Atomic uint32_t *lost;             /* the same, in shared memory; not 0: a part of it was lost */
};

/* Maps `size_bytes` from `offset` on, wherever that is, and installs the handler. From any thread. Returns 0 or an errno. */
int region_map(struct regions *regions, uint32_t number, int fd, uint64_t offset, uint64_t size_bytes);
/* Nobody finds the region any more. Only by the thread that runs leases, between two of them: none uses it afterwards. */
void region_clear(struct regions *regions, uint32_t number);
/* Gives the addresses of a cleared region back. From any thread, before the number is mapped again. */
void region_unmap(struct regions *regions, uint32_t number);
/* All of them, and the handler knows them no more. */
void regions_close(struct regions *regions);
/* Where a place of a slot's (layout.h) lies; NULL unless all of `size_bytes` are in a region that is mapped. */
char *region_at(struct regions *regions, uint64_t place, uint64_t size_bytes);

#endif
