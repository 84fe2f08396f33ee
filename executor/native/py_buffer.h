/* How Python's functions on objects in a buffer are written. Those that wait release the GIL; the others keep it, which makes them atomic
 * among the threads of a process. */
#ifndef GANGWAY_PY_BUFFER_H
#define GANGWAY_PY_BUFFER_H

#include "python.h"

/* Every function begins with these: parse the buffer and the numbers, find the object. */
#define PARSE(format, ...)                                                     \
    Py_buffer buffer;                                                          \
    PyObject *result = NULL;                                                   \
    (void)module;                                                              \
    if (!PyArg_ParseTuple(arguments, "w*" format, &buffer, __VA_ARGS__)) return NULL
#define FINISH                  \
    PyBuffer_Release(&buffer);  \
    return result
#define FUNCTION(name) static PyObject *name(PyObject *module, PyObject *arguments)
#define METHOD(name) {#name, py_##name, METH_VARARGS, NULL}

#endif
