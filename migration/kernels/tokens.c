/* Sampled tokens on ranks (migration.model.sampled_traffic), and exchanges of experts for them
   (migration.solvers.token_swaps). Tokens of a layer are [tokens, k] experts, and a home for each token. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

/* Tokens in one layer. */
typedef struct {
    int64_t count, k;
    const int64_t *experts, *homes; /* [count, k], [count] */
} Tokens;

/* Holders of a layer's experts. */
typedef struct {
    int64_t ranks, experts;
    uint8_t *held;                   /* [ranks, experts] */
    int64_t *copies, *ranks_of;      /* [experts], [ranks, experts]: of a column the first `copies` count */
    int64_t *seen;                   /* [ranks]: the last token that reaches a rank */
} Holders;

static bool tokens_fit(const Argument *wanted, const Argument *home, int64_t layers, int64_t experts, int64_t ranks) {
    int64_t all = home->count * layers;
    return expect(layers > 0 && ranks > 0 && experts > 0 && (all ? wanted->count % all == 0 : !wanted->count),
                  "tokens: arrays differ in length") &&
           all_below(wanted->data, wanted->count, experts, "tokens: no such expert") &&
           all_below(home->data, home->count, ranks, "tokens: no such rank");
}

static Tokens tokens_of(const Argument *wanted, const Argument *home, int64_t layers, int64_t layer) {
    int64_t each = wanted->count / layers;
    return (Tokens){home->count, home->count ? each / home->count : 0, (const int64_t *)wanted->data + layer * each,
                    home->data};
}

/* Memory for the holders of a layer, to be freed by `free(copies)`. */
static bool holders_space(Holders *into, int64_t ranks, int64_t experts) {
    *into = (Holders){.ranks = ranks, .experts = experts};
    into->copies = malloc(sizeof(int64_t) * (size_t)(experts + ranks + ranks * experts));
    if (!into->copies) return false;
    into->seen = into->copies + experts, into->ranks_of = into->seen + ranks;
    return true;
}

/* An expert that nobody holds counts as one of rank 0. */
static void list_holders(const Holders *in) {
    int64_t experts = in->experts;
    memset(in->copies, 0, sizeof *in->copies * (size_t)experts);
    memset(in->ranks_of, 0, sizeof *in->ranks_of * (size_t)experts);
    for (int64_t rank = 0; rank < in->ranks; rank++) {
        const uint8_t *first = in->held + rank * experts, *next = first;
        for (; (next = memchr(next, 1, (size_t)(first + experts - next))); next++)
            in->ranks_of[in->copies[next - first]++ * experts + (next - first)] = rank;
    }
}

/* Write the rank that serves each pair, and return the number of ranks besides their homes that serve tokens. */
static int64_t serve(const Holders *of, const Tokens *in, int64_t *served) {
    int64_t experts = of->experts, sent = 0;
    for (int64_t rank = 0; rank < of->ranks; rank++) of->seen[rank] = -1;
    for (int64_t token = 0; token < in->count; token++) {
        int64_t home = in->homes[token];
        of->seen[home] = token;
        for (int64_t at = token * in->k; at < (token + 1) * in->k; at++) {
            int64_t expert = in->experts[at], copies = of->copies[expert], turn = copies > 1 ? token % copies : 0;
            int64_t rank = of->held[home * experts + expert] ? home : of->ranks_of[turn * experts + expert];
            served[at] = rank;
            sent += of->seen[rank] != token;
            of->seen[rank] = token;
        }
    }
    return sent;
}

/* The probabilities that a token reaches each rank, from the pairs that the ranks serve of `all` pairs. */
WIDE static void reach(const int64_t *restrict served, double all, int64_t k, int64_t ranks, double *restrict reached) {
    for (int64_t rank = 0; rank < ranks; rank++) {
        double square = 1.0 - (double)served[rank] / all, power = k % 2 ? square : 1.0;
        for (int64_t left = k / 2; left; left /= 2) {
            square *= square;
            if (left % 2) power *= square;
        }
        reached[rank] = 1.0 - power;
    }
}

/* tokens_destinations(held [layers, ranks, experts], experts [layers, S, k], homes [S], layers, ranks; written: mean
   number of other ranks that a token is sent to, and what it would be if its experts were independent, [layers] each) */
