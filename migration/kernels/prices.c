/* Who serves whose tokens, and the ranks and nodes that they reach (cost_model.py). Arrays of a layer are [experts,
   ranks] or [ranks, ranks]: the last index is the rank of the tokens. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

#define TINY 1e-300

typedef struct {
    int64_t layers, ranks, experts, nodes, per;
    int64_t top_k; /* draws of a token; for nodes 0: the caller counts those that it reaches */
    int64_t node_top_k;
    const int64_t *node;
} Shape;

/* Space of one layer. */
typedef struct {
    double *left;              /* [experts, ranks] pairs that their rank does not keep */
    double *claimed;           /* [experts, nodes] */
    double *rest;              /* [experts, ranks] part that the claims of a rank's node leave */
    double *here, *row, *power; /* [ranks] */
} Space;

/* What is found of one layer: [ranks] each, but for mass [nodes, ranks] and nodes_in [nodes]. */
typedef struct {
    double *pairs, *load, *local, *ranks_out, *ranks_in, *mass, *nodes_out, *nodes_in;
} Found;

/* into [experts, ranks] = the demand [ranks, experts] of a layer, in tiles that stay in the cache. */
WIDE static void turned(const double *restrict demand, int64_t ranks, int64_t experts, double *restrict into) {
    const int64_t tile = 16;
    for (int64_t first = 0; first < ranks; first += tile)
        for (int64_t begin = 0; begin < experts; begin += tile)
            for (int64_t rank = first; rank < ranks && rank < first + tile; rank++)
                for (int64_t expert = begin; expert < experts && expert < begin + tile; expert++)
                    into[expert * ranks + rank] = demand[rank * experts + expert];
}

/* Serve the tokens of all ranks for one expert alike. */
WIDE static void serve(double *restrict here, const double *restrict left, double weight, int64_t ranks) {
    for (int64_t from = 0; from < ranks; from++) here[from] += left[from] * weight;
}

/* The same where nodes claim their ranks' tokens: near, of the node `own` of the slot. */
WIDE static void serve_nodes(double *restrict here, const double *restrict left, const double *restrict rest,
                             const int64_t *restrict node, double spill, double near, int64_t own, int64_t ranks) {
    for (int64_t from = 0; from < ranks; from++)
        here[from] += left[from] * (spill * rest[from] + (node[from] == own ? near : 0.0));
}

/* here = here / pairs, which is added to the mass too. */
WIDE static void divide(double *restrict here, double *restrict mass, const double *restrict pairs, int64_t ranks) {
    for (int64_t at = 0; at < ranks; at++) {
        here[at] /= pairs[at] > TINY ? pairs[at] : TINY;
        mass[at] += here[at];
    }
}

/* row = (1 - (1 - mass)^top_k) * pairs: the tokens that get somewhere, which are added to `out` too. */
WIDE static void reach(const double *restrict mass, const double *restrict pairs, int64_t top_k, int64_t ranks,
                       double *restrict row, double *restrict out) {
    bool once = top_k & 1, twice = top_k & 2, four = top_k & 4, eight = top_k & 8;
    for (int64_t at = 0; at < ranks; at++) {
        double part = mass[at] > 0.0 ? mass[at] : 0.0;
        double one = 1.0 - (part < 1.0 ? part : 1.0), square = one * one, fourth = square * square;
        double power = once ? one : 1.0;
        power *= twice ? square : 1.0;
        power *= four ? fourth : 1.0;
        row[at] = power * (eight ? fourth * fourth : 1.0);
    }
    /* Few models draw more than 15 experts. */
    for (int64_t left = top_k & ~INT64_C(15), done = 0; left; left &= ~(INT64_C(1) << done)) {
        while (!(left >> done & 1)) done++;
        for (int64_t at = 0; at < ranks; at++) {
            double square = 1.0 - (mass[at] > 0.0 ? (mass[at] < 1.0 ? mass[at] : 1.0) : 0.0);
            for (int64_t bit = 0; bit < done; bit++) square *= square;
            row[at] *= square;
        }
    }
    for (int64_t at = 0; at < ranks; at++) {
        row[at] = (1.0 - row[at]) * pairs[at];
        out[at] += row[at];
    }
}

