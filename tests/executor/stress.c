/* Stress of the gang protocol under a sanitizer: threads are the workers, this one is the scheduler.
 *
 *   stress SEED ROUNDS WORKERS
 *
 * Each round is one query of a random model. While it runs the scheduler stops it (both ways), resumes, grows, shrinks and aborts it at
 * random. Afterwards every task must have been executed exactly once since the last abort, each layer after the whole of the one before.
 * Layers have versions, chosen anew with each block. Some have a batch kernel, which must be used for two rows and more, with groups
 * of rows that cover each row once.
 * Some programs are one call for all rows; it must be begun once, and what it returns must become the answer.
 * Cells are plain memory on purpose: ThreadSanitizer reports them if the protocol does not order their accesses. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../executor/native/gang.h"
#include "../../executor/native/lease.h"
#include "../../executor/native/ring.h"
#include "../../executor/native/slot.h"
#include "../../executor/native/wait.h"
#include "../../executor/native/worker.h"

enum { LAYERS = 8, TASKS = 48, ROWS = 7, WORKERS = 8, VERSIONS = 3, RING = 64, HANG_S = 100, ARENA_BYTES = 4096 };

static struct { int runs; } cells[LAYERS][ROWS * TASKS];
static int numbers[LAYERS * 16]; /* the "weights": layer l's number at byte 64 l */
static struct layer layers[LAYERS];
static struct program program = {.layers = layers, .weights = (char *)numbers, .arena_bytes = 64};
static struct worker workers[WORKERS];
static struct worker_status statuses[WORKERS];
static struct bell bells[WORKERS], scheduler_bell;
static struct ring *commands[WORKERS], *completions[WORKERS];
static struct lease lease;
static uint32_t query_rows;
static bool fails; /* what a whole program does */
static char *io, *arena;
static uint64_t random_state;
static unsigned aborts, stops, grown, shrunk, left_counts[LEFT_STALE + 1];

static uint32_t random_below(uint32_t limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33) % limit;
}

#define CHECK(condition, ...)                                            \
    do {                                                                 \
        if (!(condition)) {                                              \
            fprintf(stderr, "stress.c:%d: %s: ", __LINE__, #condition);  \
            fprintf(stderr, __VA_ARGS__);                                \
            fputc('\n', stderr);                                         \
            abort();                                                     \
        }                                                                \
    } while (0)

/* Tasks of each row; a batch kernel's task is one of every row in the group. */
static uint32_t tasks_of(uint32_t layer) {
    const struct version *version = &layers[layer].versions[lease.versions[layer]];
    return is_batch(version, query_rows) ? version->batch.tasks : version->one.tasks;
}

static void run_tasks(int layer, int first_row, int64_t rows, int32_t begin, int32_t end) {
    for (int32_t task = begin; task < end; task++) {
        if (layer > 0) {
            for (uint32_t before = 0; before < tasks_of((uint32_t)layer - 1) * query_rows; before++) {
                CHECK(cells[layer - 1][before].runs == 1, "layer %d began early", layer);
            }
        }
        for (int64_t row = first_row; row < first_row + rows; row++) {
            cells[layer][(uint32_t)row * tasks_of((uint32_t)layer) + (uint32_t)task].runs++;
        }
        for (int spin = (task * 7 + layer) % 5 * 40; spin > 0; spin--) spin_pause();
        if (task % 13 == 12) nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL); /* so that others fall asleep */
    }
}

/* One argument says the layer, the other the row (the arena's stride is 64, and the row's number stands there). */
static void kernel_of_layer(int *number, int *row, int32_t begin, int32_t end) { run_tasks(*number, *row, 1, begin, end); }

static void batch_kernel_of_layer(int *number, int *row, const int64_t *batch, int32_t begin, int32_t end) {
    const struct implementation *kernel = &layers[*number].versions[lease.versions[*number]].batch;
    CHECK(query_rows > 1 && batch[0] >= 1 && batch[0] <= kernel->rows, "%ld rows", (long)batch[0]);
    CHECK(batch[1] == 0 && batch[2] == 64, "strides %ld %ld", (long)batch[1], (long)batch[2]);
    run_tasks(*number, *row, batch[0], begin, end);
}

static void call_whole(void *context, struct query *query) {
    CHECK(context == numbers && query->rows == query_rows, "wrong query");
    cells[0][0].runs++;
    nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    query->pieces[0].failed = fails;
}

