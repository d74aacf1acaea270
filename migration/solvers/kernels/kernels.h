/* Arrays of the solvers' inner loops, as the Python side hands them over. */
#ifndef ROOST_KERNELS_H
#define ROOST_KERNELS_H

#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#define EMPTY (-1)
#define MOST_ARGUMENTS 28

typedef struct {
    Py_buffer view;
    bool held;
    void *data;    /* NULL: None was given */
    int64_t count; /* numbers in the array; the value itself for an integer argument */
    double value;  /* of a float argument */
} Argument;

/* Read the arguments of a kernel by `spec`, one letter each: d float64, f float32, l int64, h int16, b bool arrays
   (contiguous; upper case: written to; None gives NULL), n an integer, x a float. False with an exception set if they
   do not fit; `release` must follow in both cases. */
bool read_arguments(Argument *into, PyObject *const *given, Py_ssize_t count, const char *spec);
void release(Argument *arguments, const char *spec);

/* False, with ValueError set, unless `holds`. */
bool expect(bool holds, const char *message);
/* False, with ValueError set, unless all `count` numbers are at least 0 and below `end`. */
bool all_below(const int64_t *numbers, int64_t count, int64_t end, const char *message);

#define AS_D(at) ((double *)arguments[at].data)
#define AS_F(at) ((float *)arguments[at].data)
#define AS_L(at) ((int64_t *)arguments[at].data)
#define AS_H(at) ((int16_t *)arguments[at].data)
#define AS_B(at) ((uint8_t *)arguments[at].data)
#define COUNT(at) (arguments[at].count)

#define KERNEL(name) PyObject *name(PyObject *self, PyObject *const *given, Py_ssize_t count)

/* A kernel's frame: `spec`, a check of shapes and indices (an expression), and the loops, which run without the
   interpreter's lock and set `ok` to false where memory is short. */
#define RUN(spec, check, work)                                                                                       \
    Argument arguments[MOST_ARGUMENTS];                                                                              \
    (void)self;                                                                                                      \
    bool ok = read_arguments(arguments, given, count, spec) && (check);                                              \
    if (ok) {                                                                                                        \
        Py_BEGIN_ALLOW_THREADS work;                                                                                 \
        Py_END_ALLOW_THREADS if (!ok) PyErr_NoMemory();                                                              \
    }                                                                                                                \
    release(arguments, spec);                                                                                        \
    if (!ok) return NULL;                                                                                            \
    Py_RETURN_NONE

KERNEL(flow);

#endif
