#include "phase.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "slot.h"

enum { RANK_NS = 8000 }; /* least work of a rank in a layer: an advance of the phase and a cold cache cost a part of it */

#ifndef RANK_COPY_BYTES /* tests with small rows set less */
#define RANK_COPY_BYTES (128 << 10) /* the same of copying */
#define COPY_BYTES (1 << 20)        /* of one claim, about: 100 us */
#endif

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

/* The piece that has this row of the lease. */
static struct piece *piece_of(const struct query *query, uint32_t row) {
    uint32_t low = 0, high = query->piece_count;
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (query->pieces[middle].first <= row) low = middle;
        else high = middle;
    }
    return &query->pieces[low];
}

/* Where a row of the lease begins in a tensor of the request. */
static char *row_at(const struct piece *piece, char *base, const struct tensor *tensor, uint32_t row) {
    return base + (uint64_t)(row - piece->first) * tensor->row_bytes;
}

static char *arena_row(const struct query *query, uint32_t row) { return query->arena + row * query->arena_stride; }

/* The row of an input or output, and how many bytes further the next one of the same piece lies. */
static char *tensor_row(const struct query *query, const struct piece *piece, char *base, const struct tensor *tensor, uint32_t row,
                        uint64_t *stride) {
    if (query->piece_count > 1 && tensor->staged != NOT_STAGED) {
        *stride = query->arena_stride;
        return arena_row(query, row) + tensor->staged;
    }
    *stride = tensor->row_bytes;
    return row_at(piece, base, tensor, row);
}

/* Where an argument lies in a row, and how many bytes further in the row after it. */
static char *address(const struct query *query, const struct piece *piece, const struct argument *argument, uint32_t row,
                     uint64_t *stride) {
    const struct program *program = query->program;
    uint32_t index = argument->index;
    char *base = NULL;
    switch (argument->space) {
        case SPACE_WEIGHTS: base = program->weights, *stride = 0; break;
        case SPACE_ARENA: base = arena_row(query, row), *stride = query->arena_stride; break;
        case SPACE_INPUT: base = tensor_row(query, piece, piece->inputs[index], &program->inputs[index], row, stride); break;
        case SPACE_OUTPUT: base = tensor_row(query, piece, piece->outputs[index], &program->outputs[index], row, stride); break;
    }
    return base + argument->offset;
}

/* The first row of a group: groups differ by one row at most. */
static uint32_t first_row(const struct phase *phase, uint32_t group) {
    return phase->first_row + (phase->batch ? (uint32_t)((uint64_t)group * phase->rows / phase->groups) : group);
}

/* Fails the row's request with the text of the check, the number filled in. */
static void refuse(const struct piece *piece, const struct layer *layer, const int64_t *refused) {
    if (refused[0] < 1 || refused[0] > layer->check_count) return;
    char reason[REASON_BYTES];
    const char *text = layer->checks[refused[0] - 1], *place = strstr(text, "{}");
    int head = place ? (int)(place - text) : 0;
    int length = place ? snprintf(reason, sizeof reason, "%.*s%" PRId64 "%s", head, text, refused[1], place + 2)
                       : snprintf(reason, sizeof reason, "%s", text);
    if (length >= 0) slot_fail(piece->slot, STATUS_INVALID, reason, minimum((uint32_t)length, sizeof reason - 1));
}

/* One call: tasks [begin, end) of one group of rows, which is one row if the layer checks its numbers, or has no kernel. */
static void execute_group(struct query *query, const struct phase *phase, uint32_t group, uint32_t begin, uint32_t end) {
    const struct layer *layer = &query->program->layers[phase->layer];
    uint32_t count = layer->argument_count, row = first_row(phase, group);
    struct piece *piece = piece_of(query, row);
    void *arguments[MAX_OPERANDS + 1];
    uint64_t batch[MAX_OPERANDS + 1] = {first_row(phase, group + 1) - row};
    for (uint32_t i = 0; i < count; i++) arguments[i] = address(query, piece, &layer->arguments[i], row, &batch[i + 1]);
    if (layer->call) { /* what a row that has failed holds is of no use, and may be anything */
        bool failed = atomic_load(&piece->slot->failure) != STATUS_OK;
        if (!failed) layer->call(layer->context, piece, arguments, count, query->cpus, query->cpu_count);
        return;
    }
    int64_t refused[2] = {0};
    if (phase->batch) arguments[count++] = batch;
    else if (layer->check_count) arguments[count++] = refused;
    call(phase->run, count, arguments, (int32_t)begin, (int32_t)end);
    if (refused[0]) refuse(piece, layer, refused);
}

void phase_arguments(const struct query *query, const struct layer *layer, const struct piece *piece, uint32_t row, void **arguments) {
    uint64_t stride;
    for (uint32_t i = 0; i < layer->argument_count; i++) arguments[i] = address(query, piece, &layer->arguments[i], row, &stride);
}

static void copy_row(const struct query *query, enum phase_kind kind, uint32_t row) {
    const struct program *program = query->program;
    const struct piece *piece = piece_of(query, row);
    bool pack = kind == PHASE_PACK;
    const struct tensor *tensors = pack ? program->inputs : program->outputs;
    uint32_t count = pack ? program->input_count : program->output_count;
    for (uint32_t i = 0; i < count; i++) {
        if (tensors[i].staged == NOT_STAGED) continue;
        char *staged = arena_row(query, row) + tensors[i].staged;
        char *own = row_at(piece, pack ? piece->inputs[i] : piece->outputs[i], &tensors[i], row);
        memcpy(pack ? staged : own, pack ? own : staged, tensors[i].row_bytes);
    }
}

