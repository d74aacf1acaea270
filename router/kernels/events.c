/* Whole events in whole chunks (router.passthrough.event_relay). */
#define _GNU_SOURCE /* memmem */
#include "kernels.h"

#include <string.h>

#define MOST_DIGITS 5 /* of a chunk's size, as in router.passthrough.event_relay */

static int digit(char sign) {
    if (sign >= '0' && sign <= '9') return sign - '0';
    if (sign >= 'a' && sign <= 'f') return sign - 'a' + 10;
    return sign >= 'A' && sign <= 'F' ? sign - 'A' + 10 : -1;
}

/* Whether the bytes at `at` are `text`. */
static bool reads(const char *at, const char *end, const char *text, size_t length) {
    return (size_t)(end - at) >= length && !memcmp(at, text, length);
}

/* Whether events state a usage other than null. */
static bool states_usage(const char *at, const char *end) {
    while ((at = memmem(at, (size_t)(end - at), "\"usage\"", 7))) {
        at += 7;
        if (!reads(at, end, ":null", 5) && !reads(at, end, ": null", 6)) return true;
    }
    return false;
}

/* Number of ends of events between two places, of which the second is one. */
static long ends(const char *at, const char *end) {
    long found = 0;
    while (at < end && (at = memchr(at, '\n', (size_t)(end - at)))) {
        bool twice = reads(at, end, "\n\n", 2);
        found += twice;
        at += 1 + twice;
    }
    return found;
}

/* Read a chunk of whole events that say nothing of the end: count them, and return the place behind it. NULL: it is
   something else. */
static const char *read_chunk(const char *at, const char *end, long *found) {
    long size = 0;
    int digits = 0, value;
    for (; at < end && (value = digit(*at)) >= 0; at++, digits++) {
        if (digits == MOST_DIGITS) return NULL;
        size = 16 * size + value;
    }
    if (!digits || !reads(at, end, "\r\n", 2)) return NULL;
    const char *events = at + 2;
    if (size < 2 || end - events < size || !reads(events + size - 2, end, "\n\n\r\n", 4)) return NULL;
    if (states_usage(events, events + size) || memmem(events, (size_t)size, "[DONE]", 6)) return NULL;
    *found += ends(events, events + size);
    return events + size + 2;
}

/* whole_events(data): the number of events; 0 for anything else. */
PyObject *whole_events(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != 1) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 1", count);
    char *data;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(given[0], &data, &length)) return NULL;
    const char *at = data, *end = data + length;
    long found = 0;
    while (at && at < end) at = read_chunk(at, end, &found);
    return PyLong_FromLong(at ? found : 0);
}
