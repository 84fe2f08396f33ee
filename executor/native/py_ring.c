/* Python's access to rings and bells in a buffer. */
#include "py_buffer.h"

#include "ring.h"

static struct ring *find_ring(const Py_buffer *buffer, Py_ssize_t offset) {
    struct ring *ring = locate(buffer, offset, sizeof *ring);
    if (ring && !locate(buffer, offset, sizeof *ring + (size_t)ring->capacity * sizeof(struct message))) return NULL;
    if (ring && ring->capacity == 0) {
        PyErr_SetString(PyExc_ValueError, "the ring has not been initialised");
        return NULL;
    }
    return ring;
}

FUNCTION(py_ring_init) {
    Py_ssize_t offset;
    unsigned int capacity;
    PARSE("nI", &offset, &capacity);
    struct ring *ring = locate(&buffer, offset, sizeof *ring + (size_t)capacity * sizeof(struct message));
    if (ring && (capacity == 0 || capacity & (capacity - 1))) {
        PyErr_Format(PyExc_ValueError, "a ring's capacity is a power of two, not %u", capacity);
    } else if (ring) {
        ring_init(ring, capacity);
        result = Py_NewRef(Py_None);
    }
    FINISH;
}

FUNCTION(py_ring_send) {
    Py_ssize_t offset, length;
    const char *bytes;
    PARSE("ny#", &offset, &bytes, &length);
    struct ring *ring = find_ring(&buffer, offset);
    if (ring && length != sizeof(struct message)) {
        PyErr_Format(PyExc_ValueError, "a message has %zu bytes, not %zd", sizeof(struct message), length);
    } else if (ring) {
        struct message message;
        memcpy(&message, bytes, sizeof message);
        result = PyBool_FromLong(ring_send(ring, &message));
    }
    FINISH;
}

FUNCTION(py_ring_receive) {
    Py_ssize_t offset;
    PARSE("n", &offset);
    struct ring *ring = find_ring(&buffer, offset);
    struct message message;
    if (ring && ring_receive(ring, &message)) {
        result = PyBytes_FromStringAndSize((const char *)&message, sizeof message);
    } else if (ring) {
        result = Py_NewRef(Py_None);
    }
    FINISH;
}

/* All messages of several rings, one ring after the other: [(place of the ring in the tuple, bytes), ...]. */
FUNCTION(py_rings_drain) {
    PyObject *offsets;
    PARSE("O!", &PyTuple_Type, &offsets);
    result = PyList_New(0);
    for (Py_ssize_t i = 0; result && i < PyTuple_Size(offsets); i++) {
        Py_ssize_t offset = PyLong_AsSsize_t(PyTuple_GetItem(offsets, i));
        struct ring *ring = offset == -1 && PyErr_Occurred() ? NULL : find_ring(&buffer, offset);
        struct message message;
        if (!ring) Py_CLEAR(result);
        while (result && ring_receive(ring, &message)) {
            PyObject *pair = Py_BuildValue("ny#", i, (const char *)&message, (Py_ssize_t)sizeof message);
            if (!pair || PyList_Append(result, pair) < 0) Py_CLEAR(result);
            Py_XDECREF(pair);
        }
    }
    FINISH;
}

FUNCTION(py_ring_pending) {
    Py_ssize_t offset;
    PARSE("n", &offset);
    struct ring *ring = find_ring(&buffer, offset);
    if (ring) result = PyLong_FromUnsignedLong(ring_pending(ring));
    FINISH;
}

FUNCTION(py_ring_discard) {
    Py_ssize_t offset;
    PARSE("n", &offset);
    struct ring *ring = find_ring(&buffer, offset);
    if (ring) {
        ring_discard(ring);
        result = Py_NewRef(Py_None);
    }
    FINISH;
}

/* Functions of a bell and nothing else: one that returns nothing, one that returns a count. */
#define BELL_ACTION(name) \
    FUNCTION(py_##name) { \
        Py_ssize_t offset; \
        PARSE("n", &offset); \
        struct bell *bell = locate(&buffer, offset, sizeof *bell); \
        if (bell) { \
            name(bell); \
            result = Py_NewRef(Py_None); \
        } \
        FINISH; \
    }

#define BELL_COUNT(name) \
    FUNCTION(py_##name) { \
        Py_ssize_t offset; \
        PARSE("n", &offset); \
        struct bell *bell = locate(&buffer, offset, sizeof *bell); \
        if (bell) result = PyLong_FromUnsignedLong(name(bell)); \
        FINISH; \
    }

BELL_ACTION(bell_ring)
BELL_ACTION(bell_arm)
BELL_ACTION(bell_ring_for_best_effort)
BELL_ACTION(bell_ring_for_control)
BELL_ACTION(bell_take_over)
BELL_COUNT(bell_seen)
BELL_COUNT(bell_control_seq)

FUNCTION(py_bell_wait) {
    Py_ssize_t offset;
    unsigned int seen, spin_us;
    unsigned long long timeout_us;
    int skip_completion_wakeups, skip_best_effort_wakeups;
    PARSE("nIIKpp", &offset, &seen, &spin_us, &timeout_us, &skip_completion_wakeups, &skip_best_effort_wakeups);
    struct bell *bell = locate(&buffer, offset, sizeof *bell);
    if (bell) {
        uint32_t strokes;
        Py_BEGIN_ALLOW_THREADS
        if (skip_completion_wakeups) strokes = bell_wait_skipping_completions(bell, seen, spin_us, timeout_us);
        else if (skip_best_effort_wakeups) strokes = bell_wait_skipping_best_effort(bell, seen, spin_us, timeout_us);
        else strokes = bell_wait(bell, seen, spin_us, timeout_us);
        Py_END_ALLOW_THREADS
        result = PyLong_FromUnsignedLong(strokes);
    }
    FINISH;
}

PyMethodDef ring_methods[] = {
    METHOD(ring_init),
    METHOD(ring_send),
    METHOD(ring_receive),
    METHOD(rings_drain),
    METHOD(ring_pending),
    METHOD(ring_discard),
    METHOD(bell_ring),
    METHOD(bell_arm),
    METHOD(bell_ring_for_best_effort),
    METHOD(bell_seen),
    METHOD(bell_ring_for_control),
    METHOD(bell_control_seq),
    METHOD(bell_take_over),
    METHOD(bell_wait),
    {NULL, NULL, 0, NULL},
};
