/* Models of the stress test: random layers, whose kernels check when they are called and for what. */
#include "stress.h"

static int numbers[LAYERS * 16]; /* the "weights": layer l's number at byte 64 l */
struct layer layers[LAYERS];
static struct tensor inputs[MANY], outputs[MANY]; /* only the last one of a model has bytes */
struct program program = {.layers = layers, .inputs = inputs, .outputs = outputs, .weights = (char *)numbers, .arena_bytes = ARENA_ROW, .input_count = 1, .output_count = 1,
                          .joins = true};
uint32_t fails;

/* The rows of the gang that go through the layer with this one. */
static struct span pass_of(const struct gang *gang, uint32_t layer, uint32_t row) {
    const struct lease *lease = gang->lease;
    uint32_t pass = 0;
    if (layer >= lease->pass_layers) return (struct span){0, gang->rows};
    while ((pass + 1) * gang->rows / lease->passes <= row) pass++;
    return (struct span){pass * gang->rows / lease->passes, (pass + 1) * gang->rows / lease->passes};
}

void check_row(const struct gang *gang, uint32_t layer, uint32_t row) {
    uint32_t tasks = gang->tasks[layer][row];
    CHECK(tasks > 0, "layer %u: row %u was not computed", layer, row);
    for (uint32_t task = 0; task < TASKS; task++) {
        int runs = gang->cells[layer][row][task].runs;
        CHECK(runs == (task < tasks), "layer %u row %u task %u ran %d times", layer, row, task, runs);
    }
}

/* What a layer of these rows comes after: the layer before, or the whole of the pass before. */
static void check_order(const struct gang *gang, uint32_t layer, uint32_t row) {
    struct span pass = pass_of(gang, layer, row);
    for (uint32_t before = pass.first; layer > 0 && before < pass.end; before++) check_row(gang, layer - 1, before);
    for (uint32_t before = 0; layer == 0 && before < pass.first; before++) check_row(gang, gang->lease->pass_layers - 1, before);
}

/* The row of the line is written in each row's input, its place in the gang in each row's arena. `strides` are of weights, arena, input
 * and output. An output row has a number for each task. */
static void run_tasks(uint32_t layer, uint32_t tasks, const char *row, const char *input, char *output, int64_t rows,
                      const int64_t *strides, int32_t begin, int32_t end) {
    struct gang *gang = &gangs[((const int *)row)[0]];
    for (int32_t task = begin; task < end; task++) {
        check_order(gang, layer, (uint32_t)((const int *)row)[1]);
        for (int64_t i = 0; i < rows; i++) {
            int number = ((const int *)(row + i * strides[1]))[1], in_line = *(const int *)(input + i * strides[2]);
            CHECK((uint32_t)in_line == gang->first + (uint32_t)number, "row %d of a gang from %u has row %d", number, gang->first, in_line);
            atomic_store_explicit(&gang->tasks[layer][number], tasks, memory_order_relaxed);
            gang->cells[layer][number][task].runs++;
            ((int *)(output + i * strides[3]))[layer * TASKS + task] = in_line + 1;
        }
        for (int spin = (task * 7 + (int)layer) % 5 * 40; spin > 0; spin--) spin_pause();
        if (task % 13 == 12) nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL); /* so that others fall asleep */
    }
}

/* A task pins its phase, which says the version. */
static const struct version *version_of(const struct gang *gang, int layer) {
    return &layers[layer].versions[phase_unpack(atomic_load_explicit(&gang->lease->phase, memory_order_relaxed)).version];
}

static void kernel_of_layer(int *number, char *row, char *input, char *output, int32_t begin, int32_t end) {
    const struct gang *gang = &gangs[((const int *)row)[0]];
    const struct version *version = version_of(gang, *number);
    struct span pass = pass_of(gang, (uint32_t)*number, (uint32_t)((const int *)row)[1]);
    CHECK(!is_batch(version, pass.end - pass.first), "a row alone");
    run_tasks((uint32_t)*number, version->one.tasks, row, input, output, 1, (int64_t[4]){0}, begin, end);
}

