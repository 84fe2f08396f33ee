/* Message rings (one producer, one consumer) and bells (many producers, one consumer). */
#ifndef GANGWAY_RING_H
#define GANGWAY_RING_H

#include "layout.h"

void ring_init(struct ring *ring, uint32_t capacity);
bool ring_send(struct ring *ring, const struct message *message); /* false: full */
bool ring_receive(struct ring *ring, struct message *message);    /* false: empty */
const struct message *ring_peek(struct ring *ring);               /* the oldest message, which stays until ring_drop; NULL: empty */
void ring_drop(struct ring *ring);                                /* only if there is one */
uint32_t ring_pending(struct ring *ring);
void ring_discard(struct ring *ring);

void bell_ring(struct bell *bell);
/* For the consumer of a bell with an eventfd, before it looks for messages once more and then sleeps until the eventfd is readable: the next
 * ring makes it so, and takes this back. A producer that dies between the two has woken nobody, so the consumer looks now and then. */
void bell_arm(struct bell *bell);
/* After a query has been answered: not while `skip_completion_wakeups` is set. The consumer finds the message when it wakes up next. */
void bell_ring_for_completion(struct bell *bell);
/* For a request that preempts nobody: not while `skip_best_effort_wakeups` is set. */
void bell_ring_for_best_effort(struct bell *bell);
/* For a message that is in no ring (the supervisor's socket): the consumer looks there only when `control_seq` has grown. */
void bell_ring_for_control(struct bell *bell);
uint32_t bell_control_seq(struct bell *bell);
uint32_t bell_seen(struct bell *bell);
/* Waits until the bell has been rung since `seen` was read, or the time is up; returns the new count. Not for one with an eventfd. */
uint32_t bell_wait(struct bell *bell, uint32_t seen, uint32_t spin_us, uint64_t timeout_us);
/* The same while one of the two words is set. */
uint32_t bell_wait_skipping_completions(struct bell *bell, uint32_t seen, uint32_t spin_us, uint64_t timeout_us);
uint32_t bell_wait_skipping_best_effort(struct bell *bell, uint32_t seen, uint32_t spin_us, uint64_t timeout_us);
/* For a new consumer, before anything else: its predecessor may have died in one of these waits. */
void bell_take_over(struct bell *bell);

#endif
