/* Stress of the gang protocol under a sanitizer: threads are the workers, this one is the scheduler.
 *
 *   stress SEED ROUNDS WORKERS
 *
 * Each round is one batch for a random model: the rows of some requests, one after the other, cut anywhere into up to three gangs, which
 * work at the same time. While they run the scheduler stops them (both ways), resumes, grows, shrinks and aborts them at random; a part of
 * a request may run twice. While it waits for all to leave it skips wakeups by completions, or not: who leaves an answered request need
 * ring only in the second case. Afterwards every task of a gang must have been executed exactly once since its last abort, each layer after
 * the whole of the one before, on the rows of the right requests, and each request must have its own outputs. A gang may compute the
 * first layers in passes: then a layer of a pass comes after the layer before of the same rows, and a pass after the one before. Layers
 * have versions and blocks have ranks, by a plan that the scheduler changes while the gang runs: each layer of a pass must be in one
 * version, and a rank may leave as one too many only if so many are wanted no more. Some have a batch kernel, which must be used for two
 * rows and more, with groups of rows that cover each row once, at one stride. Some programs are one call for all rows; it must be begun once, and what it says of each request must
 * become the answer.
 * Cells and tensors are plain memory on purpose: ThreadSanitizer reports them if the protocol does not order their accesses. */
#include <pthread.h>

#include "stress.h"

static struct worker workers[WORKERS];
static struct worker_status statuses[WORKERS];
static struct bell bells[WORKERS], scheduler_bell;
static struct ring *commands[WORKERS], *completions[WORKERS];
static uint32_t worker_count;
static char *arena;
static uint64_t random_state;
static uint32_t to_ring; /* so many messages had to be rung for in any case */
static unsigned aborts, stops, grown, shrunk, planned, kept, repeated, packs, unpacks, passes, blocks, left_counts[LEFT_STALE + 1];

uint32_t random_below(uint32_t limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33) % limit;
}

/* -- the scheduler */

static void *worker_thread(void *worker) {
    struct message command = worker_loop(worker);
    CHECK(command.kind == MESSAGE_EXIT, "command %u", command.kind);
    return NULL;
}

static void send_rank(struct gang *gang, uint32_t rank) {
    uint32_t worker = rank; /* worker r always runs as rank r */
    struct message run = {.gang = {.kind = MESSAGE_RUN, .lease = (uint32_t)(gang - gangs), .rank = rank, .generation = gang->generation}};
    CHECK(ring_send(commands[worker], &run), "ring full");
    bell_ring(&bells[worker]);
    gang->inside |= UINT64_C(1) << rank;
}

