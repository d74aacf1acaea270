/* Sampled tokens on ranks (migration.model.sampled_traffic), and exchanges of experts for them
   (migration.solvers.token_swaps). Tokens of a layer are [tokens, k] experts, and a home for each token. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

static bool tokens_fit(const Argument *wanted, const Argument *home, int64_t experts, int64_t ranks) {
    return expect(ranks > 0 && experts > 0 && (home->count ? wanted->count % home->count == 0 : !wanted->count),
                  "tokens: arrays differ in length") &&
           all_below(wanted->data, wanted->count, experts, "tokens: no such expert") &&
           all_below(home->data, home->count, ranks, "tokens: no such rank");
}

/* List the ranks that hold each expert: holders [ranks, experts], of which the first `copies` [experts] of a column
   count. One that nobody holds counts as one of rank 0. */
static void list_holders(const uint8_t *held, int64_t experts, int64_t ranks, int64_t *holders, int64_t *copies) {
    memset(copies, 0, sizeof *copies * (size_t)experts);
    memset(holders, 0, sizeof *holders * (size_t)experts);
    for (int64_t rank = 0; rank < ranks; rank++, held += experts)
        for (const uint8_t *next = held; (next = memchr(next, 1, (size_t)(held + experts - next))); next++) {
            int64_t expert = next - held;
            holders[copies[expert]++ * experts + expert] = rank;
        }
}

/* tokens_sent(held [ranks, experts], experts, homes, ranks; written: the rank that serves each pair, and the number of
   ranks besides their homes that serve tokens) */
static bool serve(const Argument *arguments) {
    int64_t ranks = COUNT(3), experts = COUNT(0) / ranks, tokens = COUNT(2), k = tokens ? COUNT(1) / tokens : 0, sent = 0;
    int64_t *holders = malloc(sizeof *holders * (size_t)(experts * ranks + experts + ranks));
    if (!holders) return false;
    int64_t *copies = holders + experts * ranks, *seen = copies + experts;
    list_holders(AS_B(0), experts, ranks, holders, copies);
    for (int64_t rank = 0; rank < ranks; rank++) seen[rank] = -1;
    for (int64_t token = 0; token < tokens; token++) {
        int64_t home = AS_L(2)[token];
        seen[home] = token;
        for (int64_t at = token * k; at < (token + 1) * k; at++) {
            int64_t expert = AS_L(1)[at], turn = copies[expert] > 1 ? token % copies[expert] : 0;
            int64_t rank = AS_B(0)[home * experts + expert] ? home : holders[turn * experts + expert];
            AS_L(4)[at] = rank;
            sent += seen[rank] != token;
            seen[rank] = token;
        }
    }
    *AS_L(5) = sent;
    free(holders);
    return true;
}

KERNEL(tokens_sent) {
    RUN("bllnLL",
        expect(COUNT(3) > 0 && COUNT(0) % COUNT(3) == 0 && COUNT(4) == COUNT(1) && COUNT(5) == 1,
               "tokens_sent: arrays differ in length") &&
            tokens_fit(&arguments[1], &arguments[2], COUNT(0) / COUNT(3), COUNT(3)),
        ok = serve(arguments), true);
}

WIDE static void count_free(const int64_t *pairs, int64_t ranks, int64_t *price) {
    for (int64_t rank = 0; rank < ranks; rank++) price[rank] += pairs[rank] == 0;
}

/* tokens_priced(experts, the ranks that serve them, homes, ranks; written: prices [experts, ranks]) */
static bool price_pairs(const Argument *arguments) {
    int64_t ranks = COUNT(3), tokens = COUNT(2), k = tokens ? COUNT(0) / tokens : 0;
    int64_t *pairs = calloc((size_t)ranks, sizeof *pairs);
    if (!pairs) return false;
    memset(AS_L(4), 0, sizeof(int64_t) * (size_t)COUNT(4));
    for (int64_t token = 0; token < tokens; token++) {
        const int64_t *wanted = AS_L(0) + token * k, *served = AS_L(1) + token * k;
        for (int64_t at = 0; at < k; at++) pairs[served[at]]++;
        pairs[AS_L(2)[token]] += k + 1; /* a token is never sent to its home */
        for (int64_t at = 0; at < k; at++) {
            pairs[served[at]]--;
            count_free(pairs, ranks, AS_L(4) + wanted[at] * ranks);
            pairs[served[at]]++;
        }
        for (int64_t at = 0; at < k; at++) pairs[served[at]] = 0;
        pairs[AS_L(2)[token]] = 0;
    }
    free(pairs);
    return true;
}

KERNEL(tokens_priced) {
    RUN("lllnL",
        expect(COUNT(3) > 0 && COUNT(4) % COUNT(3) == 0 && COUNT(1) == COUNT(0),
               "tokens_priced: arrays differ in length") &&
            tokens_fit(&arguments[0], &arguments[2], COUNT(4) / COUNT(3), COUNT(3)) &&
            all_below(AS_L(1), COUNT(1), COUNT(3), "tokens_priced: no such rank"),
        ok = price_pairs(arguments), true);
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

/* tokens_pairs(experts without replicas, the rank of each expert, prices, load of one copy of each expert, load and node
   of each rank, the load that a rank may have, least gain; written: the best pairs [most, 2], and their number) */
static bool find_pairs(const Argument *arguments) {
    int64_t ranks = COUNT(4), most = COUNT(8) / 2, found = 0;
    const int64_t *owner = AS_L(1), *prices = AS_L(2);
    int64_t *gains = malloc(sizeof *gains * (size_t)most);
    for (int64_t first = 0; gains && first < COUNT(0); first++) {
        int64_t one = AS_L(0)[first], here = owner[one];
        for (int64_t second = first + 1; second < COUNT(0); second++) {
            int64_t other = AS_L(0)[second], there = owner[other];
            if (there == here || AS_L(5)[there] != AS_L(5)[here]) continue;
            int64_t gain = prices[one * ranks + here] + prices[other * ranks + there] - prices[one * ranks + there] -
                           prices[other * ranks + here];
            if (!((double)gain > arguments[7].value) || (found == most && gain <= gains[most - 1])) continue;
            double grown = AS_D(3)[other] - AS_D(3)[one], full = arguments[6].value;
            if (AS_D(4)[here] > full) full = AS_D(4)[here];
            if (AS_D(4)[there] > full) full = AS_D(4)[there];
            if (AS_D(4)[here] + grown <= full && AS_D(4)[there] - grown <= full)
                found = insert(gain, one, other, gains, AS_L(8), found, most);
        }
    }
    *AS_L(9) = found;
    free(gains);
    return gains;
}

static bool pairs_fit(const Argument *arguments) {
    bool ok = expect(COUNT(4) > 0 && COUNT(2) == COUNT(1) * COUNT(4) && COUNT(3) == COUNT(1) && COUNT(5) == COUNT(4) &&
                         COUNT(8) > 0 && COUNT(8) % 2 == 0 && COUNT(9) == 1,
                     "tokens_pairs: arrays differ in length") &&
              all_below(AS_L(0), COUNT(0), COUNT(1), "tokens_pairs: no such expert") &&
              all_between(-1, AS_L(1), COUNT(1), COUNT(4), "tokens_pairs: no such rank");
    for (int64_t at = 0; ok && at < COUNT(0); at++)
        ok = expect(AS_L(1)[AS_L(0)[at]] >= 0, "tokens_pairs: an expert without a rank");
    return ok;
}

KERNEL(tokens_pairs) {
    RUN("lllddlxxLL", pairs_fit(arguments), ok = find_pairs(arguments), true);
}
