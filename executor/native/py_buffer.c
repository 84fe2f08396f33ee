/* Where an object lies in a buffer that Python has. */
#include "python.h"

void *locate(const Py_buffer *buffer, Py_ssize_t offset, size_t size_bytes) {
    if (offset >= 0 && offset % 8 == 0 && size_bytes <= (size_t)buffer->len && (size_t)offset <= (size_t)buffer->len - size_bytes) {
        return (char *)buffer->buf + offset;
    }
    PyErr_Format(PyExc_ValueError, "%zu bytes at offset %zd are not inside a buffer of %zd bytes", size_bytes, offset, buffer->len);
    return NULL;
}
