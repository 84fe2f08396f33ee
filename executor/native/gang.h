/* A rank's work in a lease: claim tasks, run kernels, turn pages, wait, leave. */
#ifndef GANGWAY_GANG_H
#define GANGWAY_GANG_H

#include "layout.h"
#include "program.h"

/* Where one query's memory lies in this process. */
struct query {
    const struct program *program;
    struct slot *table, *slot; /* of its front end, and its own in there */
    char *arena;
    char *inputs[MAX_TENSORS], *outputs[MAX_TENSORS];
    uint64_t arena_stride;
    uint64_t input_frame_bytes, output_frame_bytes; /* of a whole program: the sizes of inputs[0] and outputs[0] */
    uint32_t rows;
    bool failed; /* the program's whole_call has said so */
};

/* Works as `rank` until there is a reason to leave. The rank that executes the query's last task answers the slot. */
enum left_reason gang_run(struct lease *lease, struct query *query, uint32_t rank, uint32_t spin_us);

#endif
