/* The Python types Program (a model's table) and Worker (a process's rings and memory). */
#include "python.h"

#include <dlfcn.h>

#include "gang.h"
#include "ring.h"
#include "worker.h"

PyTypeObject *program_type;

/* One layer as executor/program.py packs it. */
struct layer_record {
    uint32_t argument_count, version_count, max_ranks, row_ns;
    struct { uint32_t space, index; uint64_t offset; } arguments[MAX_ARGUMENTS];
    struct { struct kernel_record { uint32_t tasks, chunk, rows; } one, batch; } versions[MAX_VERSIONS];
};

struct program_object {
    PyObject_HEAD
    struct program program;
    PyObject *run; /* of a whole program: the function in Python */
};

static bool read_sizes(PyObject *sequence, uint64_t *sizes, uint32_t *count) {
    Py_ssize_t length = PySequence_Size(sequence);
    if (length < 0) return false;
    if (length > MAX_TENSORS) {
        PyErr_Format(PyExc_ValueError, "%zd tensors; at most %d", length, MAX_TENSORS);
        return false;
    }
    for (*count = 0; *count < length; ++*count) {
        PyObject *item = PySequence_GetItem(sequence, *count);
        sizes[*count] = item ? PyLong_AsUnsignedLongLong(item) : 0;
        Py_XDECREF(item);
        if (PyErr_Occurred()) return false;
    }
    return true;
}

static bool is_sound_kernel(const struct kernel_record *record) {
    return record->tasks >= 1 && record->tasks <= MAX_TASKS && record->chunk >= 1;
}

static bool is_sound(const struct program *program, const struct layer_record *record) {
    bool sound = record->argument_count >= 1 && record->argument_count <= MAX_ARGUMENTS && record->version_count >= 1 &&
                 record->version_count <= MAX_VERSIONS && record->max_ranks >= 1;
    uint64_t limits[SPACES] = {[SPACE_WEIGHTS] = program->weights_bytes, [SPACE_ARENA] = program->arena_bytes};
    for (uint32_t i = 0; sound && i < record->argument_count; i++) {
        uint32_t space = record->arguments[i].space, index = record->arguments[i].index;
        if (space >= SPACES) return false;
        if (space == SPACE_INPUT || space == SPACE_OUTPUT) {
            if (index >= (space == SPACE_INPUT ? program->input_count : program->output_count)) return false;
            limits[space] = space == SPACE_INPUT ? program->input_row_bytes[index] : program->output_row_bytes[index];
        }
        sound = record->arguments[i].offset <= limits[space];
    }
    for (uint32_t i = 0; sound && i < record->version_count; i++) {
        const struct kernel_record *one = &record->versions[i].one, *batch = &record->versions[i].batch;
        sound = one->rows == 1 && is_sound_kernel(one) && (batch->rows == 0 || is_sound_kernel(batch));
    }
    return sound;
}

/* Fills one implementation; takes its symbol from `symbols` at `next`. */
static bool read_kernel(const struct program *program, const struct kernel_record *record, PyObject *symbols, Py_ssize_t *next,
                        struct implementation *implementation) {
    PyObject *symbol = PySequence_GetItem(symbols, (*next)++);
    const char *name = symbol ? PyUnicode_AsUTF8(symbol) : NULL;
    void *address = name ? dlsym(program->library, name) : NULL;
    if (name && !address) PyErr_Format(PyExc_ValueError, "kernel %s is not in the library", name);
    Py_XDECREF(symbol);
    *(void **)&implementation->run = address;
    implementation->tasks = record->tasks;
    implementation->chunk = record->chunk;
    implementation->rows = record->rows;
    return address != NULL;
}

/* Fills one layer; takes its symbols, one for each kernel, from `symbols` at `next`. */
static bool read_layer(const struct program *program, const struct layer_record *record, PyObject *symbols, Py_ssize_t *next,
                       struct layer *layer) {
    if (!is_sound(program, record)) {
        PyErr_Format(PyExc_ValueError, "layer %zd of the table is malformed", layer - program->layers);
        return false;
    }
    layer->argument_count = record->argument_count;
    layer->version_count = record->version_count;
    layer->max_ranks = record->max_ranks;
    layer->row_ns = record->row_ns;
    for (uint32_t i = 0; i < record->argument_count; i++) {
        layer->arguments[i] =
            (struct argument){record->arguments[i].space, record->arguments[i].index, record->arguments[i].offset};
    }
    for (uint32_t i = 0; i < record->version_count; i++) {
        struct version *version = &layer->versions[i];
        if (!read_kernel(program, &record->versions[i].one, symbols, next, &version->one)) return false;
        if (record->versions[i].batch.rows == 0) continue;
        if (!read_kernel(program, &record->versions[i].batch, symbols, next, &version->batch)) return false;
    }
    return true;
}

