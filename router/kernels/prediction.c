/* Combined prediction of a request: fleet.prediction.predict from the evidence on, with the same bits. */
#include "arrays.h"

#include <math.h>
#include <stdlib.h>

enum { PREFIX, SESSION, TOKENS, TENANT, SOURCES }; /* fleet.prediction.SOURCES */

#define AHEAD 8 /* rows of the token table are read from memory before they are added */

typedef struct {
    Py_ssize_t clusters, rows;
    const float *table; /* [rows, clusters] log-ratios by token id modulo rows */
    const float *log_shares, *weights, *ratios[SOURCES];
} Evidence;

/* Return the row of the token at a place of a list; -1 with an exception set. */
static Py_ssize_t row_of(const Evidence *evidence, PyObject *ids, Py_ssize_t at) {
    PyObject *item = PyList_GetItem(ids, at); /* borrowed */
    unsigned long id = item ? PyLong_AsUnsignedLong(item) : (unsigned long)-1;
    if (id > UINT32_MAX) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_OverflowError, "token id %lu is outside u32", id);
        return -1;
    }
    return (Py_ssize_t)(id < (unsigned long)evidence->rows ? id : id % (unsigned long)evidence->rows);
}

/* Add up the rows of the tokens from `first` to `last`, exclusive, and weigh the sum. */
static bool add_tokens(const Evidence *evidence, PyObject *ids, Py_ssize_t first, Py_ssize_t last, float weight,
                       float *sum) {
    Py_ssize_t rows[AHEAD] = {0};
    for (Py_ssize_t at = 0; at < evidence->clusters; at++) sum[at] = 0.0f;
    for (Py_ssize_t token = first; token < last + AHEAD; token++) {
        const float *row = evidence->table + rows[token % AHEAD] * evidence->clusters;
        if (token >= first + AHEAD)
            for (Py_ssize_t at = 0; at < evidence->clusters; at++) sum[at] += row[at];
        if (token >= last) continue;
        Py_ssize_t next = row_of(evidence, ids, token);
        if (next < 0) return false;
        rows[token % AHEAD] = next;
        for (Py_ssize_t at = 0; at < evidence->clusters; at += 16)
            __builtin_prefetch(evidence->table + next * evidence->clusters + at);
    }
    for (Py_ssize_t at = 0; at < evidence->clusters; at++) sum[at] *= weight;
    return true;
}

/* The logarithmic opinion pool around the mix. powers: space for [clusters]. */
static void pool_sources(const Evidence *evidence, double *powers, float *out) {
    float largest = -INFINITY;
    double total = 0.0;
    for (Py_ssize_t at = 0; at < evidence->clusters; at++) {
        float likely = 0.0f;
        for (int source = 0; source < SOURCES; source++)
            if (evidence->ratios[source]) likely += evidence->weights[source] * evidence->ratios[source][at];
        out[at] = likely + evidence->log_shares[at];
        if (out[at] > largest) largest = out[at];
    }
    for (Py_ssize_t at = 0; at < evidence->clusters; at++) total += powers[at] = exp((double)(out[at] - largest));
    for (Py_ssize_t at = 0; at < evidence->clusters; at++) out[at] = (float)(powers[at] / total);
}

/* pool(clusters, ids: list, first, last, weight, rows, table, log_shares, weights, prefix, session, tenant, out) */
PyObject *pool(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != 13) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 13", count);
    Evidence evidence = {.clusters = PyLong_AsSsize_t(given[0]), .rows = PyLong_AsSsize_t(given[5])};
    Py_ssize_t first = PyLong_AsSsize_t(given[2]), last = PyLong_AsSsize_t(given[3]), each = evidence.clusters;
    float weight = (float)PyFloat_AsDouble(given[4]);
    if (PyErr_Occurred()) return NULL;
    Arrays arrays = {.held = 0};
    bool ok = expect(each > 0 && evidence.rows >= 0 && PyList_Check(given[1]) && first >= 0 && first <= last &&
                         last <= PyList_Size(given[1]) && (evidence.rows || first == last),
                     "no such tokens, or no clusters");
    evidence.table = read_array(&arrays, given[6], 'f', evidence.rows * each, false, &ok);
    evidence.log_shares = read_array(&arrays, given[7], 'f', each, false, &ok);
    evidence.weights = read_array(&arrays, given[8], 'f', SOURCES, false, &ok);
    evidence.ratios[PREFIX] = read_array(&arrays, given[9], 'f', each, false, &ok);
    evidence.ratios[SESSION] = read_array(&arrays, given[10], 'f', each, false, &ok);
    evidence.ratios[TENANT] = read_array(&arrays, given[11], 'f', each, false, &ok);
    float *out = read_array(&arrays, given[12], 'f', each, true, &ok);
    ok = ok && expect(evidence.table && evidence.log_shares && evidence.weights && out, "an array is None");
    double *powers = ok ? malloc((sizeof *powers + sizeof(float)) * (size_t)each) : NULL;
    if (ok && !powers) PyErr_NoMemory();
    if (powers) {
        float *sum = (float *)(powers + each);
        if (first < last) evidence.ratios[TOKENS] = sum;
        if (add_tokens(&evidence, given[1], first, last, weight, sum)) pool_sources(&evidence, powers, out);
    }
    free(powers);
    release(&arrays);
    if (!PyErr_Occurred()) Py_RETURN_NONE;
    return NULL;
}
