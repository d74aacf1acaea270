/* Exchanges that bring a placement for locality under a cap of rank load (load_cap.py). Arrays of a layer are [ranks,
   experts] or [nodes, experts]; `home`, where given: ranks that must hold the expert. */
#include "locality.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TINY 1e-9

static double most(double one, double other) { return one > other ? one : other; }

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

/* Arguments of `cap_stepped`, by name. */
enum { ROWS, TABLE, HELD, NEAR, REPLICAS, EACH, LOAD, DEMAND, OWN, SHARED, NODE, HOME, BASED, LIMIT, CAP, STEPS, PARTNERS };

/* A layer, whose fullest rank, `source`, may exchange slots with those of others. */
typedef struct {
    const Shape *shape;
    int16_t *table;
    uint8_t *held;
    int64_t *near, *replicas, *based;
    double *each, *load;
    const uint8_t *home;
    const double *demand, *own, *shared;
    int64_t per, limit, source;
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
    int64_t *targets;            /* other ranks */
    double *load, *each;         /* [targets], [c] */
} Bench;

/* One slot of the fullest rank against all others. */
static void compare(const Bench *use, int64_t first, int64_t c, int64_t per, double top, double sent, double needed) {
    const double *other = use->load, *each = use->each;
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

/* The `count` emptiest ranks, of equal ones the first, ascending. */
static void find_targets(const double *load, int64_t ranks, int64_t count, int64_t *targets) {
    int64_t found = 0;
    for (int64_t rank = 0; rank < ranks; rank++) {
        if (found == count && !(load[rank] < load[targets[count - 1]])) continue;
        int64_t at = found < count ? found++ : count - 1;
        for (; at > 0 && load[rank] < load[targets[at - 1]]; at--) targets[at] = targets[at - 1];
        targets[at] = rank;
    }
    for (int64_t nth = 1; nth < count; nth++) {
        int64_t rank = targets[nth], at = nth;
        for (; at > 0 && rank < targets[at - 1]; at--) targets[at] = targets[at - 1];
        targets[at] = rank;
    }
}

/* The cheapest exchange, and the cheapest replica, of the fullest rank. */
typedef struct {
    double swap, copy;
    int64_t swap_at, copy_at;
} Cheapest;

static Cheapest examine(const Row *row, const Bench *use, int64_t count, double cap) {
    int64_t per = row->per, c = count * per, first = row->source * per;
    double top = row->load[row->source];
    memset(use->useful[0], 0, (size_t)(per * c) * 2 * sizeof(double));
    for (int64_t at = 0; at < c; at++) {
        int64_t rank = use->targets[at / per], slot = rank * per + at % per;
        use->each[at] = row->each[slot];
        use->back[at] = from_target(row, row->table[slot], rank, use->each[at]);
    }
    for (int64_t at = 0; at < count; at++) use->load[at] = row->load[use->targets[at]];
    for (int64_t slot = 0; slot < per; slot++) {
        double sent = row->each[first + slot];
        for (int64_t at = 0; at < count; at++)
            use->there[at] = at_target(row, row->table[first + slot], use->targets[at], sent);
        compare(use, slot * c, c, per, top, sent, top - cap);
    }
    Cheapest found;
    cheapest(use->useful[0], use->lost[0], per * c, &found.swap, &found.swap_at);
    cheapest(use->useful[1], use->lost[1], per * c, &found.copy, &found.copy_at);
    return found;
}

/* Put an expert, or none, into a slot. */
static void put(const Row *row, int64_t slot, int16_t expert) {
    int64_t rank = slot / row->per, experts = row->shape->experts;
    int64_t *near = row->near + node_of(row->shape, rank) * experts;
    for (int there = 0; there < 2; there++) {
        int64_t which = there ? expert : row->table[slot], by = there ? 1 : -1;
        if (which == EMPTY) continue;
        row->held[rank * experts + which] = (uint8_t)there;
        near[which] += by, row->replicas[which] += by;
        if (row->home && row->home[rank * experts + which]) row->based[which] += by;
    }
    row->table[slot] = expert;
}

/* Make the cheaper of the best exchange and the best replica. */
static void make(const Row *row, const Bench *use, int64_t count, const Cheapest *found) {
    int64_t per = row->per, c = count * per;
    bool swaps = found->swap <= found->copy;
    int64_t which = swaps ? found->swap_at : found->copy_at, to = which % c;
    if ((swaps ? found->swap : found->copy) == INFINITY) {
        /* Nothing helps until the weights are computed again. */
        memset(row->load, 0, (size_t)row->shape->ranks * sizeof *row->load);
        return;
    }
    int64_t other = use->targets[to / per], mine = row->source * per + which / c, theirs = other * per + to % per;
    double sent = row->each[mine], returned = row->each[theirs], moved;
    int16_t expert = row->table[mine];
    if (swaps) {
        put(row, mine, row->table[theirs]);
        moved = sent - returned, row->each[mine] = returned, row->each[theirs] = sent;
    } else {
        moved = most(0.5 * (row->load[row->source] - row->load[other] + returned), 0.0);
        moved = moved < sent ? moved : sent;
        row->each[mine] = sent - moved, row->each[theirs] = moved;
        row->load[other] -= returned;
    }
    put(row, theirs, expert);
    row->load[row->source] -= moved;
    row->load[other] += moved;
}

static void step(const Argument *arguments, const Shape *it, const Bench *use, int64_t count) {
    int64_t experts = it->experts, cells = it->ranks * experts, slots = COUNT(TABLE) / it->layers;
    for (int64_t nth = 0; nth < COUNT(ROWS); nth++) {
        int64_t layer = AS_L(ROWS)[nth];
        Row row = {.shape = it, .table = AS_H(TABLE) + layer * slots, .held = AS_B(HELD) + layer * cells};
        row.near = AS_L(NEAR) + layer * it->nodes * experts, row.replicas = AS_L(REPLICAS) + layer * experts;
        row.based = AS_L(BASED) ? AS_L(BASED) + layer * experts : NULL, row.each = AS_D(EACH) + layer * slots;
        row.load = AS_D(LOAD) + layer * it->ranks, row.home = AS_B(HOME) ? AS_B(HOME) + layer * cells : NULL;
        row.demand = AS_D(DEMAND) + layer * cells, row.own = AS_D(OWN) + layer * cells;
        row.shared = AS_D(SHARED) + layer * it->nodes * experts, row.per = slots / it->ranks;
        row.limit = AS_L(LIMIT)[layer];
        for (int64_t turn = 0; turn < COUNT(STEPS); turn++) {
            row.source = 0;
            for (int64_t rank = 1; rank < it->ranks; rank++)
                if (row.load[rank] > row.load[row.source]) row.source = rank;
            if (!(row.load[row.source] > arguments[CAP].value)) break;
            find_targets(row.load, it->ranks, count, use->targets);
            Cheapest found = examine(&row, use, count, arguments[CAP].value);
            make(&row, use, count, &found);
        }
    }
}

static bool step_all(const Argument *arguments, const Shape *it) {
    int64_t count = COUNT(PARTNERS) < it->ranks ? COUNT(PARTNERS) : it->ranks;
    int64_t per = COUNT(TABLE) / it->layers / it->ranks, c = count * per, all = per * c;
    double *work = malloc((size_t)(all * 4 + count + c) * sizeof *work);
    Bench use = {.there = malloc((size_t)count * sizeof(There)), .back = malloc((size_t)c * sizeof(Back))};
    use.targets = malloc((size_t)count * sizeof *use.targets);
    bool enough = work && use.there && use.back && use.targets;
    if (enough) {
        use.useful[0] = work, use.useful[1] = work + all, use.lost[0] = work + 2 * all, use.lost[1] = work + 3 * all;
        use.load = work + 4 * all, use.each = use.load + count;
        step(arguments, it, &use, count);
    }
    free(work), free(use.there), free(use.back), free(use.targets);
    return enough;
}

static bool step_fits(const Argument *arguments, const Shape *it) {
    int64_t cells = it->layers * it->ranks * it->experts, experts = it->layers * it->experts;
    bool holds = COUNT(PARTNERS) > 0 && COUNT(TABLE) > 0 && COUNT(TABLE) % (it->layers * it->ranks) == 0 &&
                 COUNT(HELD) == cells && COUNT(NEAR) == COUNT(SHARED) && COUNT(REPLICAS) == experts &&
                 COUNT(EACH) == COUNT(TABLE) && COUNT(LOAD) == it->layers * it->ranks && COUNT(DEMAND) == cells &&
                 (!AS_B(HOME) || (COUNT(HOME) == cells && COUNT(BASED) == experts)) && COUNT(LIMIT) == it->layers;
    if (!expect(holds, "cap_stepped: arrays differ in length")) return false;
    for (int64_t at = 0; at < COUNT(TABLE); at++) holds &= AS_H(TABLE)[at] >= EMPTY && AS_H(TABLE)[at] < it->experts;
    return expect(holds, "cap_stepped: no such expert") &&
           all_below(AS_L(ROWS), COUNT(ROWS), it->layers, "cap_stepped: no such layer");
}

/* cap_stepped(rows [n]; of all layers, changed: table [slots], held [ranks, experts], near [nodes, experts], replicas
   [experts], each [slots], load [ranks]; demand, own [ranks, experts], shared [nodes, experts]; node [ranks], home or
   None; changed: based [experts] or None; most [layers], cap, steps, partners) */
KERNEL(cap_stepped) {
    Shape shape;
    RUN("lHBLLDD" "dddlbLlxnn",
        shape_of(&shape, &arguments[OWN], &arguments[SHARED], &arguments[NODE], COUNT(LIMIT)) &&
            step_fits(arguments, &shape),
        ok = step_all(arguments, &shape), true);
}
