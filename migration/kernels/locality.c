/* Placement by the origin of demand (holder_value.py). Arrays of a layer are
   [ranks, experts] or [nodes, experts]; node: of each rank. `home`, where given: ranks that must hold the expert. */
#include "locality.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

bool shape_of(Shape *into, const Argument *own, const Argument *shared, const Argument *node, int64_t layers) {
    int64_t ranks = node->count, experts = layers > 0 && ranks > 0 ? own->count / (layers * ranks) : 0;
    int64_t nodes = experts > 0 ? shared->count / (layers * experts) : 0;
    *into = (Shape){layers, ranks, experts, nodes, node->data};
    return expect(nodes > 0 && own->count == layers * ranks * experts && shared->count == layers * nodes * experts,
                  "locality: arrays differ in length") &&
           (nodes == 1 || all_below(node->data, ranks, nodes, "locality: no such node"));
}

/* Count the holders of each expert: in all, on each node, and those where it must be held. */
static void count_holders(const Shape *it, const uint8_t *held, const uint8_t *home, int32_t *count, int32_t *near,
                          int32_t *based) {
    int64_t experts = it->experts;
    memset(count, 0, (size_t)experts * sizeof *count);
    memset(based, 0, (size_t)experts * sizeof *based);
    memset(near, 0, (size_t)(it->nodes * experts) * sizeof *near);
    for (int64_t rank = 0; rank < it->ranks; rank++) {
        const uint8_t *mine = held + rank * experts, *must = home ? home + rank * experts : NULL;
        int32_t *beside = near + node_of(it, rank) * experts;
        for (int64_t at = 0; at < experts; at++) {
            count[at] += mine[at];
            beside[at] += mine[at];
            based[at] += must ? mine[at] & must[at] : mine[at];
        }
    }
}

/* The value that `wanted - 1` of the numbers come before in falling order. */
static double nth_largest(double *numbers, int64_t count, int64_t wanted) {
    int64_t low = 0, high = count - 1, nth = wanted - 1;
    while (low < high) {
        double middle = numbers[(low + high) / 2];
        int64_t left = low, right = high;
        while (left <= right) {
            while (numbers[left] > middle) left++;
            while (numbers[right] < middle) right--;
            if (left > right) break;
            double kept = numbers[left];
            numbers[left++] = numbers[right];
            numbers[right--] = kept;
        }
        if (nth <= right)
            high = right;
        else if (nth >= left)
            low = left;
        else
            return numbers[nth];
    }
    return numbers[nth];
}

/* The `slots` highest scores that are not negative; of equal ones the first. */
static void take_best(const double *score, int64_t count, int64_t slots, double *scratch, uint8_t *best) {
    if (slots >= count) {
        for (int64_t at = 0; at < count; at++) best[at] = score[at] >= 0.0;
        return;
    }
    memcpy(scratch, score, (size_t)count * sizeof *scratch);
    double last = nth_largest(scratch, count, slots);
    int64_t left = slots;
    for (int64_t at = 0; at < count; at++) left -= score[at] > last;
    for (int64_t at = 0; at < count; at++) {
        bool in = score[at] > last || (score[at] == last && left-- > 0);
        best[at] = in && score[at] >= 0.0;
    }
}

#define FEW 16

/* The same for FEW slots or less: the best so far are kept in order. */
WIDE static void take_few(const double *score, int64_t count, int64_t slots, uint8_t *best) {
    double top[FEW], least = -1.0; /* nothing up to `least` is taken */
    int64_t place[FEW], full = 0;
    for (int64_t at = 0; at < count; at++) {
        if (!(score[at] >= 0.0) || !(score[at] > least)) continue;
        int64_t nth = full < slots ? full++ : full - 1;
        for (; nth > 0 && score[at] > top[nth - 1]; nth--) top[nth] = top[nth - 1], place[nth] = place[nth - 1];
        top[nth] = score[at], place[nth] = at;
        if (full == slots) least = top[full - 1];
    }
    memset(best, 0, (size_t)count);
    for (int64_t nth = 0; nth < full; nth++) best[place[nth]] = 1;
}

