/* Cost of a request on each target, term by term: router.scheduling.cost.score, with the same bits. The formulas are
   those of fleet.timing, in the same order of operations. A term is a function and its row in `cost_terms`. */
#include "arrays.h"

#include <stdlib.h>

enum { PREFILL, DECODE, KINDS };                            /* router.scheduling.speed_correction */
enum { QUEUED, SEQUENCES, BLOCKS, STEPS_LEFT, AMOUNTS };    /* router.fleet_state.reservations */

enum { ALWAYS = -1, PAIRS, FAR, READS, GATHERS, APART, OPTIONS }; /* options of router.fleet_state.target_table */
enum { RANKS, NODES, LOCAL, ADDED, EXPERT_LOADS };                 /* router.fleet_state.engine_state.PriceList.of */
enum { SPEEDS = 11 };                                              /* columns of its `speeds` */

/* router.scheduling.cost.RequestWork, with the columns of the target table that it needs. Arrays are [targets]; those
   that may be missing are NULL. */
typedef struct {
    Py_ssize_t targets;
    double prompt, output, gain;
    const int64_t *load[AMOUNTS], *uncached;
    const double *token_s, *pair_s, *step_s, *sequence_s, *block_s, *token_block_s;
    const double *dispatch_s, *node_s, *read_s, *gather_s;
    const int64_t *first; /* [engines] first target of each; NULL: no ranks step together */
    Py_ssize_t engines;
    const double *in_lockstep, *factors[KINDS];
    const double *remote_ranks, *remote_nodes, *added_experts; /* NULL: nothing is known about the experts */
    const double *switch_delay, *transfer;
    double *outstanding[KINDS], *added[KINDS], *longest[KINDS], *steps; /* computed first */
} Work;

#define EACH(at) for (Py_ssize_t at = 0; at < work->targets; at++)
#define TERM(name) static bool name(const Work *work, double *seconds)

static double least(double one, double other) { return one < other ? one : other; }
static double most(double one, double other) { return one > other ? one : other; }

TERM(prefill) {
    EACH(at) seconds[at] = work->added[PREFILL][at];
    if (work->transfer) EACH(at) seconds[at] += work->transfer[at];
    return true;
}

TERM(queue) {
    EACH(at) seconds[at] = work->outstanding[PREFILL][at];
    return true;
}

TERM(decode) {
    EACH(at) seconds[at] = work->outstanding[DECODE][at] + work->added[DECODE][at] + work->steps[at];
    return true;
}

TERM(experts) {
    if (!work->remote_ranks) return false;
    EACH(at) {
        double each = work->dispatch_s[at] * work->remote_ranks[at];
        if (work->node_s) each = each + work->node_s[at] * work->remote_nodes[at];
        seconds[at] = ((double)work->uncached[at] + work->output) * work->gain * each;
    }
    return true;
}

TERM(distinct) {
    if (!work->remote_ranks || !work->read_s) return false;
    double tokens = work->gain * work->output;
    EACH(at) seconds[at] = tokens * (work->read_s[at] * work->added_experts[at]);
    return true;
}

TERM(sharded) {
    if (!work->gather_s) return false;
    EACH(at) seconds[at] = ((double)work->uncached[at] + work->output) * work->gather_s[at];
    return true;
}

TERM(lockstep) {
    if (!work->first) return false;
    EACH(at) {
        double prompt = work->outstanding[PREFILL][at] + work->added[PREFILL][at] - work->longest[PREFILL][at];
        double steps = work->outstanding[DECODE][at] + work->added[DECODE][at] - work->longest[DECODE][at];
        double waits = work->longest[DECODE][at] > 0.0 ? 1.0 : 0.0;
        seconds[at] = most(prompt, 0.0) * waits - least(steps, 0.0);
    }
    if (work->in_lockstep) EACH(at) seconds[at] *= work->in_lockstep[at];
    return true;
}

TERM(handover) {
    if (work->switch_delay) EACH(at) seconds[at] = work->switch_delay[at];
    return work->switch_delay;
}

