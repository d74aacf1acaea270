/* Entries of blocks, found by the blocks' hashes: open addressing with linear probing. */
#ifndef ROOST_ROUTER_BLOCKS_H
#define ROOST_ROUTER_BLOCKS_H

#include "kernels.h"

typedef struct {
    uint64_t block;
    union {
        PyObject *mask;                  /* of `BlockMasks`, owned */
        struct { uint32_t older, newer; }; /* of `RecentBlocks`: entries before and after it */
        uint32_t next_free;
    };
} Entry;

typedef struct {
    Entry *entries;  /* [room + 1]; the first stands for no block */
    uint32_t *index; /* [size] places: numbers of entries, 0 for none; at most half of them are taken */
    uint64_t size, salt;
    int shift;
    uint32_t count, room, made, free;
} Blocks;

/* An object that begins with a table. */
typedef struct {
    PyObject_HEAD
    Blocks blocks;
} BlocksObject;

/* Slots of such types: type(salt), where salt is a secret number, so that no client can choose blocks of one place; the
   number of blocks; the end, for a table whose entries own nothing. */
PyObject *new_blocks(PyTypeObject *type, PyObject *given, PyObject *named);
Py_ssize_t length_of_blocks(PyObject *self);
void free_blocks(PyObject *self);

/* Make room for `more` further blocks. False with MemoryError set. */
bool reserve(Blocks *it, size_t more);

/* Have the processor fetch the place of a block. */
void fetch_place(const Blocks *it, uint64_t block);

/* Return the place that has the number of a block's entry, or 0 where it would be. */
uint32_t *place_of(const Blocks *it, uint64_t block);

/* Give a block, which has none, an entry at its place. There must be room. */
Entry *add_entry(Blocks *it, uint32_t *place, uint64_t block);

/* Remove the entry at a place. What it owned is the caller's. */
void remove_entry(Blocks *it, uint32_t *place);

#endif
