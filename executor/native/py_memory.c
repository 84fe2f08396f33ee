/* Python's access to rings, bells, slots and leases in a buffer. Functions that wait release the GIL; the others keep it, which makes
 * them atomic among the threads of a process. */
#include "python.h"

#include "lease.h"
#include "ring.h"
#include "slot.h"

void *locate(const Py_buffer *buffer, Py_ssize_t offset, size_t size_bytes) {
    if (offset >= 0 && offset % 8 == 0 && size_bytes <= (size_t)buffer->len && (size_t)offset <= (size_t)buffer->len - size_bytes) {
        return (char *)buffer->buf + offset;
    }
    PyErr_Format(PyExc_ValueError, "%zu bytes at offset %zd are not inside a buffer of %zd bytes", size_bytes, offset, buffer->len);
    return NULL;
}

/* Every function below begins with these: parse the buffer and the numbers, find the object. */
#define PARSE(format, ...)                                                     \
    Py_buffer buffer;                                                          \
    PyObject *result = NULL;                                                   \
    (void)module;                                                              \
    if (!PyArg_ParseTuple(arguments, "w*" format, &buffer, __VA_ARGS__)) return NULL
#define FINISH                  \
    PyBuffer_Release(&buffer);  \
    return result
#define FUNCTION(name) static PyObject *name(PyObject *module, PyObject *arguments)

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
    for (Py_ssize_t i = 0; result && i < PyTuple_GET_SIZE(offsets); i++) {
        Py_ssize_t offset = PyLong_AsSsize_t(PyTuple_GET_ITEM(offsets, i));
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

FUNCTION(py_bell_ring) {
    Py_ssize_t offset;
    PARSE("n", &offset);
    struct bell *bell = locate(&buffer, offset, sizeof *bell);
    if (bell) {
        bell_ring(bell);
        result = Py_NewRef(Py_None);
    }
    FINISH;
}

FUNCTION(py_bell_seen) {
    Py_ssize_t offset;
    PARSE("n", &offset);
    struct bell *bell = locate(&buffer, offset, sizeof *bell);
    if (bell) result = PyLong_FromUnsignedLong(bell_seen(bell));
    FINISH;
}

FUNCTION(py_bell_wait) {
    Py_ssize_t offset;
    unsigned int seen, spin_us;
    unsigned long long timeout_us;
    PARSE("nIIK", &offset, &seen, &spin_us, &timeout_us);
    struct bell *bell = locate(&buffer, offset, sizeof *bell);
    if (bell) {
        uint32_t strokes;
        Py_BEGIN_ALLOW_THREADS
        strokes = bell_wait(bell, seen, spin_us, timeout_us);
        Py_END_ALLOW_THREADS
        result = PyLong_FromUnsignedLong(strokes);
    }
    FINISH;
}

static struct slot *find_slot(const Py_buffer *buffer, unsigned int slot) {
    return locate(buffer, (Py_ssize_t)slot * (Py_ssize_t)sizeof(struct slot), sizeof(struct slot));
}

FUNCTION(py_slot_reset) {
    unsigned int number;
    PARSE("I", &number);
    struct slot *slot = find_slot(&buffer, number);
    if (slot) {
        slot_reset(slot);
        result = Py_NewRef(Py_None);
    }
    FINISH;
}

FUNCTION(py_slot_acquire) {
    unsigned int count, first;
    PARSE("II", &count, &first);
    struct slot *slots = locate(&buffer, 0, (size_t)count * sizeof *slots);
    if (slots) result = PyLong_FromLong(slot_acquire(slots, count, first));
    FINISH;
}

FUNCTION(py_slot_read) {
    unsigned int number;
    PARSE("I", &number);
    struct slot *slot = find_slot(&buffer, number);
    if (slot) {
        uint64_t word = atomic_load(&slot->word);
        result = Py_BuildValue("III", slot_state(word), slot_status(word), slot_sequence(word));
    }
    FINISH;
}

FUNCTION(py_slot_change) {
    unsigned int number, sequence, mask, state, status;
    PARSE("IIIII", &number, &sequence, &mask, &state, &status);
    struct slot *slot = find_slot(&buffer, number);
    if (slot) result = PyBool_FromLong(slot_change(slot, sequence, mask, state, status));
    FINISH;
}

FUNCTION(py_slot_start) {
    unsigned int number, sequence, parts, batch_rows;
    int leads;
    PARSE("IIIIp", &number, &sequence, &parts, &batch_rows, &leads);
    struct slot *slot = find_slot(&buffer, number);
    if (slot && (parts < 1 || parts > MAX_PARTS)) {
        PyErr_Format(PyExc_ValueError, "a request has 1 to %d parts, not %u", MAX_PARTS, parts);
    } else if (slot) {
        result = PyBool_FromLong(slot_start(slot, sequence, parts, batch_rows, leads));
    }
    FINISH;
}

FUNCTION(py_slot_part_is_done) {
    unsigned int number, sequence, part;
    PARSE("III", &number, &sequence, &part);
    struct slot *slot = find_slot(&buffer, number);
    if (slot && part >= MAX_PARTS) {
        PyErr_Format(PyExc_ValueError, "part %u of at most %d", part, MAX_PARTS);
    } else if (slot) {
        result = PyBool_FromLong(slot_part_is_done(buffer.buf, slot, sequence, part));
    }
    FINISH;
}

FUNCTION(py_slot_wait) {
    unsigned int number, spin_us;
    unsigned long long timeout_us;
    PARSE("IIK", &number, &spin_us, &timeout_us);
    struct slot *slot = find_slot(&buffer, number);
    if (slot) {
        bool done;
        Py_BEGIN_ALLOW_THREADS
        done = slot_wait(slot, spin_us, timeout_us);
        Py_END_ALLOW_THREADS
        result = PyBool_FromLong(done);
    }
    FINISH;
}

/* The numbers of the slots are 32 bits each, one after the other. */
FUNCTION(py_slot_wait_any) {
    const char *numbers;
    Py_ssize_t length;
    unsigned int spin_us;
    unsigned long long timeout_us;
    PARSE("y#IK", &numbers, &length, &spin_us, &timeout_us);
    struct slot *slots[MAX_AWAITED];
    size_t count = (size_t)length / sizeof(uint32_t);
    bool found = count >= 1 && count <= MAX_AWAITED && (size_t)length % sizeof(uint32_t) == 0;
    if (!found) PyErr_Format(PyExc_ValueError, "numbers of 1 to %d slots, not %zd bytes", MAX_AWAITED, length);
    for (size_t i = 0; found && i < count; i++) {
        uint32_t number;
        memcpy(&number, numbers + i * sizeof number, sizeof number);
        slots[i] = find_slot(&buffer, number);
        found = slots[i] != NULL;
    }
    if (found) {
        bool done;
        Py_BEGIN_ALLOW_THREADS
        done = slot_wait_any(slots, (uint32_t)count, spin_us, timeout_us);
        Py_END_ALLOW_THREADS
        result = PyBool_FromLong(done);
    }
    FINISH;
}

FUNCTION(py_slot_wake) {
    unsigned int number;
    PARSE("I", &number);
    struct slot *slot = find_slot(&buffer, number);
    if (slot) {
        slot_wake(buffer.buf, slot);
        result = Py_NewRef(Py_None);
    }
    FINISH;
}

/* Which of the slots in a tuple are DONE. */
FUNCTION(py_slots_done) {
    PyObject *numbers;
    PARSE("O!", &PyTuple_Type, &numbers);
    result = PyList_New(0);
    for (Py_ssize_t i = 0; result && i < PyTuple_GET_SIZE(numbers); i++) {
        PyObject *item = PyTuple_GET_ITEM(numbers, i);
        unsigned long number = PyLong_AsUnsignedLong(item);
        struct slot *slot = PyErr_Occurred() ? NULL : find_slot(&buffer, number);
        if (!slot) Py_CLEAR(result);
        else if (slot_state(atomic_load(&slot->word)) == SLOT_DONE && PyList_Append(result, item) < 0) Py_CLEAR(result);
    }
    FINISH;
}

static bool versions_are_sound(const uint8_t *versions, size_t count) {
    bool sound = count <= MAX_LAYERS;
    for (size_t i = 0; sound && i < count; i++) sound = versions[i] < MAX_VERSIONS;
    return sound;
}

static bool spec_is_sound(const struct lease_spec *spec) {
    bool layers = spec->first_layer < spec->end_layer && spec->end_layer <= MAX_LAYERS;
    bool ranks = spec->wanted >= 1 && spec->wanted <= MAX_RANKS;
    layers = layers && versions_are_sound(spec->versions, spec->version_count);
    if (!layers || !ranks) {
        PyErr_Format(PyExc_ValueError, "no such lease: layers [%u, %u), %u ranks", spec->first_layer, spec->end_layer, spec->wanted);
    }
    return layers && ranks;
}

/* One tuple of numbers, in the order of the struct. */
static bool read_member(PyObject *tuple, struct member *member) {
    uint32_t *fields[] = {&member->front_end, &member->slot, &member->sequence, &member->first_row, &member->rows, &member->part};
    const Py_ssize_t count = sizeof fields / sizeof *fields;
    bool sound = PyTuple_Check(tuple) && PyTuple_GET_SIZE(tuple) == count;
    for (Py_ssize_t i = 0; sound && i < count; i++) {
        unsigned long number = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(tuple, i));
        if (PyErr_Occurred()) return false;
        *fields[i] = (uint32_t)number;
        sound = number <= UINT32_MAX;
    }
    sound = sound && member->rows > 0;
    if (!sound) PyErr_Format(PyExc_ValueError, "no such member: %R", tuple);
    return sound;
}

