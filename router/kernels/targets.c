/* Operations on numbers of all targets, a column each. */
#include "arrays.h"

#include <stdlib.h>

/* maxima(rows, targets, table): the largest number of each row of int64 [rows, targets]; there is a target. */
PyObject *maxima(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != 3) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 3", count);
    Py_ssize_t rows = PyLong_AsSsize_t(given[0]), targets = PyLong_AsSsize_t(given[1]);
    if (PyErr_Occurred() || !expect(rows >= 0 && targets > 0, "no targets")) return NULL;
    Arrays arrays = {.held = 0};
    bool ok = true;
    const int64_t *table = read_array(&arrays, given[2], 'l', rows * targets, false, &ok);
    PyObject *found = ok && expect(table, "an array is None") ? PyTuple_New(rows) : NULL;
    for (Py_ssize_t row = 0; found && row < rows; row++, table += targets) {
        int64_t most = table[0];
        for (Py_ssize_t at = 1; at < targets; at++) most = table[at] > most ? table[at] : most;
        PyObject *number = PyLong_FromLongLong(most);
        if (!number || PyTuple_SetItem(found, row, number)) Py_CLEAR(found);
    }
    release(&arrays);
    return found;
}

/* uncached(targets, prompt, overlap, block_size, out): router.scheduling.cost.uncached_tokens, int64 [targets]. */
PyObject *uncached(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != 5) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 5", count);
    Py_ssize_t targets = PyLong_AsSsize_t(given[0]), prompt = PyLong_AsSsize_t(given[1]);
    if (PyErr_Occurred()) return NULL;
    Arrays arrays = {.held = 0};
    bool ok = expect(targets >= 0, "fewer than no targets");
    const int64_t *overlap = read_array(&arrays, given[2], 'l', targets, false, &ok);
    const int64_t *size = read_array(&arrays, given[3], 'l', targets, false, &ok);
    int64_t *out = read_array(&arrays, given[4], 'l', targets, true, &ok);
    ok = ok && expect(overlap && size && out, "an array is None");
    for (Py_ssize_t at = 0; ok && at < targets; at++) {
        int64_t left = prompt - overlap[at] * size[at];
        out[at] = left > 1 ? left : 1;
    }
    release(&arrays);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

/* Return the place of the `turn`th candidate, counted modulo their number, among those of at most `limit` in score and
   of exactly `work` outstanding. */
static Py_ssize_t among_equal(const double *score, const double *outstanding, double limit, double work, Py_ssize_t targets,
                              unsigned long long turn) {
    Py_ssize_t equal = 0, at = 0;
    for (Py_ssize_t each = 0; each < targets; each++) equal += score[each] <= limit && outstanding[each] == work;
    for (Py_ssize_t left = (Py_ssize_t)(turn % (unsigned long long)equal);; at++)
        if (score[at] <= limit && outstanding[at] == work && !left--) return at;
}

/* cheapest(targets, score, outstanding, same, seed): router.scheduling.policies._cheapest, (chosen, tied). */
PyObject *cheapest(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != 5) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 5", count);
    Py_ssize_t targets = PyLong_AsSsize_t(given[0]), tied = 0;
    double same = PyFloat_AsDouble(given[3]);
    unsigned long long seed = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(given[4]);
    if (PyErr_Occurred() || !expect(targets > 0, "no targets")) return NULL;
    Arrays arrays = {.held = 0};
    bool ok = true;
    const double *score = read_array(&arrays, given[1], 'd', targets, false, &ok);
    const double *outstanding = read_array(&arrays, given[2], 'd', targets, false, &ok);
    PyObject *found = NULL;
    if (ok && expect(score && outstanding, "an array is None")) {
        double lowest = score[0], least = -1.0;
        for (Py_ssize_t at = 1; at < targets; at++) lowest = score[at] < lowest ? score[at] : lowest;
        double limit = lowest + same * (lowest > 1.0 ? lowest : 1.0);
        for (Py_ssize_t at = 0; at < targets; at++) {
            if (!(score[at] <= limit)) continue;
            if (!tied++ || outstanding[at] < least) least = outstanding[at];
        }
        if (expect(tied, "a score is not a number"))
            found = Py_BuildValue("(nn)", among_equal(score, outstanding, limit, least, targets, seed), tied);
    }
    release(&arrays);
    return found;
}

/* mixed(clusters, rows, prices, weights, targets, engine, out): router.fleet_state.engine_state.PriceList.of. prices:
   float32 [clusters, rows], of which the last ones are one for each engine; out: float64 [4, targets]. */
PyObject *mixed(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != 7) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 7", count);
    Py_ssize_t clusters = PyLong_AsSsize_t(given[0]), rows = PyLong_AsSsize_t(given[1]);
    Py_ssize_t targets = PyLong_AsSsize_t(given[4]), engines = rows - 3 * targets;
    if (PyErr_Occurred() || !expect(clusters >= 0 && targets >= 0 && engines >= 0, "fewer prices than targets"))
        return NULL;
    Arrays arrays = {.held = 0};
    bool ok = true;
    const float *prices = read_array(&arrays, given[2], 'f', clusters * rows, false, &ok);
    const float *weights = read_array(&arrays, given[3], 'f', clusters, false, &ok);
    const int64_t *engine = read_array(&arrays, given[5], 'l', targets, false, &ok);
    double *out = read_array(&arrays, given[6], 'd', 4 * targets, true, &ok);
    ok = ok && expect(prices && weights && engine && out, "an array is None");
    for (Py_ssize_t at = 0; ok && at < targets; at++) ok = expect(engine[at] >= 0 && engine[at] < engines, "no such engine");
    float *sums = ok ? calloc((size_t)rows + 1, sizeof *sums) : NULL;
    if (ok && !sums) PyErr_NoMemory();
    if (sums) {
        for (Py_ssize_t cluster = 0; cluster < clusters; cluster++, prices += rows)
            for (Py_ssize_t row = 0; row < rows; row++) sums[row] += prices[row] * weights[cluster];
        for (Py_ssize_t row = 0; row < 3 * targets; row++) out[row] = sums[row];
        for (Py_ssize_t at = 0; at < targets; at++) out[3 * targets + at] = sums[3 * targets + engine[at]];
    }
    free(sums);
    release(&arrays);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}