static const struct {
    const char *name;
    bool (*seconds)(const Work *work, double *seconds); /* false: the term is 0 */
} cost_terms[] = {
    {"prefill", prefill},   {"queue", queue},     {"decode", decode},     {"experts", experts},
    {"distinct", distinct}, {"sharded", sharded}, {"lockstep", lockstep}, {"handover", handover},
};
#define TERMS ((Py_ssize_t)(sizeof cost_terms / sizeof *cost_terms))

PyObject *term_names(void) {
    PyObject *names = PyTuple_New(TERMS);
    for (Py_ssize_t at = 0; names && at < TERMS; at++) {
        PyObject *name = PyUnicode_FromString(cost_terms[at].name);
        if (!name || PyTuple_SetItem(names, at, name)) Py_CLEAR(names);
    }
    return names;
}

/* What the ranks have to do without the request, what it adds, and the fixed part of its steps. */
static void measure(Work *work) {
    EACH(at) {
        double running = (double)work->load[SEQUENCES][at], blocks = (double)work->load[BLOCKS][at];
        double steps = least(work->output * running, (double)work->load[STEPS_LEFT][at]);
        work->outstanding[PREFILL][at] = work->token_s[at] * (double)work->load[QUEUED][at];
        work->outstanding[DECODE][at] =
            steps * (work->sequence_s[at] + work->block_s[at] * (blocks / most(running, 1.0)));
        double uncached = (double)work->uncached[at], each = work->token_s[at];
        if (work->pair_s) each = each + work->pair_s[at] * (work->prompt - 0.5 * uncached);
        work->added[PREFILL][at] = uncached * each;
        work->added[DECODE][at] =
            work->output * (work->sequence_s[at] + work->token_block_s[at] * (work->prompt + work->output));
        work->steps[at] = work->output * work->step_s[at];
    }
    if (!work->factors[PREFILL]) return;
    EACH(at) {
        for (int kind = PREFILL; kind < KINDS; kind++) {
            work->outstanding[kind][at] *= work->factors[kind][at];
            work->added[kind][at] *= work->factors[kind][at];
        }
        work->steps[at] *= work->factors[DECODE][at];
    }
}

/* The most outstanding work of each engine's ranks. */
static void find_longest(Work *work) {
    for (int kind = PREFILL; kind < KINDS; kind++)
        for (Py_ssize_t engine = 0; engine < work->engines; engine++) {
            Py_ssize_t stop = engine + 1 < work->engines ? work->first[engine + 1] : work->targets;
            double longest = work->outstanding[kind][work->first[engine]];
            for (Py_ssize_t at = work->first[engine]; at < stop; at++)
                longest = most(longest, work->outstanding[kind][at]);
            for (Py_ssize_t at = work->first[engine]; at < stop; at++) work->longest[kind][at] = longest;
        }
}

/* Price all targets into `out` [TERMS + 2, targets]: weighted terms, their sum, outstanding seconds. */
static void price_all(Work *work, const double *weights, double *out) {
    double *total = out + TERMS * work->targets, *outstanding = total + work->targets;
    measure(work);
    if (work->first) find_longest(work);
    for (Py_ssize_t term = 0; term < TERMS; term++) {
        double *row = out + term * work->targets;
        if (!cost_terms[term].seconds(work, row)) EACH(at) row[at] = 0.0;
        EACH(at) row[at] *= weights[term];
        EACH(at) total[at] = term ? total[at] + row[at] : row[at];
    }
    EACH(at) outstanding[at] = work->outstanding[PREFILL][at] + work->outstanding[DECODE][at];
}

static bool in_order(const Work *work) {
    for (Py_ssize_t engine = 0; work->first && engine < work->engines; engine++)
        if (work->first[engine] < (engine ? work->first[engine - 1] + 1 : 0) || work->first[engine] >= work->targets ||
            work->first[0])
            return expect(false, "the first targets of engines do not ascend from 0");
    return true;
}

