/* Placement by the origin of demand (holder_value.py, load_cap.py). Arrays of a layer are
   [ranks, experts] or [nodes, experts]; node: of each rank. `home`, where given: ranks that must hold the expert. */
#include "locality.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TINY 1e-9

static double most(double one, double other) { return one > other ? one : other; }

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

/* One pool of load flows from slots above their group's mean level to slots below it. */
typedef struct {
    int64_t groups;
    const int64_t *group;
    double *pool, *total, *sums, *scale;
} Pool;

WIDE static void flow_pool(const Pool *it, int64_t n, const double *height, const double *width) {
    const int64_t *restrict group = it->group;
    double *restrict pool = it->pool, *restrict total = it->total, *restrict mean = it->sums;
    double *restrict scale = it->scale;
    memset(total, 0, (size_t)it->groups * sizeof *total);
    memset(mean, 0, (size_t)it->groups * sizeof *mean);
    memset(scale, 0, (size_t)it->groups * sizeof *scale);
    for (int64_t at = 0; at < n; at++) {
        total[group[at]] += pool[at];
        mean[group[at]] += pool[at] * height[at];
    }
    for (int64_t at = 0; at < it->groups; at++) mean[at] /= most(total[at], TINY);
    for (int64_t at = 0; at < n; at++) {
        pool[at] = most(pool[at] + width[at] * (mean[group[at]] - height[at]), 0.0);
        scale[group[at]] += pool[at];
    }
    for (int64_t at = 0; at < it->groups; at++) scale[at] = total[at] / most(scale[at], TINY);
    for (int64_t at = 0; at < n; at++) pool[at] *= scale[group[at]];
}

/* cap_levelled(rank, group [n], cell [n] or None, alone [ranks], groups, cells, own, width [n], rounds; changed: near,
   far [n]) */
static bool level(const Argument *arguments) {
    int64_t n = COUNT(0), ranks = COUNT(3), groups = COUNT(4), cells = AS_L(2) ? COUNT(5) : 0;
    double *load = malloc((size_t)(ranks + n + 3 * (groups + cells)) * sizeof *load), *height = load + ranks;
    if (!load) return false;
    const int64_t *rank = AS_L(0);
    const double *own = AS_D(6);
    double *sums = height + n, *near = AS_D(9), *far = AS_D(10);
    Pool of_all = {groups, AS_L(1), far, sums, sums + groups, sums + 2 * groups};
    sums += 3 * groups;
    Pool of_node = {cells, AS_L(2), near, sums, sums + cells, sums + 2 * cells};
    for (int64_t turn = 0; turn < COUNT(8); turn++) {
        memset(load, 0, (size_t)ranks * sizeof *load);
        for (int64_t at = 0; at < n; at++) load[rank[at]] += own[at] + near[at] + far[at];
        for (int64_t at = 0; at < ranks; at++) load[at] = AS_D(3)[at] + load[at];
        for (int64_t at = 0; at < n; at++) height[at] = load[rank[at]];
        flow_pool(&of_all, n, height, AS_D(7));
        if (of_node.group) flow_pool(&of_node, n, height, AS_D(7));
    }
    free(load);
    return true;
}

static bool level_fits(const Argument *arguments) {
    int64_t n = COUNT(0);
    return expect(COUNT(1) == n && (!AS_L(2) || COUNT(2) == n) && COUNT(6) == n && COUNT(7) == n && COUNT(9) == n &&
                      COUNT(10) == n,
                  "cap_levelled: arrays differ in length") &&
           all_below(AS_L(0), n, COUNT(3), "cap_levelled: no such rank") &&
           all_below(AS_L(1), n, COUNT(4), "cap_levelled: no such group") &&
           (!AS_L(2) || all_below(AS_L(2), n, COUNT(5), "cap_levelled: no such cell"));
}

KERNEL(cap_levelled) { RUN("llldnn" "ddn" "DD", level_fits(arguments), ok = level(arguments), true); }

