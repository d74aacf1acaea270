/* The best exchange and the best copy for each rank to be relieved (swap_search.py): h slots of that rank against c
   slots of others. Single precision, as in the numpy form. */
#include "kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BARRED 1e6f

/* Penalty of a load above (or, negative, below) its cap: search_state.py. */
static inline float penalty(float over) {
    float paid = over * 26.0f, other = over + 0.05f;
    paid = paid < other ? paid : other;
    float square = over * over * 10.0f, half = over * -0.5f;
    other = square < half ? square : half;
    return paid > other ? paid : other;
}

/* Bar an expert from slots of ranks that hold it already. held: of ranks; place: the slots' ranks. */
static void bar_holders(const uint8_t *held, int64_t c, const int32_t *place, float *level) {
    for (int64_t at = 0; at < c; at++) level[at] += (float)held[place[at]] * BARRED;
}

typedef struct {
    float worth;
    int64_t at;
} Best;

/* The greatest of some numbers, at least `top`, in lanes that do not wait for each other. */
WIDE static float greatest(const float *worth, int64_t c, float top) {
    float lanes[8];
    int64_t whole = c - c % 8;
    for (int lane = 0; lane < 8; lane++) lanes[lane] = top;
    for (int64_t first = 0; first < whole; first += 8)
        for (int lane = 0; lane < 8; lane++)
            lanes[lane] = worth[first + lane] > lanes[lane] ? worth[first + lane] : lanes[lane];
    for (int lane = 0; lane < 8; lane++) top = lanes[lane] > top ? lanes[lane] : top;
    for (int64_t at = whole; at < c; at++) top = worth[at] > top ? worth[at] : top;
    return top;
}

static void choose(Best *best, const float *worth, int64_t c, int64_t first) {
    float top = greatest(worth, c, best->worth);
    if (!(top > best->worth)) return;
    best->worth = top;
    for (int64_t at = 0; at < c; at++)
        if (worth[at] == top) {
            best->at = first + at;
            return;
        }
}

/* What the exchange of a partner's slot needs to know of it: arrays of columns. */
typedef struct {
    float *level, *each, *rise, *weight; /* its rank's load without it; its load; see swap_search._to_worth */
    int64_t *slot;
    int32_t *place;
} Partners;

/* Arguments of `swap_exchange`, by name. */
enum { LAYER = 0, RANK, PARTNERS, WITHIN, PER, RANKS, SLOT_EXPERT, EACH, OVER, PAYS, HELD, FIXED, FRESH, HOT_EXPERT,
       HOT_EACH, HOT_SHARED, HOT_GAP, HOT_RELIEF, HOT_FACTOR, OUT_WORTH, OUT_HOT, OUT_COLD };

static void gather(const Argument *arguments, int64_t row, int64_t reach, const Partners *into) {
    int64_t layer = AS_L(LAYER)[row], own = AS_L(RANK)[row], per = COUNT(PER), ranks = COUNT(RANKS);
    int64_t experts = COUNT(EACH) / (COUNT(OVER) / ranks), wide = COUNT(WITHIN), slots = ranks * per;
    for (int64_t at = 0, nth = 0, of = 0; at < reach * wide; at++) {
        int64_t rank = AS_L(PARTNERS)[row * reach + nth], slot = rank * per + AS_L(WITHIN)[of];
        if (++of == wide) nth++, of = 0;
        int64_t within = AS_L(SLOT_EXPERT)[layer * slots + slot], expert = layer * experts + within;
        double each = AS_D(EACH)[expert];
        /* No branches: what is held, and where, cannot be predicted. */
        bool stays = AS_B(HELD)[expert * ranks + own] | (within == experts - 1) | AS_B(FIXED)[expert];
        into->slot[at] = slot;
        into->place[at] = (int32_t)rank;
        into->level[at] = (float)(AS_D(OVER)[layer * ranks + rank] - each);
        into->each[at] = (float)each;
        into->rise[at] = (float)((double)stays * (double)BARRED - AS_D(PAYS)[layer * ranks + rank]);
        into->weight[at] = (float)AS_B(FRESH)[layer * slots + slot] + 1.0f;
    }
}

