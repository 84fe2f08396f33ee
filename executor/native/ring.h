/* Message rings (one producer, one consumer) and bells (many producers, one consumer). */
#ifndef GANGWAY_RING_H
#define GANGWAY_RING_H

#include "layout.h"

void ring_init(struct ring *ring, uint32_t capacity);
bool ring_send(struct ring *ring, const struct message *message); /* false: full */
bool ring_receive(struct ring *ring, struct message *message);    /* false: empty */
const struct message *ring_peek(struct ring *ring);               /* the oldest, which stays until ring_drop; NULL: empty */
void ring_drop(struct ring *ring);                                /* there is one */
uint32_t ring_pending(struct ring *ring);
void ring_discard(struct ring *ring);

void bell_ring(struct bell *bell);
/* For a message that can wait: not at all while the consumer is patient. It finds the message when it wakes up for another reason. */
void bell_ring_unless_patient(struct bell *bell);
/* The same for a request that can wait, while the consumer is calm. */
void bell_ring_unless_calm(struct bell *bell);
/* For something that is in no ring, but elsewhere: only where there is a letter more need the consumer look there. */
void bell_ring_for_letter(struct bell *bell);
uint32_t bell_letters(struct bell *bell);
uint32_t bell_seen(struct bell *bell);
/* Waits until the bell has been rung since `seen` was read, or the time is up; returns the new count. */
uint32_t bell_wait(struct bell *bell, uint32_t seen, uint32_t spin_us, uint64_t timeout_us);
uint32_t bell_wait_patiently(struct bell *bell, uint32_t seen, uint32_t spin_us, uint64_t timeout_us);
uint32_t bell_wait_calmly(struct bell *bell, uint32_t seen, uint32_t spin_us, uint64_t timeout_us);
/* Before anything else, for a consumer whose predecessor may have died while it was patient or calm. */
void bell_take_over(struct bell *bell);

#endif