static void batch_kernel_of_layer(int *number, char *row, char *input, char *output, const int64_t *batch, int32_t begin, int32_t end) {
    const struct gang *gang = &gangs[((const int *)row)[0]];
    const struct implementation *kernel = &version_of(gang, *number)->batch;
    struct span pass = pass_of(gang, (uint32_t)*number, (uint32_t)((const int *)row)[1]);
    bool together = gang->member_count > 1;
    CHECK(pass.end - pass.first > 1 && batch[0] >= 1 && batch[0] <= kernel->rows, "%ld rows", (long)batch[0]);
    CHECK(batch[1] == 0 && batch[2] == STRIDE, "strides %ld %ld", (long)batch[1], (long)batch[2]);
    CHECK(batch[3] == (together ? STRIDE : INPUT_ROW), "stride of inputs %ld", (long)batch[3]);
    CHECK(batch[4] == (together ? STRIDE : OUTPUT_ROW), "stride of outputs %ld", (long)batch[4]);
    run_tasks((uint32_t)*number, kernel->tasks, row, input, output, batch[0], batch + 1, begin, end);
}

static void call_of_layer(void *context, struct piece *piece, void *const *arguments, uint32_t count, const uint32_t *cpus,
                          uint32_t cpu_count) {
    uint32_t number = (uint32_t)*(int *)arguments[0];
    CHECK(context == &layers[number] && count == 4 && piece->slot, "wrong call of layer %u", number);
    CHECK(cpu_count >= 1 && cpu_count <= layers[number].max_ranks && cpus[0] < 1 << 16, "a call on %u cores", cpu_count);
    run_tasks(number, 1, arguments[1], arguments[2], arguments[3], 1, (int64_t[4]){0}, 0, 1);
}

static void call_whole(void *context, struct query *query) {
    CHECK(context == numbers && query->rows == gangs[0].rows && query->piece_count == request_count, "wrong query");
    gangs[0].cells[0][0][0].runs++;
    nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    for (uint32_t i = 0; i < request_count; i++) if (fails >> i & 1) slot_fail(query->pieces[i].slot, STATUS_INTERNAL, "", 0);
}

static void make_layer(uint32_t number) {
    numbers[number * 16] = (int)number;
    layers[number] = (struct layer){
        .argument_count = 4,
        .version_count = VERSIONS,
        .max_ranks = 1 + random_below(WORKERS),
        .arguments = {{SPACE_WEIGHTS, 0, number * 64}, {SPACE_ARENA, 0, 0}, {SPACE_INPUT, program.input_count - 1, 0}, {SPACE_OUTPUT, program.output_count - 1, 0}},
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

static void make_call(struct layer *layer) {
    layer->version_count = 1;
    layer->versions[0].one = (struct implementation){NULL, 1, 1, 1};
    layer->call = call_of_layer;
    layer->context = layer;
    program.calls = true;
}

void make_program(void) {
    bool batch = false, plain = random_below(4) == 0; /* without batch kernels nothing has to be staged */
    program.layer_count = 1 + random_below(LAYERS);
    program.calls = false;
    program.input_count = random_below(2) ? 1 : MANY;
    program.output_count = random_below(2) ? 1 : MANY;
    for (uint32_t i = 0; i < program.layer_count; i++) {
        make_layer(i);
        if (random_below(4) == 0) {
            make_call(&layers[i]);
            continue;
        }
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
    for (uint32_t i = 0; i < MANY; i++) inputs[i] = outputs[i] = (struct tensor){0, NOT_STAGED};
    inputs[program.input_count - 1] = (struct tensor){INPUT_ROW, staged ? ARENA_ROW : NOT_STAGED};
    outputs[program.output_count - 1] = (struct tensor){OUTPUT_ROW, staged ? ARENA_ROW + INPUT_ROW : NOT_STAGED};
    program.pack_bytes = staged ? INPUT_ROW : 0;
    program.unpack_bytes = staged ? OUTPUT_ROW : 0;
    program.staging_bytes = program.pack_bytes + program.unpack_bytes;
}