WIDE static void exchange(const Argument *arguments, float *work, int64_t *slots) {
    int64_t r = COUNT(LAYER), h = COUNT(HOT_EXPERT) / r, reach = COUNT(PARTNERS) / r, c = reach * COUNT(WITHIN);
    int64_t ranks = COUNT(RANKS);
    Partners partners = {work, work + c, work + 2 * c, work + 3 * c, slots, (int32_t *)(slots + c)};
    const float *restrict level = partners.level, *restrict each = partners.each;
    const float *restrict rise = partners.rise, *restrict weight = partners.weight;
    float *restrict cost = work + 4 * c, *restrict after = work + 5 * c;
    for (int64_t row = 0; row < r; row++) {
        Best best = {-INFINITY, 0};
        gather(arguments, row, reach, &partners);
        for (int64_t slot = 0; slot < h; slot++) {
            int64_t of = row * h + slot;
            float mine = AS_F(HOT_EACH)[of], gap = AS_F(HOT_GAP)[of];
            float relief = AS_F(HOT_RELIEF)[of], factor = AS_F(HOT_FACTOR)[of];
            for (int64_t at = 0; at < c; at++) after[at] = level[at] + mine;
            if (AS_B(HOT_SHARED)[of])
                bar_holders(AS_B(HELD) + AS_L(HOT_EXPERT)[of] * ranks, c, partners.place, after);
            for (int64_t at = 0; at < c; at++) {
                float total = penalty(after[at]) + penalty(gap + each[at]);
                cost[at] = (relief - total - rise[at]) * weight[at] * factor;
            }
            choose(&best, cost, c, slot * c);
        }
        AS_F(OUT_WORTH)[row] = best.worth;
        AS_L(OUT_HOT)[row] = best.at / c;
        AS_L(OUT_COLD)[row] = partners.slot[best.at % c];
    }
}

static bool exchange_all(Argument *arguments) {
    int64_t c = COUNT(PARTNERS) / COUNT(LAYER) * COUNT(WITHIN);
    int64_t *slots = malloc((size_t)c * (sizeof(int64_t) + sizeof(int32_t) + 6 * sizeof(float)));
    if (slots) exchange(arguments, (float *)((int32_t *)(slots + c) + c), slots);
    free(slots);
    return slots;
}

static bool exchange_fits(const Argument *arguments) {
    int64_t r = COUNT(LAYER), h = r ? COUNT(HOT_EXPERT) / r : 0, ranks = COUNT(RANKS), per = COUNT(PER);
    int64_t layers = ranks > 0 ? COUNT(OVER) / ranks : 0, experts = layers ? COUNT(EACH) / layers : 0;
    bool holds = r > 0 && per > 0 && layers > 0 && experts > 0 && COUNT(RANK) == r && COUNT(PARTNERS) % r == 0 &&
                 COUNT(PAYS) == COUNT(OVER) && COUNT(EACH) == layers * experts && COUNT(FIXED) == COUNT(EACH) &&
                 COUNT(HELD) == COUNT(EACH) * ranks && COUNT(SLOT_EXPERT) == layers * ranks * per &&
                 COUNT(FRESH) == COUNT(SLOT_EXPERT) && COUNT(OUT_WORTH) == r && COUNT(OUT_HOT) == r &&
                 COUNT(OUT_COLD) == r && COUNT(PARTNERS) > 0 && COUNT(WITHIN) > 0;
    for (int at = HOT_EACH; at <= HOT_FACTOR; at++) holds &= COUNT(at) == r * h;
    return expect(holds, "swap_exchange: arrays differ in length") &&
           all_below(AS_L(LAYER), r, layers, "swap_exchange: no such layer") &&
           all_below(AS_L(RANK), r, ranks, "swap_exchange: no such rank") &&
           all_below(AS_L(PARTNERS), COUNT(PARTNERS), ranks, "swap_exchange: no such rank") &&
           all_below(AS_L(WITHIN), COUNT(WITHIN), per, "swap_exchange: no such slot") &&
           all_below(AS_L(SLOT_EXPERT), COUNT(SLOT_EXPERT), experts, "swap_exchange: no such expert") &&
           all_below(AS_L(HOT_EXPERT), r * h, COUNT(EACH), "swap_exchange: no such expert");
}

