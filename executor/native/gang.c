/* The gang protocol (docs/architecture.md, "Lease").
 *
 * A page is one layer. Its tasks are cut into `parts`; part r belongs to rank r first, but anybody may claim from it, by compare-and-swap
 * of its range word. A claimed task pins the page: it cannot be turned before the claimer has added it to `finished`. The rank whose
 * addition completes the page turns it. Nobody else writes `phase`, except for pokes. */
#include "gang.h"

#include "lease.h"
#include "slot.h"
#include "wait.h"

enum { RANK_NS = 8000 }; /* what a rank should have to do in a layer: a page turn and a cold cache cost some of it */

struct page {
    uint32_t tag, layer, parts;
    uint32_t groups;             /* of rows, one call each */
    uint32_t group_tasks, tasks; /* of one group, of all */
    uint32_t chunk;
    bool batch; /* the kernel takes several rows */
    kernel run;
};

struct rank {
    struct lease *lease;
    struct query *query;
    uint32_t number;
    uint32_t spin_us;
};

enum page_result { PAGE_TURNED, PAGE_EXHAUSTED, PAGE_LEAVE };

static uint32_t minimum(uint32_t a, uint32_t b) { return a < b ? a : b; }

static void call(kernel run, uint32_t count, void **a, int32_t begin, int32_t end) {
    typedef void *p;
    typedef int32_t i;
    switch (count) {
        case 1: ((void (*)(p, i, i))run)(a[0], begin, end); break;
        case 2: ((void (*)(p, p, i, i))run)(a[0], a[1], begin, end); break;
        case 3: ((void (*)(p, p, p, i, i))run)(a[0], a[1], a[2], begin, end); break;
        case 4: ((void (*)(p, p, p, p, i, i))run)(a[0], a[1], a[2], a[3], begin, end); break;
        case 5: ((void (*)(p, p, p, p, p, i, i))run)(a[0], a[1], a[2], a[3], a[4], begin, end); break;
        case 6: ((void (*)(p, p, p, p, p, p, i, i))run)(a[0], a[1], a[2], a[3], a[4], a[5], begin, end); break;
        case 7: ((void (*)(p, p, p, p, p, p, p, i, i))run)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], begin, end); break;
        case 8: ((void (*)(p, p, p, p, p, p, p, p, i, i))run)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], begin, end); break;
        case 9:
            ((void (*)(p, p, p, p, p, p, p, p, p, i, i))run)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], begin, end);
            break;
    }
}

/* Where an argument lies in row 0, and how many bytes further in each row after it. */
static char *address(const struct query *query, const struct argument *argument, uint64_t *stride) {
    const struct program *program = query->program;
    char *base = NULL;
    switch (argument->space) {
        case SPACE_WEIGHTS: base = program->weights, *stride = 0; break;
        case SPACE_ARENA: base = query->arena, *stride = query->arena_stride; break;
        case SPACE_INPUT: base = query->inputs[argument->index], *stride = program->input_row_bytes[argument->index]; break;
        case SPACE_OUTPUT: base = query->outputs[argument->index], *stride = program->output_row_bytes[argument->index]; break;
    }
    return base + argument->offset;
}

/* The first row of a group: groups differ by one row at most. */
static uint32_t first_row(const struct query *query, const struct page *page, uint32_t group) {
    return page->batch ? (uint32_t)((uint64_t)group * query->rows / page->groups) : group;
}

/* One call: tasks [begin, end) of one group of rows. */
static void execute_group(const struct query *query, const struct page *page, uint32_t group, uint32_t begin, uint32_t end) {
    const struct layer *layer = &query->program->layers[page->layer];
    uint32_t count = layer->argument_count, row = first_row(query, page, group);
    void *arguments[MAX_ARGUMENTS + 1];
    uint64_t batch[MAX_ARGUMENTS + 1] = {first_row(query, page, group + 1) - row};
    for (uint32_t i = 0; i < count; i++) {
        char *base = address(query, &layer->arguments[i], &batch[i + 1]);
        arguments[i] = base + row * batch[i + 1];
    }
    if (page->batch) arguments[count++] = batch;
    call(page->run, count, arguments, (int32_t)begin, (int32_t)end);
}

/* Runs tasks [begin, end) of all rows; task t belongs to group t / group_tasks. */
static void execute(struct query *query, const struct page *page, uint32_t begin, uint32_t end) {
    const struct program *program = query->program;
    if (program->whole) { /* the only task of the only page: who executes it also turns the page, and knows how it ended */
        query->failed = !program->whole(program->context, query);
        return;
    }
    while (begin < end) {
        uint32_t group = begin / page->group_tasks, first = group * page->group_tasks;
        uint32_t stop = minimum(end, first + page->group_tasks);
        execute_group(query, page, group, begin - first, stop - first);
        begin = stop;
    }
}

