/* The Python type Program: a model's table. */
#include "python.h"

#include <dlfcn.h>

#include "gang.h"
#include "instance.h"
#include "phase.h"
#include "program.h"
#include "slot.h"

PyTypeObject *program_type;

#define MAX_ROW_BYTES (UINT64_C(1) << 48) /* sums of such numbers do not overflow */

/* One layer as executor/worker.py packs it. */
struct layer_record {
    uint32_t argument_count, version_count, max_ranks, row_ns, flushes_subnormals, unused;
    struct { uint32_t space, index; uint64_t offset; } arguments[MAX_OPERANDS];
    struct { struct kernel_record { uint32_t tasks, chunk, rows; } one, batch; } versions[MAX_VERSIONS];
};

/* How a whole program computes a request whose frames lie where those of one before did. `header` begins the frame of the request,
 * `answer` that of the answer. `call` NULL: there was such a request, and the next one may be prepared unless `unfit`. */
struct prepared_call {
    const char *input, *output; /* NULL: the place is free */
    uint64_t input_bytes, output_bytes;
    PyObject *header, *answer, *call;
    uint32_t misses; /* requests with other headers */
    bool unfit;
};

enum { PREPARED_CALLS = 16, MOST_MISSES = 4 };

struct program_object {
    PyObject_HEAD
    struct program program;
    PyObject *run;    /* of a whole program: the function in Python */
    PyObject *checks; /* keeps the layers' texts, */
    PyObject *calls;  /* and their functions in Python */
    struct prepared_call prepared[PREPARED_CALLS];
    uint32_t oldest; /* of them */
};

/* Reads inputs or outputs: a sequence of pairs (row_bytes, staged). Returns what a row's staged ones take; UINT64_MAX for an exception. */
static uint64_t read_tensors(const struct program *program, PyObject *sequence, struct tensor **tensors, uint32_t *count) {
    uint64_t copied = 0, room = program->arena_bytes + program->staging_bytes;
    Py_ssize_t length = PySequence_Size(sequence);
    if (length < 0) return UINT64_MAX;
    if (length > MAX_TENSORS) return PyErr_Format(PyExc_ValueError, "%zd tensors; at most %d", length, MAX_TENSORS), UINT64_MAX;
    *tensors = calloc((size_t)length + 1, sizeof **tensors);
    if (!*tensors) return PyErr_NoMemory(), UINT64_MAX;
    for (*count = 0; *count < length; ++*count) {
        PyObject *pair = PySequence_GetItem(sequence, *count);
        unsigned long long row_bytes, staged;
        bool read = pair && PyArg_ParseTuple(pair, "KK", &row_bytes, &staged);
        Py_XDECREF(pair);
        if (!read) return UINT64_MAX;
        (*tensors)[*count] = (struct tensor){row_bytes, staged};
        if (staged == NOT_STAGED) continue;
        if (staged < program->arena_bytes || row_bytes > room || staged > room - row_bytes) {
            return PyErr_Format(PyExc_ValueError, "a staged tensor outside of its row"), UINT64_MAX;
        }
        copied += row_bytes;
    }
    return copied;
}

static bool is_sound_kernel(const struct kernel_record *record) {
    return record->tasks >= 1 && record->tasks <= MAX_TASKS && record->chunk >= 1;
}

static bool is_sound(const struct program *program, const struct layer_record *record) {
    bool sound = record->argument_count >= 1 && record->argument_count <= MAX_OPERANDS && record->version_count >= 1 &&
                 record->version_count <= MAX_VERSIONS && record->max_ranks >= 1;
    uint64_t limits[SPACES] = {[SPACE_WEIGHTS] = program->weights_bytes, [SPACE_ARENA] = program->arena_bytes};
    for (uint32_t i = 0; sound && i < record->argument_count; i++) {
        uint32_t space = record->arguments[i].space, index = record->arguments[i].index;
        if (space >= SPACES) return false;
        if (space == SPACE_INPUT || space == SPACE_OUTPUT) {
            if (index >= (space == SPACE_INPUT ? program->input_count : program->output_count)) return false;
            limits[space] = space == SPACE_INPUT ? program->inputs[index].row_bytes : program->outputs[index].row_bytes;
        }
        sound = record->arguments[i].offset <= limits[space];
    }
    for (uint32_t i = 0; sound && i < record->version_count; i++) {
        const struct kernel_record *one = &record->versions[i].one, *batch = &record->versions[i].batch;
        sound = one->rows == 1 && is_sound_kernel(one) && (batch->rows == 0 || is_sound_kernel(batch));
    }
    return sound;
}

