/* The extension module: its arguments, and the table of its kernels. */
#include "kernels.h"

#include <string.h>

static bool read_array(Argument *into, PyObject *given, char letter, int number) {
    static const char letters[] = "dflhb";
    static const char *const formats[] = {"d", "f", "lq", "h", "?"};
    bool written = letter < 'a';
    const char *kind = strchr(letters, written ? letter + ('a' - 'A') : letter);
    if (given == Py_None) return true;
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (written ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(given, &into->view, flags)) return false;
    into->held = true;
    const char *format = into->view.format ? into->view.format : "B";
    Py_ssize_t size = kind[0] == 'h' ? 2 : kind[0] == 'f' ? 4 : kind[0] == 'b' ? 1 : 8;
    if (strlen(format) != 1 || !strchr(formats[kind - letters], format[0]) || into->view.itemsize != size) {
        PyErr_Format(PyExc_ValueError, "argument %d: an array of type '%s', expected '%s'", number, format,
                     formats[kind - letters]);
        return false;
    }
    into->data = into->view.buf;
    into->count = into->view.len / size;
    return true;
}

bool read_arguments(Argument *into, PyObject *const *given, Py_ssize_t count, const char *spec) {
    memset(into, 0, MOST_ARGUMENTS * sizeof *into);
    if (count != (Py_ssize_t)strlen(spec)) {
        PyErr_Format(PyExc_TypeError, "%d arguments, expected %d", (int)count, (int)strlen(spec));
        return false;
    }
    for (Py_ssize_t at = 0; at < count; at++) {
        if (spec[at] == 'n')
            into[at].count = PyLong_AsLongLong(given[at]);
        else if (spec[at] == 'x')
            into[at].value = PyFloat_AsDouble(given[at]);
        else if (!read_array(&into[at], given[at], spec[at], (int)at + 1))
            return false;
        if (PyErr_Occurred()) return false;
    }
    return true;
}

void release(Argument *arguments, const char *spec) {
    for (size_t at = 0; at < strlen(spec); at++)
        if (arguments[at].held) PyBuffer_Release(&arguments[at].view);
}

bool expect(bool holds, const char *message) {
    if (!holds) PyErr_SetString(PyExc_ValueError, message);
    return holds;
}

/* True if a number is outside of [first, end): then a difference to one of the ends is negative. */
WIDE static bool any_outside(int64_t first, const int64_t *numbers, int64_t count, int64_t end) {
    uint64_t found = 0, low = (uint64_t)first, high = (uint64_t)end - 1;
    for (int64_t at = 0; at < count; at++)
        found |= ((uint64_t)numbers[at] - low) | (high - (uint64_t)numbers[at]);
    return found >> 63;
}

bool all_between(int64_t first, const int64_t *numbers, int64_t count, int64_t end, const char *message) {
    return expect(!any_outside(first, numbers, count, end), message);
}

bool all_below(const int64_t *numbers, int64_t count, int64_t end, const char *message) {
    return all_between(0, numbers, count, end, message);
}

WIDE double add_row(const double *values, int64_t count) {
    if (count < 8) {
        double sum = 0.0;
        for (int64_t at = 0; at < count; at++) sum += values[at];
        return sum;
    }
    if (count > 128) {
        int64_t half = count / 2 - count / 2 % 8;
        return add_row(values, half) + add_row(values + half, count - half);
    }
    /* -0.0 changes no number that is added to it. */
    double lanes[8] = {-0.0, -0.0, -0.0, -0.0, -0.0, -0.0, -0.0, -0.0};
    int64_t at = 0;
    for (; at < count - count % 8; at += 8)
        for (int of = 0; of < 8; of++) lanes[of] += values[at + of];
    double sum = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
    for (; at < count; at++) sum += values[at];
    return sum;
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    METHOD(flow),           METHOD(overflow_view),  METHOD(overflow_promises),
    METHOD(overflow_tried), METHOD(overflow_admit), METHOD(swap_exchange),
    METHOD(swap_copy),      METHOD(swap_replicated), METHOD(swap_spare),
    METHOD(locality_filled),
    METHOD(locality_one_each),
    METHOD(locality_exchanged),
    METHOD(cap_levelled),
    METHOD(cap_stepped),
    METHOD(ordered_series),
    METHOD(priced_traffic),
    METHOD(transported),
    METHOD(spread_sets),
    METHOD(placement_traded),
    METHOD(tokens_destinations),
    METHOD(tokens_exchanged),
    {NULL, NULL, 0, NULL},
};

static int filled(PyObject *module) { return PyModule_AddStringConstant(module, "SOURCE", SOURCE); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)filled}, {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_compiled", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__compiled(void) { return PyModuleDef_Init(&definition); }