static void make_program(uint32_t rows) {
    memset(cells, 0, sizeof cells);
    program.layer_count = 1 + random_below(LAYERS);
    query_rows = rows;
    for (uint32_t i = 0; i < program.layer_count; i++) {
        numbers[i * 16] = (int)i;
        layers[i] = (struct layer){
            .argument_count = 2,
            .version_count = VERSIONS,
            .max_ranks = 1 + random_below(WORKERS),
            .arguments = {{SPACE_WEIGHTS, 0, i * 64}, {SPACE_ARENA, 0, 0}},
            .row_ns = random_below(8000),
        };
        for (int v = 0; v < VERSIONS; v++) {
            struct version *version = &layers[i].versions[v];
            version->one = (struct implementation){(kernel)kernel_of_layer, 1 + random_below(TASKS), 1 + random_below(12), 1};
            if (random_below(2)) continue;
            version->batch = (struct implementation){
                (kernel)batch_kernel_of_layer, 1 + random_below(TASKS), 1 + random_below(12), 1 + random_below(ROWS)};
        }
    }
    program.whole = random_below(4) ? NULL : call_whole;
    program.context = numbers;
    fails = program.whole && random_below(2);
    if (program.whole) {
        program.layer_count = 1;
        layers[0] = (struct layer){.version_count = 1, .max_ranks = 1, .versions = {{.one = {NULL, 1, 1, 1}}}};
    }
}

static void *worker_thread(void *worker) {
    struct message command = worker_loop(worker);
    CHECK(command.kind == EXIT, "command %u", command.kind);
    return NULL;
}

/* -- the scheduler */

static uint64_t inside; /* bit r: rank r has been sent in and has not left */
static uint32_t term, wanted, count;
static bool ended, aborted;

static void send_rank(uint32_t rank) {
    uint32_t worker = rank; /* worker r always runs as rank r */
    struct message run = {.gang = {.kind = RUN, .lease = 0, .rank = rank, .term = term}};
    CHECK(ring_send(commands[worker], &run), "ring full");
    bell_ring(&bells[worker]);
    inside |= UINT64_C(1) << rank;
}

static void collect(void) {
    struct message left;
    for (uint32_t worker = 0; worker < count; worker++) {
        while (ring_receive(completions[worker], &left)) {
            CHECK(left.kind == LEFT && left.gang.rank == worker && left.gang.term == term, "message %u", left.kind);
            CHECK(left.gang.reason <= LEFT_ABORTED, "rank %u left for reason %u", worker, left.gang.reason);
            left_counts[left.gang.reason]++;
            inside &= ~(UINT64_C(1) << left.gang.rank);
            ended |= left.gang.reason == LEFT_DONE;
        }
    }
}

static void wait_until_empty(void) {
    uint64_t start_ns = now_ns();
    for (;;) {
        uint32_t seen = bell_seen(&scheduler_bell);
        collect();
        if (!inside) return;
        bell_wait(&scheduler_bell, seen, 10, 1000000);
        struct phase phase = phase_unpack(atomic_load(&lease.phase));
        CHECK(now_ns() - start_ns < HANG_S * UINT64_C(1000000000),
              "hangs: inside %lx present %lx layer %u kind %u finished %u control %u aborted %u wanted %u", (long)inside,
              (long)lease.present, phase.layer, phase.kind, lease.finished, lease.control, lease.aborted, lease.wanted);
    }
}

static void begin(struct slot *slot, uint32_t sequence, uint32_t rows) {
    uint8_t versions[LAYERS];
    wanted = 1 + random_below(count);
    for (int i = 0; i < LAYERS; i++) versions[i] = (uint8_t)random_below(VERSIONS);
    struct member member = {.sequence = sequence, .rows = rows};
    slot->rows = rows;
    struct lease_spec spec = {.model_id = 3, .members = &member, .member_count = 1, .end_layer = 1 + random_below(program.layer_count),
                              .wanted = wanted, .timeout_us = HANG_S * 2000000u, .arena_stride = 64, .versions = versions,
                              .version_count = program.whole ? 0 : LAYERS};
    CHECK(slot_start(slot, sequence, 1, 0, true), "start");
    memset(cells, 0, sizeof cells);
    term = lease_initialise(&lease, &spec);
    for (uint32_t rank = 0; rank < wanted; rank++) send_rank(rank);
}

/* With some versions: fewer than layers, or more. A layer in its middle keeps its own. */
static void resume(uint32_t next) {
    struct phase before = phase_unpack(atomic_load(&lease.phase));
    uint8_t chosen[LAYERS];
    uint32_t chosen_count = program.whole ? 0 : random_below(LAYERS + 1);
    for (uint32_t i = 0; i < LAYERS; i++) chosen[i] = (uint8_t)random_below(VERSIONS);
    lease_resume(&lease, next + 1 + random_below(program.layer_count - next), wanted, chosen, chosen_count);
    struct phase phase = phase_unpack(atomic_load(&lease.phase));
    uint32_t expected = before.kind == PHASE_OPEN ? before.version : chosen_count ? chosen[0] : 0;
    CHECK(phase.kind == PHASE_OPEN && phase.version == expected, "kind %u version %u", phase.kind, phase.version);
}