/* Finds the kernel whose name is at `place` of `symbols`. */
static bool find_kernel(const struct program *program, PyObject *symbols, Py_ssize_t place, kernel *found) {
    PyObject *symbol = PySequence_GetItem(symbols, place);
    const char *name = symbol ? PyUnicode_AsUTF8AndSize(symbol, NULL) : NULL;
    void *address = name ? dlsym(program->library, name) : NULL;
    if (name && !address) PyErr_Format(PyExc_ValueError, "kernel %s is not in the library", name);
    Py_XDECREF(symbol);
    *(void **)found = address;
    return address != NULL;
}

/* Fills one implementation; takes its symbol from `symbols` at `next`. */
static bool read_kernel(const struct program *program, const struct kernel_record *record, PyObject *symbols, Py_ssize_t *next,
                        struct implementation *implementation) {
    implementation->tasks = record->tasks;
    implementation->chunk = record->chunk;
    implementation->rows = record->rows;
    return find_kernel(program, symbols, (*next)++, &implementation->run);
}

/* Whether all that the layer's batch kernels read and write lies at one stride, also where a lease has several members. */
static bool is_staged(const struct program *program, const struct layer *layer) {
    bool batch = false, staged = true;
    for (uint32_t i = 0; i < layer->version_count; i++) batch = batch || layer->versions[i].batch.run;
    for (uint32_t i = 0; i < layer->argument_count; i++) {
        const struct argument *argument = &layer->arguments[i];
        if (argument->space == SPACE_INPUT) staged = staged && program->inputs[argument->index].staged != NOT_STAGED;
        if (argument->space == SPACE_OUTPUT) staged = staged && program->outputs[argument->index].staged != NOT_STAGED;
    }
    return staged || !batch;
}

static void call_layer(void *run, struct piece *piece, void *const *arguments, uint32_t count, const uint32_t *cpus, uint32_t cpu_count);
static void call_tail(void *run, struct query *query);

/* Makes a layer one that is a call of `run`. */
static bool read_call(const struct layer_record *record, PyObject *run, bool is_tail, struct layer *layer) {
    bool sound = PyCallable_Check(run) && record->version_count == 1 && record->versions[0].one.tasks == 1 &&
                 record->versions[0].batch.rows == 0;
    if (!sound) return PyErr_Format(PyExc_ValueError, "a layer that is a call has one version of one task"), false;
    layer->versions[0].one = (struct implementation){NULL, 1, 1, 1};
    if (is_tail) layer->tail = call_tail;
    else layer->call = call_layer;
    layer->context = run;
    return true;
}

/* Fills one layer; takes its symbols, one for each kernel, from `symbols` at `next`. `run`: None, or a function in place of kernels. */
static bool read_layer(const struct program *program, const struct layer_record *record, PyObject *symbols, Py_ssize_t *next, PyObject *run,
                       bool is_tail, struct layer *layer) {
    if (!is_sound(program, record) || (run == Py_None && record->argument_count > MAX_ARGUMENTS)) {
        PyErr_Format(PyExc_ValueError, "layer %zd of the table is malformed", layer - program->layers);
        return false;
    }
    layer->argument_count = record->argument_count;
    layer->version_count = record->version_count;
    layer->max_ranks = record->max_ranks;
    layer->row_ns = record->row_ns;
    layer->flushes_subnormals = record->flushes_subnormals;
    for (uint32_t i = 0; i < record->argument_count; i++) {
        layer->arguments[i] =
            (struct argument){record->arguments[i].space, record->arguments[i].index, record->arguments[i].offset};
    }
    if (run != Py_None) return read_call(record, run, is_tail, layer);
    if (is_tail) return PyErr_Format(PyExc_ValueError, "the tail is no call"), false;
    for (uint32_t i = 0; i < record->version_count; i++) {
        struct version *version = &layer->versions[i];
        if (!read_kernel(program, &record->versions[i].one, symbols, next, &version->one)) return false;
        if (record->versions[i].batch.rows == 0) continue;
        if (!read_kernel(program, &record->versions[i].batch, symbols, next, &version->batch)) return false;
    }
    return true;
}

