/* A set-associative table of rows, as the Python side hands it over. */
#ifndef ROOST_ROUTER_KEYED_H
#define ROOST_ROUTER_KEYED_H

#include "kernels.h"

typedef struct {
    Py_buffer keys, rows; /* u64 [slots]; `stride` bytes a slot, of which the first `width` are its row */
    Py_ssize_t sets, ways, stride, width;
} Rows;

/* `given`: keys, rows, ways, stride, width. False with an exception set; `close_rows` must follow in both cases. The
   table is zeroed before. */
bool open_rows(Rows *table, PyObject *const *given);
void close_rows(Rows *table);

/* The row of a key; NULL if the table lacks it. */
const char *row_of(const Rows *table, uint64_t key);

/* A row, or None for NULL (a new reference). */
PyObject *row_bytes(const Rows *table, const char *row);

#endif
