/* The scheduler's fast path: requests that need no decision begin as soon as they come.
 *
 * A policy says beforehand on how many cores a request begins that waits alone: if so many are free, every request of the model begins on
 * them. The fast path does so without a decision. Everything else (another model, a rank that was stopped, too few free workers, a control
 * message) stays in the rings for the caller. A worker slot is a lease for one such query, whose rank 0 is on the slot's worker. A worker
 * has several, so that it finds the next query for one core when it has executed one. They are used only while all its queries take less
 * time than a decision of the scheduler. */
#ifndef GANGWAY_FAST_PATH_H
#define GANGWAY_FAST_PATH_H

#include <stddef.h>

#include "layout.h"

enum { MAX_WORKER_SLOTS = 4, NO_LEASE = UINT32_MAX };
enum { QUEUED_US = 200 };    /* a worker that has less to do may have one more query; one for which there is no slot waits so long for it */
enum { LEAVING_US = 2000 };   /* a request waits so long for a worker to leave that has answered another one */
enum { MAX_COMPLETED = 64 }; /* reported at a time: the process that counts them takes the core from others */

struct slot_table {
    struct slot *slots;
    uint32_t count;
};

struct fast_arena {
    uint64_t offset;
    bool taken;
};

/* One model, if it is open: only then are its requests begun. */
struct open_model {
    uint64_t arena_stride;
    struct fast_arena *arenas; /* NULL: not open */
    uint8_t *versions;         /* of each layer; NULL: the default ones */
    uint32_t arena_count, layers, expected_us;
    uint32_t ranks;        /* of each request's gang */
    uint32_t min_slack_us; /* a request with less time until its deadline is for the caller; 0: none is */
    bool may_grow;         /* while such a gang computes, all requests are for the caller: it may want the cores that are free */
};

/* A query that has been begun here. */
struct fast_request {
    uint32_t model_id, front_end, slot, slot_generation, lease_generation;
    int32_t priority;
    uint64_t arrival_ns, deadline_ns, limit_ns, join_key, begun_ns;
    uint64_t joined_ns, end_ns; /* when it has ended: its first rank joined, its last layer ended */
};

struct worker_slot {
    uint32_t lease; /* NO_LEASE: not to be used now */
    bool taken;
    uint32_t arena;  /* its number, of the model's */
    uint64_t inside; /* bit r: rank r has not left */
    uint32_t workers[MAX_RANKS]; /* by rank */
    struct fast_request request;
};

struct fast_worker {
    struct bell *bell;
    struct ring *commands, *completions;
    struct worker_slot worker_slots[MAX_WORKER_SLOTS];
    struct worker_slot *runs[MAX_WORKER_SLOTS]; /* of whichever worker: what it was told to run, and has not left */
    uint32_t run_count;
    uint64_t woken_ns, delay_ns; /* an idle worker was given a run, 0: none that it has not left; its smoothed delay until it begins */
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

/* When to return, if nothing else happens: after `timeout_us`, and when nothing is under way, but not before `watch_us` after the first
 * request, and at the latest after twice that. `control_seq`: the bell's last value that the caller has seen. */
struct poll_limits {
    uint32_t control_seq, spin_us;
    uint64_t timeout_us, watch_us;
};

/* Gives worker slots their leases, by worker and slot. What was under way is the caller's now, its arena too: its model is opened again
 * before this, or closed. */
void fast_path_set_leases(struct fast_path *path, const uint32_t *leases);

/* Whether all is done of what is in a worker slot: ranks that have not left do so at once. */
bool fast_path_has_ended(const struct fast_path *path, const struct worker_slot *place);

/* Begins requests and collects those that have ended, until there is something else to do or MAX_COMPLETED have ended. Requests in
 * flight are in their worker slots then: the caller leaves them there until the next call, or sets new leases. Only for the process that
 * reads the rings. */
void fast_path_poll(struct fast_path *path, const struct poll_limits *limits);

#endif
