/* Masks of the ranks that hold each block (router.prefix_index.block_masks, whose comments say why). A mask is a number
   of Python's, and never 0. */
#include "masks.h"

typedef struct {
    PyObject_HEAD
    Blocks blocks;
    uint64_t swept; /* places before it are empty */
} Masks;

static void let_go(PyObject *self);

static Masks *opened(PyObject *given) {
    if (PyType_GetSlot(Py_TYPE(given), Py_tp_dealloc) == (void *)let_go) return (Masks *)given;
    PyErr_SetString(PyExc_TypeError, "masks are BlockMasks");
    return NULL;
}

const Blocks *masks_of(PyObject *given) {
    Masks *it = opened(given);
    return it ? &it->blocks : NULL;
}

PyObject *mask_of(const Blocks *it, uint64_t block) {
    uint32_t number = it->count ? *place_of(it, block) : 0;
    return number ? it->entries[number].mask : NULL;
}

/* Read a number. False without an exception for one outside u64, which no block has, and with one for another object. */
static bool read_block(PyObject *given, uint64_t *block) {
    *block = PyLong_AsUnsignedLongLong(given);
    if (*block != UINT64_MAX || !PyErr_Occurred()) return true;
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) PyErr_Clear();
    return false;
}

/* Make room for further blocks. Where the index is made anew, any place may be taken. */
static bool make_room(Masks *it, size_t more) {
    uint64_t before = it->blocks.size;
    if (!reserve(&it->blocks, more)) return false;
    if (it->blocks.size != before) it->swept = 0;
    return true;
}

/* Set a block's mask, whose reference is taken. There must be room. */
static void put(Masks *it, uint64_t block, PyObject *mask) {
    uint32_t *place = place_of(&it->blocks, block);
    if (*place) {
        Entry *entry = &it->blocks.entries[*place];
        Py_DECREF(entry->mask);
        entry->mask = mask;
        return;
    }
    add_entry(&it->blocks, place, block)->mask = mask;
    if ((uint64_t)(place - it->blocks.index) < it->swept) it->swept = (uint64_t)(place - it->blocks.index);
}

/* Remove a block and return its mask, a new reference; NULL if it has none. */
static PyObject *take(Masks *it, uint64_t block) {
    uint32_t *place = it->blocks.count ? place_of(&it->blocks, block) : NULL;
    if (!place || !*place) return NULL;
    PyObject *mask = it->blocks.entries[*place].mask;
    remove_entry(&it->blocks, place);
    return mask;
}

/* Return the one object that stands for equal masks, a new reference in place of the one given. */
static PyObject *one_for(PyObject *shared, PyObject *mask) {
    PyObject *known = mask ? PyDict_GetItemWithError(shared, mask) : NULL; /* borrowed */
    if (!known && mask && !PyErr_Occurred() && !PyDict_SetItem(shared, mask, mask)) return mask;
    Py_XINCREF(known);
    Py_XDECREF(mask);
    return known;
}

static int both(PyObject *mask, PyObject *bits) {
    PyObject *common = PyNumber_And(mask, bits);
    int found = common ? PyObject_IsTrue(common) : -1;
    Py_XDECREF(common);
    return found;
}

/* What `grant` and `withdraw` change. */
typedef struct {
    Masks *masks, *old;
    PyObject *bit, *live, *shared;
} Change;

/* Return the valid bits of a block that was not swept, and remove it; a new reference, NULL with an exception set. */
static PyObject *swept(const Change *in, uint64_t block) {
    PyObject *mask = take(in->old, block);
    if (!mask) return PyLong_FromLong(0);
    PyObject *valid = PyNumber_And(mask, in->live);
    Py_DECREF(mask);
    return valid;
}

/* Add the bit to one block's mask. 1 if it was not there, -1 with an exception set. */
static int grant_one(const Change *in, uint64_t block) {
    PyObject *known = mask_of(&in->masks->blocks, block);
    int had = known ? both(known, in->bit) : 0;
    if (had) return had < 0 ? -1 : 0;
    if (!known && !in->old->blocks.count) {
        put(in->masks, block, Py_NewRef(in->bit));
        return 1;
    }
    PyObject *mask = known ? Py_NewRef(known) : swept(in, block);
    if (mask && !known) had = both(mask, in->bit);
    PyObject *grown = mask && had >= 0 ? one_for(in->shared, PyNumber_Or(mask, in->bit)) : NULL;
    Py_XDECREF(mask);
    if (!grown) return -1;
    put(in->masks, block, grown);
    return !had;
}

