/* The fast path under a sanitizer: threads are front ends and workers, this one is the scheduler.
 *
 *   fast_path SEED REQUESTS WORKERS
 *
 * Each front end keeps some requests under way, of a model for one core and of one for a random number, also such as are not for the fast
 * path: of a model that is not open, of two rows, cancelled, near their deadline, and messages of requests that are over. The scheduler
 * polls, for random times, with random worker slots; what it then finds under way it waits for, and it answers the others itself. Each
 * request must be computed once, with an arena of its own, or refused if it is one of the others, and be told of exactly once. Arenas and
 * tensors are plain memory on purpose. Prints "right" at the end. */
#include <pthread.h>

#include "../../executor/native/fast_path.h"

#include "../../executor/native/ring.h"
#include "../../executor/native/slot.h"
#include "../../executor/native/wait.h"
#include "../../executor/native/worker.h"
#include "stress.h"

enum { PLACES = 6, NARROW = 3, CLOSED = 4, WIDE = 5, WIDE_TASKS = 6, WORKER_SLOT_COUNT = 2, ALL_LEASES = WORKERS * WORKER_SLOT_COUNT * 2, ROW_BYTES = 64, RING_ENTRIES = 256 };
enum { ALL_ARENAS_BYTES = (WORKERS * WORKER_SLOT_COUNT + WORKERS + 1) * ROW_BYTES };
enum { TABLE_BYTES = PLACES * 1024, SEGMENT_BYTES = TABLE_BYTES + PLACES * 2 * ROW_BYTES };

static struct worker workers[WORKERS];
static struct worker_status statuses[WORKERS];
static struct bell bells[WORKERS], scheduler_bell;
static struct ring *commands[WORKERS], *completions[WORKERS], *submits[FRONT_ENDS];
static struct lease all_leases[ALL_LEASES];
static char *segments[FRONT_ENDS], *arenas;
static struct fast_arena narrow_arenas[WORKERS * WORKER_SLOT_COUNT], wide_arenas[WORKERS + 1];
static uint32_t worker_count, request_total;
static _Atomic uint32_t finished;

static void compute(char *arena, const char *input, char *output, int32_t begin, int32_t end) {
    (void)begin, (void)end;
    int *own = (int *)arena;
    CHECK(*own == 0, "two requests in one arena");
    *own = *(const int *)input;
    for (int spin = *own % 7 * 60; spin > 0; spin--) spin_pause();
    *(int *)output += *own + 1;
    *own = 0;
}

/* Each task has a cell of the arena. */
static void spread(char *arena, const char *input, int32_t begin, int32_t end) {
    for (int32_t task = begin; task < end; task++) {
        int *own = (int *)arena + task;
        CHECK(*own == 0, "two requests in one arena");
        for (int spin = *(const int *)input % 7 * 20; spin > 0; spin--) spin_pause();
        *own = *(const int *)input + task;
    }
}

static void gather(char *arena, char *output, int32_t begin, int32_t end) {
    (void)begin, (void)end;
    for (int task = 0; task < WIDE_TASKS; task++) {
        *(int *)output += ((int *)arena)[task];
        ((int *)arena)[task] = 0;
    }
}

static int answer_to(uint32_t model_id, int given) {
    return model_id == WIDE ? WIDE_TASKS * given + WIDE_TASKS * (WIDE_TASKS - 1) / 2 : given + 1;
}

static struct layer only = {.argument_count = 3, .version_count = 1, .max_ranks = 1, .versions = {{.one = {(kernel)compute, 1, 1, 1}}},
                            .arguments = {{SPACE_ARENA, 0, 0}, {SPACE_INPUT, 0, 0}, {SPACE_OUTPUT, 0, 0}}};
static struct layer two[] = {
    {.argument_count = 2, .version_count = 2, .max_ranks = WORKERS,
     .versions = {{.one = {(kernel)spread, WIDE_TASKS, 1, 1}}, {.one = {(kernel)spread, WIDE_TASKS, 3, 1}}},
     .arguments = {{SPACE_ARENA, 0, 0}, {SPACE_INPUT, 0, 0}}},
    {.argument_count = 2, .version_count = 1, .max_ranks = 1, .versions = {{.one = {(kernel)gather, 1, 1, 1}}},
     .arguments = {{SPACE_ARENA, 0, 0}, {SPACE_OUTPUT, 0, 0}}}};
