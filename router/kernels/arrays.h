/* Arrays as the Python side hands them over. */
#ifndef ROOST_ROUTER_ARRAYS_H
#define ROOST_ROUTER_ARRAYS_H

#include "kernels.h"

#define MOST_ARRAYS 16

typedef struct {
    Py_buffer views[MOST_ARRAYS];
    void *copies[MOST_ARRAYS]; /* of those that are not contiguous */
    int held;
} Arrays;

/* Return the numbers in C order of an array of `count` of a type (d float64, f float32, l int64); None gives NULL.
   One that is written must be contiguous. Sets `ok` to false, with TypeError, ValueError or BufferError set, for another
   array, and then does nothing. `release` must follow in both cases. */
void *read_array(Arrays *arrays, PyObject *given, char type, Py_ssize_t count, bool written, bool *ok);
void release(Arrays *arrays);

#endif
