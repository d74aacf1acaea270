/* Look-up in a set-associative table (fleet.keyed.KeyedTable.get). */
#include "keyed.h"

#define MIX 0x9E3779B97F4A7C15ULL /* fleet.keyed._MIX */

bool open_rows(Rows *table, PyObject *const *given) {
    table->ways = PyLong_AsSsize_t(given[2]), table->stride = PyLong_AsSsize_t(given[3]);
    table->width = PyLong_AsSsize_t(given[4]);
    if (PyErr_Occurred() || PyObject_GetBuffer(given[0], &table->keys, PyBUF_SIMPLE) ||
        PyObject_GetBuffer(given[1], &table->rows, PyBUF_SIMPLE))
        return false;
    Py_ssize_t slots = table->keys.len / 8, stride = table->stride;
    table->sets = table->ways > 0 ? slots / table->ways : 0;
    return expect(table->sets > 0 && table->sets < 1LL << 32 && table->width >= 0 && stride >= table->width &&
                      slots <= table->rows.len / (stride ? stride : 1),
                  "keys and rows do not fit");
}

void close_rows(Rows *table) {
    if (table->rows.obj) PyBuffer_Release(&table->rows);
    if (table->keys.obj) PyBuffer_Release(&table->keys);
}

const char *row_of(const Rows *table, uint64_t key) {
    const uint64_t *held = table->keys.buf;
    Py_ssize_t first = (Py_ssize_t)((key * MIX >> 32) * (uint64_t)table->sets >> 32) * table->ways, at = 0;
    while (at < table->ways && held[first + at] != key) at++;
    return key && at < table->ways ? (const char *)table->rows.buf + (first + at) * table->stride : NULL;
}

PyObject *row_bytes(const Rows *table, const char *row) {
    return row ? PyBytes_FromStringAndSize(row, table->width) : Py_NewRef(Py_None);
}

/* keyed_row(key, keys, rows, ways, stride, width): the row of a key, as bytes; None if the table lacks it. */
PyObject *keyed_row(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != 6) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 6", count);
    uint64_t key = PyLong_AsUnsignedLongLong(given[0]);
    if (PyErr_Occurred()) { /* no key of any table */
        if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return NULL;
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    Rows table = {0};
    PyObject *found = open_rows(&table, given + 1) ? row_bytes(&table, row_of(&table, key)) : NULL;
    close_rows(&table);
    return found;
}
