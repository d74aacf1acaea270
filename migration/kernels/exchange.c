/* Exchanges of a placement for locality (pairwise_exchange.py), layer by layer. own: [ranks, experts]; shared: [nodes,
   experts]; `home`, where given: ranks that must hold the expert. */
#include "locality.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LEAST_GAIN 1e-7f

/* A layer: what each rank holds, and the holders of each expert. */
typedef struct {
    const Shape *shape;
    const float *own, *shared;
    const uint8_t *home;
    uint8_t *held;
    int64_t slots, limit;
    int32_t *number, *list;       /* [ranks], [ranks, experts]: experts of each rank, ascending */
    int32_t *count, *based, *near; /* [experts] holders, [experts] those where it must be, [nodes, experts] */
} Layer;

static void count_holder(const Layer *in, int64_t rank, int32_t at, int32_t by) {
    int64_t experts = in->shape->experts;
    in->count[at] += by;
    in->near[node_of(in->shape, rank) * experts + at] += by;
    in->based[at] += in->home && !in->home[rank * experts + at] ? 0 : by;
}

static void read_layer(const Layer *in) {
    int64_t experts = in->shape->experts;
    memset(in->count, 0, (size_t)experts * sizeof *in->count);
    memset(in->based, 0, (size_t)experts * sizeof *in->based);
    memset(in->near, 0, (size_t)(in->shape->nodes * experts) * sizeof *in->near);
    for (int64_t rank = 0; rank < in->shape->ranks; rank++) {
        const uint8_t *mine = in->held + rank * experts, *next = mine;
        int32_t *list = in->list + rank * experts, length = 0;
        for (; (next = memchr(next, 1, (size_t)(mine + experts - next))); next++) {
            list[length++] = (int32_t)(next - mine);
            count_holder(in, rank, (int32_t)(next - mine), 1);
        }
        in->number[rank] = length;
    }
}

static void put(const Layer *in, int64_t rank, int32_t expert, bool there) {
    int64_t experts = in->shape->experts;
    int32_t *list = in->list + rank * experts, length = in->number[rank], at = 0;
    if (in->held[rank * experts + expert] == there) return;
    in->held[rank * experts + expert] = there;
    count_holder(in, rank, expert, there ? 1 : -1);
    while (at < length && list[at] < expert) at++;
    if (there)
        memmove(list + at + 1, list + at, (size_t)(length - at) * sizeof *list), list[at] = expert;
    else
        memmove(list + at, list + at + 1, (size_t)(length - at - 1) * sizeof *list);
    in->number[rank] += there ? 1 : -1;
}

/* Exchanges of two experts of which each has one replica only, a sole one. */
typedef struct {
    float *value;              /* [experts, ranks]: worth of a replica; -INFINITY where it must not be */
    float *most;               /* [ranks, ranks]: gain of the first rank's sole replica that gains most on the second */
    float *back;               /* [ranks, ranks]: the same, by the second rank */
    float *base, *top;         /* [experts]: worth of a sole replica where it is; gain of its best exchange */
    int32_t *where, *partner;  /* [experts]: rank of a sole replica, -1; expert of its best exchange, -1 */
    uint8_t *same;             /* scratch [ranks] */
} Swaps;

static float worth_at(const Layer *in, int64_t rank, int32_t at) {
    int64_t experts = in->shape->experts;
    float own = in->own[rank * experts + at];
    return in->shape->nodes == 1 ? own : own + in->shared[in->shape->node[rank] * experts + at];
}

static void value_experts(const Layer *in, const Swaps *use) {
    int64_t experts = in->shape->experts, ranks = in->shape->ranks;
    for (int64_t rank = 0; rank < ranks; rank++)
        for (int32_t at = 0; at < experts; at++)
            use->value[at * ranks + rank] =
                in->home && !in->home[rank * experts + at] ? -INFINITY : worth_at(in, rank, at);
}

WIDE static void raise(const float *restrict value, float base, int64_t ranks, float *restrict most) {
    for (int64_t rank = 0; rank < ranks; rank++) {
        float gain = value[rank] - base;
        most[rank] = gain > most[rank] ? gain : most[rank];
    }
}