static struct tensor plain = {ROW_BYTES, NOT_STAGED};
static struct program wide = {.layer_count = 2, .input_count = 1, .output_count = 1, .arena_bytes = ROW_BYTES, .layers = two,
                              .inputs = &plain, .outputs = &plain};
static struct program copy = {.layer_count = 1, .input_count = 1, .output_count = 1, .arena_bytes = ROW_BYTES, .layers = &only,
                              .inputs = &plain, .outputs = &plain};

static struct ring *make_ring(void) {
    struct ring *ring = aligned_alloc(64, sizeof *ring + RING_ENTRIES * sizeof(struct message));
    ring_init(ring, RING_ENTRIES);
    return ring;
}

static uint32_t random_from(uint64_t *state, uint32_t limit) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33) % limit;
}

uint32_t random_below(uint32_t limit) { /* for the scheduler alone */
    static uint64_t state;
    return random_from(&state, limit);
}

/* -- front ends and workers */

struct client {
    uint32_t front_end, sent;
    uint64_t random_state;
    bool plain[PLACES];
    int given[PLACES];
};

static uint32_t random_of(struct client *client, uint32_t limit) { return random_from(&client->random_state, limit); }

static char *tensor_of(const struct client *client, uint32_t place, uint32_t output) {
    return segments[client->front_end] + TABLE_BYTES + (place * 2 + output) * ROW_BYTES;
}

static void submit(struct client *client, uint32_t place, struct slot *slot) {
    uint32_t kind = random_of(client, 32), generation = slot_generation(atomic_load(&slot->word));
    client->plain[place] = kind > 3;
    client->given[place] = (int)++client->sent;
    slot->model_id = kind == 0 ? CLOSED : kind == 3 || kind > 16 ? WIDE : NARROW;
    slot->rows = kind == 1 ? 2 : 1;
    slot->arrival_ns = now_ns();
    slot->deadline_ns = kind == 3 ? slot->arrival_ns + 1 : 0;
    atomic_store(&slot->cancel, kind == 2);
    slot->input_offset[0] = TABLE_BYTES + place * 2 * ROW_BYTES;
    slot->output_offset[0] = slot->input_offset[0] + ROW_BYTES;
    *(int *)tensor_of(client, place, 0) = client->given[place];
    *(int *)tensor_of(client, place, 1) = 0;
    slot_change(slot, generation, 1u << SLOT_FILLING, SLOT_SUBMITTED, STATUS_OK);
    struct message message = {.request = {MESSAGE_SUBMIT, place, generation}};
    CHECK(ring_send(submits[client->front_end], &message), "full");
    if (kind == 4) ring_send(submits[client->front_end], &message); /* a double */
    bell_ring(&scheduler_bell);
}

static void check(struct client *client, uint32_t place, struct slot *slot) {
    uint64_t word = atomic_load(&slot->word);
    int answer = *(const int *)tensor_of(client, place, 1);
    if (client->plain[place]) CHECK(slot_status(word) == STATUS_OK && answer == answer_to(slot->model_id, client->given[place]), "answer %d", answer);
    else CHECK(slot_status(word) == STATUS_UNAVAILABLE && answer == 0, "answer %d to one of the others", answer);
    CHECK(slot_change(slot, slot_generation(word), 1u << SLOT_DONE, SLOT_FREE, STATUS_OK), "not done");
    atomic_fetch_add(&finished, 1);
}

static void *client_thread(void *argument) {
    struct client *client = argument;
    struct slot *slots = (struct slot *)segments[client->front_end];
    uint32_t under_way = 0;
    while (client->sent < request_total || under_way) {
        for (uint32_t place = 0; place < PLACES; place++) {
            if (slot_state(atomic_load(&slots[place].word)) != SLOT_DONE) continue;
            check(client, place, &slots[place]);
            under_way--;
        }
        if (client->sent < request_total && under_way < 1 + random_of(client, PLACES)) {
            uint32_t place = (uint32_t)slot_acquire(slots, PLACES, 0);
            submit(client, place, &slots[place]);
            under_way++;
        } else {
            nanosleep(&(struct timespec){.tv_nsec = random_of(client, 30000)}, NULL);
        }
    }
    return NULL;
}

static void *worker_thread(void *worker) {
    struct message command = worker_loop(worker);
    CHECK(command.kind == MESSAGE_EXIT, "command %u", command.kind);
    return NULL;
}

/* -- the scheduler */

