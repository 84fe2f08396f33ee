/* The Python type Worker: a process's rings and memory. */
#include "python.h"

#include <errno.h>

#include "worker.h"

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
                            "arena", "io", "spin_us", "lost_regions", NULL};
    struct worker_object *self = (struct worker_object *)object;
    struct worker *worker = &self->worker;
    Py_ssize_t bell, status, commands, completions, scheduler_bell, leases, lost;
    PyObject *io;
    if (self->control.obj) return PyErr_SetString(PyExc_ValueError, "already initialised"), -1;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "w*nnnnnnIw*OIn", names, &self->control, &bell, &status, &commands,
                                     &completions, &scheduler_bell, &leases, &worker->lease_count, &self->arena, &io,
                                     &worker->spin_us, &lost)) {
        return -1;
    }
    worker->addresses = calloc(MAX_ADDRESSES, sizeof *worker->addresses); /* pages that no lease needs take no memory */
    if (!worker->addresses) return PyErr_NoMemory(), -1;
    const Py_buffer *control = &self->control;
    worker->arena = (struct memory){self->arena.buf, (size_t)self->arena.len};
    if (!(worker->bell = locate(control, bell, sizeof(struct bell))) ||
        !(worker->scheduler_bell = locate(control, scheduler_bell, sizeof(struct bell))) ||
        !(worker->status = locate(control, status, sizeof(struct worker_status))) ||
        !(worker->commands = locate(control, commands, sizeof(struct ring))) ||
        !(worker->completions = locate(control, completions, sizeof(struct ring))) ||
        !(worker->leases = locate(control, leases, (size_t)worker->lease_count * sizeof(struct lease))) ||
        !(worker->regions.lost = locate(control, lost, MAX_REGIONS * sizeof *worker->regions.lost)) || !take_io(self, io)) {
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
    struct program *table = program_of(program);
    if (!table) return PyErr_Format(PyExc_TypeError, "not a Program");
    self->worker.programs[model_id] = table;
    set_reference(&self->programs[model_id], program);
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
    Py_BEGIN_ALLOW_THREADS /* the thread that wakes up takes this core, and needs the interpreter */
    worker_nudge(&((struct worker_object *)object)->worker);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *worker_map_region(PyObject *object, PyObject *arguments) {
    unsigned int number;
    int descriptor, error;
    unsigned long long offset, size_bytes;
    if (!PyArg_ParseTuple(arguments, "IiKK", &number, &descriptor, &offset, &size_bytes)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    error = region_map(&((struct worker_object *)object)->worker.regions, number, descriptor, offset, size_bytes);
    Py_END_ALLOW_THREADS
    if (!error) Py_RETURN_NONE;
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *worker_clear_region(PyObject *object, PyObject *argument) {
    unsigned long number = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred()) return NULL;
    region_clear(&((struct worker_object *)object)->worker.regions, (uint32_t)number);
    Py_RETURN_NONE;
}

static PyObject *worker_unmap_region(PyObject *object, PyObject *argument) {
    unsigned long number = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    region_unmap(&((struct worker_object *)object)->worker.regions, (uint32_t)number);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static void worker_free(PyObject *object) {
    struct worker_object *self = (struct worker_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (int i = 0; i < MAX_MODELS; i++) Py_CLEAR(self->programs[i]);
    regions_close(&self->worker.regions);
    free(self->worker.addresses);
    for (int i = 0; i < MAX_FRONT_ENDS; i++) PyBuffer_Release(&self->io[i]);
    PyBuffer_Release(&self->control);
    PyBuffer_Release(&self->arena);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyMethodDef worker_methods[] = {
    {"set_program", worker_set_program, METH_VARARGS, NULL},
    {"send", py_worker_send, METH_VARARGS, NULL},
    {"loop", py_worker_loop, METH_O, NULL},
    {"nudge", py_worker_nudge, METH_NOARGS, NULL},
    {"map_region", worker_map_region, METH_VARARGS, NULL},
    {"clear_region", worker_clear_region, METH_O, NULL},
    {"unmap_region", worker_unmap_region, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

PyType_Spec worker_type_spec = {
    .name = "gangway.executor._native.Worker",
    .basicsize = sizeof(struct worker_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = (PyType_Slot[]){{Py_tp_init, worker_init}, {Py_tp_dealloc, worker_free}, {Py_tp_methods, worker_methods}, {0, NULL}},
};
