/* Copies where load cannot flow off (overflow_state.py, overflow_copies.py). `experts` and `ranks` count the
   placeholders: the last rank, and the last expert of a layer, which stands for an empty slot. */
#include "kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define HOMELESS 0.2
#define STILL 1e-4
#define LEAST 1e-3
#define TINY 1e-9
#define NOWHERE (-1)

static double above(double value) { return value > 0.0 ? value : 0.0; }
static double least(double one, double other) { return one < other ? one : other; }
static double most(double one, double other) { return one > other ? one : other; }

/* One layer, or one trial in it; m elements. */
typedef struct {
    int64_t m, ranks, experts;
    const int64_t *rank, *expert, *replicas;
    const double *served, *load, *alone;
    const uint8_t *dead;
    double cap;
} Layer;

typedef struct {
    double *loads, *leaving;            /* of ranks */
    double *out;                        /* of experts */
    double *space, *stranded, *parallel; /* of elements */
    int64_t *other;                     /* of elements */
} View;

static void add_loads(const Layer *it, const double *served, double *into) {
    memset(into, 0, (size_t)it->ranks * sizeof *into);
    for (int64_t at = 0; at < it->m; at++) into[it->rank[at]] += served[at];
    for (int64_t at = 0; at < it->ranks; at++) into[at] = it->alone[at] + into[at];
}

/* Changes the loads into what lies above the cap. */
static double excess(const Layer *it, double *loads) {
    for (int64_t at = 0; at < it->ranks; at++) loads[at] = it->dead[at] ? 0.0 : above(loads[at] - it->cap);
    return add_row(loads, it->ranks);
}

static int64_t root_of(int64_t *parent, int64_t at) {
    while (parent[at] != at) at = parent[at] = parent[parent[at]];
    return at;
}

/* The excess of crowded ranks that a shared expert with load joins is common. parent: of ranks, then of experts; flowing:
   of elements. */
static void pool(const Layer *it, const double *loads, double *leaving, int64_t *parent, double *sums,
                 int64_t *flowing) {
    int64_t count = 0;
    for (int64_t at = 0; at < it->ranks + it->experts; at++) parent[at] = at;
    for (int64_t at = 0; at < it->ranks; at++) leaving[at] = it->dead[at] ? 0.0 : above(loads[at] - it->cap);
    /* No branches: which elements are such ones cannot be predicted. */
    for (int64_t at = 0; at < it->m; at++) {
        flowing[count] = at;
        count += (it->served[at] > STILL) & (it->expert[at] != it->experts - 1) & (leaving[it->rank[at]] > 0.0);
    }
    for (int64_t nth = 0; nth < count; nth++) {
        int64_t at = flowing[nth];
        parent[root_of(parent, it->ranks + it->expert[at])] = root_of(parent, it->rank[at]);
    }
    memset(sums, 0, (size_t)(it->ranks + it->experts) * sizeof *sums);
    for (int64_t at = 0; at < it->ranks; at++) sums[root_of(parent, at)] += leaving[at];
    for (int64_t at = 0; at < it->ranks; at++) leaving[at] = sums[root_of(parent, at)];
}

/* The other holder's element of experts with two, and what it can push back. between: [ranks, ranks], zeros. */
static bool find_pairs(const Layer *it, const View *view, double *columns, double *between) {
    memset(columns, 0, (size_t)it->experts * sizeof *columns);
    for (int64_t at = 0; at < it->m; at++) columns[it->expert[at]] += (double)at;
    bool good = true;
    for (int64_t at = 0; at < it->m; at++) {
        int64_t expert = it->expert[at];
        bool two = it->replicas[expert] == 2;
        int64_t other = two ? (int64_t)(columns[expert] - (double)at) : at;
        if (other < 0 || other >= it->m) good = false, other = at;
        view->other[at] = other;
        between[it->rank[at] * it->ranks + it->rank[other]] += two ? it->served[at] : 0.0;
    }
    for (int64_t at = 0; at < it->m; at++) {
        int64_t other = view->other[at];
        double back = between[it->rank[other] * it->ranks + it->rank[at]] - it->served[other];
        view->parallel[at] = it->replicas[it->expert[at]] == 2 ? back : 0.0;
    }
    for (int64_t at = 0; at < it->m; at++) between[it->rank[at] * it->ranks + it->rank[view->other[at]]] = 0.0;
    return good;
}