/* One random act of the scheduler upon a running lease. */
static void disturb(void) {
    switch (random_below(8)) {
        case 0:
            lease_set_control(&lease, random_below(2) ? CONTROL_STOP : CONTROL_STOP_NOW);
            stops++;
            break;
        case 1:
            lease_abort(&lease);
            aborted = true;
            aborts++;
            break;
        case 2: case 3:
            wanted = 1 + random_below(wanted);
            lease_set_wanted(&lease, wanted);
            shrunk++;
            break;
        case 4: case 5:
            if (wanted == count || inside >> wanted & 1) break; /* the number is still taken: its Left has not come */
            lease_set_wanted(&lease, ++wanted);
            send_rank(wanted - 1);
            grown++;
            break;
        default: break;
    }
}

static void play_round(void) {
    uint32_t rows = 1 + random_below(ROWS);
    make_program(rows);
    struct slot *slot = (struct slot *)io;
    CHECK(slot_acquire(slot, 1, 0) == 0, "acquire");
    uint32_t sequence = slot_sequence(atomic_load(&slot->word));
    slot_change(slot, sequence, 1u << SLOT_FILLING, SLOT_SUBMITTED, STATUS_OK);
    ended = false;
    begin(slot, sequence, rows);
    while (!ended) {
        for (uint32_t acts = random_below(6); acts > 0 && inside && !ended && !aborted; acts--) {
            for (uint32_t spin = random_below(3000); spin > 0; spin--) spin_pause();
            collect();
            if (inside && !ended) disturb();
        }
        wait_until_empty();
        if (ended) break;
        if (aborted) {
            aborted = false;
            if (!slot_change(slot, sequence, 1u << SLOT_RUNNING, SLOT_SUBMITTED, STATUS_OK)) break; /* it was answered before */
            begin(slot, sequence, rows);
            continue;
        }
        wanted = 1 + random_below(count);
        uint32_t next = phase_unpack(atomic_load(&lease.phase)).layer;
        resume(next);
        for (uint32_t rank = 0; rank < wanted; rank++) send_rank(rank);
    }
    wait_until_empty();
    aborted = false;
    CHECK(slot_wait(slot, 0, 1000000), "not answered");
    CHECK(slot_status(atomic_load(&slot->word)) == (fails ? STATUS_INTERNAL : STATUS_OK), "wrong answer");
    if (program.whole) rows = 1; /* one task for all */
    for (uint32_t i = 0; i < program.layer_count; i++) {
        for (uint32_t task = 0; task < tasks_of(i) * rows; task++) {
            CHECK(cells[i][task].runs == 1, "layer %u task %u ran %d times", i, task, cells[i][task].runs);
        }
    }
    slot_change(slot, sequence, 1u << SLOT_DONE, SLOT_FREE, STATUS_OK);
}

int main(int argc, char **argv) {
    CHECK(argc == 4, "usage: stress SEED ROUNDS WORKERS");
    random_state = strtoull(argv[1], NULL, 10);
    int rounds = atoi(argv[2]);
    count = (uint32_t)atoi(argv[3]);
    io = aligned_alloc(1024, 1 << 14);
    arena = aligned_alloc(64, ARENA_BYTES);
    memset(io, 0, 1 << 14);
    for (int row = 0; row < ARENA_BYTES / 64; row++) *(int *)(arena + 64 * row) = row;
    pthread_t threads[WORKERS];
    for (uint32_t i = 0; i < count; i++) {
        size_t ring_bytes = sizeof(struct ring) + RING * sizeof(struct message);
        commands[i] = aligned_alloc(64, ring_bytes);
        completions[i] = aligned_alloc(64, ring_bytes);
        ring_init(commands[i], RING);
        ring_init(completions[i], RING);
        workers[i] = (struct worker){.bell = &bells[i], .scheduler_bell = &scheduler_bell, .status = &statuses[i],
                                     .commands = commands[i], .completions = completions[i], .leases = &lease, .lease_count = 1,
                                     .io_count = 1, .spin_us = 5, .arena = {arena, ARENA_BYTES}, .io = {{io, 1 << 14}}};
        workers[i].programs[3] = &program;
        pthread_create(&threads[i], NULL, worker_thread, &workers[i]);
    }
    for (int round = 0; round < rounds; round++) play_round();
    for (uint32_t i = 0; i < count; i++) {
        ring_send(commands[i], &(struct message){.kind = EXIT});
        bell_ring(&bells[i]);
        pthread_join(threads[i], NULL);
        free(commands[i]);
        free(completions[i]);
    }
    free(io);
    free(arena);
    printf("rounds %d aborts %u stops %u grown %u shrunk %u left", rounds, aborts, stops, grown, shrunk);
    for (int reason = 0; reason <= LEFT_STALE; reason++) printf(" %u", left_counts[reason]);
    putchar('\n');
    return 0;
}
