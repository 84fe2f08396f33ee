/* The Python type FastPath. */
#include "python.h"

#include <string.h>

#include "fast_path.h"

struct fast_path_object {
    PyObject_HEAD
    struct fast_path path;
    Py_buffer control, *io; /* one for each front end */
};

/* Calls `take` for each item of a sequence; returns the number of items, -1 after an error. */
static Py_ssize_t each(PyObject *sequence, bool (*take)(struct fast_path_object *, PyObject *, Py_ssize_t), struct fast_path_object *self) {
    Py_ssize_t count = PySequence_Size(sequence);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        bool taken = item && take(self, item, i);
        Py_XDECREF(item);
        if (!taken) return -1;
    }
    return count;
}

/* (io segment, slots, offset of its submit ring) */
static bool take_front_end(struct fast_path_object *self, PyObject *item, Py_ssize_t i) {
    Py_ssize_t submits;
    struct slot_table *table = &self->path.tables[i];
    if (!PyArg_ParseTuple(item, "w*In", &self->io[i], &table->count, &submits)) return false;
    table->slots = locate(&self->io[i], 0, (size_t)table->count * sizeof *table->slots);
    self->path.submits[i] = locate(&self->control, submits, sizeof(struct ring));
    self->path.front_end_count++;
    return table->slots && self->path.submits[i];
}

/* Offsets of (bell, command ring, completion ring). */
static bool take_worker(struct fast_path_object *self, PyObject *item, Py_ssize_t i) {
    Py_ssize_t bell, commands, completions;
    struct fast_worker *worker = &self->path.workers[i];
    if (!PyArg_ParseTuple(item, "nnn", &bell, &commands, &completions)) return false;
    worker->bell = locate(&self->control, bell, sizeof *worker->bell);
    worker->commands = locate(&self->control, commands, sizeof *worker->commands);
    worker->completions = locate(&self->control, completions, sizeof *worker->completions);
    self->path.worker_count++;
    return worker->bell && worker->commands && worker->completions;
}

static int fast_path_init(PyObject *object, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"control", "bell", "front_ends", "workers", "leases", "lease_count", "lease_timeout_us", "worker_slots", NULL};
    struct fast_path_object *self = (struct fast_path_object *)object;
    struct fast_path *path = &self->path;
    Py_ssize_t bell, leases;
    unsigned int lease_count;
    PyObject *front_ends, *workers;
    if (self->control.obj) return PyErr_SetString(PyExc_ValueError, "already initialised"), -1;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "w*nO!O!nIII", names, &self->control, &bell, &PyTuple_Type, &front_ends,
                                     &PyTuple_Type, &workers, &leases, &lease_count, &path->lease_timeout_us,
                                     &path->worker_slot_count)) {
        return -1;
    }
    if (path->worker_slot_count < 1 || path->worker_slot_count > MAX_WORKER_SLOTS) {
        return PyErr_Format(PyExc_ValueError, "a worker has 1 to %d slots, not %u", MAX_WORKER_SLOTS, path->worker_slot_count), -1;
    }
    size_t front_end_count = (size_t)PyTuple_Size(front_ends), worker_count = (size_t)PyTuple_Size(workers);
    path->lease_count = lease_count;
    self->io = PyMem_Calloc(front_end_count + 1, sizeof *self->io);
    path->tables = PyMem_Calloc(front_end_count + 1, sizeof *path->tables);
    path->submits = PyMem_Calloc(front_end_count + 1, sizeof(struct ring *));
    path->workers = PyMem_Calloc(worker_count + 1, sizeof *path->workers);
    path->completed = PyMem_Calloc(MAX_COMPLETED + worker_count * path->worker_slot_count, sizeof *path->completed);
    if (!self->io || !path->tables || !path->submits || !path->workers || !path->completed) return PyErr_NoMemory(), -1;
    path->bell = locate(&self->control, bell, sizeof *path->bell);
    path->leases = locate(&self->control, leases, (size_t)lease_count * sizeof *path->leases);
    if (!path->bell || !path->leases) return -1;
    return each(front_ends, take_front_end, self) < 0 || each(workers, take_worker, self) < 0 ? -1 : 0;
}

