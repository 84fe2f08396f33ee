#include "worker.h"

#include "gang.h"
#include "ring.h"
#include "slot.h"
#include "wait.h"

enum { IDLE_US = 60 * 1000 * 1000, FULL_RING_NS = 1000 * 1000, ALIGNMENT = 64 };

/* A scheduler that has died leaves the completion ring unread; its successor will read it, so waiting is right. */
void worker_send(struct worker *worker, const struct message *message) {
    while (!ring_send(worker->completions, message)) {
        bell_ring(worker->scheduler_bell);
        nanosleep(&(struct timespec){.tv_nsec = FULL_RING_NS}, NULL);
    }
    bell_ring(worker->scheduler_bell);
}

static bool fits(const struct memory *memory, uint64_t offset, uint64_t size_bytes) {
    return offset % ALIGNMENT == 0 && size_bytes <= memory->size_bytes && offset <= memory->size_bytes - size_bytes;
}

/* NULL if a tensor is not where it may be. What a whole program gets is never in a region: frames are looked into before they are used. */
static char *tensor_at(struct worker *worker, const struct memory *io, uint64_t place, uint64_t size_bytes, bool frame) {
    if (place_region(place)) return frame ? NULL : region_at(&worker->regions, place, size_bytes);
    return fits(io, place, size_bytes) ? io->base + place : NULL;
}

static bool place_tensors(struct worker *worker, const struct memory *io, const uint64_t *places, const uint64_t *row_bytes,
                          uint32_t count, uint32_t rows, bool frame, char **bases) {
    for (uint32_t i = 0; i < count; i++) {
        uint64_t place = places[i], size_bytes;
        if (__builtin_mul_overflow(row_bytes[i], (uint64_t)rows, &size_bytes)) return false;
        if (!(bases[i] = tensor_at(worker, io, place, size_bytes, frame))) return false;
    }
    return true;
}

static bool tasks_fit(const struct program *program, uint32_t rows) {
    for (uint32_t i = 0; i < program->layer_count; i++) {
        const struct layer *layer = &program->layers[i];
        for (uint32_t v = 0; v < layer->version_count; v++) {
            const struct version *version = &layer->versions[v];
            uint32_t tasks = is_batch(version, rows) ? version->batch.tasks : version->one.tasks;
            if ((uint64_t)tasks * row_groups(version, rows) > MAX_TASKS) return false;
        }
    }
    return true;
}

/* Turns a lease's numbers into addresses; false if one of them leads outside. Shared memory is read once, then checked. */
static bool place(struct worker *worker, const struct lease *lease, struct query *query) {
    uint32_t model_id = lease->model_id, front_end = lease->front_end, number = lease->slot, rows = lease->rows;
    uint64_t offset = lease->arena_offset, stride = lease->arena_stride;
    if (model_id >= MAX_MODELS || !worker->programs[model_id] || front_end >= worker->io_count) return false;
    const struct program *program = worker->programs[model_id];
    const struct memory *io = &worker->io[front_end];
    if (number >= io->size_bytes / sizeof(struct slot) || rows == 0 || lease->end_layer > program->layer_count) return false;

    uint64_t arena_bytes;
    if (!tasks_fit(program, rows) || stride < program->arena_bytes || stride % ALIGNMENT) return false;
    if (__builtin_mul_overflow(stride, (uint64_t)rows, &arena_bytes) || !fits(&worker->arena, offset, arena_bytes)) return false;

    struct slot *table = (struct slot *)io->base, *slot = table + number;
    if ((atomic_load(&slot->word) & ~UINT64_C(0xff00)) != slot_word(SLOT_RUNNING, STATUS_OK, lease->sequence)) return false;
    *query = (struct query){
        .program = program,
        .table = table,
        .slot = slot,
        .arena = worker->arena.base + offset,
        .arena_stride = stride,
        .rows = rows,
    };
    if (program->whole) {
        query->input_frame_bytes = slot->input_frame_bytes;
        query->output_frame_bytes = slot->output_frame_bytes;
        return place_tensors(worker, io, slot->input_offset, &query->input_frame_bytes, 1, 1, true, query->inputs) &&
               place_tensors(worker, io, slot->output_offset, &query->output_frame_bytes, 1, 1, true, query->outputs);
    }
    return place_tensors(worker, io, slot->input_offset, program->input_row_bytes, program->input_count, rows, false, query->inputs) &&
           place_tensors(worker, io, slot->output_offset, program->output_row_bytes, program->output_count, rows, false, query->outputs);
}

static enum left_reason join(struct worker *worker, struct lease *lease, uint32_t rank, uint32_t term) {
    struct query query;
    if (atomic_load(&lease->term) != term) return LEFT_STALE;
    if (place(worker, lease, &query)) return gang_run(lease, &query, rank, worker->spin_us);
    /* Who comes too late finds the slot answered, maybe in use again: that is no error. */
    switch (phase_unpack(atomic_load(&lease->phase)).kind) {
        case PHASE_END: return LEFT_DONE;
        case PHASE_STOPPED: return LEFT_STOPPED;
        default: return LEFT_INVALID;
    }
}

static void run_command(struct worker *worker, const struct message *command) {
    struct message left = *command;
    left.kind = LEFT;
    left.gang.reason = LEFT_INVALID;
    if (command->gang.lease < worker->lease_count && command->gang.rank < MAX_RANKS) {
        left.gang.joined_ns = now_ns();
        atomic_store(&worker->status->lease, command->gang.lease + 1);
        left.gang.reason = join(worker, &worker->leases[command->gang.lease], command->gang.rank, command->gang.term);
        atomic_store(&worker->status->lease, 0);
        left.gang.left_ns = now_ns();
        atomic_fetch_add(&worker->status->busy_ns, left.gang.left_ns - left.gang.joined_ns);
        atomic_fetch_add(&worker->status->runs, 1);
    }
    worker_send(worker, &left);
}

void worker_nudge(struct worker *worker) {
    atomic_store(&worker->nudged, 1);
    bell_ring(worker->bell);
}

static bool was_nudged(struct worker *worker) { return atomic_load(&worker->nudged) && atomic_exchange(&worker->nudged, 0); }

/* `busy` is raised before a command leaves the ring, so that an empty ring and an idle worker together mean: nothing is under way. */
struct message worker_loop(struct worker *worker) {
    struct message command;
    for (;;) {
        uint32_t seen = bell_seen(worker->bell);
        atomic_store(&worker->status->busy, 1);
        for (;;) {
            if (was_nudged(worker)) return (struct message){0};
            if (!ring_receive(worker->commands, &command)) break;
            if (command.kind != RUN) return command;
            run_command(worker, &command);
        }
        if (!worker->background) atomic_store(&worker->status->busy, 0);
        bell_wait(worker->bell, seen, worker->spin_us, IDLE_US);
    }
}
