#include "fast_path.h"

#include <string.h>

#include "lease.h"
#include "ring.h"
#include "slot.h"
#include "wait.h"

/* Gains of smoothed delays, as shifts: when one is seen, and when a worker is chosen. */
enum { DELAY_GAIN_BITS = 3, FORGET_BITS = 7 };
enum { NO_DELAY_NS = 20 * 1000 };

/* -- completions */

/* What a worker was told to run and has not left. */
static struct worker_slot *run_of(const struct fast_worker *worker, const struct message *left, uint32_t *at) {
    for (uint32_t i = 0; i < worker->run_count; i++) {
        struct worker_slot *place = worker->runs[i];
        *at = i;
        if (place->lease == left->gang.lease && place->request.lease_generation == left->gang.generation) return place;
    }
    return NULL;
}

/* The last rank has left. */
static void complete(struct fast_path *path, struct worker_slot *place) {
    const struct lease *lease = &path->leases[place->lease];
    struct fast_request *completed = &path->completed[path->completed_count++];
    *completed = place->request;
    completed->end_ns = atomic_load_explicit(&lease->layer_end_ns[path->models[completed->model_id].layers - 1], memory_order_relaxed);
    path->models[completed->model_id].arenas[place->arena].taken = false;
    place->taken = false;
}

/* How long a worker that was idle has needed to begin, smoothed over some requests: something else may have its core. */
static void note_delay(struct fast_worker *worker, uint64_t delay_ns) {
    worker->delay_ns += (delay_ns >> DELAY_GAIN_BITS) - (worker->delay_ns >> DELAY_GAIN_BITS);
}

static void leave(struct fast_path *path, struct fast_worker *worker, uint32_t run, const struct message *left) {
    struct worker_slot *place = worker->runs[run];
    uint64_t *joined_ns = &place->request.joined_ns;
    worker->runs[run] = worker->runs[--worker->run_count];
    if (worker->woken_ns && left->gang.joined_ns > worker->woken_ns) note_delay(worker, left->gang.joined_ns - worker->woken_ns);
    worker->woken_ns = 0;
    if (!*joined_ns || left->gang.joined_ns < *joined_ns) *joined_ns = left->gang.joined_ns;
    place->inside &= ~(UINT64_C(1) << left->gang.rank);
    if (!place->inside) complete(path, place);
}

/* False: there is a message for the caller. */
static bool read_completions(struct fast_path *path, struct fast_worker *worker) {
    const struct message *message;
    uint32_t run;
    while ((message = ring_peek(worker->completions))) {
        if (message->kind != MESSAGE_LEFT || message->gang.reason != LEFT_DONE || !run_of(worker, message, &run)) return false;
        leave(path, worker, run, message);
        ring_drop(worker->completions);
    }
    return true;
}

/* -- requests */

bool fast_path_has_ended(const struct fast_path *path, const struct worker_slot *place) {
    return phase_unpack(atomic_load(&path->leases[place->lease].phase)).kind == PHASE_END;
}

/* Whether a query should have ended QUEUED_US ago: its worker waits for a core. */
static bool is_overdue(const struct fast_path *path, const struct worker_slot *place) {
    uint64_t expected_us = path->models[place->request.model_id].expected_us + QUEUED_US;
    return now_ns() > place->request.begun_ns + expected_us * 1000;
}

/* A free slot of the worker, unless its queries take `limit_us` or more. One that it leaves at once takes no time, but it is given only
 * one run beside it: it may hang. A worker has none that waits for its core. */
static struct worker_slot *free_worker_slot(const struct fast_path *path, struct fast_worker *worker, uint32_t limit_us) {
    uint32_t busy_us = 0, ended = 0;
    for (uint32_t i = 0; i < worker->run_count; i++) {
        const struct worker_slot *place = worker->runs[i];
        uint32_t expected_us = path->models[place->request.model_id].expected_us + 1;
        if (fast_path_has_ended(path, place)) ended++;
        else if (is_overdue(path, place)) return NULL;
        else busy_us += expected_us;
    }
    if (busy_us >= limit_us || (ended && worker->run_count > 1) || worker->run_count == path->worker_slot_count) return NULL;
    if (ring_pending(worker->commands) >= worker->commands->capacity) return NULL;
    for (uint32_t i = 0; i < path->worker_slot_count; i++) {
        struct worker_slot *place = &worker->worker_slots[i];
        if (!place->taken && place->lease != NO_LEASE) return place;
    }
    return NULL;
}