WIDE static float best_sum(const float *restrict value, float base, const float *restrict back, int64_t ranks) {
    float lanes[8], best = -INFINITY;
    int64_t whole = ranks - ranks % 8;
    for (int lane = 0; lane < 8; lane++) lanes[lane] = -INFINITY;
    for (int64_t first = 0; first < whole; first += 8)
        for (int lane = 0; lane < 8; lane++) {
            float sum = (value[first + lane] - base) + back[first + lane];
            lanes[lane] = sum > lanes[lane] ? sum : lanes[lane];
        }
    for (int lane = 0; lane < 8; lane++) best = lanes[lane] > best ? lanes[lane] : best;
    for (int64_t rank = whole; rank < ranks; rank++) {
        float sum = (value[rank] - base) + back[rank];
        best = sum > best ? sum : best;
    }
    return best;
}

/* The ranks at which the sum is `top`. */
WIDE static void match(const float *restrict value, float base, const float *restrict back, float top, int64_t ranks,
                       uint8_t *restrict same) {
    for (int64_t rank = 0; rank < ranks; rank++) same[rank] = (value[rank] - base) + back[rank] == top;
}

/* The first expert by whose exchange with `one` both gain the most. A sum does not fall if one of its terms rises: so
   no other expert of a rank gives more than the one that gains most, but several may give as much. */
static int32_t find_partner(const Layer *in, const Swaps *use, int32_t one) {
    int64_t ranks = in->shape->ranks, here = use->where[one];
    const float *value = use->value + one * ranks, *back = use->back + here * ranks;
    int32_t found = -1;
    match(value, use->base[one], back, use->top[one], ranks, use->same);
    for (const uint8_t *next = use->same; (next = memchr(next, 1, (size_t)(use->same + ranks - next))); next++) {
        int64_t rank = next - use->same;
        float gain = value[rank] - use->base[one];
        for (int32_t nth = 0; nth < in->number[rank]; nth++) {
            int32_t other = in->list[rank * in->shape->experts + nth];
            if (in->count[other] != 1 || (found >= 0 && other > found)) continue;
            if (gain + (use->value[other * ranks + here] - use->base[other]) == use->top[one]) found = other;
        }
    }
    return found;
}

/* Make all exchanges of two experts that are each other's best partner. */
static bool swap(const Layer *in, const Swaps *use) {
    int64_t ranks = in->shape->ranks, experts = in->shape->experts;
    for (int32_t at = 0; at < experts; at++) use->where[at] = use->partner[at] = -1;
    for (int64_t rank = 0; rank < ranks; rank++) {
        float *most = use->most + rank * ranks;
        for (int64_t other = 0; other < ranks; other++) most[other] = -INFINITY;
        for (int32_t nth = 0; nth < in->number[rank]; nth++) {
            int32_t at = in->list[rank * experts + nth];
            if (in->count[at] != 1) continue;
            use->where[at] = (int32_t)rank, use->base[at] = worth_at(in, rank, at);
            raise(use->value + at * ranks, use->base[at], ranks, most);
        }
        for (int64_t other = 0; other < ranks; other++) use->back[other * ranks + rank] = most[other];
    }
    for (int32_t at = 0; at < experts; at++) {
        if (use->where[at] < 0) continue;
        use->top[at] = best_sum(use->value + at * ranks, use->base[at], use->back + use->where[at] * ranks, ranks);
        if (use->top[at] > LEAST_GAIN) use->partner[at] = find_partner(in, use, at);
    }
    bool changed = false;
    for (int32_t at = 0; at < experts; at++) {
        int32_t other = use->partner[at];
        if (other < 0 || use->partner[other] != at) continue;
        changed = true;
        put(in, use->where[at], at, false);
        put(in, use->where[other], at, true);
    }
    return changed;
}

/* Possible hand-overs of a layer: a rank takes up an expert, and hands its replica of another to a taker. */
typedef struct {
    float *gain;                        /* [ranks] of each rank's best hand-over */
    int32_t *handed, *taken_up, *spare; /* [ranks] */
    int32_t *taker;                     /* [experts] */
    uint8_t *room;                      /* [ranks] the rank gives up nothing */
    float *offered, *row, *barred;      /* [experts] */
    uint8_t *tied;                      /* [experts] its last replica is where one must be */
} HandOvers;

static void find_tied(const Layer *in, const HandOvers *use) {
    int64_t experts = in->shape->experts;
    memset(use->tied, 0, (size_t)experts);
    for (int64_t rank = 0; in->home && rank < in->shape->ranks; rank++)
        for (int32_t nth = 0; nth < in->number[rank]; nth++) {
            int32_t at = in->list[rank * experts + nth];
            if (in->home[rank * experts + at] && in->based[at] == 1) use->tied[at] = 1;
        }
}

