/* Transportation problem by the simplex method on a network (transportation.py). Nodes are rows, then columns. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

#define NONE (-1)

typedef struct {
    int64_t rows, columns, nodes, edges; /* a spanning tree: nodes - 1 edges */
    const double *cost;                  /* [rows, columns] */
    double *potential;                   /* [nodes] */
    double *load;                        /* [edges] */
    double *supply, *room;               /* what is left of them at the start */
    int64_t *row, *column;               /* [edges] cells of the tree */
    int64_t *parent, *up, *depth;        /* [nodes] the tree's parent, the edge to it; the root has NONE */
    int64_t *first, *next;               /* [nodes], [2 * edges]: edges of a node; entry 2 e is of e's row */
    int64_t *waiting;                    /* [nodes] */
} Network;

/* Cheapest cells first, each closes a row or a column. False: some cells are not in the order. */
static bool start(Network *it, const int64_t *order) {
    int64_t rows = it->rows, columns = it->columns;
    memset(it->first, 0, (size_t)it->nodes * sizeof *it->first); /* meanwhile: 1 for closed rows and columns */
    it->edges = 0;
    for (int64_t at = 0; rows + columns > 1; at++) {
        if (at == it->rows * it->columns) return false;
        int64_t row = order[at] / it->columns, column = order[at] % it->columns;
        if (it->first[row] || it->first[it->rows + column]) continue;
        bool closes_row = rows > 1 && (columns == 1 || it->supply[row] <= it->room[column]);
        double load = closes_row ? it->supply[row] : it->room[column];
        it->row[it->edges] = row;
        it->column[it->edges] = column;
        it->load[it->edges++] = load;
        double *left = closes_row ? &it->room[column] : &it->supply[row];
        *left = *left - load > 0.0 ? *left - load : 0.0;
        it->first[closes_row ? row : it->rows + column] = 1;
        if (closes_row)
            rows--;
        else
            columns--;
    }
    return true;
}

/* Potentials at which the tree's cells gain nothing, and parents; row 0 is the root. */
static void price(Network *it) {
    for (int64_t node = 0; node < it->nodes; node++) it->first[node] = NONE;
    for (int64_t edge = 0; edge < it->edges; edge++) {
        int64_t column = it->rows + it->column[edge];
        it->next[2 * edge] = it->first[it->row[edge]];
        it->first[it->row[edge]] = 2 * edge;
        it->next[2 * edge + 1] = it->first[column];
        it->first[column] = 2 * edge + 1;
    }
    int64_t length = 1;
    it->waiting[0] = 0;
    it->potential[0] = 0.0;
    it->parent[0] = it->up[0] = NONE;
    it->depth[0] = 0;
    while (length) {
        int64_t node = it->waiting[--length];
        for (int64_t entry = it->first[node]; entry != NONE; entry = it->next[entry]) {
            int64_t edge = entry / 2;
            if (edge == it->up[node]) continue;
            int64_t other = entry % 2 ? it->row[edge] : it->rows + it->column[edge];
            it->parent[other] = node;
            it->up[other] = edge;
            it->depth[other] = it->depth[node] + 1;
            it->potential[other] = it->cost[it->row[edge] * it->columns + it->column[edge]] - it->potential[node];
            it->waiting[length++] = other;
        }
    }
}

WIDE static double least_of(const double *restrict cost, const double *restrict potential, double own,
                            int64_t columns) {
    double least = cost[0] - own - potential[0];
    for (int64_t at = 1; at < columns; at++) {
        double gain = cost[at] - own - potential[at];
        least = gain < least ? gain : least;
    }
    return least;
}

