/* Stress of the gang protocol under a sanitizer: threads are the workers, this one is the scheduler.
 *
 *   stress SEED ROUNDS WORKERS
 *
 * Each round is one batch for a random model: the rows of some requests, one after the other, cut anywhere into up to three gangs, which
 * work at the same time. While they run the scheduler stops them (both ways), resumes, grows, shrinks and aborts them at random; a part of
 * a request may run twice. Afterwards every task of a gang must have been executed exactly once since its last abort, each layer after the
 * whole of the one before, on the rows of the right requests, and each request must have its own outputs.
 * Layers have versions, chosen anew with each block. Some have a batch kernel, which must be used for two rows and more, with groups
 * of rows that cover each row once, at one stride. Some programs are one call for all rows; it must be begun once, and what it says of
 * each request must become the answer.
 * Cells and tensors are plain memory on purpose: ThreadSanitizer reports them if the protocol does not order their accesses. */
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

enum { LAYERS = 8, TASKS = 32, REQUESTS = 4, REQUEST_ROWS = 3, LINE = REQUESTS * REQUEST_ROWS, GANGS = 3 };
enum { WORKERS = 8, VERSIONS = 3, FRONT_ENDS = 2, RING = 64, HANG_S = 100, MODEL = 3 };
/* A row: the arena's own 64 bytes, then its staged input and output. */
enum { ARENA_ROW = 64, INPUT_ROW = 256, OUTPUT_ROW = LAYERS * TASKS * 4, STRIDE = ARENA_ROW + INPUT_ROW + OUTPUT_ROW };
enum { ARENA_BYTES = GANGS * LINE * STRIDE };
/* Of a front end: slots, then inputs and outputs. */
enum { HEAP = 4096, INPUT_SPAN = REQUEST_ROWS * INPUT_ROW, OUTPUT_SPAN = REQUEST_ROWS * OUTPUT_ROW };
enum { IO_BYTES = HEAP + REQUESTS * (INPUT_SPAN + OUTPUT_SPAN) };

struct request {
    struct slot *table, *slot;
    uint32_t sequence, rows, parts;
    uint32_t first; /* its first row in the line of all rows */
    char *input, *output;
};

struct gang {
    struct lease *lease;
    struct member members[REQUESTS];
    uint32_t member_count;
    uint32_t first, rows; /* of the line */
    uint64_t inside;      /* bit r: rank r has been sent in and has not left */
    uint32_t term, wanted;
    bool ended, aborted;
    struct { int runs; } cells[LAYERS][LINE * TASKS];
};

static int numbers[LAYERS * 16]; /* the "weights": layer l's number at byte 64 l */
static struct layer layers[LAYERS];
static struct program program = {.layers = layers, .weights = (char *)numbers, .arena_bytes = ARENA_ROW, .input_count = 1,
                                 .output_count = 1, .joins = true};
static struct worker workers[WORKERS];
static struct worker_status statuses[WORKERS];
static struct bell bells[WORKERS], scheduler_bell;
static struct ring *commands[WORKERS], *completions[WORKERS];
static struct lease leases[GANGS];
static struct gang gangs[GANGS];
static struct request requests[REQUESTS];
static uint32_t worker_count, gang_count, request_count;
static uint32_t fails; /* bit q: what a whole program says of request q */
static char *io[FRONT_ENDS], *arena;
static uint64_t random_state;
static unsigned aborts, stops, grown, shrunk, joined, split, repeated, packs, unpacks, left_counts[LEFT_STALE + 1];

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

/* -- the model */

/* Tasks of each row; a batch kernel's task is one of every row in the group. */
static uint32_t tasks_of(const struct gang *gang, uint32_t layer) {
    const struct version *version = &layers[layer].versions[gang->lease->versions[layer]];
    return is_batch(version, gang->rows) ? version->batch.tasks : version->one.tasks;
}

/* The row of the line is written in each row's input, its place in the gang in each row's arena. `strides` are of weights, arena, input
 * and output. An output row has a number for each task. */
