/* The Python types InstanceEnd and Handover: requests to instances of Python models without Python. */
#include "python.h"

#include <errno.h>
#include <math.h>

#include "instance.h"

PyTypeObject *instance_type;

/* Only the thread of the worker's loop uses it. */
struct instance_object {
    PyObject_HEAD
    struct instance instance;
    Py_buffer memory, status;
};

struct handover_object {
    PyObject_HEAD
    struct handover handover;
    PyObject *instance, *go_on;
    PyObject *texts; /* keeps them */
    Py_buffer request, block;
};

static int instance_init(PyObject *object, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"socket", "process", "pid", NULL};
    struct instance *instance = &((struct instance_object *)object)->instance;
    instance->socket = instance->process = -1;
    int parsed = PyArg_ParseTupleAndKeywords(arguments, keywords, "iii", names, &instance->socket, &instance->process, &instance->pid);
    return parsed ? 0 : -1;
}

/* share(memory): has it use this memory; None: none. */
static PyObject *instance_share(PyObject *object, PyObject *memory) {
    struct instance_object *self = (struct instance_object *)object;
    Py_buffer buffer = {0};
    if (memory != Py_None && PyObject_GetBuffer(memory, &buffer, PyBUF_WRITABLE)) return NULL;
    PyBuffer_Release(&self->memory);
    self->memory = buffer;
    self->instance.memory = buffer.buf;
    self->instance.memory_bytes = (uint64_t)buffer.len;
    Py_RETURN_NONE;
}

/* show(status): what the instance shows. */
static PyObject *instance_show(PyObject *object, PyObject *status) {
    struct instance_object *self = (struct instance_object *)object;
    Py_buffer buffer;
    if (PyObject_GetBuffer(status, &buffer, PyBUF_SIMPLE)) return NULL;
    if (buffer.len < 2) {
        PyBuffer_Release(&buffer);
        return PyErr_Format(PyExc_ValueError, "a status of %zd bytes", buffer.len);
    }
    PyBuffer_Release(&self->status);
    self->status = buffer;
    self->instance.status = buffer.buf;
    Py_RETURN_NONE;
}

/* poll(ms): whether a message comes within this time; the wait ends before if the core is wanted. */
static PyObject *instance_wait(PyObject *object, PyObject *milliseconds) {
    struct instance_object *self = (struct instance_object *)object;
    double most_ms = PyFloat_AsDouble(milliseconds);
    if (most_ms == -1 && PyErr_Occurred()) return NULL;
    int ready;
    do {
        Py_BEGIN_ALLOW_THREADS
        ready = instance_poll(self->instance.socket, most_ms > 0 ? (uint64_t)ceil(most_ms) : 0);
        Py_END_ALLOW_THREADS
    } while (ready < 0 && errno == EINTR && !PyErr_CheckSignals());
    if (PyErr_Occurred()) return NULL;
    return ready < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyBool_FromLong(ready);
}

static PyObject *instance_wanted(PyObject *object, void *unused) {
    (void)object, (void)unused;
    return PyBool_FromLong(instance_must_leave());
}

static PyObject *instance_close(PyObject *object, PyObject *unused) {
    (void)unused;
    struct instance_object *self = (struct instance_object *)object;
    self->instance = (struct instance){.socket = -1, .process = -1};
    PyBuffer_Release(&self->memory);
    PyBuffer_Release(&self->status);
    Py_RETURN_NONE;
}