static struct open_model *find_model(PyObject *object, unsigned int model_id) {
    if (model_id < MAX_MODELS) return &((struct fast_path_object *)object)->path.models[model_id];
    return PyErr_Format(PyExc_ValueError, "model %u; at most %d models", model_id, MAX_MODELS), NULL;
}

static void close_model(struct open_model *model) {
    PyMem_Free(model->arenas);
    PyMem_Free(model->versions);
    *model = (struct open_model){0};
}

static bool copy_arenas(struct open_model *model, PyObject *offsets) {
    model->arena_count = (uint32_t)PyTuple_Size(offsets);
    model->arenas = PyMem_Calloc(model->arena_count + 1, sizeof *model->arenas);
    if (!model->arenas) return PyErr_NoMemory(), false;
    for (uint32_t i = 0; i < model->arena_count && !PyErr_Occurred(); i++) {
        model->arenas[i].offset = PyLong_AsUnsignedLongLong(PyTuple_GetItem(offsets, i));
    }
    return !PyErr_Occurred();
}

/* Empty: the default ones. */
static bool copy_versions(struct open_model *model, const Py_buffer *versions) {
    if (!versions->len) return true;
    model->versions = PyMem_Malloc((size_t)versions->len);
    if (!model->versions) return PyErr_NoMemory(), false;
    memcpy(model->versions, versions->buf, (size_t)versions->len);
    for (Py_ssize_t i = 0; i < versions->len; i++) {
        if (model->versions[i] >= MAX_VERSIONS) return PyErr_Format(PyExc_ValueError, "version %d", model->versions[i]), false;
    }
    return true;
}

static PyObject *fast_path_open(PyObject *object, PyObject *arguments) {
    struct fast_path *path = &((struct fast_path_object *)object)->path;
    struct open_model opened = {0};
    unsigned int model_id;
    unsigned long long stride;
    int may_grow;
    PyObject *offsets;
    Py_buffer versions;
    if (!PyArg_ParseTuple(arguments, "IIIIIpKO!y*", &model_id, &opened.layers, &opened.expected_us, &opened.ranks, &opened.min_slack_us,
                          &may_grow, &stride, &PyTuple_Type, &offsets, &versions)) {
        return NULL;
    }
    opened.may_grow = may_grow;
    opened.arena_stride = stride;
    struct open_model *model = find_model(object, model_id);
    bool sound = opened.layers >= 1 && opened.layers <= MAX_LAYERS && (!versions.len || versions.len == (Py_ssize_t)opened.layers) &&
                 opened.ranks >= 1 && opened.ranks <= path->worker_count && opened.ranks <= MAX_RANKS;
    if (model && !sound) PyErr_Format(PyExc_ValueError, "no such model: %u layers on %u cores", opened.layers, opened.ranks);
    bool copied = model && sound && copy_arenas(&opened, offsets) && copy_versions(&opened, &versions);
    PyBuffer_Release(&versions);
    if (!copied) return close_model(&opened), NULL;
    close_model(model);
    *model = opened;
    Py_RETURN_NONE;
}

static PyObject *fast_path_close(PyObject *object, PyObject *argument) {
    unsigned long model_id = PyLong_AsUnsignedLong(argument);
    struct open_model *model = PyErr_Occurred() ? NULL : find_model(object, (unsigned int)model_id);
    if (!model) return NULL;
    close_model(model);
    Py_RETURN_NONE;
}

/* -- polling */

/* A lease for each worker slot, -1: it is not used. None: all stay as they are. */
static bool set_leases(struct fast_path *path, PyObject *leases) {
    if (leases == Py_None) return true;
    if (!PyTuple_Check(leases)) return PyErr_SetString(PyExc_TypeError, "leases are a tuple"), false;
    size_t count = (size_t)path->worker_count * path->worker_slot_count;
    if ((size_t)PyTuple_Size(leases) != count) return PyErr_Format(PyExc_ValueError, "%zd leases", PyTuple_Size(leases)), false;
    uint32_t *given = PyMem_Calloc(count + 1, sizeof *given);
    if (!given) return PyErr_NoMemory(), false;
    for (size_t i = 0; i < count && !PyErr_Occurred(); i++) {
        long lease = PyLong_AsLong(PyTuple_GetItem(leases, (Py_ssize_t)i));
        if (lease >= (long)path->lease_count) PyErr_Format(PyExc_ValueError, "there is no lease %ld", lease);
        given[i] = lease < 0 ? NO_LEASE : (uint32_t)lease;
    }
    bool set = !PyErr_Occurred();
    if (set) fast_path_set_leases(path, given);
    PyMem_Free(given);
    return set;
}