static int program_init(PyObject *self, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"kernels", "weights", "table", "symbols", "arena_bytes", "input_row_bytes", "output_row_bytes", NULL};
    struct program *program = &((struct program_object *)self)->program;
    const char *kernels, *weights, *table;
    Py_ssize_t table_bytes, next = 0;
    PyObject *symbols, *inputs, *outputs;
    unsigned long long arena_bytes;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "ssy#OKOO", names, &kernels, &weights, &table, &table_bytes, &symbols,
                                     &arena_bytes, &inputs, &outputs)) {
        return -1;
    }
    program_close(program);
    Py_CLEAR(((struct program_object *)self)->run);
    program->arena_bytes = arena_bytes;
    if (!read_sizes(inputs, program->input_row_bytes, &program->input_count)) return -1;
    if (!read_sizes(outputs, program->output_row_bytes, &program->output_count)) return -1;
    const char *error;
    Py_BEGIN_ALLOW_THREADS /* it maps and reads: other threads go on meanwhile */
    error = program_open(program, kernels, weights);
    Py_END_ALLOW_THREADS
    if (error) {
        PyErr_Format(PyExc_OSError, "cannot load %s and %s: %s", kernels, weights, error);
        return -1;
    }
    size_t count = (size_t)table_bytes / sizeof(struct layer_record);
    if (count == 0 || count > MAX_LAYERS || (size_t)table_bytes % sizeof(struct layer_record)) {
        PyErr_Format(PyExc_ValueError, "a table of %zd bytes", table_bytes);
        return -1;
    }
    program->layers = calloc(count, sizeof *program->layers);
    if (!program->layers) return PyErr_NoMemory(), -1;
    for (; program->layer_count < count; program->layer_count++) {
        struct layer_record record;
        memcpy(&record, table + program->layer_count * sizeof record, sizeof record);
        if (!read_layer(program, &record, symbols, &next, &program->layers[program->layer_count])) return -1;
    }
    return 0;
}

/* The whole_call of a program that is a function in Python. worker_loop runs without the interpreter's lock. */
static bool call_python(void *run, const struct query *query) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *input = PyMemoryView_FromMemory(query->inputs[0], (Py_ssize_t)query->input_frame_bytes, PyBUF_READ);
    PyObject *output = input ? PyMemoryView_FromMemory(query->outputs[0], (Py_ssize_t)query->output_frame_bytes, PyBUF_WRITE) : NULL;
    PyObject *result = output ? PyObject_CallFunctionObjArgs(run, input, output, NULL) : NULL;
    bool done = result == Py_True;
    if (!result) PyErr_WriteUnraisable(run);
    Py_XDECREF(input);
    Py_XDECREF(output);
    Py_XDECREF(result);
    PyGILState_Release(state);
    return done;
}

/* Program.whole(run): one layer that is a call of `run`, with views of two frames. */
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
    program->whole = call_python;
    program->context = ((struct program_object *)self)->run = Py_NewRef(run);
    return self;
}

static void program_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_BEGIN_ALLOW_THREADS
    program_close(&((struct program_object *)self)->program);
    Py_END_ALLOW_THREADS
    Py_CLEAR(((struct program_object *)self)->run);
    type->tp_free(self);
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

struct worker_object {
    PyObject_HEAD
    struct worker worker;
    Py_buffer control, arena, io[MAX_FRONT_ENDS];
    PyObject *programs[MAX_MODELS]; /* keep what worker.programs points to alive */
};

static bool take_io(struct worker_object *self, PyObject *io) {
    Py_ssize_t count = PySequence_Size(io);
    if (count < 0) return false;
    if (count > MAX_FRONT_ENDS) {
        PyErr_Format(PyExc_ValueError, "%zd front ends; at most %d", count, MAX_FRONT_ENDS);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(io, i);
        int failed = !item || PyObject_GetBuffer(item, &self->io[i], PyBUF_WRITABLE);
        Py_XDECREF(item);
        if (failed) return false;
        self->worker.io[i] = (struct memory){self->io[i].buf, (size_t)self->io[i].len};
        self->worker.io_count++;
    }
    return true;
}