/* What a replica of each expert adds on a rank; -1 where it has replicas enough. */
WIDE static void score_all(const double *restrict own, const double *restrict shared, const int32_t *restrict count,
                           const int32_t *restrict beside, int64_t experts, int32_t limit, double *restrict score) {
    for (int64_t at = 0; at < experts; at++) {
        double more = beside[at] == 0 ? shared[at] : 0.0;
        score[at] = count[at] < limit ? own[at] + more : -1.0;
    }
}

/* The experts that a rank holds, ascending. Return their number. */
static int64_t list_held(const uint8_t *mine, int64_t experts, int32_t *list) {
    int64_t number = 0;
    for (const uint8_t *next = mine; (next = memchr(next, 1, (size_t)(mine + experts - next))); next++)
        list[number++] = (int32_t)(next - mine);
    return number;
}

/* filled(own, shared, node, changed: held, home or None, layers, slots, most, passes) */
static bool fill(const Argument *arguments, const Shape *it) {
    int64_t experts = it->experts, cells = it->ranks * experts, slots = COUNT(6);
    int32_t limit = COUNT(7) < INT32_MAX ? (int32_t)COUNT(7) : INT32_MAX;
    double *score = malloc((size_t)experts * 2 * sizeof(double) + (size_t)(it->nodes + 3) * (size_t)experts * 4);
    if (!score) return false;
    int32_t *count = (int32_t *)(score + 2 * experts), *based = count + experts, *near = based + experts;
    int32_t *list = near + it->nodes * experts;
    for (int64_t layer = 0; layer < it->layers; layer++) {
        uint8_t *held = AS_B(3) + layer * cells;
        const uint8_t *home = AS_B(4) ? AS_B(4) + layer * cells : NULL;
        count_holders(it, held, home, count, near, based);
        for (int64_t turn = 0; turn < it->ranks * COUNT(8); turn++) {
            int64_t rank = turn % it->ranks, node = node_of(it, rank);
            uint8_t *mine = held + rank * experts;
            const uint8_t *must = home ? home + rank * experts : NULL;
            const double *own = AS_D(0) + layer * cells + rank * experts;
            const double *shared = AS_D(1) + (layer * it->nodes + node) * experts;
            int32_t *beside = near + node * experts;
            /* The rank's replicas are removed, so that its own experts are scored as any others. */
            int64_t number = list_held(mine, experts, list);
            for (int64_t nth = 0; nth < number; nth++) {
                int64_t at = list[nth];
                count[at]--, beside[at]--;
                based[at] -= !must || must[at];
            }
            score_all(own, shared, count, beside, experts, limit, score);
            for (int64_t nth = 0; nth < number; nth++) {
                int64_t at = list[nth];
                if ((!must || must[at]) && based[at] == 0) score[at] = INFINITY;
            }
            if (slots <= FEW && slots < experts)
                take_few(score, experts, slots, mine);
            else
                take_best(score, experts, slots, score + experts, mine);
            number = list_held(mine, experts, list);
            for (int64_t nth = 0; nth < number; nth++) {
                int64_t at = list[nth];
                count[at]++, beside[at]++;
                based[at] += !must || must[at];
            }
        }
    }
    free(score);
    return true;
}

bool held_fits(const Argument *arguments, const Shape *it) {
    int64_t all = it->layers * it->ranks * it->experts;
    return expect(COUNT(3) == all && (!AS_B(4) || COUNT(4) == all), "locality: arrays differ in length");
}

KERNEL(locality_filled) {
    Shape shape;
    RUN("ddlBbnnnn",
        shape_of(&shape, &arguments[0], &arguments[1], &arguments[2], COUNT(5)) && held_fits(arguments, &shape) &&
            expect(COUNT(6) > 0, "locality_filled: no slots"),
        ok = fill(arguments, &shape), true);
}