static struct page open_page(const struct query *query, const struct phase *phase) {
    const struct layer *layer = &query->program->layers[phase->layer];
    const struct version *version = &layer->versions[minimum(phase->version, layer->version_count - 1)];
    bool batch = is_batch(version, query->rows);
    const struct implementation *chosen = batch ? &version->batch : &version->one;
    uint32_t groups = query->program->whole ? 1 : row_groups(version, query->rows);
    return (struct page){
        .tag = phase->tag,
        .layer = phase->layer,
        .parts = phase->parts ? minimum(phase->parts, MAX_RANKS) : 1,
        .groups = groups,
        .group_tasks = chosen->tasks,
        .tasks = chosen->tasks * groups,
        .chunk = chosen->chunk,
        .batch = batch,
        .run = chosen->run,
    };
}

/* Claims from one part: its owner from one end, a thief from the other, half of what is left but at most a chunk. Layers take turns with
 * the owner's end, so that he begins with what he computed last in the layer before: the caches still have it.
 * A word with an older tag was not touched in this page; with a newer one the page is over, and nothing of it is left. */
static bool claim(struct lease *lease, const struct page *page, uint32_t part, bool owner, uint32_t *begin, uint32_t *end) {
    _Atomic uint64_t *word = &lease->ranges[part].word;
    uint64_t old = atomic_load_explicit(word, memory_order_acquire);
    for (;;) {
        uint32_t first = range_begin(old), last = range_end(old);
        if (range_tag(old) != page->tag) {
            if (((page->tag - range_tag(old)) & TAG_MASK) > TAG_MASK / 2) return false;
            first = (uint32_t)((uint64_t)part * page->tasks / page->parts);
            last = (uint32_t)((uint64_t)(part + 1) * page->tasks / page->parts);
        }
        if (first >= last) return false;
        uint32_t count = minimum((last - first + 1) / 2, page->chunk);
        bool front = owner == (page->layer % 2 == 0);
        *begin = front ? first : last - count;
        *end = *begin + count;
        uint64_t left = front ? range_pack(page->tag, *end, last) : range_pack(page->tag, first, *begin);
        if (atomic_compare_exchange_weak_explicit(word, &old, left, memory_order_acq_rel, memory_order_acquire)) return true;
    }
}

/* A whole_call cannot be stopped once it runs, and has no boundary before the query's end: every stop keeps it from being begun. */
static bool must_leave(const struct rank *rank) {
    uint32_t control = atomic_load_explicit(&rank->lease->control, memory_order_acquire);
    return atomic_load_explicit(&rank->lease->aborted, memory_order_acquire) || control == CONTROL_STOP_NOW ||
           (control == CONTROL_STOP && rank->query->program->whole);
}

/* Beyond how many ranks a layer gets slower. A batch is worth more of them than a row, once each has enough to do. */
static uint32_t most_ranks(const struct query *query, const struct page *page) {
    const struct layer *layer = &query->program->layers[page->layer];
    uint64_t worth = query->rows > 1 ? (uint64_t)query->rows * layer->row_ns / RANK_NS : 0;
    if (worth <= layer->max_ranks) return layer->max_ranks;
    return worth < page->tasks ? (uint32_t)worth : page->tasks;
}

/* Afterwards the slot is the front end's again. */
static void answer(struct lease *lease, const struct query *query, uint64_t end_ns) {
    struct slot *slot = query->slot;
    slot->compute_start_ns = atomic_load_explicit(&lease->start_ns, memory_order_relaxed);
    slot->compute_end_ns = end_ns;
    slot->ranks = atomic_load_explicit(&lease->most_ranks, memory_order_relaxed);
    slot_change(slot, lease->sequence, 1u << SLOT_RUNNING, SLOT_DONE, query->failed ? STATUS_INTERNAL : STATUS_OK);
    slot_wake(query->table, slot);
}

/* Only ever run by one rank at a time: the one that completed the page. */
static void turn_page(const struct rank *rank, const struct page *page) {
    struct lease *lease = rank->lease;
    const struct program *program = rank->query->program;
    uint64_t end_ns = now_ns();
    atomic_store_explicit(&lease->layer_end_ns[page->layer], end_ns, memory_order_relaxed);

    uint32_t ranks = (uint32_t)__builtin_popcountll(atomic_load(&lease->present));
    if (ranks > atomic_load_explicit(&lease->most_ranks, memory_order_relaxed)) {
        atomic_store_explicit(&lease->most_ranks, ranks, memory_order_relaxed);
    }
    struct phase next = {.tag = page->tag + 1, .layer = page->layer + 1, .parts = 1, .kind = PHASE_OPEN};
    if (next.layer == program->layer_count) {
        next.kind = PHASE_END;
    } else {
        bool stop = next.layer >= lease->end_layer || atomic_load(&lease->control) != CONTROL_RUN;
        next.kind = stop ? PHASE_STOPPED : PHASE_OPEN;
        next.version = lease->versions[next.layer];
        struct page opened = open_page(rank->query, &next);
        ranks = minimum(minimum(ranks, atomic_load(&lease->wanted)), most_ranks(rank->query, &opened));
        next.parts = ranks ? ranks : 1;
    }
    atomic_store_explicit(&lease->finished, 0, memory_order_relaxed);
    /* Sequentially consistent, like the sleeper's count: either we see it, or the kernel shows it the new word. */
    atomic_store(&lease->phase, phase_pack(next));
    /* After the phase, so that a rank that finds the slot answered also finds the end, and does not take the lease for a wrong one. */
    if (next.kind == PHASE_END) answer(lease, rank->query, end_ns);
    if (atomic_load(&lease->sleepers)) futex_wake_all(&lease->phase);
}