enum { IDLE_US = 1 }; /* a limit that only an idle worker is below */

/* A slot of the first idle worker, or of one that seems to begin far sooner. What is known of others is forgotten in time, so that they
 * are tried again. NULL: there is none. */
static struct worker_slot *find_idle(struct fast_path *path, uint32_t *found) {
    struct worker_slot *best = NULL;
    for (uint32_t i = 0; i < path->worker_count; i++) {
        struct fast_worker *worker = &path->workers[i];
        struct worker_slot *place = free_worker_slot(path, worker, IDLE_US);
        if (place && (!best || 2 * worker->delay_ns + NO_DELAY_NS < path->workers[*found].delay_ns)) {
            best = place;
            *found = i;
        }
        worker->delay_ns -= worker->delay_ns >> FORGET_BITS;
    }
    return best;
}

/* Finds so many workers, the first ones of those that are idle, and a slot of the first. A single one may also have less than QUEUED_US to
 * do. NULL: there are not so many. */
static struct worker_slot *find_workers(struct fast_path *path, uint32_t ranks, uint32_t *found) {
    struct worker_slot *home = ranks == 1 ? find_idle(path, found) : NULL;
    uint32_t count = 0;
    if (home) return home;
    for (uint32_t i = 0; i < path->worker_count && count < ranks; i++) {
        struct worker_slot *place = free_worker_slot(path, &path->workers[i], IDLE_US);
        if (!place) continue;
        if (!count) home = place;
        found[count++] = i;
    }
    if (count == ranks) return home;
    for (uint32_t i = 0; ranks == 1 && i < path->worker_count; i++) {
        found[0] = i;
        home = free_worker_slot(path, &path->workers[i], QUEUED_US);
        if (home) return home;
    }
    return NULL;
}

/* Whether a gang computes that may want the cores that are free. */
static bool may_any_grow(const struct fast_path *path) {
    for (uint32_t i = 0; i < path->worker_count; i++) {
        for (uint32_t k = 0; k < path->workers[i].run_count; k++) {
            const struct worker_slot *place = path->workers[i].runs[k];
            if (!fast_path_has_ended(path, place) && path->models[place->request.model_id].may_grow) return true;
        }
    }
    return false;
}

static bool is_plain(const struct fast_path *path, const struct slot *slot) {
    if (slot->model_id >= MAX_MODELS || slot->rows != 1 || slot->rejects_late || slot->compound || atomic_load(&slot->cancel)) return false;
    const struct open_model *model = &path->models[slot->model_id];
    if (!model->arenas || may_any_grow(path)) return false;
    return !slot->deadline_ns || !model->min_slack_us || now_ns() + model->min_slack_us * UINT64_C(1000) <= slot->deadline_ns;
}

/* False: all have a query. */
static bool find_arena(const struct open_model *model, uint32_t *found) {
    for (*found = 0; *found < model->arena_count; (*found)++) {
        if (!model->arenas[*found].taken) return true;
    }
    return false;
}