/* Takes the texts of a layer's checks, a tuple of str, which the caller keeps. */
static bool read_checks(PyObject *texts, struct layer *layer) {
    Py_ssize_t count = PyTuple_Check(texts) ? PyTuple_Size(texts) : -1;
    bool sound = count >= 0 && count <= MAX_CHECKS;
    for (uint32_t i = 0; sound && count && i < layer->version_count; i++) sound = !layer->versions[i].batch.run;
    if (!sound) return PyErr_Format(PyExc_ValueError, "the checks of a layer are malformed"), false;
    for (layer->check_count = 0; layer->check_count < count; layer->check_count++) {
        const char *text = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(texts, layer->check_count), NULL);
        if (!text) return false;
        layer->checks[layer->check_count] = text;
    }
    return true;
}

static bool is_in(const struct program *program, const struct varying_place *place) {
    if (place->kind == VARYING_INPUT_BYTES) return place->index < program->input_count;
    if (place->kind == VARYING_OUTPUT_BYTES) return place->index < program->output_count;
    if (place->kind > VARYING_OUTPUT_BYTES || place->layer >= program->layer_count) return false;
    const struct layer *layer = &program->layers[place->layer];
    bool batch = place->kind == VARYING_BATCH_KERNEL || place->kind == VARYING_BATCH_TASKS;
    return !layer->call && !layer->tail && place->index < MAX_ARGUMENTS && (!batch || layer->versions[0].batch.run);
}

/* Whether what a layer says is sound after numbers were set. */
static bool is_sound_layer(const struct program *program, const struct layer *layer) {
    struct layer_record record = {.argument_count = layer->argument_count, .version_count = 1, .max_ranks = layer->max_ranks};
    const struct implementation *one = &layer->versions[0].one, *batch = &layer->versions[0].batch;
    for (uint32_t i = 0; i < layer->argument_count && i < MAX_OPERANDS; i++) {
        record.arguments[i].space = layer->arguments[i].space;
        record.arguments[i].index = layer->arguments[i].index;
        record.arguments[i].offset = layer->arguments[i].offset;
    }
    record.versions[0].one = (struct kernel_record){one->tasks, one->chunk, one->rows};
    if (batch->run) record.versions[0].batch = (struct kernel_record){batch->tasks, batch->chunk, batch->rows};
    return is_sound(program, &record) && (layer->call || layer->tail || layer->argument_count <= MAX_ARGUMENTS);
}

/* Whether every instance is sound, and no tensor larger than that of the first one, for which there is room; then the first one is chosen. */
static bool check_instances(struct program *program) {
    struct instances *instances = &program->instances;
    uint32_t count = program->input_count + program->output_count;
    uint64_t *most = calloc(count + 1, sizeof *most);
    if (!most) return PyErr_NoMemory(), false;
    for (uint32_t i = 0; i < count; i++) {
        most[i] = i < program->input_count ? program->inputs[i].row_bytes : program->outputs[i - program->input_count].row_bytes;
    }
    bool sound = true;
    instances->current = UINT32_MAX;
    for (uint32_t number = instances->count; sound && number-- > 0;) {
        for (uint32_t i = 0; sound && i < instances->place_count; i++) {
            const struct varying_place *place = &instances->places[i];
            uint64_t value = instances->numbers[(uint64_t)number * instances->place_count + i];
            bool is_kernel = place->kind == VARYING_KERNEL || place->kind == VARYING_BATCH_KERNEL;
            sound = value <= MAX_ROW_BYTES && (!is_kernel || value < instances->kernel_count) &&
                    (place->kind == VARYING_OFFSET || is_kernel || place->kind >= VARYING_INPUT_BYTES || value <= UINT32_MAX);
        }
        sound = sound && program_choose(program, number);
        for (uint32_t i = 0; sound && i < count; i++) {
            const struct tensor *tensor = i < program->input_count ? &program->inputs[i] : &program->outputs[i - program->input_count];
            sound = tensor->row_bytes <= most[i];
        }
        for (uint32_t i = 0; sound && i < program->layer_count; i++) sound = is_sound_layer(program, &program->layers[i]);
    }
    free(most);
    if (!sound) PyErr_Format(PyExc_ValueError, "an instance of the program is malformed");
    return sound;
}

