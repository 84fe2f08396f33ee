#include "slot.h"

#include "ring.h"
#include "wait.h"

void slot_reset(struct slot *slot) {
    uint64_t word = atomic_load(&slot->word);
    atomic_store(&slot->word, slot_word(SLOT_FREE, STATUS_OK, slot_sequence(word)));
}

long slot_acquire(struct slot *slots, uint32_t count, uint32_t first) {
    for (uint32_t step = 0; step < count; step++) {
        uint32_t index = (first + step) % count;
        uint64_t word = atomic_load(&slots[index].word);
        if (slot_state(word) != SLOT_FREE) continue;
        uint64_t taken = slot_word(SLOT_FILLING, STATUS_OK, slot_sequence(word) + 1);
        if (atomic_compare_exchange_strong(&slots[index].word, &word, taken)) return index;
    }
    return -1;
}

bool slot_change(struct slot *slot, uint32_t sequence, uint32_t mask, uint32_t state, uint32_t status) {
    uint64_t word = atomic_load(&slot->word);
    do {
        if (slot_sequence(word) != sequence || !(mask >> slot_state(word) & 1)) return false;
    } while (!atomic_compare_exchange_weak(&slot->word, &word, slot_word(state, status, sequence)));
    return true;
}

/* A slot that serves the next request already may be taken for the other kind. Then nobody sleeps for this answer any more. */
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
