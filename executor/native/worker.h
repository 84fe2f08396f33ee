/* A worker process's loop over its command ring. */
#ifndef GANGWAY_WORKER_H
#define GANGWAY_WORKER_H

#include <stddef.h>

#include "layout.h"
#include "program.h"

enum { MAX_FRONT_ENDS = 64 };

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
    const struct program *programs[MAX_MODELS]; /* by model_id; NULL: not loaded */
};

void worker_send(struct worker *worker, const struct message *message);
/* Runs leases until a command of another kind arrives, which is the caller's to execute. */
struct message worker_loop(struct worker *worker);

#endif