/* Reads (places, numbers of all instances, names of kernels), as executor/worker.py packs them. */
static bool read_instances(struct program *program, PyObject *packed) {
    struct instances *instances = &program->instances;
    const char *places, *numbers;
    Py_ssize_t places_bytes, numbers_bytes;
    PyObject *names;
    if (!PyArg_ParseTuple(packed, "y#y#O", &places, &places_bytes, &numbers, &numbers_bytes, &names)) return false;
    size_t place_count = (size_t)places_bytes / sizeof *instances->places;
    Py_ssize_t kernel_count = PySequence_Size(names);
    if (kernel_count < 0) return false;
    size_t row = place_count * sizeof *instances->numbers;
    if (!place_count || (size_t)places_bytes % sizeof *instances->places || !numbers_bytes || (size_t)numbers_bytes % row) {
        return PyErr_Format(PyExc_ValueError, "instances of %zd and %zd bytes", places_bytes, numbers_bytes), false;
    }
    instances->places = malloc((size_t)places_bytes);
    instances->numbers = malloc((size_t)numbers_bytes);
    instances->kernels = calloc((size_t)kernel_count + 1, sizeof *instances->kernels);
    if (!instances->places || !instances->numbers || !instances->kernels) return PyErr_NoMemory(), false;
    memcpy(instances->places, places, (size_t)places_bytes);
    memcpy(instances->numbers, numbers, (size_t)numbers_bytes);
    instances->place_count = (uint32_t)place_count;
    for (uint32_t i = 0; i < instances->place_count; i++) {
        if (!is_in(program, &instances->places[i])) return PyErr_Format(PyExc_ValueError, "a number without a place"), false;
    }
    for (; instances->kernel_count < kernel_count; instances->kernel_count++) {
        kernel *found = &instances->kernels[instances->kernel_count];
        if (!find_kernel(program, names, instances->kernel_count, found)) return false;
    }
    instances->count = (uint32_t)((size_t)numbers_bytes / row);
    return check_instances(program);
}

static int program_init(PyObject *self, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"kernels", "weights", "table", "symbols", "arena_bytes", "staging_bytes", "inputs", "outputs", "checks", "calls", "tail", "instances", NULL};
    struct program *program = &((struct program_object *)self)->program;
    const char *kernels, *weights, *table;
    Py_ssize_t table_bytes, next = 0;
    PyObject *symbols, *inputs, *outputs, *checks, *calls, *instances = Py_None;
    unsigned long long arena_bytes, staging_bytes;
    int tail = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "ssy#OKKOOO!O!|pO", names, &kernels, &weights, &table, &table_bytes, &symbols,
                                     &arena_bytes, &staging_bytes, &inputs, &outputs, &PyTuple_Type, &checks, &PyTuple_Type,
                                     &calls, &tail, &instances)) {
        return -1;
    }
    if (arena_bytes > MAX_ROW_BYTES || staging_bytes > MAX_ROW_BYTES) return PyErr_SetString(PyExc_ValueError, "a row too large"), -1;
    program_close(program);
    Py_CLEAR(((struct program_object *)self)->run);
    set_reference(&((struct program_object *)self)->checks, checks);
    set_reference(&((struct program_object *)self)->calls, calls);
    program->arena_bytes = arena_bytes;
    program->staging_bytes = staging_bytes;
    program->pack_bytes = read_tensors(program, inputs, &program->inputs, &program->input_count);
    if (program->pack_bytes == UINT64_MAX) return -1;
    program->unpack_bytes = read_tensors(program, outputs, &program->outputs, &program->output_count);
    if (program->unpack_bytes == UINT64_MAX) return -1;
    const char *error;
    Py_BEGIN_ALLOW_THREADS /* it maps and reads: other threads go on meanwhile */
    error = program_open(program, kernels, weights);
    Py_END_ALLOW_THREADS
    if (error) {
        PyErr_Format(PyExc_OSError, "cannot load %s and %s: %s", kernels, weights, error);
        return -1;
    }
    size_t count = (size_t)table_bytes / sizeof(struct layer_record);
    bool whole = (size_t)table_bytes % sizeof(struct layer_record) == 0 && PyTuple_Size(checks) == (Py_ssize_t)count &&
                 PyTuple_Size(calls) == (Py_ssize_t)count;
    if (count == 0 || count > MAX_LAYERS || !whole) {
        PyErr_Format(PyExc_ValueError, "a table of %zd bytes", table_bytes);
        return -1;
    }
    program->layers = calloc(count, sizeof *program->layers);
    if (!program->layers) return PyErr_NoMemory(), -1;
    program->joins = true;
    for (; program->layer_count < count; program->layer_count++) {
        struct layer_record record;
        struct layer *layer = &program->layers[program->layer_count];
        memcpy(&record, table + program->layer_count * sizeof record, sizeof record);
        bool is_tail = tail && program->layer_count == count - 1;
        PyObject *run = PyTuple_GetItem(calls, program->layer_count);
        if (!read_layer(program, &record, symbols, &next, run, is_tail, layer)) return -1;
        if (!read_checks(PyTuple_GetItem(checks, program->layer_count), layer)) return -1;
        program->joins = program->joins && is_staged(program, layer);
        program->calls = program->calls || layer->call || layer->tail;
    }
    if (instances != Py_None && !(PyTuple_Check(instances) && read_instances(program, instances))) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "instances are a tuple");
        program->instances.count = 0;
        return -1;
    }
    return 0;
}

