#include "arrays.h"

#include <stdlib.h>
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

/* Return the numbers of a view in C order: where they lie, or a copy of them. NULL with an exception set. */
static void *in_order(Py_buffer *view, void **copy) {
    if (PyBuffer_IsContiguous(view, 'C')) return view->buf;
    *copy = malloc((size_t)view->len + 1);
    if (!*copy) PyErr_NoMemory();
    return *copy && !PyBuffer_ToContiguous(*copy, view, view->len, 'C') ? *copy : NULL;
}

void *read_array(Arrays *arrays, PyObject *given, char type, Py_ssize_t count, bool written, bool *ok) {
    Py_buffer *view = &arrays->views[arrays->held];
    if (!*ok || given == Py_None) return NULL;
    int flags = PyBUF_FORMAT | (written ? PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE : PyBUF_STRIDES);
    if (arrays->held == MOST_ARRAYS || PyObject_GetBuffer(given, view, flags)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "too many arrays");
        *ok = false;
        return NULL;
    }
    void **copy = &arrays->copies[arrays->held++];
    *copy = NULL;
    void *numbers = fits(view, type, count) ? in_order(view, copy) : NULL;
    *ok = !PyErr_Occurred();
    return numbers;
}

bool expect(bool holds, const char *message) {
    if (!holds) PyErr_SetString(PyExc_ValueError, message);
    return holds;
}

void release(Arrays *arrays) {
    while (arrays->held) {
        free(arrays->copies[--arrays->held]);
        PyBuffer_Release(&arrays->views[arrays->held]);
    }
}