typedef struct {
    double key;
    int64_t at;
} Keyed;

static int by_key(const void *one, const void *other) {
    const Keyed *a = one, *b = other;
    if (a->key != b->key) return a->key < b->key ? -1 : 1;
    return a->at < b->at ? -1 : a->at > b->at;
}

/* Bids of the experts without a place: each for its best rank with room; of equal ones they take turns. */
static int64_t bid(const Shape *it, const double *value, const int64_t *room, const uint8_t *left, Keyed *bids,
                   int64_t *target) {
    int64_t experts = it->experts, number = 0, turn = 0;
    for (int64_t at = 0; at < experts; at++) {
        turn += left[at];
        if (!left[at]) continue;
        double best = -INFINITY, second = -INFINITY;
        int64_t tied = 0;
        for (int64_t rank = 0; rank < it->ranks; rank++) {
            double one = room[rank] > 0 ? value[rank * experts + at] : -INFINITY;
            if (one > best)
                second = best, best = one, tied = 1;
            else if (one == best)
                tied++;
            else if (one > second)
                second = one;
        }
        if (best == -INFINITY) return -1;
        if (tied > 1) second = best;
        int64_t nth = turn % tied, rank = 0;
        for (;; rank++)
            if (room[rank] > 0 && value[rank * experts + at] == best && nth-- == 0) break;
        target[at] = rank;
        /* In falling order of regret: the loss if the second-best rank is taken. */
        bids[number++] = (Keyed){second == -INFINITY ? -INFINITY : -(best - second), at};
    }
    return number;
}

/* one_each(own, shared, node, out: held, home or None, layers, slots, out: fits [1]) */
static bool place_each(const Argument *arguments, const Shape *it) {
    int64_t experts = it->experts, ranks = it->ranks, cells = ranks * experts;
    double *value = malloc((size_t)cells * sizeof(double) + (size_t)experts * (sizeof(Keyed) + sizeof(int64_t) + 1) +
                           (size_t)ranks * sizeof(int64_t));
    if (!value) return false;
    Keyed *bids = (Keyed *)(value + cells);
    int64_t *target = (int64_t *)(bids + experts), *room = target + experts;
    uint8_t *left = (uint8_t *)(room + ranks);
    AS_B(7)[0] = 1;
    for (int64_t layer = 0; layer < it->layers && AS_B(7)[0]; layer++) {
        uint8_t *held = AS_B(3) + layer * cells;
        memset(held, 0, (size_t)cells);
        memset(left, 1, (size_t)experts);
        for (int64_t rank = 0; rank < ranks; rank++) {
            room[rank] = COUNT(6);
            const double *shared = AS_D(1) + (layer * it->nodes + node_of(it, rank)) * experts;
            for (int64_t at = rank * experts; at < (rank + 1) * experts; at++) {
                double own = AS_D(0)[layer * cells + at];
                value[at] = it->nodes == 1 ? own : own + shared[at - rank * experts];
                if (AS_B(4) && !AS_B(4)[layer * cells + at]) value[at] = -INFINITY;
            }
        }
        for (int64_t open = experts; open > 0;) {
            int64_t number = bid(it, value, room, left, bids, target);
            if (number < 0) {
                AS_B(7)[0] = 0;
                break;
            }
            qsort(bids, (size_t)number, sizeof *bids, by_key);
            for (int64_t nth = 0; nth < number; nth++) {
                int64_t at = bids[nth].at, rank = target[at];
                if (room[rank] == 0) continue;
                held[rank * experts + at] = 1;
                room[rank]--, open--;
                left[at] = 0;
            }
        }
    }
    free(value);
    return true;
}

KERNEL(locality_one_each) {
    Shape shape;
    RUN("ddlBbnnB",
        shape_of(&shape, &arguments[0], &arguments[1], &arguments[2], COUNT(5)) && held_fits(arguments, &shape) &&
            expect(COUNT(7) == 1, "locality_one_each: arrays differ in length"),
        ok = place_each(arguments, &shape), true);
}
