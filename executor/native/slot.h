/* Request slots: every change of state is one compare-and-swap of the word. */
#ifndef GANGWAY_SLOT_H
#define GANGWAY_SLOT_H

#include <stddef.h>

#include "layout.h"

/* Any state -> FREE; the generation stays, so that older messages remain stale. */
void slot_reset(struct slot *slot);
/* Takes a free slot of `count`, looking from `first` on: FILLING, next generation. Returns its number, -1 if none is free. */
long slot_acquire(struct slot *slots, uint32_t count, uint32_t first);
/* To `state` and `status`, if the generation matches and the present state's bit is set in `mask`. Wakes no process. */
bool slot_change(struct slot *slot, uint32_t generation, uint32_t mask, uint32_t state, uint32_t status);
/* Whether the slot is SUBMITTED with this generation. Notes when the scheduler first knew. */
bool slot_see(struct slot *slot, uint32_t generation);
/* FILLING -> SUBMITTED; returns the generation. */
uint32_t slot_submit(struct slot *slot);
/* DONE or FILLING -> FREE; false: it is in another state. */
bool slot_release(struct slot *slot);
/* SUBMITTED -> RUNNING, in so many parts (1 to MAX_PARTS), as one of a batch of `batch_rows` rows (0: its own), which it may lead. Counts
 * an attempt. False: it is not SUBMITTED with this generation. */
bool slot_start(struct slot *slot, uint32_t generation, uint32_t parts, uint32_t batch_rows, bool leads);

/* Lets a running request lead its batch, or not any more. False: it is not RUNNING with this generation. */
bool slot_lead(struct slot *slot, uint32_t generation, bool leads);

/* How a part of a request was computed. */
struct part_result {
    uint64_t start_ns, end_ns; /* first task, last task */
    uint32_t ranks;
    uint32_t blocks, versions; /* begun by plan, bit v: version v was used */
};

/* A part of a running request has failed: the request will end with this status, and this text of `length` bytes as the reason, unless it has
 * another one already. Only by a rank that computes the part. */
void slot_fail(struct slot *slot, uint32_t status, const char *reason, size_t length);

/* A part of a running request, which has so many, has been computed: answers the request if all are. Idempotent. */
void slot_part_computed(struct slot *table, struct slot *slot, uint32_t generation, uint32_t parts, uint32_t part,
                        const struct part_result *result);
/* Whether a part whose gang was lost needs no second run: it has been computed, or the request is answered. Completes the answer if a rank
 * died before it did. Only while no rank works on this part. */
bool slot_part_is_done(struct slot *table, struct slot *slot, uint32_t generation, uint32_t part);

/* Wakes the front end that waits for the answer in a slot of the table. */
void slot_wake(struct slot *table, struct slot *slot);
bool slot_wait(struct slot *slot, uint32_t spin_us, uint64_t timeout_us); /* until DONE; false: time is up */
/* Until one of them is DONE; false: time is up. `count` is 1 to MAX_AWAITED. */
bool slot_wait_any(struct slot *const *slots, uint32_t count, uint32_t spin_us, uint64_t timeout_us);

#endif
