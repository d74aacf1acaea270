/* Exchanges between heavy and light ranks, layer by layer (full_placement.py, `_traded`). */
#include "kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CLOSE 1e-4
#define LEAST 1e-6f
#define TIE 1e-12

/* One layer: [ranks, per], but for loads [ranks] and held [ranks, experts + 1]. */
typedef struct {
    int64_t ranks, per, experts;
    double *loads;
    float *weight;
    int64_t *expert;
    uint8_t *held;
} Layer;

typedef struct {
    double *key;            /* [ranks], rising from the heaviest rank on */
    int64_t *order, *other; /* [ranks] */
    float *out, *back;      /* [per], weights that may go and come; then of pairs of slots */
    int64_t *first, *second; /* the slots of each pair */
    int64_t pairs;
} Space;

/* The best exchange of a pair of ranks: what goes, what comes, and its distance from the aim. */
typedef struct {
    int64_t gone, come;
    float missed;
} Exchange;

/* Of equal keys the lower rank comes first. */
static bool ahead(const double *key, int64_t one, int64_t other) {
    return key[one] < key[other] || (key[one] == key[other] && one < other);
}

static void insert(const double *key, int64_t *order, int64_t begin, int64_t end) {
    for (int64_t at = begin + 1; at < end; at++) {
        int64_t moved = order[at], to = at;
        for (; to > begin && ahead(key, moved, order[to - 1]); to--) order[to] = order[to - 1];
        order[to] = moved;
    }
}

/* Sort by merging; runs that follow one another already are left alone. */
static void sort(const double *key, int64_t *order, int64_t *other, int64_t count) {
    const int64_t run = 12;
    for (int64_t begin = 0; begin < count; begin += run) insert(key, order, begin, begin + run < count ? begin + run : count);
    for (int64_t width = run; width < count; width *= 2)
        for (int64_t begin = 0; begin + width < count; begin += 2 * width) {
            int64_t middle = begin + width, end = middle + width < count ? middle + width : count;
            if (ahead(key, order[middle - 1], order[middle])) continue;
            memcpy(other, order + begin, (size_t)width * sizeof *order);
            int64_t left = 0, right = middle, to = begin;
            while (left < width && right < end)
                order[to++] = ahead(key, order[right], other[left]) ? order[right++] : other[left++];
            memcpy(order + to, other + left, (size_t)(width - left) * sizeof *order);
        }
}

static Exchange nearest(const float *out, const float *back, int64_t count, float aim) {
    Exchange best = {0, 0, INFINITY};
    for (int64_t gone = 0; gone < count; gone++)
        for (int64_t come = 0; come < count; come++) {
            float missed = fabsf((out[gone] - aim) - back[come]);
            if (missed < best.missed) best = (Exchange){gone, come, missed};
        }
    return best;
}

static void exchange(const Layer *it, int64_t heavy, int64_t light, int64_t gone, int64_t come) {
    int64_t *from = it->expert + heavy * it->per + gone, *to = it->expert + light * it->per + come;
    float *less = it->weight + heavy * it->per + gone, *more = it->weight + light * it->per + come;
    int64_t leaving = *from, coming = *to;
    float change = *less - *more;
    uint8_t *of_heavy = it->held + heavy * (it->experts + 1), *of_light = it->held + light * (it->experts + 1);
    *from = coming, *to = leaving;
    *less -= change, *more += change;
    it->loads[heavy] -= change, it->loads[light] += change;
    of_heavy[leaving] = of_light[coming] = false;
    of_heavy[coming] = coming != it->experts, of_light[leaving] = leaving != it->experts;
}

static void trade(const Layer *it, const Space *use, int64_t heavy, int64_t light, bool twos) {
    int64_t per = it->per;
    const int64_t *own = it->expert + heavy * per, *theirs = it->expert + light * per;
    for (int64_t slot = 0; slot < per; slot++) {
        use->out[slot] = it->held[light * (it->experts + 1) + own[slot]] ? INFINITY : it->weight[heavy * per + slot];
        use->back[slot] = it->held[heavy * (it->experts + 1) + theirs[slot]] ? -INFINITY : it->weight[light * per + slot];
    }
    float aim = (float)(0.5 * (it->loads[heavy] - it->loads[light])), enough = aim - LEAST;
    Exchange one = nearest(use->out, use->back, per, aim), two = {0, 0, INFINITY};
    if (twos) {
        float *out = use->out + per, *back = use->back + per;
        for (int64_t pair = 0; pair < use->pairs; pair++) {
            out[pair] = use->out[use->first[pair]] + use->out[use->second[pair]];
            back[pair] = use->back[use->first[pair]] + use->back[use->second[pair]];
        }
        two = nearest(out, back, use->pairs, aim);
    }
    if (two.missed < enough && two.missed < one.missed) {
        exchange(it, heavy, light, use->first[two.gone], use->first[two.come]);
        exchange(it, heavy, light, use->second[two.gone], use->second[two.come]);
    } else if (one.missed < enough)
        exchange(it, heavy, light, one.gone, one.come);
}