/* Arguments of `cap_pairs`, by name. */
enum { ROWS, HERE, THERE, TABLE, HELD, NEAR, REPLICAS, EACH, LOAD, DEMAND, OWN, SHARED, NODE, HOME, BASED, LIMIT, CAP,
       OUT_SWAP, OUT_SWAP_AT, OUT_COPY, OUT_COPY_AT };

/* A layer whose fullest rank, `source`, has h slots to exchange with c slots of `targets` other ranks. */
typedef struct {
    const Shape *shape;
    const uint8_t *held, *home;
    const int64_t *near, *replicas, *based;
    const double *demand, *own, *shared;
    int64_t limit, source;
} Row;

/* An expert of the fullest rank at another one. */
typedef struct {
    bool apart, swaps, copies; /* it is not there yet; it may be exchanged; it may be replicated */
    double sent, moved, alone; /* load there after an exchange; worth gained by it; worth of a replica */
} There;

/* A slot of another rank, against the fullest one. */
typedef struct {
    bool empty, swaps, copies;
    double back, moved, alone;
} Back;

/* Worth gained when an expert's replica moves from a rank to another. */
static double worth_moved(const Row *it, int64_t to, int64_t origin, int64_t expert) {
    int64_t experts = it->shape->experts;
    double own = it->own[to * experts + expert] - it->own[origin * experts + expert];
    if (it->shape->nodes == 1) return own;
    int64_t here = it->shape->node[origin], there = it->shape->node[to];
    if (here == there) return own;
    double first = it->near[there * experts + expert] == 0 ? it->shared[there * experts + expert] : 0.0;
    double last = it->near[here * experts + expert] == 1 ? it->shared[here * experts + expert] : 0.0;
    return own + (first - last);
}

/* Worth of one replica more, or less, on a rank. */
static double worth_alone(const Row *it, int64_t rank, int64_t expert, int64_t beside) {
    int64_t experts = it->shape->experts;
    double own = it->own[rank * experts + expert];
    if (it->shape->nodes == 1) return own;
    int64_t cell = it->shape->node[rank] * experts + expert;
    return own + (it->near[cell] == beside ? it->shared[cell] : 0.0);
}

/* Half of the difference in local demand moves with a shared expert. */
static double drawn(const Row *it, int64_t expert, int64_t to, int64_t from) {
    int64_t experts = it->shape->experts;
    if (it->replicas[expert] <= 1) return 0.0;
    return 0.5 * (it->demand[to * experts + expert] - it->demand[from * experts + expert]);
}

static There at_target(const Row *it, int64_t expert, int64_t target, double sent) {
    int64_t experts = it->shape->experts;
    There found = {.apart = target != it->source && expert != EMPTY && !it->held[target * experts + expert]};
    if (!found.apart) return found;
    found.swaps = !it->home || !it->home[it->source * experts + expert] || it->home[target * experts + expert];
    found.copies = it->replicas[expert] < it->limit;
    found.sent = most(sent + drawn(it, expert, target, it->source), 0.0);
    found.moved = worth_moved(it, target, it->source, expert);
    found.alone = worth_alone(it, target, expert, 0);
    return found;
}

static Back from_target(const Row *it, int64_t expert, int64_t target, double back) {
    int64_t experts = it->shape->experts;
    if (expert == EMPTY || target == it->source) return (Back){.empty = true, .swaps = true, .copies = true};
    bool must = it->home && it->home[target * experts + expert];
    Back found = {.copies = it->replicas[expert] > 1 && (!must || it->based[expert] > 1)};
    found.swaps = !it->held[it->source * experts + expert] && (!must || it->home[it->source * experts + expert]);
    found.back = most(back + drawn(it, expert, it->source, target), 0.0);
    found.moved = worth_moved(it, it->source, target, expert);
    found.alone = worth_alone(it, target, expert, 1);
    return found;
}