/* See _native.pyi. */
static PyObject *completed_item(const struct fast_request *completed) {
    return Py_BuildValue("IiKKKK", completed->model_id, completed->priority, completed->arrival_ns, completed->deadline_ns,
                         completed->joined_ns, completed->end_ns);
}

static PyObject *in_flight_item(const struct fast_path *path, const struct worker_slot *place) {
    const struct fast_request *request = &place->request;
    uint32_t inside[MAX_RANKS], count = 0, ranks = path->models[request->model_id].ranks;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        if (place->inside >> rank & 1) inside[count++] = rank;
    }
    PyObject *cores = numbers(place->workers, ranks), *left = numbers(inside, count);
    if (!cores || !left) return Py_XDECREF(cores), Py_XDECREF(left), NULL;
    PyObject *ended = fast_path_has_ended(path, place) ? Py_True : Py_False;
    return Py_BuildValue("NNOIIIIIIIiKKKKKK", cores, left, ended, place->lease, request->lease_generation, place->arena,
                         request->model_id, request->front_end, request->slot, request->slot_generation, request->priority,
                         request->arrival_ns, request->deadline_ns, request->limit_ns, request->join_key, request->begun_ns,
                         request->joined_ns);
}

static bool append(PyObject *list, PyObject *item) {
    bool appended = item && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return appended;
}

static bool add_all(const struct fast_path *path, PyObject *completed, PyObject *in_flight) {
    bool added = completed && in_flight;
    for (uint32_t i = 0; added && i < path->completed_count; i++) added = append(completed, completed_item(&path->completed[i]));
    for (uint32_t i = 0; i < path->worker_count; i++) {
        for (uint32_t k = 0; added && k < path->worker_slot_count; k++) {
            const struct worker_slot *place = &path->workers[i].worker_slots[k];
            if (place->taken) added = append(in_flight, in_flight_item(path, place));
        }
    }
    return added;
}

static PyObject *py_fast_path_poll(PyObject *object, PyObject *arguments) {
    struct fast_path *path = &((struct fast_path_object *)object)->path;
    struct poll_limits limits;
    PyObject *leases;
    unsigned long long timeout_us, watch_us;
    if (!PyArg_ParseTuple(arguments, "OIIKK", &leases, &limits.control_seq, &limits.spin_us, &timeout_us, &watch_us)) {
        return NULL;
    }
    limits.timeout_us = timeout_us;
    limits.watch_us = watch_us;
    if (!set_leases(path, leases)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    fast_path_poll(path, &limits);
    Py_END_ALLOW_THREADS
    PyObject *completed = PyList_New(0), *in_flight = PyList_New(0);
    PyObject *result = add_all(path, completed, in_flight) ? PyTuple_Pack(2, completed, in_flight) : NULL;
    Py_XDECREF(completed);
    Py_XDECREF(in_flight);
    return result;
}

static void fast_path_free(PyObject *object) {
    struct fast_path_object *self = (struct fast_path_object *)object;
    struct fast_path *path = &self->path;
    PyTypeObject *type = Py_TYPE(object);
    for (int i = 0; i < MAX_MODELS; i++) close_model(&path->models[i]);
    for (uint32_t i = 0; i < path->front_end_count; i++) PyBuffer_Release(&self->io[i]);
    PyBuffer_Release(&self->control);
    PyMem_Free(path->tables);
    PyMem_Free(path->submits);
    PyMem_Free(path->workers);
    PyMem_Free(path->completed);
    PyMem_Free(self->io);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"open", fast_path_open, METH_VARARGS, NULL},
    {"close", fast_path_close, METH_O, NULL},
    {"poll", py_fast_path_poll, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyType_Spec fast_path_type_spec = {
    .name = "gangway.executor._native.FastPath",
    .basicsize = sizeof(struct fast_path_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = (PyType_Slot[]){{Py_tp_init, fast_path_init}, {Py_tp_dealloc, fast_path_free}, {Py_tp_methods, methods}, {0, NULL}},
};
