#include "place.h"

enum { ALIGNMENT = 64 };

static bool fits(const struct memory *memory, uint64_t offset, uint64_t size_bytes, uint64_t alignment) {
    return offset % alignment == 0 && size_bytes <= memory->size_bytes && offset <= memory->size_bytes - size_bytes;
}

/* NULL if a tensor lies outside of its memory, or a frame in a region: frames are parsed before they are used. */
static char *tensor_at(struct worker *worker, const struct memory *io, uint64_t place, uint64_t size_bytes, bool frame) {
    if (place_region(place)) return frame ? NULL : region_at(&worker->regions, place, size_bytes);
    return fits(io, place, size_bytes, ALIGNMENT) ? io->base + place : NULL;
}

/* The places of a member's tensors: in its slot, or in the list that the slot names. NULL if that lies outside of memory. */
static const _Atomic uint64_t *places_at(const struct memory *io, const _Atomic uint64_t *in_slot, uint32_t count) {
    if (count <= INLINE_PLACES) return in_slot;
    uint64_t begin = atomic_load_explicit(in_slot, memory_order_relaxed);
    return fits(io, begin, count * sizeof *in_slot, sizeof *in_slot) ? (const _Atomic uint64_t *)(io->base + begin) : NULL;
}

/* The address of a member's first row in each tensor. All rows up to its last one must lie in memory. */
static bool place_tensors(struct worker *worker, const struct memory *io, const _Atomic uint64_t *in_slot, const struct tensor *tensors,
                          uint32_t count, const struct member *member, char **rows) {
    const _Atomic uint64_t *places = places_at(io, in_slot, count);
    uint64_t end = (uint64_t)member->first_row + member->rows;
    if (!places) return false;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t size_bytes, row_bytes = tensors[i].row_bytes;
        if (__builtin_mul_overflow(row_bytes, end, &size_bytes)) return false;
        char *base = tensor_at(worker, io, places[i], size_bytes, false);
        if (!base) return false;
        rows[i] = base + member->first_row * row_bytes;
    }
    return true;
}

static bool place_input_frame(struct worker *worker, const struct memory *io, struct piece *piece) {
    piece->input_frame_bytes = piece->slot->input_frame_bytes;
    piece->inputs[0] = tensor_at(worker, io, piece->slot->input_offset[0], piece->input_frame_bytes, true);
    return piece->inputs[0];
}

static bool place_output_frame(struct worker *worker, const struct memory *io, struct piece *piece) {
    piece->output_frame_bytes = piece->slot->output_frame_bytes;
    piece->outputs[0] = tensor_at(worker, io, piece->slot->output_offset[0], piece->output_frame_bytes, true);
    return piece->outputs[0];
}

/* Shared memory is read once, then checked. What makes a frame has the whole of each request. */
static bool place_member(struct worker *worker, const struct program *program, struct member member, struct piece *piece) {
    if (member.front_end >= worker->io_count) return false;
    const struct memory *io = &worker->io[member.front_end];
    if (member.slot >= io->size_bytes / sizeof(struct slot)) return false;
    struct slot *table = (struct slot *)io->base, *slot = table + member.slot;
    if ((atomic_load(&slot->word) & ~UINT64_C(0xff00)) != slot_word(SLOT_RUNNING, STATUS_OK, member.generation)) return false;
    uint32_t rows = slot->rows, parts = slot->parts;
    if (member.rows == 0 || member.rows > rows || member.first_row > rows - member.rows) return false;
    if (parts > MAX_PARTS || member.part >= parts) return false;
    piece->table = table;
    piece->slot = slot;
    piece->generation = member.generation;
    piece->part = member.part;
    piece->parts = parts;
    piece->rows = member.rows;
    bool framed = program->whole || has_tail(program);
    if (framed && (parts != 1 || !place_output_frame(worker, io, piece))) return false;
    if (program->whole) return place_input_frame(worker, io, piece);
    return place_tensors(worker, io, slot->input_offset, program->inputs, program->input_count, &member, piece->inputs) &&
           place_tensors(worker, io, slot->output_offset, program->outputs, program->output_count, &member, piece->outputs);
}

/* Whether each pass has a row, and none the tail, and phases can be numbered. */
static bool passes_fit(const struct lease *lease, const struct query *query) {
    uint32_t layers = query->program->layer_count, passes = lease->passes, head = lease->pass_layers;
    if (head > layers - has_tail(query->program) || passes == 0 || passes > query->rows || passes > MAX_PHASES) return false;
    return passes == 1 || (head > 0 && (uint64_t)head * passes + (layers - head) <= MAX_PHASES);
}

static bool tasks_fit(const struct program *program, uint32_t rows) {
    if (rows > MAX_TASKS) return false;
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

/* `arena_stride` bytes for each row, staged tensors included if there are several members. */
static bool place_arena(struct worker *worker, const struct lease *lease, struct query *query) {
    const struct program *program = query->program;
    uint64_t offset = lease->arena_offset, stride = lease->arena_stride, size_bytes;
    uint64_t needed = program->arena_bytes + (query->piece_count > 1 ? program->staging_bytes : 0);
    if (stride < needed || stride % ALIGNMENT) return false;
    if (__builtin_mul_overflow(stride, (uint64_t)query->rows, &size_bytes) || !fits(&worker->arena, offset, size_bytes, ALIGNMENT)) return false;
    query->arena = worker->arena.base + offset;
    query->arena_stride = stride;
    return true;
}

/* Lets a program of several sizes be that of the lease's requests, which all have the same; `tasks_fit` and the sizes of tensors follow. */
static bool choose_instance(struct worker *worker, struct program *program, const struct lease *lease) {
    for (uint32_t i = 0; program->instances.count && i < lease->member_count; i++) {
        const struct member *member = &lease->members[i];
        if (member->front_end >= worker->io_count) return false;
        const struct memory *io = &worker->io[member->front_end];
        if (member->slot >= io->size_bytes / sizeof(struct slot)) return false;
        const struct slot *slot = (struct slot *)io->base + member->slot;
        uint64_t number = atomic_load_explicit(&slot->join_key, memory_order_relaxed) >> INSTANCE_SHIFT & INSTANCE_MASK;
        if (i ? number != program->instances.current : !program_choose(program, number)) return false;
    }
    return true;
}

bool place_lease(struct worker *worker, const struct lease *lease, struct query *query) {
    uint32_t model_id = lease->model_id, count = lease->member_count;
    if (model_id >= MAX_MODELS || !worker->programs[model_id] || count == 0 || count > MAX_MEMBERS) return false;
    struct program *program = worker->programs[model_id];
    if (!choose_instance(worker, program, lease)) return false;
    if (lease->end_layer > program->layer_count || (count > 1 && !program->joins)) return false;
    uint32_t inputs = program->input_count ? program->input_count : 1, outputs = program->output_count ? program->output_count : 1; /* or frames */
    *query = (struct query){.program = program, .pieces = worker->pieces, .piece_count = count, .control = &lease->control};
    for (uint32_t i = 0; i < count; i++) {
        struct piece *piece = &worker->pieces[i];
        piece->first = query->rows;
        piece->inputs = worker->addresses + i * (inputs + outputs);
        piece->outputs = piece->inputs + inputs;
        if (!place_member(worker, program, lease->members[i], piece)) return false;
        if (__builtin_add_overflow(query->rows, piece->rows, &query->rows)) return false;
    }
    return passes_fit(lease, query) && tasks_fit(program, query->rows) && place_arena(worker, lease, query);
}
