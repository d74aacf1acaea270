/* Look-up in a set-associative table (fleet.keyed.KeyedTable.get). */
#include "kernels.h"

#define MIX 0x9E3779B97F4A7C15ULL /* fleet.keyed._MIX */

/* keyed_row(key, keys, rows, ways, stride, width): the row of a key, as bytes; None if the table lacks it. */
PyObject *keyed_row(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != 6) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 6", count);
    Py_ssize_t ways = PyLong_AsSsize_t(given[3]), stride = PyLong_AsSsize_t(given[4]);
    Py_ssize_t width = PyLong_AsSsize_t(given[5]);
    if (PyErr_Occurred()) return NULL;
    uint64_t key = PyLong_AsUnsignedLongLong(given[0]);
    if (PyErr_Occurred()) { /* no key of any table */
        if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return NULL;
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    Py_buffer keys, rows;
    if (PyObject_GetBuffer(given[1], &keys, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(given[2], &rows, PyBUF_SIMPLE)) {
        PyBuffer_Release(&keys);
        return NULL;
    }
    PyObject *found = NULL;
    const uint64_t *held = keys.buf;
    Py_ssize_t slots = keys.len / 8, sets = ways > 0 ? slots / ways : 0;
    if (expect(sets > 0 && sets < 1LL << 32 && width >= 0 && stride >= width && slots <= rows.len / (stride ? stride : 1),
               "keys and rows do not fit")) {
        Py_ssize_t first = (Py_ssize_t)((key * MIX >> 32) * (uint64_t)sets >> 32) * ways, at = 0;
        while (at < ways && held[first + at] != key) at++;
        found = key && at < ways ? PyBytes_FromStringAndSize((const char *)rows.buf + (first + at) * stride, width)
                                 : Py_NewRef(Py_None);
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&keys);
    return found;
}