/* The cheapest pair by worth lost per load taken off the fullest rank. useful: 0 where forbidden. */
static void cheapest(const double *useful, const double *lost, int64_t count, double *cost, int64_t *at) {
    double top = useful[0];
    for (int64_t one = 1; one < count; one++) top = most(top, useful[one]);
    double enough = most(0.3 * top, TINY);
    *cost = INFINITY, *at = 0;
    for (int64_t one = 0; one < count; one++) {
        if (!(useful[one] >= enough)) continue;
        double price = (most(lost[one], 0.0) + TINY) / most(useful[one], TINY);
        if (price < *cost) *cost = price, *at = one;
    }
}

typedef struct {
    double *useful[2], *lost[2]; /* of an exchange, and of a further replica: [h, c] */
    There *there;                /* [targets] */
    Back *back;                  /* [c] */
} Bench;

/* One slot of the fullest rank against all others. other: load of their ranks; each: of the slots. */
static void compare(const Bench *use, int64_t first, int64_t c, int64_t per, double top, double sent, double needed,
                    const double *other, const double *each) {
    for (int64_t at = 0; at < c; at++) {
        const There *there = &use->there[at / per];
        const Back *back = &use->back[at];
        if (!there->apart) continue;
        double without = other[at / per] - each[at];
        if (there->swaps && back->swaps) {
            double relief = top - most(top - sent + back->back, without + there->sent);
            use->useful[0][first + at] = relief < needed ? relief : needed;
            use->lost[0][first + at] = -(there->moved + back->moved);
        }
        /* A further replica takes over half of the difference; the one that it replaces must serve less than that. */
        double taken = most(0.5 * (top - without), 0.0);
        taken = taken < sent ? taken : sent;
        if (there->copies && back->copies && each[at] < taken) {
            double relief = top - most(top - taken, without + taken);
            use->useful[1][first + at] = relief < needed ? relief : needed;
            use->lost[1][first + at] = back->alone - there->alone;
        }
    }
}

static bool examine(const Argument *arguments, const Shape *it, const Bench *use, double *load, double *each) {
    int64_t experts = it->experts, cells = it->ranks * experts, slots = COUNT(TABLE) / it->layers;
    int64_t per = slots / it->ranks, n = COUNT(ROWS), h = COUNT(HERE) / n, c = COUNT(THERE) / n, all = h * c;
    for (int64_t nth = 0; nth < n; nth++) {
        int64_t layer = AS_L(ROWS)[nth];
        const int64_t *here = AS_L(HERE) + nth * h, *there = AS_L(THERE) + nth * c;
        const int16_t *table = AS_H(TABLE) + layer * slots;
        Row row = {.shape = it, .held = AS_B(HELD) + layer * cells, .demand = AS_D(DEMAND) + layer * cells};
        row.home = AS_B(HOME) ? AS_B(HOME) + layer * cells : NULL, row.own = AS_D(OWN) + layer * cells;
        row.near = AS_L(NEAR) + layer * it->nodes * experts, row.shared = AS_D(SHARED) + layer * it->nodes * experts;
        row.replicas = AS_L(REPLICAS) + layer * experts, row.limit = AS_L(LIMIT)[layer];
        row.based = AS_L(BASED) ? AS_L(BASED) + layer * experts : NULL, row.source = here[0] / per;
        memset(use->useful[0], 0, (size_t)all * 2 * sizeof(double));
        for (int64_t at = 0; at < c; at++) {
            if (there[at] / per != there[at / per * per] / per) return false;
            each[at] = AS_D(EACH)[layer * slots + there[at]];
            use->back[at] = from_target(&row, table[there[at]], there[at] / per, each[at]);
        }
        for (int64_t at = 0; at < c / per; at++) load[at] = AS_D(LOAD)[layer * it->ranks + there[at * per] / per];
        double top = AS_D(LOAD)[layer * it->ranks + row.source];
        for (int64_t slot = 0; slot < h; slot++) {
            double sent = AS_D(EACH)[layer * slots + here[slot]];
            for (int64_t at = 0; at < c / per; at++)
                use->there[at] = at_target(&row, table[here[slot]], there[at * per] / per, sent);
            compare(use, slot * c, c, per, top, sent, top - arguments[CAP].value, load, each);
        }
        cheapest(use->useful[0], use->lost[0], all, &AS_D(OUT_SWAP)[nth], &AS_L(OUT_SWAP_AT)[nth]);
        cheapest(use->useful[1], use->lost[1], all, &AS_D(OUT_COPY)[nth], &AS_L(OUT_COPY_AT)[nth]);
    }
    return true;
}

