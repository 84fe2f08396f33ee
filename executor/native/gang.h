/* A rank's work in a lease: claim tasks, run them, advance phases, wait, leave. */
#ifndef GANGWAY_GANG_H
#define GANGWAY_GANG_H

#include "layout.h"
#include "program.h"

/* A member of a lease (layout.h) in this process: its slot, and where its tensors lie. */
struct piece {
    struct slot *table, *slot; /* of its front end, and its own in that table */
    uint32_t generation;
    uint32_t part, parts; /* of its request */
    uint32_t first, rows; /* it is rows [first, first + rows) of the lease */
    char **inputs, **outputs; /* row `first` of each */
    uint64_t input_frame_bytes, output_frame_bytes;   /* the sizes of inputs[0] and outputs[0], where these are frames */
};

/* Where a lease's memory lies in this process. */
struct query {
    const struct program *program;
    struct piece *pieces;
    uint32_t piece_count, rows;
    char *arena;
    uint64_t arena_stride;
    uint32_t cpu_count; /* for calls: those of the gang, the calling rank's first; the others' ranks sleep */
    uint32_t cpus[MAX_RANKS];
    const _Atomic uint32_t *control; /* the lease's: a call that can leave does so when it is not CONTROL_RUN */
};

/* Works as `rank` until there is a reason to leave. The rank that executes the query's last task completes its requests. */
enum left_reason gang_run(struct lease *lease, struct query *query, uint32_t rank, uint32_t spin_us);

#endif