static bool reach_all(const Argument *arguments) {
    int64_t layers = COUNT(3), ranks = COUNT(4), cells = COUNT(0) / layers, tokens = COUNT(2);
    int64_t k = tokens ? COUNT(1) / layers / tokens : 0;
    int64_t *served = malloc(sizeof *served * (size_t)(tokens * k + ranks * ranks));
    double *pairs = malloc(sizeof *pairs * (size_t)(3 * ranks));
    Holders holders;
    bool enough = holders_space(&holders, ranks, cells / ranks) && served && pairs;
    for (int64_t layer = 0; enough && layer < layers; layer++) {
        int64_t *counts = served + tokens * k;
        double *reached = pairs + ranks, *sums = reached + ranks, all = 0.0;
        Tokens in = tokens_of(&arguments[1], &arguments[2], layers, layer);
        holders.held = AS_B(0) + layer * cells;
        list_holders(&holders);
        AS_D(5)[layer] = (double)serve(&holders, &in, served) / (double)(tokens ? tokens : 1);
        memset(counts, 0, sizeof *counts * (size_t)(ranks * ranks));
        for (int64_t rank = 0; rank < ranks; rank++) pairs[rank] = 0.0;
        for (int64_t token = 0; token < tokens; token++) {
            pairs[in.homes[token]] += (double)k;
            for (int64_t at = token * k; at < (token + 1) * k; at++) counts[in.homes[token] * ranks + served[at]]++;
        }
        for (int64_t rank = 0; rank < ranks; rank++) {
            if (pairs[rank] < 1.0) pairs[rank] = 1.0;
            all += pairs[rank];
            reach(counts + rank * ranks, pairs[rank], k, ranks, reached);
            reached[rank] = 0.0;
            sums[rank] = pairs[rank] * add_row(reached, ranks);
        }
        AS_D(6)[layer] = add_row(sums, ranks) / all;
    }
    free(served), free(pairs), free(holders.copies);
    return enough;
}

KERNEL(tokens_destinations) {
    RUN("bllnnDD",
        expect(COUNT(3) > 0 && COUNT(4) > 0 && COUNT(0) % (COUNT(3) * COUNT(4)) == 0 && COUNT(5) == COUNT(3) &&
                   COUNT(6) == COUNT(3),
               "tokens_destinations: arrays differ in length") &&
            tokens_fit(&arguments[1], &arguments[2], COUNT(3), COUNT(0) / (COUNT(3) * COUNT(4)), COUNT(4)),
        ok = reach_all(arguments), true);
}

WIDE static void count_free(const int64_t *pairs, int64_t ranks, int64_t *price) {
    for (int64_t rank = 0; rank < ranks; rank++) price[rank] += pairs[rank] == 0;
}

/* The number of tokens that are sent to a rank for one expert alone, if it is there: prices [experts, ranks]. pairs:
   scratch [ranks], zeros before and after. */
static void price_pairs(const Tokens *in, const int64_t *served, int64_t experts, int64_t ranks, int64_t *pairs,
                        int64_t *prices) {
    memset(prices, 0, sizeof *prices * (size_t)(experts * ranks));
    for (int64_t token = 0; token < in->count; token++) {
        const int64_t *wanted = in->experts + token * in->k, *by = served + token * in->k;
        for (int64_t at = 0; at < in->k; at++) pairs[by[at]]++;
        pairs[in->homes[token]] += in->k + 1; /* a token is never sent to its home */
        for (int64_t at = 0; at < in->k; at++) {
            pairs[by[at]]--;
            count_free(pairs, ranks, prices + wanted[at] * ranks);
            pairs[by[at]]++;
        }
        for (int64_t at = 0; at < in->k; at++) pairs[by[at]] = 0;
        pairs[in->homes[token]] = 0;
    }
}

/* Put a pair in its place among the `most` best ones: behind those of equal gain. Return their number. */
static int64_t insert(int64_t gain, int64_t one, int64_t other, int64_t *gains, int64_t *best, int64_t found, int64_t most) {
    int64_t at = found < most ? found : most - 1;
    for (; at > 0 && gains[at - 1] < gain; at--) {
        gains[at] = gains[at - 1];
        memcpy(best + 2 * at, best + 2 * at - 2, 2 * sizeof *best);
    }
    gains[at] = gain, best[2 * at] = one, best[2 * at + 1] = other;
    return found < most ? found + 1 : most;
}