static bool uneven(const Layer *it) {
    for (int64_t rank = 0; rank < it->ranks; rank++)
        if (it->loads[rank] > 1.0 + CLOSE) return true;
    return false;
}

static void trade_layer(const Layer *it, const Space *use, const int64_t *rounds, int64_t turns, bool twos) {
    int64_t ranks = it->ranks;
    for (int64_t rank = 0; rank < ranks; rank++) use->order[rank] = rank;
    for (int64_t turn = 0; turn < turns && uneven(it); turn++) {
        int64_t count = rounds[turn];
        for (int64_t rank = 0; rank < ranks; rank++) use->key[rank] = (double)rank * TIE - it->loads[rank];
        /* After a round of the heaviest rank alone two ranks are out of place. */
        if (turn && rounds[turn - 1] == 1)
            insert(use->key, use->order, 0, ranks);
        else
            sort(use->key, use->order, use->other, ranks);
        for (int64_t nth = 0; nth < count; nth++) {
            int64_t partner = count == 1 ? 1 + turn % (ranks - 1) : ranks - 1 - (nth + turn) % (ranks - count);
            trade(it, use, use->order[nth], use->order[partner], twos && count < ranks / 2);
        }
    }
}

/* placement_traded(expert, weight [layers, ranks, per], loads [layers, ranks], held [layers, ranks, experts + 1], all
   changed; rounds: number of heavy ranks in each, ranks, exchanges of two for two as well) */
static bool trade_all(const Argument *arguments) {
    int64_t ranks = COUNT(5), per = COUNT(0) / COUNT(2), experts = COUNT(3) / COUNT(2) - 1;
    int64_t pairs = COUNT(6) ? per * (per - 1) / 2 : 0;
    double *key = malloc((size_t)ranks * (sizeof *key + 2 * sizeof(int64_t)) +
                         (size_t)(per + pairs) * 2 * sizeof(float) + (size_t)pairs * 2 * sizeof(int64_t));
    if (!key) return false;
    Space use = {.key = key, .order = (int64_t *)(key + ranks), .pairs = pairs};
    use.other = use.order + ranks, use.first = use.other + ranks, use.second = use.first + pairs;
    use.out = (float *)(use.second + pairs), use.back = use.out + per + pairs;
    int64_t pair = 0;
    for (int64_t first = 0; first < per && pairs; first++)
        for (int64_t second = first + 1; second < per; second++) use.first[pair] = first, use.second[pair++] = second;
    for (int64_t place = 0; place < COUNT(2); place += ranks) {
        Layer layer = {ranks, per, experts, AS_D(2) + place, AS_F(1) + place * per, AS_L(0) + place * per,
                       AS_B(3) + place * (experts + 1)};
        trade_layer(&layer, &use, AS_L(4), COUNT(4), pairs > 0);
    }
    free(key);
    return true;
}

static bool fits(const Argument *arguments) {
    int64_t places = COUNT(2), ranks = COUNT(5);
    return expect(places > 0 && ranks > 1 && places % ranks == 0 && COUNT(0) > 0 && COUNT(0) % places == 0 &&
                      COUNT(1) == COUNT(0) && COUNT(3) % places == 0 && COUNT(3) > places,
                  "placement_traded: arrays differ in length") &&
           all_below(AS_L(0), COUNT(0), COUNT(3) / places, "placement_traded: no such expert") &&
           all_between(1, AS_L(4), COUNT(4), ranks / 2 + 1, "placement_traded: no such number of ranks");
}

KERNEL(placement_traded) { RUN("LFDBlnn", fits(arguments), ok = trade_all(arguments), true); }
