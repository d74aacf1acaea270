/* Sequence hashes of a prompt's blocks (fleet.blocks), and the walk along them through the index of blocks
   (router.prefix_index.block_index). A prompt is a list of token ids, or a buffer of four bytes a token. */
#include "arrays.h"
#include "keyed.h"
#include "masks.h"

#include <stdlib.h>
#include <string.h>

#define CHAIN_SEED 1337 /* fleet.blocks.SEED: of all hashes but the local ones */

typedef struct {
    PyObject *ids;    /* borrowed list; NULL: `raw` is the prompt */
    Py_buffer raw;    /* held unless `ids` */
    Py_ssize_t size;  /* tokens of a block */
    Py_ssize_t total; /* whole blocks of the prompt */
    uint64_t seed;    /* of local hashes */
    uint32_t *block;  /* space for the ids of one block */
    uint64_t *hashes; /* space for `total`, of which the first `known` are known */
    Py_ssize_t known;
} Prompt;

static void close_prompt(Prompt *prompt) {
    if (!prompt->ids && prompt->raw.obj) PyBuffer_Release(&prompt->raw);
    free(prompt->block);
    free(prompt->hashes);
}

/* Take the hashes that are known already from a buffer. */
static bool take_known(Prompt *prompt, PyObject *chained) {
    Py_buffer known;
    if (PyObject_GetBuffer(chained, &known, PyBUF_SIMPLE)) return false;
    bool ok = known.len <= 8 * prompt->total;
    if (ok) {
        memcpy(prompt->hashes, known.buf, (size_t)known.len);
        prompt->known = known.len / 8;
    } else
        PyErr_Format(PyExc_ValueError, "%zd bytes of hashes of %zd blocks", known.len, prompt->total);
    PyBuffer_Release(&known);
    return ok;
}

/* `given`: prompt, size, seed, chained. False with an exception set; `close_prompt` must follow in both cases. */
static bool open_prompt(Prompt *prompt, PyObject *const *given) {
    prompt->size = PyLong_AsSsize_t(given[1]);
    prompt->seed = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(given[2]);
    if (PyErr_Occurred()) return false;
    if (PyList_Check(given[0]))
        prompt->ids = given[0];
    else if (PyObject_GetBuffer(given[0], &prompt->raw, PyBUF_SIMPLE))
        return false;
    if (prompt->size < 1) {
        PyErr_Format(PyExc_ValueError, "blocks of %zd tokens", prompt->size);
        return false;
    }
    prompt->total = (prompt->ids ? PyList_Size(prompt->ids) : prompt->raw.len / 4) / prompt->size;
    prompt->block = prompt->ids ? malloc(sizeof *prompt->block * (size_t)prompt->size) : NULL;
    prompt->hashes = malloc(sizeof *prompt->hashes * (size_t)(prompt->total + 1));
    if (!prompt->hashes || (prompt->ids && !prompt->block)) {
        PyErr_NoMemory();
        return false;
    }
    return take_known(prompt, given[3]);
}

/* Return the bytes of a block. NULL, with TypeError or OverflowError set, for an id outside u32. */
static const uint8_t *bytes_of(Prompt *prompt, Py_ssize_t block) {
    if (!prompt->ids) return (const uint8_t *)prompt->raw.buf + 4 * prompt->size * block;
    for (Py_ssize_t at = 0; at < prompt->size; at++) {
        PyObject *item = PyList_GetItem(prompt->ids, block * prompt->size + at); /* borrowed */
        unsigned long id = item ? PyLong_AsUnsignedLong(item) : (unsigned long)-1;
        if (id > UINT32_MAX) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_OverflowError, "token id %lu is outside u32", id);
            return NULL;
        }
        prompt->block[at] = (uint32_t)id;
    }
    return (const uint8_t *)prompt->block;
}

/* Extend the known hashes to `depth`. */
static bool reach(Prompt *prompt, Py_ssize_t depth) {
    for (; prompt->known < depth; prompt->known++) {
        const uint8_t *block = bytes_of(prompt, prompt->known);
        if (!block) return false;
        uint64_t local = xxh3(block, 4 * (size_t)prompt->size, prompt->seed);
        if (prompt->known) {
            uint64_t pair[] = {prompt->hashes[prompt->known - 1], local};
            local = xxh3((const uint8_t *)pair, sizeof pair, CHAIN_SEED);
        }
        prompt->hashes[prompt->known] = local;
    }
    return true;
}

static PyObject *chain_of(const Prompt *prompt) {
    return PyBytes_FromStringAndSize((const char *)prompt->hashes, 8 * prompt->known);
}

