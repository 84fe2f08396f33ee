/* The Python type Reception. */
#include "python.h"

#include "reception.h"

struct reception_object {
    PyObject_HEAD
    struct reception reception;
    Py_buffer control, *io; /* one for each front end */
};

/* Calls `take` for each item of a sequence; the number of items, -1 after an error. */
static Py_ssize_t each(PyObject *sequence, bool (*take)(struct reception_object *, PyObject *, Py_ssize_t), struct reception_object *self) {
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
static bool take_front_end(struct reception_object *self, PyObject *item, Py_ssize_t i) {
    Py_ssize_t submits;
    struct slot_table *table = &self->reception.tables[i];
    if (!PyArg_ParseTuple(item, "w*In", &self->io[i], &table->count, &submits)) return false;
    table->slots = locate(&self->io[i], 0, (size_t)table->count * sizeof *table->slots);
    self->reception.submits[i] = locate(&self->control, submits, sizeof(struct ring));
    self->reception.front_end_count++;
    return table->slots && self->reception.submits[i];
}

/* Offsets of (bell, command ring, completion ring). */
static bool take_worker(struct reception_object *self, PyObject *item, Py_ssize_t i) {
    Py_ssize_t bell, commands, completions;
    struct receiving_worker *worker = &self->reception.workers[i];
    if (!PyArg_ParseTuple(item, "nnn", &bell, &commands, &completions)) return false;
    worker->bell = locate(&self->control, bell, sizeof *worker->bell);
    worker->commands = locate(&self->control, commands, sizeof *worker->commands);
    worker->completions = locate(&self->control, completions, sizeof *worker->completions);
    self->reception.worker_count++;
    return worker->bell && worker->commands && worker->completions;
}

static int reception_init(PyObject *object, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"control", "bell", "front_ends", "workers", "leases", "lease_count", "lease_timeout_us", "desks", NULL};
    struct reception_object *self = (struct reception_object *)object;
    struct reception *reception = &self->reception;
    Py_ssize_t bell, leases;
    unsigned int lease_count;
    PyObject *front_ends, *workers;
    if (self->control.obj) return PyErr_SetString(PyExc_ValueError, "already initialised"), -1;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "w*nO!O!nIII", names, &self->control, &bell, &PyTuple_Type, &front_ends,
                                     &PyTuple_Type, &workers, &leases, &lease_count, &reception->lease_timeout_us,
                                     &reception->desk_count)) {
        return -1;
    }
    if (reception->desk_count < 1 || reception->desk_count > MAX_DESKS) {
        return PyErr_Format(PyExc_ValueError, "a worker has 1 to %d desks, not %u", MAX_DESKS, reception->desk_count), -1;
    }
    size_t front_end_count = (size_t)PyTuple_GET_SIZE(front_ends), worker_count = (size_t)PyTuple_GET_SIZE(workers);
    reception->lease_count = lease_count;
    self->io = PyMem_Calloc(front_end_count + 1, sizeof *self->io);
    reception->tables = PyMem_Calloc(front_end_count + 1, sizeof *reception->tables);
    reception->submits = PyMem_Calloc(front_end_count + 1, sizeof(struct ring *));
    reception->workers = PyMem_Calloc(worker_count + 1, sizeof *reception->workers);
    reception->gone = PyMem_Calloc(ENOUGH_GONE + worker_count * reception->desk_count, sizeof *reception->gone);
    if (!self->io || !reception->tables || !reception->submits || !reception->workers || !reception->gone) return PyErr_NoMemory(), -1;
    reception->bell = locate(&self->control, bell, sizeof *reception->bell);
    reception->leases = locate(&self->control, leases, (size_t)lease_count * sizeof *reception->leases);
    if (!reception->bell || !reception->leases) return -1;
    return each(front_ends, take_front_end, self) < 0 || each(workers, take_worker, self) < 0 ? -1 : 0;
}

static struct open_model *find_model(PyObject *object, unsigned int model_id) {
    if (model_id < MAX_MODELS) return &((struct reception_object *)object)->reception.models[model_id];
    return PyErr_Format(PyExc_ValueError, "model %u; at most %d models", model_id, MAX_MODELS), NULL;
}

static PyObject *reception_open(PyObject *object, PyObject *arguments) {
    struct reception *reception = &((struct reception_object *)object)->reception;
    unsigned int model_id, layers, expected_us;
    unsigned long long stride;
    PyObject *offsets;
    if (!PyArg_ParseTuple(arguments, "IIIKO!", &model_id, &layers, &expected_us, &stride, &PyTuple_Type, &offsets)) return NULL;
    struct open_model *model = find_model(object, model_id);
    size_t count = (size_t)PyTuple_GET_SIZE(offsets);
    if (!model) return NULL;
    if (layers < 1 || layers > MAX_LAYERS || count != (size_t)reception->worker_count * reception->desk_count) {
        return PyErr_Format(PyExc_ValueError, "no such model: %u layers, %zu arenas", layers, count);
    }
    uint64_t *arenas = PyMem_Calloc(count + 1, sizeof *arenas);
    if (!arenas) return PyErr_NoMemory();
    for (size_t i = 0; i < count && !PyErr_Occurred(); i++) {
        arenas[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(offsets, (Py_ssize_t)i));
    }
    PyMem_Free(model->arenas);
    *model = (struct open_model){.arena_stride = stride, .arenas = arenas, .layers = layers, .expected_us = expected_us};
    if (!PyErr_Occurred()) Py_RETURN_NONE;
    PyMem_Free(arenas);
    model->arenas = NULL;
    return NULL;
}

