/* Python's access to leases in a buffer. */
#include "py_buffer.h"

#include "lease.h"

/* Two byte strings, as the plan that begins with layer `first`. */
static bool read_plan(const char *versions, Py_ssize_t version_count, const char *ranks, Py_ssize_t block_count, struct plan *plan) {
    *plan = (struct plan){(const uint8_t *)versions, (const uint8_t *)ranks, (uint32_t)version_count, (uint32_t)block_count};
    bool sound = version_count <= MAX_LAYERS && block_count <= MAX_LAYERS;
    for (Py_ssize_t i = 0; sound && i < version_count; i++) sound = plan->versions[i] < MAX_VERSIONS;
    for (Py_ssize_t i = 0; sound && i < block_count; i++) sound = plan->block_ranks[i] <= MAX_RANKS;
    if (!sound) PyErr_Format(PyExc_ValueError, "no such plan: %zd versions, %zd blocks' ranks", version_count, block_count);
    return sound;
}

static bool spec_is_sound(const struct lease_spec *spec) {
    bool layers = spec->first_layer < spec->end_layer && spec->end_layer <= MAX_LAYERS;
    bool ranks = spec->wanted >= 1 && spec->wanted <= MAX_RANKS;
    if (spec->passes == 0 || spec->pass_layers > MAX_LAYERS || (uint64_t)spec->pass_layers * spec->passes > MAX_PHASES) {
        PyErr_Format(PyExc_ValueError, "no such lease: %u passes of %u layers", spec->passes, spec->pass_layers);
        return false;
    }
    if (!layers || !ranks) {
        PyErr_Format(PyExc_ValueError, "no such lease: layers [%u, %u), %u ranks", spec->first_layer, spec->end_layer, spec->wanted);
    }
    return layers && ranks;
}

/* One tuple of numbers, in the order of the struct. */
static bool read_member(PyObject *tuple, struct member *member) {
#define ADDRESS(TYPE, NAME, DIMENSION) &member->NAME,
    uint32_t *fields[] = {MEMBER(ADDRESS)};
    const Py_ssize_t count = sizeof fields / sizeof *fields;
    bool sound = PyTuple_Check(tuple) && PyTuple_Size(tuple) == count;
    for (Py_ssize_t i = 0; sound && i < count; i++) {
        unsigned long number = PyLong_AsUnsignedLong(PyTuple_GetItem(tuple, i));
        if (PyErr_Occurred()) return false;
        *fields[i] = (uint32_t)number;
        sound = number <= UINT32_MAX;
    }
    sound = sound && member->rows > 0;
    if (!sound) PyErr_Format(PyExc_ValueError, "no such member: %R", tuple);
    return sound;
}

static bool read_members(PyObject *tuples, struct member *members, uint32_t *count) {
    Py_ssize_t length = PyTuple_Size(tuples);
    if (length < 1 || length > MAX_MEMBERS) return PyErr_Format(PyExc_ValueError, "a lease of %zd requests", length), false;
    for (*count = 0; *count < length; ++*count) {
        if (!read_member(PyTuple_GetItem(tuples, *count), &members[*count])) return false;
    }
    return true;
}

FUNCTION(py_lease_initialise) {
    Py_ssize_t offset, version_count, block_count;
    struct member members[MAX_MEMBERS];
    struct lease_spec spec = {.members = members};
    PyObject *tuples;
    unsigned long long arena_offset, arena_stride;
    const char *versions, *ranks;
    PARSE("nIO!KKIIy#IIIIy#", &offset, &spec.model_id, &PyTuple_Type, &tuples, &arena_offset, &arena_stride, &spec.first_layer,
          &spec.end_layer, &versions, &version_count, &spec.wanted, &spec.timeout_us, &spec.pass_layers, &spec.passes, &ranks, &block_count);
    spec.arena_offset = arena_offset;
    spec.arena_stride = arena_stride;
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    bool sound = lease && read_plan(versions, version_count, ranks, block_count, &spec.plan);
    if (sound && spec_is_sound(&spec) && read_members(tuples, members, &spec.member_count)) {
        result = PyLong_FromUnsignedLong(lease_initialise(lease, &spec));
    }
    FINISH;
}