typedef struct {
    double *by_expert, *by_rank;      /* sums */
    double *room, *elsewhere, *passing, *onward; /* of elements */
    double *sums, *between;
    int64_t *parent;
} Workspace;

WIDE static bool look(const Layer *it, const View *view, const Workspace *use) {
    int64_t m = it->m;
    const double *y = it->served;
    add_loads(it, y, view->loads);
    pool(it, view->loads, view->leaving, use->parent, use->sums, view->other);
    bool good = find_pairs(it, view, use->by_expert, use->between);
    memset(view->out, 0, (size_t)it->experts * sizeof(double));
    memset(use->by_expert, 0, (size_t)it->experts * sizeof(double));
    for (int64_t at = 0; at < m; at++) {
        int64_t rank = it->rank[at], expert = it->expert[at];
        view->out[expert] += least(y[at], view->leaving[rank]);
        use->by_expert[expert] += use->room[at] = it->dead[rank] ? 0.0 : above(it->cap - view->loads[rank]);
    }
    for (int64_t at = 0; at < it->experts; at++) view->out[at] = least(it->load[at], view->out[at]);
    /* Displaced load: first into the room of the expert's other holders, the rest one step further. */
    memset(use->by_rank, 0, (size_t)it->ranks * sizeof(double));
    for (int64_t at = 0; at < m; at++) {
        int64_t expert = it->expert[at];
        use->elsewhere[at] = use->by_expert[expert] - use->room[at];
        use->passing[at] = expert < it->experts - 1 ? least(y[at], use->elsewhere[at]) : 0.0;
        use->by_rank[it->rank[at]] += use->passing[at];
    }
    memset(use->by_expert, 0, (size_t)it->experts * sizeof(double));
    for (int64_t at = 0; at < m; at++) {
        use->onward[at] = use->by_rank[it->rank[at]];
        use->by_expert[it->expert[at]] += use->onward[at] - use->passing[at];
    }
    for (int64_t at = 0; at < m; at++) {
        int64_t rank = it->rank[at];
        double further = use->by_expert[it->expert[at]] - use->onward[at] + use->passing[at];
        double room = it->dead[rank] ? 0.0 : it->cap - view->loads[rank];
        double space = above(room + y[at] + use->onward[at] - use->passing[at]);
        double homeless = above(y[at] - use->elsewhere[at]), left = above(homeless - further);
        double back = least(left, above(view->parallel[at]));
        view->space[at] = above(space - back);
        view->stranded[at] = left - back + HOMELESS * homeless;
    }
    return good;
}

static bool view_all(Argument *arguments, bool *good) {
    int64_t a = COUNT(4), m = COUNT(0) / a, ranks = COUNT(3), experts = COUNT(5) / a;
    size_t doubles = (size_t)(experts * 2 + ranks * 2 + m * 4 + ranks * ranks);
    double *scratch = calloc(doubles, sizeof(double));
    int64_t *parent = malloc((size_t)(ranks + experts) * sizeof *parent);
    if (scratch && parent) {
        Workspace use = {.by_expert = scratch, .parent = parent};
        use.by_rank = use.by_expert + experts, use.room = use.by_rank + ranks, use.elsewhere = use.room + m;
        use.passing = use.elsewhere + m, use.onward = use.passing + m, use.sums = use.onward + m;
        use.between = use.sums + ranks + experts;
        for (int64_t at = 0; at < a; at++) {
            Layer layer = {.m = m, .ranks = ranks, .experts = experts, .served = AS_D(0) + at * m};
            layer.rank = AS_L(1) + at * m, layer.expert = AS_L(2) + at * m, layer.dead = AS_B(3);
            layer.cap = AS_D(4)[at], layer.load = AS_D(5) + at * experts, layer.replicas = AS_L(6) + at * experts;
            layer.alone = AS_D(7) + at * ranks;
            View view = {AS_D(8) + at * ranks,  AS_D(9) + at * ranks, AS_D(10) + at * experts, AS_D(11) + at * m,
                         AS_D(12) + at * m, AS_D(14) + at * m,    AS_L(13) + at * m};
            *good &= look(&layer, &view, &use);
        }
    }
    bool enough = scratch && parent;
    free(scratch), free(parent);
    return enough;
}

