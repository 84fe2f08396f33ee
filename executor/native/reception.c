#include "reception.h"

#include "lease.h"
#include "ring.h"
#include "slot.h"
#include "wait.h"

/* -- those that have ended */

static struct desk *desk_of(struct receiving_worker *worker, uint32_t count, const struct message *left) {
    for (uint32_t i = 0; i < count; i++) {
        struct desk *desk = &worker->desks[i];
        if (desk->taken && desk->lease == left->gang.lease && desk->walk_in.lease_generation == left->gang.generation) return desk;
    }
    return NULL;
}

static void note(struct reception *reception, struct desk *desk, const struct message *left) {
    const struct lease *lease = &reception->leases[desk->lease];
    struct walk_in *gone = &reception->gone[reception->gone_count++];
    *gone = desk->walk_in;
    gone->joined_ns = left->gang.joined_ns;
    gone->end_ns = atomic_load_explicit(&lease->layer_end_ns[reception->models[gone->model_id].layers - 1], memory_order_relaxed);
    desk->taken = false;
}

/* False: there is a message for somebody else. */
static bool hear_worker(struct reception *reception, struct receiving_worker *worker) {
    const struct message *message;
    while ((message = ring_peek(worker->completions))) {
        if (message->kind != MESSAGE_LEFT || message->gang.reason != LEFT_DONE) return false;
        struct desk *desk = desk_of(worker, reception->desk_count, message);
        if (!desk) return false;
        note(reception, desk, message);
        ring_drop(worker->completions);
    }
    return true;
}

/* -- those that come */

/* A free desk of the worker, unless what it has to do already takes `limit_us`. */
static struct desk *free_desk(struct reception *reception, struct receiving_worker *worker, uint32_t limit_us) {
    struct desk *found = NULL;
    uint32_t busy_us = 0;
    for (uint32_t i = 0; i < reception->desk_count; i++) {
        struct desk *desk = &worker->desks[i];
        if (desk->lease == NO_LEASE) return NULL;
        if (desk->taken) busy_us += reception->models[desk->walk_in.model_id].expected_us + 1;
        else if (!found) found = desk;
    }
    return busy_us < limit_us && ring_pending(worker->commands) < worker->commands->capacity ? found : NULL;
}

/* On the first worker that has nothing to do; else on the first one that has little. */
static struct desk *find_desk(struct reception *reception, struct receiving_worker **at) {
    static const uint32_t limits_us[] = {1, QUEUED_US};
    for (uint32_t round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < reception->worker_count; i++) {
            *at = &reception->workers[i];
            struct desk *desk = free_desk(reception, *at, limits_us[round]);
            if (desk) return desk;
        }
    }
    return NULL;
}

static bool is_plain(const struct reception *reception, const struct slot *slot) {
    return slot->model_id < MAX_MODELS && reception->models[slot->model_id].arenas && slot->rows == 1 && !slot->rejects_late &&
           !atomic_load(&slot->cancel);
}

/* The slot has been started. */
static void begin(struct reception *reception, struct receiving_worker *worker, struct desk *desk, const struct walk_in *walk_in) {
    const struct open_model *model = &reception->models[walk_in->model_id];
    size_t number = (size_t)(worker - reception->workers) * reception->desk_count + (size_t)(desk - worker->desks);
    struct member member = {.front_end = walk_in->front_end, .slot = walk_in->slot, .generation = walk_in->slot_generation, .rows = 1};
    struct lease_spec spec = {
        .model_id = walk_in->model_id,
        .end_layer = model->layers,
        .wanted = 1,
        .timeout_us = reception->lease_timeout_us,
        .arena_offset = model->arenas[number],
        .arena_stride = model->arena_stride,
        .members = &member,
        .member_count = 1,
        .passes = 1,
    };
    desk->taken = true;
    desk->walk_in = *walk_in;
    desk->walk_in.lease_generation = lease_initialise(&reception->leases[desk->lease], &spec);
    desk->walk_in.begun_ns = now_ns();
    struct message run = {.gang = {.kind = MESSAGE_RUN, .lease = desk->lease, .generation = desk->walk_in.lease_generation}};
    ring_send(worker->commands, &run); /* it has room: see free_desk */
    bell_ring(worker->bell);
}

/* False: the message is for somebody else. */
static bool receive(struct reception *reception, uint32_t front_end, const struct message *message) {
    const struct slot_table *table = &reception->tables[front_end];
    if (message->kind != MESSAGE_SUBMIT || message->request.slot >= table->count) return false;
    struct slot *slot = &table->slots[message->request.slot];
    uint64_t word = atomic_load(&slot->word);
    uint32_t generation = message->request.generation;
    if (slot_state(word) != SLOT_SUBMITTED || slot_generation(word) != generation) return true; /* stale, or a double */
    struct receiving_worker *worker;
    struct desk *desk = is_plain(reception, slot) ? find_desk(reception, &worker) : NULL;
    if (!desk) return false;
    struct walk_in walk_in = {.model_id = slot->model_id, .front_end = front_end, .slot = message->request.slot, .slot_generation = generation,
                              .priority = slot->priority, .arrival_ns = slot->arrival_ns, .deadline_ns = slot->deadline_ns,
                              .limit_ns = slot->limit_ns, .join_key = slot->join_key};
    if (!slot_start(slot, generation, 1, 0, true)) return true;
    slot->blocks = 1;
    slot->conflicts = slot->preemptions = 0;
    slot->versions = 1; /* a mask: the first version of each layer */
    begin(reception, worker, desk, &walk_in);
    return true;
}

static bool hear_front_end(struct reception *reception, uint32_t front_end) {
    struct ring *ring = reception->submits[front_end];
    const struct message *message;
    while ((message = ring_peek(ring))) {
        if (!receive(reception, front_end, message)) return false;
        ring_drop(ring);
    }
    return true;
}

/* -- both */

/* False: there is something for somebody else. */
static bool hear_all(struct reception *reception) {
    for (uint32_t i = 0; i < reception->worker_count; i++) {
        if (!hear_worker(reception, &reception->workers[i])) return false;
    }
    for (uint32_t i = 0; i < reception->front_end_count; i++) {
        if (!hear_front_end(reception, i)) return false;
    }
    return true;
}

static bool anybody_came(const struct reception *reception) {
    if (reception->gone_count) return true;
    for (uint32_t i = 0; i < reception->worker_count; i++) {
        for (uint32_t k = 0; k < reception->desk_count; k++) {
            if (reception->workers[i].desks[k].taken) return true;
        }
    }
    return false;
}

void reception_attend(struct reception *reception, const struct attendance *attendance) {
    uint64_t now = now_ns(), end_ns = now + attendance->timeout_us * 1000;
    bool watching = false;
    reception->gone_count = 0;
    for (;;) {
        uint32_t seen = bell_seen(reception->bell);
        if (!hear_all(reception) || bell_letters(reception->bell) != attendance->letters) return;
        if (reception->gone_count >= ENOUGH_GONE) return;
        now = now_ns();
        if (!watching && anybody_came(reception)) {
            watching = true;
            if (now + attendance->watch_us * 1000 < end_ns) end_ns = now + attendance->watch_us * 1000;
        }
        if (now >= end_ns) return;
        bell_wait_patiently(reception->bell, seen, attendance->spin_us, (end_ns - now) / 1000);
    }
}
