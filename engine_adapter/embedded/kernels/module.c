/* The extension module. Arrays come as addresses: callers answer for their lengths and types. */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define MOST_ARGUMENTS 16
#define FEW_VALUES 16384 /* loops over fewer values are shorter than passing the interpreter's lock takes */

static const Loops *const kinds[] = {
#if defined(__x86_64__)
    &loops_avx512,
    &loops_avx2,
#endif
    &loops_any,
};
static const int kind_count = sizeof kinds / sizeof *kinds;
static const Loops *loops;

static bool read_numbers(int64_t *into, PyObject *const *given, Py_ssize_t count, Py_ssize_t expected) {
    if (count != expected) {
        PyErr_Format(PyExc_TypeError, "%d arguments, expected %d", (int)count, (int)expected);
        return false;
    }
    for (Py_ssize_t at = 0; at < count; at++) {
        into[at] = PyLong_AsLongLong(given[at]);
        if (into[at] == -1 && PyErr_Occurred()) return false;
    }
    return true;
}

#define KERNEL(name) static PyObject *name(PyObject *self, PyObject *const *given, Py_ssize_t count)
/* Read integers, as many as expected. */
#define READ(expected)                                                                                                 \
    int64_t n[MOST_ARGUMENTS];                                                                                         \
    (void)self;                                                                                                        \
    if (!read_numbers(n, given, count, expected)) return NULL
/* Read integers, and a float after them. */
#define READ_AND_FLOAT(expected)                                                                                       \
    int64_t n[MOST_ARGUMENTS];                                                                                         \
    (void)self;                                                                                                        \
    if (!read_numbers(n, given, count - 1, expected)) return NULL;                                                     \
    float last = (float)PyFloat_AsDouble(given[expected]);                                                             \
    if (PyErr_Occurred()) return NULL
#define FLOATS(at) ((float *)(intptr_t)n[at])
#define INTEGERS(at) ((int64_t *)(intptr_t)n[at])
#define ROWS(at) ((Rows){FLOATS(at), n[(at) + 1]})

/* Run loops over so many values. Long ones run without the interpreter's lock. */
#define RUN(values, work)                                                                                              \
    if ((values) < FEW_VALUES) {                                                                                       \
        work;                                                                                                          \
    } else {                                                                                                           \
        Py_BEGIN_ALLOW_THREADS work;                                                                                   \
        Py_END_ALLOW_THREADS                                                                                           \
    }                                                                                                                  \
    Py_RETURN_NONE

/* product(in, stride, matrix, stride, bias or 0, out, stride, rows, inputs, outputs) */
KERNEL(product) {
    READ(10);
    Product it = {.in = ROWS(0), .matrix = ROWS(2), .out = ROWS(5), .bias = FLOATS(4)};
    it.rows = n[7], it.inputs = n[8], it.outputs = n[9];
    RUN(it.rows * it.inputs * it.outputs, loops->product(&it));
}

static void products(Product it, float *const *matrices, const int32_t *ends, int64_t slots) {
    Rows in = it.in, out = it.out;
    for (int64_t slot = 0, begin = 0; slot < slots; begin = ends[slot++]) {
        it.rows = ends[slot] - begin;
        it.matrix.data = matrices[slot];
        it.in.data = in.data + begin * in.stride;
        it.out.data = out.data + begin * out.stride;
        if (it.rows > 0) loops->product(&it);
    }
}

/* grouped(in, stride, matrices: addresses, stride, by_input, ends, slots, out, stride, inputs, outputs): the product of
   each slot's rows, which end at ends[slot] (int32), with its matrix. */
KERNEL(grouped) {
    READ(11);
    Product it = {.in = ROWS(0), .out = ROWS(7), .by_input = n[4]};
    it.matrix.stride = n[3], it.inputs = n[9], it.outputs = n[10];
    const int32_t *ends = (const int32_t *)(intptr_t)n[5];
    int64_t rows = n[6] ? ends[n[6] - 1] : 0;
    RUN(rows * it.inputs * it.outputs, products(it, (float *const *)(intptr_t)n[2], ends, n[6]));
}

/* norm(in, weight, out, rows, width, epsilon) */
KERNEL(norm) {
    READ_AND_FLOAT(5);
    RUN(n[3] * n[4], loops->norm(FLOATS(0), FLOATS(1), FLOATS(2), n[3], n[4], last));
}

/* gated(in, out, rows, width) */
KERNEL(gated) {
    READ(4);
    RUN(n[2] * n[3], loops->gated(FLOATS(0), FLOATS(1), n[2], n[3]));
}

/* route(logits, chosen, weights, rows, experts, k, normalise) */
KERNEL(route) {
    READ(7);
    float *scratch = malloc((size_t)(n[4] + 16) * sizeof(float));
    if (!scratch) return PyErr_NoMemory();
    RUN(n[3] * n[4] * n[5],
        (loops->route(FLOATS(0), INTEGERS(1), FLOATS(2), n[3], n[4], n[5], n[6], scratch), free(scratch)));
}

