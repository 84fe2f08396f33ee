/* The module gangway.executor._native; executor/_native.pyi says what it offers. */
#include "python.h"

#include <stddef.h>

#include "layout.h"
#include "fast_path.h"
#include "slot.h"

PyObject *numbers(const uint32_t *values, uint32_t count) {
    PyObject *tuple = PyTuple_New(count);
    for (uint32_t i = 0; tuple && i < count; i++) {
        PyObject *number = PyLong_FromUnsignedLong(values[i]);
        if (number) PyTuple_SetItem(tuple, i, number);
        else Py_CLEAR(tuple);
    }
    return tuple;
}

struct field {
    const char *name;
    size_t offset, size_bytes;
    const char *type; /* a letter of Python's module struct: of an array's elements; s: bytes; empty: another struct */
};

#define TYPE_OF(FIELD)                                                                                                  \
    _Generic((FIELD), uint32_t: "I", int32_t: "i", uint64_t: "Q", double: "d", char *: "s", uint64_t *: "Q",            \
             _Atomic uint32_t *: "I", _Atomic uint64_t *: "Q", default: "")

/* Adds name: (size in bytes, {field: (offset, size in bytes, type)}), the fields in the order of the struct. */
static bool add_struct(PyObject *layout, const char *name, size_t size_bytes, const struct field *fields, size_t count) {
    PyObject *described = PyDict_New();
    bool good = described != NULL;
    for (size_t i = 0; good && i < count; i++) {
        PyObject *field = Py_BuildValue("nns", (Py_ssize_t)fields[i].offset, (Py_ssize_t)fields[i].size_bytes, fields[i].type);
        good = field && PyDict_SetItemString(described, fields[i].name, field) == 0;
        Py_XDECREF(field);
    }
    PyObject *entry = good ? Py_BuildValue("nO", (Py_ssize_t)size_bytes, described) : NULL;
    good = entry && PyDict_SetItemString(layout, name, entry) == 0;
    Py_XDECREF(entry);
    Py_XDECREF(described);
    return good;
}

#define DESCRIBE_FIELD(TYPE, NAME, DIMENSION) {#NAME, offsetof(self, NAME), sizeof(((self *)0)->NAME), TYPE_OF(((self *)0)->NAME)},
#define DEFINE_ADD(STRUCT, FIELDS)                                                                                      \
    static bool add_##STRUCT(PyObject *layout) {                                                                        \
        typedef struct STRUCT self;                                                                                     \
        static const struct field fields[] = {FIELDS(DESCRIBE_FIELD)};                                                  \
        return add_struct(layout, #STRUCT, sizeof(self), fields, sizeof fields / sizeof *fields);                       \
    }
STRUCTS(DEFINE_ADD)

static bool add_layout(PyObject *module) {
    PyObject *layout = PyDict_New();
#define ADD(STRUCT, FIELDS) &&add_##STRUCT(layout)
    bool good = layout STRUCTS(ADD) && PyModule_AddObjectRef(module, "LAYOUT", layout) == 0;
    Py_XDECREF(layout);
    return good;
}

static bool add_constants(PyObject *module) {
    static const struct { const char *name; long value; } constants[] = {
#define CONSTANT(NAME) {#NAME, NAME},
#define LIMIT(NAME, VALUE) CONSTANT(NAME)
        LIMITS(LIMIT) ENUMERATORS(CONSTANT) CONSTANT(MAX_COMPLETED)
        {"LEASE_BYTES", sizeof(struct lease)}, {"RING_HEADER_BYTES", sizeof(struct ring)},
    };
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++) {
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0) return false;
    }
    return true;
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
    PyTypeObject *worker_type, *fast_path_type, *handover_type;
    if (module && add_layout(module) && add_constants(module) && add_functions(module) &&
        add_type(module, &program_type_spec, &program_type) && add_type(module, &worker_type_spec, &worker_type) &&
        add_type(module, &fast_path_type_spec, &fast_path_type) && add_type(module, &instance_type_spec, &instance_type) &&
        add_type(module, &handover_type_spec, &handover_type)) {
        return module;
    }
    Py_XDECREF(module);
    return NULL;
}
