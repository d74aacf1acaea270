/* Layers of a placement by the origin of demand. */
#ifndef ROOST_LOCALITY_H
#define ROOST_LOCALITY_H

#include "kernels.h"

typedef struct {
    int64_t layers, ranks, experts, nodes;
    const int64_t *node; /* [ranks] */
} Shape;

static inline int64_t node_of(const Shape *it, int64_t rank) { return it->nodes == 1 ? 0 : it->node[rank]; }
/* Read a shape from arrays of [layers, ranks, experts], [layers, nodes, experts] and [ranks]. */
bool shape_of(Shape *into, const Argument *own, const Argument *shared, const Argument *node, int64_t layers);
/* True if `held`, argument 3, and `home`, argument 4 or NULL, are [layers, ranks, experts]. */
bool held_fits(const Argument *arguments, const Shape *it);

#endif