/* overflow_view(served [a, m], rank, expert [a, m], dead [ranks], cap [a], load [a, experts], replicas [a, experts],
   alone [a, ranks]; out: loads, leaving [a, ranks], out [a, experts], space, stranded, other, parallel [a, m]) */
KERNEL(overflow_view) {
    bool good = true;
    RUN("dllbddldDDDDDLD",
        expect(COUNT(4) > 0 && COUNT(1) == COUNT(0) && COUNT(2) == COUNT(0) && COUNT(0) % COUNT(4) == 0 &&
                   COUNT(5) % COUNT(4) == 0 && COUNT(6) == COUNT(5) && COUNT(7) == COUNT(3) * COUNT(4) &&
                   COUNT(8) == COUNT(7) && COUNT(9) == COUNT(7) && COUNT(10) == COUNT(5) && COUNT(11) == COUNT(0) &&
                   COUNT(12) == COUNT(0) && COUNT(13) == COUNT(0) && COUNT(14) == COUNT(0),
               "overflow_view: arrays differ in length") &&
            all_below(AS_L(1), COUNT(0), COUNT(3), "overflow_view: no such rank") &&
            all_below(AS_L(2), COUNT(0), COUNT(5) / COUNT(4), "overflow_view: no such expert"),
        ok = view_all(arguments, &good),
        expect(good, "overflow_view: an expert with two live holders has not two elements"));
}

/* Mark ranks that hold the expert or held it at first; most blocks of slots have it nowhere. */
WIDE static void mark(const int16_t *table, const int16_t *origin, int64_t slots, int64_t per, int16_t expert,
                      uint8_t *holds) {
    const int64_t block = 32;
    for (int64_t first = 0; first < slots; first += block) {
        int64_t end = first + block < slots ? first + block : slots;
        int16_t found = 0;
        for (int64_t at = first; at < end; at++) found |= (table[at] == expert) | (origin[at] == expert);
        for (int64_t at = first; found && at < end; at++)
            if (table[at] == expert || origin[at] == expert) holds[at / per] = 1;
    }
}

/* Promise of a slot: load that it takes, less the load that it displaces, less its learnt shortfall. */
WIDE static void promise_copy(const double *restrict space, const double *restrict stranded,
                              const double *restrict harm, int64_t m, double flow, double *restrict out) {
    for (int64_t at = 0; at < m; at++) {
        double value = least(flow, space[at]) - stranded[at] - harm[at];
        out[at] = space[at] <= LEAST ? -INFINITY : value;
    }
}

static void promise(Argument *arguments, uint8_t *holds) {
    int64_t t = COUNT(0), ranks = COUNT(15), m = COUNT(16) / t, a = COUNT(7) / m;
    int64_t slots = COUNT(5) / a, experts = COUNT(9) / a, per = slots / (ranks - 1);
    static const double limit[2] = {-INFINITY, INFINITY};
    for (int64_t n = 0; n < t; n++) {
        int64_t row = AS_L(0)[n], expert = AS_L(1)[n];
        double flow = AS_D(3) ? AS_D(3)[n] : 0.0, *out = AS_D(16) + n * m;
        if (AS_D(2))
            memcpy(out, AS_D(2) + n * m, (size_t)m * sizeof *out);
        else
            promise_copy(AS_D(4) + row * m, AS_D(14) + row * m, AS_D(17) + row * m, m, flow, out);
        memcpy(holds, AS_B(12) ? AS_B(12) + row * ranks : AS_B(15), (size_t)ranks);
        mark(AS_H(5) + row * slots, AS_H(6) + row * slots, slots, per, (int16_t)expert, holds);
        const int64_t *held = AS_L(7) + row * m, *rank = AS_L(8) + row * m;
        const int64_t *replicas = AS_L(9) + row * experts, *fewest = AS_L(10) + row * experts;
        const uint8_t *new = AS_B(11) + row * m, *parted = AS_B(13) ? AS_B(13) + row * experts : NULL;
        bool any = AS_D(2) || flow > 0;
        /* No branches: which slots are open cannot be predicted. */
        for (int64_t at = 0; at < m; at++) {
            int64_t one = held[at];
            bool spare = (one == experts - 1) | ((replicas[one] > fewest[one]) & !(parted && parted[one]));
            out[at] = least(out[at], limit[any & spare & !new[at] & !holds[rank[at]]]);
        }
    }
}

