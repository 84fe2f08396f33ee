/* The gang protocol (docs/explanation/processes-and-memory.md, "Lease").
 *
 * A phase is one layer, or rows to be copied (phase.h). Its tasks are cut into `parts`; rank r takes from part r first, but every rank
 * may claim from it, by compare-and-swap of its range word. A claimed task pins the phase: it cannot be advanced before the claimer has
 * added it to `finished`. The rank whose addition completes the phase advances it. Nothing else writes `phase`, except for kicks. */
#include "gang.h"

#include <sched.h>

#include "lease.h"
#include "phase.h"
#include "slot.h"
#include "wait.h"

/* How long a whole call waits for the ranks that are to lend it their cores, and they for rank 0. */
enum { GATHER_NS = 2 * 1000 * 1000, LEND_NS = 100 * 1000 * 1000 };

struct rank {
    struct lease *lease;
    struct query *query;
    uint32_t number;
    uint32_t spin_us;
};

enum work_result { WORK_ADVANCED, WORK_EXHAUSTED, WORK_LEAVE };

static uint32_t minimum(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* Claims from one part: its owner from one end, a stealing rank from the other, half of what is left but at most a chunk. The owner's end
 * alternates from layer to layer, so that it begins with what it computed last in the layer before: the caches still have it.
 * A word with an older tag was not touched in this phase; with a newer one the phase is over, and nothing of it is left. */
static bool claim(struct lease *lease, const struct phase *phase, uint32_t part, bool owner, uint32_t *begin, uint32_t *end) {
    _Atomic uint64_t *word = &lease->ranges[part].word;
    uint64_t old = atomic_load_explicit(word, memory_order_acquire);
    for (;;) {
        uint32_t first = range_begin(old), last = range_end(old);
        if (range_tag(old) != phase->tag) {
            if (((phase->tag - range_tag(old)) & TAG_MASK) > TAG_MASK / 2) return false;
            first = (uint32_t)((uint64_t)part * phase->tasks / phase->parts);
            last = (uint32_t)((uint64_t)(part + 1) * phase->tasks / phase->parts);
        }
        if (first >= last) return false;
        uint32_t count = minimum((last - first + 1) / 2, phase->chunk);
        bool front = owner == (phase->layer % 2 == 0);
        *begin = front ? first : last - count;
        *end = *begin + count;
        uint64_t left = front ? range_pack(phase->tag, *end, last) : range_pack(phase->tag, first, *begin);
        if (atomic_compare_exchange_weak_explicit(word, &old, left, memory_order_acq_rel, memory_order_acquire)) return true;
    }
}

/* A whole program cannot be stopped once it runs, and has no boundary before the query's end: any stop prevents its start. */
static bool must_leave(const struct rank *rank) {
    uint32_t control = atomic_load_explicit(&rank->lease->control, memory_order_acquire);
    return atomic_load_explicit(&rank->lease->aborted, memory_order_acquire) || control == CONTROL_STOP_NOW ||
           (control == CONTROL_STOP && rank->query->program->whole);
}

static bool is_in(const struct lease *lease, uint32_t number) { return atomic_load(&lease->present) >> number & 1; }

/* Whether a phase is one call that is worth several threads: the other ranks lend it their cores. */
static bool lends_cores(const struct query *query, const struct phase *phase) {
    return phase->call && phase->tasks == 1 && query->program->layers[phase->layer].max_ranks > 1;
}

/* Notes on which cores a call may have threads. */
static void choose_cores(const struct rank *rank, const struct phase *phase) {
    struct query *query = rank->query;
    struct lease *lease = rank->lease;
    uint32_t most = lends_cores(query, phase) ? query->program->layers[phase->layer].max_ranks : 1;
    query->cpus[0] = atomic_load_explicit(&lease->cpus[rank->number], memory_order_relaxed);
    query->cpu_count = 1;
    for (uint32_t number = 0; number < MAX_RANKS && query->cpu_count < most; number++) {
        if (number == rank->number || !is_in(lease, number)) continue;
        query->cpus[query->cpu_count++] = atomic_load_explicit(&lease->cpus[number], memory_order_relaxed);
    }
}

static bool has_failed(const struct piece *piece) { return atomic_load(&piece->slot->failure) != STATUS_OK; }

/* A request that failed alone, although it was computed with others, does not lead its batch: one of the others does. */
static void pass_lead(const struct query *query) {
    bool leads = false;
    for (uint32_t i = 0; i < query->piece_count; i++) {
        const struct piece *piece = &query->pieces[i];
        leads = leads || (has_failed(piece) && atomic_load_explicit(&piece->slot->leads, memory_order_relaxed));
    }
    for (uint32_t i = 0; leads && i < query->piece_count; i++) {
        const struct piece *piece = &query->pieces[i];
        leads = has_failed(piece) || !slot_lead(piece->slot, piece->generation, true);
    }
}

/* After this the slots belong to the front ends. */
static void answer(struct lease *lease, const struct query *query, uint64_t end_ns) {
    struct part_result result = {
        .start_ns = atomic_load_explicit(&lease->start_ns, memory_order_relaxed),
        .end_ns = end_ns,
        .ranks = atomic_load_explicit(&lease->most_ranks, memory_order_relaxed),
        .blocks = atomic_load_explicit(&lease->blocks, memory_order_relaxed),
        .versions = atomic_load_explicit(&lease->used_versions, memory_order_relaxed),
    };
    if (query->piece_count > 1) pass_lead(query);
    for (uint32_t i = 0; i < query->piece_count; i++) {
        const struct piece *piece = &query->pieces[i];
        slot_part_computed(piece->table, piece->slot, piece->generation, piece->parts, piece->part, &result);
    }
}

/* A block begins with this step if the plan says so. It never has more ranks than it had before: only the scheduler sends ranks in.
 *
 * `wanted` is read before the entry: who sees the scheduler's newest number of ranks also sees its plan. If that number changes between
 * here and the swap the scheduler has resized the gang, knowing what it planned, and its number stays. The phase is published after this,
 * so a rank that finds the block's first layer also finds how many ranks it has. */
static void begin_block(struct lease *lease, uint32_t step) {
    uint32_t wanted = atomic_load(&lease->wanted);
    uint32_t ranks = atomic_load_explicit(&lease->block_ranks[step], memory_order_relaxed);
    if (!ranks) return;
    atomic_fetch_add_explicit(&lease->blocks, 1, memory_order_relaxed);
    if (ranks < wanted) atomic_compare_exchange_strong(&lease->wanted, &wanted, ranks);
}

/* What comes after a phase: the first layer after packing, one phase after the other, unpacking, the end. No gang stops between its last
 * layer and unpacking: it could not be told from one that is to run that layer again. */
static struct phase_state next_phase(const struct rank *rank, const struct phase *phase, uint32_t ranks) {
    struct lease *lease = rank->lease;
    const struct query *query = rank->query;
    struct phase_state next = {.tag = phase->tag + 1, .number = phase->number + 1, .parts = 1, .kind = PHASE_OPEN};
    if (phase->kind == PHASE_PACK) {
        next.number = phase->number;
    } else if (next.number == step_phase(lease, query->program->layer_count)) {
        if (phase->kind == PHASE_UNPACK || !query_copies(query, PHASE_UNPACK)) {
            next.kind = PHASE_END;
            return next;
        }
        next.kind = PHASE_UNPACK;
        next.number = phase->number;
    }
    uint32_t step = phase_step(lease, next.number);
    bool stop = step >= lease->end_layer || atomic_load(&lease->control) != CONTROL_RUN;
    if (stop && next.kind == PHASE_OPEN) next.kind = PHASE_STOPPED;
    bool begins = next.kind == PHASE_OPEN && step != phase_step(lease, phase->number);
    if (begins) begin_block(lease, step);
    next.version = atomic_load_explicit(&lease->versions[phase_layer(lease, next.number)], memory_order_relaxed);
    if (next.kind == PHASE_OPEN) lease_use_version(lease, next.version, begins);
    struct phase opened = phase_open(lease, query, &next);
    ranks = minimum(minimum(ranks, atomic_load(&lease->wanted)), phase_most_ranks(query, &opened));
    next.parts = ranks ? ranks : 1;
    return next;
}

/* Only ever run by one rank at a time: the one that completed the phase. */
static void advance_phase(const struct rank *rank, const struct phase *phase) {
    struct lease *lease = rank->lease;
    uint64_t end_ns = now_ns();
    uint32_t step = phase_step(lease, phase->number);
    if (phase->kind != PHASE_PACK && phase_step(lease, phase->number + 1) != step) {
        atomic_store_explicit(&lease->layer_end_ns[step], end_ns, memory_order_relaxed);
    }

    uint32_t ranks = (uint32_t)__builtin_popcountll(atomic_load(&lease->present));
    if (ranks > atomic_load_explicit(&lease->most_ranks, memory_order_relaxed)) {
        atomic_store_explicit(&lease->most_ranks, ranks, memory_order_relaxed);
    }
    struct phase_state next = next_phase(rank, phase, ranks);
    atomic_store_explicit(&lease->finished, 0, memory_order_relaxed);
    /* Sequentially consistent, like the sleeper's count: either this rank sees it, or the kernel shows it the new word. */
    atomic_store(&lease->phase, phase_pack(next));
    /* After the phase, so that a rank that finds a slot answered also finds PHASE_END, and does not report the lease as invalid. */
    if (next.kind == PHASE_END) answer(lease, rank->query, end_ns);
    if (atomic_load(&lease->sleepers)) futex_wake_all(&lease->phase);
}

/* A phase takes `phase_most_ranks` of the ranks that are in, those with the lowest numbers. The others wait for the next phase. */
static bool takes_part(const struct rank *rank, const struct phase *phase) {
    uint64_t lower = atomic_load(&rank->lease->present) & ((UINT64_C(1) << rank->number) - 1);
    return (uint32_t)__builtin_popcountll(lower) < phase_most_ranks(rank->query, phase);
}

/* Works on a phase until nothing of it can be claimed: first the rank's own part, then one part after the other. What was executed is
 * added to `finished` a chunk at a time, because all ranks share that cache line, and at the end of each part: a rank that completes
 * the phase with its own part advances it without trying the parts of others. */
static enum work_result work(const struct rank *rank, const struct phase *phase) {
    uint32_t part = rank->number % phase->parts, exhausted = 0, executed = 0, begin, end;
    uint32_t parts = takes_part(rank, phase) ? phase->parts : 0;
    for (;;) {
        bool leave = must_leave(rank);
        bool claimed = !leave && exhausted < parts && claim(rank->lease, phase, part, part == rank->number, &begin, &end);
        if (claimed) {
            if (phase->call) choose_cores(rank, phase);
            phase_execute(rank->query, phase, begin, end);
            executed += end - begin;
            if (executed < phase->chunk) continue;
        }
        if (executed && atomic_fetch_add(&rank->lease->finished, executed) + executed == phase->tasks) {
            advance_phase(rank, phase);
            return WORK_ADVANCED;
        }
        executed = 0;
        if (leave) return WORK_LEAVE;
        if (claimed) continue;
        if (++exhausted >= parts) return WORK_EXHAUSTED;
        part = part + 1 == phase->parts ? 0 : part + 1;
    }
}

/* Waits until the phase word differs from `seen`; false if no rank finished anything for the lease's time-out. A call has none: it may take
 * any time. It has this rank's core meanwhile if it is worth several threads. */
static bool await_advance(const struct rank *rank, const struct phase *phase, uint64_t seen) {
    struct lease *lease = rank->lease;
    uint64_t start_ns = now_ns(), spin_ns = lends_cores(rank->query, phase) ? 0 : rank->spin_us * UINT64_C(1000);
    do {
        for (int spin = 0; spin < SPINS_PER_CLOCK; spin++) {
            if (atomic_load_explicit(&lease->phase, memory_order_acquire) != seen) return true;
            spin_pause();
        }
    } while (now_ns() - start_ns < spin_ns);

    uint64_t timeout_ns = lease->timeout_us * UINT64_C(1000);
    uint32_t finished = atomic_load(&lease->finished);
    bool advanced;
    atomic_fetch_add(&lease->sleepers, 1);
    while (!(advanced = atomic_load(&lease->phase) != seen) && (phase->call || now_ns() - start_ns < timeout_ns)) {
        futex_wait(&lease->phase, (uint32_t)seen, timeout_ns);
        uint32_t progress = atomic_load(&lease->finished);
        if (progress != finished) start_ns = now_ns();
        finished = progress;
    }
    atomic_fetch_sub(&lease->sleepers, 1);
    return advanced;
}

/* A whole program is called by rank 0 alone. The others lend it their cores: they sleep until the query ends, so that its threads have
 * them. They leave if rank 0 does not come, or has left without a call. */
static enum left_reason lend_core(const struct rank *rank) {
    struct lease *lease = rank->lease;
    uint64_t start_ns = now_ns();
    for (;;) {
        bool led = is_in(lease, 0); /* read first: rank 0 ends the query before it leaves */
        uint64_t seen = atomic_load(&lease->phase), timeout_ns = lease->timeout_us * UINT64_C(1000);
        if (phase_unpack(seen).kind == PHASE_END) return LEFT_DONE;
        if (atomic_load(&lease->aborted)) return LEFT_ABORTED;
        if (rank->number >= atomic_load(&lease->wanted)) return LEFT_SHRUNK;
        if (!led) {
            uint64_t waited_ns = now_ns() - start_ns;
            if (atomic_load(&lease->control) != CONTROL_RUN) return LEFT_STOPPED;
            if (waited_ns >= LEND_NS) return LEFT_SHRUNK;
            timeout_ns = LEND_NS - waited_ns;
        }
        atomic_fetch_add(&lease->sleepers, 1);
        futex_wait(&lease->phase, (uint32_t)seen, timeout_ns);
        atomic_fetch_sub(&lease->sleepers, 1);
    }
}

static uint32_t count_present(const struct lease *lease, uint32_t wanted) {
    return (uint32_t)__builtin_popcountll(atomic_load(&lease->present) & (UINT64_MAX >> (MAX_RANKS - wanted)));
}

/* Rank 0 may wait for the last rank. */
static void tell_gathered(struct lease *lease) {
    uint32_t wanted = minimum(atomic_load(&lease->wanted), MAX_RANKS);
    if (count_present(lease, wanted) == wanted && atomic_load(&lease->sleepers)) lease_kick(lease);
}

/* Notes on which cores the call may have threads: those of the ranks that are in. Ranks are started together; one that comes later
 * than GATHER_NS only sleeps. */
static void gather(const struct rank *rank) {
    struct lease *lease = rank->lease;
    struct query *query = rank->query;
    uint32_t wanted = minimum(atomic_load(&lease->wanted), MAX_RANKS);
    uint64_t start_ns = now_ns(), waited_ns = 0;
    while (count_present(lease, wanted) < wanted && !must_leave(rank) && waited_ns < GATHER_NS) {
        if (waited_ns < rank->spin_us * UINT64_C(1000)) {
            for (int spin = 0; spin < SPINS_PER_CLOCK; spin++) spin_pause();
        } else {
            uint64_t seen = atomic_load(&lease->phase);
            atomic_fetch_add(&lease->sleepers, 1);
            if (count_present(lease, wanted) < wanted) futex_wait(&lease->phase, (uint32_t)seen, GATHER_NS - waited_ns);
            atomic_fetch_sub(&lease->sleepers, 1);
        }
        waited_ns = now_ns() - start_ns;
    }
    query->cpu_count = 0;
    for (uint32_t number = 0; number < wanted; number++) {
        if (is_in(lease, number)) query->cpus[query->cpu_count++] = atomic_load_explicit(&lease->cpus[number], memory_order_relaxed);
    }
}

static enum left_reason run(const struct rank *rank) {
    struct lease *lease = rank->lease;
    if (rank->query->program->whole) {
        if (rank->number) return lend_core(rank);
        gather(rank);
    }
    for (;;) {
        /* Read before anything else: every later change also changes this word, so that no rank sleeps on the old one. */
        uint64_t seen = atomic_load_explicit(&lease->phase, memory_order_acquire);
        struct phase_state state = phase_unpack(seen);
        if (state.kind == PHASE_END) return LEFT_DONE;
        if (atomic_load(&lease->aborted)) return LEFT_ABORTED;
        if (state.kind == PHASE_STOPPED) return LEFT_STOPPED;
        if (rank->number >= atomic_load_explicit(&lease->wanted, memory_order_acquire)) return LEFT_SHRUNK;

        if (state.number >= step_phase(lease, rank->query->program->layer_count)) return LEFT_INVALID;

        struct phase phase = phase_open(lease, rank->query, &state);
        switch (work(rank, &phase)) {
            case WORK_ADVANCED: break;
            case WORK_LEAVE: return atomic_load(&lease->aborted) ? LEFT_ABORTED : LEFT_STOPPED;
            case WORK_EXHAUSTED:
                /* The ranks that still hold tasks advance the phase to STOPPED: this one is not needed. */
                if (atomic_load(&lease->control) != CONTROL_RUN) return LEFT_STOPPED;
                if (await_advance(rank, &phase, seen)) break;
                lease_abort(lease);
                return LEFT_TIMEOUT;
        }
    }
}

enum left_reason gang_run(struct lease *lease, struct query *query, uint32_t number, uint32_t spin_us) {
    struct rank rank = {lease, query, number, spin_us};
    uint64_t unset = 0;
    bool calls = query->program->whole || query->program->calls;
    if (calls) atomic_store_explicit(&lease->cpus[number], (uint32_t)sched_getcpu(), memory_order_relaxed);
    atomic_fetch_or(&lease->present, UINT64_C(1) << number);
    if (query->program->whole && number) tell_gathered(lease);
    if (atomic_load(&lease->start_ns) == 0) atomic_compare_exchange_strong(&lease->start_ns, &unset, now_ns());
    enum left_reason reason = run(&rank);
    atomic_fetch_and(&lease->present, ~(UINT64_C(1) << number));
    /* Without a call the ranks that sleep have nothing to wait for. */
    if (query->program->whole && number == 0 && reason != LEFT_DONE) lease_kick(lease);
    return reason;
}