static void run_tasks(int layer, const char *row, const char *input, char *output, int64_t rows, const int64_t *strides, int32_t begin,
                      int32_t end) {
    struct gang *gang = &gangs[((const int *)row)[0]];
    uint32_t tasks = tasks_of(gang, (uint32_t)layer);
    for (int32_t task = begin; task < end; task++) {
        if (layer > 0) {
            for (uint32_t before = 0; before < tasks_of(gang, (uint32_t)layer - 1) * gang->rows; before++) {
                CHECK(gang->cells[layer - 1][before].runs == 1, "layer %d began early", layer);
            }
        }
        for (int64_t i = 0; i < rows; i++) {
            int number = ((const int *)(row + i * strides[1]))[1], in_line = *(const int *)(input + i * strides[2]);
            CHECK((uint32_t)in_line == gang->first + (uint32_t)number, "row %d of a gang from %u has row %d", number, gang->first, in_line);
            gang->cells[layer][(uint32_t)number * tasks + (uint32_t)task].runs++;
            ((int *)(output + i * strides[3]))[layer * TASKS + task] = in_line + 1;
        }
        for (int spin = (task * 7 + layer) % 5 * 40; spin > 0; spin--) spin_pause();
        if (task % 13 == 12) nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL); /* so that others fall asleep */
    }
}

static void kernel_of_layer(int *number, char *row, char *input, char *output, int32_t begin, int32_t end) {
    run_tasks(*number, row, input, output, 1, (int64_t[4]){0}, begin, end);
}

static void batch_kernel_of_layer(int *number, char *row, char *input, char *output, const int64_t *batch, int32_t begin, int32_t end) {
    const struct gang *gang = &gangs[((const int *)row)[0]];
    const struct implementation *kernel = &layers[*number].versions[gang->lease->versions[*number]].batch;
    bool together = gang->member_count > 1;
    CHECK(gang->rows > 1 && batch[0] >= 1 && batch[0] <= kernel->rows, "%ld rows", (long)batch[0]);
    CHECK(batch[1] == 0 && batch[2] == STRIDE, "strides %ld %ld", (long)batch[1], (long)batch[2]);
    CHECK(batch[3] == (together ? STRIDE : INPUT_ROW), "stride of inputs %ld", (long)batch[3]);
    CHECK(batch[4] == (together ? STRIDE : OUTPUT_ROW), "stride of outputs %ld", (long)batch[4]);
    run_tasks(*number, row, input, output, batch[0], batch + 1, begin, end);
}

static void call_whole(void *context, struct query *query) {
    CHECK(context == numbers && query->rows == gangs[0].rows && query->piece_count == request_count, "wrong query");
    gangs[0].cells[0][0].runs++;
    nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    for (uint32_t i = 0; i < request_count; i++) query->pieces[i].failed = fails >> i & 1;
}

static void make_layer(uint32_t number) {
    numbers[number * 16] = (int)number;
    layers[number] = (struct layer){
        .argument_count = 4,
        .version_count = VERSIONS,
        .max_ranks = 1 + random_below(WORKERS),
        .arguments = {{SPACE_WEIGHTS, 0, number * 64}, {SPACE_ARENA, 0, 0}, {SPACE_INPUT, 0, 0}, {SPACE_OUTPUT, 0, 0}},
        .row_ns = random_below(8000),
    };
}

static bool make_versions(struct layer *layer) {
    bool batch = false;
    for (int v = 0; v < VERSIONS; v++) {
        struct version *version = &layer->versions[v];
        version->one = (struct implementation){(kernel)kernel_of_layer, 1 + random_below(TASKS), 1 + random_below(12), 1};
        if (random_below(2)) continue;
        batch = true;
        version->batch = (struct implementation){
            (kernel)batch_kernel_of_layer, 1 + random_below(TASKS), 1 + random_below(12), 1 + random_below(LINE)};
    }
    return batch;
}