static bool read_members(PyObject *tuples, struct member *members, uint32_t *count) {
    Py_ssize_t length = PyTuple_GET_SIZE(tuples);
    if (length < 1 || length > MAX_MEMBERS) return PyErr_Format(PyExc_ValueError, "a lease of %zd requests", length), false;
    for (*count = 0; *count < length; ++*count) {
        if (!read_member(PyTuple_GET_ITEM(tuples, *count), &members[*count])) return false;
    }
    return true;
}

FUNCTION(py_lease_initialise) {
    Py_ssize_t offset, version_count;
    struct member members[MAX_MEMBERS];
    struct lease_spec spec = {.members = members};
    PyObject *tuples;
    unsigned long long arena_offset, arena_stride;
    const char *versions;
    PARSE("nIO!KKIIy#II", &offset, &spec.model_id, &PyTuple_Type, &tuples, &arena_offset, &arena_stride, &spec.first_layer,
          &spec.end_layer, &versions, &version_count, &spec.wanted, &spec.timeout_us);
    spec.arena_offset = arena_offset;
    spec.arena_stride = arena_stride;
    spec.versions = (const uint8_t *)versions;
    spec.version_count = (uint32_t)(version_count > MAX_LAYERS ? MAX_LAYERS + 1 : version_count);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    if (lease && spec_is_sound(&spec) && read_members(tuples, members, &spec.member_count)) {
        result = PyLong_FromUnsignedLong(lease_initialise(lease, &spec));
    }
    FINISH;
}

