#include "slot.h"

#include <string.h>

#include "ring.h"
#include "wait.h"

void slot_reset(struct slot *slot) {
    uint64_t word = atomic_load(&slot->word);
    atomic_store(&slot->word, slot_word(SLOT_FREE, STATUS_OK, slot_generation(word)));
}

long slot_acquire(struct slot *slots, uint32_t count, uint32_t first) {
    for (uint32_t step = 0; step < count; step++) {
        uint32_t index = (first + step) % count;
        uint64_t word = atomic_load(&slots[index].word);
        if (slot_state(word) != SLOT_FREE) continue;
        uint64_t taken = slot_word(SLOT_FILLING, STATUS_OK, slot_generation(word) + 1);
        if (atomic_compare_exchange_strong(&slots[index].word, &word, taken)) return index;
    }
    return -1;
}

bool slot_change(struct slot *slot, uint32_t generation, uint32_t mask, uint32_t state, uint32_t status) {
    uint64_t word = atomic_load(&slot->word);
    do {
        if (slot_generation(word) != generation || !(mask >> slot_state(word) & 1)) return false;
    } while (!atomic_compare_exchange_weak(&slot->word, &word, slot_word(state, status, generation)));
    return true;
}

uint32_t slot_submit(struct slot *slot) {
    uint32_t generation = slot_generation(atomic_load(&slot->word));
    slot_change(slot, generation, 1u << SLOT_FILLING, SLOT_SUBMITTED, STATUS_OK);
    return generation;
}

bool slot_release(struct slot *slot) {
    uint32_t generation = slot_generation(atomic_load(&slot->word));
    return slot_change(slot, generation, 1u << SLOT_DONE | 1u << SLOT_FILLING, SLOT_FREE, STATUS_OK);
}

bool slot_see(struct slot *slot, uint32_t generation) {
    uint64_t word = atomic_load(&slot->word);
    if (slot_state(word) != SLOT_SUBMITTED || slot_generation(word) != generation) return false;
    if (!slot->seen_ns) slot->seen_ns = now_ns();
    return true;
}

bool slot_start(struct slot *slot, uint32_t generation, uint32_t parts, uint32_t batch_rows, bool leads) {
    if (!slot_change(slot, generation, 1u << SLOT_SUBMITTED, SLOT_RUNNING, STATUS_OK)) return false;
    atomic_fetch_add(&slot->attempts, 1);
    slot->started_ns = now_ns();
    slot->parts = parts;
    slot->batch_rows = batch_rows ? batch_rows : slot->rows;
    atomic_store_explicit(&slot->leads, leads, memory_order_relaxed);
    atomic_store_explicit(&slot->failure, STATUS_OK, memory_order_relaxed);
    if (parts > 1) {
        atomic_store(&slot->parts_done, 0);
        atomic_store(&slot->compute_start_ns, 0);
        atomic_store(&slot->compute_end_ns, 0);
        atomic_store(&slot->ranks, 0);
    }
    return true;
}

/* The slot may be answered, or even start its next request, between check and store: then a batch is counted once more or less. */
bool slot_lead(struct slot *slot, uint32_t generation, bool leads) {
    uint64_t word = atomic_load(&slot->word);
    if (slot_generation(word) != generation || slot_state(word) != SLOT_RUNNING) return false;
    atomic_store_explicit(&slot->leads, leads, memory_order_relaxed);
    return true;
}

void slot_fail(struct slot *slot, uint32_t status, const char *reason, size_t length) {
    uint32_t none = STATUS_OK;
    if (!atomic_compare_exchange_strong(&slot->failure, &none, status)) return;
    if (length >= REASON_BYTES) length = REASON_BYTES - 1;
    memcpy(slot->reason, reason, length);
    slot->reason[length] = 0;
}

/* 0: no time is known. */
static void keep_earliest(_Atomic uint64_t *earliest, uint64_t time_ns) {
    uint64_t known = atomic_load(earliest);
    while ((known == 0 || time_ns < known) && !atomic_compare_exchange_weak(earliest, &known, time_ns)) {}
}

static void keep_latest(_Atomic uint64_t *latest, uint64_t time_ns) {
    uint64_t known = atomic_load(latest);
    while (time_ns > known && !atomic_compare_exchange_weak(latest, &known, time_ns)) {}
}

static void keep_largest(_Atomic uint32_t *largest, uint32_t ranks) {
    uint32_t known = atomic_load(largest);
    while (ranks > known && !atomic_compare_exchange_weak(largest, &known, ranks)) {}
}

