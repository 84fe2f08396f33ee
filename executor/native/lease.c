#include "lease.h"

#include <string.h>

#include "wait.h"

static void forget_times(struct lease *lease, uint32_t first, uint32_t end) {
    for (uint32_t step = first; step < end; step++) {
        atomic_store_explicit(&lease->layer_end_ns[step], 0, memory_order_relaxed);
    }
}

/* Each entry is a number for itself, so nothing need be ordered (relaxed): a rank that comes to an entry finds the old one or the new. */
static void set_plan(struct lease *lease, uint32_t first, uint32_t end, struct plan plan) {
    for (uint32_t i = first; i < end; i++) {
        uint32_t at = i - first;
        atomic_store_explicit(&lease->versions[i], at < plan.version_count ? plan.versions[at] : 0, memory_order_relaxed);
        atomic_store_explicit(&lease->block_ranks[i], at < plan.block_count ? plan.block_ranks[at] : 0, memory_order_relaxed);
    }
}

void lease_use_version(struct lease *lease, uint32_t version, bool first) {
    uint32_t used = atomic_load_explicit(&lease->used_versions, memory_order_relaxed);
    uint32_t layers = atomic_load_explicit(&lease->version_layers, memory_order_relaxed);
    atomic_store_explicit(&lease->used_versions, used | 1u << version, memory_order_relaxed);
    atomic_store_explicit(&lease->version_layers, layers + (first && version), memory_order_relaxed);
}

static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

uint32_t lease_initialise(struct lease *lease, const struct lease_spec *spec) {
    struct phase_state state = phase_unpack(atomic_load(&lease->phase));
    uint32_t generation = atomic_load(&lease->generation) + 1;
    lease->model_id = spec->model_id;
    lease->member_count = spec->member_count;
    memcpy(lease->members, spec->members, spec->member_count * sizeof *spec->members);
    lease->end_layer = spec->end_layer;
    lease->timeout_us = spec->timeout_us;
    lease->pass_layers = spec->pass_layers;
    lease->passes = spec->passes;
    lease->arena_offset = spec->arena_offset;
    lease->arena_stride = spec->arena_stride;
    set_plan(lease, 0, larger(spec->end_layer, spec->pass_layers), spec->plan);
    forget_times(lease, spec->first_layer, spec->end_layer);
    /* A part with an OLDER tag than the phase's has not been touched, so none may be so old that it looks newer. */
    for (int rank = 0; rank < MAX_RANKS; rank++) {
        atomic_store_explicit(&lease->ranges[rank].word, range_pack(state.tag, 0, 0), memory_order_relaxed);
    }
    atomic_store(&lease->finished, 0);
    atomic_store(&lease->control, CONTROL_RUN);
    atomic_store(&lease->aborted, 0);
    atomic_store(&lease->wanted, spec->wanted);
    atomic_store(&lease->sleepers, 0);
    atomic_store(&lease->present, 0);
    atomic_store(&lease->start_ns, 0);
    atomic_store(&lease->most_ranks, 0);
    atomic_store(&lease->blocks, 0);
    atomic_store(&lease->used_versions, 0);
    atomic_store(&lease->version_layers, 0);
    struct phase_state first = {
        .tag = state.tag + 1,
        .number = step_phase(lease, spec->first_layer),
        .parts = spec->wanted,
        .version = lease->versions[phase_layer(lease, step_phase(lease, spec->first_layer))],
        .kind = spec->member_count > 1 ? PHASE_PACK : PHASE_OPEN,
    };
    lease_use_version(lease, first.version, true);
    atomic_store(&lease->phase, phase_pack(first));
    atomic_store(&lease->generation, generation);
    return generation;
}

/* Ranges and `finished` stay as they are: after STOP_NOW the phase goes on with what is left, after a boundary it is untouched. */
void lease_resume(struct lease *lease, uint32_t end_layer, uint32_t wanted, struct plan plan) {
    struct phase_state state = phase_unpack(atomic_load(&lease->phase));
    uint32_t step = phase_step(lease, state.number);
    set_plan(lease, step, end_layer, plan);
    forget_times(lease, step, end_layer);
    lease->end_layer = end_layer;
    atomic_store(&lease->control, CONTROL_RUN);
    atomic_store(&lease->wanted, wanted);
    if (state.kind == PHASE_STOPPED) {
        state.kind = PHASE_OPEN;
        state.parts = wanted;
        state.version = lease->versions[phase_layer(lease, state.number)];
        lease_use_version(lease, state.version, true);
        atomic_store(&lease->phase, phase_pack(state));
    }
}

/* Changes the futex word without changing its meaning, so that no rank sleeps on a value that it read before. An advance that
 * overwrites the kick changes the word as well. */
void lease_kick(struct lease *lease) {
    uint64_t word = atomic_load(&lease->phase);
    uint64_t kicked;
    do {
        kicked = (word & ~KICK_MASK) | ((word + 1) & KICK_MASK);
    } while (!atomic_compare_exchange_weak(&lease->phase, &word, kicked));
    if (atomic_load(&lease->sleepers)) futex_wake_all(&lease->phase);
}

void lease_set_control(struct lease *lease, enum control control) {
    atomic_store(&lease->control, control);
    lease_kick(lease);
}

void lease_plan(struct lease *lease, uint32_t step, struct plan plan) { set_plan(lease, step, lease->end_layer, plan); }

/* Sequentially consistent, so a rank that sees the new number also sees the plan that was written before it (`begin_block` in gang.c). */
bool lease_resize(struct lease *lease, uint32_t before, uint32_t wanted) {
    if (!atomic_compare_exchange_strong(&lease->wanted, &before, wanted)) return false;
    lease_kick(lease);
    return true;
}

void lease_abort(struct lease *lease) {
    atomic_store(&lease->aborted, 1);
    lease_kick(lease);
}
