/* The scheduler's side of leases. The ranks' side is gang.h. */
#ifndef GANGWAY_LEASE_H
#define GANGWAY_LEASE_H

#include "layout.h"

struct lease_spec {
    uint32_t model_id, first_layer, end_layer, wanted, timeout_us;
    uint64_t arena_offset, arena_stride;
    const struct member *members;
    uint32_t member_count; /* 1 to MAX_MEMBERS */
    const uint8_t *versions; /* of layer 0 and on; layers beyond `version_count` use version 0 */
    uint32_t version_count;
    uint32_t pass_layers, passes; /* the first layers in several passes (phase_step in layout.h); 1: as all others */
};

/* Both only while no rank is in the lease: every Run has been answered, or its worker is dead. */
uint32_t lease_initialise(struct lease *lease, const struct lease_spec *spec); /* returns the new generation */
/* `versions`: one for each layer from the step that comes next; layers of the block beyond `version_count` use version 0. A layer in whose
 * middle the gang was stopped keeps its version. */
void lease_resume(struct lease *lease, uint32_t end_layer, uint32_t wanted, const uint8_t *versions, uint32_t version_count);

void lease_set_control(struct lease *lease, enum control control);
void lease_set_wanted(struct lease *lease, uint32_t wanted);
void lease_abort(struct lease *lease);
/* Wakes the ranks that sleep, so that they look again. */
void lease_kick(struct lease *lease);

#endif