static PyObject *reception_close(PyObject *object, PyObject *argument) {
    unsigned long model_id = PyLong_AsUnsignedLong(argument);
    struct open_model *model = PyErr_Occurred() ? NULL : find_model(object, (unsigned int)model_id);
    if (!model) return NULL;
    PyMem_Free(model->arenas);
    model->arenas = NULL;
    Py_RETURN_NONE;
}

/* -- attending */

/* A lease for each desk, -1: it shall not be used. None: all is as it was. */
static bool set_desks(struct reception *reception, PyObject *leases) {
    if (leases == Py_None) return true;
    if (!PyTuple_Check(leases)) return PyErr_SetString(PyExc_TypeError, "leases are a tuple"), false;
    if ((size_t)PyTuple_GET_SIZE(leases) != (size_t)reception->worker_count * reception->desk_count) {
        return PyErr_Format(PyExc_ValueError, "%zd leases", PyTuple_GET_SIZE(leases)), false;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(leases); i++) {
        long lease = PyLong_AsLong(PyTuple_GET_ITEM(leases, i));
        if (lease == -1 && PyErr_Occurred()) return false;
        if (lease >= (long)reception->lease_count) return PyErr_Format(PyExc_ValueError, "there is no lease %ld", lease), false;
        struct desk *desk = &reception->workers[i / reception->desk_count].desks[i % reception->desk_count];
        *desk = (struct desk){.lease = lease < 0 ? NO_LEASE : (uint32_t)lease};
    }
    return true;
}

/* See _native.pyi. */
static PyObject *gone_item(const struct walk_in *gone) {
    return Py_BuildValue("IiKKKK", gone->model_id, gone->priority, gone->arrival_ns, gone->deadline_ns, gone->joined_ns, gone->end_ns);
}

static PyObject *present_item(const struct desk *desk, uint32_t worker, uint32_t number) {
    const struct walk_in *walk_in = &desk->walk_in;
    return Py_BuildValue("IIIIIIIIiKKKKK", worker, number, desk->lease, walk_in->lease_generation, walk_in->model_id, walk_in->front_end,
                         walk_in->slot, walk_in->slot_generation, walk_in->priority, walk_in->arrival_ns, walk_in->deadline_ns,
                         walk_in->limit_ns, walk_in->join_key, walk_in->begun_ns);
}

static bool append(PyObject *list, PyObject *item) {
    bool appended = item && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return appended;
}

static bool add_all(const struct reception *reception, PyObject *gone, PyObject *present) {
    bool added = gone && present;
    for (uint32_t i = 0; added && i < reception->gone_count; i++) added = append(gone, gone_item(&reception->gone[i]));
    for (uint32_t i = 0; i < reception->worker_count; i++) {
        for (uint32_t k = 0; added && k < reception->desk_count; k++) {
            const struct desk *desk = &reception->workers[i].desks[k];
            if (desk->taken) added = append(present, present_item(desk, i, k));
        }
    }
    return added;
}

static PyObject *py_reception_attend(PyObject *object, PyObject *arguments) {
    struct reception *reception = &((struct reception_object *)object)->reception;
    struct attendance attendance;
    PyObject *leases;
    unsigned long long timeout_us, watch_us;
    if (!PyArg_ParseTuple(arguments, "OIIKK", &leases, &attendance.letters, &attendance.spin_us, &timeout_us, &watch_us)) {
        return NULL;
    }
    attendance.timeout_us = timeout_us;
    attendance.watch_us = watch_us;
    if (!set_desks(reception, leases)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    reception_attend(reception, &attendance);
    Py_END_ALLOW_THREADS
    PyObject *gone = PyList_New(0), *present = PyList_New(0);
    PyObject *result = add_all(reception, gone, present) ? PyTuple_Pack(2, gone, present) : NULL;
    Py_XDECREF(gone);
    Py_XDECREF(present);
    return result;
}

static void reception_free(PyObject *object) {
    struct reception_object *self = (struct reception_object *)object;
    struct reception *reception = &self->reception;
    PyTypeObject *type = Py_TYPE(object);
    for (int i = 0; i < MAX_MODELS; i++) PyMem_Free(reception->models[i].arenas);
    for (uint32_t i = 0; i < reception->front_end_count; i++) PyBuffer_Release(&self->io[i]);
    PyBuffer_Release(&self->control);
    PyMem_Free(reception->tables);
    PyMem_Free(reception->submits);
    PyMem_Free(reception->workers);
    PyMem_Free(reception->gone);
    PyMem_Free(self->io);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"open", reception_open, METH_VARARGS, NULL},
    {"close", reception_close, METH_O, NULL},
    {"attend", py_reception_attend, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyType_Spec reception_type_spec = {
    .name = "gangway.executor._native.Reception",
    .basicsize = sizeof(struct reception_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = (PyType_Slot[]){{Py_tp_init, reception_init}, {Py_tp_dealloc, reception_free}, {Py_tp_methods, methods}, {0, NULL}},
};
