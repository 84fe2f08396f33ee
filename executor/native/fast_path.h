/* The scheduler's fast path: requests that need no decision begin as soon as they come.
 *
 * If a query can use one core only, a core is free, and no request waits, every policy starts the query there. The fast path does so
 * without a decision. Everything else (another model, a rank that was stopped, no free worker, a control message) stays in the rings for
 * the caller. A worker slot holds one such query on a worker: a lease, and for each model an arena. A worker has several, so that it finds
 * the next query when it has executed one. They are used only while all its queries take less time than a decision of the scheduler. */
#ifndef GANGWAY_FAST_PATH_H
#define GANGWAY_FAST_PATH_H

#include <stddef.h>

#include "layout.h"

enum { MAX_WORKER_SLOTS = 4, NO_LEASE = UINT32_MAX };
enum { QUEUED_US = 200 };    /* a worker that has less to do may have one more query */
enum { MAX_COMPLETED = 64 }; /* reported at a time: the process that counts them takes the core from others */

struct slot_table {
    struct slot *slots;
    uint32_t count;
};

/* One model, if it is open: only then are its requests begun. */
struct open_model {
    uint64_t arena_stride;
    uint64_t *arenas; /* offset for each worker slot; NULL: not open */
    uint32_t layers, expected_us;
};

/* A query that has been begun here. */
struct fast_request {
    uint32_t model_id, front_end, slot, slot_generation, lease_generation;
    int32_t priority;
    uint64_t arrival_ns, deadline_ns, limit_ns, join_key, begun_ns;
    uint64_t joined_ns, end_ns; /* when it has ended: its rank joined, its last layer ended */
};

struct worker_slot {
    uint32_t lease; /* NO_LEASE: not to be used now */
    bool taken;
    struct fast_request request;
};

struct fast_worker {
    struct bell *bell;
    struct ring *commands, *completions;
    struct worker_slot worker_slots[MAX_WORKER_SLOTS];
};

struct fast_path {
    struct bell *bell;
    struct ring **submits; /* by front end */
    struct slot_table *tables;
    struct fast_worker *workers;
    struct lease *leases;
    uint32_t front_end_count, worker_count, lease_count, worker_slot_count; /* worker_slot_count: of one worker */
    uint32_t lease_timeout_us;
    struct open_model models[MAX_MODELS];
    struct fast_request *completed; /* that have ended since the call: room for MAX_COMPLETED and one for each worker slot */
    uint32_t completed_count;
};

/* When to return, if nothing else happens: after `timeout_us`, and `watch_us` after the first request. `control_seq`: the bell's last
 * value that the caller has seen. */
struct poll_limits {
    uint32_t control_seq, spin_us;
    uint64_t timeout_us, watch_us;
};

/* Begins requests and collects those that have ended, until there is something else to do or MAX_COMPLETED have ended. Requests in
 * flight are in their worker slots then: the caller leaves them there until the next call, or clears all. Only for the process that reads
 * the rings. */
void fast_path_poll(struct fast_path *path, const struct poll_limits *limits);

#endif