/* weighted(in, row_of_pair, weights, out, rows, k, width) */
KERNEL(weighted) {
    READ(7);
    RUN(n[4] * n[5] * n[6], loops->weighted(FLOATS(0), INTEGERS(1), FLOATS(2), FLOATS(3), n[4], n[5], n[6]));
}

/* attend(qkv, stride, kv, out, norm, cos, sin, positions, first_page, page_rows, rows, heads, kv_heads, size, longest,
   epsilon) */
KERNEL(attend) {
    READ_AND_FLOAT(15);
    Heads it = {.qkv = ROWS(0), .kv = FLOATS(2), .out = FLOATS(3), .norm = FLOATS(4), .cos = FLOATS(5)};
    it.sin = FLOATS(6), it.positions = INTEGERS(7), it.first_page = INTEGERS(8), it.page_rows = INTEGERS(9);
    it.rows = n[10], it.heads = n[11], it.kv_heads = n[12], it.size = n[13], it.longest = n[14];
    it.epsilon = last;
    float *scratch = malloc((size_t)loops->attend_scratch(&it) * sizeof(float));
    if (!scratch) return PyErr_NoMemory();
    RUN(it.rows * it.longest * it.heads * it.size, (loops->attend(&it, scratch), free(scratch)));
}

/* Sort pairs by slot, stably. A slot with pairs gets at least `least` rows; those without a pair repeat pair 0. */
static int64_t sort_pairs(const int64_t *slots, int64_t pairs, int64_t slot_count, int64_t least, int64_t *row_of_pair,
                          int64_t *pair_of_row, int32_t *ends, int64_t *counts) {
    memset(counts, 0, (size_t)slot_count * sizeof *counts);
    for (int64_t pair = 0; pair < pairs; pair++) counts[slots[pair]]++;
    int32_t rows = 0;
    for (int64_t slot = 0; slot < slot_count; slot++) {
        ends[slot] = rows; /* where the slot's next row is, until all are placed */
        if (counts[slot]) rows += (int32_t)(counts[slot] > least ? counts[slot] : least);
    }
    memset(pair_of_row, 0, (size_t)rows * sizeof *pair_of_row);
    for (int64_t pair = 0; pair < pairs; pair++) {
        row_of_pair[pair] = ends[slots[pair]]++;
        pair_of_row[row_of_pair[pair]] = pair;
    }
    for (int64_t slot = 0; slot < slot_count; slot++)
        if (counts[slot] && counts[slot] < least) ends[slot] += (int32_t)(least - counts[slot]);
    return rows;
}

/* group(slots, pairs, slot_count, least, row_of_pair, pair_of_row, ends: int32, counts): the number of rows */
KERNEL(group) {
    READ(8);
    return PyLong_FromLongLong(sort_pairs(INTEGERS(0), n[1], n[2], n[3], INTEGERS(4), INTEGERS(5),
                                          (int32_t *)(intptr_t)n[6], INTEGERS(7)));
}

/* kinds(): the names of the kinds of loops that this processor can run, the fastest first */
KERNEL(kinds_here) {
    (void)self, (void)given, (void)count;
    PyObject *found = PyList_New(0);
    for (int at = 0; found && at < kind_count; at++) {
        PyObject *name = kinds[at]->serves() ? PyUnicode_FromString(kinds[at]->name) : Py_NewRef(Py_None);
        if (!name || (name != Py_None && PyList_Append(found, name))) Py_CLEAR(found);
        Py_XDECREF(name);
    }
    return found;
}

/* use(number): run the loops of this kind from now on, a number of the list of kinds. */
KERNEL(use) {
    READ(1);
    for (int at = 0; at < kind_count; at++)
        if (kinds[at]->serves() && n[0]-- == 0) {
            loops = kinds[at];
            Py_RETURN_NONE;
        }
    PyErr_SetString(PyExc_IndexError, "there is no such kind of loops on this processor");
    return NULL;
}

#define METHOD(name, function) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    METHOD("product", product), METHOD("grouped", grouped),   METHOD("norm", norm),
    METHOD("gated", gated),     METHOD("route", route),       METHOD("weighted", weighted),
    METHOD("attend", attend),   METHOD("group", group),        METHOD("kinds", kinds_here),  METHOD("use", use),
    {NULL, NULL, 0, NULL},
};

static int filled(PyObject *module) {
    for (int at = kind_count - 1; at >= 0; at--)
        if (kinds[at]->serves()) loops = kinds[at];
    return PyModule_AddStringConstant(module, "SOURCE", SOURCE);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)filled}, {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_compiled", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__compiled(void) { return PyModuleDef_Init(&definition); }