/* swap_exchange(layer, rank [r], partners [r, n], slots of a partner to examine, slots of a rank, ranks; of the state:
   expert [layers, slots], each [layers, experts], over, pays [layers, ranks], held [layers, experts, ranks], fixed
   [layers, experts], fresh [layers, slots]; of the rank's slots [r, h]: expert, each, has other holders, gap, relief,
   factor; out [r]: worth, the rank's slot as a number below h, the other slot) */
KERNEL(swap_exchange) { RUN("llllnn" "lddd" "bbb" "lfbfff" "FLL", exchange_fits(arguments), ok = exchange_all(arguments), true); }

WIDE static void copy(const Argument *arguments, float *work, int32_t *place) {
    int64_t r = COUNT(7), h = COUNT(3) / r, c = COUNT(12) / r, n = COUNT(16), next = 0;
    int64_t per = COUNT(0), ranks = COUNT(1);
    float *restrict move = work, *restrict replicate = work + c, *restrict level = work + 2 * c;
    for (int64_t row = 0; row < r; row++) {
        Best moved = {-INFINITY, 0}, copied = {-INFINITY, 0};
        const float *restrict without = AS_F(13) + row * c, *restrict cost = AS_F(14) + row * c;
        const float *restrict weight = AS_F(15) + row * c;
        int64_t begin = next;
        while (next < n && AS_L(16)[next] == row) next++;
        for (int64_t at = 0; at < c; at++) place[at] = (int32_t)((uint32_t)AS_L(12)[row * c + at] / (uint32_t)per);
        float load = AS_F(7)[row], pays = AS_F(8)[row];
        for (int64_t slot = 0; slot < h; slot++) {
            int64_t of = row * h + slot;
            float mine = AS_F(4)[of], lighter = AS_F(5)[of];
            for (int64_t at = 0; at < c; at++) level[at] = without[at] + mine;
            if (AS_B(6)[of]) bar_holders(AS_B(2) + AS_L(3)[of] * ranks, c, place, level);
            for (int64_t at = 0; at < c; at++) {
                move[at] = penalty(level[at]);
                replicate[at] = penalty(level[at] - lighter);
            }
            /* Load of a spare expert that is also on the relieved rank comes back there. */
            for (int64_t one = begin; one < next; one++) {
                float comes = AS_F(18)[one], alone = penalty(load + comes) - pays;
                float left = load - mine, less = load - lighter;
                move[AS_L(17)[one]] += penalty(left + comes) - penalty(left) - alone;
                replicate[AS_L(17)[one]] += penalty(less + comes) - penalty(less) - alone;
            }
            float relief_move = AS_F(9)[of], relief_copy = AS_F(10)[of], factor = AS_F(11)[of];
            for (int64_t at = 0; at < c; at++) {
                move[at] = (relief_move - move[at] - cost[at]) * weight[at] * factor;
                replicate[at] = (relief_copy - replicate[at] - cost[at]) * weight[at];
            }
            choose(&moved, move, c, slot * c);
            choose(&copied, replicate, c, slot * c);
        }
        AS_F(19)[row] = copied.worth, AS_F(19)[r + row] = moved.worth;
        AS_L(20)[row] = copied.at, AS_L(20)[r + row] = moved.at;
    }
}

static bool copy_all(Argument *arguments) {
    int64_t c = COUNT(12) / COUNT(7);
    float *work = malloc((size_t)c * 4 * sizeof(float));
    if (work) copy(arguments, work, (int32_t *)(work + 3 * c));
    free(work);
    return work;
}