static void collect(void) {
    struct message left;
    for (uint32_t worker = 0; worker < worker_count; worker++) {
        while (ring_receive(completions[worker], &left)) {
            struct gang *gang = &gangs[left.gang.lease];
            CHECK(left.kind == MESSAGE_LEFT && left.gang.rank == worker && left.gang.generation == gang->generation, "message %u", left.kind);
            CHECK(left.gang.reason <= LEFT_ABORTED, "rank %u left for reason %u", worker, left.gang.reason);
            left_counts[left.gang.reason]++;
            uint32_t wanted = atomic_load(&gang->lease->wanted);
            CHECK(left.gang.reason != LEFT_SHRUNK || left.gang.rank >= wanted, "rank %u left a gang of %u", worker, wanted);
            if (wanted < gang->wanted) gang->wanted = wanted; /* a block has begun that has fewer ranks */
            to_ring += left.gang.reason != LEFT_DONE;
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

static bool message_waits(void) {
    for (uint32_t worker = 0; worker < worker_count; worker++) {
        if (ring_pending(completions[worker])) return true;
    }
    return false;
}

static void print_gangs(void) {
    for (uint32_t i = 0; i < gang_count; i++) {
        struct lease *lease = gangs[i].lease;
        struct phase_state state = phase_unpack(atomic_load(&lease->phase));
        fprintf(stderr, "inside %lx present %lx phase %u kind %u finished %u control %u aborted %u wanted %u sleepers %u\n", (long)gangs[i].inside,
                (long)lease->present, state.number, state.kind, lease->finished, lease->control, lease->aborted, lease->wanted, lease->sleepers);
    }
}

/* Waits are counted, not time: a virtual machine that was stopped finds its clock a minute later. */
static void wait_for_ring(uint32_t seen) {
    for (int waits = 0; waits < NOBODY_RINGS_S; waits++) {
        if (bell_wait(&scheduler_bell, seen, 10, UINT64_C(1000000)) != seen) return;
    }
    print_gangs();
    CHECK(!message_waits(), "nobody rings");
    CHECK(false, "hangs");
}

static void wait_until_empty(void) {
    for (;;) {
        uint32_t seen = bell_seen(&scheduler_bell);
        collect();
        if (all_left()) return;
        if (random_below(2)) {
            bell_wait_skipping_completions(&scheduler_bell, seen, 10, PATIENCE_US);
        } else {
            wait_for_ring(seen);
        }
    }
}

static void send_ranks(struct gang *gang) {
    for (uint32_t rank = 0; rank < gang->wanted; rank++) send_rank(gang, rank);
}

/* With some entries: fewer than layers, or more. */
static struct plan make_plan(uint8_t versions[LAYERS], uint8_t ranks[LAYERS]) {
    for (int i = 0; i < LAYERS; i++) {
        versions[i] = (uint8_t)random_below(VERSIONS);
        ranks[i] = random_below(3) ? 0 : (uint8_t)(1 + random_below(worker_count));
    }
    if (program.whole) return (struct plan){0};
    return (struct plan){versions, ranks, random_below(LAYERS + 1), random_below(LAYERS + 1)};
}

/* From the beginning. */
static void begin(struct gang *gang) {
    uint8_t versions[LAYERS], ranks[LAYERS];
    gang->wanted = 1 + random_below(worker_count);
    gang->ended = gang->aborted = false;
    struct lease_spec spec = {.model_id = MODEL, .members = gang->members, .member_count = gang->member_count,
                              .end_layer = 1 + random_below(program.layer_count), .wanted = gang->wanted,
                              .timeout_us = HANG_S * 2000000u, .arena_offset = (uint64_t)(gang - gangs) * LINE * STRIDE,
                              .arena_stride = STRIDE, .plan = make_plan(versions, ranks),
                              .pass_layers = program.whole ? 0 : random_below(program.layer_count + 1), .passes = 1};
    if (spec.pass_layers) spec.passes = 1 + random_below(gang->rows);
    passes += spec.passes > 1;
    memset(gang->cells, 0, sizeof gang->cells);
    for (int i = 0; i < LAYERS * LINE; i++) gang->tasks[i / LINE][i % LINE] = 0;
    gang->generation = lease_initialise(gang->lease, &spec);
    send_ranks(gang);
}

/* A layer in its middle keeps its version. */
static void resume(struct gang *gang) {
    struct phase_state before = phase_unpack(atomic_load(&gang->lease->phase));
    uint8_t versions[LAYERS], ranks[LAYERS];
    struct plan plan = make_plan(versions, ranks);
    uint32_t next = phase_step(gang->lease, before.number), layer = phase_layer(gang->lease, before.number), end;
    gang->wanted = 1 + random_below(worker_count);
    end = next + 1 + random_below(program.layer_count - next);
    uint32_t expected = before.kind == PHASE_STOPPED ? atomic_load(&gang->lease->versions[layer]) : before.version;
    if (before.kind == PHASE_STOPPED && layer >= next && layer < end) expected = layer - next < plan.version_count ? versions[layer - next] : 0;
    lease_resume(gang->lease, end, gang->wanted, plan);
    struct phase_state state = phase_unpack(atomic_load(&gang->lease->phase));
    bool stopped = before.kind == PHASE_STOPPED;
    CHECK(state.kind == (stopped ? PHASE_OPEN : before.kind) && state.version == expected, "kind %u version %u", state.kind, state.version);
    packs += state.kind == PHASE_PACK;
    unpacks += state.kind == PHASE_UNPACK;
    send_ranks(gang);
}

/* Whether no block has fewer ranks by now: then the gang has so many, and grows only by the scheduler. */
static bool resize(struct gang *gang, uint32_t wanted) {
    bool resized = lease_resize(gang->lease, gang->wanted, wanted);
    if (resized) gang->wanted = wanted;
    else kept++;
    return resized;
}

static void plan(struct gang *gang) {
    uint8_t versions[LAYERS], ranks[LAYERS];
    if (program.whole) return;
    lease_plan(gang->lease, random_below(program.layer_count), make_plan(versions, ranks));
    planned++;
}

/* One random act of the scheduler upon a running lease. A stop in its last layer finds it before unpacking, if it has that. */
static void disturb(struct gang *gang) {
    bool last = phase_step(gang->lease, phase_unpack(atomic_load(&gang->lease->phase)).number) + 1 == program.layer_count && gang->member_count > 1;
    switch (last && random_below(2) ? 0 : random_below(10)) {
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
            shrunk += resize(gang, 1 + random_below(gang->wanted));
            break;
        case 4: case 5:
            if (gang->wanted == worker_count || gang->inside >> gang->wanted) break; /* taken: its Left has not come */
            if (random_below(2)) plan(gang);
            if (!resize(gang, gang->wanted + 1)) break;
            send_rank(gang, gang->wanted - 1);
            grown++;
            break;
        case 6: case 7: plan(gang); break;
        default: break;
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
            blocks += atomic_exchange(&gang->lease->blocks, 0);
            if (gang->ended) continue;
            working = true;
            if (gang->aborted) begin(gang);
            else resume(gang);
        }
    }
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
                                     .io = {{io[0], IO_BYTES}, {io[1], IO_BYTES}},
                                     .addresses = calloc(MAX_ADDRESSES, sizeof(char *))};
        workers[i].programs[MODEL] = &program;
        pthread_create(&threads[i], NULL, worker_thread, &workers[i]);
    }
    for (int round = 0; round < rounds; round++) play_round();
    for (uint32_t i = 0; i < worker_count; i++) {
        ring_send(commands[i], &(struct message){.kind = MESSAGE_EXIT});
        bell_ring(&bells[i]);
        pthread_join(threads[i], NULL);
        free(commands[i]);
        free(completions[i]);
        free(workers[i].addresses);
    }
    CHECK(bell_seen(&scheduler_bell) >= to_ring, "rung %u times for %u messages", bell_seen(&scheduler_bell), to_ring);
    for (int i = 0; i < FRONT_ENDS; i++) free(io[i]);
    free(arena);
    printf("rounds %d aborts %u stops %u grown %u shrunk %u planned %u blocks %u kept %u joined %u split %u repeated %u packs %u unpacks %u passes %u left",
           rounds, aborts, stops, grown, shrunk, planned, blocks, kept, joined, split, repeated, packs, unpacks, passes);
    for (int reason = 0; reason <= LEFT_STALE; reason++) printf(" %u", left_counts[reason]);
    putchar('\n');
    return 0;
}
