/* Prediction of a request: fleet.prediction.predict from the rows of its keys on, with the same bits. */
#include "arrays.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PREFIX, SESSION, TOKENS, TENANT, SOURCES }; /* fleet.prediction.SOURCES */

#define AHEAD 8        /* rows of the token table are read from memory before they are added */
#define PACKED 8       /* fleet.signatures.PACKED: bytes of a packed signature, pairs of a cluster and its weight */
#define FLOOR 0.01     /* fleet.prediction.FLOOR */
#define MIN_SHARE 1e-6 /* fleet.prediction.MIN_SHARE */

static const double SHRINK[SOURCES] = {16.0, 64.0, 64.0, 512.0}; /* fleet.prediction.SHRINK */

typedef struct {
    Py_ssize_t clusters, rows;
    const float *table; /* [rows, clusters] log-ratios by token id modulo rows */
    const float *shares, *log_shares, *weights;
    float *space;           /* [SOURCES, clusters] */
    float *ratios[SOURCES]; /* in `space`, or NULL without evidence */
    double seen[SOURCES];   /* tokens of evidence */
} Evidence;

/* Decode the row of a key, bytes or None, to log-ratios: fleet.prediction._shrunk. False with an exception set. */
static bool decode(Evidence *evidence, int source, PyObject *given) {
    if (given == Py_None) return true;
    char *bytes;
    Py_ssize_t length;
    uint32_t tokens;
    if (PyBytes_AsStringAndSize(given, &bytes, &length)) return false;
    if (!expect(length == PACKED + (Py_ssize_t)sizeof tokens, "a row of another length")) return false;
    const uint8_t *packed = (const uint8_t *)bytes;
    memcpy(&tokens, bytes + PACKED, sizeof tokens);
    float *ratios = evidence->ratios[source] = evidence->space + source * evidence->clusters;
    double seen = evidence->seen[source] = tokens;
    int total = 0, weights[PACKED / 2] = {0};
    for (int at = 0; at < PACKED; at += 2) {
        if (packed[at] >= evidence->clusters) continue;
        total += packed[at + 1];
        for (int other = 0; other < PACKED; other += 2)
            if (packed[other] == packed[at]) weights[at / 2] += packed[other + 1];
    }
    double scale = 1.0 / (total > 255 ? total : 255), believed = seen / (seen + SHRINK[source]) * (1.0 - FLOOR);
    double unnamed = believed * (1.0 - total * scale) + (1.0 - believed);
    float constant = (float)log(unnamed);
    for (Py_ssize_t at = 0; at < evidence->clusters; at++) ratios[at] = constant;
    for (int at = 0; at < PACKED; at += 2) {
        if (!packed[at + 1] || packed[at] >= evidence->clusters) continue;
        double share = evidence->shares[packed[at]];
        double inverse = share > 0 ? 1.0 / (share > MIN_SHARE ? share : MIN_SHARE) : 0.0;
        ratios[packed[at]] = (float)log(unnamed + believed * weights[at / 2] * scale * inverse);
    }
    return true;
}

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

/* Add up the rows of the tokens from `first` to `last`, exclusive, and weigh the sum. False with an exception set. */
static bool add_tokens(Evidence *evidence, PyObject *ids, Py_ssize_t first, Py_ssize_t last, float weight) {
    Py_ssize_t rows[AHEAD] = {0};
    if (first == last) return true;
    float *sum = evidence->ratios[TOKENS] = evidence->space + TOKENS * evidence->clusters;
    evidence->seen[TOKENS] = (double)(last - first);
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

/* Choose the weights of the sources by the set of those with evidence: fleet.prediction.pattern. */
static void choose_weights(Evidence *evidence) {
    Py_ssize_t pattern = 0;
    for (int source = 0; source < SOURCES; source++) pattern |= (Py_ssize_t)(evidence->seen[source] > 0) << source;
    evidence->weights += pattern * SOURCES;
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

/* pool(clusters, ids: list, first, last, weight, rows, patterns, table, log_shares, shares, source_weights, prefix row,
   session row, tenant row, out): the tokens of evidence by source. patterns: 1, or one for each set of sources. */
PyObject *pool(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != 15) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 15", count);
    Evidence evidence = {.clusters = PyLong_AsSsize_t(given[0]), .rows = PyLong_AsSsize_t(given[5])};
    Py_ssize_t first = PyLong_AsSsize_t(given[2]), last = PyLong_AsSsize_t(given[3]), each = evidence.clusters;
    Py_ssize_t patterns = PyLong_AsSsize_t(given[6]);
    float weight = (float)PyFloat_AsDouble(given[4]);
    if (PyErr_Occurred()) return NULL;
    Arrays arrays = {.held = 0};
    bool ok = expect(each > 0 && evidence.rows >= 0 && PyList_Check(given[1]) && first >= 0 && first <= last &&
                         last <= PyList_Size(given[1]) && (evidence.rows || first == last),
                     "no such tokens, or no clusters") &&
              expect(patterns == 1 || patterns == 1 << SOURCES, "weights of other sets of sources");
    evidence.table = read_array(&arrays, given[7], 'f', evidence.rows * each, false, &ok);
    evidence.log_shares = read_array(&arrays, given[8], 'f', each, false, &ok);
    evidence.shares = read_array(&arrays, given[9], 'f', each, false, &ok);
    evidence.weights = read_array(&arrays, given[10], 'f', patterns * SOURCES, false, &ok);
    float *out = read_array(&arrays, given[14], 'f', each, true, &ok);
    ok = ok && expect(evidence.table && evidence.log_shares && evidence.shares && evidence.weights && out,
                      "an array is None");
    double *powers = ok ? malloc((sizeof *powers + SOURCES * sizeof(float)) * (size_t)each) : NULL;
    if (ok && !powers) PyErr_NoMemory();
    if (powers) evidence.space = (float *)(powers + each);
    ok = powers && decode(&evidence, PREFIX, given[11]) && decode(&evidence, SESSION, given[12]) &&
         decode(&evidence, TENANT, given[13]) && add_tokens(&evidence, given[1], first, last, weight);
    if (ok && patterns > 1) choose_weights(&evidence);
    if (ok) pool_sources(&evidence, powers, out);
    free(powers);
    release(&arrays);
    const double *seen = evidence.seen;
    return ok ? Py_BuildValue("(dddd)", seen[PREFIX], seen[SESSION], seen[TOKENS], seen[TENANT]) : NULL;
}