static void make_program(void) {
    bool batch = false, plain = random_below(4) == 0; /* without batch kernels nothing has to be staged */
    program.layer_count = 1 + random_below(LAYERS);
    for (uint32_t i = 0; i < program.layer_count; i++) {
        make_layer(i);
        batch |= make_versions(&layers[i]);
        for (int v = 0; plain && v < VERSIONS; v++) layers[i].versions[v].batch.run = NULL;
    }
    program.whole = random_below(4) ? NULL : call_whole;
    program.context = numbers;
    fails = program.whole ? random_below(1 << REQUESTS) : 0;
    if (program.whole) {
        program.layer_count = 1;
        layers[0] = (struct layer){.version_count = 1, .max_ranks = 1, .versions = {{.one = {NULL, 1, 1, 1}}}};
    }
    bool staged = batch && !plain && !program.whole;
    program.inputs[0] = (struct tensor){INPUT_ROW, staged ? ARENA_ROW : NOT_STAGED};
    program.outputs[0] = (struct tensor){OUTPUT_ROW, staged ? ARENA_ROW + INPUT_ROW : NOT_STAGED};
    program.pack_bytes = staged ? INPUT_ROW : 0;
    program.unpack_bytes = staged ? OUTPUT_ROW : 0;
    program.staging_bytes = program.pack_bytes + program.unpack_bytes;
}

/* -- the batch */

static void make_request(uint32_t number, uint32_t first) {
    struct request *request = &requests[number];
    char *base = io[number % FRONT_ENDS];
    uint32_t index = number / FRONT_ENDS, input = HEAP + index * INPUT_SPAN;
    uint32_t output = HEAP + REQUESTS * INPUT_SPAN + index * OUTPUT_SPAN;
    struct slot *table = (struct slot *)base, *slot = table + index;
    *request = (struct request){.table = table, .slot = slot, .rows = 1 + random_below(REQUEST_ROWS), .first = first,
                                .input = base + input, .output = base + output};
    for (uint32_t row = 0; row < request->rows; row++) *(int *)(request->input + row * INPUT_ROW) = (int)(first + row);
    memset(request->output, 0, OUTPUT_SPAN);
    CHECK(slot_acquire(table, index + 1, index) == (long)index, "acquire");
    request->sequence = slot_sequence(atomic_load(&slot->word));
    slot->rows = request->rows;
    slot->input_offset[0] = input;
    slot->output_offset[0] = output;
    slot->input_frame_bytes = slot->output_frame_bytes = 64;
    slot_change(slot, request->sequence, 1u << SLOT_FILLING, SLOT_SUBMITTED, STATUS_OK);
}

/* Rows [gang->first, gang->first + gang->rows) of the line, request by request. */
static void make_members(struct gang *gang) {
    uint32_t gang_end = gang->first + gang->rows;
    gang->member_count = 0;
    for (uint32_t i = 0; i < request_count; i++) {
        struct request *request = &requests[i];
        uint32_t end = request->first + request->rows;
        uint32_t from = request->first > gang->first ? request->first : gang->first, to = end < gang_end ? end : gang_end;
        if (from >= to) continue;
        gang->members[gang->member_count++] = (struct member){
            i % FRONT_ENDS, i / FRONT_ENDS, request->sequence, from - request->first, to - from, request->parts++};
    }
}

static uint32_t make_batch(void) {
    uint32_t rows = 0, first = 0;
    request_count = 1 + random_below(REQUESTS);
    for (uint32_t i = 0; i < request_count; i++) {
        make_request(i, rows);
        rows += requests[i].rows;
    }
    gang_count = program.whole || rows == 1 ? 1 : 1 + random_below(rows < GANGS ? rows : GANGS);
    for (uint32_t i = 0; i < gang_count; i++) {
        uint32_t later = gang_count - 1 - i; /* gangs, with one row each at least */
        uint32_t count = later ? 1 + random_below(rows - first - later) : rows - first;
        gangs[i] = (struct gang){.lease = &leases[i], .first = first, .rows = count};
        make_members(&gangs[i]);
        joined += gangs[i].member_count > 1;
        first += count;
    }
    for (uint32_t i = 0; i < request_count; i++) {
        struct request *request = &requests[i];
        split += request->parts > 1;
        CHECK(slot_start(request->slot, request->sequence, request->parts, rows, i == 0), "start");
    }
    return rows;
}

/* -- the scheduler */

static void *worker_thread(void *worker) {
    struct message command = worker_loop(worker);
    CHECK(command.kind == EXIT, "command %u", command.kind);
    return NULL;
}

