/* Series of changes of a layer, best first (ordered_diff.py). Arrays of a layer are [ranks, experts]. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

#define NOWHERE (-1)
#define REPLICATE 0
#define SWAP 1

typedef struct {
    int64_t layers, ranks, experts, nodes, per, look;
    const int64_t *node;
} Shape;

typedef struct {
    double gain;
    int32_t expert; /* to take up; EMPTY: the rank has no option */
    int32_t other;  /* makes room for it; EMPTY: a slot is free */
} Option;

/* One layer on its way to the target. Lists of a rank have room for `experts` (missing, extra) or `per` (free). */
typedef struct {
    const Shape *it;
    const double *own;    /* of rank 0 in this layer; ranks are layers * experts apart */
    const double *shared; /* of node 0 */
    const int64_t *least;
    int32_t *slot;               /* [ranks, experts]: where the rank holds it */
    int32_t *count;              /* [experts] live replicas */
    int32_t *near;               /* [nodes, experts] replicas */
    int32_t *missing, *extra, *free;
    int32_t *missing_on, *extra_on, *free_on; /* [ranks]: lengths */
    uint8_t *lacks;              /* [ranks, experts]: in the list of missing experts */
    uint8_t *spare;              /* [experts, ranks]: in the list of extra ones */
    Option *option;              /* [ranks] */
    int64_t *row;                /* written: [5] of the next change */
    double *gain;
} Layer;

static int64_t at_node(const Layer *in, int64_t rank, int64_t expert) {
    return (in->it->nodes == 1 ? 0 : in->it->node[rank]) * in->it->experts + expert;
}

static double own_of(const Layer *in, int64_t rank, int64_t expert) {
    return in->own[rank * in->it->layers * in->it->experts + expert];
}

static double shared_of(const Layer *in, int64_t rank, int64_t expert) {
    int64_t node = in->it->nodes == 1 ? 0 : in->it->node[rank];
    return in->shared[node * in->it->layers * in->it->experts + expert];
}

/* Worth of one more replica, and of the present one. */
static double win(const Layer *in, int64_t rank, int64_t expert) {
    return own_of(in, rank, expert) + (in->near[at_node(in, rank, expert)] ? 0.0 : shared_of(in, rank, expert));
}

static double lose(const Layer *in, int64_t rank, int64_t expert) {
    return own_of(in, rank, expert) + (in->near[at_node(in, rank, expert)] == 1 ? shared_of(in, rank, expert) : 0.0);
}

static void removed(int32_t *list, int32_t *length, int64_t expert) {
    int32_t at = 0;
    while (at < *length && list[at] != expert) at++;
    if (at == *length) return;
    memmove(list + at, list + at + 1, (size_t)(*length - at - 1) * sizeof *list);
    --*length;
}

static void come(Layer *in, int64_t rank, int64_t expert, int32_t slot) {
    in->slot[rank * in->it->experts + expert] = slot;
    in->count[expert]++;
    in->near[at_node(in, rank, expert)]++;
}

static int32_t gone(Layer *in, int64_t rank, int64_t expert) {
    int64_t cell = rank * in->it->experts + expert;
    removed(in->extra + rank * in->it->experts, &in->extra_on[rank], expert);
    in->spare[expert * in->it->ranks + rank] = 0;
    in->count[expert]--;
    in->near[at_node(in, rank, expert)]--;
    int32_t slot = in->slot[cell];
    in->slot[cell] = NOWHERE;
    return slot;
}

static void changed(Layer *in, double gain, int64_t kind, int64_t slot, int64_t expert, int64_t theirs,
                    int64_t back) {
    *in->gain++ = gain;
    int64_t row[] = {kind, slot, expert, theirs, back};
    memcpy(in->row, row, sizeof row);
    in->row += 5;
}

static void consider(Layer *in, int64_t rank) {
    const int32_t *extra = in->extra + rank * in->it->experts;
    Option *option = &in->option[rank];
    option->expert = EMPTY;
    if (!in->missing_on[rank]) return;
    int32_t expert = in->missing[rank * in->it->experts + in->missing_on[rank] - 1];
    double worth = win(in, rank, expert);
    if (in->free_on[rank]) {
        *option = (Option){worth, expert, EMPTY};
        return;
    }
    for (int32_t at = 0; at < in->extra_on[rank]; at++)
        if (in->count[extra[at]] > in->least[extra[at]]) {
            *option = (Option){worth - lose(in, rank, extra[at]), expert, extra[at]};
            return;
        }
}