static bool examine_all(const Argument *arguments, const Shape *it, bool *good) {
    int64_t n = COUNT(ROWS), c = COUNT(THERE) / n, all = COUNT(HERE) / n * c;
    double *work = malloc((size_t)(all * 4 + 2 * c) * sizeof *work);
    Bench use = {.there = malloc((size_t)c * sizeof(There)), .back = malloc((size_t)c * sizeof(Back))};
    bool enough = work && use.there && use.back;
    if (enough) {
        use.useful[0] = work, use.useful[1] = work + all, use.lost[0] = work + 2 * all, use.lost[1] = work + 3 * all;
        *good = examine(arguments, it, &use, work + 4 * all, work + 4 * all + c);
    }
    free(work), free(use.there), free(use.back);
    return enough;
}

static bool pairs_fit(const Argument *arguments, const Shape *it) {
    int64_t cells = it->layers * it->ranks * it->experts, experts = it->layers * it->experts, n = COUNT(ROWS);
    bool holds = n > 0 && COUNT(HERE) > 0 && COUNT(THERE) > 0 && COUNT(HERE) % n == 0 && COUNT(TABLE) > 0 &&
                 COUNT(TABLE) % (it->layers * it->ranks) == 0 &&
                 COUNT(THERE) % (n * (COUNT(TABLE) / (it->layers * it->ranks))) == 0 && COUNT(HELD) == cells &&
                 COUNT(NEAR) == COUNT(SHARED) && COUNT(REPLICAS) == experts && COUNT(EACH) == COUNT(TABLE) &&
                 COUNT(LOAD) == it->layers * it->ranks && COUNT(DEMAND) == cells && (!AS_B(HOME) || COUNT(HOME) == cells) &&
                 (AS_B(HOME) ? COUNT(BASED) == experts : true) && COUNT(LIMIT) == it->layers;
    for (int at = OUT_SWAP; at <= OUT_COPY_AT; at++) holds &= COUNT(at) == n;
    if (!expect(holds, "cap_pairs: arrays differ in length")) return false;
    for (int64_t at = 0; at < COUNT(TABLE); at++) holds &= AS_H(TABLE)[at] >= EMPTY && AS_H(TABLE)[at] < it->experts;
    return expect(holds, "cap_pairs: no such expert") && all_below(AS_L(ROWS), n, it->layers, "cap_pairs: no such layer") &&
           all_below(AS_L(HERE), COUNT(HERE), COUNT(TABLE) / it->layers, "cap_pairs: no such slot") &&
           all_below(AS_L(THERE), COUNT(THERE), COUNT(TABLE) / it->layers, "cap_pairs: no such slot");
}

/* cap_pairs(rows [n], slots of the fullest rank [n, h], slots of others [n, c]; of all layers: table [slots], held
   [ranks, experts], near [nodes, experts], replicas [experts], each [slots], load [ranks], demand, own [ranks,
   experts], shared [nodes, experts]; node [ranks], home or None, based [experts] or None, most [layers], cap; out [n]:
   cost of the best exchange, its pair, cost of the best replica, its pair) */
KERNEL(cap_pairs) {
    Shape shape;
    bool good = true;
    RUN("lll" "hbllddd" "ddl" "bllx" "DLDL",
        shape_of(&shape, &arguments[OWN], &arguments[SHARED], &arguments[NODE], COUNT(LIMIT)) &&
            pairs_fit(arguments, &shape),
        ok = examine_all(arguments, &shape, &good), expect(good, "cap_pairs: the others' slots are not whole ranks"));
}