/* The search in one layer. */
typedef struct {
    const int64_t *node;               /* [ranks] */
    const double *load;                /* [experts] */
    double balance, least;             /* mean load / the load that a rank may have; destinations a token to save */
    int64_t rounds, tried, most, together;
    double *part, *loads, *row;        /* [experts] load of one replica; [ranks]; scratch [experts] */
    int64_t *prices, *pairs;           /* [experts, ranks]; scratch [ranks] */
    int64_t *best, *gains, *several;   /* [most, 2]: the best exchanges; [most]; [together, 2] */
    int64_t *now, *after;              /* [tokens, k]: ranks that serve pairs, before an exchange and after it */
} Search;

static void add_loads(const Search *it, const Holders *in) {
    for (int64_t at = 0; at < in->experts; at++)
        it->part[at] = it->load[at] / (double)(in->copies[at] > 1 ? in->copies[at] : 1);
    for (int64_t rank = 0; rank < in->ranks; rank++) {
        for (int64_t at = 0; at < in->experts; at++)
            it->row[at] = in->held[rank * in->experts + at] ? it->part[at] : 0.0;
        it->loads[rank] = add_row(it->row, in->experts);
    }
}

/* The exchanges of experts without replicas that save most by their prices, best first. */
static int64_t find_pairs(const Search *it, const Holders *in, const int64_t *owner, double least) {
    int64_t ranks = in->ranks, found = 0;
    double allowed = add_row(it->loads, ranks) / (double)ranks / it->balance;
    for (int64_t one = 0; one < in->experts; one++) {
        int64_t here = owner[one];
        if (here < 0) continue;
        const int64_t *mine = it->prices + one * ranks;
        for (int64_t other = one + 1; other < in->experts; other++) {
            int64_t there = owner[other];
            if (there < 0 || there == here || it->node[there] != it->node[here]) continue;
            int64_t gain = mine[here] + it->prices[other * ranks + there] - mine[there] - it->prices[other * ranks + here];
            if (!((double)gain > least) || (found == it->most && gain <= it->gains[it->most - 1])) continue;
            double grown = it->part[other] - it->part[one], full = allowed;
            if (it->loads[here] > full) full = it->loads[here];
            if (it->loads[there] > full) full = it->loads[there];
            if (it->loads[here] + grown <= full && it->loads[there] - grown <= full)
                found = insert(gain, one, other, it->gains, it->best, found, it->most);
        }
    }
    return found;
}

/* The best exchanges between different ranks, so that they keep to the load together. */
static int64_t part_pairs(const Search *it, const int64_t *owner, int64_t number) {
    int64_t found = 0;
    for (int64_t nth = 0; nth < number && found < it->together; nth++) {
        const int64_t *pair = it->best + 2 * nth;
        bool used = false;
        for (int64_t of = 0; of < 2 * found; of++)
            used |= owner[it->several[of]] == owner[pair[0]] || owner[it->several[of]] == owner[pair[1]];
        if (!used) memcpy(it->several + 2 * found++, pair, 2 * sizeof *pair);
    }
    return found;
}

static void exchange(const Holders *in, int64_t *owner, const int64_t *pairs, int64_t number) {
    for (int64_t nth = 0; nth < number; nth++) {
        int64_t one = pairs[2 * nth], other = pairs[2 * nth + 1], here = owner[one], there = owner[other];
        in->held[here * in->experts + one] = in->held[there * in->experts + other] = 0;
        in->held[there * in->experts + one] = in->held[here * in->experts + other] = 1;
        owner[one] = in->ranks_of[one] = there, owner[other] = in->ranks_of[other] = here;
    }
}

/* Make exchanges if all tokens together confirm them. */
static bool confirmed(Search *it, const Holders *in, const Tokens *tokens, int64_t *owner, const int64_t *pairs,
                      int64_t number, double *reached) {
    exchange(in, owner, pairs, number);
    double after = (double)serve(in, tokens, it->after) / (double)(tokens->count ? tokens->count : 1);
    if (!(after <= *reached - it->least)) {
        exchange(in, owner, pairs, number);
        return false;
    }
    int64_t *before = it->now;
    it->now = it->after, it->after = before, *reached = after;
    return true;
}

static void search(Search *it, const Holders *in, const Tokens *tokens, int64_t *owner) {
    double reached = (double)serve(in, tokens, it->now) / (double)(tokens->count ? tokens->count : 1);
    for (int64_t round = 0; round < it->rounds; round++) {
        price_pairs(tokens, it->now, in->experts, in->ranks, it->pairs, it->prices);
        add_loads(it, in);
        int64_t found = find_pairs(it, in, owner, it->least * (double)tokens->count);
        int64_t several = part_pairs(it, owner, found);
        bool made = several > 1 && confirmed(it, in, tokens, owner, it->several, several, &reached);
        for (int64_t nth = 0; !made && nth < found && nth < it->tried; nth++)
            made = confirmed(it, in, tokens, owner, it->best + 2 * nth, 1, &reached);
        if (!made) return;
    }
}

