/* Inner loops of routing decisions and of streams. */
#ifndef ROOST_ROUTER_KERNELS_H
#define ROOST_ROUTER_KERNELS_H

#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the hashes read memory as little-endian numbers: the Python form serves here"
#endif

/* Hash of at least 4 bytes. */
uint64_t xxh3(const uint8_t *input, size_t length, uint64_t seed);

/* False, with ValueError set, unless `holds`. */
bool expect(bool holds, const char *message);

/* Names of the terms of `price`, in order. */
PyObject *term_names(void);

extern PyType_Spec block_masks, recent_blocks;

PyObject *chain(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *longest_known(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *walk(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *price(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *pool(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *keyed_row(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *maxima(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *uncached(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *cheapest(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *mixed(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *whole_events(PyObject *self, PyObject *const *given, Py_ssize_t count);

#endif