static bool promise_all(Argument *arguments) {
    uint8_t *holds = malloc((size_t)COUNT(15));
    if (holds) promise(arguments, holds);
    free(holds);
    return holds;
}

static bool promises_fit(const Argument *arguments) {
    int64_t t = COUNT(0), all = COUNT(7), ranks = COUNT(15), m = t ? COUNT(16) / t : 0, a = m ? all / m : 0;
    return expect(a > 0 && COUNT(1) == t && COUNT(16) == t * m && all == a * m && COUNT(8) == all && COUNT(11) == all &&
                      COUNT(4) == all && COUNT(14) == all && COUNT(17) == all && COUNT(5) % a == 0 &&
                      COUNT(6) == COUNT(5) && COUNT(9) % a == 0 && COUNT(10) == COUNT(9) && ranks > 1 &&
                      (COUNT(5) / a) % (ranks - 1) == 0 && (!AS_B(12) || COUNT(12) == a * ranks) &&
                      (!AS_B(13) || COUNT(13) == COUNT(9)) && (AS_D(2) || AS_D(3)) &&
                      (!AS_D(2) || COUNT(2) == t * m) && (!AS_D(3) || COUNT(3) == t),
                  "overflow_promises: arrays differ in length") &&
           all_below(AS_L(0), t, a, "overflow_promises: no such layer") &&
           all_below(AS_L(7), all, COUNT(9) / a, "overflow_promises: no such expert") &&
           all_below(AS_L(8), all, ranks, "overflow_promises: no such rank");
}

/* overflow_promises(row, expert [t], worth [t, m] or None, flow [t] or None, space [a, m], table, origin [a, slots],
   held, rank [a, m], replicas, least [a, experts], new [a, m], shut [a, ranks] or None, parted [a, experts] or None,
   stranded [a, m], dead [ranks], out [t, m], harm [a, m]) */
KERNEL(overflow_promises) { RUN("llddd"
                                "hhllllbbbdbDd",
                                promises_fit(arguments), ok = promise_all(arguments), true); }

typedef struct {
    int64_t *held;
    double *served, *loads, *handed;
    int64_t *group, *number; /* of elements; of experts, -1: none yet */
} Trial;

/* The other holder of the element's expert hands back as much as it can, through other experts that both hold. */
static void hand_back(const Layer *it, const Trial *trial, const int64_t *other, double parallel, int64_t element,
                      double left) {
    double part = parallel > 0 ? least(left / most(parallel, TINY), 1.0) : 0.0;
    if (part == 0.0) return;
    int64_t here = it->rank[element], there = it->rank[other[element]];
    for (int64_t at = 0; at < it->m; at++) {
        bool both = it->rank[at] == there && it->rank[other[at]] == here && trial->held[at] == trial->held[other[at]];
        trial->handed[at] = both ? trial->served[at] * part : 0.0;
    }
    trial->handed[other[element]] = 0.0;
    for (int64_t at = 0; at < it->m; at++) trial->served[at] += trial->handed[other[at]] - trial->handed[at];
}

