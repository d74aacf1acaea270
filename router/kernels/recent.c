/* Blocks of one rank by their last use (router.prefix_index.approximate_index). */
#include "blocks.h"

/* The first entry stands for both ends: the newest block is older than it, and the oldest newer. */

static void unlink_entry(Entry *entries, uint32_t number) {
    Entry *gone = &entries[number];
    entries[gone->older].newer = gone->newer;
    entries[gone->newer].older = gone->older;
}

static void make_newest(Entry *entries, uint32_t number) {
    uint32_t before = entries[0].older;
    entries[number].older = before, entries[number].newer = 0;
    entries[before].newer = entries[0].older = number;
}

static bool append(PyObject *list, uint64_t block) {
    PyObject *number = PyLong_FromUnsignedLongLong(block);
    bool ok = number && !PyList_Append(list, number);
    Py_XDECREF(number);
    return ok;
}

static bool touch_all(Blocks *it, const uint64_t *blocks, Py_ssize_t count, PyObject *added) {
    if (!reserve(it, (size_t)count)) return false;
    for (Py_ssize_t at = 0; at < count; at++) fetch_place(it, blocks[at]);
    for (Py_ssize_t at = count - 1; at >= 0; at--) {
        uint32_t *place = place_of(it, blocks[at]);
        if (*place) {
            unlink_entry(it->entries, *place);
        } else {
            if (!append(added, blocks[at])) return false;
            add_entry(it, place, blocks[at]);
        }
        make_newest(it->entries, *place);
    }
    return true;
}

/* touch(blocks, most): use the first `most` blocks (u64), from the last to the first. Returns the new ones. */
static PyObject *touch(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 2", count);
    Py_ssize_t most = PyLong_AsSsize_t(given[1]);
    Py_buffer blocks;
    if (PyErr_Occurred() || PyObject_GetBuffer(given[0], &blocks, PyBUF_SIMPLE)) return NULL;
    Py_ssize_t all = blocks.len / 8;
    PyObject *added = PyList_New(0);
    bool ok = added && expect(blocks.len % 8 == 0 && most >= 0, "blocks are numbers of 8 bytes, and not fewer than none");
    if (ok) ok = touch_all(&((BlocksObject *)self)->blocks, blocks.buf, all < most ? all : most, added);
    PyBuffer_Release(&blocks);
    if (!ok) Py_CLEAR(added);
    return added;
}

/* evict(count): remove as many blocks, the least recently used, and return them in that order. */
static PyObject *evict(PyObject *self, PyObject *given) {
    Blocks *it = &((BlocksObject *)self)->blocks;
    Py_ssize_t count = PyLong_AsSsize_t(given);
    if (PyErr_Occurred()) return NULL;
    PyObject *gone = PyList_New(0);
    for (; gone && count > 0 && it->count; count--) {
        uint32_t oldest = it->entries[0].newer;
        uint64_t block = it->entries[oldest].block;
        if (!append(gone, block)) {
            Py_CLEAR(gone);
        } else {
            unlink_entry(it->entries, oldest);
            remove_entry(it, place_of(it, block));
        }
    }
    return gone;
}

static PyMethodDef methods[] = {
    {"touch", (PyCFunction)(void (*)(void))touch, METH_FASTCALL, NULL},
    {"evict", evict, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)new_blocks},          {Py_tp_dealloc, (void *)free_blocks}, {Py_tp_methods, methods},
    {Py_sq_length, (void *)length_of_blocks}, {0, NULL},
};

PyType_Spec recent_blocks = {"router.kernels._compiled.RecentBlocks", sizeof(BlocksObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, slots};