FUNCTION(py_lease_resume) {
    Py_ssize_t offset, version_count, block_count;
    unsigned int end_layer, wanted;
    const char *versions, *ranks;
    struct plan plan;
    PARSE("nIIy#y#", &offset, &end_layer, &wanted, &versions, &version_count, &ranks, &block_count);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    bool sound = lease && phase_step(lease, phase_unpack(atomic_load(&lease->phase)).number) < end_layer && end_layer <= MAX_LAYERS;
    sound = sound && wanted >= 1 && wanted <= MAX_RANKS;
    if (lease && !sound) {
        PyErr_Format(PyExc_ValueError, "cannot resume to layer %u with %u ranks", end_layer, wanted);
    } else if (lease && read_plan(versions, version_count, ranks, block_count, &plan)) {
        lease_resume(lease, end_layer, wanted, plan);
        result = Py_NewRef(Py_None);
    }
    FINISH;
}

FUNCTION(py_lease_plan) {
    Py_ssize_t offset, version_count, block_count;
    unsigned int step;
    const char *versions, *ranks;
    struct plan plan;
    PARSE("nIy#y#", &offset, &step, &versions, &version_count, &ranks, &block_count);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    if (lease && read_plan(versions, version_count, ranks, block_count, &plan)) {
        lease_plan(lease, step, plan);
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

FUNCTION(py_lease_resize) {
    Py_ssize_t offset;
    unsigned int before, wanted;
    PARSE("nII", &offset, &before, &wanted);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    if (lease && (wanted < 1 || wanted > MAX_RANKS)) {
        PyErr_Format(PyExc_ValueError, "a gang has 1 to %d ranks, not %u", MAX_RANKS, wanted);
    } else if (lease) {
        result = PyBool_FromLong(lease_resize(lease, before, wanted));
    }
    FINISH;
}

/* (ranks that are wanted, planned blocks that have begun, layers in another version than the first) */
FUNCTION(py_lease_blocks) {
    Py_ssize_t offset;
    PARSE("n", &offset);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    if (lease) {
        result = Py_BuildValue("III", atomic_load(&lease->wanted), atomic_load(&lease->blocks), atomic_load(&lease->version_layers));
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
        struct phase_state state = phase_unpack(atomic_load(&lease->phase));
        result = Py_BuildValue("IIIIKN", state.kind, phase_step(lease, state.number), state.number, atomic_load(&lease->finished),
                               (unsigned long long)atomic_load(&lease->present), PyBool_FromLong(atomic_load(&lease->aborted)));
    }
    FINISH;
}

FUNCTION(py_lease_generation) {
    Py_ssize_t offset;
    PARSE("n", &offset);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    if (lease) result = PyLong_FromUnsignedLong(atomic_load(&lease->generation));
    FINISH;
}

FUNCTION(py_lease_start_ns) {
    Py_ssize_t offset;
    PARSE("n", &offset);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    if (lease) result = PyLong_FromUnsignedLongLong(atomic_load(&lease->start_ns));
    FINISH;
}

/* (kind, step, when that step began: 0 if no rank has come yet) */
FUNCTION(py_lease_position) {
    Py_ssize_t offset;
    PARSE("n", &offset);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    if (lease) {
        struct phase_state state = phase_unpack(atomic_load(&lease->phase));
        uint32_t step = phase_step(lease, state.number);
        uint32_t before = step < MAX_LAYERS ? step : MAX_LAYERS;
        uint64_t began_ns = before ? atomic_load(&lease->layer_end_ns[before - 1]) : atomic_load(&lease->start_ns);
        result = Py_BuildValue("IIK", state.kind, step, (unsigned long long)began_ns);
    }
    FINISH;
}

/* What a look at a running server shows: (model, generation, members, ranks that are wanted, step, start). Not all of one moment. */
FUNCTION(py_lease_glance) {
    Py_ssize_t offset;
    PARSE("n", &offset);
    struct lease *lease = locate(&buffer, offset, sizeof *lease);
    if (lease) {
        struct phase_state state = phase_unpack(atomic_load(&lease->phase));
        result = Py_BuildValue("IIIIIK", lease->model_id, atomic_load(&lease->generation), lease->member_count, atomic_load(&lease->wanted),
                               phase_step(lease, state.number), (unsigned long long)atomic_load(&lease->start_ns));
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
            else PyList_SetItem(result, layer - first, number);
        }
    }
    FINISH;
}

PyMethodDef lease_methods[] = {
    METHOD(lease_initialise),
    METHOD(lease_resume),
    METHOD(lease_set_control),
    METHOD(lease_plan),
    METHOD(lease_resize),
    METHOD(lease_blocks),
    METHOD(lease_abort),
    METHOD(lease_progress),
    METHOD(lease_generation),
    METHOD(lease_start_ns),
    METHOD(lease_position),
    METHOD(lease_glance),
    METHOD(lease_layer_end_ns),
    {NULL, NULL, 0, NULL},
};