static void make_copy(const Layer *it, const Trial *trial, const double *loads, const int64_t *other,
                      const double *parallel, int64_t element, int64_t expert, double moved) {
    int64_t gone = trial->held[element];
    double left = trial->served[element], *near = trial->handed;
    trial->held[element] = -1;
    /* The replaced replica's load goes to its other holders, in proportion to their room. */
    for (int64_t at = 0; at < it->m; at++)
        near[at] = trial->held[at] == gone ? above(it->cap - loads[it->rank[at]]) + 1e-3 : 0.0;
    double each = left / most(add_row(near, it->m), TINY);
    for (int64_t at = 0; at < it->m; at++) trial->served[at] += near[at] * each;
    trial->served[element] = 0.0;
    hand_back(it, trial, other, parallel[element], element, left);
    /* The expert's other holders hand over the moved part evenly. */
    double kept = 1.0 - moved / most(it->load[expert], TINY);
    for (int64_t at = 0; at < it->m; at++)
        if (trial->held[at] == expert) trial->served[at] *= kept;
    trial->held[element] = expert;
    trial->served[element] = moved;
}

/* Number the elements' experts without gaps. */
static int64_t number_groups(const Layer *it, const Trial *trial) {
    int64_t groups = 0;
    for (int64_t at = 0; at < it->experts; at++) trial->number[at] = -1;
    for (int64_t at = 0; at < it->m; at++) {
        int64_t *number = &trial->number[trial->held[at]];
        if (*number < 0) *number = groups++;
        trial->group[at] = *number;
    }
    return groups;
}

static bool try_all(Argument *arguments) {
    int64_t t = COUNT(0), lanes = COUNT(1) / t, a = COUNT(10), m = COUNT(5) / a, ranks = COUNT(9);
    int64_t experts = COUNT(8) / a, rounds[2] = {COUNT(15), COUNT(16)};
    double *scratch = malloc((size_t)(m * 2 + ranks) * sizeof(double) + (size_t)(m * 2 + experts) * sizeof(int64_t));
    Flow *flow = flow_space(m, ranks, experts);
    if (scratch && flow)
        for (int64_t n = 0; n < t; n++) {
            int64_t row = AS_L(0)[n];
            Layer layer = {.m = m, .ranks = ranks, .experts = experts, .cap = AS_D(10)[row], .dead = AS_B(9)};
            layer.rank = AS_L(6) + row * m, layer.load = AS_D(8) + row * experts, layer.alone = AS_D(11) + row * ranks;
            Trial trial = {.served = scratch, .handed = scratch + m, .loads = scratch + 2 * m};
            trial.held = (int64_t *)(trial.loads + ranks), trial.group = trial.held + m, trial.number = trial.group + m;
            memcpy(trial.held, AS_L(5) + row * m, (size_t)m * sizeof(int64_t));
            memcpy(trial.served, AS_D(7) + row * m, (size_t)m * sizeof(double));
            for (int64_t lane = n * lanes; lane < (n + 1) * lanes; lane++)
                if (AS_D(4)[lane] > -INFINITY)
                    make_copy(&layer, &trial, AS_D(12) + row * ranks, AS_L(13) + row * m, AS_D(14) + row * m,
                              AS_L(1)[lane], AS_L(2)[lane], AS_D(3)[lane]);
            int64_t groups = number_groups(&layer, &trial);
            double *after = AS_D(18) + n * m;
            flow_few(flow, m, layer.rank, trial.group, ranks, groups, layer.alone, trial.served,
                     rounds[AS_L(17)[row] > 0], after);
            add_loads(&layer, after, trial.loads);
            AS_D(19)[n] = excess(&layer, trial.loads);
        }
    bool enough = scratch && flow;
    free(scratch), free(flow);
    return enough;
}