static void send_rank(struct gang *gang, uint32_t rank) {
    uint32_t worker = rank; /* worker r always runs as rank r */
    struct message run = {.gang = {.kind = RUN, .lease = (uint32_t)(gang - gangs), .rank = rank, .term = gang->term}};
    CHECK(ring_send(commands[worker], &run), "ring full");
    bell_ring(&bells[worker]);
    gang->inside |= UINT64_C(1) << rank;
}

static void collect(void) {
    struct message left;
    for (uint32_t worker = 0; worker < worker_count; worker++) {
        while (ring_receive(completions[worker], &left)) {
            struct gang *gang = &gangs[left.gang.lease];
            CHECK(left.kind == LEFT && left.gang.rank == worker && left.gang.term == gang->term, "message %u", left.kind);
            CHECK(left.gang.reason <= LEFT_ABORTED, "rank %u left for reason %u", worker, left.gang.reason);
            left_counts[left.gang.reason]++;
            gang->inside &= ~(UINT64_C(1) << left.gang.rank);
            gang->ended |= left.gang.reason == LEFT_DONE;
        }
    }
}

static bool all_left(void) {
    bool left = true;
    for (uint32_t i = 0; i < gang_count; i++) left = left && !gangs[i].inside;
    return left;
}

static void wait_until_empty(void) {
    uint64_t start_ns = now_ns();
    for (;;) {
        uint32_t seen = bell_seen(&scheduler_bell);
        collect();
        if (all_left()) return;
        bell_wait(&scheduler_bell, seen, 10, 1000000);
        if (now_ns() - start_ns < HANG_S * UINT64_C(1000000000)) continue;
        for (uint32_t i = 0; i < gang_count; i++) {
            struct lease *lease = gangs[i].lease;
            struct phase phase = phase_unpack(atomic_load(&lease->phase));
            fprintf(stderr, "inside %lx present %lx layer %u kind %u finished %u control %u aborted %u wanted %u\n", (long)gangs[i].inside,
                    (long)lease->present, phase.layer, phase.kind, lease->finished, lease->control, lease->aborted, lease->wanted);
        }
        CHECK(false, "hangs");
    }
}

static void send_ranks(struct gang *gang) {
    for (uint32_t rank = 0; rank < gang->wanted; rank++) send_rank(gang, rank);
}

/* From the beginning. */
static void begin(struct gang *gang) {
    uint8_t versions[LAYERS];
    gang->wanted = 1 + random_below(worker_count);
    gang->ended = gang->aborted = false;
    for (int i = 0; i < LAYERS; i++) versions[i] = (uint8_t)random_below(VERSIONS);
    struct lease_spec spec = {.model_id = MODEL, .members = gang->members, .member_count = gang->member_count,
                              .end_layer = 1 + random_below(program.layer_count), .wanted = gang->wanted,
                              .timeout_us = HANG_S * 2000000u, .arena_offset = (uint64_t)(gang - gangs) * LINE * STRIDE,
                              .arena_stride = STRIDE, .versions = versions, .version_count = program.whole ? 0 : LAYERS};
    memset(gang->cells, 0, sizeof gang->cells);
    gang->term = lease_initialise(gang->lease, &spec);
    send_ranks(gang);
}

/* With some versions: fewer than layers, or more. A layer in its middle keeps its own. */
static void resume(struct gang *gang) {
    struct phase before = phase_unpack(atomic_load(&gang->lease->phase));
    uint8_t chosen[LAYERS];
    uint32_t chosen_count = program.whole ? 0 : random_below(LAYERS + 1), next = before.layer;
    for (uint32_t i = 0; i < LAYERS; i++) chosen[i] = (uint8_t)random_below(VERSIONS);
    gang->wanted = 1 + random_below(worker_count);
    lease_resume(gang->lease, next + 1 + random_below(program.layer_count - next), gang->wanted, chosen, chosen_count);
    struct phase phase = phase_unpack(atomic_load(&gang->lease->phase));
    bool stopped = before.kind == PHASE_STOPPED;
    uint32_t expected = !stopped ? before.version : chosen_count ? chosen[0] : 0;
    CHECK(phase.kind == (stopped ? PHASE_OPEN : before.kind) && phase.version == expected, "kind %u version %u", phase.kind, phase.version);
    packs += phase.kind == PHASE_PACK;
    unpacks += phase.kind == PHASE_UNPACK;
    send_ranks(gang);
}