static void instance_free(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(instance_close(object, NULL));
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyMethodDef instance_methods[] = {
    {"share", instance_share, METH_O, NULL},
    {"show", instance_show, METH_O, NULL},
    {"poll", instance_wait, METH_O, NULL},
    {"close", instance_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef instance_getset[] = {{"core_is_wanted", instance_wanted, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};

PyType_Spec instance_type_spec = {
    .name = "gangway.executor._native.InstanceEnd",
    .basicsize = sizeof(struct instance_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = (PyType_Slot[]){{Py_tp_init, instance_init},
                             {Py_tp_dealloc, instance_free},
                             {Py_tp_methods, instance_methods},
                             {Py_tp_getset, instance_getset},
                             {0, NULL}},
};

static bool is_inside(uint64_t at, uint64_t size, uint64_t whole) { return at <= whole && size <= whole - at; }

/* Reads a sequence of triples of numbers into an array of `calloc`. NULL: an exception is set. */
static void *read_triples(PyObject *sequence, uint32_t *count) {
    Py_ssize_t length = PySequence_Size(sequence);
    if (length < 0) return NULL;
    uint64_t (*triples)[3] = calloc((size_t)length + 1, sizeof *triples);
    if (!triples) return PyErr_NoMemory();
    for (*count = 0; *count < length; ++*count) {
        PyObject *triple = PySequence_GetItem(sequence, *count);
        unsigned long long a, b, c;
        bool read = triple && PyArg_ParseTuple(triple, "KKK", &a, &b, &c);
        Py_XDECREF(triple);
        if (!read) return free(triples), NULL;
        memcpy(triples[*count], (uint64_t[]){a, b, c}, sizeof *triples);
    }
    return triples;
}

static bool is_sound(const struct handover *handover, uint64_t request_bytes, uint64_t block_bytes) {
    bool sound = handover_fits(handover) && is_inside(handover->told_at, handover->told_bytes, request_bytes) &&
                 is_inside(handover->status_at, handover->status.size, block_bytes);
    for (uint32_t i = 0; sound && i < handover->input_count; i++) {
        const struct move *move = &handover->inputs[i];
        sound = is_inside(move->from, move->size, request_bytes) && is_inside(move->to, move->size, handover->needed_bytes);
    }
    for (uint32_t i = 0; sound && i < handover->output_count; i++) {
        const struct move *move = &handover->outputs[i];
        sound = is_inside(move->from, move->size, handover->needed_bytes) && is_inside(move->to, move->size, block_bytes);
    }
    for (uint32_t i = 0; sound && i < handover->element_count; i++) {
        sound = is_inside(handover->elements[i].at, handover->elements[i].size, request_bytes);
    }
    return sound;
}

static struct text text_of(PyObject *bytes) { return (struct text){PyBytes_AsString(bytes), (uint64_t)PyBytes_Size(bytes)}; }

static int handover_init(PyObject *object, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"instance", "request", "block", "header",  "common",       "answer",     "status", "told",
                            "status_at", "inputs", "outputs", "elements", "needed_bytes", "timeout_ns", "core", "go_on", NULL};
    struct handover_object *self = (struct handover_object *)object;
    struct handover *handover = &self->handover;
    PyObject *instance, *header, *common, *answer, *status, *inputs, *outputs, *elements, *go_on;
    unsigned long long told_at, told_bytes, status_at, needed_bytes, timeout_ns;
    if (self->instance) return PyErr_SetString(PyExc_ValueError, "already initialised"), -1;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!y*w*SSSS(KK)KOOOKKIO", names, instance_type, &instance, &self->request,
                                     &self->block, &header, &common, &answer, &status, &told_at, &told_bytes, &status_at, &inputs,
                                     &outputs, &elements, &needed_bytes, &timeout_ns, &handover->core, &go_on)) {
        return -1;
    }
    self->instance = Py_NewRef(instance);
    self->go_on = Py_NewRef(go_on);
    self->texts = PyTuple_Pack(4, header, common, answer, status);
    if (!self->texts) return -1;
    handover->header = text_of(header);
    handover->common = text_of(common);
    handover->answer = text_of(answer);
    handover->status = text_of(status);
    handover->told_at = told_at;
    handover->told_bytes = told_bytes;
    handover->status_at = status_at;
    handover->needed_bytes = needed_bytes;
    handover->timeout_ns = timeout_ns;
    if (!(handover->inputs = read_triples(inputs, &handover->input_count)) ||
        !(handover->outputs = read_triples(outputs, &handover->output_count)) ||
        !(handover->elements = read_triples(elements, &handover->element_count))) {
        return -1;
    }
    if (is_sound(handover, (uint64_t)self->request.len, (uint64_t)self->block.len)) return 0;
    return PyErr_SetString(PyExc_ValueError, "places outside of a request, its answer or their memory"), -1;
}

/* None: the contents of the answer are written; True: all of it is. False: nothing is done; NotImplemented: nor will it be. */
static PyObject *handover_call(PyObject *object, PyObject *arguments, PyObject *keywords) {
    struct handover_object *self = (struct handover_object *)object;
    const struct instance *instance = &((struct instance_object *)self->instance)->instance;
    struct exchange exchange;
    enum handed handed;
    (void)arguments, (void)keywords;
    if (instance->socket < 0) return Py_NewRef(Py_NotImplemented);
    Py_BEGIN_ALLOW_THREADS
    handed = handover_run(instance, &self->handover, self->request.buf, self->block.buf, &exchange);
    Py_END_ALLOW_THREADS
    if (handed == ANSWERED) Py_RETURN_NONE;
    if (handed == NOT_HANDED) Py_RETURN_FALSE;
    PyObject *result = PyObject_CallFunction(self->go_on, "KK(KK)y#", (unsigned long long)exchange.number,
                                             (unsigned long long)exchange.begin_ns, (unsigned long long)exchange.looked_ns,
                                             (unsigned long long)exchange.computed_ns, exchange.received,
                                             (Py_ssize_t)exchange.received_bytes);
    if (!result) return NULL;
    Py_DECREF(result);
    Py_RETURN_TRUE;
}

static void handover_free(PyObject *object) {
    struct handover_object *self = (struct handover_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    free(self->handover.inputs);
    free(self->handover.outputs);
    free(self->handover.elements);
    Py_XDECREF(self->instance);
    Py_XDECREF(self->go_on);
    Py_XDECREF(self->texts);
    PyBuffer_Release(&self->request);
    PyBuffer_Release(&self->block);
    PyObject_Free(object);
    Py_DECREF(type);
}

PyType_Spec handover_type_spec = {
    .name = "gangway.executor._native.Handover",
    .basicsize = sizeof(struct handover_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = (PyType_Slot[]){{Py_tp_init, handover_init}, {Py_tp_dealloc, handover_free}, {Py_tp_call, handover_call}, {0, NULL}},
};