WIDE static void add(double *restrict into, const double *restrict values, int64_t count) {
    for (int64_t at = 0; at < count; at++) into[at] += values[at];
}

/* The tokens that a rank's slots serve, of all ranks, in space->here. Return those that the rank keeps. */
static double serve_all(const Shape *it, int64_t rank, const int16_t *row, const double *keep, const double *spill,
                        const double *near, bool by_node, const Space *space, const double *demand) {
    double kept = 0.0;
    int64_t own = it->node[rank];
    memset(space->here, 0, (size_t)it->ranks * sizeof *space->here);
    for (int64_t slot = rank * it->per; slot < (rank + 1) * it->per; slot++) {
        int64_t expert = row[slot];
        if (expert == EMPTY) continue;
        kept += demand[rank * it->experts + expert] * keep[slot];
        const double *left = space->left + expert * it->ranks;
        if (!by_node) {
            serve(space->here, left, spill[slot], it->ranks);
            continue;
        }
        double claimed = space->claimed[expert * it->nodes + own];
        serve_nodes(space->here, left, space->rest + expert * it->ranks, it->node, spill[slot],
                    near[slot] / (claimed > 1.0 ? claimed : 1.0), own, it->ranks);
    }
    return kept;
}

/* Pairs that are not kept, by expert, and what nodes' claims leave of them. False: an expert out of range. */
static bool begin(const Shape *it, const int16_t *row, const double *keep, const double *near, bool by_node,
                  const double *demand, const Space *space, const Found *into) {
    for (int64_t rank = 0; rank < it->ranks; rank++)
        into->pairs[rank] = add_row(demand + rank * it->experts, it->experts);
    turned(demand, it->ranks, it->experts, space->left);
    memset(space->claimed, 0, (size_t)(it->nodes * it->experts) * sizeof *space->claimed);
    for (int64_t slot = 0; slot < it->ranks * it->per; slot++) {
        int64_t rank = slot / it->per, expert = row[slot];
        if (expert == EMPTY) continue;
        if (expert < 0 || expert >= it->experts) return false;
        space->left[expert * it->ranks + rank] -= demand[rank * it->experts + expert] * keep[slot];
        space->claimed[expert * it->nodes + it->node[rank]] += near[slot];
    }
    for (int64_t expert = 0; by_node && expert < it->experts; expert++) {
        const double *claimed = space->claimed + expert * it->nodes;
        for (int64_t node = 0; node < it->nodes; node++)
            space->power[node] = 1.0 - claimed[node] / (claimed[node] > 1.0 ? claimed[node] : 1.0);
        for (int64_t rank = 0; rank < it->ranks; rank++)
            space->rest[expert * it->ranks + rank] = space->power[it->node[rank]];
    }
    return true;
}

static bool one_layer(const Shape *it, const int16_t *row, const double *keep, const double *spill,
                      const double *near, bool by_node, const double *demand, const Space *space,
                      const Found *into) {
    if (!begin(it, row, keep, near, by_node, demand, space, into)) return false;
    size_t places = (size_t)(it->nodes * it->ranks);
    memset(into->mass, 0, places * sizeof *into->mass);
    memset(into->ranks_out, 0, (size_t)it->ranks * sizeof *into->ranks_out);
    memset(into->nodes_out, 0, (size_t)it->ranks * sizeof *into->nodes_out);
    for (int64_t rank = 0; rank < it->ranks; rank++) {
        double kept = serve_all(it, rank, row, keep, spill, near, by_node, space, demand);
        space->here[rank] += kept;
        into->local[rank] = space->here[rank];
        into->load[rank] = add_row(space->here, it->ranks);
        double out = into->ranks_out[rank];
        divide(space->here, into->mass + it->node[rank] * it->ranks, into->pairs, it->ranks);
        reach(space->here, into->pairs, it->top_k, it->ranks, space->row, into->ranks_out);
        space->row[rank] = 0.0, into->ranks_out[rank] = out;
        into->ranks_in[rank] = add_row(space->row, it->ranks);
    }
    for (int64_t node = 0; node < it->nodes && it->node_top_k; node++) {
        memset(space->here, 0, (size_t)it->ranks * sizeof *space->here);
        reach(into->mass + node * it->ranks, into->pairs, it->node_top_k, it->ranks, space->row, space->here);
        for (int64_t rank = 0; rank < it->ranks; rank++)
            if (it->node[rank] == node) space->row[rank] = 0.0;
        add(into->nodes_out, space->row, it->ranks);
        into->nodes_in[node] = add_row(space->row, it->ranks);
    }
    return true;
}