/* Carry out the best option of all ranks. False: there is none. */
static bool take_up(Layer *in) {
    int64_t ranks = in->it->ranks, experts = in->it->experts, rank = -1;
    for (int64_t at = 0; at < ranks; at++)
        if (in->option[at].expert != EMPTY && (rank < 0 || in->option[at].gain > in->option[rank].gain)) rank = at;
    if (rank < 0) return false;
    int32_t expert = in->option[rank].expert, other = in->option[rank].other;
    double gain = win(in, rank, expert) - (other == EMPTY ? 0.0 : lose(in, rank, other));
    in->missing_on[rank]--;
    in->lacks[rank * experts + expert] = 0;
    int32_t slot =
        other == EMPTY ? in->free[rank * in->it->per + --in->free_on[rank]] : gone(in, rank, other);
    come(in, rank, expert, slot);
    changed(in, gain, REPLICATE, slot, expert, NOWHERE, EMPTY);
    /* Only ranks whose options this change touched are evaluated again. */
    const uint8_t *mine = in->spare + expert * ranks, *theirs = other == EMPTY ? mine : in->spare + other * ranks;
    for (int64_t at = 0; at < ranks; at++)
        if (at == rank || mine[at] || theirs[at]) consider(in, at);
    return true;
}

typedef struct {
    double gain;
    int64_t rank, other;
    int32_t expert, back;
} Exchange;

/* What rank may give back for an expert of another: the last few extras that the other lacks and wants, or else the
   first few that it does not hold. Return their number. */
static int64_t backs_of(const Layer *in, int64_t rank, int64_t other, int32_t *backs) {
    int64_t experts = in->it->experts, length = in->extra_on[rank], found = 0;
    const int32_t *extra = in->extra + rank * experts;
    for (int64_t at = length - 1; at >= 0 && found < in->it->look; at--)
        if (in->lacks[other * experts + extra[at]]) backs[found++] = extra[at];
    for (int64_t at = 0; at < found / 2; at++) {
        int32_t kept = backs[at];
        backs[at] = backs[found - 1 - at];
        backs[found - 1 - at] = kept;
    }
    for (int64_t at = 0, wanted = found; !wanted && at < length && found < in->it->look; at++)
        if (in->slot[other * experts + extra[at]] == NOWHERE) backs[found++] = extra[at];
    return found;
}

static void best_exchange(const Layer *in, int64_t rank, int32_t *backs, Exchange *best) {
    int64_t ranks = in->it->ranks, experts = in->it->experts, length = in->missing_on[rank];
    for (int64_t at = length > in->it->look ? length - in->it->look : 0; at < length; at++) {
        int32_t expert = in->missing[rank * experts + at];
        for (int64_t other = 0; other < ranks; other++) {
            if (!in->spare[expert * ranks + other]) continue;
            int64_t found = backs_of(in, rank, other, backs);
            for (int64_t turn = 0; turn < found; turn++) {
                int32_t back = backs[turn];
                double gain = win(in, rank, expert) + win(in, other, back) - lose(in, rank, back) -
                              lose(in, other, expert);
                if (best->rank < 0 || gain > best->gain) *best = (Exchange){gain, rank, other, expert, back};
            }
        }
    }
}

/* Make the best exchange of two extras. False: there is none. */
static bool exchange(Layer *in, int32_t *backs) {
    int64_t experts = in->it->experts;
    Exchange best = {0.0, -1, -1, EMPTY, EMPTY};
    for (int64_t rank = 0; rank < in->it->ranks; rank++) best_exchange(in, rank, backs, &best);
    if (best.rank < 0) return false;
    int32_t slot = gone(in, best.rank, best.back), theirs = gone(in, best.other, best.expert);
    come(in, best.rank, best.expert, slot);
    come(in, best.other, best.back, theirs);
    removed(in->missing + best.rank * experts, &in->missing_on[best.rank], best.expert);
    in->lacks[best.rank * experts + best.expert] = 0;
    if (in->lacks[best.other * experts + best.back]) {
        removed(in->missing + best.other * experts, &in->missing_on[best.other], best.back);
        in->lacks[best.other * experts + best.back] = 0;
    } else {
        in->extra[best.other * experts + in->extra_on[best.other]++] = best.back;
        in->spare[best.back * in->it->ranks + best.other] = 1;
    }
    changed(in, best.gain, SWAP, slot, best.expert, theirs, best.back);
    consider(in, best.rank);
    consider(in, best.other);
    return true;
}

/* List the marked experts of a rank by falling number, then by rising worth: equal ones stay as they are. */
static int32_t listed(const Layer *in, const uint8_t *marked, int64_t rank, bool present, int32_t *list) {
    int32_t length = 0;
    for (int64_t expert = in->it->experts - 1; expert >= 0; expert--) {
        if (!marked[expert]) continue;
        double worth = present ? lose(in, rank, expert) : win(in, rank, expert);
        int32_t at = length++;
        while (at > 0 && (present ? lose(in, rank, list[at - 1]) : win(in, rank, list[at - 1])) > worth) {
            list[at] = list[at - 1];
            at--;
        }
        list[at] = (int32_t)expert;
    }
    return length;
}

