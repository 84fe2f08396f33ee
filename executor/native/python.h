/* What the files of the extension module share. They use the stable ABI (setup.py), so that one wheel fits many versions of Python. */
#ifndef GANGWAY_PYTHON_H
#define GANGWAY_PYTHON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct program;

/* Let `place` hold `value`, and drop what it held. */
static inline void set_reference(PyObject **place, PyObject *value) {
    PyObject *old = *place;
    *place = Py_NewRef(value);
    Py_XDECREF(old);
}

extern PyMethodDef ring_methods[];     /* py_ring.c: rings and bells */
extern PyMethodDef slot_methods[];     /* py_slot.c */
extern PyMethodDef lease_methods[];    /* py_lease.c */
extern PyMethodDef counter_methods[];  /* py_counters.c */
extern PyType_Spec program_type_spec;  /* py_program.c */
extern PyTypeObject *program_type;
extern PyType_Spec worker_type_spec;   /* py_worker.c */
extern PyType_Spec fast_path_type_spec; /* py_fast_path.c */
extern PyType_Spec instance_type_spec, handover_type_spec; /* py_instance.c */
extern PyTypeObject *instance_type;

/* py_buffer.c: address of `size_bytes` bytes at `offset` of a buffer; NULL with ValueError set if they are not all inside, or misaligned. */
void *locate(const Py_buffer *buffer, Py_ssize_t offset, size_t size_bytes);
/* module.c: a tuple of these; NULL with an exception set if there is no memory. */
PyObject *numbers(const uint32_t *values, uint32_t count);
/* What a Program holds; NULL if the object is none. */
struct program *program_of(PyObject *object);

#endif