static bool tried_fits(const Argument *arguments) {
    int64_t t = COUNT(0), a = COUNT(10), all = COUNT(5), m = a ? all / a : 0, ranks = COUNT(9);
    return expect(t > 0 && m > 0 && COUNT(1) % t == 0 && COUNT(2) == COUNT(1) && COUNT(3) == COUNT(1) &&
                      COUNT(4) == COUNT(1) && all == a * m && COUNT(6) == all && COUNT(7) == all && COUNT(8) % a == 0 &&
                      COUNT(11) == a * ranks && COUNT(12) == a * ranks && COUNT(13) == all && COUNT(14) == all &&
                      COUNT(17) == a && COUNT(18) == t * m && COUNT(19) == t,
                  "overflow_tried: arrays differ in length") &&
           all_below(AS_L(0), t, a, "overflow_tried: no such layer") &&
           all_below(AS_L(1), COUNT(1), m, "overflow_tried: no such element") &&
           all_below(AS_L(2), COUNT(2), COUNT(8) / a, "overflow_tried: no such expert") &&
           all_below(AS_L(5), all, COUNT(8) / a, "overflow_tried: no such expert") &&
           all_below(AS_L(6), all, ranks, "overflow_tried: no such rank") &&
           all_below(AS_L(13), all, m, "overflow_tried: no such element");
}

/* overflow_tried(row [t], element, expert, moved, promise [t, lanes], held, rank, served [a, m], load [a, experts],
   dead [ranks], cap [a], alone, loads [a, ranks], other, parallel [a, m], rounds, rounds after failures, fails [a];
   out: served [t, m], excess [t]) */
KERNEL(overflow_tried) { RUN("lllddlldd"
                             "bdddldnnlDD",
                             tried_fits(arguments), ok = try_all(arguments), true); }

/* Make an element of the slot of each expert that had a single holder until now, in the first unused column. */
static bool admit(Argument *arguments) {
    int64_t ranks = COUNT(2), a = COUNT(10) / ranks, m = COUNT(6) / a, slots = COUNT(3) / a, experts = COUNT(4) / a;
    int64_t per = slots / (ranks - 1);
    for (int64_t n = 0; n < COUNT(0); n++) {
        int64_t row = AS_L(0)[n], expert = AS_L(1)[n], column = 0, at = 0, *slot = AS_L(6) + row * m;
        if (expert == EMPTY || AS_L(5)[row * experts + expert] != 1) continue;
        bool known = false;
        for (int64_t to = 0; to < m; to++) {
            known |= AS_L(8)[row * m + to] == expert;
            column += slot[to] != NOWHERE;
        }
        if (known) continue;
        if (column >= m) return false;
        while (at < slots && !(AS_H(3)[row * slots + at] == expert && !AS_B(2)[at / per])) at++;
        if (at == slots) at = 0;
        double load = AS_D(4)[row * experts + expert];
        slot[column] = at;
        AS_L(7)[row * m + column] = at / per;
        AS_L(8)[row * m + column] = expert;
        AS_D(9)[row * m + column] = load;
        AS_D(10)[row * ranks + at / per] -= load;
    }
    return true;
}

static bool admit_fits(const Argument *arguments) {
    int64_t ranks = COUNT(2), a = ranks ? COUNT(10) / ranks : 0, all = COUNT(6);
    return expect(ranks > 1 && a > 0 && COUNT(10) == a * ranks && COUNT(1) == COUNT(0) && all % a == 0 &&
                      COUNT(3) > 0 && COUNT(3) % (a * (ranks - 1)) == 0 && COUNT(4) % a == 0 && COUNT(5) == COUNT(4) &&
                      COUNT(7) == all && COUNT(8) == all && COUNT(9) == all,
                  "overflow_admit: arrays differ in length") &&
           all_below(AS_L(0), COUNT(0), a, "overflow_admit: no such layer") &&
           all_between(EMPTY, AS_L(1), COUNT(1), COUNT(4) / a, "overflow_admit: no such expert");
}

/* overflow_admit(row, expert [t], dead [ranks], table [a, slots], load, replicas [a, experts]; changed: slot, rank,
   expert, served [a, m], alone [a, ranks]) */
KERNEL(overflow_admit) {
    bool good = true;
    RUN("llbhdlLLLDD", admit_fits(arguments), good = admit(arguments),
        expect(good, "overflow_admit: no column is reserved for a further element"));
}
