"""Exchange experts between ranks so that sampled tokens are sent to fewer of them. Pure.

A token is sent once to every other rank that serves any of its k experts. So a placement must suit not only
which experts a rank's requests need, but which of them one token needs together, and local pairs do not show
that. Here sampled tokens are counted as they are (`migration.model.sampled_traffic`).

Local search in one layer at a time. An expert's price on a rank is the number of tokens that would be sent
there for it alone, given where their other experts are. The exchange with the largest difference of prices is
tried first and is kept if all tokens together confirm it.
"""

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import BoolArray, FloatArray, IntArray, SlotTable
from migration import kernels
from migration.model.sampled_traffic import SampledTokens, pairs_served, sent
from migration.solvers.load_cap import held_of
from migration.solvers.locality_placement import LocalityProblem

LEAST = 1e-3
"""Destinations per token of a layer that an exchange must save: it copies two experts."""
_ROUNDS = 16
"""Rounds of a layer at most: they bound the time of a plan, and the next one continues from its placement."""
_TOGETHER = 32
"""Experts of a layer for one exchange of a round: experts that are exchanged in the same round are mostly not
needed by the same tokens."""
_TRIED, _BEST = 8, 64
"""Exchanges that are tried in a round one by one, and those from which several at once are chosen."""
_CELLS = 1 << 18
"""tokens x k x ranks that are examined at once, but at least _FEW tokens. Where there are more, a part of the
tokens is taken."""
_FEW = 512
_PLAN_ROUNDS = 7500
"""Rounds of a plan, times its layers and ranks. Large fleets have fewer: few experts a rank leave little to
bring together."""