static int worker_init(PyObject *object, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"control", "bell", "status", "commands", "completions", "scheduler_bell", "leases", "lease_count",
                            "arena", "io", "spin_us", NULL};
    struct worker_object *self = (struct worker_object *)object;
    struct worker *worker = &self->worker;
    Py_ssize_t bell, status, commands, completions, scheduler_bell, leases;
    PyObject *io;
    if (self->control.obj) return PyErr_SetString(PyExc_ValueError, "already initialised"), -1;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "w*nnnnnnIw*OI", names, &self->control, &bell, &status, &commands,
                                     &completions, &scheduler_bell, &leases, &worker->lease_count, &self->arena, &io,
                                     &worker->spin_us)) {
        return -1;
    }
    const Py_buffer *control = &self->control;
    worker->arena = (struct memory){self->arena.buf, (size_t)self->arena.len};
    if (!(worker->bell = locate(control, bell, sizeof(struct bell))) ||
        !(worker->scheduler_bell = locate(control, scheduler_bell, sizeof(struct bell))) ||
        !(worker->status = locate(control, status, sizeof(struct worker_status))) ||
        !(worker->commands = locate(control, commands, sizeof(struct ring))) ||
        !(worker->completions = locate(control, completions, sizeof(struct ring))) ||
        !(worker->leases = locate(control, leases, (size_t)worker->lease_count * sizeof(struct lease))) || !take_io(self, io)) {
        return -1;
    }
    atomic_store(&worker->status->pid, (uint32_t)getpid());
    return 0;
}

static PyObject *worker_set_program(PyObject *object, PyObject *arguments) {
    struct worker_object *self = (struct worker_object *)object;
    unsigned int model_id;
    PyObject *program;
    if (!PyArg_ParseTuple(arguments, "IO", &model_id, &program)) return NULL;
    if (model_id >= MAX_MODELS) return PyErr_Format(PyExc_ValueError, "model %u; at most %d models", model_id, MAX_MODELS);
    if (program == Py_None) {
        self->worker.programs[model_id] = NULL;
        Py_CLEAR(self->programs[model_id]);
        Py_RETURN_NONE;
    }
    if (!Py_IS_TYPE(program, program_type)) return PyErr_Format(PyExc_TypeError, "not a Program");
    self->worker.programs[model_id] = &((struct program_object *)program)->program;
    Py_XSETREF(self->programs[model_id], Py_NewRef(program));
    Py_RETURN_NONE;
}

static PyObject *py_worker_send(PyObject *object, PyObject *arguments) {
    struct message message;
    const char *bytes;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(arguments, "y#", &bytes, &length)) return NULL;
    if (length != sizeof message) return PyErr_Format(PyExc_ValueError, "a message has %zu bytes", sizeof message);
    memcpy(&message, bytes, sizeof message);
    worker_send(&((struct worker_object *)object)->worker, &message);
    Py_RETURN_NONE;
}

static PyObject *py_worker_loop(PyObject *object, PyObject *background) {
    struct worker *worker = &((struct worker_object *)object)->worker;
    struct message command;
    worker->background = background == Py_True;
    Py_BEGIN_ALLOW_THREADS
    command = worker_loop(worker);
    Py_END_ALLOW_THREADS
    if (command.kind == 0) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)&command, sizeof command);
}

static PyObject *py_worker_nudge(PyObject *object, PyObject *unused) {
    (void)unused;
    Py_BEGIN_ALLOW_THREADS /* whoever wakes up takes this core, and needs the interpreter */
    worker_nudge(&((struct worker_object *)object)->worker);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static void worker_free(PyObject *object) {
    struct worker_object *self = (struct worker_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (int i = 0; i < MAX_MODELS; i++) Py_CLEAR(self->programs[i]);
    for (int i = 0; i < MAX_FRONT_ENDS; i++) PyBuffer_Release(&self->io[i]);
    PyBuffer_Release(&self->control);
    PyBuffer_Release(&self->arena);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef worker_methods[] = {
    {"set_program", worker_set_program, METH_VARARGS, NULL},
    {"send", py_worker_send, METH_VARARGS, NULL},
    {"loop", py_worker_loop, METH_O, NULL},
    {"nudge", py_worker_nudge, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyType_Spec worker_type_spec = {
    .name = "gangway.executor._native.Worker",
    .basicsize = sizeof(struct worker_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = (PyType_Slot[]){{Py_tp_init, worker_init}, {Py_tp_dealloc, worker_free}, {Py_tp_methods, worker_methods}, {0, NULL}},
};