/* The slot has been started. The workers have room for a command: see free_worker_slot. */
static void begin(struct fast_path *path, struct worker_slot *place) {
    struct fast_request *request = &place->request;
    struct open_model *model = &path->models[request->model_id];
    struct member member = {.front_end = request->front_end, .slot = request->slot, .generation = request->slot_generation, .rows = 1};
    struct lease_spec spec = {
        .model_id = request->model_id,
        .end_layer = model->layers,
        .wanted = model->ranks,
        .timeout_us = path->lease_timeout_us,
        .arena_offset = model->arenas[place->arena].offset,
        .arena_stride = model->arena_stride,
        .members = &member,
        .member_count = 1,
        .plan = {.versions = model->versions, .version_count = model->versions ? model->layers : 0},
        .passes = 1,
    };
    model->arenas[place->arena].taken = true;
    place->taken = true;
    place->inside = UINT64_MAX >> (MAX_RANKS - model->ranks);
    request->lease_generation = lease_initialise(&path->leases[place->lease], &spec);
    request->begun_ns = now_ns();
    for (uint32_t rank = model->ranks; rank-- > 0;) { /* rank 0 comes last: its core is often this one */
        struct fast_worker *worker = &path->workers[place->workers[rank]];
        struct message run = {.gang = {MESSAGE_RUN, place->lease, rank, request->lease_generation}};
        worker->woken_ns = worker->run_count ? 0 : request->begun_ns;
        worker->runs[worker->run_count++] = place;
        ring_send(worker->commands, &run);
        bell_ring(worker->bell);
    }
}

/* How many requests have come that have not begun. */
static uint32_t count_submits(const struct fast_path *path) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < path->front_end_count; i++) count += ring_pending(path->submits[i]);
    return count;
}

/* Whether a worker has a slot again in a moment. */
static bool is_any_about_to_end(const struct fast_path *path) {
    for (uint32_t i = 0; i < path->worker_count; i++) {
        const struct fast_worker *worker = &path->workers[i];
        uint32_t brief = 0;
        for (uint32_t k = 0; k < worker->run_count; k++) {
            const struct worker_slot *place = worker->runs[k];
            brief += path->models[place->request.model_id].expected_us < QUEUED_US && !is_overdue(path, place);
        }
        if (brief && brief == worker->run_count) return true;
    }
    return false;
}

/* Whether a request for one worker that finds none does better to wait here for a moment than to be decided about, which takes as long.
 * Of many that come at once the caller makes a batch. */
static bool may_wait(const struct fast_path *path, const struct open_model *model, const struct slot *slot) {
    if (model->ranks > 1 || model->expected_us >= QUEUED_US) return false;
    if (count_submits(path) > path->worker_count * path->worker_slot_count) return false;
    return now_ns() < slot->seen_ns + QUEUED_US * UINT64_C(1000) && is_any_about_to_end(path);
}

/* Whether a request has its answer, of so many of a model as may be under way: its worker is about to leave, and may have lost its core
 * to the front end that has sent the next one. */
static bool is_any_answered(const struct fast_path *path, uint32_t model_id) {
    for (uint32_t i = 0; i < path->worker_count; i++) {
        for (uint32_t k = 0; k < path->workers[i].run_count; k++) {
            const struct fast_request *request = &path->workers[i].runs[k]->request;
            uint64_t word = atomic_load(&path->tables[request->front_end].slots[request->slot].word);
            bool runs = slot_state(word) == SLOT_RUNNING && slot_generation(word) == request->slot_generation;
            if (request->model_id == model_id && !runs) return true;
        }
    }
    return false;
}

/* Whether a request to a model of which no more may be under way does better to wait here for one that has been answered. */
static bool may_follow(const struct fast_path *path, const struct slot *slot) {
    return now_ns() < slot->seen_ns + LEAVING_US * UINT64_C(1000) && is_any_answered(path, slot->model_id);
}

enum reception { RECEIVED, WAITS, FOR_CALLER };