FUNCTION(py_lease_resume) {
    Py_ssize_t offset, version_count;
    unsigned int end_layer, wanted;
    const char *versions;
    PARSE("nIIy#", &offset, &end_layer, &wanted, &versions, &version_count);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    const uint8_t *numbers = (const uint8_t *)versions;
    bool sound = lease && phase_unpack(atomic_load(&lease->phase)).layer < end_layer && end_layer <= MAX_LAYERS;
    sound = sound && wanted >= 1 && wanted <= MAX_RANKS;
    if (lease && !(sound && versions_are_sound(numbers, (size_t)version_count))) {
        PyErr_Format(PyExc_ValueError, "cannot resume to layer %u with %u ranks and %zd versions", end_layer, wanted, version_count);
    } else if (lease) {
        lease_resume(lease, end_layer, wanted, numbers, (uint32_t)version_count);
        result = Py_NewRef(Py_None);
    }
    FINISH;
}

FUNCTION(py_lease_set_control) {
    Py_ssize_t offset;
    unsigned int control;
    PARSE("nI", &offset, &control);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    if (lease) {
        lease_set_control(lease, control);
        result = Py_NewRef(Py_None);
    }
    FINISH;
}

FUNCTION(py_lease_set_wanted) {
    Py_ssize_t offset;
    unsigned int wanted;
    PARSE("nI", &offset, &wanted);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    if (lease && (wanted < 1 || wanted > MAX_RANKS)) {
        PyErr_Format(PyExc_ValueError, "a gang has 1 to %d ranks, not %u", MAX_RANKS, wanted);
    } else if (lease) {
        lease_set_wanted(lease, wanted);
        result = Py_NewRef(Py_None);
    }
    FINISH;
}