/* Take the columns of `speeds` [SPEEDS, targets]; some count only if their option says so. */
static void read_speeds(Work *work, const double *speeds, PyObject *const *options) {
    const struct {
        const double **column;
        int option; /* ALWAYS, or the index of one */
    } rows[SPEEDS] = {
        {&work->token_s, ALWAYS},       {&work->pair_s, PAIRS}, {&work->step_s, ALWAYS}, {&work->sequence_s, ALWAYS},
        {&work->block_s, ALWAYS},       {&work->token_block_s, ALWAYS},                  {&work->dispatch_s, ALWAYS},
        {&work->node_s, FAR},           {&work->read_s, READS}, {&work->gather_s, GATHERS},
        {&work->in_lockstep, APART},
    };
    for (int row = 0; row < SPEEDS; row++)
        *rows[row].column =
            rows[row].option == ALWAYS || PyObject_IsTrue(options[rows[row].option]) == 1 ? speeds + row * work->targets : NULL;
}

static bool read_work(Work *work, Arrays *arrays, PyObject *const *given) {
    bool ok = true;
    Py_ssize_t each = work->targets;
    const double *speeds = read_array(arrays, given[OPTIONS], 'd', SPEEDS * each, false, &ok);
    given += OPTIONS + 1;
    work->load[0] = read_array(arrays, given[0], 'l', AMOUNTS * each, false, &ok);
    work->uncached = read_array(arrays, given[1], 'l', each, false, &ok);
    work->first = read_array(arrays, given[2], 'l', work->engines, false, &ok);
    work->factors[0] = read_array(arrays, given[3], 'd', KINDS * each, false, &ok);
    work->remote_ranks = read_array(arrays, given[4], 'd', EXPERT_LOADS * each, false, &ok);
    work->switch_delay = read_array(arrays, given[5], 'd', each, false, &ok);
    work->transfer = read_array(arrays, given[6], 'd', each, false, &ok);
    if (!ok || !in_order(work)) return false;
    if (!expect(work->load[0] && work->uncached && speeds, "a column that every price needs is None")) return false;
    if (work->remote_ranks) {
        work->remote_nodes = work->remote_ranks + NODES * each;
        work->added_experts = work->remote_ranks + ADDED * each;
    }
    read_speeds(work, speeds, given - OPTIONS - 1);
    for (int row = 1; row < AMOUNTS; row++) work->load[row] = work->load[0] + row * each;
    if (work->factors[0]) work->factors[1] = work->factors[0] + each;
    return true;
}

#define ARGUMENTS 20

/* price(targets, engines, prompt, output, gain, OPTIONS, speeds, load, uncached, first, factors, expert load, switch delay,
   transfer, weights, out) */
PyObject *price(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != ARGUMENTS) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected %d", count, ARGUMENTS);
    Work work = {.targets = PyLong_AsSsize_t(given[0]), .engines = PyLong_AsSsize_t(given[1])};
    work.prompt = PyFloat_AsDouble(given[2]), work.output = PyFloat_AsDouble(given[3]);
    work.gain = PyFloat_AsDouble(given[4]);
    if (PyErr_Occurred()) return NULL;
    Arrays arrays = {.held = 0};
    bool ok = expect(work.targets >= 0 && work.engines >= 0, "fewer than no targets") && read_work(&work, &arrays, given + 5);
    const double *weights = read_array(&arrays, given[ARGUMENTS - 2], 'd', TERMS, false, &ok);
    double *out = read_array(&arrays, given[ARGUMENTS - 1], 'd', (TERMS + 2) * work.targets, true, &ok);
    ok = ok && expect(weights && out, "weights and out are not None");
    double *space = ok ? malloc(sizeof *space * (size_t)(7 * work.targets + 1)) : NULL;
    if (ok && !space) PyErr_NoMemory();
    if (space) {
        for (int kind = PREFILL; kind < KINDS; kind++) {
            work.outstanding[kind] = space + 3 * kind * work.targets;
            work.added[kind] = work.outstanding[kind] + work.targets;
            work.longest[kind] = work.added[kind] + work.targets;
        }
        work.steps = space + 6 * work.targets;
        price_all(&work, weights, out);
    }
    free(space);
    release(&arrays);
    if (!PyErr_Occurred()) Py_RETURN_NONE;
    return NULL;
}