static bool copy_fits(const Argument *arguments) {
    int64_t r = COUNT(7), h = r ? COUNT(3) / r : 0, c = r ? COUNT(12) / r : 0, n = COUNT(16);
    bool holds = r > 0 && COUNT(0) > 0 && COUNT(1) > 0 && COUNT(3) == r * h && COUNT(12) == r * c && COUNT(8) == r &&
                 COUNT(17) == n && COUNT(18) == n && COUNT(19) == 2 * r && COUNT(20) == 2 * r;
    for (int at = 4; at <= 6; at++) holds &= COUNT(at) == r * h;
    for (int at = 9; at <= 11; at++) holds &= COUNT(at) == r * h;
    for (int at = 13; at <= 15; at++) holds &= COUNT(at) == r * c;
    for (int64_t at = 1; holds && at < n; at++) holds &= AS_L(16)[at - 1] <= AS_L(16)[at];
    return expect(holds, "swap_copy: arrays differ in length, or rows are not in order") &&
           all_below(AS_L(3), COUNT(3), COUNT(2) / COUNT(1), "swap_copy: no such expert") &&
           all_below(AS_L(12), COUNT(12), COUNT(0) * COUNT(1), "swap_copy: no such slot") &&
           all_below(AS_L(16), n, r, "swap_copy: no such row") && all_below(AS_L(17), n, c, "swap_copy: no such column");
}

/* swap_copy(slots of a rank, ranks, held [experts, ranks]; of the rank's slots [r, h]: expert, each, lighter, several
   holders; of the rank [r]: level, pays; [r, h]: relief by a move, by a replication, factor of a move; of others'
   [r, c]: slot, level without it, cost, weight; slots whose expert both hold [n]: row, column, load that comes; out:
   worth, at [2, r], of replications and of moves) */
KERNEL(swap_copy) { RUN("nnb" "lffb" "ff" "fff" "lfff" "llf" "FL",
                        copy_fits(arguments), ok = copy_all(arguments), true); }

static double paid(double over) {
    double one = over * 26.0, other = over + 0.05, square = over * over * 10.0, half = over * -0.5;
    one = one < other ? one : other;
    other = square < half ? square : half;
    return one > other ? one : other;
}

/* The load that comes to each other holder of an expert when one holder gives it up, and that leaves each holder when one
   more holds it. */
WIDE static void split_evenly(const double *restrict replicas, const double *restrict each, int64_t count,
                              double *restrict comes, double *restrict goes) {
    for (int64_t at = 0; at < count; at++) {
        comes[at] = each[at] / (replicas[at] - 1.0);
        goes[at] = each[at] / (replicas[at] + 1.0);
    }
}

/* swap_replicated(expert [layers, slots], replicas, each [layers, experts], over, pays [layers, ranks], slots of a rank,
   ranks; out [layers * slots]: slot, rank, expert, each, replicas, rise; [layers, experts]: rising, falling; [1]: how
   many slots have an expert with other replicas) */
static bool replicated(const Argument *arguments) {
    int64_t per = COUNT(5), ranks = COUNT(6), slots = per * ranks, layers = COUNT(0) / slots;
    int64_t experts = COUNT(1) / layers, n = 0;
    double *comes = malloc((size_t)COUNT(1) * 2 * sizeof *comes), *goes = comes + COUNT(1);
    if (!comes) return false;
    split_evenly(AS_D(1), AS_D(2), COUNT(1), comes, goes);
    double *rising = AS_D(13), *falling = AS_D(14);
    memset(rising, 0, (size_t)COUNT(13) * sizeof *rising);
    memset(falling, 0, (size_t)COUNT(14) * sizeof *falling);
    for (int64_t layer = 0; layer < layers; layer++)
        for (int64_t at = 0; at < slots; at++) {
            int64_t expert = layer * experts + AS_L(0)[layer * slots + at], rank = layer * ranks + at / per;
            double replicas = AS_D(1)[expert], level = AS_D(3)[rank], now = AS_D(4)[rank];
            if (!(replicas > 1.0)) continue;
            double rise = paid(level + comes[expert]) - now;
            AS_L(7)[n] = layer * slots + at, AS_L(8)[n] = rank, AS_L(9)[n] = expert;
            AS_D(10)[n] = AS_D(2)[expert], AS_D(11)[n] = replicas, AS_D(12)[n] = rise;
            rising[expert] += rise;
            falling[expert] += now - paid(level - goes[expert]);
            n++;
        }
    AS_L(15)[0] = n;
    free(comes);
    return true;
}