/* Sums of products are a hundred times slower where an operand is subnormal, as what activation functions leave of large negative numbers
 * is. Returns what `restore` takes. */
static uint32_t flush_subnormals(bool flush) {
#ifdef __SSE__
    enum { FLUSH_TO_ZERO = 0x8000, SUBNORMALS_ARE_ZERO = 0x40 };
    uint32_t mode = _mm_getcsr();
    if (flush) _mm_setcsr(mode | FLUSH_TO_ZERO | SUBNORMALS_ARE_ZERO);
    return mode;
#else
    (void)flush;
    return 0;
#endif
}

static void restore(uint32_t mode) {
#ifdef __SSE__
    if (_mm_getcsr() != mode) _mm_setcsr(mode);
#else
    (void)mode;
#endif
}

void phase_execute(struct query *query, const struct phase *phase, uint32_t begin, uint32_t end) {
    const struct program *program = query->program;
    if (phase->kind != PHASE_OPEN) {
        for (uint32_t row = begin; row < end; row++) copy_row(query, phase->kind, row);
    } else if (program->whole) { /* the only task of the only phase: its rank also advances the phase, and knows the result */
        program->whole(program->context, query);
    } else if (program->layers[phase->layer].tail) {
        program->layers[phase->layer].tail(program->layers[phase->layer].context, query);
    } else {
        uint32_t mode = flush_subnormals(program->layers[phase->layer].flushes_subnormals);
        while (begin < end) { /* task t belongs to group t / group_tasks */
            uint32_t group = begin / phase->group_tasks, first = group * phase->group_tasks;
            uint32_t stop = minimum(end, first + phase->group_tasks);
            execute_group(query, phase, group, begin - first, stop - first);
            begin = stop;
        }
        restore(mode);
    }
}

static uint64_t copied_bytes(const struct program *program, enum phase_kind kind) {
    return kind == PHASE_PACK ? program->pack_bytes : program->unpack_bytes;
}

bool query_copies(const struct query *query, enum phase_kind kind) {
    return query->piece_count > 1 && copied_bytes(query->program, kind) > 0;
}

/* One task for each row. */
static struct phase open_copies(const struct query *query, struct phase phase) {
    uint64_t row_bytes = copied_bytes(query->program, phase.kind);
    phase.tasks = query->rows;
    phase.chunk = row_bytes < COPY_BYTES ? (uint32_t)(COPY_BYTES / row_bytes) : 1;
    return phase;
}

static struct phase open_layer(const struct query *query, struct phase phase, uint32_t number) {
    const struct layer *layer = &query->program->layers[phase.layer];
    const struct version *version = &layer->versions[minimum(number, layer->version_count - 1)];
    phase.batch = is_batch(version, phase.rows);
    const struct implementation *chosen = phase.batch ? &version->batch : &version->one;
    phase.groups = query->program->whole || layer->tail ? 1 : row_groups(version, phase.rows);
    phase.group_tasks = chosen->tasks;
    phase.tasks = chosen->tasks * phase.groups;
    phase.chunk = chosen->chunk;
    phase.run = chosen->run;
    phase.call = layer->call || layer->tail;
    return phase;
}

/* The rows of a pass: passes differ by one row at most. */
static void choose_rows(const struct lease *lease, const struct query *query, struct phase *phase) {
    phase->rows = query->rows;
    if (phase->number >= lease->pass_layers * lease->passes) return;
    uint64_t pass = phase->number / lease->pass_layers;
    phase->first_row = (uint32_t)(pass * query->rows / lease->passes);
    phase->rows = (uint32_t)((pass + 1) * query->rows / lease->passes) - phase->first_row;
}

struct phase phase_open(const struct lease *lease, const struct query *query, const struct phase_state *state) {
    struct phase phase = {
        .kind = state->kind,
        .tag = state->tag,
        .number = state->number,
        .layer = phase_layer(lease, state->number),
        .parts = state->parts ? minimum(state->parts, MAX_RANKS) : 1,
    };
    bool copies = (phase.kind == PHASE_PACK || phase.kind == PHASE_UNPACK) && query_copies(query, phase.kind);
    if (copies) return open_copies(query, phase);
    phase.kind = PHASE_OPEN;
    choose_rows(lease, query, &phase);
    return open_layer(query, phase, state->version);
}

/* A batch pays for more ranks than a row, as long as each has RANK_NS to do. */
uint32_t phase_most_ranks(const struct query *query, const struct phase *phase) {
    uint64_t least = 1, worth;
    if (phase->kind == PHASE_OPEN) {
        const struct layer *layer = &query->program->layers[phase->layer];
        least = layer->max_ranks;
        worth = phase->rows > 1 ? (uint64_t)phase->rows * layer->row_ns / RANK_NS : 0;
    } else {
        worth = query->rows * copied_bytes(query->program, phase->kind) / RANK_COPY_BYTES;
    }
    if (worth <= least) return (uint32_t)least;
    return worth < phase->tasks ? (uint32_t)worth : phase->tasks;
}
