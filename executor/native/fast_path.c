#include "fast_path.h"

#include "lease.h"
#include "ring.h"
#include "slot.h"
#include "wait.h"

/* -- completions */

static struct worker_slot *worker_slot_of(struct fast_worker *worker, uint32_t count, const struct message *left) {
    for (uint32_t i = 0; i < count; i++) {
        struct worker_slot *place = &worker->worker_slots[i];
        if (place->taken && place->lease == left->gang.lease && place->request.lease_generation == left->gang.generation) return place;
    }
    return NULL;
}

static void complete(struct fast_path *path, struct worker_slot *place, const struct message *left) {
    const struct lease *lease = &path->leases[place->lease];
    struct fast_request *completed = &path->completed[path->completed_count++];
    *completed = place->request;
    completed->joined_ns = left->gang.joined_ns;
    completed->end_ns = atomic_load_explicit(&lease->layer_end_ns[path->models[completed->model_id].layers - 1], memory_order_relaxed);
    place->taken = false;
}

/* False: there is a message for the caller. */
static bool read_completions(struct fast_path *path, struct fast_worker *worker) {
    const struct message *message;
    while ((message = ring_peek(worker->completions))) {
        if (message->kind != MESSAGE_LEFT || message->gang.reason != LEFT_DONE) return false;
        struct worker_slot *place = worker_slot_of(worker, path->worker_slot_count, message);
        if (!place) return false;
        complete(path, place, message);
        ring_drop(worker->completions);
    }
    return true;
}

/* -- requests */

/* A free slot of the worker, unless its queries already take `limit_us`. */
static struct worker_slot *free_worker_slot(struct fast_path *path, struct fast_worker *worker, uint32_t limit_us) {
    struct worker_slot *found = NULL;
    uint32_t busy_us = 0;
    for (uint32_t i = 0; i < path->worker_slot_count; i++) {
        struct worker_slot *place = &worker->worker_slots[i];
        if (place->lease == NO_LEASE) return NULL;
        if (place->taken) busy_us += path->models[place->request.model_id].expected_us + 1;
        else if (!found) found = place;
    }
    return busy_us < limit_us && ring_pending(worker->commands) < worker->commands->capacity ? found : NULL;
}

/* A slot of the first idle worker; else of the first one with less than QUEUED_US to do. */
static struct worker_slot *find_worker_slot(struct fast_path *path, struct fast_worker **at) {
    static const uint32_t limits_us[] = {1, QUEUED_US};
    for (uint32_t round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < path->worker_count; i++) {
            *at = &path->workers[i];
            struct worker_slot *place = free_worker_slot(path, *at, limits_us[round]);
            if (place) return place;
        }
    }
    return NULL;
}

static bool is_plain(const struct fast_path *path, const struct slot *slot) {
    return slot->model_id < MAX_MODELS && path->models[slot->model_id].arenas && slot->rows == 1 && !slot->rejects_late &&
           !atomic_load(&slot->cancel);
}

/* The slot has been started. */
static void begin(struct fast_path *path, struct fast_worker *worker, struct worker_slot *place, const struct fast_request *request) {
    const struct open_model *model = &path->models[request->model_id];
    size_t number = (size_t)(worker - path->workers) * path->worker_slot_count + (size_t)(place - worker->worker_slots);
    struct member member = {.front_end = request->front_end, .slot = request->slot, .generation = request->slot_generation, .rows = 1};
    struct lease_spec spec = {
        .model_id = request->model_id,
        .end_layer = model->layers,
        .wanted = 1,
        .timeout_us = path->lease_timeout_us,
        .arena_offset = model->arenas[number],
        .arena_stride = model->arena_stride,
        .members = &member,
        .member_count = 1,
        .passes = 1,
    };
    place->taken = true;
    place->request = *request;
    place->request.lease_generation = lease_initialise(&path->leases[place->lease], &spec);
    place->request.begun_ns = now_ns();
    struct message run = {.gang = {.kind = MESSAGE_RUN, .lease = place->lease, .generation = place->request.lease_generation}};
    ring_send(worker->commands, &run); /* it has room: see free_worker_slot */
    bell_ring(worker->bell);
}

/* False: the message is for the caller. */
static bool receive(struct fast_path *path, uint32_t front_end, const struct message *message) {
    const struct slot_table *table = &path->tables[front_end];
    if (message->kind != MESSAGE_SUBMIT || message->request.slot >= table->count) return false;
    struct slot *slot = &table->slots[message->request.slot];
    uint32_t generation = message->request.generation;
    if (!slot_see(slot, generation)) return true; /* stale, or a duplicate */
    struct fast_worker *worker;
    struct worker_slot *place = is_plain(path, slot) ? find_worker_slot(path, &worker) : NULL;
    if (!place) return false;
    struct fast_request request = {.model_id = slot->model_id, .front_end = front_end, .slot = message->request.slot,
                                   .slot_generation = generation, .priority = slot->priority, .arrival_ns = slot->arrival_ns,
                                   .deadline_ns = slot->deadline_ns, .limit_ns = slot->limit_ns, .join_key = slot->join_key};
    if (!slot_start(slot, generation, 1, 0, true)) return true;
    slot->blocks = 1;
    slot->conflicts = slot->preemptions = 0;
    slot->versions = 1; /* a mask: version 0 of each layer */
    begin(path, worker, place, &request);
    return true;
}

static bool read_submits(struct fast_path *path, uint32_t front_end) {
    struct ring *ring = path->submits[front_end];
    const struct message *message;
    while ((message = ring_peek(ring))) {
        if (!receive(path, front_end, message)) return false;
        ring_drop(ring);
    }
    return true;
}

/* -- both */

/* False: there is something for the caller. */
static bool read_rings(struct fast_path *path) {
    for (uint32_t i = 0; i < path->worker_count; i++) {
        if (!read_completions(path, &path->workers[i])) return false;
    }
    for (uint32_t i = 0; i < path->front_end_count; i++) {
        if (!read_submits(path, i)) return false;
    }
    return true;
}

static bool any_request(const struct fast_path *path) {
    if (path->completed_count) return true;
    for (uint32_t i = 0; i < path->worker_count; i++) {
        for (uint32_t k = 0; k < path->worker_slot_count; k++) {
            if (path->workers[i].worker_slots[k].taken) return true;
        }
    }
    return false;
}

void fast_path_poll(struct fast_path *path, const struct poll_limits *limits) {
    uint64_t now = now_ns(), end_ns = now + limits->timeout_us * 1000;
    bool watching = false;
    path->completed_count = 0;
    for (;;) {
        uint32_t seen = bell_seen(path->bell);
        if (!read_rings(path) || bell_control_seq(path->bell) != limits->control_seq) return;
        if (path->completed_count >= MAX_COMPLETED) return;
        now = now_ns();
        if (!watching && any_request(path)) {
            watching = true;
            if (now + limits->watch_us * 1000 < end_ns) end_ns = now + limits->watch_us * 1000;
        }
        if (now >= end_ns) return;
        bell_wait_skipping_completions(path->bell, seen, limits->spin_us, (end_ns - now) / 1000);
    }
}