static struct fast_path path;
static uint64_t told, refused, taken_over;

/* Random leases, none twice; here and there a worker has none. */
static void set_leases(void) {
    uint32_t leases[WORKERS * WORKER_SLOT_COUNT], lease = random_below(ALL_LEASES);
    for (uint32_t i = 0; i < worker_count; i++) {
        bool closed = random_below(5) == 0;
        for (uint32_t k = 0; k < WORKER_SLOT_COUNT; k++) leases[i * WORKER_SLOT_COUNT + k] = closed ? NO_LEASE : lease++ % ALL_LEASES;
    }
    fast_path_set_leases(&path, leases);
}

static void open_model(uint32_t model_id, struct fast_arena *arenas_of_model, uint32_t count, uint32_t ranks) {
    static uint8_t versions[2];
    bool other = model_id == WIDE && random_below(2);
    versions[0] = other;
    for (uint32_t i = 0; i < count; i++) arenas_of_model[i].taken = false;
    path.models[model_id] = (struct open_model){.arena_stride = ROW_BYTES, .arenas = arenas_of_model, .arena_count = count,
                                                .layers = model_id == WIDE ? 2 : 1, .expected_us = 5, .ranks = ranks,
                                                .versions = other ? versions : NULL,
                                                .may_grow = model_id == WIDE && random_below(2),
                                                .min_slack_us = model_id == WIDE ? 1000 : 0};
}

static void open_models(void) {
    uint32_t ranks = 1 + random_below(worker_count);
    open_model(NARROW, narrow_arenas, worker_count * WORKER_SLOT_COUNT, 1);
    open_model(WIDE, wide_arenas, ranks == 1 ? worker_count : worker_count / ranks + 1, ranks);
}

static void await_left(uint32_t worker) {
    struct message left;
    uint64_t end_ns = now_ns() + HANG_S * UINT64_C(1000000000);
    while (!ring_receive(completions[worker], &left)) {
        bell_wait(&scheduler_bell, bell_seen(&scheduler_bell), 10, 1000); /* the rank may have left while completions woke nobody */
        CHECK(now_ns() < end_ns, "nobody leaves");
    }
    CHECK(left.kind == MESSAGE_LEFT && left.gang.reason == LEFT_DONE, "left for reason %u", left.gang.reason);
}

static void await_those_under_way(void) {
    for (uint32_t i = 0; i < worker_count; i++) {
        for (uint32_t run = 0; run < path.workers[i].run_count; run++) await_left(i);
        for (uint32_t k = 0; k < WORKER_SLOT_COUNT; k++) {
            told += path.workers[i].worker_slots[k].taken;
            taken_over += path.workers[i].worker_slots[k].taken;
        }
    }
}

/* Those that are not for the fast path. */
static void refuse(uint32_t front_end) {
    const struct message *message;
    while ((message = ring_peek(submits[front_end]))) {
        struct slot *table = (struct slot *)segments[front_end], *slot = &table[message->request.slot];
        if (slot->model_id != CLOSED && slot->rows == 1 && !slot->deadline_ns && !atomic_load(&slot->cancel)) return;
        bool ended = slot_change(slot, message->request.generation, 1u << SLOT_SUBMITTED, SLOT_DONE, STATUS_UNAVAILABLE);
        CHECK(ended, "a request that is for nobody was begun");
        ring_drop(submits[front_end]);
        refused++;
    }
}

static void check_completed(void) {
    for (uint32_t i = 0; i < path.completed_count; i++) {
        const struct fast_request *completed = &path.completed[i];
        CHECK(completed->model_id != CLOSED && completed->arrival_ns <= completed->begun_ns, "times");
        CHECK(completed->begun_ns <= completed->joined_ns, "times");
        CHECK(completed->joined_ns <= completed->end_ns && completed->end_ns <= now_ns(), "times");
    }
    told += path.completed_count;
    path.completed_count = 0;
}

static void schedule(uint64_t total) {
    while (told + refused < total) {
        uint32_t control_seq = bell_control_seq(&scheduler_bell);
        open_models();
        set_leases();
        do {
            struct poll_limits limits = {control_seq, 5, random_below(3000), random_below(2000)};
            fast_path_poll(&path, &limits);
            check_completed();
        } while (random_below(2)); /* with what is under way */
        await_those_under_way();
        for (uint32_t i = 0; i < FRONT_ENDS; i++) refuse(i);
    }
}