static bool replicated_fits(const Argument *arguments) {
    int64_t slots = COUNT(5) * COUNT(6), layers = slots > 0 ? COUNT(0) / slots : 0;
    bool holds = layers > 0 && COUNT(0) == layers * slots && COUNT(1) % layers == 0 && COUNT(2) == COUNT(1) &&
                 COUNT(3) == layers * COUNT(6) && COUNT(4) == COUNT(3) && COUNT(13) == COUNT(1) &&
                 COUNT(14) == COUNT(1) && COUNT(15) == 1;
    for (int at = 7; at <= 12; at++) holds &= COUNT(at) == COUNT(0);
    return expect(holds, "swap_replicated: arrays differ in length") &&
           all_below(AS_L(0), COUNT(0), COUNT(1) / layers, "swap_replicated: no such expert");
}

KERNEL(swap_replicated) { RUN("lddddnn" "LLLDDD" "DDL", replicated_fits(arguments), ok = replicated(arguments), true); }

/* swap_spare(dealing [layers, ranks], over [layers, ranks], replicas, least, fixed [layers, experts]; of replicated
   slots [n]: rank, expert; relieved ranks, most, turn; out [n]: chosen, row, column; [2]: how many, and columns) */
static bool spare(const Argument *arguments) {
    int64_t n = COUNT(5), r = COUNT(7), most = COUNT(8), widest = 1, kept = 0, columns = 1;
    int64_t *begin = calloc((size_t)r + 1, sizeof *begin), *chosen = AS_L(10), *of = AS_L(11);
    if (!begin) return false;
    for (int64_t at = 0; at < n; at++) {
        int64_t rank = AS_L(5)[at], expert = AS_L(6)[at], row = AS_L(0)[rank];
        bool good = row >= 0 && AS_D(1)[rank] < 0.0 && AS_D(2)[expert] > AS_D(3)[expert] && !AS_B(4)[expert];
        of[at] = good ? row : -1;
        if (good) begin[row + 1]++;
    }
    for (int64_t row = 0; row < r; row++) {
        if (begin[row + 1] > widest) widest = begin[row + 1];
        begin[row + 1] += begin[row];
    }
    /* Too many: every step-th, shifted with each turn so that all are seen in time. */
    int64_t step = (widest + most - 1) / most, first = COUNT(9) % step, *column = AS_L(12);
    int64_t *next = calloc((size_t)r, sizeof *next);
    if (next) {
        for (int64_t at = 0; at < n; at++)
            if (of[at] >= 0) column[begin[of[at]] + next[of[at]]++] = at;
        for (int64_t row = 0; row < r; row++) {
            int64_t nth = 0;
            for (int64_t at = begin[row] + first; at < begin[row + 1]; at += step, nth++, kept++)
                chosen[kept] = column[at], of[kept] = row, column[kept] = nth;
            if (nth > columns) columns = nth;
        }
        AS_L(13)[0] = kept, AS_L(13)[1] = columns;
    }
    free(begin);
    bool enough = next;
    free(next);
    return enough;
}

static bool spare_fits(const Argument *arguments) {
    int64_t n = COUNT(5), r = COUNT(7);
    bool holds = r > 0 && COUNT(8) > 0 && COUNT(9) >= 0 && COUNT(1) == COUNT(0) && COUNT(3) == COUNT(2) &&
                 COUNT(4) == COUNT(2) && COUNT(6) == n && COUNT(10) == n && COUNT(11) == n && COUNT(12) == n &&
                 COUNT(13) == 2;
    for (int64_t at = 0; holds && at < COUNT(0); at++) holds &= AS_L(0)[at] < r;
    return expect(holds, "swap_spare: arrays differ in length, or there is no such row") &&
           all_below(AS_L(5), n, COUNT(0), "swap_spare: no such rank") &&
           all_below(AS_L(6), n, COUNT(2), "swap_spare: no such expert");
}

KERNEL(swap_spare) { RUN("ldddb" "ll" "nnn" "LLLL", spare_fits(arguments), ok = spare(arguments), true); }