/* A layer takes `most_ranks` of the ranks that are in, those with the lowest numbers; the others wait for the next page. */
static bool takes_part(const struct rank *rank, const struct page *page) {
    uint64_t lower = atomic_load(&rank->lease->present) & ((UINT64_C(1) << rank->number) - 1);
    return (uint32_t)__builtin_popcountll(lower) < most_ranks(rank->query, page);
}

/* Works on a page until nothing of it can be claimed: first the rank's own part, then one part after the other. What was executed is
 * added to `finished` a chunk at a time, because that line is everybody's, and at the end of each part: who completes the page with
 * its own part turns it without looking at those of others. */
static enum page_result work(const struct rank *rank, const struct page *page) {
    uint32_t part = rank->number % page->parts, exhausted = 0, executed = 0, begin, end;
    uint32_t parts = takes_part(rank, page) ? page->parts : 0;
    for (;;) {
        bool leave = must_leave(rank);
        bool claimed = !leave && exhausted < parts && claim(rank->lease, page, part, part == rank->number, &begin, &end);
        if (claimed) {
            execute(rank->query, page, begin, end);
            executed += end - begin;
            if (executed < page->chunk) continue;
        }
        if (executed && atomic_fetch_add(&rank->lease->finished, executed) + executed == page->tasks) {
            turn_page(rank, page);
            return PAGE_TURNED;
        }
        executed = 0;
        if (leave) return PAGE_LEAVE;
        if (claimed) continue;
        if (++exhausted >= parts) return PAGE_EXHAUSTED;
        part = part + 1 == page->parts ? 0 : part + 1;
    }
}

/* Waits until the phase word differs from `seen`; false if no rank finished anything for the lease's time-out. */
static bool await_turn(const struct rank *rank, uint64_t seen) {
    struct lease *lease = rank->lease;
    uint64_t start_ns = now_ns();
    do {
        for (int spin = 0; spin < SPINS_PER_CLOCK; spin++) {
            if (atomic_load_explicit(&lease->phase, memory_order_acquire) != seen) return true;
            spin_pause();
        }
    } while (now_ns() - start_ns < rank->spin_us * UINT64_C(1000));

    uint64_t timeout_ns = lease->timeout_us * UINT64_C(1000);
    uint32_t finished = atomic_load(&lease->finished);
    bool turned;
    atomic_fetch_add(&lease->sleepers, 1);
    while (!(turned = atomic_load(&lease->phase) != seen) && now_ns() - start_ns < timeout_ns) {
        futex_wait(&lease->phase, (uint32_t)seen, timeout_ns);
        uint32_t progress = atomic_load(&lease->finished);
        if (progress != finished) start_ns = now_ns();
        finished = progress;
    }
    atomic_fetch_sub(&lease->sleepers, 1);
    return turned;
}

static enum left_reason run(const struct rank *rank) {
    struct lease *lease = rank->lease;
    for (;;) {
        /* Read before anything else: whatever changes later also changes this word, and then nobody sleeps on the old one. */
        uint64_t seen = atomic_load_explicit(&lease->phase, memory_order_acquire);
        struct phase phase = phase_unpack(seen);
        if (phase.kind == PHASE_END) return LEFT_DONE;
        if (atomic_load(&lease->aborted)) return LEFT_ABORTED;
        if (phase.kind == PHASE_STOPPED) return LEFT_STOPPED;
        if (rank->number >= atomic_load_explicit(&lease->wanted, memory_order_acquire)) return LEFT_SHRUNK;

        if (phase.layer >= rank->query->program->layer_count) return LEFT_INVALID;

        struct page page = open_page(rank->query, &phase);
        switch (work(rank, &page)) {
            case PAGE_TURNED: break;
            case PAGE_LEAVE: return atomic_load(&lease->aborted) ? LEFT_ABORTED : LEFT_STOPPED;
            case PAGE_EXHAUSTED:
                /* Whoever still holds tasks will turn the page to STOPPED; nobody needs us for that. */
                if (atomic_load(&lease->control) != CONTROL_RUN) return LEFT_STOPPED;
                /* Another rank makes the only call, and that may take longer than the time-out. */
                if (rank->query->program->whole) return LEFT_SHRUNK;
                if (await_turn(rank, seen)) break;
                lease_abort(lease);
                return LEFT_TIMEOUT;
        }
    }
}

enum left_reason gang_run(struct lease *lease, struct query *query, uint32_t number, uint32_t spin_us) {
    struct rank rank = {lease, query, number, spin_us};
    uint64_t unset = 0;
    atomic_fetch_or(&lease->present, UINT64_C(1) << number);
    if (atomic_load(&lease->start_ns) == 0) atomic_compare_exchange_strong(&lease->start_ns, &unset, now_ns());
    enum left_reason reason = run(&rank);
    atomic_fetch_and(&lease->present, ~(UINT64_C(1) << number));
    return reason;
}
