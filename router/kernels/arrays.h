/* Arrays as the Python side hands them over. */
#ifndef ROOST_ROUTER_ARRAYS_H
#define ROOST_ROUTER_ARRAYS_H

#include "kernels.h"

#define MOST_ARRAYS 28

typedef struct {
    Py_buffer views[MOST_ARRAYS];
    int held;
} Arrays;

/* Return the numbers of a contiguous array of `count` of a type (d float64, f float32, l int64); None gives NULL.
   Sets `ok` to false, with TypeError, ValueError or BufferError set, for another array, and then does nothing.
   `release` must follow in both cases. */
void *read_array(Arrays *arrays, PyObject *given, char type, Py_ssize_t count, bool written, bool *ok);
void release(Arrays *arrays);

#endif
