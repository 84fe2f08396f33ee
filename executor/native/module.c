/* The module gangway.executor._native; executor/_native.pyi says what it offers. */
#include "python.h"

#include <stddef.h>

#include "layout.h"
#include "reception.h"
#include "slot.h"
#include "worker.h"

/* Offsets and sizes that the Python side relies on; tests/executor/test_layout.py compares them. */
static const struct { const char *name; size_t value; } layout[] = {
    {"message", sizeof(struct message)},
    {"message.kind", offsetof(struct message, kind)},
    {"message.request.slot", offsetof(struct message, request.slot)},
    {"message.request.generation", offsetof(struct message, request.generation)},
    {"message.gang.lease", offsetof(struct message, gang.lease)},
    {"message.gang.rank", offsetof(struct message, gang.rank)},
    {"message.gang.generation", offsetof(struct message, gang.generation)},
    {"message.gang.reason", offsetof(struct message, gang.reason)},
    {"message.gang.joined_ns", offsetof(struct message, gang.joined_ns)},
    {"message.gang.left_ns", offsetof(struct message, gang.left_ns)},
    {"message.model.model_id", offsetof(struct message, model.model_id)},
    {"message.model.ok", offsetof(struct message, model.ok)},
    {"message.model.text", offsetof(struct message, model.text)},
    {"message.ready.pid", offsetof(struct message, ready.pid)},
    {"slot", sizeof(struct slot)},
    {"slot.cancel", offsetof(struct slot, cancel)},
    {"slot.attempts", offsetof(struct slot, attempts)},
    {"slot.model_id", offsetof(struct slot, model_id)},
    {"slot.rows", offsetof(struct slot, rows)},
    {"slot.priority", offsetof(struct slot, priority)},
    {"slot.ranks", offsetof(struct slot, ranks)},
    {"slot.arrival_ns", offsetof(struct slot, arrival_ns)},
    {"slot.deadline_ns", offsetof(struct slot, deadline_ns)},
    {"slot.compute_start_ns", offsetof(struct slot, compute_start_ns)},
    {"slot.compute_end_ns", offsetof(struct slot, compute_end_ns)},
    {"slot.input_frame_bytes", offsetof(struct slot, input_frame_bytes)},
    {"slot.output_frame_bytes", offsetof(struct slot, output_frame_bytes)},
    {"slot.limit_ns", offsetof(struct slot, limit_ns)},
    {"slot.join_key", offsetof(struct slot, join_key)},
    {"slot.blocks", offsetof(struct slot, blocks)},
    {"slot.conflicts", offsetof(struct slot, conflicts)},
    {"slot.preemptions", offsetof(struct slot, preemptions)},
    {"slot.versions", offsetof(struct slot, versions)},
    {"slot.rejects_late", offsetof(struct slot, rejects_late)},
    {"slot.max_queue", offsetof(struct slot, max_queue)},
    {"slot.by_bell", offsetof(struct slot, by_bell)},
    {"slot.parts", offsetof(struct slot, parts)},
    {"slot.batch_rows", offsetof(struct slot, batch_rows)},
    {"slot.leads", offsetof(struct slot, leads)},
    {"slot.parts_done", offsetof(struct slot, parts_done)},
    {"slot.failure", offsetof(struct slot, failure)},
    {"slot.reason", offsetof(struct slot, reason)},
    {"slot.bell", offsetof(struct slot, bell)},
    {"slot.input_offset", offsetof(struct slot, input_offset)},
    {"slot.output_offset", offsetof(struct slot, output_offset)},
    {"bell.sleeping", offsetof(struct bell, sleeping)},
    {"bell.patient", offsetof(struct bell, patient)},
    {"bell.calm", offsetof(struct bell, calm)},
    {"worker_status.pid", offsetof(struct worker_status, pid)},
    {"worker_status.busy", offsetof(struct worker_status, busy)},
    {"worker_status.lease", offsetof(struct worker_status, lease)},
    {"worker_status.runs", offsetof(struct worker_status, runs)},
    {"worker_status.busy_ns", offsetof(struct worker_status, busy_ns)},
};

static bool add_layout(PyObject *module) {
    PyObject *dictionary = PyDict_New();
    bool good = dictionary != NULL;
    for (size_t i = 0; good && i < sizeof layout / sizeof *layout; i++) {
        PyObject *value = PyLong_FromSize_t(layout[i].value);
        good = value && PyDict_SetItemString(dictionary, layout[i].name, value) == 0;
        Py_XDECREF(value);
    }
    good = good && PyModule_AddObjectRef(module, "LAYOUT", dictionary) == 0;
    Py_XDECREF(dictionary);
    return good;
}

static bool add_functions(PyObject *module) {
    return PyModule_AddFunctions(module, ring_methods) == 0 && PyModule_AddFunctions(module, slot_methods) == 0 &&
           PyModule_AddFunctions(module, lease_methods) == 0 && PyModule_AddFunctions(module, counter_methods) == 0;
}

static bool add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type) {
    *type = (PyTypeObject *)PyType_FromSpec(spec);
    return *type && PyModule_AddType(module, *type) == 0;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Shared-memory operations and the layer loop.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    PyTypeObject *worker_type, *reception_type;
    if (module && add_layout(module) && add_functions(module) && add_type(module, &program_type_spec, &program_type) &&
        add_type(module, &worker_type_spec, &worker_type) && add_type(module, &reception_type_spec, &reception_type) &&
        PyModule_AddIntConstant(module, "BELL_BYTES", sizeof(struct bell)) == 0 &&
        PyModule_AddIntConstant(module, "RING_HEADER_BYTES", sizeof(struct ring)) == 0 &&
        PyModule_AddIntConstant(module, "STATUS_BYTES", sizeof(struct worker_status)) == 0 &&
        PyModule_AddIntConstant(module, "LEASE_BYTES", sizeof(struct lease)) == 0 &&
        PyModule_AddIntConstant(module, "MAX_AWAITED", MAX_AWAITED) == 0 &&
        PyModule_AddIntConstant(module, "ENOUGH_GONE", ENOUGH_GONE) == 0 &&
        PyModule_AddIntConstant(module, "MAX_MEMBERS", MAX_MEMBERS) == 0 &&
        PyModule_AddIntConstant(module, "MAX_LAYERS", MAX_LAYERS) == 0 &&
        PyModule_AddIntConstant(module, "MAX_PAGES", MAX_PAGES) == 0 &&
        PyModule_AddIntConstant(module, "MAX_MODELS", MAX_MODELS) == 0 &&
        PyModule_AddIntConstant(module, "MAX_PARTS", MAX_PARTS) == 0 &&
        PyModule_AddIntConstant(module, "MAX_RANKS", MAX_RANKS) == 0 &&
        PyModule_AddIntConstant(module, "MAX_REGIONS", MAX_REGIONS) == 0 &&
        PyModule_AddIntConstant(module, "REGION_SHIFT", REGION_SHIFT) == 0 &&
        PyModule_AddIntConstant(module, "REGION_ALIGNMENT", REGION_ALIGNMENT) == 0) {
        return module;
    }
    Py_XDECREF(module);
    return NULL;
}