/* [(view of the request, view of the answer), ...] of all pieces. */
static PyObject *frames_of(const struct query *query) {
    PyObject *frames = PyList_New(query->piece_count);
    for (uint32_t i = 0; frames && i < query->piece_count; i++) {
        const struct piece *piece = &query->pieces[i];
        PyObject *input = PyMemoryView_FromMemory(piece->inputs[0], (Py_ssize_t)piece->input_frame_bytes, PyBUF_READ);
        PyObject *output =
            input ? PyMemoryView_FromMemory(piece->outputs[0], (Py_ssize_t)piece->output_frame_bytes, PyBUF_WRITE) : NULL;
        PyObject *pair = output ? PyTuple_Pack(2, input, output) : NULL;
        Py_XDECREF(input);
        Py_XDECREF(output);
        if (pair) PyList_SetItem(frames, i, pair);
        else Py_CLEAR(frames);
    }
    return frames;
}

/* `result`: why the request failed: (whether its contents are to blame, text). */
static void note_result(struct piece *piece, PyObject *result) {
    int invalid = 0;
    const char *reason = "";
    Py_ssize_t length = 0;
    if (!result || !PyTuple_Check(result) || !PyArg_ParseTuple(result, "ps#", &invalid, &reason, &length)) PyErr_Clear();
    slot_fail(piece->slot, invalid ? STATUS_INVALID : STATUS_INTERNAL, reason, (size_t)length);
}

static void forget_call(struct prepared_call *known) {
    Py_CLEAR(known->header);
    Py_CLEAR(known->answer);
    Py_CLEAR(known->call);
}

/* NULL: there was no request in the same memory lately, but from now on there was. */
static struct prepared_call *find_call(struct program_object *self, const struct piece *piece) {
    for (uint32_t i = 0; i < PREPARED_CALLS; i++) {
        struct prepared_call *known = &self->prepared[i];
        if (known->input == piece->inputs[0] && known->output == piece->outputs[0] && known->input_bytes == piece->input_frame_bytes &&
            known->output_bytes == piece->output_frame_bytes) {
            return known;
        }
    }
    struct prepared_call *free_place = &self->prepared[self->oldest];
    self->oldest = (self->oldest + 1) % PREPARED_CALLS;
    forget_call(free_place);
    *free_place = (struct prepared_call){.input = piece->inputs[0], .output = piece->outputs[0],
                                         .input_bytes = piece->input_frame_bytes, .output_bytes = piece->output_frame_bytes};
    return NULL;
}

