/* Sets of experts dealt to nodes, one set of a layer after the other (full_placement.py). */
#include "kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* spread_sets(sets [layers, ranks, slots], their shared loads, the order of a layer's sets, ranks of each node, experts,
   layers; written: node of each set [layers, ranks]) */
static bool deal(const Argument *arguments, bool *legal) {
    int64_t layers = COUNT(5), experts = COUNT(4), nodes = COUNT(3), ranks = COUNT(2) / layers;
    int64_t per = COUNT(0) / COUNT(2);
    int64_t *room = malloc((size_t)nodes * sizeof *room + (size_t)per * sizeof(double));
    uint8_t *there = malloc((size_t)(nodes * (experts + 1)));
    double *parts = (double *)(room + nodes);
    bool enough = room && there;
    for (int64_t layer = 0; enough && layer < layers && *legal; layer++) {
        memcpy(room, AS_L(3), (size_t)nodes * sizeof *room);
        memset(there, 0, (size_t)(nodes * (experts + 1)));
        for (int64_t nth = 0; nth < ranks && *legal; nth++) {
            int64_t of = layer * ranks + AS_L(2)[layer * ranks + nth], home = -1;
            const int16_t *set = AS_H(0) + of * per;
            double least = INFINITY;
            for (int64_t slot = 0; slot < per; slot++) *legal &= set[slot] >= EMPTY && set[slot] < experts;
            for (int64_t node = 0; node < nodes && *legal; node++) {
                if (room[node] <= 0) continue;
                /* EMPTY is -1: every node's row begins with a place for it, and it shares no load. */
                for (int64_t slot = 0; slot < per; slot++)
                    parts[slot] = there[node * (experts + 1) + 1 + set[slot]] ? AS_D(1)[of * per + slot] : 0.0;
                double overlap = add_row(parts, per);
                if (overlap < least) least = overlap, home = node;
            }
            *legal &= home >= 0;
            if (!*legal) break;
            AS_L(6)[of] = home;
            room[home]--;
            for (int64_t slot = 0; slot < per; slot++) there[home * (experts + 1) + 1 + set[slot]] = 1;
        }
    }
    free(room);
    free(there);
    return enough;
}

static bool fits(const Argument *arguments) {
    int64_t layers = COUNT(5), sets = COUNT(2), ranks = layers > 0 ? sets / layers : 0;
    return expect(ranks > 0 && sets == layers * ranks && COUNT(0) > 0 && COUNT(0) % sets == 0 && COUNT(1) == COUNT(0) &&
                      COUNT(3) > 0 && COUNT(4) > 0 && COUNT(6) == sets,
                  "spread_sets: arrays differ in length") &&
           all_below(AS_L(2), sets, ranks, "spread_sets: no such set");
}

KERNEL(spread_sets) {
    bool legal = true;
    RUN("hdllnnL", fits(arguments), ok = deal(arguments, &legal),
        expect(legal, "spread_sets: no such expert, or no room for a set"));
}