/* grant(blocks, bit, old, live, shared): the number of blocks whose masks lacked the bit. */
static PyObject *grant(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    if (count != 5) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 5", count);
    Change in = {(Masks *)self, opened(given[2]), given[1], given[3], given[4]};
    Py_ssize_t length = in.old ? PySequence_Size(given[0]) : -1;
    if (length < 0 || !make_room(in.masks, (size_t)length)) return NULL;
    long added = 0;
    for (Py_ssize_t at = 0; at < length; at++) {
        PyObject *item = PySequence_GetItem(given[0], at);
        uint64_t block = item ? PyLong_AsUnsignedLongLong(item) : 0;
        int one = PyErr_Occurred() ? -1 : grant_one(&in, block);
        Py_XDECREF(item);
        if (one < 0) return NULL;
        added += one;
    }
    return PyLong_FromLong(added);
}

/* Remove the bit from one block's mask. 1 if it was there, -1 with an exception set. */
static int withdraw_one(const Change *in, uint64_t block) {
    Masks *masks = mask_of(&in->old->blocks, block) ? in->old : in->masks;
    PyObject *mask = mask_of(&masks->blocks, block);
    int had = mask ? both(mask, in->bit) : 0;
    if (had < 1) return had;
    int alone = PyObject_RichCompareBool(mask, in->bit, Py_EQ);
    if (alone < 0) return -1;
    if (alone) {
        Py_DECREF(take(masks, block));
        return 1;
    }
    PyObject *left = one_for(in->shared, PyNumber_Xor(mask, in->bit));
    if (!left) return -1;
    put(masks, block, left);
    return 1;
}

/* withdraw(blocks, bit, old, shared): the list of the blocks whose masks had the bit. */
static PyObject *withdraw(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    if (count != 4) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 4", count);
    Change in = {(Masks *)self, opened(given[2]), given[1], NULL, given[3]};
    Py_ssize_t length = in.old ? PySequence_Size(given[0]) : -1;
    PyObject *lost = length < 0 ? NULL : PyList_New(0);
    for (Py_ssize_t at = 0; lost && at < length; at++) {
        uint64_t block;
        PyObject *item = PySequence_GetItem(given[0], at);
        int one = !item ? -1 : read_block(item, &block) ? withdraw_one(&in, block) : PyErr_Occurred() ? -1 : 0;
        if (one < 0 || (one && PyList_Append(lost, item))) Py_CLEAR(lost);
        Py_XDECREF(item);
    }
    return lost;
}

/* get(block): its mask; None if it has none. */
static PyObject *get(PyObject *self, PyObject *given) {
    uint64_t block;
    PyObject *mask = read_block(given, &block) ? mask_of(&((Masks *)self)->blocks, block) : NULL;
    return mask ? Py_NewRef(mask) : PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* sweep(count, live, into, shared): move up to `count` blocks with their valid bits. The list of those without any. */
static PyObject *sweep(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    if (count != 4) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 4", count);
    Masks *it = (Masks *)self;
    Change in = {opened(given[2]), it, NULL, given[1], given[3]};
    Py_ssize_t most = PyLong_AsSsize_t(given[0]);
    if (!in.masks || PyErr_Occurred()) return NULL;
    if (most > it->blocks.count) most = it->blocks.count;
    PyObject *gone = make_room(in.masks, most > 0 ? (size_t)most : 0) ? PyList_New(0) : NULL;
    for (; gone && most > 0; most--) {
        while (!it->blocks.index[it->swept]) it->swept++;
        uint64_t block = it->blocks.entries[it->blocks.index[it->swept]].block;
        PyObject *mask = swept(&in, block), *number = NULL;
        int valid = mask ? PyObject_IsTrue(mask) : -1;
        if (valid > 0 && (mask = one_for(in.shared, mask))) {
            put(in.masks, block, mask);
            continue;
        }
        if (valid == 0) number = PyLong_FromUnsignedLongLong(block);
        if (!number || PyList_Append(gone, number)) Py_CLEAR(gone);
        Py_XDECREF(number);
        Py_XDECREF(mask);
    }
    return gone;
}

static int contains(PyObject *self, PyObject *given) {
    uint64_t block;
    if (!read_block(given, &block)) return PyErr_Occurred() ? -1 : 0;
    return mask_of(&((Masks *)self)->blocks, block) != NULL;
}

static void let_go(PyObject *self) {
    Blocks *it = &((Masks *)self)->blocks;
    for (uint64_t at = 0; it->count && at < it->size; at++)
        if (it->index[at]) Py_DECREF(it->entries[it->index[at]].mask);
    free_blocks(self);
}

static PyMethodDef methods[] = {
    {"grant", (PyCFunction)(void (*)(void))grant, METH_FASTCALL, NULL},
    {"withdraw", (PyCFunction)(void (*)(void))withdraw, METH_FASTCALL, NULL},
    {"sweep", (PyCFunction)(void (*)(void))sweep, METH_FASTCALL, NULL},
    {"get", get, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)new_blocks},          {Py_tp_dealloc, (void *)let_go},    {Py_tp_methods, methods},
    {Py_sq_length, (void *)length_of_blocks}, {Py_sq_contains, (void *)contains}, {0, NULL},
};

PyType_Spec block_masks = {"router.kernels._compiled.BlockMasks", sizeof(Masks), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, slots};