/* One random act of the scheduler upon a running lease. A stop in its last layer finds it before unpacking, if it has that. */
static void disturb(struct gang *gang) {
    bool last = phase_unpack(atomic_load(&gang->lease->phase)).layer + 1 == program.layer_count && gang->member_count > 1;
    switch (last && random_below(2) ? 0 : random_below(8)) {
        case 0:
            lease_set_control(gang->lease, !last && random_below(2) ? CONTROL_STOP : CONTROL_STOP_NOW);
            stops++;
            break;
        case 1:
            lease_abort(gang->lease);
            gang->aborted = true;
            aborts++;
            break;
        case 2: case 3:
            gang->wanted = 1 + random_below(gang->wanted);
            lease_set_wanted(gang->lease, gang->wanted);
            shrunk++;
            break;
        case 4: case 5:
            if (gang->wanted == worker_count || gang->inside >> gang->wanted & 1) break; /* taken: its Left has not come */
            lease_set_wanted(gang->lease, ++gang->wanted);
            send_rank(gang, gang->wanted - 1);
            grown++;
            break;
        default: break;
    }
}

/* Whether each member's part has been counted. */
static void check_parts(const struct gang *gang, bool done) {
    for (uint32_t i = 0; i < gang->member_count; i++) {
        const struct member *member = &gang->members[i];
        struct slot *table = (struct slot *)io[member->front_end];
        bool found = slot_part_is_done(table, table + member->slot, member->sequence, member->part);
        CHECK(found == done, "part %u", member->part);
    }
}

/* Until gangs [first, end) have ended, which have begun. */
static void drive(uint32_t first, uint32_t end) {
    for (bool working = true; working;) {
        for (uint32_t acts = random_below(8); acts > 0; acts--) {
            for (uint32_t spin = random_below(3000); spin > 0; spin--) spin_pause();
            collect();
            struct gang *gang = &gangs[first + random_below(end - first)];
            if (gang->inside && !gang->ended && !gang->aborted) disturb(gang);
        }
        wait_until_empty();
        working = false;
        for (uint32_t i = first; i < end; i++) {
            struct gang *gang = &gangs[i];
            check_parts(gang, gang->ended);
            if (gang->ended) continue;
            working = true;
            if (gang->aborted) begin(gang);
            else resume(gang);
        }
    }
}

static bool is_alone_in_no_request(const struct gang *gang) {
    bool others = true;
    for (uint32_t i = 0; i < gang->member_count; i++) {
        others = others && requests[gang->members[i].slot * FRONT_ENDS + gang->members[i].front_end].parts > 1;
    }
    return others;
}

/* As after a death behind its end: the first gang runs a second time, and its parts must not count twice. */
static void run_twice(void) {
    for (int times = 0; times < 2; times++) {
        begin(&gangs[0]);
        wait_until_empty();
        while (!gangs[0].ended) {
            resume(&gangs[0]);
            wait_until_empty();
        }
        for (uint32_t i = 0; i < request_count; i++) {
            CHECK(slot_state(atomic_load(&requests[i].slot->word)) == SLOT_RUNNING, "request %u is answered", i);
        }
    }
    repeated++;
}

/* -- a round */

static void check_gang(const struct gang *gang) {
    uint32_t rows = program.whole ? 1 : gang->rows; /* one task for all */
    for (uint32_t layer = 0; layer < program.layer_count; layer++) {
        for (uint32_t task = 0; task < tasks_of(gang, layer) * rows; task++) {
            CHECK(gang->cells[layer][task].runs == 1, "layer %u task %u ran %d times", layer, task, gang->cells[layer][task].runs);
        }
    }
}

static const struct gang *gang_of(uint32_t row) {
    const struct gang *gang = gangs;
    while (row >= gang->first + gang->rows) gang++;
    return gang;
}

