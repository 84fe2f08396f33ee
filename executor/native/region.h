/* Regions of clients' shared memory that are mapped into this process (docs/how-to/shared-memory.md).
 *
 * A client may shrink its file at any time. A thread that touches lost memory then gets a SIGBUS, which must not end the process: the
 * handler marks the region as lost in shared memory, and then maps zeros there. A front end checks the mark before it sends an answer. */
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
    _Atomic uint32_t *lost;             /* by number - 1, in shared memory; not 0: a part of the region is lost */
};

/* Maps `size_bytes` from `offset` on at any address, and installs the handler. From any thread. Returns 0 or an errno. */
int region_map(struct regions *regions, uint32_t number, int fd, uint64_t offset, uint64_t size_bytes);
/* Hides the region from leases. Only for the thread that runs them, between two of them: none uses it afterwards. */
void region_clear(struct regions *regions, uint32_t number);
/* Unmaps a cleared region. From any thread, before the number is mapped again. */
void region_unmap(struct regions *regions, uint32_t number);
/* Unmaps all of them, and takes them from the handler. */
void regions_close(struct regions *regions);
/* Where a place of a slot's (layout.h) lies; NULL unless all of `size_bytes` are in a region that is mapped. */
char *region_at(struct regions *regions, uint64_t place, uint64_t size_bytes);

#endif
