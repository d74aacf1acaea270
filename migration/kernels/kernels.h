/* Arrays of the solvers' inner loops, as the Python side hands them over. */
#ifndef ROOST_KERNELS_H
#define ROOST_KERNELS_H

#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

/* A function that is compiled for wider registers as well, which processors that have them choose at run time. Equal
   bits: nothing is contracted or reordered. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

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
/* The same, at least `first`. */
bool all_between(int64_t first, const int64_t *numbers, int64_t count, int64_t end, const char *message);

/* Add as numpy adds a row: in eight interleaved sums up to 128 numbers, and longer rows by halves. */
double add_row(const double *values, int64_t count);

#define AS_D(at) ((double *)arguments[at].data)
#define AS_F(at) ((float *)arguments[at].data)
#define AS_L(at) ((int64_t *)arguments[at].data)
#define AS_H(at) ((int16_t *)arguments[at].data)
#define AS_B(at) ((uint8_t *)arguments[at].data)
#define COUNT(at) (arguments[at].count)

#define KERNEL(name) PyObject *name(PyObject *self, PyObject *const *given, Py_ssize_t count)

/* A kernel's frame: `spec`, a check of shapes and indices (an expression), the loops, which run without the
   interpreter's lock and set `ok` to false where memory is short, and a check of what they found. */
#define RUN(spec, check, work, verdict)                                                                              \
    Argument arguments[MOST_ARGUMENTS];                                                                              \
    (void)self;                                                                                                      \
    bool ok = read_arguments(arguments, given, count, spec) && (check);                                              \
    if (ok) {                                                                                                        \
        Py_BEGIN_ALLOW_THREADS work;                                                                                 \
        Py_END_ALLOW_THREADS if (!ok) PyErr_NoMemory();                                                              \
        ok = ok && (verdict);                                                                                        \
    }                                                                                                                \
    release(arguments, spec);                                                                                        \
    if (!ok) return NULL;                                                                                            \
    Py_RETURN_NONE

/* Flow among few slots, for other kernels. flow_space: memory for n slots, to be freed; NULL: there is none.
   flow_few: arguments as those of `flow`, without own load. */
typedef struct Flow Flow;
Flow *flow_space(int64_t n, int64_t ranks, int64_t groups);
void flow_few(Flow *flow, int64_t n, const int64_t *rank, const int64_t *group, int64_t ranks, int64_t groups,
              const double *alone, const double *served, int64_t rounds, double *out);

KERNEL(flow);
KERNEL(overflow_view);
KERNEL(overflow_promises);
KERNEL(overflow_tried);
KERNEL(overflow_admit);
KERNEL(swap_exchange);
KERNEL(swap_copy);
KERNEL(swap_replicated);
KERNEL(swap_spare);
KERNEL(locality_filled);
KERNEL(locality_one_each);
KERNEL(locality_exchanged);
KERNEL(cap_levelled);
KERNEL(cap_stepped);
KERNEL(ordered_series);
KERNEL(priced_traffic);
KERNEL(transported);
KERNEL(spread_sets);
KERNEL(placement_traded);
KERNEL(tokens_destinations);
KERNEL(tokens_exchanged);

#endif
