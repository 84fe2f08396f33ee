/* A worker process's loop over its command ring. */
#ifndef GANGWAY_WORKER_H
#define GANGWAY_WORKER_H

#include <stdbool.h>
#include <stddef.h>

#include "gang.h"
#include "layout.h"
#include "program.h"
#include "region.h"

enum { MAX_FRONT_ENDS = 64, MAX_ADDRESSES = MAX_MEMBERS * 2 * MAX_TENSORS };

struct memory {
    char *base;
    size_t size_bytes;
};

struct worker {
    struct bell *bell, *scheduler_bell;
    struct worker_status *status;
    struct ring *commands, *completions;
    struct lease *leases;
    uint32_t lease_count, io_count, spin_us;
    struct memory arena, io[MAX_FRONT_ENDS];
    struct regions regions;
    struct program *programs[MAX_MODELS]; /* by model_id; NULL: not loaded */
    struct piece pieces[MAX_MEMBERS];     /* of the lease that it is in */
    char **addresses;                           /* of their tensors: MAX_ADDRESSES */
    bool background;         /* other threads of the process execute commands: it is busy even while it waits */
    _Atomic uint32_t nudged; /* one of them has a result for the caller of worker_loop */
};

void worker_send(struct worker *worker, const struct message *message);
/* Runs leases until a command of another kind arrives, which the caller executes, or a nudge (then the kind is 0). */
struct message worker_loop(struct worker *worker);
/* Makes worker_loop return soon, between two leases. From any thread of the process. */
void worker_nudge(struct worker *worker);

#endif