def exchanged(
    table: SlotTable,
    tokens: SampledTokens,
    judged: SampledTokens,
    load: FloatArray,
    room: LocalityProblem,
) -> SlotTable:
    """Return the table after exchanges that send the tokens to fewer ranks.

    Only experts without replicas are exchanged, and only between ranks of one node. judged: other tokens; a
    layer stays as it is unless they are sent to fewer ranks as well. load: [layers, experts] pairs. No
    exchange makes the fullest rank of a layer fuller than `room.balance` allows.
    """
    fitted = tokens.thinned(max(_FEW, _CELLS // (tokens.top_k * room.ranks)))
    rounds = max(1, min(_ROUNDS, _PLAN_ROUNDS // (len(table) * room.ranks)))
    held = held_of(table, room.ranks, load.shape[1])
    owner, better = _searched(held, fitted, judged, load, room, rounds)
    slot_rank = np.arange(table.shape[1]) * room.ranks // table.shape[1]
    found = table.copy()
    for layer in np.flatnonzero(better).tolist():
        found[layer] = _with_owners(table[layer], slot_rank, owner[layer])
    return found


def _searched(
    held: BoolArray,
    tokens: SampledTokens,
    judged: SampledTokens,
    load: FloatArray,
    room: LocalityProblem,
    rounds: int,
) -> tuple[IntArray, BoolArray]:
    """Return the rank that holds each expert after the search, int64 [layers, experts], -1 for an expert with
    replicas; and whether the other tokens are sent to fewer ranks, bool [layers].

    held: [layers, ranks, experts]; it may change.
    """
    owner, better = np.empty(load.shape, np.int64), np.empty(len(load), bool)
    library = kernels.compiled()
    if library is not None and held.size:
        library.tokens_exchanged(
            held,
            tokens.by_layer,
            kernels.plain(tokens.homes),
            judged.by_layer,
            kernels.plain(judged.homes),
            kernels.plain(load),
            kernels.plain(room.node),
            room.balance,
            LEAST,
            rounds,
            _TRIED,
            _BEST,
            load.shape[1] // _TOGETHER,
            owner,
            better,
        )
        return owner, better
    for layer, (experts, others) in enumerate(zip(tokens.by_layer, judged.by_layer, strict=True)):
        owner[layer], after = _searched_layer(held[layer], experts, tokens.homes, load[layer], room, rounds)
        better[layer] = sent(after, others, judged.homes)[1] < sent(held[layer], others, judged.homes)[1]
    return owner, better


def _prices(experts: IntArray, served: IntArray, homes: IntArray, shape: tuple[int, int]) -> IntArray:
    """int64 [experts, ranks]: tokens that are sent to a rank for this expert alone, if it is there."""
    width, ranks = shape
    counts = pairs_served(served, ranks)
    others = counts[:, None, :] - (served[:, :, None] == np.arange(ranks))
    alone = others == 0
    alone[np.arange(len(homes)), :, homes] = False
    places = experts[:, :, None] * ranks + np.arange(ranks)
    return np.bincount(places[alone], minlength=width * ranks).reshape(width, ranks)


def _searched_layer(
    held: BoolArray,
    experts: IntArray,
    homes: IntArray,
    load: FloatArray,
    room: LocalityProblem,
    rounds: int,
) -> tuple[IntArray, BoolArray]:
    """Return the rank that holds each expert after the search, int64 [experts], -1 for an expert with
    replicas; and the ranks that hold each, bool [ranks, experts].
    """
    single = held.sum(axis=0) == 1
    owner = np.where(single, held.argmax(axis=0), -1)
    held, shape = held.copy(), (held.shape[1], held.shape[0])
    served, reached = sent(held, experts, homes)
    for _ in range(rounds):
        pairs = _best_pairs(_prices(experts, served, homes, shape), owner, held, load, room, len(homes))
        # Several at once where experts are many; if they do not help together, one alone.
        several = _apart(pairs, owner, shape[0] // _TOGETHER)
        for some in ([several] if len(several) > 1 else []) + [[pair] for pair in pairs[:_TRIED]]:
            tried, moved = held.copy(), owner.copy()
            for one, other in some:
                tried[[owner[one], owner[other]], [one, other]] = False
                tried[[owner[one], owner[other]], [other, one]] = True
                moved[one], moved[other] = owner[other], owner[one]
            now, after = sent(tried, experts, homes)
            if after <= reached - LEAST:
                held, owner, served, reached = tried, moved, now, after
                break
        else:
            break
    return owner, held


def _apart(pairs: list[tuple[int, int]], owner: IntArray, most: int) -> list[tuple[int, int]]:
    """Return the best exchanges between different ranks, so that they keep to the load together."""
    found: list[tuple[int, int]] = []
    used: set[int] = set()
    for one, other in pairs:
        ranks = {int(owner[one]), int(owner[other])}
        if len(found) < most and not ranks & used:
            used |= ranks
            found.append((one, other))
    return found


def _best_pairs(
    prices: IntArray, owner: IntArray, held: BoolArray, load: FloatArray, room: LocalityProblem, tokens: int
) -> list[tuple[int, int]]:
    """Return the exchanges that save most by their prices, best first."""
    single = np.flatnonzero(owner >= 0)
    part = load / np.maximum(held.sum(axis=0), 1)
    loads = (held * part).sum(axis=1)
    most = float(loads.mean()) / room.balance
    at = owner[single]
    here, there = prices[single, at], prices[single][:, at]
    saved = here[:, None] + here - there - there.T
    grown = part[single] - part[single][:, None]  # of the first expert's rank
    full = np.maximum(most, np.maximum(loads[at][:, None], loads[at]))
    allowed = (loads[at][:, None] + grown <= full) & (loads[at] - grown <= full)
    allowed &= (at[:, None] != at) & (room.node[at][:, None] == room.node[at])
    gain = np.where(np.triu(allowed, 1), saved, 0)
    first, second = np.nonzero(gain > LEAST * tokens)
    order = np.argsort(-gain[first, second], kind="stable")[:_BEST]
    return list(zip(single[first[order]].tolist(), single[second[order]].tolist(), strict=True))


def _with_owners(row: NDArray[np.int16], rank: IntArray, owner: IntArray) -> NDArray[np.int16]:
    """Return the slots of a layer with experts on their new ranks. A slot whose expert stays is unchanged."""
    new = row.copy()
    leaving = np.flatnonzero((row >= 0) & (owner[row] >= 0) & (owner[row] != rank))
    # Exchanges keep the number of experts of a rank: what leaves makes room for what comes.
    coming = leaving[np.argsort(owner[row[leaving]], kind="stable")]
    new[leaving[np.argsort(rank[leaving], kind="stable")]] = row[coming]
    return new