static bool begins_with(const char *frame, uint64_t frame_bytes, PyObject *header) {
    size_t length = (size_t)PyBytes_Size(header);
    return length <= frame_bytes && memcmp(frame, PyBytes_AsString(header), length) == 0;
}

/* False: nothing is computed. A call that fails is not made again: what is wrong is found, and told, without it. */
static bool call_prepared(struct prepared_call *known, const struct piece *piece) {
    if (!known->call) return false;
    if (!begins_with(piece->inputs[0], piece->input_frame_bytes, known->header)) {
        forget_call(known);
        known->unfit = ++known->misses >= MOST_MISSES;
        return false;
    }
    PyObject *result = PyObject_CallNoArgs(known->call);
    if (!result) PyErr_Clear();
    known->unfit = !result;
    bool computed = result && result != Py_False && result != Py_NotImplemented, written = result == Py_True;
    if (computed && !written) memcpy(piece->outputs[0], PyBytes_AsString(known->answer), (size_t)PyBytes_Size(known->answer));
    if (!result || result == Py_NotImplemented) forget_call(known);
    Py_XDECREF(result);
    return computed;
}

/* `result` of a request that succeeded: (header, header of the answer, function), None if such cannot be prepared, or False if this one
 * cannot. */
static void prepare_call(struct prepared_call *known, PyObject *result) {
    PyObject *header, *answer, *call;
    if (result == Py_False) return;
    known->unfit = result == Py_None;
    if (known->unfit) return;
    if (!PyArg_ParseTuple(result, "SSO", &header, &answer, &call)) {
        PyErr_Clear();
        return;
    }
    if ((uint64_t)PyBytes_Size(answer) > known->output_bytes) return;
    forget_call(known);
    known->header = Py_NewRef(header);
    known->answer = Py_NewRef(answer);
    known->call = Py_NewRef(call);
}

/* The query_call of a program that is a function in Python. worker_loop runs without the interpreter's lock. */
static void call_python(void *context, struct query *query) {
    struct program_object *self = context;
    PyGILState_STATE state = PyGILState_Ensure();
    struct prepared_call *known = query->piece_count == 1 && query->cpu_count == 1 ? find_call(self, &query->pieces[0]) : NULL;
    instance_control = query->control;
    if (known && call_prepared(known, &query->pieces[0])) {
        instance_control = NULL;
        PyGILState_Release(state);
        return;
    }
    bool again = known && !known->unfit && !known->call;
    PyObject *frames = frames_of(query), *cpus = frames ? numbers(query->cpus, query->cpu_count) : NULL;
    PyObject *results = cpus ? PyObject_CallFunctionObjArgs(self->run, frames, cpus, again ? Py_True : Py_False, NULL) : NULL;
    if (!results) PyErr_WriteUnraisable(self->run);
    bool answered = results && PyList_Check(results) && PyList_Size(results) == (Py_ssize_t)query->piece_count;
    for (uint32_t i = 0; i < query->piece_count; i++) {
        PyObject *result = answered ? PyList_GetItem(results, i) : NULL;
        bool succeeded = result == Py_None || result == Py_False || (result && PyTuple_Check(result) && PyTuple_Size(result) == 3);
        if (!succeeded) note_result(&query->pieces[i], result);
        else if (again) prepare_call(known, result);
    }
    Py_XDECREF(frames);
    Py_XDECREF(cpus);
    Py_XDECREF(results);
    instance_control = NULL;
    PyGILState_Release(state);
}

static PyObject *addresses_of(void *const *arguments, uint32_t count) {
    PyObject *addresses = PyTuple_New(count);
    for (uint32_t i = 0; addresses && i < count; i++) {
        PyObject *address = PyLong_FromVoidPtr(arguments[i]);
        if (address) PyTuple_SetItem(addresses, i, address);
        else Py_CLEAR(addresses);
    }
    return addresses;
}