/* chain(prompt, size, seed, chained, depth): bytes of the u64 sequence hashes of at least the first `depth` blocks.
   chained: bytes of those that are known. */
PyObject *chain(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != 5) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 5", count);
    Prompt prompt = {0};
    Py_ssize_t depth = PyLong_AsSsize_t(given[4]);
    bool ok = !PyErr_Occurred() && open_prompt(&prompt, given);
    if (ok && (depth < 0 || depth > prompt.total)) {
        PyErr_Format(PyExc_ValueError, "block %zd of a prompt of %zd", depth, prompt.total);
        ok = false;
    }
    PyObject *found = ok && reach(&prompt, depth) ? chain_of(&prompt) : NULL;
    close_prompt(&prompt);
    return found;
}

/* fleet.prediction.longest_known, for a prompt whose hashes are computed on access. */
static Py_ssize_t longest(Prompt *prompt, const Rows *table, Py_ssize_t guess, Py_ssize_t widest, const char **row) {
    Py_ssize_t low = 0, high = prompt->total, step = guess > 1 ? guess : 1, next = 1;
    while (low < high) {
        Py_ssize_t middle = !step ? (low + high + 1) / 2 : low + step < high ? low + step : high;
        if (!reach(prompt, middle)) return -1;
        const char *found = row_of(table, prompt->hashes[middle - 1]);
        if (!found) {
            high = middle - 1, step = 0;
            continue;
        }
        low = middle, *row = found;
        if (!step) continue;
        step = next, next = 2 * next < widest ? 2 * next : widest;
    }
    return low;
}

/* longest_known(prompt, size, seed, chained, keys, rows, ways, stride, width, guess, widest): the hashes known then, the
   leading blocks whose rows are known, and the row of the last of them or None. */
PyObject *longest_known(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != 11) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 11", count);
    Prompt prompt = {0};
    Rows table = {0};
    const char *row = NULL;
    PyObject *found = NULL;
    Py_ssize_t guess = PyLong_AsSsize_t(given[9]), widest = PyLong_AsSsize_t(given[10]);
    if (!PyErr_Occurred() && open_prompt(&prompt, given) && open_rows(&table, given + 4)) {
        Py_ssize_t blocks = longest(&prompt, &table, guess, widest < 1 ? 1 : widest, &row);
        if (blocks >= 0) found = Py_BuildValue("(NnN)", chain_of(&prompt), blocks, row_bytes(&table, row));
    }
    close_rows(&table);
    close_prompt(&prompt);
    return found;
}

/* The walk: masks by hash, and the ranks that hold every block so far. */
typedef struct {
    const Blocks *masks, *old;
    PyObject *held;  /* owned */
    PyObject *gappy; /* borrowed */
    int64_t *depths; /* [slots] leading blocks of each rank: what the walk finds, of ranks that hold any */
    Py_ssize_t slots;
} Walk;

/* Return those of some ranks (a new reference) that hold a block; NULL with an exception set. */
static PyObject *holders(const Walk *walk, uint64_t hash, PyObject *among) {
    PyObject *mask = mask_of(walk->masks, hash);
    if (!mask) mask = mask_of(walk->old, hash);
    return mask ? PyNumber_And(among, mask) : PyLong_FromLong(0);
}

/* Note that the prefixes of some ranks end at a depth. */
static bool end_at(Walk *walk, Py_ssize_t depth, PyObject *ranks) {
    char *bytes;
    Py_ssize_t length;
    PyObject *bits = PyObject_CallMethod(ranks, "to_bytes", "ns", (walk->slots + 7) / 8, "little");
    bool ok = bits && !PyBytes_AsStringAndSize(bits, &bytes, &length);
    for (Py_ssize_t at = 0; ok && at < walk->slots; at++) {
        if (!bytes[at / 8])
            at |= 7; /* none of eight */
        else if (bytes[at / 8] >> at % 8 & 1)
            walk->depths[at] = depth;
    }
    Py_XDECREF(bits);
    return ok;
}

/* Note that the prefixes of the ranks in `held` and not in `still` end at a depth. */
static bool lost_at(Walk *walk, Py_ssize_t depth, PyObject *held, PyObject *still) {
    if (!depth) return true; /* they hold nothing, as `depths` says already */
    PyObject *lost = PyNumber_Xor(held, still);
    bool ok = lost && end_at(walk, depth, lost);
    Py_XDECREF(lost);
    return ok;
}