/* The highest number and its first place; place 0 if there is none above -INFINITY. */
WIDE static float highest(const float *row, int64_t count, int32_t *at) {
    float lanes[8], best = -INFINITY;
    int64_t whole = count - count % 8;
    for (int lane = 0; lane < 8; lane++) lanes[lane] = -INFINITY;
    for (int64_t first = 0; first < whole; first += 8)
        for (int lane = 0; lane < 8; lane++)
            lanes[lane] = row[first + lane] > lanes[lane] ? row[first + lane] : lanes[lane];
    for (int lane = 0; lane < 8; lane++) best = lanes[lane] > best ? lanes[lane] : best;
    for (int64_t rest = whole; rest < count; rest++) best = row[rest] > best ? row[rest] : best;
    int32_t first = (int32_t)count;
    for (int32_t place = 0; place < count; place++) {
        int32_t here = row[place] == best ? place : (int32_t)count;
        first = here < first ? here : first;
    }
    *at = best == -INFINITY ? 0 : first;
    return best;
}

/* Worth lost with a rank's replica. */
static float lost(const Layer *in, int64_t rank, int32_t at) {
    int64_t experts = in->shape->experts;
    float own = in->own[rank * experts + at];
    if (in->shape->nodes == 1) return own;
    int64_t beside = in->shape->node[rank] * experts + at;
    return own + (in->near[beside] == 1 ? in->shared[beside] : 0.0f);
}

/* A rank's cheapest spare replica, what it offers for each expert, and the expert that it values most. Return the
   value of that one. */
WIDE static float offer(const Layer *in, const HandOvers *use, int64_t rank) {
    int64_t experts = in->shape->experts, nodes = in->shape->nodes, first = node_of(in->shape, rank) * experts;
    const int32_t *beside = in->near + first, *list = in->list + rank * experts;
    const float *own = in->own + rank * experts, *shared = in->shared + first;
    const uint8_t *must = in->home ? in->home + rank * experts : NULL;
    float *restrict row = use->row, *restrict offered = use->offered;
    int32_t *restrict taker = use->taker;
    for (int64_t at = 0; at < experts; at++)
        row[at] = nodes == 1 ? own[at] : own[at] + (beside[at] == 0 ? shared[at] : 0.0f);
    float cheapest = INFINITY;
    use->spare[rank] = 0;
    for (int32_t nth = 0; nth < in->number[rank]; nth++) {
        int32_t at = list[nth];
        float less = lost(in, rank, at);
        bool fixed = in->based[at] == 1 && (!must || must[at]);
        if (!fixed && less < cheapest) cheapest = less, use->spare[rank] = at;
        row[at] = -INFINITY;
    }
    use->room[rank] = in->number[rank] < in->slots;
    float given_up = use->room[rank] ? 0.0f : cheapest;
    const float *open = row;
    if (must) {
        for (int64_t at = 0; at < experts; at++) use->barred[at] = use->tied[at] && !must[at] ? -INFINITY : row[at];
        open = use->barred;
    }
    for (int64_t at = 0; at < experts; at++) {
        float more = open[at] - given_up;
        bool better = more > offered[at];
        offered[at] = better ? more : offered[at];
        taker[at] = better ? (int32_t)rank : taker[at];
    }
    if (in->limit < in->shape->ranks)
        for (int64_t at = 0; at < experts; at++) row[at] = in->count[at] < in->limit ? row[at] : -INFINITY;
    return highest(row, experts, &use->taken_up[rank]);
}

/* Make a rank's best hand-over unless it is a chain that would return to its own expert, and exclude all that it
   touches. */
static bool pick(const Layer *in, const HandOvers *use, int32_t giver) {
    int32_t out = use->handed[giver], up = use->taken_up[giver], to = use->taker[out], down = use->spare[to];
    bool good = up != out && down != up;
    if (good) {
        if (!use->room[to]) put(in, to, down, false);
        put(in, to, out, true);
        put(in, giver, out, false);
        put(in, giver, up, true);
    }
    use->gain[giver] = use->gain[to] = -INFINITY;
    for (int64_t rank = 0; rank < in->shape->ranks; rank++) {
        int32_t mine = use->handed[rank], takes = use->taken_up[rank], taker = use->taker[mine];
        if (mine == up || mine == down || taker == to || taker == giver || takes == down ||
            (takes == up && in->limit < in->shape->ranks) || use->spare[taker] == down)
            use->gain[rank] = -INFINITY;
    }
    return good;
}