/* The first cell of least reduced cost. False: none is below -still. */
static bool entering(const Network *it, double still, int64_t *row, int64_t *column) {
    double least = 0.0;
    *row = NONE;
    for (int64_t at = 0; at < it->rows; at++) {
        double found = least_of(it->cost + at * it->columns, it->potential + it->rows, it->potential[at],
                                it->columns);
        if (*row == NONE || found < least) {
            least = found;
            *row = at;
        }
    }
    if (least >= -still) return false;
    const double *cost = it->cost + *row * it->columns;
    *column = 0;
    while (*column < it->columns - 1 && cost[*column] - it->potential[*row] - it->potential[it->rows + *column] > least)
        ++*column;
    return true;
}

/* Give along a side of the ring, from a node up to where it meets the other: edges at even places lose, others gain. */
static void give(Network *it, int64_t node, int64_t meeting, double amount) {
    for (bool loses = true; node != meeting; node = it->parent[node], loses = !loses)
        it->load[it->up[node]] += loses ? -amount : amount;
}

/* The first edge of least load among those of a side that lose; `best` if none has less. */
static int64_t emptiest(const Network *it, int64_t node, int64_t meeting, int64_t best) {
    for (bool loses = true; node != meeting; node = it->parent[node], loses = !loses)
        if (loses && (best == NONE || it->load[it->up[node]] < it->load[best])) best = it->up[node];
    return best;
}

static void enter(Network *it, int64_t row, int64_t column) {
    int64_t one = row, two = it->rows + column;
    while (one != two) {
        if (it->depth[one] >= it->depth[two])
            one = it->parent[one];
        else
            two = it->parent[two];
    }
    int64_t leaving = emptiest(it, row, one, NONE);
    leaving = emptiest(it, it->rows + column, one, leaving);
    double least = it->load[leaving];
    give(it, row, one, least);
    give(it, it->rows + column, one, least);
    it->row[leaving] = row;
    it->column[leaving] = column;
    it->load[leaving] = least;
}

/* transported(cost [rows, columns], order: its cells by rising cost, supply, room, most turns, least gain,
   written: carried [rows, columns]) */
static bool solve(const Argument *arguments, Network *it, bool *legal) {
    size_t nodes = (size_t)it->nodes, count = 2 * nodes + nodes + (size_t)(it->rows + it->columns);
    double *numbers = malloc(count * sizeof *numbers + 9 * nodes * sizeof(int64_t));
    if (!numbers) return false;
    it->potential = numbers;
    it->load = numbers + nodes;
    it->supply = it->load + nodes;
    it->room = it->supply + it->rows;
    it->row = (int64_t *)(numbers + count);
    it->column = it->row + nodes;
    it->parent = it->column + nodes;
    it->up = it->parent + nodes;
    it->depth = it->up + nodes;
    it->first = it->depth + nodes;
    it->next = it->first + nodes;
    it->waiting = it->next + 2 * nodes;
    memcpy(it->supply, AS_D(2), (size_t)it->rows * sizeof *it->supply);
    memcpy(it->room, AS_D(3), (size_t)it->columns * sizeof *it->room);
    *legal = start(it, AS_L(1));
    for (int64_t turn = 0, row, column; *legal && turn < COUNT(4); turn++) {
        price(it);
        if (!entering(it, arguments[5].value, &row, &column)) break;
        enter(it, row, column);
    }
    for (int64_t edge = 0; *legal && edge < it->edges; edge++)
        AS_D(6)[it->row[edge] * it->columns + it->column[edge]] = it->load[edge];
    free(numbers);
    return true;
}

static bool fits(const Argument *arguments, Network *it) {
    int64_t rows = COUNT(2), columns = COUNT(3), cells = rows * columns;
    *it = (Network){.rows = rows, .columns = columns, .nodes = rows + columns, .cost = AS_D(0)};
    return expect(cells > 0 && COUNT(0) == cells && COUNT(1) == cells && COUNT(6) == cells,
                  "transported: arrays differ in length") &&
           all_below(AS_L(1), cells, cells, "transported: no such cell");
}

KERNEL(transported) {
    Network network;
    bool legal = true;
    RUN("dlddnxD", fits(arguments, &network), ok = solve(arguments, &network, &legal),
        expect(legal, "transported: the order lacks cells"));
}