/* Read a layer. False: an expert out of range. */
static bool begin(Layer *in, const int16_t *row, const uint8_t *missing, const uint8_t *extra, const uint8_t *live) {
    int64_t ranks = in->it->ranks, experts = in->it->experts, per = in->it->per;
    memset(in->count, 0, (size_t)experts * sizeof *in->count);
    memset(in->near, 0, (size_t)(in->it->nodes * experts) * sizeof *in->near);
    for (int64_t cell = 0; cell < ranks * experts; cell++) in->slot[cell] = NOWHERE;
    memset(in->free_on, 0, (size_t)ranks * sizeof *in->free_on);
    for (int64_t slot = ranks * per - 1; slot >= 0; slot--) {
        int64_t rank = slot / per, expert = row[slot];
        if (expert == EMPTY) {
            in->free[rank * per + in->free_on[rank]++] = (int32_t)slot;
            continue;
        }
        if (expert < 0 || expert >= experts) return false;
        in->slot[rank * experts + expert] = (int32_t)slot;
        in->near[at_node(in, rank, expert)]++;
        in->count[expert] += !live || live[rank];
    }
    memcpy(in->lacks, missing, (size_t)(ranks * experts));
    for (int64_t rank = 0; rank < ranks; rank++) {
        int64_t first = rank * experts;
        in->missing_on[rank] = listed(in, missing + first, rank, false, in->missing + first);
        in->extra_on[rank] = listed(in, extra + first, rank, true, in->extra + first);
        for (int64_t expert = 0; expert < experts; expert++)
            in->spare[expert * ranks + rank] = extra[first + expert];
    }
    for (int64_t rank = 0; rank < ranks; rank++) consider(in, rank);
    return true;
}

/* ordered_series(table, own [ranks, layers, experts], shared [nodes, layers, experts], node, missing, extra, least
   [layers, experts], live or None, layers, look, written: rows [all missing, 5], gains, changes of each layer) */
static bool all_series(const Argument *arguments, const Shape *it, bool *legal) {
    size_t cells = (size_t)(it->ranks * it->experts), ranks = (size_t)it->ranks, experts = (size_t)it->experts;
    size_t slots = (size_t)(it->ranks * it->per), places = (size_t)it->nodes * experts;
    Option *option = malloc(ranks * sizeof *option + 2 * cells +
                            (3 * cells + experts + places + slots + 3 * ranks + (size_t)it->look) * 4);
    if (!option) return false;
    int32_t *numbers = (int32_t *)(option + ranks);
    Layer in = {.it = it, .option = option, .row = AS_L(10), .gain = AS_D(11)};
    in.slot = numbers;
    in.missing = in.slot + cells;
    in.extra = in.missing + cells;
    in.count = in.extra + cells;
    in.near = in.count + experts;
    in.free = in.near + places;
    in.missing_on = in.free + slots;
    in.extra_on = in.missing_on + ranks;
    in.free_on = in.extra_on + ranks;
    int32_t *backs = in.free_on + ranks;
    in.lacks = (uint8_t *)(backs + it->look);
    in.spare = in.lacks + cells;
    for (int64_t layer = 0; layer < it->layers && *legal; layer++) {
        int64_t first = layer * it->experts;
        in.own = AS_D(1) + first;
        in.shared = AS_D(2) + first;
        in.least = AS_L(6) + first;
        const double *before = in.gain;
        *legal = begin(&in, AS_H(0) + layer * (int64_t)slots, AS_B(4) + layer * (int64_t)cells,
                       AS_B(5) + layer * (int64_t)cells, AS_B(7));
        /* Every change takes an expert off the list of missing ones, so there is room for all. */
        while (*legal && (take_up(&in) || exchange(&in, backs))) continue;
        AS_L(12)[layer] = in.gain - before;
    }
    free(option);
    return true;
}

static bool fits(const Argument *arguments, Shape *it) {
    int64_t layers = COUNT(8), ranks = COUNT(3), missing = 0;
    int64_t experts = layers > 0 ? COUNT(6) / layers : 0, cells = layers * ranks * experts;
    int64_t slots = layers > 0 ? COUNT(0) / layers : 0, nodes = experts > 0 ? COUNT(2) / (layers * experts) : 0;
    *it = (Shape){layers, ranks, experts, nodes, ranks > 0 ? slots / ranks : 0, COUNT(9), AS_L(3)};
    if (!expect(cells > 0 && nodes > 0 && it->look > 0 && COUNT(0) == layers * ranks * it->per &&
                    COUNT(1) == cells && COUNT(2) == layers * nodes * experts && COUNT(4) == cells &&
                    COUNT(5) == cells && COUNT(6) == layers * experts && (!AS_B(7) || COUNT(7) == ranks) &&
                    COUNT(12) == layers,
                "ordered_series: arrays differ in length") ||
        (nodes > 1 && !all_below(AS_L(3), ranks, nodes, "ordered_series: no such node")))
        return false;
    for (int64_t at = 0; at < cells; at++) missing += AS_B(4)[at];
    return expect(COUNT(10) == 5 * missing && COUNT(11) == missing, "ordered_series: no room for all changes");
}

KERNEL(ordered_series) {
    Shape shape;
    bool legal = true;
    RUN("hddlbblbnnLDL", fits(arguments, &shape), ok = all_series(arguments, &shape, &legal),
        expect(legal, "ordered_series: no such expert"));
}