static void check_request(const struct request *request, uint32_t rows, bool failed) {
    struct slot *slot = request->slot;
    CHECK(slot_wait(slot, 0, 1000000), "not answered");
    CHECK(slot_status(atomic_load(&slot->word)) == (failed ? STATUS_INTERNAL : STATUS_OK), "wrong answer");
    CHECK(slot->batch_rows == rows && slot->leads == (request == requests), "batch of %u rows", slot->batch_rows);
    CHECK(slot->ranks >= 1 && slot->compute_start_ns > 0 && slot->compute_end_ns >= slot->compute_start_ns, "%u ranks", slot->ranks);
    for (uint32_t row = 0; row < request->rows && !program.whole; row++) {
        uint32_t in_line = request->first + row;
        const int *output = (const int *)(request->output + row * OUTPUT_ROW);
        for (uint32_t layer = 0; layer < program.layer_count; layer++) {
            for (uint32_t task = 0; task < tasks_of(gang_of(in_line), layer); task++) {
                CHECK(output[layer * TASKS + task] == (int)in_line + 1, "row %u layer %u task %u", in_line, layer, task);
            }
        }
    }
    slot_change(slot, request->sequence, 1u << SLOT_DONE, SLOT_FREE, STATUS_OK);
}

static void play_round(void) {
    make_program();
    uint32_t rows = make_batch();
    uint32_t first = gang_count > 1 && is_alone_in_no_request(&gangs[0]) && random_below(2);
    if (first) run_twice();
    for (uint32_t i = first; i < gang_count; i++) begin(&gangs[i]);
    drive(first, gang_count);
    for (uint32_t i = 0; i < gang_count; i++) check_gang(&gangs[i]);
    for (uint32_t i = 0; i < request_count; i++) check_request(&requests[i], rows, fails >> i & 1);
}

static void open_memory(void) {
    for (int i = 0; i < FRONT_ENDS; i++) {
        io[i] = aligned_alloc(1024, (IO_BYTES + 1023) / 1024 * 1024);
        memset(io[i], 0, IO_BYTES);
    }
    arena = aligned_alloc(64, ARENA_BYTES);
    memset(arena, 0, ARENA_BYTES);
    for (int gang = 0; gang < GANGS; gang++) {
        for (int row = 0; row < LINE; row++) {
            int *own = (int *)(arena + (gang * LINE + row) * STRIDE);
            own[0] = gang;
            own[1] = row;
        }
    }
}

int main(int argc, char **argv) {
    CHECK(argc == 4, "usage: stress SEED ROUNDS WORKERS");
    random_state = strtoull(argv[1], NULL, 10);
    int rounds = atoi(argv[2]);
    worker_count = (uint32_t)atoi(argv[3]);
    open_memory();
    pthread_t threads[WORKERS];
    for (uint32_t i = 0; i < worker_count; i++) {
        size_t ring_bytes = sizeof(struct ring) + RING * sizeof(struct message);
        commands[i] = aligned_alloc(64, ring_bytes);
        completions[i] = aligned_alloc(64, ring_bytes);
        ring_init(commands[i], RING);
        ring_init(completions[i], RING);
        workers[i] = (struct worker){.bell = &bells[i], .scheduler_bell = &scheduler_bell, .status = &statuses[i],
                                     .commands = commands[i], .completions = completions[i], .leases = leases, .lease_count = GANGS,
                                     .io_count = FRONT_ENDS, .spin_us = 5, .arena = {arena, ARENA_BYTES},
                                     .io = {{io[0], IO_BYTES}, {io[1], IO_BYTES}}};
        workers[i].programs[MODEL] = &program;
        pthread_create(&threads[i], NULL, worker_thread, &workers[i]);
    }
    for (int round = 0; round < rounds; round++) play_round();
    for (uint32_t i = 0; i < worker_count; i++) {
        ring_send(commands[i], &(struct message){.kind = EXIT});
        bell_ring(&bells[i]);
        pthread_join(threads[i], NULL);
        free(commands[i]);
        free(completions[i]);
    }
    for (int i = 0; i < FRONT_ENDS; i++) free(io[i]);
    free(arena);
    printf("rounds %d aborts %u stops %u grown %u shrunk %u joined %u split %u repeated %u packs %u unpacks %u left", rounds, aborts, stops,
           grown, shrunk, joined, split, repeated, packs, unpacks);
    for (int reason = 0; reason <= LEFT_STALE; reason++) printf(" %u", left_counts[reason]);
    putchar('\n');
    return 0;
}
