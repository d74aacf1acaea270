#include "blocks.h"

#include <stdlib.h>

#define FEWEST 8 /* room of a new table */

static uint64_t first_place(const Blocks *it, uint64_t block) { return block * it->salt >> it->shift; }

void fetch_place(const Blocks *it, uint64_t block) { __builtin_prefetch(&it->index[first_place(it, block)]); }

uint32_t *place_of(const Blocks *it, uint64_t block) {
    uint64_t at = first_place(it, block);
    while (it->index[at] && it->entries[it->index[at]].block != block) at = (at + 1) & (it->size - 1);
    return &it->index[at];
}

/* Give the table an index of twice its room. */
static bool index_anew(Blocks *it) {
    uint32_t *old = it->index, *index = calloc(2 * (size_t)it->room, sizeof *index);
    if (!index) return false;
    uint64_t before = it->size;
    it->index = index, it->size = 2 * (uint64_t)it->room, it->shift = 64 - __builtin_ctzll(it->size);
    for (uint64_t at = 0; at < before; at++)
        if (old[at]) *place_of(it, it->entries[old[at]].block) = old[at];
    free(old);
    return true;
}

bool reserve(Blocks *it, size_t more) {
    uint64_t room = it->room ? it->room : FEWEST;
    while (room < it->count + more) room *= 2;
    if (room == it->room) return true;
    Entry *entries = room < UINT32_MAX ? realloc(it->entries, (room + 1) * sizeof *entries) : NULL;
    if (entries) {
        if (!it->entries) entries[0] = (Entry){.block = 0};
        uint32_t before = it->room;
        it->entries = entries, it->room = (uint32_t)room;
        if (index_anew(it)) return true;
        it->room = before;
    }
    PyErr_NoMemory();
    return false;
}

PyObject *new_blocks(PyTypeObject *type, PyObject *given, PyObject *named) {
    unsigned long long salt;
    if (named && PyDict_Size(named)) return PyErr_Format(PyExc_TypeError, "a table of blocks takes no names");
    if (!PyArg_ParseTuple(given, "K", &salt)) return NULL;
    PyObject *made = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0); /* zeros */
    if (!made) return NULL;
    Blocks *it = &((BlocksObject *)made)->blocks;
    it->salt = salt | 1;
    if (!reserve(it, 0)) Py_CLEAR(made);
    return made;
}

Py_ssize_t length_of_blocks(PyObject *self) { return ((BlocksObject *)self)->blocks.count; }

void free_blocks(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    free(((BlocksObject *)self)->blocks.entries);
    free(((BlocksObject *)self)->blocks.index);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

Entry *add_entry(Blocks *it, uint32_t *place, uint64_t block) {
    uint32_t number = it->free;
    if (number)
        it->free = it->entries[number].next_free;
    else
        number = ++it->made;
    *place = number;
    it->count++;
    it->entries[number].block = block;
    return &it->entries[number];
}

void remove_entry(Blocks *it, uint32_t *place) {
    it->entries[*place].next_free = it->free, it->free = *place;
    it->count--;
    /* Entries that found their first place taken move up, so that no search ends at the gap. */
    uint64_t last = it->size - 1, gap = (uint64_t)(place - it->index), at = gap;
    while (it->index[at = (at + 1) & last]) {
        uint64_t first = first_place(it, it->entries[it->index[at]].block);
        if (((at - first) & last) >= ((at - gap) & last)) it->index[gap] = it->index[at], gap = at;
    }
    it->index[gap] = 0;
}
