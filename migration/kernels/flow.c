/* Flow of load between the replicas of experts (split_weights.py). */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

#define PACE 0.9
#define BEFORE_RELEASE 15
#define TINY 1e-12
#define LEAST_BLOCK 48

/* Slots that exchange load. All arrays are of slots unless stated otherwise. */
typedef struct {
    int64_t n, ranks, groups;
    int64_t rank0, group0; /* the block's numbers begin here */
    const int64_t *rank, *group;
    const double *alone;                /* of ranks */
    double *loose, *fixed;              /* load that flows; load of own requests, NULL without */
    double *ahead, *width, *part;       /* the next point; the slot's pipe, alone and as a part of its group's */
    double *load, *sums, *total, *scale; /* of ranks; of groups */
    uint8_t *above;                     /* of ranks */
} Block;

static void add_up(const Block *it, const double *values, double *into) {
    memset(into, 0, (size_t)it->groups * sizeof *into);
    for (int64_t at = 0; at < it->n; at++) into[it->group[at] - it->group0] += values[at];
}

/* The width of each slot's pipe is its rank's pace, divided among the rank's pipes. */
static void set_widths(Block *it) {
    memset(it->load, 0, (size_t)it->ranks * sizeof *it->load);
    for (int64_t at = 0; at < it->n; at++) it->load[it->rank[at] - it->rank0] += 1.0;
    for (int64_t at = 0; at < it->n; at++) it->width[at] = PACE / it->load[it->rank[at] - it->rank0];
    add_up(it, it->width, it->sums);
    for (int64_t at = 0; at < it->n; at++) it->part[at] = it->width[at] / it->sums[it->group[at] - it->group0];
}

static void measure(Block *it) {
    const int64_t *restrict rank = it->rank;
    double *restrict load = it->load - it->rank0;
    memset(it->load, 0, (size_t)it->ranks * sizeof *it->load);
    if (it->fixed)
        for (int64_t at = 0; at < it->n; at++) load[rank[at]] += it->ahead[at] + it->fixed[at];
    else
        for (int64_t at = 0; at < it->n; at++) load[rank[at]] += it->ahead[at];
    for (int64_t at = 0; at < it->ranks; at++) it->load[at] = it->alone[at] + it->load[at];
}

/* Release load of own requests on ranks that are still too full. */
static bool released(Block *it, double enough) {
    bool any = false;
    for (int64_t rank = 0; rank < it->ranks; rank++) it->above[rank] = it->load[rank] > enough;
    for (int64_t at = 0; at < it->n; at++)
        if (it->above[it->rank[at] - it->rank0] && it->fixed[at] > 0) {
            any = true;
            it->loose[at] += it->fixed[at];
            it->fixed[at] = 0.0;
        }
    return any;
}

/* One round towards the width-weighted mean level of each expert's holders. momentum: of Nesterov's extrapolation. */
WIDE static void advance(Block *it, double enough, double momentum) {
    const int64_t *restrict rank = it->rank, *restrict group = it->group;
    const double *restrict part = it->part, *restrict width = it->width, *restrict level = it->load - it->rank0;
    double *restrict ahead = it->ahead, *restrict loose = it->loose;
    double *restrict mean = it->sums - it->group0, *restrict scale = it->scale - it->group0;
    if (enough != 0.0)
        for (int64_t at = 0; at < it->ranks; at++)
            if (!(it->load[at] >= enough)) it->load[at] = enough;
    memset(it->sums, 0, (size_t)it->groups * sizeof *it->sums);
    memset(it->scale, 0, (size_t)it->groups * sizeof *it->scale);
    for (int64_t at = 0; at < it->n; at++) mean[group[at]] += part[at] * level[rank[at]];
    for (int64_t at = 0; at < it->n; at++) {
        double flow = (mean[group[at]] - level[rank[at]]) * width[at] + ahead[at];
        flow = flow > 0.0 ? flow : 0.0;
        ahead[at] = flow;
        scale[group[at]] += flow;
    }
    /* Clipping at zero created load: each expert keeps its total. */
    for (int64_t at = 0; at < it->groups; at++) it->scale[at] = it->total[at] / (it->scale[at] + TINY);
    for (int64_t at = 0; at < it->n; at++) {
        double flow = ahead[at] * scale[group[at]];
        ahead[at] = flow + momentum * (flow - loose[at]);
        loose[at] = flow;
    }
}

static void diffuse(Block *it, int64_t rounds, double enough) {
    set_widths(it);
    add_up(it, it->loose, it->total);
    memcpy(it->ahead, it->loose, (size_t)it->n * sizeof *it->loose);
    double since = 0.0;
    for (int64_t turn = 0; turn < rounds; turn++) {
        measure(it);
        if (it->fixed && turn >= BEFORE_RELEASE && released(it, enough)) {
            add_up(it, it->loose, it->total);
            memcpy(it->ahead, it->loose, (size_t)it->n * sizeof *it->loose);
            since = 0.0;
        }
        advance(it, enough, since / (since + 3.0));
        since += 1.0;
    }
    if (it->fixed)
        for (int64_t at = 0; at < it->n; at++) it->loose[at] += it->fixed[at];
}

