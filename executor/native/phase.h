/* What a phase consists of: tasks of a layer, or rows to be copied.
 *
 * A batch kernel (program.h) computes several rows in a call, so it needs them at one stride. Those of one request have it. Where a lease
 * has several members, the tensors that batch kernels use are *staged*: each row has a place for them in its arena. They are copied there
 * by a phase before the first layer (PHASE_PACK), and from there to the requests by one after the last layer (PHASE_UNPACK). */
#ifndef GANGWAY_PHASE_H
#define GANGWAY_PHASE_H

#include "gang.h"

struct phase {
    enum phase_kind kind; /* PHASE_OPEN: a layer; PHASE_PACK or PHASE_UNPACK: there are rows to copy */
    uint32_t tag, number, layer, parts;
    uint32_t first_row, rows;    /* of the lease */
    uint32_t groups;             /* of rows, one call each */
    uint32_t group_tasks, tasks; /* of one group, of all */
    uint32_t chunk;
    bool batch; /* the kernel takes several rows */
    bool call;  /* there is no kernel */
    kernel run;
};

/* Whether a lease with this query has a phase of that kind (PHASE_PACK or PHASE_UNPACK). */
bool query_copies(const struct query *query, enum phase_kind kind);
/* The phase that `state` says, which is of a layer of the program. A lease of several members begins with PHASE_PACK in any case: without
 * anything to pack that is the phase of its layer. */
struct phase phase_open(const struct lease *lease, const struct query *query, const struct phase_state *state);
/* Where the arguments of the phase's layer lie in a row of a piece. */
void phase_arguments(const struct query *query, const struct layer *layer, const struct piece *piece, uint32_t row, void **arguments);
/* Beyond how many ranks the phase gets slower. */
uint32_t phase_most_ranks(const struct query *query, const struct phase *phase);
/* Runs tasks [begin, end). */
void phase_execute(struct query *query, const struct phase *phase, uint32_t begin, uint32_t end);

#endif