/* Arguments of `tokens_exchanged`, by name. */
enum { HELD, EXPERTS, HOMES, JUDGED, JUDGED_HOMES, LOAD, NODE, BALANCE, LEAST, ROUNDS, TRIED, MOST, TOGETHER, OWNER, BETTER };

static void search_layers(const Argument *arguments, Search *it, Holders *in) {
    int64_t layers = COUNT(BETTER), experts = in->experts;
    for (int64_t layer = 0; layer < layers; layer++) {
        int64_t *owner = AS_L(OWNER) + layer * experts;
        Tokens tokens = tokens_of(&arguments[EXPERTS], &arguments[HOMES], layers, layer);
        Tokens judged = tokens_of(&arguments[JUDGED], &arguments[JUDGED_HOMES], layers, layer);
        in->held = AS_B(HELD) + layer * in->ranks * experts;
        it->load = AS_D(LOAD) + layer * experts;
        list_holders(in);
        for (int64_t at = 0; at < experts; at++) owner[at] = in->copies[at] == 1 ? in->ranks_of[at] : -1;
        int64_t before = serve(in, &judged, it->after);
        search(it, in, &tokens, owner);
        AS_B(BETTER)[layer] = serve(in, &judged, it->after) < before;
    }
}

/* tokens_exchanged(held [layers, ranks, experts], which changes; experts [layers, S, k], homes [S]; the same of tokens that
   judge; load [layers, experts], node [ranks], mean load / the load that a rank may have, destinations a token that an exchange
   must save, rounds, pairs tried one by one, pairs from which several are chosen, and how many of those at once;
   written: the rank of each expert without replicas, -1 for others [layers, experts]; if the judges confirm it [layers]) */
static bool search_all(const Argument *arguments) {
    int64_t layers = COUNT(BETTER), ranks = COUNT(NODE), experts = COUNT(HELD) / (layers * ranks), most = COUNT(MOST);
    int64_t each = (COUNT(EXPERTS) > COUNT(JUDGED) ? COUNT(EXPERTS) : COUNT(JUDGED)) / layers;
    Search it = {.node = AS_L(NODE), .least = arguments[LEAST].value, .rounds = COUNT(ROUNDS), .tried = COUNT(TRIED)};
    it.balance = arguments[BALANCE].value, it.most = most, it.together = COUNT(TOGETHER) < most ? COUNT(TOGETHER) : most;
    it.part = malloc(sizeof(double) * (size_t)(2 * experts + ranks));
    it.pairs = calloc((size_t)(ranks + experts * ranks + 5 * most + 2 * each), sizeof(int64_t));
    Holders holders;
    bool enough = holders_space(&holders, ranks, experts) && it.part && it.pairs;
    if (enough) {
        it.row = it.part + experts, it.loads = it.row + experts;
        it.prices = it.pairs + ranks, it.best = it.prices + experts * ranks, it.several = it.best + 2 * most;
        it.gains = it.several + 2 * most, it.now = it.gains + most, it.after = it.now + each;
        search_layers(arguments, &it, &holders);
    }
    free(it.part), free(it.pairs), free(holders.copies);
    return enough;
}

KERNEL(tokens_exchanged) {
    RUN("Bllll" "dlxx" "nnnn" "LB",
        expect(COUNT(BETTER) > 0 && COUNT(NODE) > 0 && COUNT(LOAD) % COUNT(BETTER) == 0 &&
                   COUNT(HELD) == COUNT(NODE) * COUNT(LOAD) && COUNT(OWNER) == COUNT(LOAD) &&
                   COUNT(MOST) > 0 && COUNT(TOGETHER) >= 0,
               "tokens_exchanged: arrays differ in length") &&
            tokens_fit(&arguments[EXPERTS], &arguments[HOMES], COUNT(BETTER), COUNT(LOAD) / COUNT(BETTER), COUNT(NODE)) &&
            tokens_fit(&arguments[JUDGED], &arguments[JUDGED_HOMES], COUNT(BETTER), COUNT(LOAD) / COUNT(BETTER), COUNT(NODE)),
        ok = search_all(arguments), true);
}