/* The layer_call of a layer that is a function in Python. */
static void call_layer(void *run, struct piece *piece, void *const *arguments, uint32_t count, const uint32_t *cpus, uint32_t cpu_count) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *addresses = addresses_of(arguments, count), *cores = addresses ? numbers(cpus, cpu_count) : NULL;
    PyObject *result = cores ? PyObject_CallFunctionObjArgs(run, addresses, cores, NULL) : NULL;
    if (!result) PyErr_WriteUnraisable(run);
    if (result != Py_None) note_result(piece, result);
    Py_XDECREF(addresses);
    Py_XDECREF(cores);
    Py_XDECREF(result);
    PyGILState_Release(state);
}

/* [addresses of the arguments in each row of a piece] */
static PyObject *rows_of(const struct query *query, const struct layer *layer, const struct piece *piece) {
    void *arguments[MAX_OPERANDS];
    PyObject *rows = PyList_New(piece->rows);
    for (uint32_t row = 0; rows && row < piece->rows; row++) {
        phase_arguments(query, layer, piece, piece->first + row, arguments);
        PyObject *addresses = addresses_of(arguments, layer->argument_count);
        if (addresses) PyList_SetItem(rows, row, addresses);
        else Py_CLEAR(rows);
    }
    return rows;
}

/* The query_call of a tail that is a function in Python, called for each piece that has not failed: what it holds is of no use then. */
static void call_tail(void *run, struct query *query) {
    const struct layer *layer = &query->program->layers[query->program->layer_count - 1];
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *cores = numbers(query->cpus, query->cpu_count);
    for (uint32_t i = 0; i < query->piece_count; i++) {
        struct piece *piece = &query->pieces[i];
        if (atomic_load(&piece->slot->failure) != STATUS_OK) continue;
        PyObject *rows = cores ? rows_of(query, layer, piece) : NULL;
        PyObject *frame = PyMemoryView_FromMemory(piece->outputs[0], (Py_ssize_t)piece->output_frame_bytes, PyBUF_WRITE);
        PyObject *result = rows && frame ? PyObject_CallFunctionObjArgs(run, rows, frame, cores, NULL) : NULL;
        if (!result) PyErr_WriteUnraisable(run);
        if (result != Py_None) note_result(piece, result);
        Py_XDECREF(rows);
        Py_XDECREF(frame);
        Py_XDECREF(result);
    }
    Py_XDECREF(cores);
    PyGILState_Release(state);
}

/* Program.whole(run): one layer that is a call of `run`, with views of two frames for each request, the gang's cores, and whether what it
 * says of the request prepares the next one. */
static PyObject *program_whole(PyObject *type, PyObject *run) {
    if (!PyCallable_Check(run)) return PyErr_Format(PyExc_TypeError, "not a function");
    PyObject *self = PyType_GenericAlloc((PyTypeObject *)type, 0);
    if (!self) return NULL;
    struct program *program = &((struct program_object *)self)->program;
    program->layers = calloc(1, sizeof *program->layers);
    if (!program->layers) {
        PyErr_NoMemory();
        Py_DECREF(self);
        return NULL;
    }
    program->layers[0] = (struct layer){.version_count = 1, .max_ranks = 1, .versions = {{.one = {NULL, 1, 1, 1}}}};
    program->layer_count = 1;
    program->joins = true;
    program->whole = call_python;
    program->context = self;
    ((struct program_object *)self)->run = Py_NewRef(run);
    return self;
}

static void program_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_BEGIN_ALLOW_THREADS
    program_close(&((struct program_object *)self)->program);
    Py_END_ALLOW_THREADS
    for (uint32_t i = 0; i < PREPARED_CALLS; i++) forget_call(&((struct program_object *)self)->prepared[i]);
    Py_CLEAR(((struct program_object *)self)->run);
    Py_CLEAR(((struct program_object *)self)->checks);
    Py_CLEAR(((struct program_object *)self)->calls);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef program_methods[] = {
    {"whole", program_whole, METH_O | METH_CLASS, NULL},
    {NULL, NULL, 0, NULL},
};

PyType_Spec program_type_spec = {
    .name = "gangway.executor._native.Program",
    .basicsize = sizeof(struct program_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = (PyType_Slot[]){{Py_tp_init, program_init}, {Py_tp_dealloc, program_free}, {Py_tp_methods, program_methods}, {0, NULL}},
};

struct program *program_of(PyObject *object) {
    return Py_IS_TYPE(object, program_type) ? &((struct program_object *)object)->program : NULL;
}