static enum reception receive(struct fast_path *path, uint32_t front_end, const struct message *message) {
    const struct slot_table *table = &path->tables[front_end];
    if (message->kind != MESSAGE_SUBMIT || message->request.slot >= table->count) return FOR_CALLER;
    struct slot *slot = &table->slots[message->request.slot];
    uint32_t generation = message->request.generation, workers[MAX_RANKS];
    if (!slot_see(slot, generation)) return RECEIVED; /* stale, or a duplicate */
    if (!is_plain(path, slot)) return FOR_CALLER;
    const struct open_model *model = &path->models[slot->model_id];
    struct worker_slot *place = find_workers(path, model->ranks, workers);
    if (!place) return may_wait(path, model, slot) ? WAITS : FOR_CALLER;
    if (!find_arena(model, &place->arena)) return may_follow(path, slot) ? WAITS : FOR_CALLER;
    if (!slot_start(slot, generation, 1, 0, true)) return RECEIVED;
    slot->blocks = 1;
    slot->conflicts = slot->preemptions = 0;
    slot->versions = 0;
    slot->bf16 = 0;
    memcpy(place->workers, workers, model->ranks * sizeof *workers);
    place->request = (struct fast_request){.model_id = slot->model_id, .front_end = front_end, .slot = message->request.slot,
                                           .slot_generation = generation, .priority = slot->priority, .arrival_ns = slot->arrival_ns,
                                           .deadline_ns = slot->deadline_ns, .limit_ns = slot->limit_ns, .join_key = slot->join_key};
    begin(path, place);
    return RECEIVED;
}

static enum reception read_submits(struct fast_path *path, uint32_t front_end) {
    struct ring *ring = path->submits[front_end];
    const struct message *message;
    while ((message = ring_peek(ring))) {
        enum reception reception = receive(path, front_end, message);
        if (reception != RECEIVED) return reception;
        ring_drop(ring);
    }
    return RECEIVED;
}

/* -- both */

/* WAITS: some request does. */
static enum reception read_rings(struct fast_path *path) {
    enum reception all = RECEIVED;
    for (uint32_t i = 0; i < path->worker_count; i++) {
        if (!read_completions(path, &path->workers[i])) return FOR_CALLER;
    }
    for (uint32_t i = 0; i < path->front_end_count; i++) {
        enum reception reception = read_submits(path, i);
        if (reception == FOR_CALLER) return FOR_CALLER;
        if (reception == WAITS) all = WAITS;
    }
    return all;
}

static bool any_under_way(const struct fast_path *path) {
    for (uint32_t i = 0; i < path->worker_count; i++) {
        if (path->workers[i].run_count) return true;
    }
    return false;
}

void fast_path_set_leases(struct fast_path *path, const uint32_t *leases) {
    for (uint32_t i = 0; i < path->worker_count; i++) {
        path->workers[i].run_count = 0;
        for (uint32_t k = 0; k < path->worker_slot_count; k++) {
            struct worker_slot *place = &path->workers[i].worker_slots[k];
            place->lease = leases[i * path->worker_slot_count + k];
            place->taken = false;
        }
    }
}

static uint64_t earlier(uint64_t a, uint64_t b) { return a < b ? a : b; }

void fast_path_poll(struct fast_path *path, const struct poll_limits *limits) {
    uint64_t end_ns = now_ns() + limits->timeout_us * 1000, watch_ns = limits->watch_us * 1000, watched_ns = UINT64_MAX;
    path->completed_count = 0;
    for (;;) {
        uint32_t seen = bell_seen(path->bell);
        enum reception reception = read_rings(path);
        if (reception == FOR_CALLER || bell_control_seq(path->bell) != limits->control_seq) return;
        if (path->completed_count >= MAX_COMPLETED) return;
        uint64_t now = now_ns();
        bool under_way = any_under_way(path);
        if (watched_ns == UINT64_MAX && (under_way || path->completed_count)) watched_ns = now + watch_ns;
        if (now >= end_ns || (now >= watched_ns && (!under_way || now >= watched_ns + watch_ns))) return;
        if (reception == WAITS) {
            bell_wait(path->bell, seen, limits->spin_us, earlier(QUEUED_US, (end_ns - now) / 1000));
        } else if (now < watched_ns) {
            bell_wait_skipping_completions(path->bell, seen, limits->spin_us, (earlier(end_ns, watched_ns) - now) / 1000);
        } else {
            bell_wait(path->bell, seen, limits->spin_us, (earlier(end_ns, watched_ns + watch_ns) - now) / 1000);
        }
    }
}
