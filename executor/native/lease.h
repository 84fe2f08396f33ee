/* The scheduler's side of leases. The ranks' side is gang.h. */
#ifndef GANGWAY_LEASE_H
#define GANGWAY_LEASE_H

#include "layout.h"

/* What a gang does layer by layer. One entry for each layer (`versions`) and step (`block_ranks`) from some step on; beyond the counts
 * layers have version 0, and no block begins. */
struct plan {
    const uint8_t *versions, *block_ranks;
    uint32_t version_count, block_count;
};

struct lease_spec {
    uint32_t model_id, first_layer, end_layer, wanted, timeout_us;
    uint64_t arena_offset, arena_stride;
    const struct member *members;
    uint32_t member_count; /* 1 to MAX_MEMBERS */
    struct plan plan;      /* from layer 0 on */
    uint32_t pass_layers, passes; /* the first layers in several passes (phase_step in layout.h); 1: as all others */
};

/* Both only while no rank is in the lease: every Run has been answered, or its worker is dead. */
uint32_t lease_initialise(struct lease *lease, const struct lease_spec *spec); /* returns the new generation */
/* The plan begins with the step that comes next. A layer in whose middle the gang was stopped keeps its version. */
void lease_resume(struct lease *lease, uint32_t end_layer, uint32_t wanted, struct plan plan);

void lease_set_control(struct lease *lease, enum control control);
/* Changes the plan from this step on, at any time. What the gang has come to stays as it is. */
void lease_plan(struct lease *lease, uint32_t step, struct plan plan);
/* Changes the number of ranks that are wanted, if it is still `before`: a block that began meanwhile may have made it smaller. So exactly
 * one of {a block begins with fewer ranks, the scheduler resizes the gang} succeeds. To grow, plan first, then resize, then send Run. */
bool lease_resize(struct lease *lease, uint32_t before, uint32_t wanted);
void lease_abort(struct lease *lease);
/* Counts the version of a layer, `first`: unless an earlier phase of the step was counted. For who publishes the phase. */
void lease_use_version(struct lease *lease, uint32_t version, bool first);
/* Wakes the ranks that sleep, so that they look again. */
void lease_kick(struct lease *lease);

#endif