FUNCTION(py_lease_abort) {
    Py_ssize_t offset;
    PARSE("n", &offset);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    if (lease) {
        lease_abort(lease);
        result = Py_NewRef(Py_None);
    }
    FINISH;
}

FUNCTION(py_lease_progress) {
    Py_ssize_t offset;
    PARSE("n", &offset);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    if (lease) {
        struct phase phase = phase_unpack(atomic_load(&lease->phase));
        result = Py_BuildValue("IIIKN", phase.kind, phase.layer, atomic_load(&lease->finished),
                               (unsigned long long)atomic_load(&lease->present), PyBool_FromLong(atomic_load(&lease->aborted)));
    }
    FINISH;
}

FUNCTION(py_lease_term) {
    Py_ssize_t offset;
    PARSE("n", &offset);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    if (lease) result = PyLong_FromUnsignedLong(atomic_load(&lease->term));
    FINISH;
}

FUNCTION(py_lease_start_ns) {
    Py_ssize_t offset;
    PARSE("n", &offset);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    if (lease) result = PyLong_FromUnsignedLongLong(atomic_load(&lease->start_ns));
    FINISH;
}

/* (kind, layer, when that layer began: 0 if no rank has come yet) */
FUNCTION(py_lease_position) {
    Py_ssize_t offset;
    PARSE("n", &offset);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    if (lease) {
        struct phase phase = phase_unpack(atomic_load(&lease->phase));
        uint32_t before = phase.layer < MAX_LAYERS ? phase.layer : MAX_LAYERS;
        uint64_t began_ns = before ? atomic_load(&lease->layer_end_ns[before - 1]) : atomic_load(&lease->start_ns);
        result = Py_BuildValue("IIK", phase.kind, phase.layer, (unsigned long long)began_ns);
    }
    FINISH;
}

FUNCTION(py_lease_layer_end_ns) {
    Py_ssize_t offset;
    unsigned int first, end;
    PARSE("nII", &offset, &first, &end);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    if (lease && (first > end || end > MAX_LAYERS)) {
        PyErr_Format(PyExc_ValueError, "no layers [%u, %u)", first, end);
    } else if (lease && (result = PyList_New(end - first))) {
        for (uint32_t layer = first; layer < end && result; layer++) {
            PyObject *number = PyLong_FromUnsignedLongLong(atomic_load(&lease->layer_end_ns[layer]));
            if (!number) Py_CLEAR(result);
            else PyList_SET_ITEM(result, layer - first, number);
        }
    }
    FINISH;
}

#define METHOD(name) {#name, py_##name, METH_VARARGS, NULL}
PyMethodDef memory_methods[] = {
    METHOD(ring_init),        METHOD(ring_send),        METHOD(ring_receive), METHOD(ring_pending),
    METHOD(ring_discard),     METHOD(bell_ring),        METHOD(bell_seen),    METHOD(bell_wait),
    METHOD(slot_reset),       METHOD(slot_acquire),     METHOD(slot_read),    METHOD(slot_change),
    METHOD(slot_start),       METHOD(slot_part_is_done),
    METHOD(slot_wait),        METHOD(slot_wait_any),    METHOD(slot_wake),        METHOD(slots_done),
    METHOD(lease_initialise), METHOD(lease_resume),
    METHOD(lease_set_control), METHOD(lease_set_wanted), METHOD(lease_abort), METHOD(lease_progress),
    METHOD(lease_term),       METHOD(lease_start_ns),   METHOD(lease_layer_end_ns),
    METHOD(lease_position),   METHOD(rings_drain),      {"counters_add", (PyCFunction)(void (*)(void))py_counters_add, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