/* Make up to `picks` hand-overs that do not touch each other. */
static bool hand_over(const Layer *in, const HandOvers *use, int64_t picks) {
    int64_t experts = in->shape->experts, ranks = in->shape->ranks;
    find_tied(in, use);
    for (int64_t at = 0; at < experts; at++) use->offered[at] = -INFINITY, use->taker[at] = 0;
    for (int64_t rank = 0; rank < ranks; rank++) use->gain[rank] = offer(in, use, rank);
    /* The replica that costs a rank least to hand over. */
    for (int64_t rank = 0; rank < ranks; rank++) {
        float cost = INFINITY;
        use->handed[rank] = 0;
        for (int32_t nth = 0; nth < in->number[rank]; nth++) {
            int32_t at = in->list[rank * experts + nth];
            float less = lost(in, rank, at) - use->offered[at];
            if (less < cost) cost = less, use->handed[rank] = at;
        }
        use->gain[rank] -= cost;
    }
    bool changed = false;
    int32_t giver;
    for (int64_t turn = 0; turn < picks && highest(use->gain, ranks, &giver) > LEAST_GAIN; turn++)
        changed |= pick(in, use, giver);
    return changed;
}

/* Alternate exchanges and hand-overs until nothing changes, `rounds` times at most, with `cycle` rounds of hand-overs
   each. */
static void improve(const Layer *in, const Swaps *swaps, const HandOvers *hand_overs, int64_t picks, int64_t cycle,
                    int64_t rounds) {
    read_layer(in);
    value_experts(in, swaps);
    bool handed = true;
    for (int64_t round = 0; round < rounds; round++) {
        bool changed = swap(in, swaps);
        /* Hand-overs that found nothing find nothing again in the same placement. */
        if (!changed && !handed) return;
        handed = true;
        for (int64_t turn = 0; turn < cycle && handed; turn++) changed |= handed = hand_over(in, hand_overs, picks);
        if (!changed) return;
    }
}

/* exchanged(own, shared (float32), node, changed: held, home or None, layers, slots, most, picks, cycle, rounds) */
static bool exchange(const Argument *arguments, const Shape *it) {
    int64_t experts = it->experts, ranks = it->ranks, cells = ranks * experts;
    int64_t floats = cells + 2 * ranks * ranks + 2 * experts + ranks + 3 * experts;
    int64_t numbers = ranks + cells + (2 + it->nodes) * experts + 2 * experts + 3 * ranks + experts;
    float *memory = malloc((size_t)floats * sizeof(float) + (size_t)numbers * sizeof(int32_t) + (size_t)(2 * ranks + experts));
    if (!memory) return false;
    Layer in = {.shape = it, .slots = COUNT(6), .limit = COUNT(7), .number = (int32_t *)(memory + floats)};
    in.list = in.number + ranks, in.count = in.list + cells, in.based = in.count + experts;
    in.near = in.based + experts;
    Swaps swaps = {.value = memory, .most = memory + cells, .where = in.near + it->nodes * experts};
    swaps.back = swaps.most + ranks * ranks, swaps.base = swaps.back + ranks * ranks, swaps.top = swaps.base + experts;
    swaps.partner = swaps.where + experts;
    HandOvers hand_overs = {.gain = swaps.top + experts, .handed = swaps.partner + experts};
    hand_overs.taken_up = hand_overs.handed + ranks, hand_overs.spare = hand_overs.taken_up + ranks;
    hand_overs.taker = hand_overs.spare + ranks, hand_overs.room = (uint8_t *)(hand_overs.taker + experts);
    hand_overs.offered = hand_overs.gain + ranks, hand_overs.row = hand_overs.offered + experts;
    hand_overs.barred = hand_overs.row + experts, hand_overs.tied = hand_overs.room + ranks;
    swaps.same = hand_overs.tied + experts;
    for (int64_t layer = 0; layer < it->layers; layer++) {
        in.own = AS_F(0) + layer * cells, in.shared = AS_F(1) + layer * it->nodes * experts;
        in.held = AS_B(3) + layer * cells, in.home = AS_B(4) ? AS_B(4) + layer * cells : NULL;
        improve(&in, &swaps, &hand_overs, COUNT(8), COUNT(9), COUNT(10));
    }
    free(memory);
    return true;
}

KERNEL(locality_exchanged) {
    Shape shape;
    RUN("fflBbnnnnnn",
        shape_of(&shape, &arguments[0], &arguments[1], &arguments[2], COUNT(5)) && held_fits(arguments, &shape),
        ok = exchange(arguments, &shape), true);
}
