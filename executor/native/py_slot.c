/* Python's access to request slots in a buffer. */
#include "py_buffer.h"

#include "slot.h"
#include "wait.h"

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
        result = Py_BuildValue("III", slot_state(word), slot_status(word), slot_generation(word));
    }
    FINISH;
}

FUNCTION(py_slot_change) {
    unsigned int number, generation, mask, state, status;
    PARSE("IIIII", &number, &generation, &mask, &state, &status);
    struct slot *slot = find_slot(&buffer, number);
    if (slot) result = PyBool_FromLong(slot_change(slot, generation, mask, state, status));
    FINISH;
}

/* Writes places into the slot; more than it has room for into a list at `list_at`, which moves behind that. */
static bool read_places(const Py_buffer *buffer, PyObject *places, _Atomic uint64_t *offsets, unsigned long long *list_at) {
    Py_ssize_t count = PyTuple_Size(places);
    if (count > MAX_TENSORS) {
        PyErr_Format(PyExc_ValueError, "at most %d inputs and outputs", MAX_TENSORS);
        return false;
    }
    if (count > INLINE_PLACES) {
        atomic_store_explicit(offsets, *list_at, memory_order_relaxed);
        offsets = locate(buffer, (Py_ssize_t)*list_at, (size_t)count * sizeof *offsets);
        if (!offsets) return false;
        *list_at += (size_t)count * sizeof *offsets;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        atomic_store_explicit(&offsets[i], PyLong_AsUnsignedLongLong(PyTuple_GetItem(places, i)), memory_order_relaxed);
    }
    return !PyErr_Occurred();
}

/* What a front end asks for: the fields of Python's SlotRequest, in its order. Nothing is known of an answer. */
static bool fill(const Py_buffer *buffer, struct slot *slot, PyObject *request) {
    unsigned int model_id, rows, max_queue;
    int priority, rejects_late, by_bell, delays;
    unsigned long long arrival_ns, deadline_ns, input_bytes, output_bytes, limit_ns, join_key, compound, list_at, queue_end_ns;
    PyObject *inputs, *outputs;
    if (!PyArg_ParseTuple(request, "IIO!O!iKK(KK)KpIpKKKKp", &model_id, &rows, &PyTuple_Type, &inputs, &PyTuple_Type, &outputs,
                          &priority, &arrival_ns, &deadline_ns, &input_bytes, &output_bytes, &limit_ns, &rejects_late, &max_queue,
                          &by_bell, &join_key, &compound, &list_at, &queue_end_ns, &delays)) {
        return false;
    }
    if (!read_places(buffer, inputs, slot->input_offset, &list_at)) return false;
    if (!read_places(buffer, outputs, slot->output_offset, &list_at)) return false;
    size_t begin = offsetof(struct slot, cancel);
    memset((char *)slot + begin, 0, offsetof(struct slot, parts_done) - begin);
    slot->model_id = model_id, slot->priority = priority;
    atomic_store_explicit(&slot->rows, rows, memory_order_relaxed);
    slot->arrival_ns = arrival_ns ? arrival_ns : now_ns();
    slot->deadline_ns = deadline_ns, slot->limit_ns = limit_ns;
    slot->input_frame_bytes = input_bytes, slot->output_frame_bytes = output_bytes;
    atomic_store_explicit(&slot->join_key, join_key, memory_order_relaxed);
    slot->compound = compound, slot->rejects_late = (uint32_t)rejects_late, slot->max_queue = max_queue;
    slot->queue_end_ns = queue_end_ns, slot->delays = (uint32_t)delays;
    atomic_store_explicit(&slot->by_bell, (uint32_t)by_bell, memory_order_relaxed);
    return true;
}

FUNCTION(py_slot_fill) {
    unsigned int number;
    PyObject *request;
    PARSE("IO!", &number, &PyTuple_Type, &request);
    struct slot *slot = find_slot(&buffer, number);
    if (slot && fill(&buffer, slot, request)) result = Py_NewRef(Py_None);
    FINISH;
}

FUNCTION(py_slot_submit) {
    unsigned int number;
    PARSE("I", &number);
    struct slot *slot = find_slot(&buffer, number);
    if (slot) result = PyLong_FromUnsignedLong(slot_submit(slot));
    FINISH;
}

FUNCTION(py_slot_release) {
    unsigned int number;
    PARSE("I", &number);
    struct slot *slot = find_slot(&buffer, number);
    if (slot) result = PyBool_FromLong(slot_release(slot));
    FINISH;
}

FUNCTION(py_slot_see) {
    unsigned int number, generation;
    PARSE("II", &number, &generation);
    struct slot *slot = find_slot(&buffer, number);
    if (slot) result = PyBool_FromLong(slot_see(slot, generation));
    FINISH;
}

FUNCTION(py_slot_start) {
    unsigned int number, generation, parts, batch_rows;
    int leads;
    PARSE("IIIIp", &number, &generation, &parts, &batch_rows, &leads);
    struct slot *slot = find_slot(&buffer, number);
    if (slot && (parts < 1 || parts > MAX_PARTS)) {
        PyErr_Format(PyExc_ValueError, "a request has 1 to %d parts, not %u", MAX_PARTS, parts);
    } else if (slot) {
        result = PyBool_FromLong(slot_start(slot, generation, parts, batch_rows, leads));
    }
    FINISH;
}

FUNCTION(py_slot_lead) {
    unsigned int number, generation;
    int leads;
    PARSE("IIp", &number, &generation, &leads);
    struct slot *slot = find_slot(&buffer, number);
    if (slot) result = PyBool_FromLong(slot_lead(slot, generation, leads));
    FINISH;
}

FUNCTION(py_slot_part_is_done) {
    unsigned int number, generation, part;
    PARSE("III", &number, &generation, &part);
    struct slot *slot = find_slot(&buffer, number);
    if (slot && part >= MAX_PARTS) {
        PyErr_Format(PyExc_ValueError, "part %u of at most %d", part, MAX_PARTS);
    } else if (slot) {
        result = PyBool_FromLong(slot_part_is_done(buffer.buf, slot, generation, part));
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
    for (Py_ssize_t i = 0; result && i < PyTuple_Size(numbers); i++) {
        PyObject *item = PyTuple_GetItem(numbers, i);
        unsigned long number = PyLong_AsUnsignedLong(item);
        struct slot *slot = PyErr_Occurred() ? NULL : find_slot(&buffer, number);
        if (!slot) Py_CLEAR(result);
        else if (slot_state(atomic_load(&slot->word)) == SLOT_DONE && PyList_Append(result, item) < 0) Py_CLEAR(result);
    }
    FINISH;
}

PyMethodDef slot_methods[] = {
    METHOD(slot_reset),
    METHOD(slot_acquire),
    METHOD(slot_read),
    METHOD(slot_change),
    METHOD(slot_fill),
    METHOD(slot_submit),
    METHOD(slot_release),
    METHOD(slot_see),
    METHOD(slot_start),
    METHOD(slot_lead),
    METHOD(slot_part_is_done),
    METHOD(slot_wait),
    METHOD(slot_wait_any),
    METHOD(slot_wake),
    METHOD(slots_done),
    {NULL, NULL, 0, NULL},
};
