#include "arrays.h"

#include <string.h>

static bool fits(const Py_buffer *view, char type, Py_ssize_t count) {
    const char *formats = type == 'd' ? "d" : type == 'f' ? "f" : "lq";
    const char *format = view->format ? view->format : "B";
    if (strlen(format) != 1 || !strchr(formats, *format)) {
        PyErr_Format(PyExc_ValueError, "an array of type '%s', expected '%c'", format, type);
        return false;
    }
    if (view->len != count * view->itemsize) {
        PyErr_Format(PyExc_ValueError, "%zd numbers in an array, expected %zd", view->len / view->itemsize, count);
        return false;
    }
    return true;
}

void *read_array(Arrays *arrays, PyObject *given, char type, Py_ssize_t count, bool written, bool *ok) {
    Py_buffer *view = &arrays->views[arrays->held];
    if (!*ok || given == Py_None) return NULL;
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (written ? PyBUF_WRITABLE : 0);
    if (arrays->held == MOST_ARRAYS || PyObject_GetBuffer(given, view, flags)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "too many arrays");
        *ok = false;
        return NULL;
    }
    arrays->held++;
    *ok = fits(view, type, count);
    return view->buf;
}

bool expect(bool holds, const char *message) {
    if (!holds) PyErr_SetString(PyExc_ValueError, message);
    return holds;
}

void release(Arrays *arrays) {
    while (arrays->held) PyBuffer_Release(&arrays->views[--arrays->held]);
}