static void open_memory(void) {
    static struct slot_table tables[FRONT_ENDS];
    static struct fast_worker receiving[WORKERS];
    static struct fast_request completed[MAX_COMPLETED + WORKERS * WORKER_SLOT_COUNT];
    arenas = aligned_alloc(64, ALL_ARENAS_BYTES);
    memset(arenas, 0, ALL_ARENAS_BYTES);
    for (uint32_t i = 0; i < FRONT_ENDS; i++) {
        segments[i] = aligned_alloc(1024, (SEGMENT_BYTES + 1023) / 1024 * 1024);
        memset(segments[i], 0, SEGMENT_BYTES);
        submits[i] = make_ring();
        tables[i] = (struct slot_table){(struct slot *)segments[i], PLACES};
    }
    for (uint32_t i = 0; i < worker_count; i++) {
        commands[i] = make_ring();
        completions[i] = make_ring();
        receiving[i] = (struct fast_worker){.bell = &bells[i], .commands = commands[i], .completions = completions[i]};
    }
    for (uint32_t i = 0; i < WORKERS * WORKER_SLOT_COUNT; i++) narrow_arenas[i].offset = i * ROW_BYTES;
    for (uint32_t i = 0; i < WORKERS + 1; i++) wide_arenas[i].offset = (WORKERS * WORKER_SLOT_COUNT + i) * ROW_BYTES;
    path = (struct fast_path){.bell = &scheduler_bell, .submits = submits, .tables = tables, .workers = receiving,
                              .leases = all_leases, .front_end_count = FRONT_ENDS, .worker_count = worker_count,
                              .lease_count = ALL_LEASES, .worker_slot_count = WORKER_SLOT_COUNT,
                              .completed = completed, .lease_timeout_us = HANG_S * 2000000u};
}

static void start_worker(uint32_t number, pthread_t *thread) {
    struct worker *worker = &workers[number];
    *worker = (struct worker){.bell = &bells[number], .scheduler_bell = &scheduler_bell, .status = &statuses[number],
                              .commands = commands[number], .completions = completions[number], .leases = all_leases,
                              .lease_count = ALL_LEASES, .io_count = FRONT_ENDS, .spin_us = 5,
                              .arena = {arenas, ALL_ARENAS_BYTES},
                              .io = {{segments[0], SEGMENT_BYTES}, {segments[1], SEGMENT_BYTES}},
                              .addresses = calloc(MAX_ADDRESSES, sizeof(char *))};
    worker->programs[NARROW] = worker->programs[CLOSED] = &copy;
    worker->programs[WIDE] = &wide;
    pthread_create(thread, NULL, worker_thread, worker);
}

int main(int argc, char **argv) {
    CHECK(argc == 4, "usage: fast_path SEED REQUESTS WORKERS");
    uint64_t seed = strtoull(argv[1], NULL, 10);
    request_total = (uint32_t)atoi(argv[2]);
    worker_count = (uint32_t)atoi(argv[3]);
    open_memory();
    pthread_t threads[WORKERS], client_threads[FRONT_ENDS];
    static struct client clients[FRONT_ENDS];
    for (uint32_t i = 0; i < worker_count; i++) start_worker(i, &threads[i]);
    for (uint32_t i = 0; i < FRONT_ENDS; i++) {
        clients[i] = (struct client){.front_end = i, .random_state = seed * FRONT_ENDS + i};
        pthread_create(&client_threads[i], NULL, client_thread, &clients[i]);
    }
    schedule((uint64_t)request_total * FRONT_ENDS);
    for (uint32_t i = 0; i < FRONT_ENDS; i++) pthread_join(client_threads[i], NULL);
    CHECK(atomic_load(&finished) == request_total * FRONT_ENDS, "%u requests", atomic_load(&finished));
    for (uint32_t i = 0; i < worker_count; i++) {
        ring_send(commands[i], &(struct message){.kind = MESSAGE_EXIT});
        bell_ring(&bells[i]);
        pthread_join(threads[i], NULL);
        free(commands[i]);
        free(completions[i]);
        free(workers[i].addresses);
    }
    for (uint32_t i = 0; i < FRONT_ENDS; i++) {
        free(segments[i]);
        free(submits[i]);
    }
    free(arenas);
    printf("right: told %lu refused %lu taken over %lu\n", (unsigned long)told, (unsigned long)refused, (unsigned long)taken_over);
    return 0;
}