static int64_t most(int64_t one, int64_t other) { return one > other ? one : other; }

/* Diffuse slots that share no rank and no expert with others as blocks of their own, which fit the fastest cache.
   later: for each slot the lowest rank and group from there on. Where ranks may release own load, all restart
   together: one block. */
static void in_blocks(Block *all, int64_t rounds, double enough, int64_t (*later)[2]) {
    later[all->n][0] = later[all->n][1] = INT64_MAX;
    for (int64_t at = all->n; at-- > 0;)
        for (int which = 0; which < 2; which++) {
            int64_t number = (which ? all->group : all->rank)[at];
            later[at][which] = number < later[at + 1][which] ? number : later[at + 1][which];
        }
    int64_t begin = 0, rank0 = 0, group0 = 0, rank1 = 0, group1 = 0;
    for (int64_t at = 0; at < all->n; at++) {
        rank1 = most(rank1, all->rank[at] + 1);
        group1 = most(group1, all->group[at] + 1);
        bool apart = !all->fixed && at - begin >= LEAST_BLOCK && later[at + 1][0] >= rank1 && later[at + 1][1] >= group1;
        if (!apart && at + 1 < all->n) continue;
        Block one = *all;
        one.n = at + 1 - begin;
        one.rank += begin, one.group += begin, one.loose += begin;
        if (one.fixed) one.fixed += begin;
        one.rank0 = rank0, one.ranks = rank1 - rank0, one.alone += rank0;
        one.group0 = group0, one.groups = group1 - group0;
        diffuse(&one, rounds, enough);
        begin = at + 1, rank0 = rank1, group0 = group1;
    }
}

static bool work(Argument *arguments) {
    int64_t n = COUNT(0), ranks = COUNT(2), groups = COUNT(3);
    double *own = AS_D(5), *loose = AS_D(8);
    size_t doubles = (size_t)(n * 4 + ranks + groups * 3), pairs = (size_t)n + 1;
    double *scratch = malloc(doubles * 8 + pairs * 16 + (size_t)ranks);
    if (!scratch) return false;
    Block all = {.n = n, .rank = AS_L(0), .group = AS_L(1), .alone = AS_D(2), .loose = loose};
    all.fixed = own ? scratch : NULL;
    all.ahead = scratch + n, all.width = all.ahead + n, all.part = all.width + n, all.load = all.part + n;
    all.sums = all.load + ranks, all.total = all.sums + groups, all.scale = all.total + groups;
    int64_t(*later)[2] = (int64_t(*)[2])(all.scale + groups);
    all.above = (uint8_t *)(later + pairs);
    const double *served = AS_D(4);
    for (int64_t at = 0; at < n; at++) loose[at] = own ? served[at] - own[at] : served[at];
    if (own) memcpy(all.fixed, own, (size_t)n * sizeof(double));
    if (n) in_blocks(&all, COUNT(6), arguments[7].value, later);
    free(scratch);
    return true;
}

struct Flow {
    Block block;
    double scratch[];
};

Flow *flow_space(int64_t n, int64_t ranks, int64_t groups) {
    Flow *flow = malloc(sizeof *flow + (size_t)(n * 3 + ranks + groups * 3) * sizeof(double));
    if (!flow) return NULL;
    flow->block = (Block){.ahead = flow->scratch};
    Block *it = &flow->block;
    it->width = it->ahead + n, it->part = it->width + n, it->load = it->part + n;
    it->sums = it->load + ranks, it->total = it->sums + groups, it->scale = it->total + groups;
    return flow;
}

void flow_few(Flow *flow, int64_t n, const int64_t *rank, const int64_t *group, int64_t ranks, int64_t groups,
              const double *alone, const double *served, int64_t rounds, double *out) {
    Block *it = &flow->block;
    it->n = n, it->rank = rank, it->group = group, it->ranks = ranks, it->groups = groups;
    it->alone = alone, it->loose = out;
    memcpy(out, served, (size_t)n * sizeof *out);
    diffuse(it, rounds, 0.0);
}

/* flow(rank [n], group [n], alone [ranks], groups, served [n], own [n] or None, rounds, enough, out [n]) */
KERNEL(flow) {
    RUN("lldnddnxD",
        expect(COUNT(1) == COUNT(0) && COUNT(4) == COUNT(0) && COUNT(8) == COUNT(0) &&
                   (!AS_D(5) || COUNT(5) == COUNT(0)),
               "flow: arrays of slots differ in length") &&
            all_below(AS_L(0), COUNT(0), COUNT(2), "flow: no such rank") &&
            all_below(AS_L(1), COUNT(0), COUNT(3), "flow: no such group"),
        ok = work(arguments), true);
}