/* priced_traffic(table, keep, spill, near [layers, slots], demand [layers, ranks, experts], node, layers, experts,
   top_k, top_k of nodes, written [layers, ranks]: pairs, load, local, ranks_out, ranks_in, then mass [layers, nodes,
   ranks], nodes_out [layers, ranks], nodes_in [layers, nodes]) */
static bool all_layers(const Argument *arguments, const Shape *it, bool *legal) {
    size_t ranks = (size_t)it->ranks, cells = (size_t)(it->experts * it->ranks);
    size_t count = 2 * cells + (size_t)(it->nodes * (it->experts + 1)) + 3 * ranks;
    double *memory = malloc(count * sizeof *memory);
    if (!memory) return false;
    Space space = {.left = memory, .rest = memory + cells, .claimed = memory + 2 * cells};
    space.here = space.claimed + it->nodes * it->experts;
    space.row = space.here + ranks;
    space.power = space.row + ranks;
    int64_t slots = it->ranks * it->per;
    bool by_node = false;
    for (int64_t at = 0; at < COUNT(3) && !by_node; at++) by_node = AS_D(3)[at] != 0.0;
    for (int64_t layer = 0; layer < it->layers && *legal; layer++) {
        int64_t first = layer * slots, begin = layer * it->ranks;
        Found into = {AS_D(10) + begin, AS_D(11) + begin, AS_D(12) + begin, AS_D(13) + begin, AS_D(14) + begin,
                      AS_D(15) + begin * it->nodes, AS_D(16) + begin, AS_D(17) + layer * it->nodes};
        *legal = one_layer(it, AS_H(0) + first, AS_D(1) + first, AS_D(2) + first, AS_D(3) + first, by_node,
                           AS_D(4) + layer * (int64_t)cells, &space, &into);
    }
    free(memory);
    return true;
}

static bool fits(const Argument *arguments, Shape *it) {
    int64_t layers = COUNT(6), ranks = COUNT(5), experts = COUNT(7), slots = layers > 0 ? COUNT(0) / layers : 0;
    int64_t nodes = layers > 0 ? COUNT(17) / layers : 0, here = layers * ranks;
    *it = (Shape){layers, ranks, experts, nodes, ranks > 0 ? slots / ranks : 0, COUNT(8), COUNT(9), AS_L(5)};
    return expect(layers > 0 && ranks > 0 && experts > 0 && nodes > 0 && it->per > 0 && it->top_k > 0 &&
                      it->node_top_k >= 0 && COUNT(0) == here * it->per && COUNT(1) == COUNT(0) &&
                      COUNT(2) == COUNT(0) && COUNT(3) == COUNT(0) && COUNT(4) == here * experts &&
                      COUNT(10) == here && COUNT(11) == here && COUNT(12) == here && COUNT(13) == here &&
                      COUNT(14) == here && COUNT(15) == here * nodes && COUNT(16) == here &&
                      COUNT(17) == layers * nodes,
                  "priced_traffic: arrays differ in length") &&
           all_below(AS_L(5), ranks, nodes, "priced_traffic: no such node");
}

KERNEL(priced_traffic) {
    Shape shape;
    bool legal = true;
    RUN("hddddlnnnnDDDDDDDD", fits(arguments, &shape), ok = all_layers(arguments, &shape, &legal),
        expect(legal, "priced_traffic: no such expert"));
}
