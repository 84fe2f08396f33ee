/* Counters in shared memory: 64-bit words with one writing process and any number of reading ones. */
#include "python.h"

#include <stdatomic.h>
#include <stdint.h>

enum { SEQUENCE, LATEST, FIRST_COUNTER, MAX_PAIRS = 32 };

/* Readers take what they have read if the first word was even, and the same afterwards. A writer that died in between leaves it odd; the
 * next one goes on from there. */
static void add(_Atomic uint64_t *record, uint64_t latest, const size_t *words, const uint64_t *amounts, Py_ssize_t pairs) {
    uint64_t odd = atomic_load_explicit(&record[SEQUENCE], memory_order_relaxed) | 1;
    atomic_store_explicit(&record[SEQUENCE], odd, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    for (Py_ssize_t i = 0; i < pairs; i++) {
        uint64_t before = atomic_load_explicit(&record[words[i]], memory_order_relaxed);
        atomic_store_explicit(&record[words[i]], before + amounts[i], memory_order_relaxed);
    }
    if (latest > atomic_load_explicit(&record[LATEST], memory_order_relaxed)) {
        atomic_store_explicit(&record[LATEST], latest, memory_order_relaxed);
    }
    atomic_store_explicit(&record[SEQUENCE], odd + 1, memory_order_release);
}

/* counters_add(view, offset, size in words, latest, word, amount, word, amount, ...): all of them or, with an exception, none. It keeps the
 * GIL, so the threads of the writing process take turns. */
static PyObject *py_counters_add(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    Py_ssize_t pairs = (count - 4) / 2;
    if (count < 4 || count % 2 || pairs > MAX_PAIRS) {
        return PyErr_Format(PyExc_TypeError, "counters_add takes 4 arguments and up to %d pairs, not %zd arguments", MAX_PAIRS, count);
    }
    size_t words[MAX_PAIRS];
    uint64_t amounts[MAX_PAIRS];
    Py_ssize_t offset = PyLong_AsSsize_t(arguments[1]);
    unsigned long size = PyLong_AsUnsignedLong(arguments[2]);
    uint64_t latest = PyLong_AsUnsignedLongLong(arguments[3]);
    for (Py_ssize_t i = 0; i < pairs; i++) {
        words[i] = PyLong_AsSize_t(arguments[4 + 2 * i]);
        amounts[i] = PyLong_AsUnsignedLongLongMask(arguments[5 + 2 * i]);
    }
    if (PyErr_Occurred()) return NULL;
    if (size < FIRST_COUNTER || size > UINT32_MAX) return PyErr_Format(PyExc_ValueError, "a record of %lu words", size);
    for (Py_ssize_t i = 0; i < pairs; i++) {
        if (words[i] < FIRST_COUNTER || words[i] >= size) {
            return PyErr_Format(PyExc_ValueError, "no counter %zu in a record of %lu words", words[i], size);
        }
    }
    Py_buffer buffer;
    if (PyObject_GetBuffer(arguments[0], &buffer, PyBUF_WRITABLE) < 0) return NULL;
    _Atomic uint64_t *record = locate(&buffer, offset, size * sizeof *record);
    if (record) add(record, latest, words, amounts, pairs);
    PyBuffer_Release(&buffer);
    return record ? Py_NewRef(Py_None) : NULL;
}

PyMethodDef counter_methods[] = {
    {"counters_add", (PyCFunction)(void (*)(void))py_counters_add, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