static uint64_t all_of(uint32_t parts) { return UINT64_MAX >> (64 - parts); }

/* The blocks that a lease began by plan, and its versions. */
static void count_blocks(struct slot *slot, const struct part_result *result) {
    atomic_fetch_add_explicit(&slot->blocks, result->blocks, memory_order_relaxed);
    atomic_fetch_or_explicit(&slot->versions, result->versions, memory_order_relaxed);
}

/* Counts a part; returns whether it was the last one. */
static bool count_part(struct slot *slot, uint32_t parts, uint32_t part, const struct part_result *result) {
    uint64_t bit = UINT64_C(1) << part;
    keep_earliest(&slot->compute_start_ns, result->start_ns);
    keep_latest(&slot->compute_end_ns, result->end_ns);
    keep_largest(&slot->ranks, result->ranks);
    count_blocks(slot, result);
    return (atomic_fetch_or(&slot->parts_done, bit) | bit) == all_of(parts);
}

/* After this the slot belongs to the front end. A request of one part needs no counting. */
void slot_part_computed(struct slot *table, struct slot *slot, uint32_t generation, uint32_t parts, uint32_t part,
                        const struct part_result *result) {
    if (parts == 1) {
        atomic_store_explicit(&slot->compute_start_ns, result->start_ns, memory_order_relaxed);
        atomic_store_explicit(&slot->compute_end_ns, result->end_ns, memory_order_relaxed);
        atomic_store_explicit(&slot->ranks, result->ranks, memory_order_relaxed);
        count_blocks(slot, result);
    } else if (!count_part(slot, parts, part, result)) {
        return;
    }
    slot_change(slot, generation, 1u << SLOT_RUNNING, SLOT_DONE, atomic_load(&slot->failure));
    slot_wake(table, slot);
}

bool slot_part_is_done(struct slot *table, struct slot *slot, uint32_t generation, uint32_t part) {
    uint64_t word = atomic_load(&slot->word);
    uint32_t state = slot_state(word), parts = slot->parts;
    if (slot_generation(word) == generation && (state == SLOT_SUBMITTED || state == SLOT_RUNNING)) {
        uint64_t done = parts > 1 ? atomic_load(&slot->parts_done) : 0;
        if (state == SLOT_SUBMITTED || !(done >> part & 1)) return false;
        if (done != all_of(parts)) return true;
        slot_change(slot, generation, 1u << SLOT_RUNNING, SLOT_DONE, atomic_load(&slot->failure));
    }
    slot_wake(table, slot); /* the rank that answered may have died before it woke the front end */
    return true;
}

/* A slot that already serves its next request may have another `by_bell`. Then no thread sleeps for this answer. */
void slot_wake(struct slot *table, struct slot *slot) {
    if (atomic_load(&slot->by_bell)) {
        bell_ring(&table->bell);
    } else {
        futex_wake_all(&slot->word);
    }
}

bool slot_wait(struct slot *slot, uint32_t spin_us, uint64_t timeout_us) {
    uint64_t start_ns = now_ns(), waited_ns = 0;
    for (;;) {
        uint64_t word = atomic_load(&slot->word);
        if (slot_state(word) == SLOT_DONE) return true;
        if (waited_ns >= timeout_us * 1000) return false;
        if (waited_ns < spin_us * UINT64_C(1000)) {
            spin_pause();
        } else {
            futex_wait(&slot->word, (uint32_t)word, timeout_us * 1000 - waited_ns);
        }
        waited_ns = now_ns() - start_ns;
    }
}

static bool any_done(struct slot *const *slots, uint32_t count, uint64_t *words) {
    bool done = false;
    for (uint32_t i = 0; i < count; i++) {
        words[i] = atomic_load(&slots[i]->word);
        done = done || slot_state(words[i]) == SLOT_DONE;
    }
    return done;
}

bool slot_wait_any(struct slot *const *slots, uint32_t count, uint32_t spin_us, uint64_t timeout_us) {
    uint64_t start_ns = now_ns(), waited_ns = 0, words[MAX_AWAITED];
    struct awaited awaited[MAX_AWAITED];
    while (!any_done(slots, count, words)) {
        if (waited_ns >= timeout_us * 1000) return false;
        if (waited_ns < spin_us * UINT64_C(1000)) {
            spin_pause();
        } else {
            for (uint32_t i = 0; i < count; i++) awaited[i] = awaited_word(&slots[i]->word, (uint32_t)words[i]);
            futex_wait_any(awaited, count, timeout_us * 1000 - waited_ns);
        }
        waited_ns = now_ns() - start_ns;
    }
    return true;
}
