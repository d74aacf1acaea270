/* Blocks of one rank by their last use (router.prefix_index.approximate_index). */
#include "kernels.h"

#include <stdlib.h>

#define FEWEST 8 /* room of a new object, in blocks */

typedef struct {
    uint64_t block;
    uint32_t older, newer; /* neighbours by last use; `newer` of a free entry: the next free one */
} Entry;

typedef struct {
    PyObject_HEAD
    Entry *entries;  /* [room + 1]; the first stands for both ends: the newest is older than it, the oldest newer */
    uint32_t *index; /* [size] numbers of entries by hash, 0 for none; at most half of them are taken */
    uint64_t size, salt;
    int shift;
    uint32_t count, room, made, free;
} Recent;

static uint64_t place_of(const Recent *it, uint64_t block) { return block * it->salt >> it->shift; }

/* Return where the number of a block's entry is, or would be. */
static uint64_t find(const Recent *it, uint64_t block) {
    uint64_t at = place_of(it, block);
    while (it->index[at] && it->entries[it->index[at]].block != block) at = (at + 1) & (it->size - 1);
    return at;
}

static void unlink_entry(Recent *it, uint32_t entry) {
    Entry *gone = &it->entries[entry];
    it->entries[gone->older].newer = gone->newer;
    it->entries[gone->newer].older = gone->older;
}

static void make_newest(Recent *it, uint32_t entry) {
    uint32_t before = it->entries[0].older;
    it->entries[entry].older = before, it->entries[entry].newer = 0;
    it->entries[before].newer = it->entries[0].older = entry;
}

/* Make room for `more` further blocks. False with MemoryError set. */
static bool reserve(Recent *it, size_t more) {
    uint64_t room = it->room ? it->room : FEWEST;
    while (room < it->count + more) room *= 2;
    if (room == it->room) return true;
    Entry *entries = room < UINT32_MAX ? realloc(it->entries, (room + 1) * sizeof *entries) : NULL;
    if (entries) it->entries = entries;
    uint32_t *index = entries ? calloc(2 * room, sizeof *index) : NULL;
    if (!index) {
        PyErr_NoMemory();
        return false;
    }
    if (!it->room) it->entries[0] = (Entry){0, 0, 0};
    free(it->index);
    it->index = index, it->size = 2 * room, it->room = (uint32_t)room;
    it->shift = 64 - __builtin_ctzll(it->size);
    for (uint32_t at = it->entries[0].newer; at; at = it->entries[at].newer)
        it->index[find(it, it->entries[at].block)] = at;
    return true;
}

static uint32_t new_entry(Recent *it, uint64_t block) {
    uint32_t entry = it->free;
    if (entry)
        it->free = it->entries[entry].newer;
    else
        entry = ++it->made;
    it->entries[entry].block = block;
    it->count++;
    return entry;
}

/* Remove the oldest block and return it. Those behind its place in the index move up, so that `find` meets no gap. */
static uint64_t take_oldest(Recent *it) {
    uint32_t entry = it->entries[0].newer;
    uint64_t block = it->entries[entry].block, last = it->size - 1, gap = find(it, block), at = gap;
    while (it->index[at = (at + 1) & last]) {
        uint64_t first = place_of(it, it->entries[it->index[at]].block);
        if (((at - first) & last) >= ((at - gap) & last)) it->index[gap] = it->index[at], gap = at;
    }
    it->index[gap] = 0;
    unlink_entry(it, entry);
    it->entries[entry].newer = it->free, it->free = entry;
    it->count--;
    return block;
}

static bool append(PyObject *list, uint64_t block) {
    PyObject *number = PyLong_FromUnsignedLongLong(block);
    bool ok = number && !PyList_Append(list, number);
    Py_XDECREF(number);
    return ok;
}

static bool touch_all(Recent *it, const uint64_t *blocks, Py_ssize_t count, PyObject *added) {
    if (!reserve(it, (size_t)count)) return false;
    for (Py_ssize_t at = 0; at < count; at++) __builtin_prefetch(&it->index[place_of(it, blocks[at])]);
    for (Py_ssize_t nth = count - 1; nth >= 0; nth--) {
        uint64_t at = find(it, blocks[nth]);
        if (it->index[at]) {
            unlink_entry(it, it->index[at]);
        } else {
            if (!append(added, blocks[nth])) return false;
            it->index[at] = new_entry(it, blocks[nth]);
        }
        make_newest(it, it->index[at]);
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
    if (ok) ok = touch_all((Recent *)self, blocks.buf, all < most ? all : most, added);
    PyBuffer_Release(&blocks);
    if (!ok) Py_CLEAR(added);
    return added;
}

/* evict(count): remove as many blocks, the least recently used, and return them in that order. */
static PyObject *evict(PyObject *self, PyObject *given) {
    Recent *it = (Recent *)self;
    Py_ssize_t count = PyLong_AsSsize_t(given);
    if (PyErr_Occurred()) return NULL;
    PyObject *gone = PyList_New(0);
    for (; gone && count > 0 && it->count; count--)
        if (!append(gone, take_oldest(it))) Py_CLEAR(gone);
    return gone;
}

static Py_ssize_t length(PyObject *self) { return ((Recent *)self)->count; }

static void let_go(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    free(((Recent *)self)->entries);
    free(((Recent *)self)->index);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* RecentBlocks(salt): a secret number, so that no client can choose blocks of one place in the index. */
static PyObject *made(PyTypeObject *type, PyObject *given, PyObject *named) {
    unsigned long long salt;
    if (named && PyDict_Size(named)) return PyErr_Format(PyExc_TypeError, "RecentBlocks takes no names");
    if (!PyArg_ParseTuple(given, "K", &salt)) return NULL;
    Recent *it = (Recent *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!it) return NULL;
    it->salt = salt | 1;
    if (!reserve(it, 0)) Py_CLEAR(it);
    return (PyObject *)it;
}

static PyMethodDef methods[] = {
    {"touch", (PyCFunction)(void (*)(void))touch, METH_FASTCALL, NULL},
    {"evict", evict, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)made},    {Py_tp_dealloc, (void *)let_go}, {Py_tp_methods, methods},
    {Py_sq_length, (void *)length}, {0, NULL},
};

static PyType_Spec spec = {"router.kernels._compiled.RecentBlocks", sizeof(Recent), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, slots};

int add_recent_blocks(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    int failed = !type || PyModule_AddObjectRef(module, "RecentBlocks", type);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}
