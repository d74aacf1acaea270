/* Masks of ranks by block. */
#ifndef ROOST_ROUTER_MASKS_H
#define ROOST_ROUTER_MASKS_H

#include "blocks.h"

/* Return the blocks of a `BlockMasks`; NULL, with TypeError set, for another object. */
const Blocks *masks_of(PyObject *given);

/* The mask of a block, borrowed; NULL if it has none. */
PyObject *mask_of(const Blocks *it, uint64_t block);

#endif