/* router.prefix_index.block_index._halve */
static bool halve(Walk *walk, const Prompt *prompt, Py_ssize_t at, Py_ssize_t stop, PyObject *held, PyObject *still) {
    int same = PyObject_RichCompareBool(held, still, Py_EQ);
    if (same) return same > 0;
    if (stop == at + 1) return lost_at(walk, at, held, still);
    Py_ssize_t middle = (at + stop) / 2;
    PyObject *between = holders(walk, prompt->hashes[middle - 1], held);
    bool ok = between && halve(walk, prompt, at, middle, held, between) &&
              halve(walk, prompt, middle, stop, between, still);
    Py_XDECREF(between);
    return ok;
}

/* Walk from `at` to `stop`, exclusive: by halves, or block by block where a rank may have gaps. */
static bool narrow(Walk *walk, const Prompt *prompt, Py_ssize_t at, Py_ssize_t stop) {
    PyObject *part = PyNumber_And(walk->held, walk->gappy);
    int gaps = part ? PyObject_IsTrue(part) : -1;
    Py_XDECREF(part);
    for (Py_ssize_t next = gaps ? at + 1 : stop; gaps >= 0 && at < stop; at = next, next++) {
        PyObject *still = holders(walk, prompt->hashes[next - 1], walk->held);
        if (!still || !halve(walk, prompt, at, next, walk->held, still)) gaps = -1;
        if (!still) break;
        Py_DECREF(walk->held);
        walk->held = still;
    }
    return gaps >= 0;
}

/* router.prefix_index.block_index.ends_of, whose comments say why. */
static bool walk_along(Walk *walk, Prompt *prompt, Py_ssize_t widest) {
    Py_ssize_t at = 0, step = 1;
    int held;
    while ((held = PyObject_IsTrue(walk->held)) == 1 && at < prompt->total) {
        Py_ssize_t reached = at + step < prompt->total ? at + step : prompt->total;
        step = 2 * step < widest ? 2 * step : widest;
        if (!reach(prompt, reached)) return false;
        while (at < prompt->known && (held = PyObject_IsTrue(walk->held)) == 1) {
            Py_ssize_t stop = at + widest < prompt->known ? at + widest : prompt->known;
            if (!narrow(walk, prompt, at, stop)) return false;
            at = stop;
        }
    }
    return held < 1 ? held == 0 : end_at(walk, prompt->total, walk->held);
}

/* Copy the depths of the slots of targets, and return the largest of them; -1, with ValueError set, for no such slot. */
static int64_t spread(const Walk *walk, const int64_t *slots, Py_ssize_t targets, int64_t *out) {
    int64_t most = 0;
    for (Py_ssize_t at = 0; at < targets; at++) {
        if (!expect(slots[at] >= 0 && slots[at] < walk->slots, "no such slot")) return -1;
        out[at] = walk->depths[slots[at]];
        if (out[at] > most) most = out[at];
    }
    return most;
}

/* walk(prompt, size, seed, chained, masks, old, held, gappy, widest, slots, targets, of, out): (bytes of the hashes known
   then, the most leading blocks of a target). */
PyObject *walk(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != 13) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 13", count);
    const Blocks *masks = masks_of(given[4]), *old = masks ? masks_of(given[5]) : NULL;
    if (!old) return NULL;
    if (!PyLong_Check(given[6]) || !PyLong_Check(given[7]))
        return PyErr_Format(PyExc_TypeError, "ranks are numbers");
    Prompt prompt = {0};
    Py_ssize_t widest = PyLong_AsSsize_t(given[8]), slots = PyLong_AsSsize_t(given[9]);
    Py_ssize_t targets = PyLong_AsSsize_t(given[10]);
    Walk state = {.masks = masks, .old = old, .held = Py_NewRef(given[6]), .gappy = given[7], .slots = slots};
    Arrays arrays = {.held = 0};
    PyObject *found = NULL;
    bool ok = !PyErr_Occurred() && expect(slots >= 0 && targets >= 0, "fewer than no targets");
    const int64_t *of = read_array(&arrays, given[11], 'l', targets, false, &ok);
    int64_t *out = read_array(&arrays, given[12], 'l', targets, true, &ok);
    ok = ok && expect(of && out, "an array is None");
    state.depths = ok ? calloc((size_t)slots + 1, sizeof *state.depths) : NULL;
    if (ok && !state.depths) PyErr_NoMemory();
    if (state.depths && open_prompt(&prompt, given) && walk_along(&state, &prompt, widest < 1 ? 1 : widest)) {
        int64_t most = spread(&state, of, targets, out);
        if (most >= 0) found = Py_BuildValue("(NL)", chain_of(&prompt), (long long)most);
    }
    close_prompt(&prompt);
    free(state.depths);
    release(&arrays);
    Py_XDECREF(state.held);
    return found;
}
